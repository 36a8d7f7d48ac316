"""Finds optimizers in a saved state, with their parameters, tensors and hyperparameters.

There are three forms. `optimizer.state_dict()` identifies parameters by an index, and may list
their names in `param_names`. torch's `get_optimizer_state_dict` uses names instead of indices. With
its option `flatten_optimizer_state_dict`, the keys are `state.<parameter>.<key>` and
`param_groups.<parameter>.<hyperparameter>`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Path: TypeAlias = tuple[str | int, ...]
"""The keys that lead from a state to a leaf: a tensor or a value."""
STATE, GROUPS = "state", "param_groups"
PARAMS, PARAM_NAMES = "params", "param_names"
_FLATTENED = -1
"""Marks flattened keys. The path below `state` is then `(_FLATTENED, "<parameter>.<key>")`."""


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """The names of the parameters of a param group, and its hyperparameters."""

    names: tuple[str, ...]
    hyperparameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer in a saved state.

    Attributes:
        path: the path of the optimizer.
        parameter_and_key: for the path of each leaf below `state`: the parameter's name, and the
            name of its state, such as `exp_avg`.
        groups: the param groups.
        group_paths: the paths of the leaves that make up `groups`.
    """

    path: Path
    parameter_and_key: Mapping[Path, tuple[str, str]]
    groups: tuple[ParamGroup, ...]
    group_paths: frozenset[Path]

    @property
    def parameters(self) -> set[str]:
        """The names of all parameters in groups."""
        return {name for group in self.groups for name in group.names}

    def find_ungrouped_parameters(self) -> list[str]:
        """Return the parameters that have state but are in no group."""
        grouped_parameters = self.parameters
        return list(
            dict.fromkeys(
                name
                for name, _ in self.parameter_and_key.values()
                if name not in grouped_parameters
            )
        )


def merge_param_groups(groups: Iterable[ParamGroup]) -> tuple[ParamGroup, ...]:
    """Merge the groups that have equal hyperparameters."""
    merged: dict[str, ParamGroup] = {}
    for group in groups:
        key = repr(sorted(group.hyperparameters.items(), key=lambda item: str(item[0])))
        existing = merged.get(key, ParamGroup((), group.hyperparameters))
        names = dict.fromkeys((*existing.names, *group.names))
        merged[key] = ParamGroup(tuple(names), existing.hyperparameters)
    return tuple(merged.values())


def find_optimizers(paths: Iterable[Path], values: Mapping[Path, Any]) -> list[Optimizer]:
    """Find the optimizers in a state. Optimizers whose parameters have no names are left out.

    Args:
        paths: the paths of all leaves, tensors and values.
        values: the leaves that are not tensors, by path.
    """
    leaves: dict[Path, dict[str, list[tuple[Path, Path]]]] = {}
    for path in paths:
        if (split_path := _split_at_optimizer(path)) is not None:
            optimizer_path, part, rest = split_path
            parts = leaves.setdefault(optimizer_path, {STATE: [], GROUPS: []})
            parts[part].append((path, rest))
    found = [
        _parse_optimizer(optimizer_path, parts[STATE], parts[GROUPS], values)
        for optimizer_path, parts in leaves.items()
        if parts[GROUPS]
    ]
    return [optimizer for optimizer in found if optimizer is not None]


def is_in_optimizer(path: Path) -> bool:
    """Return whether a path goes through `state` or `param_groups` of an optimizer."""
    return _split_at_optimizer(path) is not None


def _split_at_optimizer(path: Path) -> tuple[Path, str, Path] | None:
    """Split a path at `state` or `param_groups`: the optimizer's path, that key, and the rest."""
    for index, part in enumerate(path):
        head, dot, tail = part.partition(".") if isinstance(part, str) else ("", "", "")
        if head not in (STATE, GROUPS):
            continue
        if not dot:
            return path[:index], head, path[index + 1 :]
        if index == len(path) - 1:
            return path[:index], head, (_FLATTENED, tail)
    return None


