"""Small states of many tensors, whose saves cost processor time in Python and not bandwidth."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.training import Gpt, Shape

GROUP = 12  # parameters of a module, as a transformer block has
NUMEL = 64
GPT = Shape(layers=16, width=32, heads=1, batch=1, length=64, words=256)


@dataclass(frozen=True)
class SmallState:
    """A model and its optimizer after one step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def state(self) -> dict[str, object]:
        """The state to save."""
        return {"model": self.model, "optimizer": self.optimizer}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors of the state by name: parameters, moments, and counts of steps."""
        named = {f"model.{name}": each.detach() for name, each in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                named[f"optimizer.{name}.{key}"] = value
        return named


def gpt() -> SmallState:
    """Return a GPT with 197 parameters: 591 tensors with AdamW's moments, and 197 step scalars."""
    return trained(Gpt(GPT))


def many(tensors: int) -> SmallState:
    """Return a model whose state has a number of tensors: a parameter has three more."""
    parameters = tensors // 4
    blocks = []
    for first in range(0, parameters, GROUP):
        block = nn.Module()
        for number in range(min(GROUP, parameters - first)):
            block.register_parameter(f"w{number}", nn.Parameter(torch.randn(NUMEL)))
        blocks.append(block)
    return trained(nn.ModuleList(blocks))


def trained(model: nn.Module) -> SmallState:
    """Return a model and AdamW after one step with random gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return SmallState(model, optimizer)
