"""How fast to copy beside a training, and agents that write while a rank still copies."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise.kernel.engine.tensors import HostMemory
from shardwise.kernel.errors import StoreError
from shardwise.kernel.manifest.manifest import FileEntry, data_file, step_directory
from shardwise.kernel.store import LocalStore, WritableFile
from shardwise.parts.memory import records
from shardwise.parts.memory.agent.actions import Follower
from shardwise.parts.memory.decide import Action
from shardwise.parts.memory.files import read_record, write_record
from shardwise.parts.memory.home import SnapshotDirectory
from shardwise.parts.memory.observe import copying_ranks, read_snapshot
from shardwise.parts.memory.rank_liveness import RankLock
from shardwise.parts.memory.reclaim import forget_copies
from shardwise.parts.memory.records import (
    AgentInfo,
    PendingManifest,
    RankPart,
)
from shardwise.parts.memory.remote.calls import StageCall
from shardwise.parts.memory.replies import Replies
from shardwise.parts.memory.seal import MappedFiles
from shardwise.parts.memory.trainer.copying import (
    SAVES_MEASURED,
    SLACK_SHARE,
    CopyProgress,
    Pace,
    Slack,
)
from shardwise.parts.memory.view import StageState
from shardwise.parts.tiers.copying import WRITE_THREADS, FileCopier
from shardwise.parts.tiers.options import StorageTask
from tests.memory.test_staging import BOUND, SIZE, Trial, content_of
from tests.memory.test_sweep import forked
from tests.tools.agents import until

SAVE = f"{1:016x}"
FILE = data_file(0, SAVE)
BUCKET = 4096
WAIT = 1.0


def run(total: int, bucket: int, target: float, seconds_a_byte: float) -> tuple[float, list[float]]:
    """Copy in buckets at a pace; when it is over, and when each bucket began."""
    now = [100.0]
    pace = Pace(total, target, lambda: now[0])
    began = []
    for at in range(0, total, bucket):
        nbytes = min(bucket, total - at)
        now[0] += pace.seconds_for(nbytes)
        began.append(now[0] - 100)
        now[0] += nbytes * seconds_a_byte
    return now[0] - 100, began


sizes = st.integers(1, 10_000)
seconds = st.floats(0, 100)


@given(sizes, sizes, seconds, seconds)
def test_it_takes_no_longer_than_the_target_or_than_the_copy_alone(
    total: int, bucket: int, target: float, copy: float
) -> None:
    ended, began = run(total, bucket, target, copy / total)
    assert ended <= max(target, copy) + 1e-6
    assert began[0] == 0
    assert began == sorted(began)


@given(sizes, sizes, seconds)
def test_a_copy_that_is_fast_is_spread_evenly(total: int, bucket: int, target: float) -> None:
    _, began = run(total, bucket, target, 0.0)
    assert began == pytest.approx([at * target / total for at in range(0, total, bucket)])


def test_a_copy_that_is_late_catches_up() -> None:
    now = [0.0]
    pace = Pace(100, 10.0, lambda: now[0])
    assert pace.seconds_for(10) == 0
    now[0] = 5.5  # the first took far too long
    assert [pace.seconds_for(10) for _ in range(5)] == [0.0] * 5
    assert pace.seconds_for(10) == pytest.approx(0.5)


def test_without_a_target_nothing_waits() -> None:
    pace = Pace(100, 0.0, lambda: 0.0)
    assert [pace.seconds_for(10) for _ in range(10)] == [0.0] * 10
    assert Pace(0, 5.0, lambda: 0.0).seconds_for(0) == 0


def test_the_target_is_most_of_the_slack_of_the_last_saves() -> None:
    slack = Slack()
    assert slack.seconds_to_spread() == 0, "nothing is known yet"
    for each in (100.0, 1.0, 2.0, 3.0, 4.0, 5.0):
        slack.add(each, has_waited=False)
    assert SAVES_MEASURED == 5
    assert slack.seconds_to_spread() == pytest.approx(SLACK_SHARE * 3.0)
    assert SLACK_SHARE < 1


def test_after_a_fence_that_had_to_wait_the_next_goes_at_full_speed() -> None:
    slack = Slack()
    slack.add(2.0, has_waited=True)
    assert slack.seconds_to_spread() == 0
    slack.add(2.0, has_waited=False)
    assert slack.seconds_to_spread() == pytest.approx(SLACK_SHARE * 2.0)


def test_a_forked_child_waits_for_no_copy() -> None:
    copying = CopyProgress(1, None)

    def child() -> None:
        with pytest.raises(StoreError, match="wait in that process"):
            copying.wait()

    assert forked(child) == 0


class Copy:
    """A copy of one tensor that stops at a bucket until the test lets it go on."""

    def __init__(self, trial: Trial, root: Path, *, stop_at: int = 3) -> None:
        self.trial, self.root, self.stop_at = trial, root, stop_at
        self.place = SnapshotDirectory(trial.run, 1, SAVE)
        self.may_go_on = threading.Event()
        self.fails, self.wait = False, WAIT
        values = torch.arange(SIZE, dtype=torch.int64).to(torch.uint8)
        self.source = content_of(HostMemory(values))
        fill = self.source.fill

        def stopping(low: int, high: int, out: np.ndarray, *, wait: bool = True) -> None:
            if low >= self.stop_at * BUCKET:
                assert self.may_go_on.wait(BOUND)
                if self.fails:
                    raise OSError("the tensor is gone")
            fill(low, high, out, wait=wait)

        self.source.fill = stopping  # type: ignore[method-assign]
        self.follower = Follower("here", MappedFiles())
        self.agent: threading.Thread | None = None
        self.replies: list[Replies] = []

    def begin(self) -> CopyProgress:
        """Begin to copy, as rank 0 of a durable save does, whose agent has asked for the file."""
        copying = self.trial.begin(self.source, pending=self.pending, durable=True)
        until(lambda: self.place.has(records.PENDING))
        self.ask()
        return copying

    def pending(self) -> PendingManifest:
        """What rank 0 tells its agent."""
        return PendingManifest(
            save_id=SAVE,
            step=1,
            manifest="",
            files=[(FILE, "here")],
            nodes=[AgentInfo("here", "http://127.0.0.1:1", "t")],
            leader="here",
            storage=StorageTask(root=str(self.root)),
            durable=True,
            wait=self.wait,
        )

    def ask(self) -> None:
        """Ask the agent for the file."""
        self.place.path.mkdir(parents=True, exist_ok=True)
        pending = self.place.path / records.PENDING
        if not pending.exists():
            write_record(pending, self.pending())
        call = StageCall(self.pending(), "persist", "here", self.wait)
        self.agent = threading.Thread(
            target=lambda: self.replies.append(self.follower.fulfil(self.place, call))
        )
        self.agent.start()

    def has_written(self, buckets: int) -> bool:
        """Whether storage has so many buckets, in a file that is not complete yet."""
        size = buckets * BUCKET
        copied = {self.slot().read_bytes()[:size]}
        return any(each.read_bytes()[:size] in copied - {bytes(size)} for each in self.stored())

    def slot(self) -> Path:
        """The slot that is being filled."""
        found = self.place.temporary_path(FILE)
        assert found.exists()
        return found

    def seal(self) -> None:
        """Compute the checksums, once nothing copies any more."""
        until(lambda: read_snapshot(self.place).state_of("seal") is StageState.RUNNING)
        self.follower.seal(Action("seal", self.place, names=(FILE,)))

    def reply(self) -> Replies:
        """What the agent answers, once it has ended."""
        assert self.agent is not None
        self.agent.join(BOUND)
        assert not self.agent.is_alive()
        return self.replies[0]

    def copy_of_another_rank(self) -> Path:
        """The record of another rank of the node, which has not staged its file yet."""
        entry = FileEntry(data_file(1, SAVE), 1, 0, 0, 0, 0, 0)
        path = self.place.path / records.rank_record(1)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_record(path, RankPart(file=entry, snapshots_to_keep=2, stages=(), epoch=0))
        return path

    def run_streams(self) -> None:
        """Let the simulated devices do what they have been asked to do."""
        accelerator = self.trial.accelerator
        for stream in (*accelerator.training.values(), *accelerator.own.values()):
            stream.run()

    def stored(self) -> list[Path]:
        """The files of the step in storage, complete or not."""
        return list((self.root / step_directory(1)).glob("*"))


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Copy]:
    """A copy in buckets of 4 KiB, each of which is written at once."""
    monkeypatch.setattr("shardwise.parts.memory.trainer.copying.BYTES_AT_ONCE", BUCKET)
    monkeypatch.setattr("shardwise.parts.memory.trainer.staging.BYTES_BETWEEN_RECORDS", BUCKET)
    monkeypatch.setattr("shardwise.parts.tiers.copying.CHUNK", BUCKET)
    trial = Trial(tmp_path / "memory")
    monkeypatch.setattr(trial.staging, "_slack", None)  # at full speed
    found = Copy(trial, tmp_path / "root")
    yield found
    found.may_go_on.set()
    trial.staging.close()


def test_what_is_copied_is_written_while_the_rest_is_copied(copy: Copy) -> None:
    lock = RankLock(copy.trial.run, 0)
    copying = copy.begin()
    until(lambda: copy.has_written(3))
    save = read_snapshot(copy.place, "here")
    assert save.pending is not None, "the leader was asked at the beginning"
    assert save.state_of("commit") is StageState.WAITING
    assert save.state_of("persist") is StageState.RUNNING
    assert not copying.done.is_set()
    assert FILE not in [each.name for each in copy.stored()], "incomplete files have other names"
    copy.may_go_on.set()
    assert copying.wait(BOUND)
    copy.trial.staging.raise_failure()
    assert read_snapshot(copy.place, "here").state_of("commit") is StageState.RUNNING
    copy.seal()
    assert not copy.reply().failures
    (stored,) = copy.stored()
    assert stored.name == FILE
    assert stored.read_bytes() == (copy.place.path / FILE).read_bytes()
    assert not read_snapshot(copy.place, "here").is_copying
    lock.release()


def test_a_copy_that_takes_long_is_waited_for_while_its_rank_lives(copy: Copy) -> None:
    lock = RankLock(copy.trial.run, 0)
    copying = copy.begin()
    until(lambda: copy.has_written(3))
    threading.Event().wait(2 * WAIT)
    assert copy.agent is not None
    assert copy.agent.is_alive()
    copy.may_go_on.set()
    assert copying.wait(BOUND)
    copy.seal()
    assert not copy.reply().failures
    lock.release()


def test_a_rank_that_is_lost_as_it_copies_leaves_nothing_in_storage(copy: Copy) -> None:
    lock = RankLock(copy.trial.run, 0)
    copy.begin()
    until(lambda: copy.has_written(3))
    lock.release_as_lost()
    assert "is incomplete" in copy.reply().failures["here"]
    assert copy.stored() == []


def test_a_rank_that_was_lost_before_it_copied_is_not_waited_for(copy: Copy) -> None:
    RankLock(copy.trial.run, 0).release_as_lost()
    copy.wait = 600.0
    copy.ask()
    assert "is incomplete" in copy.reply().failures["here"]


def test_the_checksums_are_waited_for_while_another_rank_copies(copy: Copy) -> None:
    """They are computed once no rank of the node copies any more."""
    locks = [RankLock(copy.trial.run, rank) for rank in (0, 1)]
    copying = copy.begin()
    other = copy.copy_of_another_rank()
    copy.may_go_on.set()
    assert copying.wait(BOUND)
    threading.Event().wait(2 * WAIT)
    assert copy.agent is not None
    assert copy.agent.is_alive()
    other.unlink()
    copy.seal()
    assert not copy.reply().failures
    for lock in locks:
        lock.release()


def test_a_save_of_which_another_rank_is_lost_is_not_written_to_its_end(copy: Copy) -> None:
    """An older snapshot may have to be written at once."""
    copy.wait = 600.0
    locks = [RankLock(copy.trial.run, rank) for rank in (0, 1)]
    copy.begin()
    until(lambda: copy.has_written(3))
    copy.copy_of_another_rank()
    locks[1].release_as_lost()
    assert "is incomplete" in copy.reply().failures["here"]
    assert copy.stored() == []
    locks[0].release()


def test_a_copy_that_failed_leaves_its_slot_to_who_reads_it(copy: Copy) -> None:
    """A slot that another save fills, or makes smaller, must not be one that an agent reads."""
    lock = RankLock(copy.trial.run, 0)
    copying = copy.begin()
    until(lambda: copy.has_written(3))
    slot = copy.slot()
    copy.fails = True
    copy.may_go_on.set()
    assert copying.wait(BOUND)
    assert not slot.exists()
    assert copy.trial.staging.has_free()
    lock.release()


def test_the_next_process_of_a_rank_forgets_a_copy_that_was_begun(copy: Copy) -> None:
    lock = RankLock(copy.trial.run, 0)
    copying = copy.begin()
    until(lambda: copy.has_written(3))
    slot = copy.slot()
    damaged = SnapshotDirectory(copy.trial.run, 1, f"{2:016x}").path / records.rank_record(0)
    damaged.parent.mkdir()
    damaged.touch()
    of_another_rank = copy.copy_of_another_rank()
    forget_copies(copy.trial.run, 0)
    assert not slot.exists()
    assert not copy.place.has(records.rank_record(0))
    assert copy.place.has(of_another_rank.name)
    copy.may_go_on.set()
    copying.wait(BOUND)
    lock.release_as_lost()


def test_a_rank_that_ends_after_its_copy_is_not_lost(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does so between the look at its files and the look at its lock."""
    record = copy.copy_of_another_rank()
    part = read_record(record, RankPart)
    assert part is not None
    parts, names = [part], copy.place.list_names()
    assert copying_ranks(copy.place, parts, names) == {1: False}
    monkeypatch.setattr(
        "shardwise.parts.memory.observe.is_rank_alive",
        lambda *_: bool((copy.place.path / data_file(1, SAVE)).touch()),
    )
    assert copying_ranks(copy.place, parts, names) == {}


