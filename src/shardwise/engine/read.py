"""Read spans of files in several threads, and copy each span after it is verified."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from shardwise.engine.buffers import Arena
from shardwise.engine.data_reader import DataReader
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
                    data = read_span(spans, span, readers, copier, buffer, in_place=True)
                    copier.copy(span, data)
        except BaseException:
            failed.set()
            raise

    run_in_threads(work, min(threads, len(spans)))


def run_in_threads(
    work: Callable[[], None], threads: int, further: Callable[[], None] | None = None
) -> None:
    """Run `work` in `threads` threads, one of which is the calling thread; `further` in another."""
    jobs = [work] * (threads - 1) + ([further] if further is not None else [])
    with ThreadPoolExecutor(max(1, len(jobs)), "shardwise-read") as pool:
        others = [pool.submit(job) for job in jobs]
        work()
        for future in others:
            future.result()


def read_span(
    spans: Spans,
    span: int,
    readers: Readers,
    copier: SpanCopier,
    buffer: Buffer,
    *,
    in_place: bool = False,
) -> Buffer:
    """Read and verify a span.

    Args:
        buffer: memory for the bytes.
        in_place: return bytes that are in memory already, instead of copying them to `buffer`.

    Raises:
        CorruptionError: bytes differ from the saved bytes. The error names the tensors.
    """
    file, low, high = (int(column[span]) for column in (spans.file, spans.low, spans.high))
    try:
        reader = readers[file]
        return (reader.view if in_place else reader.read)(low, high, buffer)
    except CorruptionError as error:
        names = copier.tensor_names(span)
        raise CorruptionError(
            f"{error}; these bytes belong to {names}" if names else str(error)
        ) from error
