"""What the processes of a node share: records, locks, bells, and who is alive."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.kernel.deadline import Deadline
from shardwise.kernel.store.local_files import write_atomically
from shardwise.parts.lineage import new_run_id
from shardwise.parts.memory.files import (
    encode_record,
    listen_to_bell,
    lock_directory,
    read_record,
    ring_bell,
    try_lock,
    write_record,
)
from shardwise.parts.memory.home import Home, Run
from shardwise.parts.memory.rank_liveness import (
    RankLock,
    forget_lost_ranks,
    is_rank_alive,
    lost_ranks,
)
from shardwise.parts.memory.records import Retry
from shardwise.parts.memory.seal import map_file
from shardwise.parts.memory.states import RecordCache
from tests.memory.test_irregular import KINDS, replace

# Waits with a deadline on a clock of the test, atomic writes, locks and bells.


class Clock:
    """A clock that advances only while the test sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pauses: list[float] = []

    def sleep(self, seconds: float) -> None:
        """Advance the clock."""
        self.pauses.append(seconds)
        self.now += seconds

    def deadline(self, seconds: float | None) -> Deadline:
        """Return a deadline on this clock."""
        return Deadline(seconds, lambda: self.now, self.sleep)


def test_attempts_end_with_the_first_one_after_the_deadline() -> None:
    clock = Clock()
    assert len(list(clock.deadline(1.0).attempts(pause=0.25))) == 6
    assert clock.pauses == [0.25] * 5


def test_pauses_double_up_to_the_longest() -> None:
    clock = Clock()
    list(clock.deadline(1.0).attempts(pause=0.125, longest_pause=0.5))
    assert clock.pauses == [0.125, 0.25, 0.5, 0.5]


def test_there_is_one_attempt_after_the_deadline_has_passed() -> None:
    clock = Clock()
    deadline = clock.deadline(0.5)
    clock.sleep(1.0)
    assert deadline.has_passed()
    assert deadline.seconds_left() == 0.0
    assert len(list(deadline.attempts())) == 1


def test_a_deadline_without_seconds_never_passes() -> None:
    clock = Clock()
    deadline = clock.deadline(None)
    attempts = deadline.attempts(pause=1e9)
    for _ in range(10):
        next(attempts)
    assert not deadline.has_passed()
    assert deadline.seconds_left() == math.inf


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_record(path, {"step": 1})
    with pytest.raises(TypeError), write_atomically(path) as file:
        file.write("text")  # type: ignore[arg-type]
    assert read_record(path, dict[str, int]) == {"step": 1}
    assert os.listdir(tmp_path) == ["record.json"]
    assert path.stat().st_mode & 0o777 == 0o600
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    with write_atomically("record.json", dir_fd=fd) as file:
        file.write(encode_record({"step": 2}))
    os.close(fd)
    assert read_record(path, dict[str, int]) == {"step": 2}
    assert read_record(tmp_path / "absent.json", dict[str, int]) is None
    with pytest.raises(sw.StoreError, match=r"record\.json: the record is damaged"):
        read_record(path, list[str])


def test_locks_of_directories(tmp_path: Path) -> None:
    with lock_directory(tmp_path, shared=True) as first:
        with lock_directory(tmp_path, shared=True) as second:
            assert (first, second) == (True, True)
        fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
        assert not try_lock(fd)
    assert try_lock(fd)
    os.close(fd)
    with lock_directory(tmp_path / "absent", shared=False) as locked:
        assert not locked


def test_a_bell_wakes_its_listener(tmp_path: Path) -> None:
    bell, woken = tmp_path / "bell", threading.Event()
    ring_bell(bell)  # nobody listens
    threading.Thread(target=listen_to_bell, args=(bell, woken.set), daemon=True).start()
    for _ in Deadline(20.0).attempts():
        ring_bell(bell)
        if woken.is_set():
            return
    pytest.fail("the listener was not woken")


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_names_the_path(kind: str, tmp_path: Path) -> None:
    home, path = Home(tmp_path), tmp_path / "it"
    replace(path, kind)
    for name in ("agent.lock", "start.lock"):
        replace(home.path / name, kind)
        with pytest.raises(sw.StoreError, match=f"{name} is .*(regular file|symbolic link).*: r"):
            home.lock(name).__enter__()
    with pytest.raises(sw.StoreError, match=r"/it is "):
        read_record(path, Retry)
    with pytest.raises(sw.StoreError, match=r"/it is "):
        map_file(path, 0, writable=True)
    found = RecordCache().read(path, Retry)
    assert found is not None
    assert "/it is " in str(found)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_lock_shows_no_rank(kind: str, tmp_path: Path) -> None:
    run = Home(tmp_path).run("0" * 16)
    (run.path / "trainers").mkdir(parents=True)
    replace(run.path / "trainers" / "00000", kind)
    (run.path / "trainers" / "note").touch()
    (run.path / "trainers" / "00003").touch()
    assert lost_ranks(run) == [3]
    assert not is_rank_alive(run, 0)


