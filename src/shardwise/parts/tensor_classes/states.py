"""Composite tensors in a state: in modules, as items, and in the state of optimizers.

A load fills the inner tensors of a module where they are. In the state of an optimizer, which may
not exist before its first step, it builds the tensors that were saved.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import msgspec
import torch
from msgspec import UNSET
from torch.optim import Optimizer

from shardwise.kernel.adapters.optimizer_groups import as_saved
from shardwise.kernel.adapters.values import tensor_names_in_value
from shardwise.kernel.errors import StateError
from shardwise.kernel.state.json_fields import Fields
from shardwise.kernel.state.parameters import LOCAL
from shardwise.kernel.state.plain_values import describes_tensor, find_differences
from shardwise.kernel.state.stated_geometry import stated_geometry
from shardwise.kernel.state.tensors import (
    SHARD,
    local_tensor,
    sharded_leaf,
)
from shardwise.parts.tensor_classes.composite import (
    Composite,
    build,
    check_description,
    class_name,
    composite_of,
    find_class,
    rule_of,
)
from shardwise.parts.tensor_classes.geometry import inner_shape
from shardwise.parts.tensor_classes.layouts import is_built_anew, put, with_offsets_of
from shardwise.ports.binding import (
    JsonValue,
    LocalState,
    Parameter,
    SavedNames,
    Selection,
    decode,
    encode,
    tensor_leaf,
)
from shardwise.ports.module_binding import is_dtensor
from shardwise.ports.tensor_classes import Layout, Shape


def state_of_tensor(name: str, tensor: torch.Tensor) -> LocalState:
    """Return what is saved of a tensor that lives in a module, or is an item of the state.

    Raises:
        StateError: this kind of tensor cannot be saved.
    """
    composite = composite_of(name, tensor)
    if composite is None:
        return LocalState(tensors=[tensor_leaf(name, tensor)])
    if stated_geometry(name, local_tensor(tensor)) is not None:
        raise StateError(
            f"{name}: a {composite.class_name} states which part of a global tensor it holds, but "
            "which parts its inner tensors hold is unknown: use a DTensor"
        )
    local, rule = local_tensor(tensor), composite.rule
    after_load: Callable[[], object] | None = None
    if rule is not None and rule.after_load is not None:
        after_load = partial(rule.after_load, local)
    if rule is not None and rule.saved_as is not None:
        inner = composite.inner[rule.saved_as]
        leaf = sharded_leaf(name, inner, tensor) if is_dtensor(tensor) else tensor_leaf(name, inner)
        return LocalState(tensors=[replace(leaf, after_load=after_load or leaf.after_load)])
    leaves = [*composite.leaves(name, tensor)]
    if is_built_anew(composite.class_name):
        after_load = LiveTensor(name, tensor)
    if after_load is not None:
        leaves[-1] = replace(leaves[-1], after_load=after_load)
    shape = tuple(tensor.shape) if is_dtensor(tensor) else composite.shape
    return LocalState(tensors=leaves, objects={name: describe(name, composite, shape)})


class LiveTensor:
    """A sparse, jagged or quantized tensor that a load gives new contents.

    Args:
        name: its full name.
        live: the tensor.
    """

    def __init__(self, name: str, live: torch.Tensor) -> None:
        self.name, self._live = name, live
        self._inner: dict[str, torch.Tensor] = {}
        self._described: Fields = {}

    def allocate(self, local_state: LocalState, described: Fields, saved: SavedNames) -> None:
        """Replace the components of the live tensor by new ones, in the shapes of the checkpoint.

        Args:
            local_state: the targets of the load.
            described: what the checkpoint says of the tensor.
            saved: the contents of the checkpoint.

        Raises:
            StateError: what the checkpoint says is malformed.
        """
        check_description(self.name, described)
        names = [f"{self.name}.{key}" for key in described["tensors"]]
        self._described = described
        for index, leaf in enumerate(local_state.tensors):
            entry = saved.tensor(leaf.name) if leaf.name in names else None
            if entry is not None:
                dtype: torch.dtype = getattr(torch, entry.dtype)
                made = torch.empty(entry.shape, dtype=dtype, device=self._live.device)
                self._inner[leaf.name.removeprefix(f"{self.name}.")] = made
                new = tensor_leaf(leaf.name, made)
                local_state.tensors[index] = replace(new, after_load=leaf.after_load)

    def __call__(self) -> None:
        """Give the live tensor the contents that a load has read.

        Raises:
            StateError: they do not fit together, or the live tensor cannot change.
        """
        name, described = self.name, self._described
        if not described:  # the load only fills components that fit
            return
        context = decode(described["context"], name)
        made = build(name, described, context, self._inner, tuple(described["shape"]))
        put(name, self._live, made)


def describe(name: str, composite: Composite, shape: Shape) -> JsonValue:
    """Return the plain value that describes a composite tensor of a global shape."""
    inner: Fields = {}
    for key, each in composite.inner.items():
        nested = composite_of(name, each)
        full_name = f"{name}.{key}"
        inner[key] = {"$": "tensor", "name": full_name}
        if nested is not None:
            inner[key] = describe(full_name, nested, nested.shape)
    found = composite.fields(partial(encode, name=f"{name}.context"), inner)
    return {**found, "shape": [*shape]}


def state_of_parameter(
    name: str, tensor: torch.Tensor, parameter: Parameter, optimizer: Optimizer
) -> LocalState:
    """Return what is saved of a composite tensor in the state of an optimizer.

    Args:
        name: its full name.
        tensor: the tensor, or a DTensor of composite tensors.
        parameter: the parameter that it belongs to.
        optimizer: the optimizer.

    Raises:
        StateError: it is unknown which part of the parameter it belongs to, or how to build it.
    """
    composite, own = composite_of(name, tensor), parameter.tensor
    if composite is None:
        raise StateError(f"{name}: a {type(tensor).__name__} cannot be saved")
    composite.refuse_unless_buildable(name, _classes_of(optimizer))
    is_part = not is_dtensor(own) and parameter.name_and_shape[1] != own.shape
    if (
        parameter.flat
        or is_part
        or any(composite_of(name, each) for each in composite.inner.values())
    ):
        raise StateError(
            f"{name}: the optimizer keeps a {composite.class_name} for a flattened parameter or a "
            "part of one, or one that nests others, so its sharding is unknown: use FSDP2, which "
            "keeps DTensors, or keep plain state"
        )
    like: torch.Tensor | None = tensor
    is_plain = is_dtensor(own) and not is_dtensor(tensor)
    if is_plain:
        like = own if composite.shape == local_tensor(own).shape else None
    leaves = [*composite.leaves(name, like, parameter.shard if is_plain else "")]
    shape = tuple(like.shape) if is_dtensor(like) else composite.shape
    state = LocalState(tensors=leaves, objects={name: describe(name, composite, shape)})
    if is_plain:
        state.objects[name + LOCAL] = True
    return state


def leave_out_empty(local_state: LocalState, optimizers: Iterable[Optimizer]) -> None:
    """Leave out plain state of which this rank has no elements, if others may keep it quantized.

    Optimizers keep the state of an empty shard plain, because it has no block to quantize.
    """
    is_quantized = any(map(describes_tensor, local_state.objects.values()))
    if is_quantized or any(map(_classes_of, optimizers)):
        local_state.tensors = [x for x in local_state.tensors if x.fragments or 0 in x.shape]


class StateToBuild:
    """A composite tensor of an optimizer's state, which a load builds.

    Args:
        name: its full name.
        described: the plain value that describes it.
        parameter: the parameter that it belongs to.
        saved: the contents of the checkpoint.
        optimizer: the optimizer.

    Raises:
        StateError: the plain value is malformed.
    """

    def __init__(
        self,
        name: str,
        described: Fields,
        parameter: Parameter,
        saved: SavedNames,
        optimizer: Optimizer,
    ) -> None:
        check_description(name, described)
        self._name, self._described, self._classes = name, described, _classes_of(optimizer)
        self._parameter, self._saved = parameter, saved
        self._inner: dict[str, torch.Tensor] = {}
        self._context = decode(described["context"], name)
        own, whole = parameter.tensor, tuple(described["shape"])
        self._is_sharded = is_dtensor(own) and whole == own.shape
        self._shape = tuple(local_tensor(own).shape) if self._is_sharded else whole
        self._is_empty = self._is_sharded and 0 in self._shape and 0 not in whole

    def targets(self) -> LocalState:
        """Return the inner tensors, newly allocated.

        Raises:
            StateError: the class is unknown.
        """
        name, own = self._name, self._parameter.tensor
        rule, _ = find_class(name, self._described["class"], self._classes)
        if self._is_empty:
            return LocalState(objects={name: None})
        entries, of_shard = {}, {}
        for key in self._described["tensors"]:
            of_shard[key] = self._saved.tensor(f"{name}.{key}{self._parameter.shard}")
            entries[key] = self._saved.tensor(f"{name}.{key}") or of_shard[key]
        known = {key: each for key, each in entries.items() if each is not None}
        shapes = {key: each.shape for key, each in known.items()}
        layouts: Mapping[str, Layout] = {}
        if rule is not None and self._is_sharded:
            layouts = rule.layouts(tuple(own.shape), shapes, self._context)
        for key, entry in known.items():
            shape = entry.shape
            if key in layouts and entry is not of_shard[key]:
                shape = inner_shape(layouts[key], self._shape, shape)
            dtype: torch.dtype = getattr(torch, entry.dtype)
            device = local_tensor(own).device
            self._inner[key] = torch.zeros(shape, dtype=dtype, device=device)
        lacking = [f"{name}.{key}: not in the checkpoint" for key in entries if key not in known]
        if lacking:
            return LocalState(problems=lacking)
        composite = Composite(
            self._described["class"],
            rule,
            self._inner,
            self._context,
            self._shape,
            getattr(torch, self._described["dtype"]),
        )
        if not is_built_anew(composite.class_name):
            self.build()  # which may fail, so before anything is loaded
        like = own if self._is_sharded else None
        leaves = [*composite.leaves(name, like, self._parameter.shard)]
        state = LocalState(tensors=leaves, objects={name: None})
        _refuse_cut_blocks(state, {leaf.name for leaf in leaves}, self._saved, are_built=True)
        return state

    def build(self) -> torch.Tensor:
        """Return the tensor, after a load has filled the inner tensors."""
        name, own = self._name, self._parameter.tensor
        is_wrapped = self._is_sharded and not self._saved.has_object(name + LOCAL)
        if self._is_empty:  # a class may be unable to wrap nothing, so optimizers do not use it
            return torch.zeros_like(own if is_wrapped else local_tensor(own))
        tensor: torch.Tensor = build(
            name, self._described, self._context, self._inner, self._shape, self._classes
        )
        if is_dtensor(own) and is_wrapped:
            return torch.distributed.tensor.DTensor.from_local(
                tensor,
                own.device_mesh,
                own.placements,
                run_check=False,
                shape=own.shape,
                stride=own.stride(),
            )
        with_same_offsets: torch.Tensor = with_offsets_of(own, tensor)
        return with_same_offsets


def fit_to_checkpoint(local_state: LocalState, saved: SavedNames, selection: Selection) -> None:
    """Find the names under which inner tensors were saved, and compare classes and contexts."""
    described = {name: each for name, each in local_state.objects.items() if describes_tensor(each)}
    if not described:
        return
    inside = {part for each in described.values() for part in tensor_names_in_value(each)}
    selected_inside = {*filter(selection.selects, inside)}
    for index, leaf in enumerate(local_state.tensors):
        local_state.tensors[index] = as_saved(leaf, saved)
    _refuse_cut_blocks(local_state, selected_inside, saved, are_built=False)
    names = {leaf.name for leaf in local_state.tensors}
    after_loads = (leaf.after_load for leaf in local_state.tensors)
    lives = {each.name: each for each in after_loads if isinstance(each, LiveTensor)}
    for name, own in described.items():
        for key in saved.names_below(name):
            if SHARD in key and f"{name}.{key}" not in names:
                local_state.unselected.append(f"{name}.{key}")  # another rank loads it
        inner = tensor_names_in_value(own)
        selected = {*map(selection.selects, [name, *inner])}
        if selected != {True}:
            if True in selected:
                local_state.problems.append(
                    f"{name}: only= or skip= select a part of {', '.join([name, *inner])}, which "
                    "make one tensor: select all of them or none"
                )
            continue
        found = saved.object(name) if saved.has_object(name) else None
        if not describes_tensor(found):
            if any(saved.tensor(each) is not None for each in inner):
                local_state.problems.append(
                    f"{name}: the checkpoint has tensors of the names {', '.join(inner)}, but does "
                    f"not say that they make a {own['class']}: map them with a specification, or "
                    "leave them out with skip="
                )
            continue
        differences = [*_differences(name, found, own)]
        local_state.problems += differences
        live = lives.get(name)
        if live is not None and not differences:
            live.allocate(local_state, found, saved)


def _refuse_cut_blocks(
    local_state: LocalState, names: Collection[str], saved: SavedNames, *, are_built: bool
) -> None:
    """Refuse inner tensors with elements that stand for elements of several ranks.

    Args:
        local_state: the targets of the load. The problems replace the tensors.
        names: the names of the inner tensors.
        saved: the contents of the checkpoint.
        are_built: the load builds the tensors, so they have no shape of their own.
    """
    cut = {
        leaf.name
        for leaf in local_state.tensors
        if leaf.name in names
        and (are_built or leaf.of_shard is not None)
        and (entry := saved.tensor(leaf.name)) is not None
        and entry.shape != leaf.shape
    }
    local_state.tensors = [leaf for leaf in local_state.tensors if leaf.name not in cut]
    local_state.unselected += cut
    local_state.problems += [
        f"{name}: this rank's part of the tensor begins or ends within a block that one element "
        "describes, or the class has no rule for such parts (docs/ports/tensor_classes.md): load "
        "with the sharding of the save"
        for name in sorted(cut)
    ]


def _differences(name: str, found: Fields, own: Fields) -> Iterator[str]:
    """Yield the differences between what was saved of a composite tensor and the target."""
    rule = rule_of(own["class"])
    choices = rule.not_compared if rule is not None else ()
    for key in own:
        theirs, ours = (_compared(each.get(key), choices) for each in (found, own))
        if key == "tensors":
            theirs, ours = sorted(theirs or ()), sorted(ours)
        for part, saved, current in find_differences(theirs, ours, f"{name}.{key}"):
            yield f"{part}: {_shown(saved)} in the checkpoint, {_shown(current)} in the target"


def _compared(encoded: JsonValue, choices: Collection[str]) -> JsonValue:
    """Return an encoded value without choices of implementations, and with lists for tuples."""
    if isinstance(encoded, list):
        return [_compared(each, choices) for each in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if encoded.get("$") in ("tuple", "size"):
        return _compared(encoded["v"], choices)
    return {k: _compared(v, choices) for k, v in encoded.items() if k not in choices}


def _shown(encoded: JsonValue) -> str:
    return "absent" if encoded is UNSET else msgspec.json.encode(encoded).decode()[:80]


def _classes_of(optimizer: Optimizer) -> Mapping[str, type]:
    """Return the classes of composite tensors that the modules of an optimizer's classes use."""
    modules = [sys.modules.get(cls.__module__) for cls in type(optimizer).__mro__]
    found = [cls for module in modules if module for cls in [*vars(module).values()]]
    return {class_name(cls): cls for cls in found if hasattr(cls, "__tensor_unflatten__")}
