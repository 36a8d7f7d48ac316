"""The param groups of an optimizer: their state and hyperparameters in the form of checkpoints.

In checkpoints, nested state has dotted keys, and step counts are tensors, as in torch's optimizers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from shardwise.errors import StateError
from shardwise.state.parameters import Parameter
from shardwise.state.plain_values import JsonValue, find_differences

GROUPS = "param_groups"
STEP = "step"
NOT_HYPERPARAMETERS = ("params", "param_names", "is_expert_parallel")
"""Keys of a param group that are not hyperparameters."""
_SCHEDULER_SUFFIXES = ("_lr", "_momentum")
_DEEPSPEED_KEYS = {"bias_correction", STEP}
"""Keys in the param groups of DeepSpeed's Adam that torch's Adam lacks."""


class Group:
    """Reads and sets a param group of an optimizer, and the state of its parameters.

    Args:
        optimizer: the optimizer.
        settings: the group itself, an item of `optimizer.param_groups`.
        parameters: its parameters.

    Attributes:
        names: the names of all original parameters, each of them once.
        steps_are_in: where the optimizer counts its steps. torch's optimizers have a tensor for
            each parameter, DeepSpeed's an integer for each parameter, and those of Apex a number
            for each param group.
        other_keys: the keys of the settings that are not hyperparameters.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        settings: MutableMapping[str, Any],
        parameters: Sequence[Parameter],
    ) -> None:
        self.optimizer = optimizer
        self.settings = settings
        self.parameters = parameters
        names: dict[str, None] = {}
        for parameter in parameters:
            names.update(dict.fromkeys(parameter.names))
        self.names = tuple(names)
        self.steps_are_in: Literal["tensors", "integers", "groups"] = "tensors"
        self.other_keys: Collection[str] = NOT_HYPERPARAMETERS
        module = type(optimizer).__module__
        if module.startswith("deepspeed.ops."):
            self.steps_are_in = "integers"
        elif module.startswith(("transformer_engine.", "apex.")):
            self.steps_are_in = "groups"
            self.other_keys = (*NOT_HYPERPARAMETERS, STEP)

    def read_state(self, parameter: torch.Tensor) -> dict[str, object]:
        """Return the state of a parameter by dotted keys, with the step count as a tensor."""
        state = dict(flatten_keys(self.optimizer.state.get(parameter, {})))
        if state and self.steps_are_in != "tensors":
            counters = state if self.steps_are_in == "integers" else self.settings
            count = counters.get(STEP)
            if isinstance(count, (int, torch.Tensor)):
                state[STEP] = torch.tensor(float(count), device="cpu")
        return state

    def write_state(self, parameter: torch.Tensor, state: Mapping[str, object]) -> None:
        """Set the state of a parameter, with the step count in the form that the optimizer uses."""
        count = state.get(STEP)
        if isinstance(count, torch.Tensor) and self.steps_are_in == "integers":
            state = {**state, STEP: int(count)}
        elif isinstance(count, torch.Tensor) and self.steps_are_in == "groups":
            state = {key: value for key, value in state.items() if key != STEP}
            current = self.settings.get(STEP)
            self.settings[STEP] = (
                current.copy_(count) if isinstance(current, torch.Tensor) else int(count)
            )
        self.optimizer.state[parameter] = nest_keys(state)


def hyperparameters_of(
    settings: Mapping[str, Any], other_keys: Collection[str] = NOT_HYPERPARAMETERS
) -> dict[str, Any]:
    """Return the hyperparameters among the settings of a param group."""
    hyperparameters = dict(settings)
    for key in other_keys:
        hyperparameters.pop(key, None)
    return hyperparameters


def flatten_keys(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the values of nested dicts with dotted keys."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and all(isinstance(k, str) for k in value):
            yield from flatten_keys(value, f"{name}.")
        else:
            yield name, value


def nest_keys(leaves: Mapping[str, object]) -> dict[str, object]:
    """Return nested dicts, given values with dotted keys."""
    tree: dict[str, object] = {}
    for name, value in leaves.items():
        *path, last = name.split(".")
        parent = tree
        for part in path:
            child = parent.setdefault(part, {})
            if not isinstance(child, dict):
                child = parent[part] = {}
            parent = child
        parent[last] = value
    return tree


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
        lacking = group.optimizer.defaults.keys() - saved_keys - _DEEPSPEED_KEYS
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
