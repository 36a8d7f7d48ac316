"""Leaves filled from a checkpoint: planned, read alone or with the ranks of the node, finished."""

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
from shardwise.engine.neighbours import Neighbours
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
    """Leaves that are to be filled, and the plan for it."""

    leaves: list[TensorLeaf]
    wanted: list[Wanted]
    plan: LoadPlan


def plan_filling(
    leaves: Sequence[TensorLeaf], saved: SavedState, opened: Opened, arena: Arena
) -> Filling:
    """Plan to read what the leaves want."""
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
    """What is read for a leaf: a tensor of this number, into this leaf, of this dtype."""
    dtype: torch.dtype = getattr(torch, opened.manifest.tensors[index].dtype)
    parts = opened.parts.get(index)
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
    """Read a filling on this rank alone, and finish its leaves.

    Args:
        neighbours: how many ranks of this node do so at a time.

    Returns:
        The bytes that were read.

    Raises:
        CorruptionError: bytes are not what was saved; the target is partly written by then.
    """
    spans = filling.plan.spans
    with ExitStack() as files:
        readers = _open_readers(spans.file, opened, files, verify=verify)
        threads = arena.threads
        if _are_mapped(spans, opened):  # then only processors are waited for
            threads = min(threads, max(1, (os.cpu_count() or 1) // neighbours))
        read_alone(spans, _copies(filling, spans, opened), readers, arena, threads)
    _finish(filling.leaves)
    return filling.plan.bytes_read


def read_boxes(
    boxes: Sequence[tuple[TensorEntry, Box]], opened: Opened, arena: Arena, *, verify: bool
) -> list[torch.Tensor]:
    """Boxes of tensors of a checkpoint, read together, each into memory of its own.

    Raises:
        CorruptionError: bytes are not what was saved.
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
    """Leaves to fill: of one memory under several names the first, the others for comparison."""
    listed, ties = untied(leaves)
    by_name = {leaf.name: leaf for leaf in leaves}
    for name, first in ties:
        if saved.stored_index(name) != saved.stored_index(first):
            listed.append(_comparison(by_name[name], first))
    return listed


def _comparison(leaf: TensorLeaf, first: str) -> TensorLeaf:
    """Reads a leaf beside the memory that `first` fills, and refuses if they differ."""
    copies = tuple(Fragment(f.box, f.data.clone()) for f in leaf.fragments)

    def finish() -> None:
        for here, copy in zip(leaf.fragments, copies, strict=True):
            if not same_bytes(here.data, copy.data):
                raise MismatchError(
                    "names share one memory in the target, and differ in the checkpoint; the "
                    "target has the first one's values:",
                    [f"{first} and {leaf.name}"],
                )

    return TensorLeaf(leaf.name, leaf.dtype, leaf.shape, copies, None, finish)


class _Message(msgspec.Struct, array_like=True):
    """All that the ranks of a node need of each other to plan the same shared reads.

    Attributes:
        are_mapped: whether this rank can read all that it wants where it lies in memory.
        spans: what it wants to read.
        largest_reads: the longest read of each file that it can make, which depends on what lies
            in its memory.
    """

    are_mapped: bool
    spans: bytes
    largest_reads: bytes


class GroupFilling:
    """A filling on all ranks of a group: what several ranks of a node want is read once there.

    Made by all ranks together. `filling` is this rank's own.

    Args:
        prepare: plans this rank's filling; if it fails on one rank, it fails on all.
        cleanup: is closed when all ranks are done.
    """

    def __init__(
        self,
        prepare: Callable[[], Filling],
        opened: Opened,
        arena: Arena,
        group: Group,
        cleanup: ExitStack,
    ) -> None:
        prepared: list[Filling] = []

        def speak() -> bytes:
            prepared.append(prepare())
            spans = prepared[0].plan.spans
            largest = opened.largest_reads(arena)
            message = _Message(_are_mapped(spans, opened), _encode_spans(spans), largest.tobytes())
            return msgspec.msgpack.encode(message)

        self._opened = opened
        self._arena = arena
        self._cleanup = cleanup
        self._neighbours = Neighbours(group, speak, cleanup)
        self.filling = prepared[0]

    def fill(self, *, verify: bool) -> int:
        """Read, and finish the leaves.

        Returns:
            The bytes that this rank read.

        Raises:
            CorruptionError: bytes are not what was saved; the target is partly written by then.
            RankError: another rank of the node could not read its part.
        """
        neighbours, opened = self._neighbours, self._opened
        heard = [msgspec.msgpack.decode(each, type=_Message) for each in neighbours.messages]
        everyone = [_decode_spans(each.spans) for each in heard]
        largest_reads = [np.frombuffer(each.largest_reads, np.int64) for each in heard]
        shared = share_reads(everyone, largest_read=np.minimum.reduce(largest_reads))
        alone = len(neighbours) == 1 or all(each.are_mapped for each in heard)
        if alone or bytes_saved(everyone, shared) < WORTH_SHARING:
            count = len(neighbours)
            return fill(self.filling, opened, self._arena, verify=verify, neighbours=count)
        largest = BLOCK * block_count(int((shared.high - shared.low).max()) + opened.beyond)
        slots = min(self._arena.reads(largest), int(np.bincount(shared.reader).max()))
        rings = neighbours.rings(shared, slots, largest, opened.manifest.files)
        own = shared.reader == neighbours.index
        wanted = shared.file[shared.wanted[:, neighbours.index]]
        try:
            readers = _open_readers(wanted, opened, self._cleanup, verify=verify)
        except BaseException:
            rings.fail()
            raise
        transfers = self.filling.plan.transfers
        spans = assign_transfers(transfers, shared.file, shared.low, shared.high)
        copies = _copies(self.filling, spans, opened)
        read_together(spans, copies, readers, rings, self._arena.threads)
        _finish(self.filling.leaves)
        return int((shared.high - shared.low)[own].sum())


def _are_mapped(spans: Spans, opened: Opened) -> bool:
    """Whether this rank can read all that it wants where it lies in memory."""
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
        readers[number] = DataReader(opened.store, opened.manifest.files[number], verify=verify)
        cleanup.callback(readers[number].close)
    return readers


def _encode_spans(spans: Spans) -> bytes:
    return np.stack([spans.file, spans.low, spans.high]).tobytes()


def _decode_spans(message: bytes) -> Spans:
    file, low, high = np.frombuffer(message, np.int64).reshape(3, -1)
    none = np.zeros(0, np.int64)
    return Spans(file, low, high, none, none)
