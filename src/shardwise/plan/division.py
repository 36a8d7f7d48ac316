"""Tensors that are split alike: their parts, and the ranks that hold each part.

A large model has thousands of tensors, but few shapes and ways to split them. What is computed for
one such tensor holds for all others that are split alike. So the cost of a plan grows with the
number of ranks, and not with the number of ranks times the number of tensors.

Example: 400 tensors of shape `(8, 4)`, split by rows over the ranks 0 to 3, are one `Division`. It
has the parts `[0:2,0:4]`, `[2:4,0:4]`, `[4:6,0:4]` and `[6:8,0:4]`, and the owners 0, 1, 2 and 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwise.boxes import find_uncovered_tensors
from shardwise.boxes.box import BoolArray, IntArray, pad_columns
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import TensorEntry
from shardwise.plan.structure import RanksOfStructure

SMALLEST_DIVISION = 1024
"""Tensors that have fewer parts together are planned one by one, which is faster."""

_Occurrences = tuple[tuple[int, int], ...]
"""The structures that contain a tensor, and the tensor's rule in each of them."""
_Boxes = tuple[IntArray, IntArray, IntArray]
"""The positions of the parts that are not empty, and `offset` and `shape` as in `Division`."""
_Split = tuple[int, int]
"""A dimension of a tensor, and the number of its parts."""


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """t tensors that are split alike into p parts. Each part is held by m ranks.

    Attributes:
        tensors: indices in the list of all tensors, ascending, `(t,)`.
        itemsize: the size of an element, in bytes.
        offset, shape: the parts, as boxes of each tensor, `(p, D)`, padded with 0 and 1.
        owners: the ranks that hold each part, ascending, `(p, m)`.
    """

    tensors: IntArray
    itemsize: int
    offset: IntArray
    shape: IntArray
    owners: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """Parts that have the same number of owners.

    Attributes:
        key: is equal for equal `index`.
        index: the index of each part in each split, `(p, s)`.
        owners: the ranks that hold each part, ascending, `(p, m)`.
    """

    key: bytes
    index: IntArray
    owners: IntArray


def find_divisions(
    structures: Sequence[RanksOfStructure],
    tensors: Mapping[str, TensorEntry],
    smallest: int = SMALLEST_DIVISION,
) -> list[Division]:
    """Find the tensors that are split alike into many parts.

    Other tensors are in no division: those that are not split, those with listed boxes, with
    strided shards, with different rules in different structures, and those whose parts do not cover
    them exactly once.

    Args:
        structures: the distinct structures, and the ranks that have each of them.
        tensors: all tensors by name, in the order of their indices.
        smallest: the fewest parts of a division, counting the parts of each tensor.
    """
    if not any(any(each.structure.rules) for each in structures):
        return []  # no tensor is split by a rule
    dims = max((len(entry.shape) for entry in tensors.values()), default=0)
    alike = _find_alike(structures, tensors)
    known: dict[tuple[int, bytes], list[_Parts]] = {}
    parts_of: dict[_Occurrences, list[_Parts]] = {}
    boxes: dict[tuple[object, ...], list[_Boxes] | None] = {}
    divisions = []
    for (occurrences, shape, dtype), indices in alike.items():
        splits = _splits_of(structures, occurrences)
        if not splits or len(indices) * math.prod(parts for _, parts in splits) < smallest:
            continue
        if occurrences not in parts_of:
            parts_of[occurrences] = list(_parts_and_owners(structures, occurrences, known))
        parts = parts_of[occurrences]
        key = shape, splits, *(each.key for each in parts)
        if key not in boxes:
            boxes[key] = _boxes_of_parts(shape, splits, [each.index for each in parts], dims)
        listed = np.array(indices, np.int64)
        for each, (rows, offset, extent) in zip(parts, boxes[key] or (), strict=False):
            itemsize, owners = DTYPES[dtype].itemsize, each.owners[rows]
            divisions.append(Division(listed, itemsize, offset, extent, owners))
    return [division for division in divisions if len(division.offset)]


def _find_alike(
    structures: Sequence[RanksOfStructure], tensors: Mapping[str, TensorEntry]
) -> dict[tuple[_Occurrences, tuple[int, ...], str], list[int]]:
    """Return the indices of tensors with equal structures, rules, shape and dtype."""
    tied = {name for each in structures for name, _ in each.structure.ties}
    occurrences_of: dict[str, list[tuple[int, int]]] = {name: [] for name in tensors}
    for i, each in enumerate(structures):
        for name, rule in zip(each.structure.names, each.structure.rule_of, strict=True):
            if name in occurrences_of:
                occurrences_of[name].append((i, rule))
    alike: dict[tuple[_Occurrences, tuple[int, ...], str], list[int]] = {}
    for index, (name, entry) in enumerate(tensors.items()):
        occurrences = tuple(occurrences_of[name])
        if name not in tied and entry.shape and all(rule >= 0 for _, rule in occurrences):
            alike.setdefault((occurrences, entry.shape, entry.dtype), []).append(index)
    return alike