class SlowStore(LocalStore):
    """Counts the chunks that are written, each of which takes a while."""

    written = 0

    def create(self, name: str, size: int, *, replace: bool = False) -> WritableFile:
        file = super().create(name, size, replace=replace)
        write = file.write_at

        def write_at(offset: int, data: np.ndarray) -> None:
            threading.Event().wait(0.01)
            self.written += 1
            write(offset, data)

        file.write_at = write_at  # type: ignore[method-assign]
        return file


def test_after_a_failure_nothing_is_written_any_more(tmp_path: Path, copy: Copy) -> None:
    store = SlowStore(tmp_path / "slow")
    data = np.zeros(100 * BUCKET, np.uint8)

    def fail_late(nbytes: int) -> None:
        if nbytes == 100 * BUCKET:
            at_failure.append(store.written)
            raise sw.StoreError("the rank is gone")

    at_failure = list[int]()
    entry = FileEntry(FILE, 0, data.nbytes, 0, data.nbytes, data.nbytes, 0)
    with pytest.raises(sw.StoreError, match="the rank is gone"):
        FileCopier(None).copy_from_memory(data, entry, store, fail_late)
    assert at_failure[0] > 100 - 4 * WRITE_THREADS, "the queue is short"
    assert store.written <= at_failure[0] + WRITE_THREADS
    assert store.list() == []


