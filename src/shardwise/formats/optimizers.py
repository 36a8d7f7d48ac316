"""Finds optimizers in a saved state, with their parameters, tensors and hyperparameters.

There are three forms. `optimizer.state_dict()` numbers the parameters, and may have their names in
`param_names`. torch's `get_optimizer_state_dict` has names instead of numbers. With
`flatten_optimizer_state_dict`, it has keys `state.<parameter>.<key>` and
`param_groups.<parameter>.<hyperparameter>`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from shardwise.state.objects import JsonValue, encode

Path: TypeAlias = tuple[str | int, ...]
STATE, GROUPS = "state", "param_groups"
PARAMS, PARAM_NAMES = "params", "param_names"
_FLAT = -1
"""Stands in a path for the dot after `state` or `param_groups`."""


@dataclass(frozen=True, slots=True)
class Group:
    """A param group: the names of its parameters, and its hyperparameters."""

    members: tuple[str, ...]
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer in a saved state.

    Attributes:
        root: the path of the optimizer.
        keys: the parameter's name and the key of each leaf of the state, by the leaf's path.
        groups: the param groups.
        taken: the paths of the leaves that make up `groups`.
    """

    root: Path
    keys: Mapping[Path, tuple[str, str]]
    groups: tuple[Group, ...]
    taken: frozenset[Path]

    @property
    def parameters(self) -> set[str]:
        """The names of all parameters in groups."""
        return {name for group in self.groups for name in group.members}

    def ungrouped(self) -> list[str]:
        """Return the parameters that have state but are in no group."""
        known = self.parameters
        return list(dict.fromkeys(name for name, _ in self.keys.values() if name not in known))


def encoded_groups(groups: Iterable[Group], name: str) -> JsonValue:
    """Encode param groups as shardwise stores them.

    Raises:
        StateError: a hyperparameter has no plain form.
    """
    return [
        {"members": list(group.members), "value": encode(dict(group.settings), name)}
        for group in groups
    ]


def find_optimizers(paths: Iterable[Path], values: Mapping[Path, Any]) -> list[Optimizer]:
    """Return the optimizers of a state that name their parameters.

    Args:
        paths: the paths of all leaves, tensors and values.
        values: the leaves that are not tensors, by path.
    """
    states: dict[Path, list[tuple[Path, Path]]] = {}
    groups: dict[Path, list[tuple[Path, Path]]] = {}
    for path in paths:
        place = _place(path)
        if place is not None:
            root, kind, rest = place
            (states if kind == STATE else groups).setdefault(root, []).append((path, rest))
    found = [_optimizer(root, states.get(root, []), groups[root], values) for root in groups]
    return [optimizer for optimizer in found if optimizer is not None]


def is_of_optimizer(path: Path) -> bool:
    """Return whether a path goes through `state` or `param_groups` of an optimizer."""
    return _place(path) is not None


def _place(path: Path) -> tuple[Path, str, Path] | None:
    """Split a path at `state` or `param_groups` into the optimizer's path, the key, the rest."""
    for at, part in enumerate(path):
        head, dot, tail = part.partition(".") if isinstance(part, str) else ("", "", "")
        if head not in (STATE, GROUPS):
            continue
        if not dot:
            return path[:at], head, path[at + 1 :]
        if at == len(path) - 1:
            return path[:at], head, (_FLAT, tail)
    return None


def _optimizer(
    root: Path,
    state: list[tuple[Path, Path]],
    settings: list[tuple[Path, Path]],
    values: Mapping[Path, Any],
) -> Optimizer | None:
    if not all(path in values for path, _ in settings):
        return None
    given = {rest: values[path] for path, rest in settings}
    found = _flat_groups(given) if any(rest[:1] == (_FLAT,) for rest in given) else _groups(given)
    if found is None:
        return None
    groups, numbers = found
    names = {name for group in groups for name in group.members}
    keys: dict[Path, tuple[str, str]] = {}
    for path, rest in state:
        flat = rest[:1] == (_FLAT,)
        split = _cut(str(rest[1]), names) if flat else _looked_up(rest, numbers)
        if split is None:
            return None
        keys[path] = split
    return Optimizer(root, keys, groups, frozenset(path for path, _ in settings))


def _flat_groups(given: Mapping[Path, Any]) -> tuple[tuple[Group, ...], dict[str, str]] | None:
    """Make groups of `<parameter>.<hyperparameter>`: parameters with equal ones share a group."""
    by_member: dict[str, dict[str, Any]] = {}
    for rest, value in given.items():
        if rest[:1] != (_FLAT,):
            return None
        member, dot, key = str(rest[1]).rpartition(".")
        if not dot:
            return None
        by_member.setdefault(member, {})[key] = value
    groups: dict[str, Group] = {}
    for member, settings in by_member.items():
        if member.isdigit() and PARAMS in settings:
            continue  # a group by its number, a copy of the same hyperparameters
        same = repr(sorted(settings.items()))
        known = groups.get(same, Group((), settings))
        groups[same] = Group((*known.members, member), settings)
    return tuple(groups.values()), {}


def _groups(given: Mapping[Path, Any]) -> tuple[tuple[Group, ...], dict[str, str]] | None:
    """Return the groups of a list of dicts, whole or flattened, and the names of parameters."""
    listed: dict[object, dict[str, Any]] = {}
    for rest, value in given.items():
        if not rest and isinstance(value, list) and all(isinstance(each, dict) for each in value):
            listed.update(enumerate(value))
        elif len(rest) == 2:
            listed.setdefault(rest[0], {})[str(rest[1])] = value
        else:
            return None
    groups = []
    numbers: dict[str, str] = {}
    for settings in listed.values():
        params = settings.get(PARAMS)
        names = settings.get(PARAM_NAMES, params)
        if not isinstance(params, list) or not isinstance(names, list):
            return None
        if len(names) != len(params) or not all(isinstance(name, str) for name in names):
            return None
        numbers.update(zip(map(str, params), names, strict=True))
        kept = {k: v for k, v in settings.items() if k not in (PARAMS, PARAM_NAMES)}
        groups.append(Group(tuple(names), kept))
    return tuple(groups), numbers


def _looked_up(rest: Path, numbers: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the parameter's name and the key for a path below `state`."""
    number = str(rest[0]) if len(rest) > 1 else ""
    # Stages of a pipeline overwrite each other's groups, so that names may be missing there.
    name = numbers.get(number, None if number.isdigit() else number)
    return (name, ".".join(map(str, rest[1:]))) if name else None


def _cut(text: str, names: Collection[str]) -> tuple[str, str] | None:
    """Split a dotted name into the longest known parameter's name and the key of its state."""
    at = text.rfind(".")
    while at > 0:
        if text[:at] in names:
            return text[:at], text[at + 1 :]
        at = text.rfind(".", 0, at)
    return None
