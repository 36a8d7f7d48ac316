"""Sets of replicas, and the part of a set that its owners compare at a save.

Example: ranks 0 and 1 hold the same 80 MB. At each save, both take checksums of the same 2 MB.
After 40 saves, they have compared all 80 MB.

Together, the owners of a set write each of its bytes once, and a save computes a checksum of each
byte that it writes. To compare one byte, every owner computes another checksum. At each save, the
owners compare one byte in `SHARE * owner_count`. So the comparison takes checksums of one byte for
every `SHARE` bytes that the save takes checksums of.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwise.boxes import Box, boxes_of_range
from shardwise.boxes.box import IntArray
from shardwise.manifest.dtypes import DTYPES
from shardwise.plan.save import PieceTable, SavePlan
from shardwise.plan.structure import Description

SHARE = 20
"""A comparison takes checksums of about `1 / SHARE` as many bytes as a save."""
SMALLEST_RANGE, LARGEST_RANGE = 1 << 16, 1 << 20
"""Bounds on the bytes that are compared in one piece, if there are enough bytes to compare."""
FEWEST_RANGES = 8
"""A comparison looks at this many ranges, spread over the set, unless they become too small."""
_ALIGNMENT = 64  # bytes; a multiple of the size of every dtype


@dataclass(frozen=True, slots=True)
class ReplicaSet:
    """The boxes of this rank that the same other ranks hold, too.

    The boxes have an order, which is the same on all owners. In this order, their bytes form a
    sequence.

    Attributes:
        set_id: identifies the set; the same on all owners.
        owner_count: the number of ranks that hold the boxes.
        is_first_owner: whether this rank is the first of them.
        fragment: for each box, the index of this rank's fragment that the box is, `(n,)`.
        start: the offset of each box in the sequence, and the end of the sequence, `(n + 1,)`.
    """

    set_id: int
    owner_count: int
    is_first_owner: bool
    fragment: IntArray
    start: IntArray

    @property
    def nbytes(self) -> int:
        """The bytes of all boxes."""
        return int(self.start[-1])


def replica_sets_of(plan: SavePlan) -> tuple[ReplicaSet, ...]:
    """Return the sets of replicas that a rank holds, from its plan of a save."""
    found = []
    description = plan.description
    dtypes = description.structure.dtypes
    itemsizes = np.array([DTYPES[dtype].itemsize for dtype in dtypes], np.int64)
    for each in plan.replicas:
        fragment = each.fragment
        # Wider types come first, so that every offset in the sequence is aligned to its own type.
        itemsize = itemsizes[description.tensor[fragment]]
        order = np.argsort(-itemsize, kind="stable")
        sizes = description.shape[fragment].prod(axis=1) * itemsize
        start = np.concatenate([[0], np.cumsum(sizes[order])])
        found.append(
            ReplicaSet(each.set_id, each.owner_count, each.is_first_owner, fragment[order], start)
        )
    return tuple(found)


def leave_out_tensors(
    replicas: ReplicaSet, is_left_out: Sequence[bool], description: Description
) -> ReplicaSet:
    """Return a set without the boxes of some tensors.

    Args:
        is_left_out: whether to leave out each tensor of the description. Equal on all owners for
            tensors of the same name.
    """
    keeps = ~np.array(is_left_out, bool)[description.tensor[replicas.fragment]]
    start = np.concatenate([[0], np.cumsum(np.diff(replicas.start)[keeps])])
    return replace(replicas, fragment=replicas.fragment[keeps], start=start)


def saves_per_round(owner_count: int) -> int:
    """Return after how many saves the owners of a set have compared all of its bytes."""
    return SHARE * owner_count


def choose_ranges(nbytes: int, owner_count: int, comparison_number: int) -> list[tuple[int, int]]:
    """Return the ranges of a sequence of bytes that its owners compare at a save.

    The ranges of one save are spread evenly over the sequence, so that large differences are found
    soon. The ranges of a round, which has `saves_per_round` comparisons, cover each byte once.

    Args:
        nbytes: the number of bytes in the sequence.
        owner_count: the number of ranks that hold the sequence.
        comparison_number: the number of the comparison. After a round, the ranges repeat.
    """
    if not nbytes:
        return []
    saves = saves_per_round(owner_count)
    count, size = _count_and_size(nbytes, saves)
    lows = (low * size for low in range(comparison_number % saves, saves * count, saves))
    return [(low, min(low + size, nbytes)) for low in lows if low < nbytes]


def most_bytes_compared(replicas: ReplicaSet) -> int:
    """Return the largest number of bytes that an owner compares at a save."""
    count, size = _count_and_size(replicas.nbytes, saves_per_round(replicas.owner_count))
    return min(count * size, replicas.nbytes)


def _count_and_size(nbytes: int, saves: int) -> tuple[int, int]:
    """Return the number of ranges that are compared at a save, and their size in bytes."""
    at_a_time = nbytes / saves
    count = max(1, min(FEWEST_RANGES, int(at_a_time // SMALLEST_RANGE)))
    count = max(count, math.ceil(at_a_time / LARGEST_RANGE))
    return count, -(-nbytes // (saves * count * _ALIGNMENT)) * _ALIGNMENT


def choose_pieces(
    sets: Sequence[ReplicaSet], description: Description, comparison_number: int
) -> tuple[PieceTable, tuple[int, ...]]:
    """Return the pieces that this rank compares at a save. Each piece is a box.

    Args:
        sets: the sets of replicas of this rank.
        description: the fragments of this rank.
        comparison_number: as for `choose_ranges`.

    Returns:
        The pieces of all sets, one set after the other; and the index of the first piece of each
        set, followed by the number of pieces.
    """
    set_starts: list[int] = [0]
    fragments: list[int] = []
    boxes: list[Box] = []
    ndims = [len(shape) for shape in description.structure.shapes]
    for each in sets:
        for fragment, box in _pieces_of_set(each, description, ndims, comparison_number):
            fragments.append(fragment)
            boxes.append(box)
        set_starts.append(len(fragments))
    itemsize = [DTYPES[dtype].itemsize for dtype in description.structure.dtypes]
    tensors = description.tensor[fragments].tolist()
    sizes = [box.size * itemsize[tensor] for box, tensor in zip(boxes, tensors, strict=True)]
    start = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    return PieceTable(start, fragments, boxes), tuple(set_starts)


def _pieces_of_set(
    replicas: ReplicaSet, description: Description, ndims: Sequence[int], comparison_number: int
) -> Iterator[tuple[int, Box]]:
    """Yield the fragment of each piece of a set, and its box in the global tensor."""
    for low, high in choose_ranges(replicas.nbytes, replicas.owner_count, comparison_number):
        first = int(np.searchsorted(replicas.start, low, side="right")) - 1
        last = int(np.searchsorted(replicas.start, high, side="left"))
        bounds = replicas.start[first : last + 1].tolist()
        indices = replicas.fragment[first:last]
        tensors = description.tensor[indices].tolist()
        offsets, shapes = description.offset[indices].tolist(), description.shape[indices].tolist()
        rows = zip(indices.tolist(), tensors, offsets, shapes, strict=True)
        for (fragment, i, offset, shape), begin, end in zip(rows, bounds, bounds[1:], strict=False):
            origin, extent = offset[: ndims[i]], tuple(shape[: ndims[i]])
            itemsize = (end - begin) // math.prod(extent)
            a, b = max(low, begin) - begin, min(high, end) - begin
            for box in boxes_of_range(extent, a // itemsize, b // itemsize):
                start = tuple(o + w for o, w in zip(origin, box.offset, strict=True))
                yield fragment, Box(start, box.shape)
