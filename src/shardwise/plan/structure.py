"""The structure of a rank's state, and the boxes that ranks with given structures hold.

Ranks that hold the same tensors, split over meshes of the same sizes, have the same structure. They
differ in their coordinates. So a structure is sent once, each rank sends its coordinates, and every
rank computes the boxes of every other rank.

Example: a weight of shape `(8, 4)`, sharded by rows over four ranks. Its rule is one `AxisSplit`
of dimension 0 into 4 parts. Rank 2 has the coordinate `[2]`, and holds `[4:6,0:4]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from shardwise.boxes import Box, Sharding, Split, shard_boxes
from shardwise.boxes.box import BoolArray, IntArray, pad_columns
from shardwise.decoding import prepare_decoding
from shardwise.errors import MismatchError
from shardwise.manifest.manifest import TensorEntry

Coordinates = tuple[int, ...]
"""For each axis of a structure, the index of a rank's part."""


class AxisSplit(msgspec.Struct, array_like=True, frozen=True):
    """A `boxes.Split` whose index is a coordinate of the rank.

    Attributes:
        dim, parts, split_factor: as in `Split`.
        axis: the position of the index in the rank's coordinates.
    """

    dim: int
    parts: int
    split_factor: int
    axis: int


ParamGroups = tuple[tuple[str, tuple[tuple[str, ...], ...]], ...]
"""Names of plain values. Each value is a list with an item for each group: the value that some
parameters, the members of the group, have in common."""
Rule = tuple[AxisSplit, ...]
"""How a tensor is split. Without splits, each rank holds the whole tensor."""


