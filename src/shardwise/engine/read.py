"""Reads of a load, run: several in flight, each block verified before it is copied."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from shardwise.engine.buffers import Arena
from shardwise.engine.datareader import DataReader
from shardwise.engine.ring import Rings
from shardwise.engine.tensors import Copies
from shardwise.errors import CorruptionError
from shardwise.plan.load import Spans
from shardwise.store.store import Buffer

Readers = dict[int, DataReader]


def read_alone(spans: Spans, copies: Copies, readers: Readers, arena: Arena, threads: int) -> None:
    """Read every span of this rank, and copy what it holds to where it is wanted.

    Args:
        spans: disjoint; `copies` counts them.
        readers: by file number, all files that the spans lie in.

    Raises:
        CorruptionError: a span is not what was saved; other spans may have been copied by then.
    """

    todo = iter(range(len(spans)))  # threads take from it one after the other
    failed = threading.Event()

    def work() -> None:
        try:
            with arena.buffer() as buffer:
                for span in todo:
                    if failed.is_set():
                        return
                    data = _read(spans, span, readers, copies, buffer, where_it_lies=True)
                    copies.copy(span, data)
        except BaseException:
            failed.set()
            raise

    _together(work, min(threads, len(spans)))


def read_together(
    spans: Spans, copies: Copies, readers: Readers, rings: Rings, threads: int
) -> None:
    """The same for reads that this node's ranks share; `spans` are those of all of them.

    What another rank has read is verified here once more, where it is taken from.

    Args:
        readers: by file number, all files that this rank wants something of.

    Raises:
        CorruptionError: as for `read_alone`.
        RankError: another rank could not read its part.
        LostRankError: another rank is gone, or nothing has moved for too long.
    """

    def serve(span: int) -> None:
        slot = rings.slot(span)
        if rings.leads(span):
            data = _read(spans, span, readers, copies, slot)
            rings.publish(span, readers[int(spans.file[span])].checksum(data))
        else:
            data = _taken(spans, span, readers, rings, slot)
        copies.copy(span, data)
        rings.finish(span)

    def work() -> None:
        try:
            while (span := rings.next()) is not None:
                serve(span)
        except BaseException:
            rings.fail()
            raise

    _together(work, threads)


def _taken(spans: Spans, span: int, readers: Readers, rings: Rings, slot: Buffer) -> Buffer:
    """What another rank has put into its slot, verified."""
    file, low, high = (int(c[span]) for c in (spans.file, spans.low, spans.high))
    try:
        return readers[file].passed_on(low, high, slot, rings.checksum(span))
    except CorruptionError as error:
        raise CorruptionError(f"{error}; rank {rings.reader_of(span)} passed them on") from error


def _together(work: Callable[[], None], threads: int) -> None:
    """Run this in so many threads, of which the calling one is the first."""
    with ThreadPoolExecutor(max(1, threads - 1), "shardwise-read") as pool:
        others = [pool.submit(work) for _ in range(threads - 1)]
        work()
        for each in others:
            each.result()


def _read(
    spans: Spans,
    span: int,
    readers: Readers,
    copies: Copies,
    buffer: Buffer,
    *,
    where_it_lies: bool = False,
) -> Buffer:
    file, low, high = (int(c[span]) for c in (spans.file, spans.low, spans.high))
    try:
        reader = readers[file]
        return (reader.view if where_it_lies else reader.read)(low, high, buffer)
    except CorruptionError as error:
        names = copies.names(span)
        raise CorruptionError(f"{error}; they hold {names}" if names else str(error)) from error
