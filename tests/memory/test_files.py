"""Waits with a deadline on a clock of the test, atomic writes, locks and bells."""

from __future__ import annotations

import math
import os
import threading
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.deadline import Deadline
from shardwise.memory.files import (
    encode_record,
    listen_to_bell,
    lock_directory,
    read_record,
    ring_bell,
    write_record,
)
from shardwise.store.local_files import try_lock, write_atomically


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
