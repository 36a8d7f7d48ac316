"""The distinct boxes that ranks hold, and which ranks hold each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.boxes import Box
from shardwise.boxes.table import IntArray, pad_columns, padded_rows
from shardwise.errors import MismatchError
from shardwise.manifest.manifest import TensorEntry
from shardwise.plan.structure import Structure, World, boxes_of_rule


@dataclass(frozen=True, slots=True)
class HeldBoxes:
    """The n distinct boxes of all tensors, and the ranks that hold them, in columns.

    Attributes:
        tensor: indices in the list of all tensors, `(n,)`.
        offset, shape: the boxes, `(n, D)`.
        holders: indices in `sets`, `(n,)`.
        sets: the distinct sets of ranks, each sorted.
        fragment: the index of the fragment with this box on the rank that plans; -1 if the rank
            does not hold the box, `(n,)`.
    """

    tensor: IntArray
    offset: IntArray
    shape: IntArray
    holders: IntArray
    sets: tuple[tuple[int, ...], ...]
    fragment: IntArray

    @property
    def counts(self) -> IntArray:
        """The number of ranks that hold each box, `(n,)`."""
        return np.array([len(ranks) for ranks in self.sets], np.int64)[self.holders]


def find_held_boxes(world: World, rank: int) -> tuple[list[TensorEntry], HeldBoxes]:
    """Return all tensors, and the distinct boxes that ranks hold of them.

    Args:
        world: the structures of all ranks.
        rank: this rank.

    Raises:
        MismatchError: ranks have different dtypes or shapes of the same tensor.
    """
    set_ids: dict[tuple[int, ...], int] = {}
    blocks = [
        _boxes_of_structure(world, index, rank, set_ids) for index in range(len(world.structures))
    ]
    tensors = _unite_tensors(world, blocks)
    return tensors, _unite_boxes(world.structures, blocks, tensors, set_ids)


@dataclass(frozen=True, slots=True)
class _Block:
    """Tensors of a structure that have the same rule and shape, and so the same n boxes.

    For example, all weights of shape `(4096, 4096)` that are split by rows.

    Attributes:
        tensors: indices in the structure.
        offset, shape: the boxes, `(n, ndim)`.
        holders: the id of the set of ranks that hold each box, `(n,)`.
        is_own: whether this rank holds each box, `(n,)`.
    """

    tensors: Sequence[int]
    offset: IntArray
    shape: IntArray
    holders: IntArray
    is_own: npt.NDArray[np.bool_]


def _boxes_of_structure(
    world: World, index: int, rank: int, set_ids: dict[tuple[int, ...], int]
) -> list[_Block]:
    """Return the boxes that ranks with one structure hold.

    Args:
        index: the index of the structure.
        rank: this rank.
        set_ids: the id of each set of ranks; new sets are added.
    """
    structure = world.structures[index]
    ranks = np.flatnonzero(world.structure_of == index)
    coordinates = np.array([world.coordinates[each] for each in ranks.tolist()], np.int64)
    coordinates = coordinates.reshape(len(ranks), -1)
    tensors_of: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for i, key in enumerate(zip(structure.rule_of, structure.shapes, strict=True)):
        tensors_of.setdefault(key, []).append(i)
    parts_of_rule = []
    for rule in structure.rules:
        # The coordinates [0, 0], [0, 1], [1, 0] and [1, 1] of four ranks, and a rule with one split
        # of axis 0: the parts are [0] and [1], which the ranks (0, 1) and (2, 3) hold.
        indices = coordinates[:, [split.axis for split in rule]]
        parts, inverse = np.unique(indices, axis=0, return_inverse=True)
        inverse = inverse.reshape(-1)
        order = np.argsort(inverse, kind="stable")
        members = np.split(ranks[order], np.searchsorted(inverse[order], range(1, len(parts))))
        sets = [tuple(each.tolist()) for each in members]
        ids = [set_ids.setdefault(each, len(set_ids)) for each in sets]
        own = [rank in each for each in sets]
        parts_of_rule.append(list(zip(parts.tolist(), ids, own, strict=True)))
    blocks = []
    for (number, shape), tensors in tensors_of.items():
        if number >= 0:
            rows = [
                (box, holders, is_own)
                for part, holders, is_own in parts_of_rule[number]
                for box in boxes_of_rule(shape, structure.rules[number], part)
            ]
            blocks.append(_block(tensors, rows, len(shape)))
    everyone = tuple(ranks.tolist())
    number = set_ids.setdefault(everyone, len(set_ids))
    for i, offset, shape in structure.listed:
        row = Box(offset, shape), number, rank in everyone
        blocks.append(_block([i], [row], len(shape)))
    return blocks


def _block(tensors: Sequence[int], rows: Sequence[tuple[Box, int, bool]], ndim: int) -> _Block:
    return _Block(
        tensors,
        padded_rows([box.offset for box, _, _ in rows], ndim, 0),
        padded_rows([box.shape for box, _, _ in rows], ndim, 1),
        np.array([number for _, number, _ in rows], np.int64),
        np.array([is_own for _, _, is_own in rows], bool),
    )


def _unite_tensors(world: World, blocks: Sequence[Sequence[_Block]]) -> list[TensorEntry]:
    seen: dict[str, TensorEntry] = {}
    problems = []
    tied = {name for structure in world.structures for name, _ in structure.ties}
    for number, structure in enumerate(world.structures):
        columns = zip(structure.names, structure.dtypes, structure.shapes, strict=True)
        holds = {i for block in blocks[number] if len(block.holders) for i in block.tensors}
        for i, (name, dtype, shape) in enumerate(columns):
            if name in tied and i not in holds:
                continue  # a rank without a fragment of a tensor cannot see that it is tied
            known = seen.get(name)
            if known is None:
                seen[name] = TensorEntry(name, dtype, shape)
            elif known.dtype != dtype or known.shape != shape:
                rank = int(np.flatnonzero(world.structure_of == number)[0])
                problems.append(
                    f"{name}: {dtype} {list(shape)} on rank {rank}, "
                    f"{known.dtype} {list(known.shape)} on an earlier rank"
                )
    if problems:
        raise MismatchError(
            "ranks have tensors of the same name with different dtypes or shapes; pass the parts "
            "of one tensor as a DTensor or sw.Shards, and give other tensors different names:",
            problems,
        )
    return list(seen.values())


def _unite_boxes(
    structures: Sequence[Structure],
    blocks: Sequence[Sequence[_Block]],
    tensors: Sequence[TensorEntry],
    set_ids: dict[tuple[int, ...], int],
) -> HeldBoxes:
    """Return the distinct boxes of all structures."""
    index = {tensor.name: i for i, tensor in enumerate(tensors)}
    dims = max((len(tensor.shape) for tensor in tensors), default=0)
    parts: list[tuple[IntArray, ...]] = [
        (np.zeros((0, 1 + 2 * dims), np.int64), *[np.zeros(0, np.int64)] * 2)
    ]
    for structure, own_blocks in zip(structures, blocks, strict=True):
        first_fragment = _first_fragments(len(structure.names), own_blocks)
        for block in own_blocks:
            n = len(block.holders)
            if not n:
                continue
            boxes = np.hstack(
                [pad_columns(block.offset, dims, 0), pad_columns(block.shape, dims, 1)]
            )
            tensor = np.array([index[structure.names[i]] for i in block.tensors], np.int64)
            place = np.cumsum(block.is_own) - 1
            fragment = np.where(block.is_own, first_fragment[block.tensors][:, None] + place, -1)
            first_fragment[block.tensors] += int(block.is_own.sum())
            columns = np.column_stack([np.repeat(tensor, n), np.tile(boxes, (len(tensor), 1))])
            parts.append((columns, np.tile(block.holders, len(tensor)), fragment.reshape(-1)))
    columns, holders, fragment = (np.concatenate(each) for each in zip(*parts, strict=True))
    return _merge_equal(columns, holders, fragment, set_ids)


def _first_fragments(count: int, blocks: Sequence[_Block]) -> IntArray:
    """Return the index of the first fragment of each tensor on the rank with these blocks.

    A rank lists its fragments tensor by tensor, and the boxes of a tensor in the order of blocks.
    """
    sizes = np.zeros(count, np.int64)
    for block in blocks:
        sizes[block.tensors] += int(block.is_own.sum())
    return np.cumsum(sizes) - sizes


def _merge_equal(
    columns: IntArray, holders: IntArray, fragment: IntArray, set_ids: dict[tuple[int, ...], int]
) -> HeldBoxes:
    """Unite the holders of equal boxes, which several structures can have."""
    order = np.lexsort(columns.T[::-1])
    columns, holders, fragment = columns[order], holders[order], fragment[order]
    begins = np.ones(len(columns), bool)
    begins[1:] = (np.diff(columns, axis=0) != 0).any(axis=1)
    first = np.flatnonzero(begins)
    counts = np.diff(np.append(first, len(columns)))
    sets = list(set_ids)
    united = holders[first]
    own = fragment[first]
    for row in np.flatnonzero(counts > 1).tolist():
        same = slice(first[row], first[row] + counts[row])
        ranks = tuple(sorted({rank for number in holders[same].tolist() for rank in sets[number]}))
        united[row] = set_ids.setdefault(ranks, len(set_ids))
        if united[row] == len(sets):
            sets.append(ranks)
        own[row] = max(fragment[same])
    dims = (columns.shape[1] - 1) // 2
    distinct = columns[first]
    return HeldBoxes(
        distinct[:, 0],
        distinct[:, 1 : 1 + dims],
        distinct[:, 1 + dims :],
        united,
        tuple(sets),
        own,
    )
