"""Plan a save: from the structures of all ranks, compute the pieces that each rank writes.

Every rank computes the same plan, so that no plan is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt

from shardwise.errors import FormatError, LayoutError
from shardwise.events import format_count
from shardwise.layout import Box, boxes_of_range, find_uncovered_tensors
from shardwise.layout.columns import Int, padded_rows
from shardwise.manifest.data_file import encode_header_entries
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import TensorEntry
from shardwise.manifest.pieces import check_table_size, encode_tensors
from shardwise.plan.held_boxes import HeldBoxes, find_held_boxes
from shardwise.plan.structure import Description, Structure, World

Float = npt.NDArray[np.float64]
LARGEST_GRAIN = 1 << 20
SMALLEST_GRAIN = 1 << 16
"""Bounds on the unit, in bytes, at which replicas are cut; see `divide_replicas`."""


@dataclass(frozen=True, slots=True)
class PieceTable:
    """The n pieces in the data section of a rank's file, which follow each other without gaps.

    Most columns are lists, because the loop that copies pieces reads them one by one.

    Attributes:
        start: the offset of each piece in the data section, in bytes, followed by the end of the
            last piece, `(n + 1,)`.
        fragment: the index of the fragment that contains each piece.
        offset, shape: the box of each piece within its fragment, in elements.
        whole: whether each piece is its whole fragment.
    """

    start: Int
    fragment: list[int]
    offset: list[tuple[int, ...]]
    shape: list[tuple[int, ...]]
    whole: list[bool]

    def __len__(self) -> int:
        return len(self.fragment)

    def describe_pieces(
        self, description: Description
    ) -> Iterator[tuple[str, str, tuple[int, ...], Box]]:
        """Yield the name, dtype and global shape of each piece's tensor, and the piece's box."""
        structure = description.structure
        tensors, origins = description.tensor.tolist(), description.offset.tolist()
        for fragment, offset, shape in zip(self.fragment, self.offset, self.shape, strict=True):
            tensor = tensors[fragment]
            start = tuple(o + w for o, w in zip(origins[fragment], offset, strict=False))
            yield (
                structure.names[tensor],
                structure.dtypes[tensor],
                structure.shapes[tensor],
                Box(start, shape),
            )


def piece_table(description: Description, fragment: Int, offset: Int, shape: Int) -> PieceTable:
    """Return a table of pieces, in the order of the file.

    Args:
        description: the fragments that contain the pieces.
        fragment: the index of the fragment that contains each piece, `(n,)`.
        offset, shape: the pieces, as boxes of the global tensors, `(n, D)`.
    """
    structure, dims = description.structure, description.shape.shape[1]
    offset, shape = offset[:, :dims], shape[:, :dims]  # others may have tensors of more dimensions
    tensor = description.tensor[fragment]
    itemsize = np.array([DTYPES[dtype].itemsize for dtype in structure.dtypes], np.int64)
    nbytes = shape.prod(axis=1) * itemsize[tensor]
    ndims = [len(structure.shapes[i]) for i in tensor.tolist()]
    whole: npt.NDArray[np.bool_] = (shape == description.shape[fragment]).all(axis=1)
    return PieceTable(
        np.concatenate([[0], np.cumsum(nbytes)]),
        fragment.tolist(),
        _without_padding(offset - description.offset[fragment], ndims),
        _without_padding(shape, ndims),
        whole.tolist(),
    )


def _without_padding(columns: Int, ndims: list[int]) -> list[tuple[int, ...]]:
    return [tuple(row[:n]) for row, n in zip(columns.tolist(), ndims, strict=True)]


@dataclass(frozen=True, eq=False)
class SavePlan:
    """The n pieces that all ranks write, in columns, as computed by one rank.

    Rank r writes the rows `limits[r]:limits[r + 1]` to its file, in this order.

    Attributes:
        world: the structures of all ranks.
        rank: the rank that computed the plan.
        description: the structure and the fragments of this rank.
        tensors: all tensors, without pieces.
        tied: the names that share the data of another tensor.
        boxes: the distinct boxes that ranks hold.
        replicas: for each set of several ranks, the rows of the boxes that all of them and no other
            rank hold; small sets first.
        limits: the first row of each rank, and n, `(ranks + 1,)`.
        box: the row in `boxes` that contains each piece, `(n,)`.
        offset, shape: the pieces, as boxes of the global tensors, `(n, D)`.
    """

    world: World
    rank: int
    description: Description
    tensors: tuple[TensorEntry, ...]
    tied: tuple[TensorEntry, ...]
    boxes: HeldBoxes
    replicas: tuple[tuple[tuple[int, ...], Int], ...]
    limits: Int
    box: Int
    offset: Int
    shape: Int

    @cached_property
    def itemsize(self) -> Int:
        """The size of an element of each tensor, in bytes."""
        return _itemsize(self.tensors)

    @cached_property
    def pieces(self) -> PieceTable:
        """The pieces that this rank writes."""
        return self.pieces_of(self.rank)

    def pieces_of(self, rank: int) -> PieceTable:
        """Return the pieces that a rank writes, in the fragments of this rank.

        Args:
            rank: this rank, or another one that holds equal boxes.
        """
        rows = slice(int(self.limits[rank]), int(self.limits[rank + 1]))
        fragments = self.boxes.fragment[self.box[rows]]
        return piece_table(self.description, fragments, self.offset[rows], self.shape[rows])

    @cached_property
    def header_entries(self) -> tuple[bytes, int]:
        """The entries of this rank's pieces in the header of its file; see `lay_out_file`."""
        return encode_header_entries(self.pieces.describe_pieces(self.description))

    @cached_property
    def writers(self) -> Int:
        """The ranks that write a file, in the order of the list of files."""
        has_values = np.array([bool(each.per_rank) for each in self.world.structures])
        return np.flatnonzero((np.diff(self.limits) > 0) | has_values[self.world.structure_of])

    @cached_property
    def bytes_held(self) -> int:
        """The tensor bytes of all ranks together, with replicas."""
        boxes = self.boxes
        sizes = boxes.shape.prod(axis=1) * self.itemsize[boxes.tensor]
        return int((sizes * boxes.counts).sum())

    @cached_property
    def bytes_stored(self) -> int:
        """The tensor bytes that are written, without replicas."""
        itemsize = self.itemsize[self.boxes.tensor[self.box]]
        return int((self.shape.prod(axis=1) * itemsize).sum())

    @cached_property
    def encoded_tensors(self) -> msgspec.Raw:
        """The list of tensors in the manifest, with their pieces, encoded."""
        tensor = self.boxes.tensor[self.box]
        ranks = np.repeat(np.arange(self.world.size), np.diff(self.limits))
        ends = np.concatenate([[0], np.cumsum(self.shape.prod(axis=1) * self.itemsize[tensor])])
        start = ends[:-1] - ends[self.limits][ranks]
        columns = (tensor, np.searchsorted(self.writers, ranks), start, self.offset, self.shape)
        order = np.lexsort([*reversed(self.offset.T), tensor])
        entries = [*self.tensors, *self.tied]
        return encode_tensors(entries, *(column[order] for column in columns))


