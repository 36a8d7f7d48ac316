"""Compare the saved hyperparameters with an optimizer's param groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch.optim import Optimizer

from shardwise.adapters.optimizer_state import NOT_HYPERPARAMETERS, STEP, Group
from shardwise.errors import StateError
from shardwise.state.plain_values import JsonValue, find_differences

GROUPS = "param_groups"
_SCHEDULER_SUFFIXES = ("_lr", "_momentum")
_DEEPSPEED_KEYS = {"bias_correction", STEP}
"""Keys in the param groups of DeepSpeed's Adam that torch's Adam lacks."""


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
            value = dict(value)
            for key in NOT_HYPERPARAMETERS:
                value.pop(key, None)
        for member in group["members"]:
            settings[str(member)] = value
    return settings


def find_group_problems(
    name: str, groups: Sequence[Group], settings: Mapping[str, JsonValue]
) -> Iterator[str]:
    """Yield the reasons why the param groups cannot take the saved hyperparameters.

    Args:
        name: name of the param groups.
        groups: the param groups.
        settings: the saved hyperparameters of each parameter.
    """
    for group in groups:
        members = group.names
        missing = [member for member in members if member not in settings]
        if missing:
            yield (
                f"{name}: the checkpoint has no hyperparameters for {_join_first_names(missing)}; "
                f"to keep the current ones, use skip=[{name!r}]"
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


def find_kind_problems(
    name: str, optimizers: Sequence[Optimizer], settings: Mapping[str, JsonValue]
) -> Iterator[str]:
    """Yield a problem if the checkpoint was saved by another kind of optimizer.

    Another version of the same optimizer has more settings or fewer. Another kind has both:
    unexpected settings, and missing ones.
    """
    defaults = {key for each in optimizers for key in each.defaults}
    saved_keys = {key for each in settings.values() if isinstance(each, dict) for key in each}
    present_keys = {key for each in optimizers for group in each.param_groups for key in group}
    unexpected = {
        key
        for key in saved_keys - present_keys - _DEEPSPEED_KEYS
        if not key.endswith(_SCHEDULER_SUFFIXES)
    }
    missing = defaults - saved_keys - _DEEPSPEED_KEYS
    if settings and unexpected and missing:
        yield (
            f"{name}: saved by another kind of optimizer, whose settings include "
            f"{', '.join(sorted(unexpected))} and not {', '.join(sorted(missing))}: leave it "
            f"out with skip=[{name.removesuffix(GROUPS) + '*'!r}]"
        )


def _join_first_names(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
