"""Which checkpoints the rules of `Keep` keep."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import asdict
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise.kernel.engine.root import CheckpointInfo, Root
from shardwise.kernel.errors import StoreUnavailableError
from shardwise.kernel.manifest.manifest import (
    MANIFEST,
    decode_manifest,
    encode_manifest,
    step_directory,
)
from shardwise.kernel.store import LocalStore
from shardwise.parts.retention import apply_retention

HOUR = 3600.0


def at_hours(*hours: float | None) -> dict[int, CheckpointInfo]:
    """Steps 1, 2, … saved at these hours."""
    return {
        step: CheckpointInfo(None if hour is None else hour * HOUR)
        for step, hour in enumerate(hours, start=1)
    }


@pytest.mark.parametrize(
    ("keep", "hours", "kept"),
    [
        (sw.Keep(latest_for="2h"), (0, 1, 2, 3, 4), {3, 4, 5}),
        (sw.Keep(latest_for=timedelta(minutes=30)), (0, 1, 2), {3}),
        (sw.Keep(latest_for="90m"), (0, None, 5), {2, 3}),  # unknown age: kept
        (sw.Keep(latest_for="1h", last=2), (0, 10, 20), {2, 3}),
        (sw.Keep(every_time="1h"), (0, 0.5, 1, 1.5, 2.25, 3), {1, 3, 5, 6}),
        (sw.Keep(every_time="3600s"), (0, 0.5, 1, 1.5, 2.25, 3), {1, 3, 5, 6}),
        (sw.Keep(every_time="1d", latest_for="30m"), (0, 5, 23, 24.5, 25), {1, 4, 5}),
        (sw.Keep(every_time="1h"), (5, 1, 2), {1, 2, 3}),  # the clock was set back
    ],
)
def test_rules_of_time(keep: sw.Keep, hours: tuple[float | None, ...], kept: set[int]) -> None:
    steps = at_hours(*hours)
    assert keep.steps_to_keep(steps) == kept
    assert keep.steps_to_keep({step: steps[step] for step in kept}) == kept  # so does the next save


def test_equal_values_keep_the_newer_and_n_counts() -> None:
    losses = {1: 2.0, 2: 1.0, 3: None, 4: 1.0, 5: 3.0}
    steps = {step: CheckpointInfo(metrics={"loss": loss}) for step, loss in losses.items()}
    assert sw.Keep(best=sw.Best("loss")).steps_to_keep(steps) == {4, 5}
    assert sw.Keep(best=sw.Best("loss", n=3)).steps_to_keep(steps) == {1, 2, 4, 5}
    assert sw.Keep(best=sw.Best("loss", mode="max", n=2)).steps_to_keep(steps) == {1, 5}


def test_rules_survive_their_way_to_an_agent() -> None:
    keep = sw.Keep(
        last=np.int64(3),  # type: ignore[arg-type]
        best=sw.Best("loss", mode="max", n=2),
        latest_for=timedelta(minutes=2),
        every_time="1.5h",
    )
    assert sw.Keep.decode(json.loads(msgspec.json.encode(asdict(keep)))) == keep
    assert keep.latest_for == "120.0s"
    assert keep.every_time == "5400.0s"


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"last": 0}, ValueError, "at least 1"),
        ({"last": 2.5}, TypeError, "expected an integer"),
        ({"last": True}, TypeError, "expected an integer"),
        ({"best": "loss"}, TypeError, r'sw\.Best\("loss"'),
        ({"latest_for": "2 weeks"}, ValueError, "'2h'"),
        ({"latest_for": "0s"}, ValueError, "longer than 0"),
        ({"every_time": timedelta(0)}, ValueError, "longer than 0"),
        ({"every_time": 60}, TypeError, "'2h'"),
    ],
)
def test_wrong_rules_are_refused(wrong: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        sw.Keep(**wrong)
    with pytest.raises(ValueError, match="'min' or 'max'"):
        sw.Best("loss", mode="least")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1"):
        sw.Best("loss", n=0)


def test_the_times_are_those_of_the_manifests(tmp_path: Path) -> None:
    root = Root(LocalStore(tmp_path))
    for step, hour in ((1, 0), (2, 1), (3, 2), (4, 4)):
        sw.save(tmp_path / step_directory(step), {"t": step}, step=step)
        path = tmp_path / step_directory(step) / MANIFEST
        created = datetime(2026, 1, 1, hour, tzinfo=timezone.utc).isoformat(timespec="seconds")
        manifest = msgspec.structs.replace(decode_manifest(path.read_bytes()), created=created)
        path.write_bytes(encode_manifest(manifest))
    keep = sw.Keep(latest_for="150m")
    assert apply_retention(root, keep, newest=4, damaged=frozenset()) == [1, 2]
    assert root.steps() == [3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == [step_directory(s) for s in (3, 4)]


@pytest.mark.parametrize("kind", ["directory", "pipe"])
def test_what_has_no_file_as_manifest_is_neither_removed_nor_restored(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = tmp_path / step_directory(2) / MANIFEST
    keep = sw.Keep(last=1, best=sw.Best("loss"))
    with sw.Checkpointer(tmp_path, memory=None, keep=keep) as checkpointer:
        checkpointer.save(1, {"a": torch.ones(2)}, metrics={"loss": 1.0})
        checkpointer.save(2, {"a": torch.ones(2)}, metrics={"loss": 2.0})
        manifest.unlink()
        os.mkfifo(manifest) if kind == "pipe" else manifest.mkdir()
        checkpointer.save(3, {"a": torch.ones(2)}, metrics={"loss": 3.0})
    assert f"{manifest} is not a regular file" in caplog.text
    assert Root(LocalStore(tmp_path)).steps() == [1, 2, 3]
    (tmp_path / step_directory(3) / MANIFEST).unlink()
    with sw.Checkpointer(tmp_path, memory=None) as checkpointer:
        assert checkpointer.restore({"a": torch.ones(2)}) == 1
        assert checkpointer.last_restore is not None
        ((step, reason),) = checkpointer.last_restore.skipped
    assert step == 2
    assert "not a regular file" in reason


def test_a_checkpoint_whose_metrics_cannot_be_read_now_is_neither_removed_nor_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an outage, the best checkpoint would otherwise be removed as one without metrics."""
    with sw.Checkpointer(tmp_path, memory=None) as checkpointer:
        for step, loss in ((1, 0.5), (2, 2.0), (3, 1.0)):
            checkpointer.save(step, {"a": torch.ones(2)}, metrics={"loss": loss})
    root, read = Root(LocalStore(tmp_path)), LocalStore.read
    keep = sw.Keep(last=1, best=sw.Best("loss"))

    def fail_at_step_1(store: LocalStore, key: str, *, limit: int) -> bytes:
        if store.path.name == step_directory(1):
            raise error
        return read(store, key, limit=limit)

    for error in (StoreUnavailableError("no answer"), PermissionError(errno.EACCES, "expired")):
        with monkeypatch.context() as outage:
            outage.setattr(LocalStore, "read", fail_at_step_1)
            with pytest.raises(type(error)):
                apply_retention(root, keep, newest=3, damaged=frozenset())
            with pytest.raises(type(error)):
                root.choose(sw.Best("loss"))
    assert root.steps() == [1, 2, 3]
    assert root.choose(sw.Best("loss")) == 1
    assert apply_retention(root, keep, newest=3, damaged=frozenset()) == [2]