def plan_save(world: World, rank: int, description: Description) -> SavePlan:
    """Plan which rank writes which boxes, so that each element is written once.

    Args:
        world: the structures of all ranks.
        rank: this rank. The rows of the plan are the same on all ranks.
        description: the structure and the fragments of this rank.

    Raises:
        MismatchError: ranks have different dtypes or shapes of the same tensor.
        LayoutError: the shards of a tensor leave gaps, or overlap without being equal, or a tensor
            is tied on some ranks only.
    """
    tensors, boxes = find_held_boxes(world, rank)
    _check_coverage(tensors, boxes)
    tied = _tied_entries(world.structures, tensors)
    itemsize = _itemsize(tensors)
    replicas = _replicas(boxes)
    writer, box, offset, shape = _assign_writers(boxes, replicas, itemsize, world.size)
    # Wider types come first in a file, so that every piece is aligned to its own type.
    tensor = boxes.tensor[box]
    order = np.lexsort([*reversed(offset.T), tensor, -itemsize[tensor], writer])
    limits = np.searchsorted(writer[order], np.arange(world.size + 1))
    _refuse_too_many(offset)
    return SavePlan(
        world,
        rank,
        description,
        tuple(tensors),
        tuple(tied),
        boxes,
        replicas,
        limits,
        box[order],
        offset[order],
        shape[order],
    )


