"""Writes in any order reach a stream in order, with bounded memory and bounded waits."""

from __future__ import annotations

import random
import threading
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from shardwise.kernel.errors import StoreError
from shardwise.ports import sequential
from shardwise.ports.sequential import LARGEST_BACKLOG, SequentialWriter


class Recorded:
    """A stream that keeps its bytes, and can be told to wait or to fail."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.is_closed = False
        self.calls: list[str] = []
        self.go = threading.Event()
        self.go.set()
        self.fails = False

    def write(self, data: memoryview) -> None:
        self.go.wait(10)
        if self.fails:
            raise OSError("the disk is full")
        self.data += data

    def close(self) -> None:
        self.is_closed = True

    def writer(self, size: int, window: int = LARGEST_BACKLOG) -> SequentialWriter:
        return SequentialWriter(
            self,
            size,
            "file",
            finish=lambda: self.calls.append("finish"),
            discard=lambda: self.calls.append("discard"),
            window=window,
        )


CONTENT = np.random.default_rng(0).integers(0, 256, 100_000, np.uint8)


@pytest.mark.parametrize("threads", [1, 4])
def test_chunks_in_any_order(threads: int) -> None:
    stream = Recorded()
    file = stream.writer(len(CONTENT) - 50)  # the last bytes are padding, which is dropped
    starts = list(range(0, len(CONTENT), 1000))
    random.Random(threads).shuffle(starts)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda low: file.write_at(low, CONTENT[low : low + 1000]), starts))
    file.commit()
    file.close()
    assert bytes(stream.data) == CONTENT[:-50].tobytes()
    assert (stream.is_closed, stream.calls) == (True, ["finish"])


def test_missing_bytes_are_an_error() -> None:
    stream = Recorded()
    file = stream.writer(3000)
    file.write_at(0, CONTENT[:1000])
    file.write_at(2000, CONTENT[2000:3000])
    with pytest.raises(StoreError, match="byte 1000 of 3000 was not written"):
        file.commit()
    file.close()
    assert stream.calls == ["discard"]


def test_bytes_are_written_once() -> None:
    file = Recorded().writer(3000)
    file.write_at(0, CONTENT[:1000])
    file.write_at(2000, CONTENT[2000:3000])
    for offset in (0, 2000):
        with pytest.raises(StoreError, match="written twice"):
            file.write_at(offset, CONTENT[:1000])


def test_after_a_failure_every_call_fails() -> None:
    stream = Recorded()
    stream.fails = True
    file = stream.writer(3000)
    with pytest.raises(OSError, match="the disk is full"):
        file.write_at(0, CONTENT[:1000])
    with pytest.raises(OSError, match="the disk is full"):
        file.write_at(1000, CONTENT[:1000])
    with pytest.raises(OSError, match="the disk is full"):
        file.commit()
    file.close()
    assert stream.calls == ["discard"]


def test_a_file_that_cannot_be_finished_is_discarded() -> None:
    stream = Recorded()

    def finish() -> None:
        raise OSError("the file cannot be renamed")

    discard = partial(stream.calls.append, "discard")
    file = SequentialWriter(stream, 10, "file", finish=finish, discard=discard)
    file.write_at(0, CONTENT[:10])
    with pytest.raises(OSError, match="cannot be renamed"):
        file.commit()
    file.close()
    assert stream.calls == ["discard"]


def test_a_full_backlog_waits_for_bytes_that_another_thread_writes() -> None:
    stream = Recorded()
    file = stream.writer(6000, 3500)
    for low in (3000, 2000):
        file.write_at(low, CONTENT[low : low + 1000])
    stream.go.clear()
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(file.write_at, 0, CONTENT[:1000])
        while not file._is_writing:
            pass
        waiting = [
            pool.submit(file.write_at, low, CONTENT[low : low + 1000]) for low in (4000, 5000)
        ]
        with pytest.raises(futures.TimeoutError):  # until Python 3.11, not the built-in one
            waiting[1].result(0.1)
        stream.go.set()
        first.result(60)
        file.write_at(1000, CONTENT[1000:2000])
        for each in waiting:
            each.result(60)
    file.commit()
    assert bytes(stream.data) == CONTENT[:6000].tobytes()


def test_bytes_that_nobody_writes_are_waited_for_only_so_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sequential, "LONGEST_STALL", 0.1)
    file = Recorded().writer(9000, 3500)
    for low in (1000, 2000, 3000):
        file.write_at(low, CONTENT[low : low + 1000])
    with pytest.raises(StoreError, match="because nobody wrote byte 0: write the chunks"):
        file.write_at(4000, CONTENT[4000:5000])


def test_reverse_order_is_written_if_it_fits_into_memory_and_refused_at_once_otherwise() -> None:
    stream = Recorded()
    file = stream.writer(6000, 5000)
    for low in range(5000, -1, -1000):
        file.write_at(low, CONTENT[low : low + 1000])
    file.commit()
    assert bytes(stream.data) == CONTENT[:6000].tobytes()
    with pytest.raises(StoreError, match="come too early, because 6000 bytes before them"):
        Recorded().writer(7000, 5000).write_at(6000, CONTENT[6000:7000])
