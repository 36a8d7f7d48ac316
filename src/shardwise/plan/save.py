"""Plan a save: from the structures of all ranks, compute the pieces that each rank writes.

Every rank computes the same plan, so that no plan is sent.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import msgspec
import numpy as np
import numpy.typing as npt

from shardwise.boxes import Box, boxes_of_range, find_uncovered_tensors
from shardwise.boxes.box import BoolArray, IntArray, check_table_size, padded_rows
from shardwise.errors import FormatError, LayoutError
from shardwise.events import format_count
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import TensorEntry, encode_header_entries
from shardwise.manifest.pieces import encode_tensors, find_runs
from shardwise.plan.structure import (
    Coordinates,
    Description,
    HeldBoxes,
    Structure,
    find_held_boxes,
)

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
        box: each piece, as a box of the global tensor.
    """

    start: IntArray
    fragment: list[int]
    box: list[Box]

    def describe_pieces(
        self, description: Description
    ) -> Iterator[tuple[str, str, tuple[int, ...], Box]]:
        """Yield the name, dtype and global shape of each piece's tensor, and the piece's box."""
        structure, tensors = description.structure, description.tensor.tolist()
        for fragment, box in zip(self.fragment, self.box, strict=True):
            i = tensors[fragment]
            yield structure.names[i], structure.dtypes[i], structure.shapes[i], box


def piece_table(
    description: Description, fragment: IntArray, offset: IntArray, shape: IntArray
) -> PieceTable:
    """Return a table of pieces, in the order of the file.

    Args:
        description: the fragments that contain the pieces.
        fragment: the index of the fragment that contains each piece, `(n,)`.
        offset, shape: the pieces, as boxes of the global tensors, `(n, D)`.
    """
    structure = description.structure
    end, ends, boxes = 0, [0], []
    tensors = description.tensor[fragment].tolist()
    for i, low, extent in zip(tensors, offset.tolist(), shape.tolist(), strict=True):
        ndim = len(structure.shapes[i])
        box = Box(tuple(low[:ndim]), tuple(extent[:ndim]))
        end += box.size * DTYPES[structure.dtypes[i]].itemsize
        ends.append(end)
        boxes.append(box)
    return PieceTable(np.array(ends, np.int64), fragment.tolist(), boxes)


@dataclass(frozen=True, eq=False)
class SavePlan:
    """The n pieces that all ranks write, in columns, as computed by one rank.

    Rank r writes the rows `limits[r]:limits[r + 1]` to its file, in this order.

    Attributes:
        rank: the rank that computed the plan.
        description: the structure and the fragments of this rank.
        per_rank: the names of the per-rank values of all ranks.
        tensors: all tensors, without pieces; then the names that share the data of another tensor.
        replicas: for each set of ranks that hold the same boxes, the ranks, and the fragments of
            this rank that are these boxes: `((0, 1), [3, 7])` says that exactly the ranks 0 and 1
            hold the boxes of the fragments 3 and 7. Sets of few ranks come first.
        bytes_held: the tensor bytes of all ranks together, with replicas.
        bytes_stored: the tensor bytes that are written, without replicas.
        limits: the first row of each rank, and n, `(ranks + 1,)`.
        writers: the ranks that write a file, in the order of the list of files.
        tensor: the index of the tensor of each piece, `(n,)`.
        fragment: the index of this rank's fragment that contains each piece; -1 if there is none.
        offset, shape: the pieces, as boxes of the global tensors, `(n, D)`.
        end: the bytes of all pieces up to the end of each piece, `(n,)`.
    """

    rank: int
    description: Description
    per_rank: tuple[str, ...]
    tensors: tuple[TensorEntry, ...]
    replicas: tuple[tuple[tuple[int, ...], IntArray], ...]
    bytes_held: int
    bytes_stored: int
    limits: IntArray
    writers: IntArray
    tensor: IntArray
    fragment: IntArray
    offset: IntArray
    shape: IntArray
    end: IntArray

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
        columns = self.fragment[rows], self.offset[rows], self.shape[rows]
        return piece_table(self.description, *columns)

    @cached_property
    def header_entries(self) -> tuple[bytes, int]:
        """The entries of this rank's pieces in the header of its file; see `lay_out_file`."""
        return encode_header_entries(self.pieces.describe_pieces(self.description))

    @cached_property
    def encoded_tensors(self) -> msgspec.Raw:
        """The list of tensors in the manifest, with their pieces, encoded."""
        ranks = np.repeat(np.arange(len(self.limits) - 1), np.diff(self.limits))
        file = np.searchsorted(self.writers, ranks)
        ends = np.append(0, self.end)
        start = ends[:-1] - ends[self.limits[ranks]]
        order = np.lexsort([*reversed(self.offset.T), self.tensor])
        columns = self.tensor, file, start, self.offset, self.shape
        return encode_tensors(self.tensors, find_runs(*(column[order] for column in columns)))


