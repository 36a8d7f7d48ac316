"""The order of pieces in the files of all ranks.

Ranks that write pieces of the same shapes have files of the same layout: each piece begins at the
same offset. So the layout is computed once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwise.boxes.box import BoolArray, IntArray, Table, count_up, distinct_rows

FEW_RANKS = 256
"""The layouts of so few files are computed one by one."""
MOST_SECTIONS = 8


@dataclass(frozen=True, slots=True)
class PieceRows(Table):
    """Pieces, one in each row, sorted by rank and then in the order of the file.

    Attributes:
        rank: the rank that writes the piece, `(n,)`.
        tensor: the index of the tensor, `(n,)`.
        fragment: the index of the fragment that contains the piece, on the rank that plans; -1 if
            that rank does not hold it, `(n,)`.
        owner_count: the number of ranks that hold the piece, `(n,)`.
        nbytes: the size of the piece, `(n,)`.
        start: the offset of the piece in the data section of the file, in bytes, `(n,)`.
        offset, shape: the piece, as a box of the tensor, `(n, D)`.
    """

    rank: IntArray
    tensor: IntArray
    fragment: IntArray
    owner_count: IntArray
    nbytes: IntArray
    start: IntArray
    offset: IntArray
    shape: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class PieceGroup:
    """Pieces of one shape: each of q ranks writes one piece of each of t tensors.

    Attributes:
        tensors: the indices of the tensors, `(t,)`.
        ranks: distinct ranks, `(q,)`.
        box: the offset of the box that contains each rank's piece, which the rank holds, `(q, D)`.
        within: the offset of the piece in this box, `(D,)`.
        shape: the shape of the piece, `(D,)`.
        nbytes: the size of a piece.
        owner_count: the number of ranks that hold each box.
        layout: for each rank, a row of `starts`, `(q,)`.
        starts: the offset of the piece of each tensor in the data section of the file, in bytes;
            distinct rows, `(layouts, t)`.
    """

    tensors: IntArray
    ranks: IntArray
    box: IntArray
    within: IntArray
    shape: IntArray
    nbytes: int
    owner_count: int
    layout: IntArray
    starts: IntArray

    @property
    def offset(self) -> IntArray:
        """The offset of each rank's piece in the tensor, `(q, D)`."""
        return self.box + self.within


def lay_out_pieces(
    rows: PieceRows, groups: Sequence[PieceGroup], itemsizes: IntArray, world: int
) -> tuple[PieceRows, list[PieceGroup], IntArray]:
    """Choose the offset of each piece in the file of its rank.

    A file has sections, first that of the pieces that only its rank holds, then those of pieces
    with more and more holders. Which rank writes a replica varies, so the layouts of other pieces
    stay more alike. In a section, wider types come first, so that every piece is aligned to its own
    type. A section ends only where all files are aligned for the rest.

    Args:
        rows, groups: the pieces, without offsets.
        itemsizes: the size of an element of each tensor, in bytes.
        world: the number of ranks.

    Returns:
        The rows in their order, the groups, and the size of the pieces of each rank, `(world,)`.
    """
    rows = rows.select(np.lexsort([*reversed(rows.offset.T), rows.tensor, rows.rank]))
    sizes = np.zeros(world, np.int64)
    layout_of = np.zeros(world, np.int64)
    laid_rows = [rows.select(np.zeros(0, np.int64))]
    laid_groups: list[PieceGroup] = []
    for section_rows, section_groups in _sections(rows, groups, itemsizes, world):
        layout_of = _refine(layout_of, section_rows, section_groups)
        section = _lay_out_section(section_rows, section_groups, itemsizes, layout_of, sizes)
        laid_rows.append(section[0])
        laid_groups += section[1]
    joined = PieceRows.join(laid_rows)
    return joined.select(np.lexsort((joined.start, joined.rank))), laid_groups, sizes


def _sections(
    rows: PieceRows, groups: Sequence[PieceGroup], itemsizes: IntArray, world: int
) -> Iterator[tuple[PieceRows, list[PieceGroup]]]:
    """Yield the rows and groups of each section of all files."""
    counts = np.array([group.owner_count for group in groups], np.int64)
    distinct = np.unique(np.concatenate([rows.owner_count, counts]))[: MOST_SECTIONS - 1]
    number_of_row = np.searchsorted(distinct, rows.owner_count)
    numbered = [*zip(np.searchsorted(distinct, counts).tolist(), groups, strict=True)]
    sizes = np.zeros(world, np.int64)
    first = 0
    for number in range(len(distinct) + 1):
        is_next = number_of_row == number
        np.add.at(sizes, rows.rank[is_next], rows.nbytes[is_next])
        for group in (group for i, group in numbered if i == number):
            sizes[group.ranks] += group.nbytes * len(group.tensors)
        later = [rows.tensor[number_of_row > number]]
        later += [group.tensors for i, group in numbered if i > number]
        widest = max(int(itemsizes[tensors].max(initial=1)) for tensors in later)
        if (sizes % widest == 0).all():
            chosen = rows.select((first <= number_of_row) & (number_of_row <= number))
            chosen_groups = [group for i, group in numbered if first <= i <= number]
            if len(chosen) or chosen_groups:
                yield chosen, chosen_groups
            first = number + 1


