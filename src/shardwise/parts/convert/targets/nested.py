"""Nest the tensors and values of an export into state_dicts, as torch programs save them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from shardwise.kernel.adapters.optimizer_groups import NOT_OF_PARAMETERS, nest_keys
from shardwise.kernel.adapters.values import tensor_names_in_value
from shardwise.kernel.errors import StateError
from shardwise.kernel.manifest.manifest import ObjectEntry
from shardwise.kernel.state.plain_values import describes_tensor
from shardwise.parts.convert.plan import ExportContents, TensorPart
from shardwise.parts.formats.optimizers import ParamGroup
from shardwise.ports.binding import JsonValue, decode

STATE, GROUPS, PARAMS, PARAM_NAMES = "state", "param_groups", "params", "param_names"
"""Keys of torch's optimizers."""
_GROUPS_SUFFIX = f".{GROUPS}"


@dataclass(frozen=True, slots=True)
class NestedOptimizer:
    """The state of an optimizer. Tensors are `TensorPart`s, here and in `NestedState`.

    Attributes:
        groups: the param groups.
        state: for each parameter's name, its state: a dict from keys, such as `exp_avg`, to tensors
            or values.
        ties: for each tied parameter, the parameter that it is tied to.
    """

    groups: tuple[ParamGroup, ...]
    state: Mapping[str, Mapping[str, Any]]
    ties: Mapping[str, str]

    def indexed_state_dict(self) -> dict[str, Any]:
        """Return the state_dict of `torch.optim`. Tied parameters share one number."""
        indices: dict[str, int] = {}
        groups = []
        for group in self.groups:
            members = []
            for name in group.names:
                if self._owner(name) not in indices:
                    indices[self._owner(name)] = len(indices)
                    members.append(name)
            params = [indices[self._owner(name)] for name in members]
            groups.append({**group.hyperparameters, PARAMS: params, PARAM_NAMES: members})
        state: dict[int, Any] = {}
        for name, values in self.state.items():
            if self._owner(name) in indices:
                state.setdefault(indices[self._owner(name)], nest_keys(values))
        return {STATE: dict(sorted(state.items())), GROUPS: groups}

    def named_entries(self) -> dict[str, Any]:
        """Return all entries under the names that `get_optimizer_state_dict` uses.

        The result has the names for `flatten_optimizer_state_dict=True`, and the names for
        `flatten_optimizer_state_dict=False`. For state, both are equal. For hyperparameters, they
        differ, so hyperparameters are listed twice: under the names of parameters, and under the
        index of the group.
        """
        flat = {
            f"{STATE}.{name}.{key}": value
            for name, values in self.state.items()
            for key, value in values.items()
        }
        for group_index, group in enumerate(self.groups):
            for name in (*group.names, group_index):
                flat |= {
                    f"{GROUPS}.{name}.{key}": value for key, value in group.hyperparameters.items()
                }
            flat[f"{GROUPS}.{group_index}.{PARAMS}"] = list(group.names)
        return flat

    def parameters_without_group(self) -> list[str]:
        """Return the parameters with state that are not in any group."""
        parameter_names = {name for group in self.groups for name in group.names}
        return [name for name in self.state if name not in parameter_names]

    def _owner(self, name: str) -> str:
        return self.ties.get(name, name)


@dataclass(frozen=True, slots=True)
class NestedState:
    """A state, divided into optimizers and everything else.

    Attributes:
        parts: tensors and values by path. A path has one or two keys: the key in the state, and the
            dotted name in the state_dict.
        optimizers: optimizers by their keys in the state.
        left_out: names that a nested state cannot hold, with reasons.
    """

    parts: Mapping[tuple[str, ...], Any]
    optimizers: Mapping[str, NestedOptimizer]
    left_out: tuple[str, ...]


def nest_state(contents: ExportContents) -> NestedState:
    """Nest the tensors and values of an export.

    Raises:
        StateError: the name of a value is also the beginning of other names.
    """
    left_out = [f"{name}: its value differs between ranks" for name in contents.source.per_rank]
    tensors = {each.name: each.part for each in contents.tensors}
    groups = {
        each.name.removesuffix(_GROUPS_SUFFIX): _decode_groups(each)
        for each in contents.source.objects
        if _is_groups(each)
    }
    leaves: dict[str, Any] = dict(tensors)
    for each in contents.source.objects:
        if _is_groups(each):
            continue
        _refuse_composites(each)
        for name in tensor_names_in_value(each.value):
            leaves.pop(name, None)
        try:
            leaves[each.name] = decode_with_parts(each, tensors)
        except StateError as error:
            left_out.append(str(error))
    optimizer_leaves: dict[str, dict[str, Any]] = {name: {} for name in groups}
    parts: dict[tuple[str, ...], Any] = {}
    for name, leaf in leaves.items():
        optimizer = _optimizer_of(name, groups)
        if optimizer is None:
            parts[_split_name(name, contents.model_key)] = leaf
        elif name.removeprefix(f"{optimizer}.").split(".")[0] in NOT_OF_PARAMETERS:
            left_out.append(f"{name}: it belongs to no parameter of the optimizer")
        else:
            optimizer_leaves[optimizer][name.removeprefix(f"{optimizer}.")] = leaf
    ambiguous = {path[0] for path in parts if len(path) > 1} & {
        path[0] for path in parts if path[1:] == ()
    }
    if ambiguous:
        raise StateError(
            f"{min(ambiguous)}: both a value and the beginning of other names, which this format "
            "cannot hold: leave one of them out with skip="
        )
    ties = _ties_of_model(contents)
    optimizers = {
        name: NestedOptimizer(
            groups[name], _group_by_parameter(optimizer_leaves[name], groups[name]), ties
        )
        for name in groups
    }
    return NestedState(parts, optimizers, tuple(left_out))