class PlanCache:
    """Plans of earlier saves, for later saves of a state with the same structure.

    The key is the fingerprint of all structures, and the rank.

    The fingerprint covers names, dtypes, shapes, boxes and ties on every rank, so that a changed
    structure is planned again. A plan does not depend on addresses of tensors in memory. A save
    uses the cache only if every rank has the plan. The key includes the rank, because one process
    can have different ranks in different groups.

    Args:
        capacity: the largest number of plans in the cache.
    """

    def __init__(self, capacity: int = 4) -> None:
        self._capacity = capacity
        self._plans: OrderedDict[tuple[bytes, int], SavePlan] = OrderedDict()

    def fingerprints(self, rank: int) -> list[bytes]:
        """Return the fingerprints of all plans of a rank in the cache."""
        return [fingerprint for fingerprint, owner in self._plans if owner == rank]

    def get(self, fingerprint: bytes, rank: int) -> SavePlan | None:
        """Return a rank's part of the plan of a fingerprint; None if it is not in the cache."""
        plan = self._plans.get((fingerprint, rank))
        if plan is not None:
            self._plans.move_to_end((fingerprint, rank))
        return plan

    def put(self, fingerprint: bytes, rank: int, plan: SavePlan) -> None:
        """Add a rank's part of a plan. If the cache is full, remove the least recently used."""
        self._plans[fingerprint, rank] = plan
        while len(self._plans) > self._capacity:
            self._plans.popitem(last=False)


def plan_save(
    structures: Sequence[tuple[Structure, IntArray]],
    coordinates: Sequence[Coordinates],
    rank: int,
    description: Description,
) -> SavePlan:
    """Plan which rank writes which boxes, so that each element is written once.

    Args:
        structures: the distinct structures, and the ranks that have each of them.
        coordinates: the coordinates of each rank.
        rank: this rank. The rows of the plan are the same on all ranks.
        description: the structure and the fragments of this rank.

    Raises:
        MismatchError: ranks have different dtypes or shapes of the same tensor.
        LayoutError: the shards of a tensor leave gaps, or overlap without being equal; a tensor is
            tied on some ranks only; or there are too many pieces.
    """
    entries, boxes = find_held_boxes(structures, coordinates, rank, description)
    tensors = [*entries.values()]
    _check_coverage(tensors, boxes)
    ties = _tied_entries(structures, entries)
    itemsizes = np.array([DTYPES[tensor.dtype].itemsize for tensor in tensors], np.int64)
    holders = np.fromiter(map(len, boxes.sets), np.int64)[boxes.holders]
    held = boxes.shape.prod(axis=1) * itemsizes[boxes.tensor] * holders
    count = len(coordinates)
    replicas = _replicas(boxes)
    writer, box, offset, shape = _assign_writers(boxes, holders == 1, replicas, itemsizes, count)
    try:
        check_table_size(*offset.shape)  # a load refuses more pieces
    except FormatError as error:
        raise LayoutError(str(error)) from error
    # Wider types come first in a file, so that every piece is aligned to its own type.
    tensor = boxes.tensor[box]
    order = np.lexsort([*reversed(offset.T), tensor, -itemsizes[tensor], writer])
    limits = np.searchsorted(writer[order], np.arange(count + 1))
    writes_file = np.diff(limits) > 0
    for structure, ranks in structures:
        writes_file[ranks] |= bool(structure.per_rank)
    nbytes = shape[order].prod(axis=1) * itemsizes[tensor[order]]
    return SavePlan(
        rank=rank,
        description=description,
        per_rank=tuple(dict.fromkeys(chain(*(each.per_rank for each, _ in structures)))),
        tensors=(*tensors, *ties),
        replicas=tuple((ranks, boxes.fragment[rows]) for ranks, rows in replicas),
        bytes_held=int(held.sum()),
        bytes_stored=int(nbytes.sum()),
        limits=limits,
        writers=np.flatnonzero(writes_file),
        tensor=tensor[order],
        fragment=boxes.fragment[box[order]],
        offset=offset[order],
        shape=shape[order],
        end=np.cumsum(nbytes),
    )


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


