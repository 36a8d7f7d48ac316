"""Fill leaves from a checkpoint: plan what to read, and read it alone or with the node's ranks."""

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
from shardwise.engine.neighbours import Neighbours, meet_neighbours
from shardwise.engine.opened import Opened
from shardwise.engine.read import read_alone, read_together
from shardwise.engine.tensors import Copies, Wanted, check_memory, memory_of, untied
from shardwise.errors import MismatchError
from shardwise.events import size
from shardwise.layout import Box
from shardwise.manifest.checksums import BLOCK, block_count
from shardwise.manifest.manifest import TensorEntry
from shardwise.plan.load import (
    LoadPlan,
    Spans,
    assign_transfers,
    bytes_saved,
    plan_load,
    share_reads,
    wanted_columns,
)
from shardwise.plan.lookup import SavedState
from shardwise.plan.tables import columns_of
from shardwise.state.leaves import Fragment, TensorLeaf, same_bytes
from shardwise.store import MappedStore

WORTH_SHARING = 0.05


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
class Filling:
    """Leaves to fill, their memory, and the plan of the reads."""

    leaves: list[TensorLeaf]
    wanted: list[Wanted]
    plan: LoadPlan


def plan_filling(
    leaves: Sequence[TensorLeaf], saved: SavedState, opened: Opened, arena: Arena
) -> Filling:
    """Plan the reads that fill some leaves."""
    sources = [
        source
        for leaf in _once(leaves, saved)
        for source in _sources(leaf, saved.stored_index(leaf.name), opened)
    ]
    leaves = [leaf for _, leaf, _ in sources]
    wanted: list[Wanted] = []
    tensor: list[int] = []
    boxes = [fragment.box for leaf in leaves for fragment in leaf.fragments]
    for index, leaf, dtype in sources:
        for fragment in leaf.fragments:
            check_memory(leaf.name, fragment.data)
            memory = memory_of(fragment.data, dtype)
            wanted.append(Wanted(leaf.name, fragment.box.offset, memory))
            tensor.append(index)
    dims = max((len(leaf.shape) for leaf in leaves), default=0)
    columns = wanted_columns(
        tensor,
        columns_of([box.offset for box in boxes], dims, 0),
        columns_of([box.shape for box in boxes], dims, 1),
        opened.pieces.offset.shape[1],
    )
    plan = plan_load(opened.source(), columns, largest_read=opened.largest_reads(arena))
    return Filling(leaves, wanted, plan)


def _sources(
    leaf: TensorLeaf, index: int, opened: Opened
) -> list[tuple[int, TensorLeaf, torch.dtype]]:
    """Return what to read for a leaf: numbers of stored tensors, leaves to read into, dtypes.

    A tensor that is the mean of several stored versions is read into one temporary leaf for each
    version; finishing the last of them computes the mean.
    """
    dtype: torch.dtype = getattr(torch, opened.manifest.tensors[index].dtype)
    parts = opened.means.get(index)
    if parts is None:
        return [(index, leaf, dtype)]
    versions = [
        tuple(
            Fragment(f.box, torch.empty(f.box.shape, dtype=dtype, device="cpu"))
            for f in leaf.fragments
        )
        for _ in parts
    ]

    def finish() -> None:
        for i, fragment in enumerate(leaf.fragments):
            mean = torch.stack([version[i].data for version in versions]).mean(
                dim=0, dtype=torch.float64
            )
            fragment.data.copy_(mean)
        if leaf.finish is not None:
            leaf.finish()

    hooks = [None] * (len(parts) - 1) + [finish]
    return [
        (part, TensorLeaf(leaf.name, dtype, leaf.shape, version, None, hook), dtype)
        for part, version, hook in zip(parts, versions, hooks, strict=True)
    ]


