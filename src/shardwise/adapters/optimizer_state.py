"""The state that an optimizer keeps of a parameter, as a checkpoint has it.

Nested state has dotted keys, and a count of steps is a tensor, as in torch's own optimizers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping

import torch
from torch.optim import Optimizer

STEP = "step"
Group = MutableMapping[str, object]


def counts_as_torch(optimizer: Optimizer) -> bool:
    """Return whether an optimizer counts steps in a tensor for each parameter."""
    return not (_counts_plainly(optimizer) or _counts_in_groups(optimizer))


def _counts_plainly(optimizer: Optimizer) -> bool:
    """Return whether it counts in a number for each parameter, as DeepSpeed's own do."""
    return type(optimizer).__module__.startswith("deepspeed.ops.")


def _counts_in_groups(optimizer: Optimizer) -> bool:
    """Return whether it counts once for each group, as Transformer Engine's and Apex's do."""
    return type(optimizer).__module__.startswith(("transformer_engine.", "apex."))


def settings_of(optimizer: Optimizer, group: Mapping[str, object]) -> dict[str, object]:
    """Return the hyperparameters of a group, without its count of steps."""
    counted = _counts_in_groups(optimizer)
    return {key: value for key, value in group.items() if not (counted and key == STEP)}


def state_of(optimizer: Optimizer, group: Group, parameter: torch.Tensor) -> dict[str, object]:
    """Return the state of a parameter by dotted keys, its count as a tensor."""
    state = dict(leaves_of(optimizer.state.get(parameter, {})))
    count = state.get(STEP)
    if _counts_in_groups(optimizer) and state:
        count = group.get(STEP)
    if not counts_as_torch(optimizer) and isinstance(count, (int, torch.Tensor)):
        state[STEP] = torch.tensor(float(count), device="cpu")
    return state


def set_state(
    optimizer: Optimizer, group: Group, parameter: torch.Tensor, state: Mapping[str, object]
) -> None:
    """Set the state of a parameter, its count in the form that the optimizer uses."""
    count = state.get(STEP)
    if _counts_plainly(optimizer) and isinstance(count, torch.Tensor):
        state = {**state, STEP: int(count)}
    elif _counts_in_groups(optimizer) and isinstance(count, torch.Tensor):
        state = {key: value for key, value in state.items() if key != STEP}
        here = group.get(STEP)
        group[STEP] = here.copy_(count) if isinstance(here, torch.Tensor) else int(count)
    optimizer.state[parameter] = rebuilt(state)


def forget_count(optimizer: Optimizer, group: Group) -> None:
    """Remove the count of a group whose parameters have no state any more."""
    parameters = group["params"]
    kept = isinstance(parameters, list) and any(map(optimizer.state.get, parameters))
    if _counts_in_groups(optimizer) and not kept:
        group.pop(STEP, None)


def leaves_of(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the leaves of nested dicts by dotted keys."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and all(isinstance(k, str) for k in value):
            yield from leaves_of(value, f"{name}.")
        else:
            yield name, value


def rebuilt(leaves: Mapping[str, object]) -> dict[str, object]:
    """Return the nested dicts of leaves with dotted keys."""
    tree: dict[str, object] = {}
    for name, value in leaves.items():
        *path, last = name.split(".")
        here = tree
        for part in path:
            child = here.setdefault(part, {})
            if not isinstance(child, dict):
                child = here[part] = {}
            here = child
        here[last] = value
    return tree
