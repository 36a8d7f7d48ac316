"""Tensors that are split alike: their parts, and the ranks that hold each part.

A large model has thousands of tensors, but few shapes and ways to split them. What is computed for
one such tensor holds for all others that are split alike. So the cost of a plan grows with the
number of ranks, and not with the number of ranks times the number of tensors.

Example: a weight of shape `(6, 4)`, by rows over 3 shards, each held by two of six ranks, has the
parts `[0:2,0:4]`, `[2:4,0:4]` and `[4:6,0:4]`, and the owners (0, 3), (1, 4) and (2, 5). 400
weights of this shape are one `Division`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.kernel.boxes import Box, find_uncovered_tensors
from shardwise.kernel.boxes.box import (
    IntArray,
    check_table_size,
    count_up,
    distinct_rows,
    padded_rows,
)
from shardwise.kernel.errors import FormatError, LayoutError
from shardwise.kernel.events import format_count
from shardwise.kernel.manifest.dtypes import DTYPES
from shardwise.kernel.manifest.manifest import TensorEntry
from shardwise.kernel.plan.structure import RanksOfStructure, Rule, held_boxes

_Kind = tuple[tuple[int, ...], bytes, tuple[tuple[int, Rule], ...]]
"""A shape, a list of boxes, and the coordinates and rules of ranks. They determine the parts."""
_Parts = tuple[IntArray, IntArray, IntArray, IntArray]
"""`offset`, `shape` and `sizes` as in `Division`, and `owners` as positions in a list of ranks."""


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """t tensors that are split alike into p parts. Each part is held by m ranks.

    If the number of owners differs between the parts of a tensor, or a rank holds several of them,
    the tensor has several divisions.

    Attributes:
        tensors: indices in the list of all tensors, ascending, `(t,)`.
        itemsize: the size of an element, in bytes.
        offset, shape: the parts, as boxes of each tensor, `(p, D)`, padded with 0 and 1.
        sizes: the number of elements of each part, `(p,)`.
        owners: the ranks that hold each part, ascending, `(p, m)`. They differ for each part.
    """

    tensors: IntArray
    itemsize: int
    offset: IntArray
    shape: IntArray
    sizes: IntArray
    owners: IntArray

    @property
    def bytes_held(self) -> int:
        """The bytes of the tensors on all ranks together, with replicas."""
        elements = int(self.sizes.sum()) * len(self.tensors)
        return elements * self.itemsize * int(self.owners.shape[1])


def find_divisions(
    structures: Sequence[RanksOfStructure], tensors: Mapping[str, TensorEntry]
) -> list[Division]:
    """Find the tensors that are split alike, and check that their parts cover them exactly once.

    Args:
        structures: the distinct structures, and the ranks that have each of them.
        tensors: all tensors by name, in the order of their indices.

    Raises:
        LayoutError: the parts of a tensor leave gaps, or overlap; or there are too many parts.
    """
    dims = max((len(entry.shape) for entry in tensors.values()), default=0)
    rules, listed = _rules_and_lists(structures, tensors, dims)
    alike: dict[tuple[tuple[int, ...], str, bytes, bytes], list[int]] = {}
    for i, entry in enumerate(tensors.values()):
        key = entry.shape, entry.dtype, rules[i].tobytes(), listed[i].tobytes()
        alike.setdefault(key, []).append(i)
    meshes: dict[tuple[int, bytes], int] = {}
    of_ranks = ((len(each.ranks), each.coordinates.tobytes()) for each in structures)
    mesh_of = [meshes.setdefault(each, len(meshes)) for each in of_ranks]
    # Pipeline stages have other tensors and ranks, but often equal parts.
    known: dict[_Kind, tuple[int, list[_Parts]]] = {}
    divisions, number_of = [], np.zeros(len(tensors), np.int64)
    for (shape, dtype, _, list_key), indices in alike.items():
        example = indices[0]
        of_rules = [
            (mesh_of[i], structures[i], structures[i].structure.rules[rules[example, i]])
            for i in np.flatnonzero(rules[example] >= 0).tolist()
        ]
        own_ranks, position = np.unique(listed[example][:, 0], return_inverse=True)
        ranks = np.concatenate([*(each.ranks for _, each, _ in of_rules), own_ranks])
        kind = shape, list_key, tuple((mesh, rule) for mesh, _, rule in of_rules)
        if kind not in known:
            offset, extent = np.split(listed[example][:, 1:], 2, axis=1)
            columns = position.reshape(-1), offset, extent
            if len(own_ranks) or any(rule for _, _, rule in of_rules):
                found = _boxes_of_ranks([each[1:] for each in of_rules], columns, shape)
                parts = [*_unite_equal(*found)]
            else:
                parts = _whole(shape, dims, len(ranks))
            known[kind] = len(known), parts
        number_of[indices], parts = known[kind]
        own, itemsize = np.array(indices, np.int64), DTYPES[dtype].itemsize
        for offset, extent, sizes, owners in parts:
            ranks_of_parts = ranks[owners]
            if len(of_rules) + bool(len(own_ranks)) > 1:
                ranks_of_parts.sort(axis=1)
            divisions.append(Division(own, itemsize, offset, extent, sizes, ranks_of_parts))
    shapes = padded_rows([kind[0] for kind in known], dims, 1)
    _check_coverage(shapes, [parts for _, parts in known.values()], number_of, tensors, divisions)
    return divisions


def _rules_and_lists(
    structures: Sequence[RanksOfStructure], tensors: Mapping[str, TensorEntry], dims: int
) -> tuple[IntArray, list[IntArray]]:
    """Return how all ranks hold each tensor.

    Returns:
        The rule of each tensor in each structure, or -1, `(tensors, structures)`; and for each
        tensor, the boxes that follow no rule, as rows `(rank, *offset, *shape)`.
    """
    index_of = {name: i for i, name in enumerate(tensors)}
    rules = np.full((len(structures), len(tensors)), -1, np.int64)
    names: tuple[str, ...] = ()
    index = np.zeros(0, np.int64)
    tables = [np.zeros((2 + 2 * dims, 0), np.int64)]
    for number, each in enumerate(structures):
        structure = each.structure
        if structure.names != names:
            names = structure.names
            index = np.array([index_of.get(name, -1) for name in names], np.int64)
        known = index >= 0
        rules[number, index[known]] = np.array(structure.rule_of, np.int64)[known]
        if structure.listed:
            tensor, *held = structure.boxes(dims)
            places, n = index[tensor], len(tensor)
            tables += [np.vstack([places, np.full(n, r), *held]) for r in each.ranks.tolist()]
    try:
        check_table_size(sum(table.shape[1] for table in tables), dims)
    except FormatError as error:
        raise LayoutError(str(error)) from error
    table = np.concatenate(tables, axis=1)
    del tables
    order = np.argsort(table[0], kind="stable")
    order = order[np.searchsorted(table[0, order], 0) :]
    limits = np.searchsorted(table[0, order], np.arange(1, len(tensors)))
    return rules.T.copy(), np.split(table[1:, order].T.copy(), limits)


def _whole(shape: tuple[int, ...], dims: int, owners: int) -> list[_Parts]:
    """Return the only part of a tensor that each of its owners holds as a whole."""
    size = math.prod(shape)
    if not size:
        return []
    extent = np.array([[*shape, *[1] * (dims - len(shape))]], np.int64)
    return [(np.zeros_like(extent), extent, np.array([size]), np.arange(owners)[None])]


def _boxes_of_ranks(
    of_rules: Sequence[tuple[RanksOfStructure, Rule]],
    listed: tuple[IntArray, IntArray, IntArray],
    shape: tuple[int, ...],
) -> tuple[IntArray, IntArray, IntArray]:
    """Return all boxes of a tensor: the position of the rank, the offset and the shape of each.

    Args:
        of_rules: the structures with the tensor, and the rule that it follows.
        listed: further boxes.
        shape: the shape of the tensor.
    """
    found, before = [], 0
    for each, rule in of_rules:
        position, offset, extent = held_boxes(rule, each.coordinates, shape, listed[1].shape[1])
        found.append((position + before, offset, extent))
        before += len(each.ranks)
    if len(listed[0]) or not found:
        found.append((listed[0] + before, *listed[1:]))
    position, offset, extent = (np.concatenate(column) for column in zip(*found, strict=True))
    return position, offset, extent


def _unite_equal(position: IntArray, offset: IntArray, extent: IntArray) -> Iterator[_Parts]:
    """Unite the equal boxes of several ranks, and yield those with the same number of owners.

    For example, the ranks 0 and 1 hold `[0:2]`, and 2 and 3 hold `[2:4]`: these are two parts with
    the owners (0, 1) and (2, 3).

    Args:
        position: the rank that holds each box, `(n,)`.
        offset, extent: the boxes, `(n, D)`.
    """
    first, kind = distinct_rows(np.column_stack([offset, extent]))
    ordered = position[np.lexsort((position, kind))]
    count_of = np.bincount(kind, minlength=len(first))
    begin = np.cumsum(count_of) - count_of
    for count in np.unique(count_of).tolist():
        boxes = np.flatnonzero(count_of == count)
        owners = ordered[begin[boxes, None] + np.arange(count)]
        for rows in split_repeated(owners[:, 0]):
            chosen = first[boxes[rows]]
            sizes = extent[chosen].prod(axis=1)
            yield offset[chosen], extent[chosen], sizes, owners[rows]


def split_repeated(values: IntArray) -> list[IntArray]:
    """Return the rows of the first occurrences of values, those of the second, and so on.

    >>> [rows.tolist() for rows in split_repeated(np.array([7, 7, 3]))]
    [[0, 2], [1]]
    """
    if len(values) == 1:
        return [np.zeros(1, np.int64)]
    order = np.argsort(values, kind="stable")
    begins = np.append(True, np.diff(values[order]) != 0)[: len(order)]
    time = np.empty(len(order), np.int64)
    time[order] = count_up(np.diff(np.append(np.flatnonzero(begins), len(order))))
    return [np.flatnonzero(time == k) for k in range(int(time.max(initial=-1)) + 1)]


def _check_coverage(
    shapes: IntArray,
    parts: Sequence[Sequence[_Parts]],
    number_of: IntArray,
    tensors: Mapping[str, TensorEntry],
    divisions: Sequence[Division],
) -> None:
    """Check that parts cover tensors exactly once.

    Args:
        shapes, parts: the distinct shapes with their parts.
        number_of: the index in these of each tensor.
        tensors, divisions: for the error.
    """
    none = np.zeros(0, np.int64), np.zeros((0, shapes.shape[1]), np.int64)
    columns = [(none[0], none[1], none[1])]
    for i, each in enumerate(parts):
        columns += [(np.full(len(offset), i), offset, extent) for offset, extent, *_ in each]
    number, offset, extent = (np.concatenate(column) for column in zip(*columns, strict=True))
    must_be_covered = np.ones(len(shapes), bool)
    uncovered = find_uncovered_tensors(shapes, number, offset, extent, must_be_covered)
    wrong = np.flatnonzero(np.isin(number_of, uncovered)).tolist() if len(uncovered) else []
    if not wrong:
        return
    names, lines = [*tensors], []
    for i in wrong[:10]:
        ndim = len(tensors[names[i]].shape)
        held = sorted(
            (offset[:ndim], shape[:ndim], owners[0])
            for each in divisions
            if i in each.tensors
            for offset, shape, owners in zip(
                each.offset.tolist(), each.shape.tolist(), each.owners.tolist(), strict=True
            )
        )
        parts_of_tensor = (f"rank {r} has {Box(tuple(o), tuple(n))}" for o, n, r in held[:8])
        shape = list(tensors[names[i]].shape)
        lines.append(f"  - {names[i]} {shape}: {', '.join(parts_of_tensor)}")
    if len(wrong) > len(lines):
        lines.append(f"  - and {format_count(len(wrong) - len(lines), 'more tensor')}")
    raise LayoutError(
        f"the shards of {format_count(len(wrong), 'tensor')} leave gaps, or overlap without being "
        "equal; some rank must hold each element, and ranks that hold the same element must hold "
        "equal boxes:\n" + "\n".join(lines)
    )
