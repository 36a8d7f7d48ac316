"""The model that DeepSpeed trains in the tests. It does not depend on DeepSpeed."""

from __future__ import annotations

import torch
from torch import nn


class Model(nn.Module):
    """Odd sizes, which need padding; frozen and tied parameters, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 5)
        self.norm = nn.BatchNorm1d(5, affine=False)
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor([0.5]))
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 5)
        self.head = nn.Linear(5, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        normal = self.norm(x.to(self.norm.running_mean.dtype))
        x = self.frozen(normal.to(x.dtype))
        x = x + self.scale * self.second(torch.tanh(self.first(x)))
        return self.head(x)


class FrozenModel(nn.Module):
    """Frozen parameters between trained ones of the same shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 5)
        self.norms = nn.ModuleList(nn.LayerNorm(5) for _ in range(4))
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.head = nn.Linear(5, 13, bias=False)
        for index in (0, 2):
            self.norms[index].requires_grad_(False)
            self.layers[index].requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + torch.tanh(layer(norm(x)))
        return self.head(x)


def optimizer_of(model: nn.Module, *, sgd: bool = False) -> torch.optim.Optimizer:
    """Return an optimizer with two param groups."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "lr": 1e-2, "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "lr": 3e-3, "weight_decay": 0.0},
    ]
    if sgd:
        return torch.optim.SGD(groups, momentum=0.9)
    return torch.optim.AdamW(groups)


def scheduler_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """Return a schedule that changes with every step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))


def tokens_of(step: int) -> torch.Tensor:
    """Return the batch of a step."""
    return torch.randint(0, 13, (4,), generator=torch.Generator().manual_seed(step))