def _itemsize(tensors: Sequence[TensorEntry]) -> Int:
    return np.array([DTYPES[tensor.dtype].itemsize for tensor in tensors], np.int64)


def _refuse_too_many(offset: Int) -> None:
    """Refuse more pieces than a load accepts."""
    try:
        check_table_size(*offset.shape)
    except FormatError as error:
        raise LayoutError(str(error)) from error


def _check_coverage(tensors: Sequence[TensorEntry], boxes: HeldBoxes) -> None:
    if not tensors:
        return
    shapes = padded_rows([t.shape for t in tensors], boxes.offset.shape[1], 1)
    everything = np.ones(len(tensors), bool)
    columns = boxes.tensor, boxes.offset, boxes.shape
    wrong = find_uncovered_tensors(shapes, *columns, everything).tolist()
    if not wrong:
        return
    lines = []
    for i in wrong[:10]:
        ndim = len(tensors[i].shape)
        parts = [
            (boxes.sets[boxes.holders[row]][0], boxes.offset[row], boxes.shape[row])
            for row in np.flatnonzero(boxes.tensor == i)[:8].tolist()
        ]
        shown = ", ".join(
            f"rank {rank} has {Box(tuple(offset[:ndim].tolist()), tuple(shape[:ndim].tolist()))}"
            for rank, offset, shape in parts
        )
        lines.append(f"  - {tensors[i].name} {list(tensors[i].shape)}: {shown}")
    if len(wrong) > len(lines):
        lines.append(f"  - and {format_count(len(wrong) - len(lines), 'more tensor')}")
    raise LayoutError(
        f"the shards of {format_count(len(wrong), 'tensor')} leave gaps, or overlap without being "
        "equal; some rank must hold each element, and ranks that hold the same element must hold "
        "equal boxes:\n" + "\n".join(lines)
    )


def _replicas(boxes: HeldBoxes) -> tuple[tuple[tuple[int, ...], Int], ...]:
    """Return the sets of several ranks, small sets first, and the rows of the boxes they hold."""
    order = np.argsort(boxes.holders, kind="stable")
    limits = np.searchsorted(boxes.holders[order], np.arange(1, len(boxes.sets)))
    rows_of = np.split(order, limits)
    found = [
        (ranks, rows)
        for ranks, rows in zip(boxes.sets, rows_of, strict=False)
        if len(ranks) > 1 and len(rows)
    ]
    return tuple(sorted(found, key=lambda each: (len(each[0]), each[0])))


def _assign_writers(
    boxes: HeldBoxes,
    replicas: Iterable[tuple[tuple[int, ...], Int]],
    itemsize: Int,
    world: int,
) -> tuple[Int, Int, Int, Int]:
    """Choose which rank writes each piece.

    Returns:
        The rank that writes each piece, the row of the box that contains the piece, and the offset
        and shape of the piece.
    """
    alone = np.flatnonzero(boxes.counts == 1)
    first_rank = np.array([ranks[0] for ranks in boxes.sets], np.int64)
    ranks = first_rank[boxes.holders[alone]]
    sizes = boxes.shape[alone].prod(axis=1) * itemsize[boxes.tensor[alone]]
    loads = np.bincount(ranks, weights=sizes, minlength=world).astype(np.float64)
    rank_parts, box_parts = [ranks], [alone]
    offset_parts, shape_parts = [boxes.offset[alone]], [boxes.shape[alone]]
    for holders, rows in replicas:
        shapes = boxes.shape[rows].tolist()
        sizes_of_items = itemsize[boxes.tensor[rows]].tolist()
        parts = [
            (i, tuple(shape), size)
            for i, (shape, size) in enumerate(zip(shapes, sizes_of_items, strict=True))
        ]
        cuts = divide_replicas(parts, holders, loads)
        cut_rows = rows[[cut.replica for cut in cuts]]
        rank_parts.append(np.array([cut.rank for cut in cuts], np.int64))
        box_parts.append(cut_rows)
        within = np.array([cut.box.offset for cut in cuts], np.int64)
        offset_parts.append(boxes.offset[cut_rows] + within)
        shape_parts.append(np.array([cut.box.shape for cut in cuts], np.int64))
    return (
        np.concatenate(rank_parts),
        np.concatenate(box_parts),
        np.concatenate(offset_parts),
        np.concatenate(shape_parts),
    )


