"""Run hooks: the example of the page runs as a package, and the rules of the page hold."""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.ports.hooks import MakeHook
from shardwise.testing.hook_suite import HookSuite
from tests.tools.agents import NEEDS_AGENT
from tests.tools.gang import Gang

PAGE = Path(__file__).parents[2] / "docs" / "ports" / "hooks.md"
Events = list[dict[str, Any]]


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Events]:
    """What is posted to a log."""
    events: Events = []

    class Log(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            events.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Log) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("RUN_LOG", f"http://127.0.0.1:{server.server_port}/")
        yield events
        server.shutdown()


def install(folder: Path, name: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a module with an entry point of the group `shardwise.hooks`."""
    described = folder / f"{name}-1.0.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(f"[shardwise.hooks]\n{name} = {name}:make_hook\n")
    (folder / f"{name}.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of the page, installed as a package."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    install(tmp_path / "packages", "run_log", code, monkeypatch)


def state(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {"t": torch.full((9,), value)}


@pytest.mark.usefixtures("example")
@pytest.mark.parametrize("in_memory", [False, pytest.param(True, marks=NEEDS_AGENT)])
def test_the_example_of_the_page_posts_what_a_run_does(
    tmp_path: Path, posted: Events, in_memory: bool
) -> None:
    memory = sw.Memory(snapshot_every=0, slots=1, dir=str(tmp_path)) if in_memory else None
    root = tmp_path / "root"
    with sw.Checkpointer(root, memory=memory) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(float(step)))
    assert {each["run"] for each in posted} == {str(root)}
    said = [(each["event"], each.get("step")) for each in posted]
    assert said[0] == ("staged", 1)
    assert said.index(("saved", 1)) < said.index(("saved", 2)) < said.index(("closed", None))
    assert len(said) == 5
    posted.clear()
    checkpointer = sw.Checkpointer(root, memory=memory)
    assert checkpointer.restore(state()) == 2
    with pytest.raises(sw.CheckpointExistsError, match="exists"):
        checkpointer.save(2, state())
    checkpointer.close(wait=False)
    assert [each["event"] for each in posted] == ["restored", "failed", "closed"]
    assert (posted[0]["source"], posted[2]["completed"]) == ("storage", False)


class TestTheExample(HookSuite):
    @pytest.fixture
    def make_hook(self, example: None, posted: Events) -> MakeHook:
        import run_log  # type: ignore[import-not-found]

        return run_log.make_hook  # type: ignore[no-any-return]


FAILING = """
import shardwise as sw

class Failing(sw.RunHook):
    def __init__(self, run):
        self.rank = run.rank
    def staged(self, report, *, durable):
        if report.step == 1:
            raise OSError("the log is away")
        raise sw.StateError(f"rank {self.rank} is tired")

make_hook = Failing
"""


def save_twice(root: str) -> tuple[str, list[str]]:
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwise").addHandler(handler)
    try:
        with sw.Checkpointer(root, memory=None, save_at_end=False) as checkpointer:
            checkpointer.save(1, state())
            checkpointer.save(2, state())
    except sw.StateError as error:
        return str(error), logged
    finally:
        logging.getLogger("shardwise").removeHandler(handler)
    return "", logged


def install_and_save(root: str, folder: str) -> tuple[str, list[str]]:
    sys.path.insert(0, folder)
    try:
        return save_twice(root)
    finally:
        sys.path.remove(folder)


def test_an_error_of_shardwise_ends_the_call_and_any_other_is_logged(
    gang: Gang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "packages", "failing_hook", FAILING, monkeypatch)
    found = gang.run(install_and_save, str(tmp_path / "root"), str(tmp_path / "packages"), world=2)
    for rank, (error, logged) in enumerate(found):
        assert error == f"rank {rank} is tired"
        failed = next(each for each in logged if "the training continues" in each)
        assert failed.startswith("staged of the hook <failing_hook.Failing")
    assert sw.open(tmp_path / "root").step == 2, "the step was saved"


def test_a_hook_may_stay_out_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "packages", "absent_hook", "def make_hook(run): return None", monkeypatch)
    with sw.Checkpointer(tmp_path / "root", memory=None) as checkpointer:
        checkpointer.save(1, state())


def test_all_methods_of_a_hook_do_nothing_by_themselves(tmp_path: Path) -> None:
    class Test(HookSuite):
        pass

    assert isinstance(sw.Run(None, 0, 1), sw.Run)  # type: ignore[arg-type]
    Test().test_a_durable_step_may_come_late(sw.RunHook())
