"""Convert the state that an optimizer keeps for a parameter to the form of checkpoints, and back.

In checkpoints, nested state has dotted keys, and step counts are tensors, as in torch's optimizers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping

import torch
from torch.optim import Optimizer

STEP = "step"
ParamGroup = MutableMapping[str, object]


def counts_steps_like_torch(optimizer: Optimizer) -> bool:
    """Return whether an optimizer counts steps in a tensor for each parameter."""
    return not (_counts_steps_in_integers(optimizer) or _counts_steps_in_groups(optimizer))


def _counts_steps_in_integers(optimizer: Optimizer) -> bool:
    """Return whether an optimizer counts steps in a number for each parameter, like DeepSpeed's."""
    return type(optimizer).__module__.startswith("deepspeed.ops.")


def _counts_steps_in_groups(optimizer: Optimizer) -> bool:
    """Return whether an optimizer counts steps once per group, like those of Apex."""
    return type(optimizer).__module__.startswith(("transformer_engine.", "apex."))


def hyperparameters_of(optimizer: Optimizer, group: Mapping[str, object]) -> dict[str, object]:
    """Return the hyperparameters of a group, without the step count."""
    counts_in_group = _counts_steps_in_groups(optimizer)
    return {key: value for key, value in group.items() if not (counts_in_group and key == STEP)}


def read_state(
    optimizer: Optimizer, group: ParamGroup, parameter: torch.Tensor
) -> dict[str, object]:
    """Return the state of a parameter by dotted keys, with the step count as a tensor."""
    state = dict(flatten_keys(optimizer.state.get(parameter, {})))
    count = state.get(STEP)
    if _counts_steps_in_groups(optimizer) and state:
        count = group.get(STEP)
    if not counts_steps_like_torch(optimizer) and isinstance(count, (int, torch.Tensor)):
        state[STEP] = torch.tensor(float(count), device="cpu")
    return state


def write_state(
    optimizer: Optimizer, group: ParamGroup, parameter: torch.Tensor, state: Mapping[str, object]
) -> None:
    """Set the state of a parameter, with the step count in the form that the optimizer uses."""
    count = state.get(STEP)
    if _counts_steps_in_integers(optimizer) and isinstance(count, torch.Tensor):
        state = {**state, STEP: int(count)}
    elif _counts_steps_in_groups(optimizer) and isinstance(count, torch.Tensor):
        state = {key: value for key, value in state.items() if key != STEP}
        current_count = group.get(STEP)
        group[STEP] = (
            current_count.copy_(count) if isinstance(current_count, torch.Tensor) else int(count)
        )
    optimizer.state[parameter] = nest_keys(state)


def remove_step_count(optimizer: Optimizer, group: ParamGroup) -> None:
    """Remove the step count of a group if none of its parameters has state."""
    parameters = group["params"]
    has_state = isinstance(parameters, list) and any(map(optimizer.state.get, parameters))
    if _counts_steps_in_groups(optimizer) and not has_state:
        group.pop(STEP, None)


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
