"""The structure of a rank's state: what its tensors are, and how they are split.

Ranks that hold the same tensors, split over meshes of the same sizes, have the same structure. They
differ in their coordinates. So a structure is sent once, each rank sends its coordinates, and every
rank computes the boxes of every other rank.

Example: a weight of shape `(8, 4)`, sharded by rows over four ranks. Its rule is one `AxisSplit`
of dimension 0 into 4 parts. Rank 2 has the coordinate `[2]`, and holds `[4:6,0:4]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from shardwise.boxes import Box, Sharding, Split, shard_boxes
from shardwise.boxes.table import IntArray
from shardwise.decoding import prepare_decoding

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
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    rules: tuple[Rule, ...]
    rule_of: tuple[int, ...]
    listed: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...] = ()
    ties: tuple[tuple[str, str], ...] = ()
    per_rank: tuple[str, ...] = ()


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


def boxes_of_rule(shape: tuple[int, ...], rule: Rule, indices: Sequence[int]) -> list[Box]:
    """Return the boxes of a tensor that a rank holds.

    Args:
        shape: the shape of the tensor.
        rule: how the tensor is split.
        indices: the index of the rank's part for each split of the rule.
    """
    pairs = zip(rule, indices, strict=True)
    splits = tuple(Split(s.dim, s.parts, index, s.split_factor) for s, index in pairs)
    return [box for box, _ in shard_boxes(shape, splits)]


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


@dataclass(frozen=True, slots=True)
class World:
    """The structures of all ranks.

    Attributes:
        structures: the distinct structures.
        structure_of: the index of each rank's structure, `(ranks,)`.
        coordinates: the coordinates of each rank.
    """

    structures: tuple[Structure, ...]
    structure_of: IntArray
    coordinates: tuple[Coordinates, ...]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.coordinates)

    @property
    def per_rank(self) -> tuple[str, ...]:
        """The names of the per-rank values of all ranks."""
        return tuple(dict.fromkeys(name for each in self.structures for name in each.per_rank))
