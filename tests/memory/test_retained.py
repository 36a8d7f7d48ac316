"""Old checkpoints go once the newer one is published, which does not wait for it."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.errors import StoreError
from shardwise.manifest.names import MANIFEST, step_directory
from shardwise.memory.agent import duties
from shardwise.memory.agent.duties import Leading
from shardwise.memory.node import notes
from shardwise.memory.node.home import Home, new_run, write_note
from shardwise.memory.node.notes import Card, Done, Draft
from shardwise.memory.node.place import Place
from shardwise.memory.node.retire import retire
from shardwise.store.local import LocalStore
from tests.memory.test_snapshots import shm

__all__ = ["shm"]
SAVE = "0" * 16


def checkpointer(root: Path, shm: Path) -> sw.Checkpointer:
    """One that keeps the newest only."""
    memory = sw.Memory(dir=str(shm), wait=10.0)
    return sw.Checkpointer(root, keep=sw.Keep(last=1), memory=memory)


def test_old_checkpoints_are_gone_when_the_run_is_closed(tmp_path: Path, shm: Path) -> None:
    root = tmp_path / "root"
    with checkpointer(root, shm) as cp:
        for step in (1, 2, 3):
            handle = cp.save(step, {"t": step})
            assert handle is not None
            handle.result(20.0)
            assert cp.latest() == step
    assert [each.name for each in root.glob("step-*")] == [step_directory(3)]


def test_old_checkpoints_that_cannot_go_fail_the_next_save_and_not_the_one_that_is_published(
    tmp_path: Path, shm: Path
) -> None:
    root = tmp_path / "root"
    cp = checkpointer(root, shm)
    (root / step_directory(0) / MANIFEST).mkdir(parents=True)  # is no file that can be deleted
    handle = cp.save(1, {"t": 1})
    assert handle is not None
    handle.result(20.0)
    deadline = time.monotonic() + 20
    while not list(shm.glob("**/retain-all-*.json")):
        assert time.monotonic() < deadline, "nobody told"
        time.sleep(0.01)
    with pytest.raises(StoreError, match="step 1: retain: IsADirectoryError"):
        cp.save(2, {"t": 2})
    cp.close(wait=False)
    target = {"t": 0}
    sw.load(root / step_directory(1), target)
    assert target == {"t": 1}


def test_publishing_does_not_wait_for_old_checkpoints(tmp_path: Path, shm: Path) -> None:
    root = tmp_path / "root"
    cp = checkpointer(root, shm)
    first = cp.save(1, {"t": 1})
    assert first is not None
    first.result(20.0)
    with LocalStore(root / step_directory(1)).hold(MANIFEST, shared=True):
        second = cp.save(2, {"t": 2})
        assert second is not None
        second.result(20.0)
        cp.close()
    assert cp.steps() == [1, 2]  # one that is read stays until the next time


def test_old_checkpoints_that_cannot_go_are_told_of_when_the_run_is_closed(
    tmp_path: Path, shm: Path
) -> None:
    root = tmp_path / "root"
    (root / step_directory(0) / MANIFEST).mkdir(parents=True)  # is no file that can be deleted
    cp = checkpointer(root, shm)
    cp.save(1, {"t": 1})
    with pytest.raises(StoreError, match="step 1: retain: IsADirectoryError"):
        cp.close()
    assert cp.steps() == [0, 1]
    assert not list(shm.glob("**/*.slot"))


def persisted(tmp_path: Path, keep: sw.Keep, *, by: str, failure: str = "") -> Place:
    """Step 2, as a node persisted it; step 1 is in storage as well."""
    root = tmp_path / "root"
    for step in (1, 2):
        sw.save(root / step_directory(step), {"t": step})
    place = Place(Home(tmp_path / "home").run(new_run()), 2)
    place.path.mkdir(parents=True)
    draft = Draft(
        save_id=SAVE,
        step=2,
        manifest="",
        files=[],
        nodes=[Card("here", "", "")],
        leader="here",
        root=str(root),
        keep=asdict(keep),
    )
    write_note(place.path / notes.draft(SAVE), draft)
    done = Done(save_id=SAVE, stage="persist", node=by, failure=failure)
    write_note(place.path / notes.outcome("persist", SAVE), done)
    return place


@pytest.mark.parametrize(
    ("keep", "by", "failure", "removed"),
    [
        (sw.Keep(last=1), "here", "", True),
        (sw.Keep(last=1), "elsewhere", "", False),
        (sw.Keep(last=1), "here", "the disk is full", False),
        (sw.Keep(), "here", "", False),
    ],
)
def test_the_node_that_persisted_a_checkpoint_removes_older_ones(
    tmp_path: Path, keep: sw.Keep, by: str, failure: str, removed: bool
) -> None:
    place = persisted(tmp_path, keep, by=by, failure=failure)
    assert Leading("here").retain(place) == removed
    assert (place.ended(notes.RETAIN, SAVE) is not None) == removed
    assert (tmp_path / "root" / step_directory(1)).exists() != removed
    assert not Leading("here").retain(place)


def test_a_snapshot_may_be_retired_while_older_checkpoints_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A storage that is slow to remove holds no memory."""
    place = persisted(tmp_path, sw.Keep(last=1), by="here")
    begun, retired = threading.Event(), threading.Event()

    def slow(_: Draft) -> int:
        begun.set()
        return int(retired.wait(20.0))

    monkeypatch.setattr(duties, "retain", slow)
    removing = threading.Thread(target=Leading("here").retain, args=(place,))
    removing.start()
    assert begun.wait(20.0)
    assert retire(place, 0.0)
    retired.set()
    removing.join(20.0)
    assert not removing.is_alive()
