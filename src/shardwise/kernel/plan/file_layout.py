"""The order of pieces in the files of all ranks.

Ranks that write pieces of the same shapes have files of the same layout: each piece begins at the
same offset. So the layout is computed once for all of them.

Example: the ranks 0, 1 and 2 each write one part of 32 bytes, at byte 0 of the data of their files.
One layout stands for the three files. The ranks 3, 4 and 5 have another, of 8 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwise.kernel.boxes.box import IntArray, distinct_rows

MOST_SECTIONS = 8


@dataclass(frozen=True, slots=True, eq=False)
class PieceGroup:
    """Pieces of tensors that are divided alike: q ranks write one piece of each of t tensors.

    For example, the ranks 0 and 1 write the upper and the lower half of each of 400 tensors.

    Attributes:
        tensors: the indices of the tensors, `(t,)`.
        itemsize: the size of an element, in bytes.
        ranks: distinct ranks, `(q,)`.
        box: the offset of the box that contains each rank's piece, which the rank holds, `(q, D)`.
        offset, shape: the piece of each rank, as a box of each tensor, `(q, D)`.
        nbytes: the size of the piece of each rank, `(q,)`.
        owner_count: the number of ranks that hold each box.
        layout: for each rank, a row of `starts`, `(q,)`.
        starts: the offset of the piece of each tensor in the data section of the file, in bytes;
            distinct rows, `(layouts, t)`.
    """

    tensors: IntArray
    itemsize: int
    ranks: IntArray
    box: IntArray
    offset: IntArray
    shape: IntArray
    nbytes: IntArray
    owner_count: int
    layout: IntArray
    starts: IntArray


def lay_out_pieces(groups: Sequence[PieceGroup], world: int) -> tuple[list[PieceGroup], IntArray]:
    """Choose the offset of each piece in the file of its rank.

    A file has sections, first that of the pieces that only its rank holds, then those of pieces
    with more and more holders. Replicas come last, because which rank writes one varies: so they do
    not shift the other pieces, whose layouts stay alike. In a section, wider types come first, so
    that every piece is aligned to its own type. A section ends only where all files are aligned for
    the rest.

    Args:
        groups: the pieces, without offsets.
        world: the number of ranks.

    Returns:
        The groups, and the size of the pieces of each rank, `(world,)`.
    """
    sizes = np.zeros(world, np.int64)
    layout_of = np.zeros(world, np.int64)
    laid: list[PieceGroup] = []
    for section in _sections(groups, world):
        representative, layout_of = _refine(layout_of, section)
        laid += _lay_out_section(section, representative, layout_of, sizes)
    return laid, sizes


def _sections(groups: Sequence[PieceGroup], world: int) -> Iterator[list[PieceGroup]]:
    """Yield the groups of each section of all files.

    For example, there are groups of pieces with one owner, and with two. They are two sections. But
    if a file would have 6 bytes of the first, and float32 in the second, they are one section.
    """
    counts = np.array([group.owner_count for group in groups], np.int64)
    numbers = np.searchsorted(np.unique(counts)[: MOST_SECTIONS - 1], counts).tolist()
    sizes = np.zeros(world, np.int64)
    section: list[PieceGroup] = []
    for number in range(max(numbers, default=-1) + 1):
        added = [group for i, group in zip(numbers, groups, strict=True) if i == number]
        for group in added:
            sizes[group.ranks] += group.nbytes * len(group.tensors)
        section += added
        later = (group.itemsize for i, group in zip(numbers, groups, strict=True) if i > number)
        if (sizes % max(later, default=1) == 0).all():
            yield section
            section = []


def _refine(layout_of: IntArray, groups: Iterable[PieceGroup]) -> tuple[IntArray, IntArray]:
    """Number the layouts of files. Only ranks with pieces of the same sizes have equal layouts.

    For example, all ranks have the number 0. The ranks 2 and 3 are in a group: they get another
    number. If the piece of rank 3 is smaller, each of them gets a number of its own.

    Args:
        layout_of: the numbers for the earlier sections of the files.
        groups: the pieces.

    Returns:
        The first rank of each layout, which stands for the others; and the layout of each rank.
    """
    numbers = layout_of.copy()
    free = int(numbers.max(initial=-1)) + 1
    for group in groups:
        pairs = np.column_stack([numbers[group.ranks], group.nbytes])
        first, kind = distinct_rows(pairs)
        numbers[group.ranks] = free + kind
        free += len(first)
    return distinct_rows(numbers[:, None])


def _lay_out_section(
    groups: Sequence[PieceGroup], representative: IntArray, layout_of: IntArray, sizes: IntArray
) -> Iterator[PieceGroup]:
    """Append pieces to the files, and add their sizes to those of the files.

    Args:
        groups: the pieces.
        representative, layout_of: the result of `_refine`.
        sizes: the size of the pieces of each rank so far, `(world,)`, updated in place.

    Yields:
        The groups, with their offsets.
    """
    # A row of the table is a piece in all files of one layout.
    rows, placed, tensors = [], [], []
    for group in groups:
        of_ranks = layout_of[group.ranks]
        first, layout = distinct_rows(of_ranks[:, None])
        rows.append(np.column_stack([of_ranks[first], group.nbytes[first], group.offset[first]]))
        placed.append((len(first), layout))
        tensors += [group.tensors] * len(first)
    counts, tensor = [count for count, _ in placed], np.concatenate(tensors)
    times = np.repeat([len(group.tensors) for group in groups], counts)
    itemsize = np.repeat(np.repeat([group.itemsize for group in groups], counts), times)
    layout, size, *offset = np.repeat(np.concatenate(rows), times, axis=0).T
    order = np.lexsort([*reversed(offset), tensor, -itemsize, layout])
    begins = np.searchsorted(layout[order], np.arange(int(layout_of.max()) + 2))
    ends = np.append(0, np.cumsum(size[order]))
    start = np.empty(len(order), np.int64)
    start[order] = ends[:-1] + (sizes[representative] - ends[begins[:-1]])[layout[order]]
    sizes += np.diff(ends[begins])[layout_of]
    low = 0
    for group, (count, layout_of_rank) in zip(groups, placed, strict=True):
        high = low + count * len(group.tensors)
        starts = start[low:high].reshape(count, len(group.tensors))
        first, kind = distinct_rows(starts)
        yield replace(group, layout=kind[layout_of_rank], starts=starts[first])
        low = high
