"""The structure of a rank's state, and the boxes that ranks with given structures hold.

Ranks that hold the same tensors, split over meshes of the same sizes, have the same structure. They
differ in their coordinates. So a structure is sent once, each rank sends its coordinates, and every
rank computes the boxes of every other rank.

Example (docs/architecture.md follows it to the manifest): six ranks are a mesh of dp=2 times tp=3.
A weight of shape `(6, 4)` is split by rows over tp, and replicated over dp. Its rule is one
`AxisSplit`: dimension 0 into 3 shards, by coordinate 0. Rank 4 has dp=1 and tp=1. It sends the
coordinates `[1]`, and holds the box `[2:4,0:4]`; so does rank 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from shardwise.kernel.boxes import Box, Sharding, Split, shard_boxes
from shardwise.kernel.boxes.box import IntArray, distinct_rows, pad_columns, padded_rows
from shardwise.kernel.decoding import prepare_decoding
from shardwise.kernel.errors import MismatchError
from shardwise.kernel.manifest.manifest import TensorEntry

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
        listed: the boxes of tensors without a rule; packed by `pack_boxes`.
        ties: for each tied tensor, its name, and the name in `names` of the tensor with its data.
        per_rank: the names of the per-rank values.
        param_groups: the members of groups of parameters, which have plain values in common.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    rules: tuple[Rule, ...]
    rule_of: tuple[int, ...]
    listed: bytes = b""
    ties: tuple[tuple[str, str], ...] = ()
    per_rank: tuple[str, ...] = ()
    param_groups: ParamGroups = ()

    @staticmethod
    def pack_boxes(tensor: IntArray, offset: IntArray, shape: IntArray) -> bytes:
        """Return boxes as `listed` has them, equal ones once.

        Args:
            tensor: the index of each box's tensor, `(n,)`.
            offset, shape: the boxes, `(n, D)`, for the largest number D of dimensions of `shapes`.
        """
        table = np.column_stack([tensor, offset, shape])
        # Numbers of one column are alike. They are compressed well if they are neighbours.
        return table[np.sort(distinct_rows(table)[0])].T.astype("<i8").tobytes()

    def boxes(self, dims: int) -> IntArray:
        """Return the listed boxes as columns `(tensor, *offset, *shape)`.

        Args:
            dims: the number of dimensions to pad boxes to.
        """
        own = max(map(len, self.shapes), default=0)
        table = np.frombuffer(self.listed, "<i8").reshape(1 + 2 * own, -1)
        if own == dims:
            return table
        offset, shape = np.split(table[1:], 2)
        padded = pad_columns(offset.T, dims, 0).T, pad_columns(shape.T, dims, 1).T
        return np.vstack([table[:1], *padded])


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
            if name in tied and not _holds(each, i):
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


def _holds(each: RanksOfStructure, tensor: int) -> bool:
    """Return whether a rank of a structure has a box of a tensor, given by its index."""
    structure, rule = each.structure, each.structure.rule_of[tensor]
    if rule < 0:
        own = max(map(len, structure.shapes))
        return tensor in structure.boxes(own)[0]
    shape = structure.shapes[tensor]
    return len(held_boxes(structure.rules[rule], each.coordinates, shape, len(shape))[0]) > 0


def held_boxes(
    rule: Rule, coordinates: IntArray, shape: tuple[int, ...], dims: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Return the boxes that ranks hold of a tensor that follows a rule.

    Args:
        rule: the rule.
        coordinates: the coordinates of the ranks, `(n, axes)`.
        shape: the shape of the tensor.
        dims: the number D of dimensions to pad boxes to.

    Returns:
        For each box that is not empty: the row of the rank, and the offset and shape of the box.

    Raises:
        LayoutError: the tensor lacks the dimension of a split.
    """
    indices = coordinates[:, [split.axis for split in rule]]
    if any(split.split_factor != 1 or not 0 <= split.dim < len(shape) for split in rule):
        listed = []
        for row, index in enumerate(indices.tolist()):
            pairs = zip(rule, index, strict=True)
            splits = tuple(Split(s.dim, s.parts, k, s.split_factor) for s, k in pairs)
            listed += [(row, box) for box, _ in shard_boxes(shape, splits)]
        offsets, shapes = ([b.offset for _, b in listed], [b.shape for _, b in listed])
        found = np.array([row for row, _ in listed], np.int64)
        return found, padded_rows(offsets, dims, 0), padded_rows(shapes, dims, 1)
    offset, extent = np.zeros((len(indices), dims), np.int64), np.ones((len(indices), dims), int)
    extent[:, : len(shape)] = shape
    for split, index in zip(rule, indices.T, strict=True):
        whole = extent[:, split.dim].copy()
        size = -(-whole // split.parts)  # as by `torch.chunk`
        start = np.minimum(index * size, whole)
        extent[:, split.dim] = np.minimum(start + size, whole) - start
        offset[:, split.dim] += start
    found = np.flatnonzero(extent.all(axis=1))
    return found, offset[found], extent[found]
