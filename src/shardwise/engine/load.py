"""Fill tensors from a checkpoint: plan the reads, and read alone or with the ranks of the node."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from shardwise.engine.buffers import Arena
from shardwise.engine.datareader import DataReader
from shardwise.engine.group import Group
from shardwise.engine.node_ranks import NodeRanks, find_node_ranks
from shardwise.engine.opened import Opened
from shardwise.engine.read import read_alone, read_together
from shardwise.engine.tensors import (
    SpanCopier,
    TargetFragment,
    check_memory,
    memory_of,
    split_ties,
)
from shardwise.errors import MismatchError
from shardwise.events import size
from shardwise.layout import Box
from shardwise.manifest.checksums import BLOCK, block_count
from shardwise.manifest.manifest import TensorEntry
from shardwise.manifest.pieces import padded_rows
from shardwise.plan.load import (
    LoadPlan,
    Spans,
    assign_transfers,
    fraction_saved,
    plan_load,
    share_reads,
    wanted_columns,
)
from shardwise.plan.name_lookup import SavedNames
from shardwise.state.leaves import Fragment, TensorLeaf, same_bytes
from shardwise.store import MappedStore

WORTH_SHARING = 0.05
"""The smallest fraction of bytes to save for which the ranks of a node read together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The result of a load. Bytes and seconds are those of this rank.

    Attributes:
        path: the path of the checkpoint.
        step: the step of the checkpoint, if it has one.
        bytes_needed: the size of the elements that this rank needed.
        bytes_read: bytes that this rank read for them, in whole checksum blocks.
        files: the number of data files that this rank read from.
        missing: names of the state that the checkpoint lacks; unchanged (`strict=False` only).
        unexpected: names of the checkpoint that no rank asked for (`strict=False` only).
        optimizers: the names of the optimizers whose state was loaded on this rank.
        seconds: the time of each stage (open, match, plan, read, restore), and `total`.
    """

    path: str
    step: int | None
    bytes_needed: int
    bytes_read: int
    files: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    optimizers: tuple[str, ...]
    seconds: dict[str, float]

    def __str__(self) -> str:
        step = "" if self.step is None else f" step {self.step}"
        missing = f"; {len(self.missing)} name(s) missing" if self.missing else ""
        unexpected = f"; {len(self.unexpected)} name(s) left over" if self.unexpected else ""
        return (
            f"loaded{step} from {self.path}: {size(self.bytes_needed)}, for which this rank read "
            f"{size(self.bytes_read)}, in {self.seconds['total']:.2f} s{missing}{unexpected}"
        )


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """The tensors to fill on this rank, and the plan of the reads.

    Attributes:
        leaves: the tensors to fill.
        targets: the memory of their fragments.
        plan: the spans to read, and the boxes to copy from them.
    """

    leaves: list[TensorLeaf]
    targets: list[TargetFragment]
    plan: LoadPlan

    def copier(self, spans: Spans, opened: Opened) -> SpanCopier:
        """Return the object that copies boxes from these spans to the fragments."""
        return SpanCopier(self.plan.transfers, spans, opened.stride, self.targets)

    def finish(self) -> None:
        """Move values to their final memory, after all fragments are filled."""
        for leaf in self.leaves:
            if leaf.after_load is not None:
                leaf.after_load()


def plan_reads(
    leaves: Sequence[TensorLeaf], saved: SavedNames, opened: Opened, arena: Arena
) -> PlannedLoad:
    """Plan the reads that fill some tensors.

    Raises:
        StateError: a tensor has no memory.
    """
    stored = [
        each
        for leaf in _leaves_to_read(leaves, saved)
        for each in _stored_tensors(leaf, saved.stored_index(leaf.name), opened)
    ]
    leaves = [leaf for _, leaf, _ in stored]
    targets: list[TargetFragment] = []
    tensor: list[int] = []
    boxes = [fragment.box for leaf in leaves for fragment in leaf.fragments]
    for index, leaf, dtype in stored:
        for fragment in leaf.fragments:
            check_memory(leaf.name, fragment.data)
            memory = memory_of(fragment.data, dtype)
            targets.append(TargetFragment(leaf.name, fragment.box.offset, memory))
            tensor.append(index)
    dims = max((len(leaf.shape) for leaf in leaves), default=0)
    columns = wanted_columns(
        tensor,
        padded_rows([box.offset for box in boxes], dims, 0),
        padded_rows([box.shape for box in boxes], dims, 1),
        opened.pieces.offset.shape[1],
    )
    plan = plan_load(opened.source(), columns, largest_read=opened.largest_reads(arena))
    return PlannedLoad(leaves, targets, plan)


def _leaves_to_read(leaves: Sequence[TensorLeaf], saved: SavedNames) -> list[TensorLeaf]:
    """Return the leaves to fill, and leaves that compare further names of the same memory.

    If one memory has several names, the first name fills the memory. Another name is read too if
    the checkpoint stores a different tensor under that name.
    """
    listed, ties = split_ties(leaves)
    by_name = {leaf.name: leaf for leaf in leaves}
    for name, first_name in ties:
        if saved.stored_index(name) != saved.stored_index(first_name):
            listed.append(_comparing_leaf(by_name[name], first_name))
    return listed


def _comparing_leaf(leaf: TensorLeaf, first_name: str) -> TensorLeaf:
    """Return a leaf that reads into a copy, and raises if the copy differs from the memory."""
    copies = tuple(Fragment(f.box, f.data.clone()) for f in leaf.fragments)

    def finish() -> None:
        for filled, copy in zip(leaf.fragments, copies, strict=True):
            if not same_bytes(filled.data, copy.data):
                raise MismatchError(
                    "names that share memory in the target have different values in the "
                    "checkpoint. The target now has the values of the first name; load into "
                    "tensors that are not tied, or leave out one name with skip=:",
                    [f"{first_name} and {leaf.name}"],
                )

    return TensorLeaf(leaf.name, leaf.dtype, leaf.shape, copies, None, finish)


def _stored_tensors(
    leaf: TensorLeaf, index: int, opened: Opened
) -> list[tuple[int, TensorLeaf, torch.dtype]]:
    """Return the stored tensors to read for a leaf.

    A tensor can be the mean of several stored versions. Then each version is read into a temporary
    leaf, and the last of these leaves computes the mean when it is finished.

    Returns:
        The index and dtype of each stored tensor, with the leaf to read it into.
    """
    dtype: torch.dtype = getattr(torch, opened.manifest.tensors[index].dtype)
    version_indices = opened.means.get(index)
    if version_indices is None:
        return [(index, leaf, dtype)]
    versions = [
        tuple(
            Fragment(f.box, torch.empty(f.box.shape, dtype=dtype, device="cpu"))
            for f in leaf.fragments
        )
        for _ in version_indices
    ]

    def finish() -> None:
        for i, fragment in enumerate(leaf.fragments):
            mean = torch.stack([version[i].data for version in versions]).mean(
                dim=0, dtype=torch.float64
            )
            fragment.data.copy_(mean)
        if leaf.after_load is not None:
            leaf.after_load()

    hooks = [None] * (len(version_indices) - 1) + [finish]
    return [
        (version_index, TensorLeaf(leaf.name, dtype, leaf.shape, fragments, None, hook), dtype)
        for version_index, fragments, hook in zip(version_indices, versions, hooks, strict=True)
    ]


def fill_alone(
    planned: PlannedLoad, opened: Opened, arena: Arena, *, verify: bool, ranks_on_node: int = 1
) -> int:
    """Read and fill the tensors on this rank alone.

    Args:
        ranks_on_node: the number of ranks of this node that read at the same time.

    Returns:
        The number of bytes that were read.

    Raises:
        CorruptionError: bytes differ from those that were saved; the target is partly written.
    """
    spans = planned.plan.spans
    with ExitStack() as cleanup:
        readers = _open_readers(spans.file, opened, cleanup, verify=verify)
        threads = arena.threads
        if _are_mapped(spans, opened):  # then only the processors limit the speed
            threads = min(threads, max(1, (os.cpu_count() or 1) // ranks_on_node))
        read_alone(spans, planned.copier(spans, opened), readers, arena, threads)
    planned.finish()
    return planned.plan.bytes_read


def read_boxes(
    boxes: Sequence[tuple[TensorEntry, Box]], opened: Opened, arena: Arena, *, verify: bool
) -> list[torch.Tensor]:
    """Read boxes of tensors into new CPU tensors, all together.

    Raises:
        CorruptionError: bytes differ from those that were saved.
    """
    out = [
        torch.empty(box.shape, dtype=getattr(torch, entry.dtype), device="cpu")
        for entry, box in boxes
    ]
    leaves = [
        TensorLeaf(entry.name, data.dtype, entry.shape, (Fragment(box, data),))
        for (entry, box), data in zip(boxes, out, strict=True)
    ]
    planned = plan_reads(leaves, SavedNames(opened.manifest), opened, arena)
    fill_alone(planned, opened, arena, verify=verify)
    return out


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


def plan_with_node_ranks(
    plan: Callable[[], PlannedLoad], opened: Opened, arena: Arena, group: Group, cleanup: ExitStack
) -> tuple[PlannedLoad, NodeRanks]:
    """Plan this rank's reads, and find the ranks of its node. All ranks call this together.

    Args:
        plan: plans this rank's reads. A failure on one rank is raised on all ranks.
        cleanup: closed when all ranks have finished.

    Raises:
        ShardwiseError: as for `exchange`.
    """

    def make_message() -> tuple[PlannedLoad, bytes]:
        planned = plan()
        spans, largest = planned.plan.spans, opened.largest_reads(arena)
        message = _LoadMessage(_are_mapped(spans, opened), _encode_spans(spans), largest.tobytes())
        return planned, msgspec.msgpack.encode(message)

    return find_node_ranks(group, make_message, cleanup)


def fill_with_node_ranks(
    planned: PlannedLoad,
    node_ranks: NodeRanks,
    opened: Opened,
    arena: Arena,
    cleanup: ExitStack,
    *,
    verify: bool,
) -> int:
    """Read and fill the tensors. Bytes that several ranks of the node need are read once.

    Returns:
        The number of bytes that this rank read.

    Raises:
        CorruptionError: bytes differ from those that were saved; the target is partly written.
        RankError: another rank of the node could not read its share.
        LostRankError: another rank of the node died, or did not answer in time.
    """
    messages = [msgspec.msgpack.decode(each, type=_LoadMessage) for each in node_ranks.messages]
    spans_of_ranks = [_decode_spans(each.spans) for each in messages]
    largest_reads = [np.frombuffer(each.largest_reads, np.int64) for each in messages]
    shared = share_reads(spans_of_ranks, largest_read=np.minimum.reduce(largest_reads))
    alone = len(node_ranks) == 1 or all(each.are_mapped for each in messages)
    if alone or fraction_saved(spans_of_ranks, shared) < WORTH_SHARING:
        return fill_alone(planned, opened, arena, verify=verify, ranks_on_node=len(node_ranks))
    longest_read = int((shared.high - shared.low).max())
    slot_bytes = BLOCK * block_count(longest_read + opened.bytes_past_end)
    slots = min(arena.max_concurrent_reads(slot_bytes), int(np.bincount(shared.reader).max()))
    buffers = node_ranks.map_buffers(shared, slots, slot_bytes, opened.manifest.files)
    try:
        files = shared.file[shared.wanted[:, node_ranks.index]]
        readers = _open_readers(files, opened, cleanup, verify=verify)
    except BaseException:
        buffers.mark_failed()
        raise
    spans = assign_transfers(planned.plan.transfers, shared.file, shared.low, shared.high)
    read_together(spans, planned.copier(spans, opened), readers, buffers, arena.threads)
    planned.finish()
    is_own = shared.reader == node_ranks.index
    return int((shared.high - shared.low)[is_own].sum())


def _are_mapped(spans: Spans, opened: Opened) -> bool:
    """Return whether all files of the spans are mapped into this rank's memory."""
    store, entries = opened.store, opened.manifest.files
    return isinstance(store, MappedStore) and all(
        store.is_mapped(entries[index].name) for index in np.unique(spans.file).tolist()
    )


def _open_readers(
    files: npt.NDArray[np.int64], opened: Opened, cleanup: ExitStack, *, verify: bool
) -> dict[int, DataReader]:
    readers: dict[int, DataReader] = {}
    for index in np.unique(files).tolist():
        readers[index] = opened.reader(index, verify=verify)
        cleanup.callback(readers[index].close)
    return readers


def _encode_spans(spans: Spans) -> bytes:
    return np.stack([spans.file, spans.low, spans.high]).tobytes()


def _decode_spans(message: bytes) -> Spans:
    file, low, high = np.frombuffer(message, np.int64).reshape(3, -1)
    no_rows = np.zeros(0, np.int64)
    return Spans(file, low, high, no_rows, no_rows)
