"""The agent's loop: what it does once, tries again, ever later, and logs ever more rarely."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.kernel.errors import StoreError, StoreUnavailableError
from shardwise.kernel.manifest.manifest import MANIFEST, FileEntry, decode_manifest, step_directory
from shardwise.kernel.store import LocalStore
from shardwise.parts.lineage import read_or_create_lineage, resume_from
from shardwise.parts.memory import records
from shardwise.parts.memory.agent.actions import Follower, try_stage
from shardwise.parts.memory.agent.agent import Agent, Retries
from shardwise.parts.memory.agent.lead import Leader
from shardwise.parts.memory.agent.process import release_free_memory
from shardwise.parts.memory.decide import Action
from shardwise.parts.memory.files import write_record
from shardwise.parts.memory.home import Home, Run, SnapshotDirectory
from shardwise.parts.memory.observe import Observer
from shardwise.parts.memory.records import (
    AgentInfo,
    PendingManifest,
    RankPart,
    Retry,
    SaveState,
    StageOutcome,
)
from shardwise.parts.memory.seal import MappedFiles
from shardwise.parts.memory.states import SaveStates, read_state
from shardwise.parts.memory.times import DAY
from shardwise.parts.tiers.options import StorageTask
from tests.soak.steadiness import anonymous

SAVE = "0" * 16
FILE = f"r00000-{SAVE}.safetensors"
ENTRY = FileEntry(FILE, 0, 0, 0, 0, 0, 0)


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """All that is logged."""
    caplog.set_level(logging.INFO)
    return caplog


@pytest.fixture
def place(tmp_path: Path) -> SnapshotDirectory:
    """A snapshot with a file that is to be sealed."""
    place = SnapshotDirectory(Home(tmp_path).run("0" * 16), 3, SAVE)
    place.path.mkdir(parents=True)
    part = RankPart(file=ENTRY, snapshots_to_keep=2, stages=(), epoch=0)
    write_record(place.path / records.rank_record(0), part)
    (place.path / FILE).touch()
    return place


def record_checksums(place: SnapshotDirectory) -> None:
    """Record that the file is sealed."""
    SaveStates().change(place, lambda _: SaveState(entries={FILE: ENTRY}))


def is_sealed(place: SnapshotDirectory) -> bool:
    """Whether the file is sealed."""
    return FILE in read_state(place).entries


class Trial:
    """An agent whose only action fails as the test says; time passes as the test says."""

    def __init__(self, place: SnapshotDirectory, error: Exception | None = None) -> None:
        self.now = 1000.0
        self.error = error
        self.times = 0
        self._place = place
        observer = Observer(Home(place.run.path.parents[2]), "here", clock=lambda: self.now)
        self.agent = Agent(observer, {"seal": self._seal})

    def _seal(self, _: Action) -> None:
        self.times += 1
        if self.error is not None:
            raise self.error

    def round(self) -> list[bool]:
        """Look, and do what is due."""
        due = self.agent.due_actions()
        return [self.agent.perform(action) for action in due if action.kind == "seal"]


def test_what_fails_again_and_again_is_tried_ever_later_and_logged_ever_more_rarely(
    place: SnapshotDirectory, logged: pytest.LogCaptureFixture
) -> None:
    trial = Trial(place, ValueError("no"))
    for _ in range(7200):
        assert trial.round() in ([], [False])
        trial.now += 0.5
    assert 60 < trial.times < 75
    assert logged.text.count("Traceback") == 1
    assert [each.levelname for each in logged.records] == ["ERROR"] * 7
    assert "ValueError: no (failed 64 times)" in logged.text
    trial.error = None
    trial.now += 60.0
    assert trial.round() == [True]


def test_what_fails_once_is_tried_again_at_once(place: SnapshotDirectory) -> None:
    trial = Trial(place, ValueError("no"))
    assert trial.round() == [False]
    trial.error = None
    assert trial.round() == [True]


def test_what_succeeds_and_is_still_decided_on_is_not_done_all_the_time(
    place: SnapshotDirectory,
) -> None:
    trial = Trial(place)
    for _ in range(1000):
        trial.round()
        trial.now += 0.001
    assert trial.times <= 3


def test_the_same_failure_of_many_snapshots_has_one_traceback(
    place: SnapshotDirectory, logged: pytest.LogCaptureFixture
) -> None:
    retries = Retries(lambda: 1000.0)
    for step in range(100):
        each = SnapshotDirectory(place.run, step, SAVE)
        each.path.mkdir(exist_ok=True)
        retries.record_failure(Action("commit", each), ValueError("no"))
    assert logged.text.count("Traceback") == 0  # it was never raised
    assert len(logged.records) == 7, logged.text
    retries.forget_all_except([Action("commit", place)])
    assert len(retries._actions) == 1


def test_races_with_removal_are_no_errors(
    place: SnapshotDirectory, logged: pytest.LogCaptureFixture
) -> None:
    retries = Retries(lambda: 1000.0)
    gone = SnapshotDirectory(place.run, 4, SAVE)
    retries.record_failure(Action("commit", gone), OSError("gone"))
    retries.record_failure(Action("commit", place), FileNotFoundError("manifest.json"))
    place.abandon()
    retries.record_failure(Action("commit", place), StoreError("is abandoned"))

    def refused() -> int:
        place.refuse_abandoned()
        return 1

    assert "is abandoned" in try_stage(SaveStates(), place, "persist", "here", refused).failure
    assert [each.levelname for each in logged.records] == ["INFO"] * 4


def test_a_stage_is_tried_again_while_the_storage_does_not_answer(place: SnapshotDirectory) -> None:
    states = SaveStates()

    def no_answer() -> int:
        raise StoreUnavailableError("no answer")

    for attempts in (1, 2):
        with pytest.raises(StoreUnavailableError):
            try_stage(states, place, "persist", "here", no_answer)
        retry = read_state(place).retries["persist"]
        assert (retry.attempts, retry.failure) == (attempts, "no answer")
    done = try_stage(states, place, "persist", "here", lambda: 7)
    assert (done.bytes, done.failure) == (7, "")
    states.end_part(place, "persist", done)
    assert read_state(place).retries == {}
    long_ago = time.time() - DAY - 1
    retry = Retry(failure="", since=long_ago, attempts=9)
    states.change(place, lambda _: SaveState(retries={"persist": retry}))
    done = try_stage(states, place, "persist", "here", no_answer)
    assert (done.bytes, done.failure) == (0, "StoreUnavailableError: no answer")
    states.end(place, {"persist": done})
    assert read_state(place).retries == {}


@pytest.mark.parametrize("resumed_from", [None, 3, 2])
def test_no_snapshot_is_persisted_of_a_step_that_the_run_has_left(
    tmp_path: Path, resumed_from: int | None
) -> None:
    """The run is resumed while the agent copies files; the snapshot is not abandoned yet."""
    sw.save(tmp_path / "made", {"t": torch.arange(9)}, step=3)
    manifest = (tmp_path / "made" / MANIFEST).read_bytes()
    made, root = decode_manifest(manifest), tmp_path / "root"
    stored = root / step_directory(3)
    stored.mkdir(parents=True)
    run = Home(tmp_path / "home").run(read_or_create_lineage(LocalStore(root)).run)
    place = SnapshotDirectory(run, 3, made.save_id)
    place.path.mkdir(parents=True)
    (place.path / MANIFEST).write_bytes(manifest)
    for file in made.files:
        shutil.copy(tmp_path / "made" / file.name, stored)
    pending = PendingManifest(
        save_id=made.save_id,
        step=3,
        manifest="",
        files=[(file.name, "node") for file in made.files],
        nodes=[AgentInfo("node", "", "")],
        leader="node",
        storage=StorageTask(root=str(root)),
    )
    write_record(place.path / records.PENDING, pending)
    follower = Follower("node", MappedFiles())
    follower.states.end(place, {"commit": StageOutcome(node="node")})
    follower.states.end_part(place, "persist", StageOutcome(node="node", bytes=1))
    if resumed_from is not None:
        resume_from(LocalStore(root), run.name, resumed_from)
    Leader(follower).perform(Action("persist", place))
    found = read_state(place).outcomes["persist"]
    assert (stored / MANIFEST).exists() == (resumed_from != 2)
    assert ("was resumed from an older step" in found.failure) == (resumed_from == 2)


@pytest.mark.parametrize("hit", ["00000000deadbeef", "ffffffffdeadbeef"])
def test_a_run_that_cannot_be_observed_keeps_no_other_waiting(
    tmp_path: Path, place: SnapshotDirectory, logged: pytest.LogCaptureFixture, hit: str
) -> None:
    run = Home(tmp_path).run(hit)
    shutil.copytree(place.path, run.path / place.name)
    (run.path / place.name / "rank-none.json").touch()
    trial = Trial(place)
    for _ in range(100):
        trial.round()
        trial.now += 1.0
    assert trial.times > 3
    assert logged.text.count("Traceback") == 1
    assert f"observe: {run.path}: ValueError" in logged.text
    assert len(logged.records) == 7, logged.text


def test_a_run_whose_action_takes_long_keeps_no_other_waiting(
    tmp_path: Path, place: SnapshotDirectory
) -> None:
    other = SnapshotDirectory(Home(tmp_path).run("1" * 16), 3, SAVE)
    shutil.copytree(place.path, other.path)
    begun: list[Run] = []
    release = threading.Event()

    def seal(action: Action) -> None:
        begun.append(action.place.run)
        release.wait(20.0)
        record_checksums(action.place)

    agent = Agent(Observer(Home(tmp_path), "here"), {"seal": seal})
    agent.start()
    until(lambda: len(begun) == 2)
    release.set()
    until(lambda: is_sealed(place))
    until(lambda: is_sealed(other))
    assert agent.stop(20.0)
    assert sorted(run.name for run in begun) == [place.run.name, other.run.name]


def test_a_file_that_stays_away_is_an_error(
    place: SnapshotDirectory, logged: pytest.LogCaptureFixture
) -> None:
    trial = Trial(place, FileNotFoundError("data"))
    trial.round()
    trial.now += 1.0
    trial.round()
    assert [each.levelname for each in logged.records] == ["INFO", "ERROR"]


def test_a_snapshot_that_others_hold_is_left_alone_and_no_error(
    place: SnapshotDirectory, logged: pytest.LogCaptureFixture
) -> None:
    trial = Trial(place)
    with place.hold(shared=False) as held:
        assert held
        assert trial.round() == [False]
    assert trial.times == 0
    assert trial.round() == [True]
    assert trial.times == 1
    assert not logged.records


def test_what_was_done_meanwhile_is_not_done_again(place: SnapshotDirectory) -> None:
    trial = Trial(place)
    (action,) = trial.agent.due_actions()
    record_checksums(place)
    assert trial.agent.perform(action)
    assert trial.times == 0
    assert not trial.agent.due_actions()


def test_what_is_abandoned_between_the_decision_and_the_lock_is_left_alone(
    place: SnapshotDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent was stopped meanwhile. A restore no longer waits for it, as nobody had the lock."""
    trial, hold = Trial(place), SnapshotDirectory.hold

    def abandon_and_hold(self: SnapshotDirectory, **options: bool) -> Any:
        self.abandon()
        return hold(self, **options)

    monkeypatch.setattr(SnapshotDirectory, "hold", abandon_and_hold)
    assert trial.round() == [False]
    assert trial.times == 0


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_an_action_that_runs_is_not_begun_again(tmp_path: Path, place: SnapshotDirectory) -> None:
    begun: list[Action] = []
    release = threading.Event()

    def seal(action: Action) -> None:
        begun.append(action)
        release.wait(20.0)
        record_checksums(place)

    agent = Agent(Observer(Home(tmp_path), "here"), {"seal": seal})
    agent.start()
    for _ in range(20):
        agent.wake()
        time.sleep(0.005)
    until(lambda: begun)
    release.set()
    until(lambda: is_sealed(place))
    agent.wake()
    assert agent.stop(20.0)
    assert len(begun) == 1


def test_freed_memory_returns_to_the_system() -> None:
    """A block that is still in use keeps the C library from returning those before it."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    blocks = [ctypes.c_void_p(libc.malloc(100_000)) for _ in range(600)]
    for block in blocks:
        ctypes.memset(block, 1, 100_000)
    for block in blocks[:-1]:
        libc.free(block)
    before = anonymous(os.getpid())
    release_free_memory()
    assert anonymous(os.getpid()) < before - 40
    libc.free(blocks[-1])