def _refuse_composites(entry: ObjectEntry) -> None:
    """Refuse a plain value that describes a tensor that wraps others, or has such a tensor in it.

    Raises:
        StateError: it does.
    """
    stack = [entry.value]
    while stack:
        value = stack.pop()
        if describes_tensor(value):
            class_name = str(value["class"])[:200].replace(":", ".")
            raise StateError(
                f"{entry.name}: a {class_name}, which wraps other tensors, and this format has "
                "plain tensors only: leave it out with skip=; or export a model to='hf'; or load "
                "the checkpoint, and save the objects with the library of this class"
            )
        stack += value if isinstance(value, list) else []
        stack += value.values() if isinstance(value, dict) else []


def decode_with_parts(entry: ObjectEntry, tensors: Mapping[str, TensorPart]) -> Any:
    """Decode a plain value. Each tensor in it becomes the `TensorPart` of this name in `tensors`.

    Raises:
        StateError: the value contains a pickle, or a tensor that is not exported.
    """

    def tensor(name: str) -> torch.Tensor:
        if name not in tensors:
            raise StateError(
                f"{entry.name}: it contains the tensor {name}, which only= or skip= leaves out, so "
                "the value is left out, too; select both"
            )
        return cast(torch.Tensor, tensors[name])

    return decode(_convert_arrays_to_tensors(entry.value), entry.name, tensor)


def _convert_arrays_to_tensors(encoded: JsonValue) -> JsonValue:
    """Return an encoded value in which NumPy arrays that are stored in files become tensors."""
    if isinstance(encoded, list):
        return [_convert_arrays_to_tensors(each) for each in encoded]
    if isinstance(encoded, dict):
        if encoded.get("$") == "array" and "name" in encoded:
            return {**encoded, "$": "tensor"}
        return {key: _convert_arrays_to_tensors(each) for key, each in encoded.items()}
    return encoded


def _is_groups(entry: ObjectEntry) -> bool:
    return entry.name.endswith(_GROUPS_SUFFIX) and (
        isinstance(entry.value, list)
        and all(
            isinstance(each, dict) and {"members", "value"} <= set(each) for each in entry.value
        )
    )


def _decode_groups(entry: ObjectEntry) -> tuple[ParamGroup, ...]:
    groups = []
    for each in entry.value:
        settings = decode(each["value"], entry.name)
        if not isinstance(settings, dict):
            raise StateError(
                f"{entry.name}: expected a dict with the hyperparameters of a group, found a "
                f"{type(settings).__name__}: leave the optimizer out with skip="
            )
        groups.append(ParamGroup(tuple(map(str, each["members"])), settings))
    return tuple(groups)


def _optimizer_of(name: str, optimizers: Iterable[str]) -> str | None:
    """Return the innermost optimizer that a name belongs to; None if there is none."""
    return max((each for each in optimizers if name.startswith(f"{each}.")), key=len, default=None)


def _split_name(name: str, model: str) -> tuple[str, ...]:
    """Split a name of the model after the model's key, and another name after its first part."""
    if name.startswith(f"{model}."):
        return model, name.removeprefix(f"{model}.")
    first, dot, rest = name.partition(".")
    return (first, rest) if dot else (first,)


def _ties_of_model(contents: ExportContents) -> dict[str, str]:
    """Return, for each tied parameter of the model, the parameter that it is tied to."""
    start = f"{contents.model_key}."
    return {
        each.name.removeprefix(start): each.entry.same_as.removeprefix(start)
        for each in contents.tensors
        if each.entry.same_as and each.name.startswith(start)
    }


def _group_by_parameter(
    optimizer_leaves: Mapping[str, Any], groups: Iterable[ParamGroup]
) -> dict[str, dict[str, Any]]:
    parameter_names = {name for group in groups for name in group.names}
    found: dict[str, dict[str, Any]] = {}
    for name, leaf in optimizer_leaves.items():
        dot = name.rfind(".")
        while dot > 0 and name[:dot] not in parameter_names:
            dot = name.rfind(".", 0, dot)
        parameter, key = (name[:dot], name[dot + 1 :]) if dot > 0 else name.rpartition(".")[::2]
        found.setdefault(parameter, {})[key] = leaf
    return found
