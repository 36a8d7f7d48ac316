"""Counts of steps: tensors in a checkpoint, as torch has them, whatever an optimizer keeps."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.optim import Optimizer

from shardwise.adapters.state_tree import leaves_of, rebuilt

STEP = "step"


def counts_plainly(optimizer: Optimizer) -> bool:
    """Whether an optimizer counts with a plain number, as those that come with DeepSpeed do."""
    return type(optimizer).__module__.startswith("deepspeed.ops.")


def state_of(optimizer: Optimizer, parameter: torch.Tensor) -> dict[str, object]:
    """What an optimizer keeps of a parameter by dotted keys, its count as a tensor."""
    state = dict(leaves_of(optimizer.state.get(parameter, {})))
    count = state.get(STEP)
    if counts_plainly(optimizer) and isinstance(count, int):
        state[STEP] = torch.tensor(float(count))
    return state


def set_state(optimizer: Optimizer, parameter: torch.Tensor, state: Mapping[str, object]) -> None:
    """Give an optimizer what it is to keep of a parameter, its count as it counts."""
    count = state.get(STEP)
    if counts_plainly(optimizer) and isinstance(count, torch.Tensor):
        state = {**state, STEP: int(count)}
    optimizer.state[parameter] = rebuilt(state)