def _replicas(boxes: HeldBoxes) -> list[tuple[tuple[int, ...], IntArray]]:
    """Return the sets of several ranks, small sets first, and the rows of the boxes they hold."""
    order = np.argsort(boxes.holders, kind="stable")
    limits = np.searchsorted(boxes.holders[order], np.arange(1, len(boxes.sets)))
    rows_of = np.split(order, limits)
    found = [
        (ranks, rows)
        for ranks, rows in zip(boxes.sets, rows_of, strict=False)
        if len(ranks) > 1 and len(rows)
    ]
    return sorted(found, key=lambda each: (len(each[0]), each[0]))


def _assign_writers(
    boxes: HeldBoxes,
    has_one_holder: BoolArray,
    replicas: Iterable[tuple[tuple[int, ...], IntArray]],
    itemsize: IntArray,
    world: int,
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Choose which rank writes each piece.

    Returns:
        The rank that writes each piece, the row of the box that contains the piece, and the offset
        and shape of the piece.
    """
    alone = np.flatnonzero(has_one_holder)
    first_rank = np.array([ranks[0] for ranks in boxes.sets], np.int64)
    ranks = first_rank[boxes.holders[alone]]
    sizes = boxes.shape[alone].prod(axis=1) * itemsize[boxes.tensor[alone]]
    loads = np.bincount(ranks, weights=sizes, minlength=world).astype(np.float64)
    rank_parts, box_parts = [ranks], [alone]
    offset_parts, shape_parts = [boxes.offset[alone]], [boxes.shape[alone]]
    for holders, rows in replicas:
        shapes = boxes.shape[rows].tolist()
        sizes_of_items = itemsize[boxes.tensor[rows]].tolist()
        shapes_and_sizes = list(zip(map(tuple, shapes), sizes_of_items, strict=True))
        parts = divide_replicas(shapes_and_sizes, holders, loads)
        part_rows = rows[[index for index, _, _ in parts]]
        rank_parts.append(np.array([rank for _, rank, _ in parts], np.int64))
        box_parts.append(part_rows)
        within = np.array([box.offset for _, _, box in parts], np.int64)
        offset_parts.append(boxes.offset[part_rows] + within)
        shape_parts.append(np.array([box.shape for _, _, box in parts], np.int64))
    return (
        np.concatenate(rank_parts),
        np.concatenate(box_parts),
        np.concatenate(offset_parts),
        np.concatenate(shape_parts),
    )


def _tied_entries(
    structures: Sequence[tuple[Structure, IntArray]], tensors: Mapping[str, TensorEntry]
) -> list[TensorEntry]:
    ties: dict[str, TensorEntry] = {}
    for structure, _ in structures:
        for name, same_as in structure.ties:
            target = tensors[same_as]
            known = ties.get(name)
            if known is not None and known.same_as != same_as:
                raise LayoutError(
                    f"{name} is tied to {known.same_as} on some ranks and to {same_as} on others: "
                    "tie it to the same tensor on all ranks"
                )
            if name in tensors:
                raise LayoutError(
                    f"{name} is tied to {same_as} on some ranks but not on others: "
                    "tie it on all ranks, or on none"
                )
            ties[name] = TensorEntry(name, target.dtype, target.shape, same_as)
    return list(ties.values())


def water_fill(loads: Float, amount: float) -> Float:
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
    replicas: Sequence[tuple[tuple[int, ...], int]],
    holders: Sequence[int],
    loads: Float,
    *,
    grain: int | None = None,
) -> list[tuple[int, int, Box]]:
    """Divide replicas among the ranks that hold them, and cut replicas where the parts meet.

    The replicas form a sequence of bytes. Each holder gets one range of this sequence, so that the
    loads become even. For example, two ranks with equal loads hold a tensor of 6 MiB and one of
    2 MiB: the first rank gets 4 MiB of the first tensor, and the second rank gets the rest.

    Args:
        replicas: the shape and itemsize of each replica. The same ranks hold all of them.
        holders: the ranks that hold the replicas.
        loads: the bytes assigned to each rank so far, float64; updated in place.
        grain: a replica is cut at multiples of about this many bytes, and a smaller one stays
            whole. Default: 1/32 of a holder's part, between `SMALLEST_GRAIN` and `LARGEST_GRAIN`.

    Returns:
        The index of a replica, the rank that writes this part of it, and the box of the part,
        relative to the replica; in the order of the sequence.
    """
    sizes = [math.prod(shape) * itemsize for shape, itemsize in replicas]
    if grain is None:
        part = sum(sizes) // (32 * len(holders))
        grain = max(SMALLEST_GRAIN, min(LARGEST_GRAIN, part))
    starts = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    even_bounds = np.cumsum(water_fill(loads[list(holders)], float(starts[-1]))).tolist()
    bounds = [0]
    for bound in even_bounds[:-1]:
        bounds.append(_nearest_cut(replicas, starts, bounds[-1], bound, grain))
    bounds.append(starts[-1])
    parts = []
    for rank, low, high in zip(holders, bounds, bounds[1:], strict=False):
        loads[rank] += high - low
        for index in range(bisect_right(starts, low) - 1, bisect_left(starts, high)):
            itemsize = replicas[index][1]
            first = max(0, low - starts[index]) // itemsize
            last = min(sizes[index], high - starts[index]) // itemsize
            parts += [(index, rank, box) for box in boxes_of_range(replicas[index][0], first, last)]
    return parts


def _nearest_cut(
    replicas: Sequence[tuple[tuple[int, ...], int]],
    starts: list[int],
    previous: int,
    bound: float,
    grain: int,
) -> int:
    """Return where to cut a sequence of replicas, near a position. All positions are in bytes.

    A cut between two replicas is preferred if it is at most half a grain away. For example, a
    float32 tensor of shape (8, 4) has rows of 16 bytes. With a grain of 32, it is cut after every 2
    rows: at byte 64, if the position is 70.

    Args:
        replicas: the shape and itemsize of each replica.
        starts: the first byte of each replica, and the end of the last one.
        previous: the cut before.
        bound: the position.
    """
    index = max(bisect_left(starts, bound - grain / 2), bisect_right(starts, previous))
    if index == len(starts) or starts[index] <= bound + grain / 2:
        return starts[min(index, len(starts) - 1)]
    shape, itemsize = replicas[index - 1]
    unit = itemsize
    for n in reversed(shape):
        if unit * n > grain:
            break
        unit *= n
    unit *= max(1, grain // unit)
    start = starts[index - 1]
    begin = max(previous, start)
    return max(begin, start + (begin + round(bound - begin) - start) // unit * unit)
