"""State of optimizers that is new at a load has the strides that it had at the save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import shardwise as sw


class Rotating(optim.Optimizer):
    """Keeps transposed matrices, and moments of other strides than the parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["plain"] = torch.zeros(parameter.shape)
                    state["like"] = torch.zeros_like(parameter)
                    state["last"] = torch.zeros(parameter.shape[::-1]).permute(
                        *reversed(range(parameter.dim()))
                    )
                    state["basis"] = [torch.eye(n, n + 1).T for n in parameter.shape]
                    state["deep"] = {"t": torch.zeros(3, 2).T, "inner": (torch.zeros(1, 4).T,)}
                for key in ("plain", "like", "last"):
                    state[key].add_(parameter.grad)
                    parameter.sub_(state[key], alpha=0.01)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_strides(tmp_path: Path, memory_format: Any) -> None:
    def make(steps: int) -> tuple[Any, Any]:
        torch.manual_seed(0)
        module: Any = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Conv2d(4, 1, 1), nn.Conv2d(1, 5, 3))
        module = module.to(memory_format=memory_format)
        optimizer = Rotating(module.parameters())
        for _ in range(steps):
            optimizer.zero_grad()
            module(torch.ones(1, 3, 6, 6)).square().sum().backward()
            optimizer.step()
        return module, optimizer

    (module, optimizer), (fresh, other) = make(2), make(0)
    sw.save(tmp_path, {"model": module, "optimizer": optimizer})
    sw.load(tmp_path, {"model": fresh, "optimizer": other})
    for a, b in zip(module.parameters(), fresh.parameters(), strict=True):
        own, loaded = optimizer.state[a], other.state[b]
        pairs = [(own[key], loaded[key]) for key in ("plain", "like", "last")]
        pairs += zip(own["basis"], loaded["basis"], strict=True)
        pairs += [(own["deep"]["t"], loaded["deep"]["t"])]
        pairs += [(own["deep"]["inner"][0], loaded["deep"]["inner"][0])]
        for x, y in pairs:
            assert torch.equal(x, y)
            wide = [dim for dim in range(x.dim()) if x.shape[dim] > 1]
            assert [x.stride(dim) for dim in wide] == [y.stride(dim) for dim in wide]