@prepare_decoding
class Structure(msgspec.Struct, array_like=True, frozen=True):
    """The tensors of a rank, and which boxes the rank holds, as a function of its coordinates.

    Attributes:
        names, dtypes, shapes: the name, dtype (torch's name) and global shape of each tensor.
        rules: the distinct rules.
        rule_of: for each tensor, the index of its rule; -1 for a tensor whose boxes are listed.
        listed: the boxes of tensors without a rule: index of the tensor, offset and shape.
        ties: for each tied tensor, its name, and the name in `names` of the tensor with its data.
        per_rank: the names of the per-rank values.
        param_groups: the members of groups of parameters, which have plain values in common.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    rules: tuple[Rule, ...]
    rule_of: tuple[int, ...]
    listed: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...] = ()
    ties: tuple[tuple[str, str], ...] = ()
    per_rank: tuple[str, ...] = ()
    param_groups: ParamGroups = ()


def find_rules(
    tensors: Sequence[tuple[tuple[int, ...], Sharding | None, Sequence[Box]]],
) -> tuple[tuple[Rule, ...], tuple[int, ...], Coordinates]:
    """Find, for each tensor, the rule that yields the boxes of this rank.

    Args:
        tensors: for each tensor, its shape, its sharding if there is one, and the boxes that this
            rank holds of it.

    Returns:
        The rules, the index of the rule of each tensor (-1 if the boxes follow no rule), and the
        coordinates of this rank.
    """
    rules: dict[Rule, int] = {}
    axes: dict[tuple[object, int], int] = {}
    coordinates: list[int] = []
    rule_of = []
    for shape, sharding, boxes in tensors:
        splits = () if sharding is None else sharding.splits
        if list(boxes) != [box for box, _ in shard_boxes(shape, splits)]:
            rule_of.append(-1)
            continue
        rule = []
        for split in splits:
            key = (sharding and sharding.mesh, split.mesh_dim)
            axis = axes.setdefault(key, len(axes))
            if axis == len(coordinates):
                coordinates.append(split.index)
            rule.append(AxisSplit(split.dim, split.parts, split.split_factor, axis))
        rule_of.append(rules.setdefault(tuple(rule), len(rules)))
    return tuple(rules), tuple(rule_of), tuple(coordinates)


@dataclass(frozen=True, slots=True)
class Description:
    """The structure and coordinates of one rank, and the boxes of its n fragments.

    Attributes:
        structure: the structure.
        coordinates: the coordinates of the rank.
        tensor: the index of each fragment's tensor, `(n,)`.
        offset, shape: the box of each fragment, `(n, D)`, padded on the right with 0 and 1.
    """

    structure: Structure
    coordinates: Coordinates
    tensor: IntArray
    offset: IntArray
    shape: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class RanksOfStructure:
    """The n ranks that have a structure.

    Attributes:
        structure: the structure.
        ranks: the ranks, ascending, `(n,)`.
        coordinates: their coordinates, `(n, axes)`.
        fingerprint: a digest of the structure.
    """

    structure: Structure
    ranks: IntArray
    coordinates: IntArray
    fingerprint: bytes = b""


@dataclass(frozen=True, slots=True)
class HeldBoxes:
    """The n distinct boxes of all tensors, and the ranks that hold them, in columns.

    Attributes:
        tensor: indices in the list of all tensors, `(n,)`.
        offset, shape: the boxes, `(n, D)`.
        owner_set: the index in `owner_sets` of the ranks that hold each box, `(n,)`.
        owner_sets: the distinct sets of ranks, each sorted.
        fragment: the index of the fragment with this box on the rank that plans; -1 if the rank
            does not hold the box, `(n,)`.
    """

    tensor: IntArray
    offset: IntArray
    shape: IntArray
    owner_set: IntArray
    owner_sets: tuple[tuple[int, ...], ...]
    fragment: IntArray


def list_tensors(structures: Sequence[RanksOfStructure]) -> dict[str, TensorEntry]:
    """Return the tensors of all structures by name.

    Raises:
        MismatchError: ranks have different dtypes or shapes of the same tensor.
    """
    tied = {name for each in structures for name, _ in each.structure.ties}
    tensors: dict[str, TensorEntry] = {}
    first_ranks: dict[str, int] = {}
    problems: list[str] = []
    previous: tuple[object, ...] = ()
    for each in structures:
        structure = each.structure
        contents = structure.names, structure.dtypes, structure.shapes
        if contents == previous and not tied:
            continue
        previous = contents
        columns = zip(structure.names, structure.dtypes, structure.shapes, strict=True)
        for i, (name, dtype, shape) in enumerate(columns):
            if name in tied:
                is_this = np.arange(len(structure.names)) == i
                if not len(_boxes_of_structure(each, is_this, len(shape), {})):
                    continue  # a rank without a fragment of a tensor cannot see that it is tied
            first = tensors.get(name)
            if first is None:
                tensors[name] = TensorEntry(name, dtype, shape)
                first_ranks[name] = int(each.ranks[0])
            elif (first.dtype, first.shape) != (dtype, shape):
                problems.append(
                    f"{name}: {dtype} {list(shape)} on rank {each.ranks[0]}, "
                    f"{first.dtype} {list(first.shape)} on rank {first_ranks[name]}"
                )
    if problems:
        raise MismatchError(
            "ranks have tensors of the same name with different dtypes or shapes; pass the parts "
            "of one tensor as a DTensor or sw.Shards, and give other tensors different names:",
            problems,
        )
    return tensors


def find_held_boxes(
    structures: Sequence[RanksOfStructure],
    index_of: Mapping[str, int],
    dims: int,
    rank: int,
    own: Description,
) -> HeldBoxes:
    """Return the distinct boxes that ranks hold of some tensors.

    Args:
        structures: the distinct structures, and the ranks that have each of them.
        index_of: the tensors by name, and their indices in the list of all tensors.
        dims: the number D of dimensions to pad boxes to.
        rank: this rank.
        own: the fragments of this rank.
    """
    set_index: dict[tuple[int, ...], int] = {}
    tables = [np.zeros((0, 3 + 2 * dims), np.int64)]
    names: tuple[str, ...] = ()
    index = np.zeros(0, np.int64)
    for each in structures:
        if each.structure.names != names:
            names = each.structure.names
            index = np.array([index_of.get(name, -1) for name in names], np.int64)
        table = _boxes_of_structure(each, index >= 0, dims, set_index)
        if rank in each.ranks:
            table = np.vstack([table, _own_boxes(own, index >= 0, dims)])
        table[:, 0] = index[table[:, 0]]
        tables.append(table)
    return _merge_equal(np.concatenate(tables), set_index)


def _boxes_of_structure(
    each: RanksOfStructure,
    wanted: BoolArray,
    dims: int,
    set_index: dict[tuple[int, ...], int],
) -> IntArray:
    """Return the boxes that ranks with one structure hold.

    Args:
        each: the structure, and the ranks that have it.
        wanted: for each tensor of the structure, whether to return its boxes.
        dims: the number D of dimensions to pad boxes to.
        set_index: the index of each set of ranks; new sets are added.

    Returns:
        A row `(tensor, *offset, *shape, owner_set, fragment)` for each box: the index of the tensor
        in the structure, the box, the index of the set of ranks that hold it, and -1.
    """
    structure = each.structure
    # Tensors with the same rule and shape have the same boxes: for example, all weights of shape
    # `(4096, 4096)` that are split by rows.
    alike: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    follow_rules = np.array(structure.rule_of, np.int64) >= 0
    for i in np.flatnonzero(wanted & follow_rules).tolist():
        alike.setdefault((structure.rule_of[i], structure.shapes[i]), []).append(i)
    parts_of_rule = {
        rule: _parts_of_rule(structure.rules[rule], each, set_index)
        for rule in sorted({rule for rule, _ in alike})
    }
    tables = []
    for (rule, shape), tensors in alike.items():
        rows = []
        zeros, ones = (0,) * (dims - len(shape)), (1,) * (dims - len(shape))
        for splits, owner_set in parts_of_rule[rule]:
            for box, _ in shard_boxes(shape, splits):
                rows.append((*box.offset, *zeros, *box.shape, *ones, owner_set, -1))
        if rows:
            repeated = np.tile(np.array(rows, np.int64), (len(tensors), 1))
            tables.append(np.column_stack([np.repeat(tensors, len(rows)), repeated]))
    rows = []
    if structure.listed:
        everyone = set_index.setdefault(tuple(each.ranks.tolist()), len(set_index))
        for i, offset, shape in structure.listed:
            if wanted[i]:
                zeros, ones = (0,) * (dims - len(shape)), (1,) * (dims - len(shape))
                rows.append((i, *offset, *zeros, *shape, *ones, everyone, -1))
    listed = np.array(rows, np.int64).reshape(len(rows), 3 + 2 * dims)
    return np.concatenate([*tables, listed])


def _parts_of_rule(
    rule: Rule, each: RanksOfStructure, set_index: dict[tuple[int, ...], int]
) -> list[tuple[tuple[Split, ...], int]]:
    """Return the splits of each part of a tensor, and the index of the set of ranks that hold it.

    For example, a rule has one split of axis 0, and four ranks have the coordinates [0, 0], [0, 1],
    [1, 0] and [1, 1]. The parts are [0] and [1], which the ranks (0, 1) and (2, 3) hold.

    Args:
        each: the ranks that follow the rule, and their coordinates.
        set_index: the index of each set of ranks; new sets are added.
    """
    ranks, indices = each.ranks, each.coordinates[:, [split.axis for split in rule]]
    parts, inverse = np.unique(indices, axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)
    order = np.argsort(inverse, kind="stable")
    members = np.split(ranks[order], np.searchsorted(inverse[order], range(1, len(parts))))
    found = []
    for part, owners in zip(parts.tolist(), members, strict=True):
        pairs = zip(rule, part, strict=True)
        splits = tuple(Split(s.dim, s.parts, index, s.split_factor) for s, index in pairs)
        found.append((splits, set_index.setdefault(tuple(owners.tolist()), len(set_index))))
    return found


def _own_boxes(own: Description, wanted: BoolArray, dims: int) -> IntArray:
    """Return the boxes of this rank as `_boxes_of_structure` does, with their fragments."""
    rows = np.flatnonzero(wanted[own.tensor])
    offset, shape = pad_columns(own.offset[rows], dims, 0), pad_columns(own.shape[rows], dims, 1)
    return np.column_stack([own.tensor[rows], offset, shape, np.full(len(rows), -1), rows])


def _merge_equal(table: IntArray, set_index: dict[tuple[int, ...], int]) -> HeldBoxes:
    """Unite the rows of equal boxes, which several structures and this rank can have."""
    boxes = table[:, :-2]
    order = np.lexsort(boxes.T[::-1])  # the row of this rank stays behind that of its structure
    boxes, owner_set, fragment = boxes[order], table[order, -2], table[order, -1]
    begins = np.ones(len(boxes), bool)
    begins[1:] = (np.diff(boxes, axis=0) != 0).any(axis=1)
    first = np.flatnonzero(begins)
    end = np.append(first[1:], len(boxes))
    box = np.cumsum(begins) - 1
    own = np.full(len(first), -1)
    own[box[fragment >= 0]] = fragment[fragment >= 0]
    united = owner_set[first]
    sets = list(set_index)
    structures_with_box = np.bincount(box[owner_set >= 0], minlength=len(first))
    for row in np.flatnonzero(structures_with_box > 1).tolist():
        indices = {*owner_set[first[row] : end[row]].tolist()} - {-1}
        ranks = tuple(sorted({rank for i in indices for rank in sets[i]}))
        united[row] = set_index.setdefault(ranks, len(set_index))
        if united[row] == len(sets):
            sets.append(ranks)
    boxes, dims = boxes[first], (boxes.shape[1] - 1) // 2
    offset, shape = boxes[:, 1 : 1 + dims], boxes[:, 1 + dims :]
    return HeldBoxes(boxes[:, 0], offset, shape, united, tuple(sets), own)
