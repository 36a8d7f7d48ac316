"""Run the reads of a load: several at a time, each block verified before it is copied."""

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
    """Read every span of this rank, and copy its bytes to the fragments that want them.

    Args:
        spans: the spans to read; disjoint.
        copies: the copies to make from each span, by its number.
        readers: the readers of all files of the spans, by file number.
        arena: the buffers to read through.
        threads: the number of threads.

    Raises:
        CorruptionError: bytes differ from those that were saved. Other spans may have been copied.
    """
    todo = iter(range(len(spans)))  # shared by all threads
    failed = threading.Event()

    def work() -> None:
        try:
            with arena.buffer() as buffer:
                for span in todo:
                    if failed.is_set():
                        return
                    data = _read(spans, span, readers, copies, buffer, in_place=True)
                    copies.copy(span, data)
        except BaseException:
            failed.set()
            raise

    _run_in_threads(work, min(threads, len(spans)))


def read_together(
    spans: Spans, copies: Copies, readers: Readers, rings: Rings, threads: int
) -> None:
    """Read the spans that the ranks of this node share, and copy what this rank needs.

    Each rank reads a share of the spans. Bytes that another rank has read are verified again before
    they are copied.

    Args:
        spans: the spans of all ranks of the node.
        copies: the copies to make on this rank from each span, by its number.
        readers: the readers of all files that this rank needs, by file number.
        rings: the rings through which ranks pass bytes to each other.
        threads: the number of threads.

    Raises:
        CorruptionError: as for `read_alone`.
        RankError: another rank could not read its share.
        LostRankError: another rank died, or made no progress before the timeout.
    """

    def serve(span: int) -> None:
        slot = rings.slot(span)
        if rings.leads(span):
            data = _read(spans, span, readers, copies, slot)
            rings.publish(span, readers[int(spans.file[span])].checksum(data))
        else:
            data = _receive(spans, span, readers, rings, slot)
        copies.copy(span, data)
        rings.finish(span)

    def work() -> None:
        try:
            while (span := rings.next()) is not None:
                serve(span)
        except BaseException:
            rings.fail()
            raise

    _run_in_threads(work, threads)


def _receive(spans: Spans, span: int, readers: Readers, rings: Rings, slot: Buffer) -> Buffer:
    """Return the bytes that another rank has read into its slot, after verifying them."""
    file, low, high = (int(c[span]) for c in (spans.file, spans.low, spans.high))
    try:
        return readers[file].passed_on(low, high, slot, rings.checksum(span))
    except CorruptionError as error:
        raise CorruptionError(f"{error}; rank {rings.reader_of(span)} had read them") from error


def _run_in_threads(work: Callable[[], None], threads: int) -> None:
    """Run `work` in `threads` threads, one of which is the calling thread."""
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
    in_place: bool = False,
) -> Buffer:
    file, low, high = (int(c[span]) for c in (spans.file, spans.low, spans.high))
    try:
        reader = readers[file]
        return (reader.view if in_place else reader.read)(low, high, buffer)
    except CorruptionError as error:
        names = copies.names(span)
        raise CorruptionError(
            f"{error}; these bytes belong to {names}" if names else str(error)
        ) from error