def _refine(layout_of: IntArray, rows: PieceRows, groups: Iterable[PieceGroup]) -> IntArray:
    """Return a number for each rank, which is equal only for ranks with the same pieces.

    Args:
        layout_of: the numbers for the earlier sections of the files.
        rows, groups: the pieces. Ranks have the same pieces if they are in the same groups, and
            their rows have the same tensors and shapes.
    """
    numbers = layout_of.copy()
    free = int(numbers.max(initial=-1)) + 1
    for group in groups:
        first, kind = distinct_rows(numbers[group.ranks, None])
        numbers[group.ranks] = free + kind
        free += len(first)
    ranks, first, count = np.unique(rows.rank, return_index=True, return_counts=True)
    if len(ranks) <= FEW_RANKS:
        numbers[ranks] = free + np.arange(len(ranks))
    else:
        kind = distinct_rows(np.column_stack([rows.tensor, rows.shape]))[1]
        for i in range(int(count.max())):  # the rows of a rank follow each other
            left = count > i
            pairs = np.column_stack([numbers[ranks[left]], kind[first[left] + i]])
            found, number = distinct_rows(pairs)
            numbers[ranks[left]] = free + number
            free += len(found)
    return distinct_rows(numbers[:, None])[1]


def _lay_out_section(
    rows: PieceRows,
    groups: Sequence[PieceGroup],
    itemsizes: IntArray,
    layout_of: IntArray,
    sizes: IntArray,
) -> tuple[PieceRows, list[PieceGroup]]:
    """Append pieces to the files, and add their sizes to those of the files.

    Args:
        layout_of: the number of the layout of each rank's file.
        sizes: the size of the pieces of each rank so far, `(world,)`, updated in place.

    Returns:
        The rows and the groups, with their offsets.
    """
    # A row of the table is a piece in all files of one layout. The first rank of each layout stands
    # for the others.
    representative = np.unique(layout_of, return_index=True)[1]
    stands_for_others, table_row = _rows_of_layouts(rows.rank, layout_of, representative)
    listed = rows.select(stands_for_others)
    layouts, tensors = [layout_of[listed.rank]], [listed.tensor]
    offsets, nbytes = [listed.offset], [listed.nbytes]
    placed = []
    for group in groups:
        of_ranks = layout_of[group.ranks]
        first, layout = distinct_rows(of_ranks[:, None])
        found, t = of_ranks[first], len(group.tensors)
        layouts.append(np.repeat(found, t))
        tensors.append(np.tile(group.tensors, len(found)))
        offsets.append(np.repeat(group.offset[first], t, axis=0))
        nbytes.append(np.full(len(found) * t, group.nbytes))
        placed.append((len(found), layout))
    layout, tensor, size = np.concatenate(layouts), np.concatenate(tensors), np.concatenate(nbytes)
    offset = np.concatenate(offsets)
    order = np.lexsort([*reversed(offset.T), tensor, -itemsizes[tensor], layout])
    end = np.cumsum(size[order])
    begins = np.searchsorted(layout[order], np.arange(int(layout_of.max()) + 2))
    ends = np.append(0, end)
    size_of_layout = np.diff(ends[begins])
    start = np.empty(len(order), np.int64)
    start[order] = ends[:-1] + (sizes[representative] - ends[begins[:-1]])[layout[order]]
    sizes += size_of_layout[layout_of]
    laid, low = [], len(listed)
    for group, (count, layout_of_rank) in zip(groups, placed, strict=True):
        high = low + count * len(group.tensors)
        starts = start[low:high].reshape(count, len(group.tensors))
        if count > 1:
            first, kind = distinct_rows(starts)
            starts, layout_of_rank = starts[first], kind[layout_of_rank]
        laid.append(replace(group, layout=layout_of_rank, starts=starts))
        low = high
    return replace(rows, start=start[table_row]), laid


def _rows_of_layouts(
    rank: IntArray, layout_of: IntArray, representative: IntArray
) -> tuple[BoolArray, IntArray]:
    """Return which rows are those of the first rank of a layout; and for each row, which one of
    these lies at the same place in its file.

    Args:
        rank: the rank of each row, sorted. Ranks of one layout have rows of the same kinds, in the
            same order.
        layout_of: the layout of each rank.
        representative: the first rank of each layout.
    """
    ranks, first, count = np.unique(rank, return_index=True, return_counts=True)
    first_rank = representative[layout_of[rank]]
    stands_for_others: BoolArray = first_rank == rank
    first_row = np.zeros(len(layout_of), np.int64)
    first_row[ranks] = first
    same_place = first_row[first_rank] + count_up(count)
    return stands_for_others, (np.cumsum(stands_for_others) - 1)[same_place]