def fill(
    filling: Filling, opened: Opened, arena: Arena, *, verify: bool, neighbours: int = 1
) -> int:
    """Read and fill the leaves on this rank alone.

    Args:
        neighbours: how many ranks of this node do so at the same time.

    Returns:
        The bytes that were read.

    Raises:
        CorruptionError: bytes differ from those that were saved; the target is partly written.
    """
    spans = filling.plan.spans
    with ExitStack() as files:
        readers = _open_readers(spans.file, opened, files, verify=verify)
        threads = arena.threads
        if _are_mapped(spans, opened):  # then only processors limit the speed
            threads = min(threads, max(1, (os.cpu_count() or 1) // neighbours))
        read_alone(spans, _copies(filling, spans, opened), readers, arena, threads)
    _finish(filling.leaves)
    return filling.plan.bytes_read


def read_boxes(
    boxes: Sequence[tuple[TensorEntry, Box]], opened: Opened, arena: Arena, *, verify: bool
) -> list[torch.Tensor]:
    """Read boxes of tensors into new tensors, all together.

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
    filling = plan_filling(leaves, SavedState(opened.manifest), opened, arena)
    fill(filling, opened, arena, verify=verify)
    return out


def _once(leaves: Sequence[TensorLeaf], saved: SavedState) -> list[TensorLeaf]:
    """Return the leaves to fill.

    If one memory has several names, the first name fills it; the others are read if the checkpoint
    stores them as other tensors, to compare.
    """
    listed, ties = untied(leaves)
    by_name = {leaf.name: leaf for leaf in leaves}
    for name, first in ties:
        if saved.stored_index(name) != saved.stored_index(first):
            listed.append(_comparison(by_name[name], first))
    return listed


def _comparison(leaf: TensorLeaf, first: str) -> TensorLeaf:
    """Return a leaf that reads a copy, and raises if it differs from what `first` has filled."""
    copies = tuple(Fragment(f.box, f.data.clone()) for f in leaf.fragments)

    def finish() -> None:
        for here, copy in zip(leaf.fragments, copies, strict=True):
            if not same_bytes(here.data, copy.data):
                raise MismatchError(
                    "names share memory in the target, but differ in the checkpoint; the target "
                    "now has the values of the first:",
                    [f"{first} and {leaf.name}"],
                )

    return TensorLeaf(leaf.name, leaf.dtype, leaf.shape, copies, None, finish)


class _Message(msgspec.Struct, array_like=True):
    """What the ranks of a node need to know of each other to plan the same shared reads.

    Attributes:
        are_mapped: whether all files that this rank reads are mapped into its memory.
        spans: the byte ranges that it needs.
        largest_reads: the longest read of each file that it can make, in bytes.
    """

    are_mapped: bool
    spans: bytes
    largest_reads: bytes


def plan_with_neighbours(
    prepare: Callable[[], Filling], opened: Opened, arena: Arena, group: Group, cleanup: ExitStack
) -> tuple[Filling, Neighbours]:
    """Plan what this rank reads, and find the ranks of its node. All ranks call it together.

    Args:
        prepare: plans this rank's reads; if it fails on one rank, it fails on all.
        cleanup: closed when all ranks have finished.
    """

    def speak() -> tuple[Filling, bytes]:
        filling = prepare()
        spans, largest = filling.plan.spans, opened.largest_reads(arena)
        message = _Message(_are_mapped(spans, opened), _encode_spans(spans), largest.tobytes())
        return filling, msgspec.msgpack.encode(message)

    return meet_neighbours(group, speak, cleanup)


def fill_with_neighbours(
    filling: Filling,
    neighbours: Neighbours,
    opened: Opened,
    arena: Arena,
    cleanup: ExitStack,
    *,
    verify: bool,
) -> int:
    """Read and fill the leaves. Bytes that several ranks of a node need are read once there.

    Returns:
        The bytes that this rank read.

    Raises:
        CorruptionError: bytes differ from those that were saved; the target is partly written.
        RankError: another rank of the node could not read its part.
    """
    heard = [msgspec.msgpack.decode(each, type=_Message) for each in neighbours.messages]
    everyone = [_decode_spans(each.spans) for each in heard]
    largest_reads = [np.frombuffer(each.largest_reads, np.int64) for each in heard]
    shared = share_reads(everyone, largest_read=np.minimum.reduce(largest_reads))
    alone = len(neighbours) == 1 or all(each.are_mapped for each in heard)
    if alone or bytes_saved(everyone, shared) < WORTH_SHARING:
        return fill(filling, opened, arena, verify=verify, neighbours=len(neighbours))
    largest = BLOCK * block_count(int((shared.high - shared.low).max()) + opened.beyond)
    slots = min(arena.reads(largest), int(np.bincount(shared.reader).max()))
    rings = neighbours.rings(shared, slots, largest, opened.manifest.files)
    try:
        wanted = shared.file[shared.wanted[:, neighbours.index]]
        readers = _open_readers(wanted, opened, cleanup, verify=verify)
    except BaseException:
        rings.fail()
        raise
    spans = assign_transfers(filling.plan.transfers, shared.file, shared.low, shared.high)
    read_together(spans, _copies(filling, spans, opened), readers, rings, arena.threads)
    _finish(filling.leaves)
    own = shared.reader == neighbours.index
    return int((shared.high - shared.low)[own].sum())


def _are_mapped(spans: Spans, opened: Opened) -> bool:
    """Return whether all files of the spans are mapped into this rank's memory."""
    store, entries = opened.store, opened.manifest.files
    return isinstance(store, MappedStore) and all(
        store.is_mapped(entries[number].name) for number in np.unique(spans.file).tolist()
    )


def _finish(leaves: Sequence[TensorLeaf]) -> None:
    for leaf in leaves:
        if leaf.finish is not None:
            leaf.finish()


def _copies(filling: Filling, spans: Spans, opened: Opened) -> Copies:
    return Copies(filling.plan.transfers, spans, opened.stride, filling.wanted)


def _open_readers(
    files: npt.NDArray[np.int64], opened: Opened, cleanup: ExitStack, *, verify: bool
) -> dict[int, DataReader]:
    readers: dict[int, DataReader] = {}
    for number in np.unique(files).tolist():
        readers[number] = opened.reader(number, verify=verify)
        cleanup.callback(readers[number].close)
    return readers


def _encode_spans(spans: Spans) -> bytes:
    return np.stack([spans.file, spans.low, spans.high]).tobytes()


def _decode_spans(message: bytes) -> Spans:
    file, low, high = np.frombuffer(message, np.int64).reshape(3, -1)
    none = np.zeros(0, np.int64)
    return Spans(file, low, high, none, none)
