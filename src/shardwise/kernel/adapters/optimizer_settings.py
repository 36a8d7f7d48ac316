"""The hyperparameters that a checkpoint has for the param groups of an optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from shardwise.kernel.adapters.optimizer_groups import GROUPS, STEP, Group, hyperparameters_of
from shardwise.kernel.errors import StateError
from shardwise.kernel.state.name_lookup import SavedNames
from shardwise.kernel.state.plain_values import JsonValue, decode, find_differences

_SCHEDULER_SUFFIXES = ("_lr", "_momentum")
_DEEPSPEED_KEYS = {"bias_correction", STEP}
"""Keys in the param groups of DeepSpeed's Adam that torch's Adam lacks."""


class SavedSettings:
    """The saved hyperparameters, by the names of parameters and by the positions of groups.

    Args:
        name: the name of the param groups.
        groups: the param groups.
        saved: the contents of the checkpoint.

    Raises:
        StateError: they are not a list of groups.
    """

    def __init__(self, name: str, groups: Sequence[Group], saved: SavedNames) -> None:
        self._name, self._groups = name, groups
        settings = settings_by_member(name, saved.object(name))
        self._settings = with_frozen_members(settings, groups)
        self._by_position = settings_by_position(saved.object(name), len(groups))

    def find_problems(self, saved: SavedNames) -> Iterator[str]:
        """Yield the reasons why the groups cannot take them."""
        problems = [*find_group_problems(self._name, self._groups, self._settings)]
        yield from problems
        if problems:
            saved_name = saved.saved_name(self._name)
            yield from find_prefix_problems(saved_name, self._groups, self._settings)
        for position, group in enumerate(self._groups):
            if not group.names and len(self._by_position.get(position, ())) > 1:
                yield (
                    f"{self._name}: group {position} has no parameters here, and ranks saved it "
                    f"with different settings: to keep the current ones, use skip=[{self._name!r}]"
                )

    def set(self, group: Group, position: int, *, allow_pickle: bool) -> None:
        """Set the hyperparameters of a group to the saved ones of its first parameter.

        A group without parameters gets those of its position, if they were saved.

        Raises:
            StateError: they are not a dict.
        """
        if group.names:
            name, encoded = f"{self._name}.{group.names[0]}", self._settings[group.names[0]]
        elif position in self._by_position:
            name, encoded = f"{self._name}.{position}", self._by_position[position][0]
        else:
            return
        settings = decode(encoded, name, allow_pickle=allow_pickle)
        if not isinstance(settings, dict):
            optimizer = self._name.removesuffix(f".{GROUPS}")
            raise StateError(
                f"{name}: expected a dict of hyperparameters in the checkpoint, found a "
                f"{type(settings).__name__}: leave the optimizer out with "
                f"skip=[{f'{optimizer}.*'!r}]"
            )
        for key, value in hyperparameters_of(settings, group.other_keys).items():
            current = group.settings.get(key)
            if isinstance(current, torch.Tensor) and isinstance(value, (int, float, torch.Tensor)):
                with torch.no_grad():
                    current.copy_(torch.as_tensor(value, device=current.device))
            else:
                group.settings[key] = value


def settings_by_member(name: str, encoded: object) -> dict[str, JsonValue]:
    """Return the hyperparameters of each parameter, given the saved list of param groups."""
    settings: dict[str, JsonValue] = {}
    if not isinstance(encoded, list):
        raise StateError(
            f"{name}: expected a list of groups in the checkpoint, found a "
            f"{type(encoded).__name__}: leave the optimizer out with "
            f"skip=[{name.removesuffix(GROUPS) + '*'!r}]"
        )
    for group in encoded:
        if not isinstance(group, dict) or not isinstance(group.get("members"), list):
            raise StateError(
                f"{name}: the checkpoint identifies parameters by position, but this optimizer "
                "has other counts or shapes of parameters, or flattened parameters. Save with "
                "names (use torch's get_optimizer_state_dict, or make the optimizer from "
                "model.named_parameters()), or load without the optimizer"
            )
        value = group.get("value")
        if isinstance(value, dict):
            value = hyperparameters_of(value)
        for member in group["members"]:
            settings[str(member)] = value
    return settings


def settings_by_position(encoded: object, count: int) -> dict[int, list[JsonValue]]:
    """Return the hyperparameters for groups without members, by the position of the group.

    Args:
        encoded: the saved list of param groups, which `settings_by_member` has checked.
        count: the number of groups of the target.

    Returns:
        For each position, the different values that were saved: those of groups without members,
        if there were any.
    """
    groups = cast(list[dict[str, Any]], encoded)
    are_in_order = len(groups) == count and not any(
        "positions" in g or "empty_positions" in g for g in groups
    )
    found: dict[int, list[JsonValue]] = {}
    for key in ("empty_positions", "positions"):
        of_key: dict[int, list[JsonValue]] = {}
        for index, group in enumerate(groups):
            positions = [index] if are_in_order else group.get(key)
            for position in positions if isinstance(positions, list) else ():
                if type(position) is int:
                    of_key.setdefault(position, []).append(group.get("value"))
        found = of_key | found
    return found


def with_frozen_members(
    settings: Mapping[str, JsonValue], groups: Sequence[Group]
) -> dict[str, JsonValue]:
    """Return the settings, with those of each group also for its frozen parameters.

    Some frameworks, such as DeepSpeed, leave frozen parameters out of the groups that they save.
    """
    completed = dict(settings)
    for group in groups:
        saved = next((settings[name] for name in group.names if name in settings), None)
        for parameter in group.parameters if saved is not None else ():
            for name in () if parameter.tensor.requires_grad else parameter.names:
                completed.setdefault(name, saved)
    return completed


def find_group_problems(
    name: str, groups: Sequence[Group], settings: Mapping[str, JsonValue]
) -> Iterator[str]:
    """Yield the reasons why the param groups cannot take the saved hyperparameters.

    One reason is that another kind of optimizer saved them. Another version of the same optimizer
    has more settings or fewer. Another kind has both: unexpected settings, and missing ones.

    Args:
        name: name of the param groups.
        groups: the param groups.
        settings: the saved hyperparameters of each parameter.
    """
    for group in groups:
        members = group.names
        missing = sorted(set(members).difference(settings))
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            yield (
                f"{name}: the checkpoint has no hyperparameters for {', '.join(missing[:3])}"
                f"{more}; to keep the current ones, use skip=[{name!r}]"
            )
            continue
        for member in members[1:]:
            first, other = settings[members[0]], settings[member]
            if first is not other and first != other:
                keys = ", ".join(key[1:] for key, _, _ in find_differences(first, other, ""))
                yield (
                    f"{name}: {members[0]} and {member} are in one param group, but were saved "
                    f"with different {keys}: put them into separate groups, or use skip=[{name!r}]"
                )
                break
        saved = settings[members[0]] if members else {}
        saved_keys = set(saved if isinstance(saved, dict) else ())
        lacking = getattr(group.optimizer, "defaults", {}).keys() - saved_keys - _DEEPSPEED_KEYS
        if not lacking:
            continue
        current_keys = set().union(*group.optimizer.param_groups)
        unexpected = [
            key
            for key in sorted(saved_keys - current_keys - _DEEPSPEED_KEYS)
            if not key.endswith(_SCHEDULER_SUFFIXES)
        ]
        if unexpected:
            yield (
                f"{name}: saved by another kind of optimizer, whose settings include "
                f"{', '.join(unexpected)} and not {', '.join(sorted(lacking))}: leave it "
                f"out with skip=[{name.removesuffix(GROUPS) + '*'!r}]"
            )


def find_prefix_problems(
    name: str, groups: Sequence[Group], settings: Mapping[str, JsonValue]
) -> Iterator[str]:
    """Yield a problem that suggests a specification, if all saved names have one more prefix."""
    members = [member for group in groups for member in group.names]
    if not members or any(member in settings for member in members):
        return
    first = f".{members[0]}"
    for saved_prefix in (each.removesuffix(first) for each in settings if each.endswith(first)):
        if all(f"{saved_prefix}.{member}" in settings for member in members):
            key = name.removesuffix(f".{GROUPS}")
            text = f"{key}.{saved_prefix}.* -> {key}.*\n* -> *"
            yield (
                f"{name}: the checkpoint has these settings for {saved_prefix}.{members[0]}. "
                f"rename= does not rename an optimizer's parameters: use spec=sw.spec({text!r})"
            )
            return


def parameters_elsewhere(
    groups: Sequence[Group], name: str = "", saved: SavedNames | None = None
) -> tuple[str, ...]:
    """Return the parameters whose state other ranks keep: those that own the parameters.

    This rank has no state of them, but of others. Flattened parameters are never among them,
    because each rank has other elements of them. A load must not give this rank their state: it
    would never be stepped here, and a save could take it for that of the owner.

    Args:
        groups: the param groups.
        name: the name under which a checkpoint lists parameters that were among them on a rank.
        saved: the contents of the checkpoint. They count if this rank has no state at all.
    """
    lists = saved.object(name) if saved is not None and saved.has_object(name) else []
    listed = settings_by_member(name, lists)
    has_state = {
        each.name: bool(group.states.get(each.tensor))
        for group in groups
        for each in group.with_state
        if not each.flat and each.tensor.requires_grad
    }
    dist, known = torch.distributed, has_state if any(has_state.values()) else listed
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return ()
    return tuple(name for name, is_here in has_state.items() if not is_here and name in known)
