"""A read strategy: if several ranks need the same bytes, one rank reads them from storage."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import numpy as np

from shardwise.kernel.engine.data_reader import end_of_read
from shardwise.kernel.engine.group import Group
from shardwise.kernel.engine.load import Readers, read_span, run_in_threads
from shardwise.kernel.engine.rounds import Round
from shardwise.kernel.engine.tensors import SpanCopier
from shardwise.kernel.errors import CorruptionError
from shardwise.kernel.manifest.checksums import BLOCK, block_count
from shardwise.kernel.plan.load import Ranges
from shardwise.kernel.store.store import Buffer
from shardwise.parts.sharing.agreement import WORTH_SHARING, agree_on_reading_once
from shardwise.parts.sharing.links import Links
from shardwise.parts.sharing.node_ranks import (
    NodeRanks,
    WantedReads,
    encode_ranges,
    find_node_ranks,
)
from shardwise.parts.sharing.reads import NO_RANK, Reads, share_reads
from shardwise.parts.sharing.shared_buffers import SharedBuffers
from shardwise.ports.read_strategy import RankReads


def read_together(group: Group, read_once: bool | None) -> ReadTogether:
    """Return the strategy, given the user's choice."""
    return ReadTogether(read_once)


class ReadTogether:
    """One rank reads the bytes that several ranks need.

    Args:
        read_once: whether nodes share reads. None: they do if they read from shared storage, and
            sharing avoids at least 5 % of the bytes and 64 MiB. The ranks of a node share reads if
            this avoids at least 5 % of the bytes.
    """

    def __init__(self, read_once: bool | None) -> None:
        self._read_once = read_once

    def agree(self, reads: RankReads, group: Group, cleanup: ExitStack) -> Callable[[], None]:
        """Plan what this rank shares with other ranks. All ranks call this method together.

        Returns:
            A function that reads, and fills the tensors of this rank. It raises

            - CorruptionError: bytes differ from the saved bytes; the target is partly written.
            - RankError: another rank could not read its share.
            - LostRankError: another rank died, or did not answer in time.

        Raises:
            ShardwiseError: as for `Round`.
        """
        traits = reads.store.traits
        wants = WantedReads(
            reads.are_mapped, encode_ranges(reads.spans), reads.largest_reads.tobytes()
        )
        node = find_node_ranks(group, wants, cleanup)
        between = None
        if self._read_once is not False and len(node) < group.size:
            # A node does not share what it has itself: most files of a snapshot, or its own disk.
            is_local = self._read_once is None and traits.is_node_local
            may_share = traits.mapped is None and not is_local
            agree = partial(
                agree_on_reading_once,
                node=node,
                cleanup=cleanup,
                may_share=may_share,
                read_once=self._read_once,
            )
            if len(node.neighbors) == group.size:
                between = agree(group)
            else:
                with Round(group, "planning shared reads"):  # other parts learn of failures, too
                    between = agree(group.part(node.neighbors, cleanup))
        from_nodes, links = between or (None, None)
        shared = share_reads(node.wanted, largest_read=node.largest_read, between_nodes=from_nodes)
        alone = sum(each.nbytes for each in node.wanted)
        saves_little = alone - shared.nbytes < max(1, WORTH_SHARING * alone)
        if not shared.cross_nodes and (len(node) == 1 or node.are_mapped or saves_little):
            return partial(reads.fill_alone, len(node))
        return partial(_fill_together, reads, shared, node, links, cleanup)


def _fill_together(
    reads: RankReads,
    shared: Reads,
    node: NodeRanks,
    links: Links | None,
    cleanup: ExitStack,
) -> None:
    try:
        _read(reads, shared, node, links, cleanup)
    except BaseException:
        if links is not None:
            links.report_failure()
        raise
    reads.finish()
    reads.bytes_read += shared.bytes_of(node.local_rank, received=False)
    reads.bytes_received += shared.bytes_of(node.local_rank, received=True)


def _read(
    reads: RankReads,
    shared: Reads,
    node: NodeRanks,
    links: Links | None,
    cleanup: ExitStack,
) -> None:
    index, arena = node.local_rank, reads.arena
    ends = [
        end_of_read(reads.layout.files[file], high)
        for file, high in zip(shared.file.tolist(), shared.high.tolist(), strict=True)
    ]
    nbytes = np.array(ends, np.int64) - shared.low
    slot_bytes = BLOCK * block_count(int(nbytes.max()))
    most_reads = arena.max_concurrent_reads(slot_bytes, len(node)) * (1 + shared.cross_nodes)
    slots = min(most_reads, int(np.bincount(shared.reader).max()))
    buffers = SharedBuffers(shared, node, slots, slot_bytes)
    try:
        is_read_here = (shared.reader == index) & (shared.source == NO_RANK)
        files = shared.file[shared.wanted[:, index] | is_read_here]
        readers = reads.open_readers(files, cleanup)
    except BaseException as error:
        buffers.mark_failed(error)
        raise
    exchange = None
    if links is not None:
        exchange = partial(links.run, shared, nbytes.tolist(), buffers)
    threads = arena.threads_of(len(node))
    _read_together(shared, reads.copier(shared), readers, buffers, threads, exchange)


def _read_together(
    spans: Ranges,
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
        CorruptionError: as for `RankReads.fill_alone`.
        RankError: another rank could not read its share.
        LostRankError: another rank died, or made no progress before the timeout.
    """

    def process(span: int) -> None:
        slot = buffers.slot(span)
        if buffers.is_read_here(span):
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
    spans: Ranges, span: int, readers: Readers, buffers: SharedBuffers, slot: Buffer
) -> Buffer:
    """Verify the bytes that another rank has read into its slot, and return them."""
    file, low, high = (int(column[span]) for column in (spans.file, spans.low, spans.high))
    try:
        return readers[file].verify_shared(low, high, slot, buffers.checksum(span))
    except CorruptionError as error:
        how = "passed them on" if buffers.is_received(span) else "had read them"
        raise CorruptionError(f"{error}; rank {buffers.reader_of(span)} {how}") from error