def test_a_rank_that_fails_as_it_copies_says_why_and_leaves_nothing_in_storage(copy: Copy) -> None:
    lock = RankLock(copy.trial.run, 0)
    copying = copy.begin()
    until(lambda: copy.has_written(3))
    copy.fails = True
    copy.may_go_on.set()
    assert copying.wait(BOUND)
    assert "the tensor is gone" in copy.reply().failures["here"]
    assert copy.stored() == []
    with pytest.raises(sw.StoreError, match="the tensor is gone"):
        copy.trial.staging.raise_failure()
    lock.release()


def test_an_abandoned_snapshot_is_not_waited_for(copy: Copy) -> None:
    lock = RankLock(copy.trial.run, 0)
    copy.begin()
    until(lambda: copy.has_written(3))
    copy.place.abandon()
    assert "is abandoned" in copy.reply().failures["here"]
    assert copy.stored() == []
    lock.release()


@pytest.mark.parametrize("damage", [b"", b"{}", b"x" * 100])
def test_a_record_that_cannot_be_read_ends_the_wait_for_its_file(copy: Copy, damage: bytes) -> None:
    lock = RankLock(copy.trial.run, 0)
    copying = copy.begin()
    until(lambda: copy.has_written(3))
    (copy.place.path / records.rank_record(0)).write_bytes(damage)
    assert "rank-00000.json: the record is damaged" in copy.reply().failures["here"]
    assert copy.stored() == []
    copy.may_go_on.set()
    assert copying.wait(BOUND)
    lock.release()


