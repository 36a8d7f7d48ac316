"""Describe what a rank saves of a state: boxes without bytes, and the memory that holds them.

Example: rank 4 of a mesh of dp=2 times tp=3 holds rows 2 and 3 of a weight of shape `(6, 4)`, which
is split by rows over tp. The rank sends the rule, dimension 0 into 3 shards, and its coordinate, 1.
The box `[2:4,0:4]` follows from these. The memory, 32 bytes, stays on the rank as a `Fragment`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol, overload

import numpy as np
import torch

from shardwise.kernel.boxes import Box
from shardwise.kernel.boxes.box import padded_rows
from shardwise.kernel.engine.shared_structures import digest_of, encode_structure
from shardwise.kernel.engine.shared_values import members_of
from shardwise.kernel.engine.tensors import accelerators_of, check_memory, split_ties
from shardwise.kernel.manifest.manifest import check_name
from shardwise.kernel.plan.structure import Description, ParamGroups, Structure, find_rules
from shardwise.kernel.state.local_state import (
    Fragment,
    LocalState,
    TensorLeaf,
    memory_extent,
    view_for_numpy,
)
from shardwise.kernel.state.tensors import mesh_axes


@dataclass(frozen=True, slots=True)
class Described:
    """What a plan needs to know of the tensors of a rank.

    Attributes:
        description: the boxes that this rank holds.
        fragments: the fragments in the description, with their memory.
        fingerprint: a digest of the structure in the description.
        axes: the coordinate of this rank in each named axis of the meshes of its tensors.
        devices: the accelerators that hold some of the fragments.
    """

    description: Description
    fragments: Sequence[Fragment]
    fingerprint: bytes
    axes: Mapping[str, int]
    devices: frozenset[torch.device]


class StateToSave(Protocol):
    """A state that a save describes.

    Attributes:
        values: the plain values, grouped values and per-rank values.
        why_bound: why the tensors were looked for in all objects of the state; "" if a
            `Checkpointer` knows them from its last save.
    """

    values: LocalState
    why_bound: str

    def describe(self, of_shards: Collection[str]) -> Described:
        """Return the description of the tensors.

        Args:
            of_shards: the names of tensors to save for each shard.
        """

    def elements(self, of_shards: Collection[str]) -> Mapping[str, bytes | None]:
        """Return what ranks must agree on to share plain tensors of a sharded parameter's state.

        Args:
            of_shards: the names of such tensors that ranks do not share.

        Returns:
            By the name of the tensor: the bytes of its one element; none if the tensor is sharded
            like its parameter; None if it must be saved for each shard.
        """


class BoundState:
    """A state whose tensors were just found.

    Args:
        local_state: the tensors and values of this rank.
        why_bound: as in `StateToSave`.
    """

    def __init__(self, local_state: LocalState, why_bound: str = "") -> None:
        self.values, self.why_bound = local_state, why_bound

    def describe(self, of_shards: Collection[str]) -> Described:
        """Return the description of the tensors; see `StateToSave.describe`."""
        state = self.values
        for index, leaf in enumerate(state.tensors if of_shards else ()):
            if leaf.of_shard is not None and leaf.name in of_shards:
                state.tensors[index] = leaf.of_shard()
                check_name(state.tensors[index].name)
        groups = members_of(state)
        description, fragments = describe_tensors(state.tensors, tuple(state.per_rank), groups)
        fingerprint = digest_of(encode_structure(description.structure))
        axes = mesh_axes(state.tensors)
        devices = accelerators_of(each.data for each in fragments)
        return Described(description, fragments, fingerprint, axes, devices)

    def elements(self, of_shards: Collection[str]) -> Mapping[str, bytes | None]:
        """Return what ranks must agree on; see `StateToSave.elements`."""
        elements: dict[str, bytes | None] = dict.fromkeys(sorted(of_shards))
        for leaf in self.values.tensors:
            if leaf.of_shard is not None and leaf.fragments and leaf.name not in elements:
                elements[leaf.name] = _element_of(leaf)
        return elements


def _element_of(leaf: TensorLeaf) -> bytes | None:
    """Return what must be equal on all ranks, unless the leaf is saved for each shard."""
    if leaf.is_like_parameter:
        return b""
    data = leaf.fragments[0].data
    return view_for_numpy(data).cpu().numpy().tobytes() if data.numel() == 1 else None


def describe_tensors(
    leaves: Sequence[TensorLeaf], per_rank: Sequence[str] = (), param_groups: ParamGroups = ()
) -> tuple[Description, tuple[Fragment, ...]]:
    """Split the tensors of this rank into a description without bytes, and their memory.

    If several leaves have the same `tie_key`, the description lists the first and ties the others
    to it.

    Args:
        leaves: the tensors of this rank, with distinct names.
        per_rank: the names of the values that differ between ranks.
        param_groups: the members of groups of parameters that have plain values in common.

    Returns:
        The description, and its fragments in the same order.

    Raises:
        StateError: a leaf has no memory.
    """
    listed, ties = split_ties(leaves)
    fragments: list[Fragment] = []
    tensor: list[int] = []
    names, dtypes, shapes, held = [], [], [], []
    for index, leaf in enumerate(listed):
        held_here = []
        for fragment in filter(attrgetter("box.size"), leaf.fragments):
            check_memory(leaf.name, fragment.data)
            held_here.append(fragment.box)
            fragments.append(fragment)
            tensor.append(index)
        names.append(leaf.name)
        dtypes.append(str(leaf.dtype).removeprefix("torch."))
        shapes.append(leaf.shape)
        held.append((leaf.shape, leaf.sharding, held_here))
    rules, rule_of, coordinates = find_rules(held)
    dims = max(map(len, shapes), default=0)
    boxes = (
        np.array(tensor, np.int64),
        padded_rows(map(attrgetter("box.offset"), fragments), dims, 0),
        padded_rows(map(attrgetter("box.shape"), fragments), dims, 1),
    )
    follows_none = np.array(rule_of, np.int64)[boxes[0]] < 0
    structure = Structure(
        tuple(names),
        tuple(dtypes),
        tuple(shapes),
        rules,
        rule_of,
        Structure.pack_boxes(*(column[follows_none] for column in boxes))
        if follows_none.any()
        else b"",
        tuple(ties),
        tuple(per_rank),
        param_groups,
    )
    return Description(structure, coordinates, *boxes), tuple(fragments)


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How to get the memory of a fragment from a tensor.

    Attributes:
        box: the box of the fragment.
        tensor: the index of the tensor.
        itemsize: the size of the elements of the tensor.
        start: where the fragment begins in the memory of the tensor, in bytes.
        shape, stride: those of the fragment.
        dtype: the dtype of the fragment.
    """

    box: Box
    tensor: int
    itemsize: int
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Recipes:
    """How to get fragments from tensors of the same layout as those that had these fragments."""

    def __init__(self, recipes: Sequence[_Recipe]) -> None:
        self._recipes = recipes

    @classmethod
    def of(cls, fragments: Sequence[Fragment], tensors: Sequence[torch.Tensor]) -> Recipes | None:
        """Return the recipes of fragments.

        The result is None if a fragment has memory of its own, for example a copy that was made for
        the save.
        """
        holders: dict[int, list[tuple[int, int, int]]] = {}
        for index, tensor in enumerate(tensors):
            start = tensor.data_ptr()
            extent = memory_extent(tensor) if tensor.numel() else 0
            stop = start + extent * tensor.element_size()
            holders.setdefault(tensor.untyped_storage().data_ptr(), []).append((index, start, stop))
        recipes = []
        for fragment in fragments:
            data = fragment.data
            first = data.data_ptr()
            last = first + memory_extent(data) * data.element_size()
            holder = next(
                (
                    (index, start)
                    for index, start, stop in holders.get(data.untyped_storage().data_ptr(), ())
                    if start <= first and last <= stop
                ),
                None,
            )
            if holder is None or data.is_conj() or data.is_neg():
                return None
            index, start = holder
            itemsize, shape, stride = (
                tensors[index].element_size(),
                tuple(data.shape),
                data.stride(),
            )
            recipes.append(
                _Recipe(fragment.box, index, itemsize, first - start, shape, stride, data.dtype)
            )
        return cls(recipes)

    def fragments(
        self, tensors: Sequence[torch.Tensor], storages: Sequence[torch.UntypedStorage]
    ) -> Sequence[Fragment]:
        """Return the fragments in tensors. They keep the storages of these alive."""
        return _PreparedFragments(self._recipes, tensors, storages)


class _PreparedFragments(Sequence[Fragment]):
    """Fragments that are made when they are asked for."""

    def __init__(
        self,
        recipes: Sequence[_Recipe],
        tensors: Sequence[torch.Tensor],
        storages: Sequence[torch.UntypedStorage],
    ) -> None:
        # The training may give a tensor other memory during the copy, or move that of a storage.
        self._recipes, self._storages = recipes, storages
        self._offsets = [*map(torch.Tensor.storage_offset, tensors)]

    def __len__(self) -> int:
        return len(self._recipes)

    @overload
    def __getitem__(self, index: int) -> Fragment: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Fragment]: ...
    def __getitem__(self, index: int | slice) -> Fragment | Sequence[Fragment]:
        """Return a fragment."""
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        recipe = self._recipes[index]
        storage = self._storages[recipe.tensor]
        begin = self._offsets[recipe.tensor] * recipe.itemsize + recipe.start
        data = torch.empty(0, dtype=recipe.dtype, device=storage.device)
        data.set_(storage, begin // data.element_size(), recipe.shape, recipe.stride)
        return Fragment(recipe.box, data)
