"""The read strategy of several ranks: bytes that several need are read from storage by one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import msgspec
import numpy as np

from shardwise.decoding import prepare_decoding
from shardwise.engine.buffers import Arena
from shardwise.engine.data_reader import end_of_read
from shardwise.engine.group import Group
from shardwise.engine.load import are_mapped, fill_alone, largest_reads, open_readers
from shardwise.engine.read import Readers, read_span, run_in_threads
from shardwise.engine.tensors import SpanCopier
from shardwise.errors import CorruptionError, StoreError
from shardwise.manifest.checksums import BLOCK, block_count
from shardwise.manifest.layout import Layout
from shardwise.plan.load import Spans, assign_transfers
from shardwise.ports.read_strategy import BytesMoved, RankReads
from shardwise.sharing.links import Links
from shardwise.sharing.node_ranks import NodeRanks, find_node_ranks
from shardwise.sharing.ranges import Ranges
from shardwise.sharing.read_once import agree_on_reading_once
from shardwise.sharing.shared_buffers import SharedBuffers
from shardwise.sharing.within_node import SharedReads, fraction_saved, share_reads
from shardwise.store import Files
from shardwise.store.store import Buffer

WORTH_SHARING = 0.05
"""The ranks of a node read together if this avoids at least this fraction of their reads."""
MEASURED_ROUNDS = 3
"""The number of rounds of reads that measure the storage."""
MAX_PROBE_BYTES = 1 << 20
"""The size of the largest read that measures the storage, in bytes."""
PROBE_FRACTION = 0.005
"""A rank reads at most this fraction of its bytes to measure the storage, but at least a block in
each thread and round."""


@prepare_decoding
class _LoadMessage(msgspec.Struct, array_like=True):
    """A rank's message to the other ranks of its node, from which all plan the same shared reads.

    Attributes:
        are_mapped: whether all files that the rank reads are mapped into its memory.
        spans: the byte ranges that the rank needs, encoded.
        largest_reads: the longest read of each file that the rank can make, in bytes, as int64.
    """

    are_mapped: bool
    spans: bytes
    largest_reads: bytes


class ReadTogether:
    """One rank reads the bytes that several ranks need.

    Args:
        read_once: whether nodes share reads; None: if a short measurement shows that this is
            faster. The ranks of a node always share them.
    """

    def __init__(self, read_once: bool | None) -> None:
        self._read_once = read_once

    def agree(self, reads: RankReads, group: Group, cleanup: ExitStack) -> Callable[[], BytesMoved]:
        """Plan what this rank shares with other ranks. All ranks call this method together.

        Returns:
            A function that reads, and fills the tensors of this rank. It raises

            - CorruptionError: bytes differ from the saved bytes; the target is partly written.
            - RankError: another rank could not read its share.
            - LostRankError: another rank died, or did not answer in time.

        Raises:
            ShardwiseError: as for `exchange`.
        """
        planned, store, arena = reads.planned, reads.store, reads.arena
        spans, layout = planned.plan.spans, planned.layout
        largest = largest_reads(store, layout, arena).tobytes()
        message = _LoadMessage(are_mapped(spans, store, layout), _encode_ranges(spans), largest)
        node_ranks = find_node_ranks(group, msgspec.msgpack.encode(message), cleanup)
        messages = [msgspec.msgpack.decode(each, type=_LoadMessage) for each in node_ranks.messages]
        wanted = [_decode_ranges(each.spans) for each in messages]
        largest_read = np.minimum.reduce(
            [np.frombuffer(each.largest_reads, np.int64) for each in messages]
        )
        # A node reads alone what it has: snapshots, of which it has most, or files on its own disk.
        traits = store.traits
        is_local = self._read_once is None and traits.is_node_local
        has_data = traits.mapped is not None or is_local
        between = None
        if self._read_once is not False and len(node_ranks) < group.size:
            between = agree_on_reading_once(
                group,
                node_ranks,
                None if has_data else wanted,
                largest_read,
                partial(_measure_store, store, layout, arena),
                cleanup,
                read_once=self._read_once,
            )
        shared = share_reads(
            wanted,
            largest_read=largest_read,
            between_nodes=None if between is None else between.reads,
        )
        alone = len(node_ranks) == 1 or all(each.are_mapped for each in messages)
        if not shared.crosses_nodes and (alone or fraction_saved(wanted, shared) < WORTH_SHARING):
            return partial(_read_alone, reads, len(node_ranks))
        links = None if between is None else between.links
        return partial(_fill_together, reads, shared, node_ranks, links, cleanup)


def _read_alone(reads: RankReads, ranks_on_node: int) -> BytesMoved:
    nbytes = fill_alone(
        reads.planned, reads.store, reads.arena, verify=reads.verify, ranks_on_node=ranks_on_node
    )
    return BytesMoved(nbytes)


def _fill_together(
    reads: RankReads,
    shared: SharedReads,
    node_ranks: NodeRanks,
    links: Links | None,
    cleanup: ExitStack,
) -> BytesMoved:
    try:
        _read(reads, shared, node_ranks, links, cleanup)
    except BaseException:
        if links is not None:
            links.report_failure()
        raise
    reads.planned.finish()
    index = node_ranks.index
    received = shared.bytes_of(index, received=True)
    return BytesMoved(shared.bytes_of(index, received=False), received)


def _read(
    reads: RankReads,
    shared: SharedReads,
    node_ranks: NodeRanks,
    links: Links | None,
    cleanup: ExitStack,
) -> None:
    index, planned, arena = node_ranks.index, reads.planned, reads.arena
    layout = planned.layout
    ends = [
        end_of_read(layout.files[file], high)
        for file, high in zip(shared.file.tolist(), shared.high.tolist(), strict=True)
    ]
    nbytes = np.array(ends, np.int64) - shared.low
    slot_bytes = BLOCK * block_count(int(nbytes.max()))
    most_reads = arena.max_concurrent_reads(slot_bytes, len(node_ranks))
    slots = min(most_reads, int(np.bincount(shared.reader).max()))
    buffers = node_ranks.map_buffers(shared, slots, slot_bytes, layout.files)
    try:
        is_needed = shared.wanted[:, index] | ((shared.reader == index) & ~shared.is_received)
        files = shared.file[is_needed]
        readers = open_readers(files, reads.store, layout, cleanup, verify=reads.verify)
    except BaseException as error:
        buffers.mark_failed(error)
        raise
    spans = assign_transfers(planned.plan.transfers, shared.file, shared.low, shared.high)
    exchange = None
    if links is not None:
        exchange = partial(links.run, shared, nbytes.tolist(), buffers)
    threads = arena.threads_of(len(node_ranks))
    _read_together(spans, planned.copier(spans), readers, buffers, threads, exchange)


def _read_together(
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
            data = read_span(spans, span, readers, copier, slot)
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

    run_in_threads(work, threads, exchange)


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


def _measure_store(store: Files, layout: Layout, arena: Arena, reads: Ranges) -> float:
    """Read a small part of what this rank needs, and return the rate in bytes per second.

    Each of several rounds reads a few bytes in all threads. The result is the median of the rounds,
    because other processes may delay some of them.

    Returns:
        The rate; 0 if there is nothing to read, or if a file cannot be read. The load itself then
        reports the reason.
    """
    budget = int(reads.nbytes * PROBE_FRACTION) // (MEASURED_ROUNDS * arena.threads)
    count = min(max(budget // BLOCK, 1) * BLOCK, MAX_PROBE_BYTES)
    rows = range(min(arena.threads, len(reads)))
    if not rows:
        return 0.0
    try:
        with ExitStack() as cleanup, ThreadPoolExecutor(len(rows), "shardwise-measure") as pool:
            files = [store.open(layout.files[i].name) for i in reads.file[rows]]
            buffers = [cleanup.enter_context(arena.buffer()) for _ in rows]
            for file in files:
                cleanup.callback(file.close)

            def read(row: int, number: int) -> int:
                low = int(reads.low[row]) + number * count
                size = min(count, int(reads.high[row]) - low)
                return files[row].read_at(low, buffers[row][:size]) if size > 0 else 0

            rates = []
            for number in range(MEASURED_ROUNDS):
                start = time.perf_counter()
                nbytes = sum(pool.map(read, rows, [number] * len(rows)))
                rates.append(nbytes / (time.perf_counter() - start))
            return statistics.median(rates)
    except (OSError, StoreError):
        return 0.0


def _encode_ranges(spans: Spans) -> bytes:
    return np.stack([spans.file, spans.low, spans.high]).tobytes()


def _decode_ranges(message: bytes) -> Ranges:
    return Ranges(*np.frombuffer(message, np.int64).reshape(3, -1))