@pytest.mark.parametrize("case", ["a device copies", "the training waits"])
def test_some_copies_say_nothing_of_how_far_they_are(
    copy: Copy, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """What devices were asked to copy may not be there yet; and a copy that a training waits for
    shares the processors with nobody."""
    lock = RankLock(copy.trial.run, 0)
    if case == "a device copies":
        copy.source.devices = frozenset({torch.device("meta", 0)})
    else:
        options = replace(copy.trial.staging._options, overlap=False)
        monkeypatch.setattr(copy.trial.staging, "_options", options)
        monkeypatch.setattr(CopyProgress, "wait", lambda copying: True)  # as the test goes on
    written = []
    monkeypatch.setattr(
        "shardwise.parts.memory.trainer.staging.write_record",
        lambda path, record: written.append(record) or write_record(path, record),
    )
    copying = copy.begin()
    copy.may_go_on.set()
    until(lambda: copy.run_streams() or copying.done.is_set())
    copy.seal()
    assert not copy.reply().failures
    assert {each.copied for each in written if isinstance(each, RankPart)} == {0}
    lock.release()


def test_the_outcome_of_a_save_whose_copy_failed_names_the_reason(copy: Copy) -> None:
    lock = RankLock(copy.trial.run, 0)
    copy.fails = True
    copy.may_go_on.set()
    copying = copy.begin()
    assert copying.wait(BOUND)
    failed = read_record(copy.place.path / records.rank_record(0), RankPart)
    assert failed is not None
    assert "the tensor is gone" in failed.failure
    assert copy.place.has(records.PENDING), "an agent has to end the save"
    copy.reply()
    lock.release()
