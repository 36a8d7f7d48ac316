"""Convert the state that an optimizer keeps for a parameter to the form of checkpoints, and back.

In checkpoints, nested state has dotted keys, and step counts are tensors, as in torch's optimizers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from shardwise.state.parameters import Parameter

STEP = "step"
# Keys of a param group that are not hyperparameters.
NOT_HYPERPARAMETERS = ("params", "param_names", "is_expert_parallel")


@dataclass(frozen=True, slots=True)
class Group:
    """A param group of an optimizer.

    Attributes:
        optimizer: the optimizer.
        settings: the group itself, an item of `optimizer.param_groups`.
        parameters: its parameters.
    """

    optimizer: Optimizer
    settings: MutableMapping[str, Any]
    parameters: list[Parameter]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all original parameters, each of them once."""
        found: dict[str, None] = {}
        for parameter in self.parameters:
            found.update(dict.fromkeys(parameter.names))
        return tuple(found)


def steps_are_in(optimizer: Optimizer) -> Literal["tensors", "integers", "groups"]:
    """Return where an optimizer counts its steps.

    torch's optimizers have a tensor for each parameter, DeepSpeed's an integer for each parameter,
    and those of Apex a number for each param group.
    """
    module = type(optimizer).__module__
    if module.startswith("deepspeed.ops."):
        return "integers"
    return "groups" if module.startswith(("transformer_engine.", "apex.")) else "tensors"


def hyperparameters_of(optimizer: Optimizer, settings: Mapping[str, Any]) -> dict[str, object]:
    """Return the hyperparameters in the settings of a group, without the step count."""
    found = dict(settings)
    for key in NOT_HYPERPARAMETERS:
        found.pop(key, None)
    if steps_are_in(optimizer) == "groups":
        found.pop(STEP, None)
    return found


def read_state(group: Group, parameter: torch.Tensor) -> dict[str, object]:
    """Return the state of a parameter by dotted keys, with the step count as a tensor."""
    state = dict(flatten_keys(group.optimizer.state.get(parameter, {})))
    place = steps_are_in(group.optimizer)
    if state and place != "tensors":
        count = state.get(STEP) if place == "integers" else group.settings.get(STEP)
        if isinstance(count, (int, torch.Tensor)):
            state[STEP] = torch.tensor(float(count), device="cpu")
    return state


def write_state(group: Group, parameter: torch.Tensor, state: Mapping[str, object]) -> None:
    """Set the state of a parameter, with the step count in the form that the optimizer uses."""
    count, place = state.get(STEP), steps_are_in(group.optimizer)
    if isinstance(count, torch.Tensor) and place == "integers":
        state = {**state, STEP: int(count)}
    elif isinstance(count, torch.Tensor) and place == "groups":
        state = {key: value for key, value in state.items() if key != STEP}
        current = group.settings.get(STEP)
        group.settings[STEP] = (
            current.copy_(count) if isinstance(current, torch.Tensor) else int(count)
        )
    group.optimizer.state[parameter] = nest_keys(state)


def remove_step_count(group: Group) -> None:
    """Remove the step count of a group if none of its parameters has state."""
    if steps_are_in(group.optimizer) != "groups":
        return
    if not any(group.optimizer.state.get(each.tensor) for each in group.parameters):
        group.settings.pop(STEP, None)


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
