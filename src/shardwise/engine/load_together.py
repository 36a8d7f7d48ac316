"""Fill tensors on all ranks: bytes that several ranks need are read from storage by one of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt

from shardwise.decoding import prepare_decoding
from shardwise.engine.buffers import Arena
from shardwise.engine.data_reader import end_of_read
from shardwise.engine.group import Group
from shardwise.engine.load import PlannedLoad, are_mapped, fill_alone, largest_reads, open_readers
from shardwise.engine.node_ranks import NodeRanks, find_node_ranks
from shardwise.engine.read import read_together
from shardwise.engine.read_once import SharedWithNodes, agree_on_reading_once
from shardwise.errors import StoreError
from shardwise.manifest.checksums import BLOCK, block_count
from shardwise.manifest.layout import Layout
from shardwise.plan.load import Spans, assign_transfers
from shardwise.plan.ranges import Ranges
from shardwise.plan.within_node import SharedReads, fraction_saved, share_reads
from shardwise.store import Files

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


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """What this rank reads, and the ranks with which it shares reads.

    Attributes:
        own: the tensors to fill on this rank.
        node_ranks: the ranks of this node.
        wanted: the byte ranges that each rank of this node wants.
        largest_read: the longest read of each file that all ranks of this node can make, in bytes.
        all_mapped: whether all files are mapped into the memory of all ranks of this node.
        between_nodes: what this node shares with other nodes; None if it shares nothing.
    """

    own: PlannedLoad
    node_ranks: NodeRanks
    wanted: list[Ranges]
    largest_read: npt.NDArray[np.int64]
    all_mapped: bool
    between_nodes: SharedWithNodes | None


def plan_together(
    plan: Callable[[], PlannedLoad],
    store: Files,
    layout: Layout,
    arena: Arena,
    group: Group,
    cleanup: ExitStack,
    *,
    read_once: bool | None,
) -> ReadPlan:
    """Plan this rank's reads, and what it shares with other ranks. All ranks call this together.

    Args:
        plan: plans this rank's reads. A failure on one rank is raised on all ranks.
        cleanup: closed when all ranks have finished.
        read_once: whether nodes share reads; see `agree_on_reading_once`.

    Raises:
        ShardwiseError: as for `exchange`.
    """

    def make_message() -> tuple[PlannedLoad, bytes]:
        planned = plan()
        spans, largest = planned.plan.spans, largest_reads(store, layout, arena)
        mapped = are_mapped(spans, store, layout)
        message = _LoadMessage(mapped, _encode_ranges(spans), largest.tobytes())
        return planned, msgspec.msgpack.encode(message)

    planned, node_ranks = find_node_ranks(group, make_message, cleanup)
    messages = [msgspec.msgpack.decode(each, type=_LoadMessage) for each in node_ranks.messages]
    wanted = [_decode_ranges(each.spans) for each in messages]
    largest_read = np.minimum.reduce([np.frombuffer(m.largest_reads, np.int64) for m in messages])
    all_mapped = all(each.are_mapped for each in messages)
    # A node reads alone what it has: snapshots, of which it has most, or files on its own disk.
    traits = store.traits
    has_data = traits.mapped is not None or (read_once is None and traits.is_node_local)
    between = None
    if read_once is not False and len(node_ranks) < group.size:
        between = agree_on_reading_once(
            group,
            node_ranks,
            None if has_data else wanted,
            largest_read,
            partial(_measure_store, store, layout, arena),
            cleanup,
            read_once=read_once,
        )
    return ReadPlan(planned, node_ranks, wanted, largest_read, all_mapped, between)


def fill_together(
    plan: ReadPlan, store: Files, arena: Arena, cleanup: ExitStack, *, verify: bool
) -> tuple[int, int]:
    """Read and fill the tensors. Bytes that several ranks need are read once.

    Returns:
        The number of bytes that this rank read, and that it received from other nodes.

    Raises:
        CorruptionError: bytes differ from the saved bytes; the target is partly written.
        RankError: another rank could not read its share.
        LostRankError: another rank died, or did not answer in time.
    """
    planned, node_ranks, between = plan.own, plan.node_ranks, plan.between_nodes
    shared = share_reads(
        plan.wanted,
        largest_read=plan.largest_read,
        between_nodes=None if between is None else between.reads,
    )
    alone = len(node_ranks) == 1 or plan.all_mapped
    if not shared.crosses_nodes and (alone or fraction_saved(plan.wanted, shared) < WORTH_SHARING):
        nbytes = fill_alone(planned, store, arena, verify=verify, ranks_on_node=len(node_ranks))
        return nbytes, 0
    try:
        _read(plan, shared, store, arena, cleanup, verify=verify)
    except BaseException:
        if between is not None:
            between.links.report_failure()
        raise
    planned.finish()
    index = node_ranks.index
    return shared.bytes_of(index, received=False), shared.bytes_of(index, received=True)


def _read(
    plan: ReadPlan,
    shared: SharedReads,
    store: Files,
    arena: Arena,
    cleanup: ExitStack,
    *,
    verify: bool,
) -> None:
    index, transfers, layout = plan.node_ranks.index, plan.own.plan.transfers, plan.own.layout
    ends = [
        end_of_read(layout.files[file], high)
        for file, high in zip(shared.file.tolist(), shared.high.tolist(), strict=True)
    ]
    nbytes = np.array(ends, np.int64) - shared.low
    slot_bytes = BLOCK * block_count(int(nbytes.max()))
    reads = arena.max_concurrent_reads(slot_bytes, len(plan.node_ranks))
    slots = min(reads, int(np.bincount(shared.reader).max()))
    buffers = plan.node_ranks.map_buffers(shared, slots, slot_bytes, layout.files)
    try:
        is_needed = shared.wanted[:, index] | ((shared.reader == index) & ~shared.is_received)
        readers = open_readers(shared.file[is_needed], store, layout, cleanup, verify=verify)
    except BaseException as error:
        buffers.mark_failed(error)
        raise
    spans = assign_transfers(transfers, shared.file, shared.low, shared.high)
    exchange = None
    if plan.between_nodes is not None:
        exchange = partial(plan.between_nodes.links.run, shared, nbytes.tolist(), buffers)
    copier = plan.own.copier(spans)
    threads = arena.threads_of(len(plan.node_ranks))
    read_together(spans, copier, readers, buffers, threads, exchange)


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