steps = st.lists(st.integers(0, 50), min_size=1, unique=True)
positive = st.none() | st.integers(1, 5)


@given(steps, positive, positive, st.booleans())
def test_the_newest_is_always_kept(
    steps: list[int], last: int | None, every: int | None, best: bool
) -> None:
    metrics = {step: {"loss": float(step % 7)} for step in steps}
    known = {step: CheckpointInfo(metrics=each) for step, each in metrics.items()}
    keep = sw.Keep(last=last, multiple_of=every, best=sw.Best("loss") if best else None)
    kept = keep.steps_to_keep(known)
    assert max(steps) in kept
    assert kept <= set(steps)
    assert set(sorted(steps)[-(last or 1) :]) <= kept
    if every is not None:
        assert {step for step in steps if step % every == 0} <= kept
    if best:
        assert min(metrics[step]["loss"] for step in steps) in {
            metrics[step]["loss"] for step in kept
        }


@pytest.mark.parametrize("is_read", [False, True])
def test_a_checkpoint_that_is_removed_while_it_is_listed_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_read: bool
) -> None:
    for step in (1, 2):
        sw.save(tmp_path / step_directory(step), {"x": torch.ones(3)}, step=step)
    read = LocalStore.read

    def remove_first(self: LocalStore, key: str, *, limit: int) -> bytes:
        data = read(self, key, limit=limit) if is_read else b""
        if self.path.name == step_directory(1):
            shutil.rmtree(self.path)
        return data or read(self, key, limit=limit)

    monkeypatch.setattr(LocalStore, "read", remove_first)
    found = sw.list_checkpoints(tmp_path).checkpoints
    assert [(each.step, each.state) for each in found] == [(1, "removed"), (2, "committed")]
