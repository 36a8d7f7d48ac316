"""Read spans of files in several threads, and copy each span after it is verified."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from shardwise.engine.buffers import Arena
from shardwise.engine.data_reader import DataReader
from shardwise.engine.shared_buffers import SharedBuffers
from shardwise.engine.tensors import SpanCopier
from shardwise.errors import CorruptionError
from shardwise.plan.load import Spans
from shardwise.store.store import Buffer

Readers = dict[int, DataReader]


def read_alone(
    spans: Spans, copier: SpanCopier, readers: Readers, arena: Arena, threads: int
) -> None:
    """Read every span of this rank, and copy its boxes to their fragments.

    Args:
        spans: the spans to read; disjoint.
        copier: copies the boxes of each span.
        readers: the readers of all files of the spans, by the file's index in the manifest.
        arena: the buffers to read through.
        threads: the number of threads.

    Raises:
        CorruptionError: bytes differ from the saved bytes. Some spans may have been copied.
    """
    remaining = iter(range(len(spans)))  # shared by all threads
    failed = threading.Event()

    def work() -> None:
        try:
            with arena.buffer() as buffer:
                for span in remaining:
                    if failed.is_set():
                        return
                    data = _read(spans, span, readers, copier, buffer, in_place=True)
                    copier.copy(span, data)
        except BaseException:
            failed.set()
            raise

    _run_in_threads(work, min(threads, len(spans)))


def read_together(
    spans: Spans,
    copier: SpanCopier,
    readers: Readers,
    buffers: SharedBuffers,
    threads: int,
    exchange: Callable[[], None] | None = None,
) -> None:
    """Read the spans that the ranks of this node share, and copy what this rank needs.

    Each rank reads a share of the spans. Bytes that another rank has read, or that come from
    another node, are verified again before they are copied.

    Args:
        spans: the spans of all ranks of the node.
        copier: copies the boxes of each span that this rank needs.
        readers: the readers of all files that this rank reads or needs, by the file's index.
        buffers: the shared memory through which ranks pass bytes to each other.
        threads: the number of threads.
        exchange: runs in a further thread, and exchanges bytes with other nodes.

    Raises:
        CorruptionError: as for `read_alone`.
        RankError: another rank could not read its share.
        LostRankError: another rank died, or made no progress before the timeout.
    """

    def process(span: int) -> None:
        slot = buffers.slot(span)
        if buffers.is_own(span):
            data = _read(spans, span, readers, copier, slot)
            buffers.publish(span, readers[int(spans.file[span])].checksum(data))
        else:
            data = _receive(spans, span, readers, buffers, slot)
        if buffers.is_wanted(span):
            copier.copy(span, data)
            buffers.mark_used(span)

    def work() -> None:
        try:
            while (span := buffers.next_read()) is not None:
                process(span)
        except BaseException as error:
            buffers.mark_failed(error)
            raise

    _run_in_threads(work, threads, exchange)


def _receive(
    spans: Spans, span: int, readers: Readers, buffers: SharedBuffers, slot: Buffer
) -> Buffer:
    """Verify the bytes that another rank has read into its slot, and return them."""
    file, low, high = (int(column[span]) for column in (spans.file, spans.low, spans.high))
    try:
        return readers[file].verify_shared(low, high, slot, buffers.checksum(span))
    except CorruptionError as error:
        how = "passed them on" if buffers.is_received(span) else "had read them"
        raise CorruptionError(f"{error}; rank {buffers.reader_of(span)} {how}") from error


def _run_in_threads(
    work: Callable[[], None], threads: int, further: Callable[[], None] | None = None
) -> None:
    """Run `work` in `threads` threads, one of which is the calling thread; `further` in another."""
    jobs = [work] * (threads - 1) + ([further] if further is not None else [])
    with ThreadPoolExecutor(max(1, len(jobs)), "shardwise-read") as pool:
        others = [pool.submit(job) for job in jobs]
        work()
        for future in others:
            future.result()


def _read(
    spans: Spans,
    span: int,
    readers: Readers,
    copier: SpanCopier,
    buffer: Buffer,
    *,
    in_place: bool = False,
) -> Buffer:
    file, low, high = (int(column[span]) for column in (spans.file, spans.low, spans.high))
    try:
        reader = readers[file]
        return (reader.view if in_place else reader.read)(low, high, buffer)
    except CorruptionError as error:
        names = copier.tensor_names(span)
        raise CorruptionError(
            f"{error}; these bytes belong to {names}" if names else str(error)
        ) from error
