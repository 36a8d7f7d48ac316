"""The metrics of an agent, as Prometheus reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.parts.memory.agent.metrics import read_metrics
from shardwise.parts.memory.home import Home
from shardwise.parts.memory.identity import METRICS_SCOPE, make_run_token
from shardwise.parts.memory.progress import make_watcher
from shardwise.parts.memory.rank_liveness import RankLock
from tests.cli.test_agent import home
from tests.memory.test_server import FILE, RUN, TOKEN, serve

__all__ = ["home"]
parser = pytest.importorskip("prometheus_client.parser", reason="pip install '.[test]'")


def samples_of(text: str) -> dict[tuple[str, ...], float]:
    """The value of each metric, by its name and the values of its labels, but the run."""
    found = {}
    for family in parser.text_string_to_metric_families(text):
        assert family.type == "gauge"
        assert family.documentation
        for sample in family.samples:
            labels = [value for key, value in sample.labels.items() if key != "run"]
            found[(sample.name, *labels)] = sample.value
    return found


def test_the_state_of_a_node(home: Home) -> None:
    lock = RankLock(home.runs()[0], 0)
    make_watcher(lock, "save", 4)("write", True)
    found = samples_of(read_metrics(home))
    assert found["shardwise_run_training",] == 1
    assert found["shardwise_run_slots", "used"] == 3
    assert found["shardwise_run_slots", "free"] == 1
    assert found["shardwise_stage_step", "commit"] == 2
    assert found["shardwise_stage_lag_steps", "persist"] == 2
    assert found["shardwise_stage_failures", "persist"] == 1
    assert found["shardwise_stage_seconds", "commit"] == pytest.approx(5, abs=2)
    assert found["shardwise_ranks", "save", "write", "true"] == 1
    make_watcher(lock, "save", 4)("", False)
    found = samples_of(read_metrics(home))
    assert found["shardwise_ranks", "training", "", "false"] == 1
    assert found["shardwise_free_bytes",] > 0


def test_an_empty_node(tmp_path: Path) -> None:
    names = {name for name, *_ in samples_of(read_metrics(Home(tmp_path)))}
    assert names == {"shardwise_free_bytes", "shardwise_agent_memory_bytes"}


def test_its_own_token_reads_metrics_only(tmp_path: Path) -> None:
    home = Home(tmp_path)
    token = make_run_token(TOKEN, METRICS_SCOPE)
    with serve(home.path, metrics=lambda: read_metrics(home)) as served:
        status, body, headers = served.ask("GET", "/metrics", token=token)
        assert status == 200
        assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert samples_of(body.decode())["shardwise_free_bytes",] > 0
        assert served.ask("GET", "/metrics")[0] == 200
        refused = [
            served.ask("GET", "/metrics", token=None),
            served.ask("GET", "/metrics", token=make_run_token(TOKEN, RUN)),
            served.ask("PUT", "/metrics", b"", token=None),
            *(served.ask("GET", path, token=token) for path in ("/health", FILE, f"/runs/{RUN}")),
        ]
        assert {status for status, *_ in refused} == {401}


def test_labels_are_escaped(tmp_path: Path) -> None:
    from shardwise.parts.memory.agent.metrics import _format, _Sample

    text = _format([_Sample("mirror_step", 3, (("mirror", 'a"b\\c\nd'),))])
    (family,) = parser.text_string_to_metric_families(text)
    assert family.samples[0].labels == {"mirror": 'a"b\\c\nd'}