def _tied_entries(
    structures: Sequence[Structure], tensors: Sequence[TensorEntry]
) -> list[TensorEntry]:
    entry_of = {tensor.name: tensor for tensor in tensors}
    ties: dict[str, TensorEntry] = {}
    for structure in structures:
        for name, same_as in structure.ties:
            target = entry_of[same_as]
            known = ties.get(name)
            if known is not None and known.same_as != same_as:
                raise LayoutError(
                    f"{name} is tied to {known.same_as} on some ranks and to {same_as} on others: "
                    "tie it to the same tensor on all ranks"
                )
            if name in entry_of:
                raise LayoutError(
                    f"{name} is tied to {same_as} on some ranks but not on others: "
                    "tie it on all ranks, or on none"
                )
            ties[name] = TensorEntry(name, target.dtype, target.shape, same_as)
    return list(ties.values())


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of a replica that one of its holders writes.

    Attributes:
        replica: the index of the replica.
        rank: the rank that writes the part.
        box: the part, relative to the replica.
    """

    replica: int
    rank: int
    box: Box


def even_out_loads(loads: Float, amount: float) -> Float:
    """Divide `amount` so that the loads become as equal as possible.

    Returns:
        The amount to add to each load.
    """
    ordered = np.sort(loads)
    level = amount
    for n in range(1, len(ordered) + 1):
        level = (float(ordered[:n].sum()) + amount) / n
        if n == len(ordered) or level <= ordered[n]:
            break
    poured: Float = np.maximum(level - loads, 0.0)
    return poured


def divide_replicas(
    replicas: Sequence[tuple[int, tuple[int, ...], int]],
    holders: Sequence[int],
    loads: Float,
    *,
    grain: int | None = None,
) -> list[Cut]:
    """Divide a sequence of replicas among their holders, and cut replicas at the boundaries.

    Each holder gets one contiguous part of the sequence, so that the loads become even.
    Cuts lie at multiples of about `grain` bytes. A replica smaller than that stays whole. The
    default grain is 1/32 of a holder's part, between `SMALLEST_GRAIN` and `LARGEST_GRAIN`.

    Args:
        replicas: the index, shape and itemsize of each replica. The same ranks hold all of them.
        holders: the ranks that hold the replicas.
        loads: the bytes assigned to each rank so far, float64; updated in place.
        grain: the unit of cuts, in bytes.
    """
    sizes = [int(np.prod(shape, dtype=np.int64)) * itemsize for _, shape, itemsize in replicas]
    if grain is None:
        part = sum(sizes) // (32 * len(holders))
        grain = max(SMALLEST_GRAIN, min(LARGEST_GRAIN, part))
    ends = np.cumsum(even_out_loads(loads[list(holders)], float(sum(sizes)))).tolist()
    ends[-1] = float("inf")
    cuts: list[Cut] = []
    holder_index = 0
    position = 0
    for (index, shape, itemsize), nbytes in zip(replicas, sizes, strict=True):
        done = 0
        while done < nbytes:
            nbytes_taken = _bytes_for_holder(
                shape, itemsize, done, nbytes, ends[holder_index] - position, grain
            )
            boxes = boxes_of_range(shape, done // itemsize, (done + nbytes_taken) // itemsize)
            cuts += [Cut(index, holders[holder_index], box) for box in boxes]
            loads[holders[holder_index]] += nbytes_taken
            position += nbytes_taken
            done += nbytes_taken
            if nbytes_taken == 0 or position >= ends[holder_index] - grain / 2:
                holder_index += 1
    return cuts


def _bytes_for_holder(
    shape: tuple[int, ...], itemsize: int, done: int, nbytes: int, capacity_left: float, grain: int
) -> int:
    """Return how many bytes to assign of a replica from byte `done` on.

    Args:
        capacity_left: the bytes that the current holder can still take.
    """
    rest = nbytes - done
    if rest <= capacity_left + grain / 2:
        return rest
    unit = itemsize
    for n in reversed(shape):
        if unit * n > grain:
            break
        unit *= n
    unit *= max(1, grain // unit)
    return max(0, min(rest, (done + round(capacity_left)) // unit * unit - done))
