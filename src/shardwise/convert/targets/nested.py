"""The chosen tensors and values as nested state_dicts, which torch programs save and load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from shardwise.adapters.optimizer_state import rebuilt
from shardwise.adapters.values import saved_tensors
from shardwise.convert.plan import Chosen, Part
from shardwise.errors import StateError
from shardwise.formats.optimizers import GROUPS, PARAM_NAMES, PARAMS, STATE, ParamGroup
from shardwise.manifest.manifest import ObjectEntry
from shardwise.state.objects import JsonValue, decode

_END = f".{GROUPS}"


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer. Tensors are `Part`s, here and in `Nested`.

    Attributes:
        groups: the param groups.
        state: the state by parameter and key.
        ties: the names of tied parameters, and those that they are tied to.
    """

    groups: tuple[ParamGroup, ...]
    state: Mapping[str, Mapping[str, Any]]
    ties: Mapping[str, str]

    def numbered(self) -> dict[str, Any]:
        """Return the state_dict of `torch.optim`, with parameters by number; tied ones have one."""
        numbers: dict[str, int] = {}
        groups = []
        for group in self.groups:
            own = []
            for name in group.names:
                if self._stored(name) not in numbers:
                    numbers[self._stored(name)] = len(numbers)
                    own.append(name)
            params = [numbers[self._stored(name)] for name in own]
            groups.append({**group.hyperparameters, PARAMS: params, PARAM_NAMES: own})
        state: dict[int, Any] = {}
        for name, values in self.state.items():
            if self._stored(name) in numbers:
                state.setdefault(numbers[self._stored(name)], rebuilt(values))
        return {STATE: dict(sorted(state.items())), GROUPS: groups}

    def flattened(self) -> dict[str, Any]:
        """Return the names of torch's `get_optimizer_state_dict`, with and without flattening.

        State has the same names in both. Hyperparameters are by parameter, and by group number.
        """
        flat = {
            f"{STATE}.{name}.{key}": value
            for name, values in self.state.items()
            for key, value in values.items()
        }
        for number, group in enumerate(self.groups):
            for name in (*group.names, number):
                for key, value in group.hyperparameters.items():
                    flat[f"{GROUPS}.{name}.{key}"] = value
            flat[f"{GROUPS}.{number}.{PARAMS}"] = list(group.names)
        return flat

    def ungrouped(self) -> list[str]:
        """Return the parameters with state that are not in any group."""
        known = {name for group in self.groups for name in group.names}
        return [name for name in self.state if name not in known]

    def _stored(self, name: str) -> str:
        return self.ties.get(name, name)


@dataclass(frozen=True, slots=True)
class Nested:
    """A state, divided into optimizers and everything else.

    Attributes:
        parts: leaves by key of the state and key of the state_dict (which has dots), or by the key
            of the state alone.
        optimizers: by key of the state.
        left_out: what cannot be represented, and why.
    """

    parts: Mapping[tuple[str, ...], Any]
    optimizers: Mapping[str, Optimizer]
    left_out: tuple[str, ...]


def nested(chosen: Chosen) -> Nested:
    """Return the chosen tensors and values as a nested state.

    Raises:
        StateError: a name is both that of a value and the beginning of other names.
    """
    left_out = [f"{name}: its value differs between ranks" for name in chosen.source.per_rank]
    tensors = {each.name: each.part for each in chosen.tensors}
    groups = {
        each.name.removesuffix(_END): _groups_of(each)
        for each in chosen.source.objects
        if _is_groups(each)
    }
    leaves: dict[str, Any] = dict(tensors)
    for each in chosen.source.objects:
        if _is_groups(each):
            continue
        for name in saved_tensors(each.value):
            leaves.pop(name, None)
        try:
            leaves[each.name] = value_of(each, tensors)
        except StateError as error:
            left_out.append(str(error))
    held: dict[str, dict[str, Any]] = {root: {} for root in groups}
    parts: dict[tuple[str, ...], Any] = {}
    for name, leaf in leaves.items():
        above = _above(name, groups)
        if above is None:
            parts[_path(name, chosen.root)] = leaf
        else:
            held[above][name.removeprefix(f"{above}.")] = leaf
    both = {path[0] for path in parts if len(path) > 1} & {
        path[0] for path in parts if path[1:] == ()
    }
    if both:
        raise StateError(
            f"{min(both)}: both a value and the beginning of other names: leave one out with skip="
        )
    ties = _ties(chosen)
    optimizers = {
        root: Optimizer(groups[root], _by_parameter(held[root], groups[root]), ties)
        for root in groups
    }
    return Nested(parts, optimizers, tuple(left_out))


def value_of(entry: ObjectEntry, tensors: Mapping[str, Part]) -> Any:
    """Decode a plain value, with parts in place of tensors.

    Raises:
        StateError: it contains a tensor that is not written, or a pickle.
    """

    def tensor(name: str) -> torch.Tensor:
        if name not in tensors:
            raise StateError(f"{entry.name}: it contains {name}, which only= or skip= leaves out")
        return cast(torch.Tensor, tensors[name])

    return decode(_with_tensors(entry.value), entry.name, tensor)


def _with_tensors(encoded: JsonValue) -> JsonValue:
    """Return an encoded value in which arrays that are stored in files become tensors."""
    if isinstance(encoded, list):
        return [_with_tensors(each) for each in encoded]
    if isinstance(encoded, dict):
        if encoded.get("$") == "array" and "name" in encoded:
            return {**encoded, "$": "tensor"}
        return {key: _with_tensors(each) for key, each in encoded.items()}
    return encoded


def _is_groups(entry: ObjectEntry) -> bool:
    return entry.name.endswith(_END) and (
        isinstance(entry.value, list)
        and all(
            isinstance(each, dict) and {"members", "value"} <= set(each) for each in entry.value
        )
    )


def _groups_of(entry: ObjectEntry) -> tuple[ParamGroup, ...]:
    groups = []
    for each in entry.value:
        settings = decode(each["value"], entry.name)
        if not isinstance(settings, dict):
            raise StateError(f"{entry.name}: the hyperparameters of a group are not a dict")
        groups.append(ParamGroup(tuple(map(str, each["members"])), settings))
    return tuple(groups)


def _above(name: str, roots: Iterable[str]) -> str | None:
    """Return the innermost optimizer that a name is below."""
    return max((root for root in roots if name.startswith(f"{root}.")), key=len, default=None)


def _path(name: str, root: str) -> tuple[str, ...]:
    """Split a name after its first part, or after the root if it is below that."""
    if name.startswith(f"{root}."):
        return root, name.removeprefix(f"{root}.")
    first, dot, rest = name.partition(".")
    return (first, rest) if dot else (first,)


def _ties(chosen: Chosen) -> dict[str, str]:
    """Return the names of tied parameters of the model, and those that they are tied to."""
    start = f"{chosen.root}."
    return {
        each.name.removeprefix(start): each.entry.same_as.removeprefix(start)
        for each in chosen.tensors
        if each.entry.same_as and each.name.startswith(start)
    }


def _by_parameter(
    held: Mapping[str, Any], groups: Iterable[ParamGroup]
) -> dict[str, dict[str, Any]]:
    known = {name for group in groups for name in group.names}
    found: dict[str, dict[str, Any]] = {}
    for name, leaf in held.items():
        at = name.rfind(".")
        while at > 0 and name[:at] not in known:
            at = name.rfind(".", 0, at)
        parameter, key = (name[:at], name[at + 1 :]) if at > 0 else name.rpartition(".")[::2]
        found.setdefault(parameter, {})[key] = leaf
    return found