def _parse_optimizer(
    optimizer_path: Path,
    state_leaves: list[tuple[Path, Path]],
    group_leaves: list[tuple[Path, Path]],
    values: Mapping[Path, Any],
) -> Optimizer | None:
    """Return an optimizer, or None if it does not name its parameters.

    Args:
        optimizer_path: the path of the optimizer.
        state_leaves: for each leaf below `state`: its full path, and the part of it after `state`.
        group_leaves: the same for `param_groups`.
        values: the leaves that are not tensors, by path.
    """
    if not all(path in values for path, _ in group_leaves):
        return None
    group_values = {rest: values[path] for path, rest in group_leaves}
    is_flattened = any(rest[:1] == (_FLATTENED,) for rest in group_values)
    parsed = _parse_flattened_groups(group_values) if is_flattened else _parse_groups(group_values)
    if parsed is None:
        return None
    groups, name_by_index = parsed
    names = {name for group in groups for name in group.names}
    keys: dict[Path, tuple[str, str]] = {}
    for path, rest in state_leaves:
        if rest[:1] == (_FLATTENED,):
            name_and_key = _split_flattened_key(str(rest[1]), names)
        else:
            name_and_key = _look_up_name(rest, name_by_index)
        if name_and_key is None:
            return None
        keys[path] = name_and_key
    return Optimizer(optimizer_path, keys, groups, frozenset(path for path, _ in group_leaves))


def _parse_flattened_groups(
    group_values: Mapping[Path, Any],
) -> tuple[tuple[ParamGroup, ...], dict[str, str]] | None:
    """Parse keys `<parameter>.<hyperparameter>`.

    Parameters with equal hyperparameters form one group.
    """
    hyperparameters_by_parameter: dict[str, dict[str, Any]] = {}
    for rest, value in group_values.items():
        if rest[:1] != (_FLATTENED,):
            return None
        parameter, dot, key = str(rest[1]).rpartition(".")
        if not dot:
            return None
        hyperparameters_by_parameter.setdefault(parameter, {})[key] = value
    groups = [
        ParamGroup((parameter,), hyperparameters)
        for parameter, hyperparameters in hyperparameters_by_parameter.items()
        # Flattened states also list each group under its index. Skip these entries: they repeat
        # the hyperparameters that are listed by parameter.
        if not (parameter.isdigit() and PARAMS in hyperparameters)
    ]
    return merge_param_groups(groups), {}


def _parse_groups(
    group_values: Mapping[Path, Any],
) -> tuple[tuple[ParamGroup, ...], dict[str, str]] | None:
    """Parse `param_groups`, which is a list of dicts, or flattened to paths of an index and a key.

    Also return the name of each parameter by its index.
    """
    dict_by_index: dict[object, dict[str, Any]] = {}
    for rest, value in group_values.items():
        if not rest and isinstance(value, list) and all(isinstance(each, dict) for each in value):
            dict_by_index.update(enumerate(value))
        elif len(rest) == 2:
            dict_by_index.setdefault(rest[0], {})[str(rest[1])] = value
        else:
            return None
    groups = []
    name_by_index: dict[str, str] = {}
    for group in dict_by_index.values():
        params = group.get(PARAMS)
        names = group.get(PARAM_NAMES, params)
        if not isinstance(params, list) or not isinstance(names, list):
            return None
        if len(names) != len(params) or not all(isinstance(name, str) for name in names):
            return None
        name_by_index.update(zip(map(str, params), names, strict=True))
        hyperparameters = {
            key: value for key, value in group.items() if key not in (PARAMS, PARAM_NAMES)
        }
        groups.append(ParamGroup(tuple(names), hyperparameters))
    return tuple(groups), name_by_index


def _look_up_name(rest: Path, name_by_index: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the parameter's name and the key for a path below `state`."""
    parameter = str(rest[0]) if len(rest) > 1 else ""
    # Pipeline stages may have overwritten each other's groups, so an index can lack a name.
    name = name_by_index.get(parameter, None if parameter.isdigit() else parameter)
    return (name, ".".join(map(str, rest[1:]))) if name else None


def _split_flattened_key(text: str, names: Collection[str]) -> tuple[str, str] | None:
    """Split a dotted name after the longest of `names` with which it begins; the rest is a key."""
    dot = text.rfind(".")
    while dot > 0:
        if text[:dot] in names:
            return text[:dot], text[dot + 1 :]
        dot = text.rfind(".", 0, dot)
    return None
