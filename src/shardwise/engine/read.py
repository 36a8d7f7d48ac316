"""Reads of a load, run: several in flight, each block verified before it is copied."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from shardwise.engine.arena import Arena
from shardwise.engine.copies import Copies
from shardwise.engine.datareader import DataReader
from shardwise.engine.neighbours import Rings
from shardwise.errors import CorruptionError
from shardwise.plan.load import Spans
from shardwise.store.store import Buffer

Readers = dict[int, DataReader]


def read_alone(spans: Spans, copies: Copies, readers: Readers, arena: Arena) -> None:
    """Read every span of this rank, and copy what it holds to where it is wanted.

    Args:
        spans: disjoint; `copies` counts them.
        readers: by file number, all files that the spans lie in.

    Raises:
        CorruptionError: a span is not what was saved; other spans may have been copied by then.
    """

    def serve(span: int) -> None:
        with arena.buffer() as buffer:
            copies.copy(span, _read(spans, span, readers, copies, buffer, where_it_lies=True))

    with ThreadPoolExecutor(arena.threads, "shardwise-read") as pool:
        _finish(pool, serve, range(len(spans)))


def read_together(
    spans: Spans, copies: Copies, readers: Readers, rings: Rings, threads: int, beyond: int
) -> None:
    """The same for reads that this node's ranks share; `spans` are those of all of them.

    Args:
        beyond: how many bytes more each read has.

    Raises:
        CorruptionError: as for `read_alone`.
        RankError: another rank could not read its part, or is gone.
    """

    def serve(span: int) -> None:
        slot = rings.slot(span)
        if rings.leads(span):
            data = _read(spans, span, readers, copies, slot)
            rings.publish(span)
        else:
            data = slot[: int(spans.high[span] - spans.low[span]) + beyond]
        copies.copy(span, data)
        rings.finish(span)

    def work() -> None:
        try:
            while (span := rings.next()) is not None:
                serve(span)
        except BaseException:
            rings.fail()
            raise

    with ThreadPoolExecutor(threads, "shardwise-read") as pool:
        for job in [pool.submit(work) for _ in range(threads)]:
            job.result()


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


def _finish(pool: ThreadPoolExecutor, job: Callable[[int], None], items: Iterable[int]) -> None:
    jobs = [pool.submit(job, item) for item in items]
    try:
        for each in jobs:
            each.result()
    except BaseException:
        pool.shutdown(cancel_futures=True)
        raise