def _splits_of(
    structures: Sequence[RanksOfStructure], occurrences: _Occurrences
) -> tuple[_Split, ...] | None:
    """Return how a tensor is split, if it is split equally in all structures.

    Returns None if it is split differently, or if a shard can have several boxes.
    """
    splits = {
        tuple((split.dim, split.parts, split.split_factor) for split in each.structure.rules[rule])
        for each, rule in ((structures[i], rule) for i, rule in occurrences)
    }
    first = splits.pop()
    if splits or any(factor != 1 for _, _, factor in first):
        return None
    return tuple((dim, parts) for dim, parts, _ in first)


def _parts_and_owners(
    structures: Sequence[RanksOfStructure],
    occurrences: _Occurrences,
    known: dict[tuple[int, bytes], list[_Parts]],
) -> Iterator[_Parts]:
    """Yield the parts of a tensor that have the same number of owners.

    Parts are sorted so that the index with the most values changes fastest. Runs of pieces then
    become long.

    Args:
        structures: as in `find_divisions`.
        occurrences: the rule of the tensor in some of them.
        known: the parts for some coordinates, with positions in place of ranks. Pipeline stages
            have equal coordinates.
    """
    ranks = np.concatenate([structures[i].ranks for i, _ in occurrences])
    columns = []
    for i, rule in occurrences:
        each = structures[i]
        columns.append(each.coordinates[:, [split.axis for split in each.structure.rules[rule]]])
    indices = np.concatenate(columns)
    if len(occurrences) > 1:
        by_rank = np.argsort(ranks, kind="stable")
        ranks, indices = ranks[by_rank], indices[by_rank]
    key = len(ranks), indices.tobytes()
    if key not in known:
        known[key] = [*_find_parts(indices)]
    for parts in known[key]:
        yield replace(parts, owners=ranks[parts.owners])


def _find_parts(indices: IntArray) -> Iterator[_Parts]:
    by_size = np.argsort([len(np.unique(column)) for column in indices.T], kind="stable")
    columns = [*reversed(indices.T[by_size])]
    order = np.lexsort(columns) if columns else np.arange(len(indices))
    indices = indices[order]
    begins = np.ones(len(order), bool)
    begins[1:] = (np.diff(indices, axis=0) != 0).any(axis=1)
    first = np.flatnonzero(begins)
    counts = np.diff(np.append(first, len(order)))
    for count in np.unique(counts).tolist():
        rows = first[counts == count]
        parts = indices[rows]
        yield _Parts(parts.tobytes(), parts, order[rows[:, None] + np.arange(count)])


def _boxes_of_parts(
    shape: tuple[int, ...], splits: Sequence[_Split], parts: Sequence[IntArray], dims: int
) -> list[_Boxes] | None:
    """Return the boxes of parts, as `boxes.shard_boxes` does for one part, without empty ones.

    Returns None if the boxes do not cover the tensor exactly once.

    Args:
        shape: the shape of the tensor.
        splits: how the tensor is split, from left to right.
        parts: lists of parts: the index of each part in each split, `(p, s)`.
        dims: the number of dimensions to pad the boxes to.
    """
    indices = np.concatenate(parts)
    offset = np.zeros((len(indices), len(shape)), np.int64)
    extent = np.tile(np.array(shape, np.int64), (len(indices), 1))
    for (dim, count), index in zip(splits, indices.T, strict=True):
        if not (0 <= dim < len(shape) and count > 0):
            return None
        whole = extent[:, dim].copy()
        size = -(-whole // count)
        start = np.minimum(index * size, whole)
        extent[:, dim] = np.minimum((index + 1) * size, whole) - start
        offset[:, dim] += start
    holds: BoolArray = np.asarray(extent.all(axis=1))
    boxes = np.zeros(int(holds.sum()), np.int64), offset[holds], extent[holds]
    one_tensor = np.array([shape], np.int64), *boxes, np.ones(1, bool)
    if len(find_uncovered_tensors(*one_tensor)):
        return None
    found, low = [], 0
    for each in parts:
        rows = np.flatnonzero(holds[low : low + len(each)])
        chosen = rows + low
        low += len(each)
        padded = pad_columns(offset[chosen], dims, 0), pad_columns(extent[chosen], dims, 1)
        found.append((rows, *padded))
    return found