def test_a_record_takes_no_place_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "it").mkdir()
    with pytest.raises(sw.StoreError, match="is a directory: remove it"):
        write_record(tmp_path / "it", {})
    assert [each.name for each in tmp_path.iterdir()] == ["it"]


@pytest.mark.parametrize("through", ["file", "link"])
def test_a_bell_that_is_no_pipe_is_replaced(through: str, tmp_path: Path) -> None:
    """Reading a file would return at once, for ever; and ringing would write into it."""
    bell, other, rung = tmp_path / "bell", tmp_path / "other", threading.Event()
    other.write_bytes(b"other")
    if through == "link":
        bell.symlink_to(other)
    else:
        bell.write_bytes(b"other")
    ring_bell(bell)
    assert bell.read_bytes() == other.read_bytes() == b"other"
    threading.Thread(target=listen_to_bell, args=(bell, rung.set), daemon=True).start()
    while not bell.is_fifo():
        time.sleep(0.01)
    assert not rung.wait(0.05)
    while not rung.wait(0.01):
        ring_bell(bell)


# Who lives is known by a lock, and by nothing else.


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run without trainers."""
    return Home(tmp_path).run(new_run_id())


def test_looking_at_a_trainer_does_not_end_it(run: Run) -> None:
    presence = RankLock(run, 3)
    assert is_rank_alive(run, 3)
    assert is_rank_alive(run, 3)
    assert not is_rank_alive(run, 4)
    assert lost_ranks(run) == []
    presence.release()
    assert not is_rank_alive(run, 3)
    assert lost_ranks(run) == []


def test_one_that_goes_without_a_word_is_lost_until_it_is_back(run: Run) -> None:
    RankLock(run, 3).release_as_lost()
    assert lost_ranks(run) == [3]
    presence = RankLock(run, 3)
    assert lost_ranks(run) == []
    presence.release()


def test_a_child_does_not_keep_its_parent_alive(run: Run) -> None:
    presence = RankLock(run, 0)
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        assert is_rank_alive(run, 0)
        presence.release_as_lost()
        deadline = time.monotonic() + 10.0
        while not lost_ranks(run):
            assert time.monotonic() < deadline
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


TAKE = """
import sys
from pathlib import Path
from shardwise.parts.memory import rank_liveness
from shardwise.parts.memory.home import Run
rank_liveness.LOCK_TIMEOUT = 0.1
rank_liveness.RankLock(Run(Path(sys.argv[1])), 0)
"""


def test_a_rank_is_not_taken_by_another_process(run: Run) -> None:
    presence = RankLock(run, 0)
    command = [sys.executable, "-c", TAKE, str(run.path)]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "another process is rank 0 of run" in refused.stderr
    presence.release()
    assert subprocess.run(command, timeout=60).returncode == 0


def test_a_process_that_gave_up_may_begin_anew(run: Run) -> None:
    lost = RankLock(run, 0)
    again = RankLock(run, 0)
    assert is_rank_alive(run, 0)
    again.release()
    assert lost_ranks(run) == []
    lost.release_as_lost()


def test_those_of_before_are_forgotten_once_others_have_come(run: Run) -> None:
    """Or their node would have every snapshot persisted, though nobody is lost."""
    RankLock(run, 3).release_as_lost()
    presence = RankLock(run, 4)
    assert lost_ranks(run) == [3]
    forget_lost_ranks(run)
    assert lost_ranks(run) == []
    assert is_rank_alive(run, 4)
    presence.release_as_lost()
    assert lost_ranks(run) == [4]


def test_of_several_in_a_process_the_last_one_counts(run: Run) -> None:
    first = RankLock(run, 0)
    second = RankLock(run, 0)
    assert first.is_replaced()
    assert not second.is_replaced()
    first.release()
    assert is_rank_alive(run, 0)
    second.release()
    assert not second.is_replaced()
    assert lost_ranks(run) == []
