"""A training loop to measure overhead: a GPT with AdamW, on one device or sharded over ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.fsdp import fully_shard


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The dimensions of a model and of its batches: `batch` sequences of `length` tokens."""

    layers: int
    width: int
    heads: int
    batch: int
    length: int
    words: int = 4096


class Block(nn.Module):
    """A transformer block: attention, then an MLP, both residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.before = nn.LayerNorm(shape.width)
        self.attend = nn.Linear(shape.width, 3 * shape.width)
        self.merge = nn.Linear(shape.width, shape.width)
        self.between = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.attend(self.before(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.merge(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Gpt(nn.Module):
    """A model that predicts the next token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.words, shape.width)
        self.place = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.words, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        places = torch.arange(words.shape[1], device=words.device)
        x = self.embed(words) + self.place(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass
class Timed:
    """The seconds of each step, and the seconds that it waited for saving."""

    steps: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)


class Training:
    """The training loop. Hooks of its optimizer measure how long a step waits for a copy.

    Args:
        shape: dimensions of the model and its batches.
        device: device to train on; accelerators use bfloat16.
        divided: shard the model over all ranks with FSDP2.
    """

    def __init__(self, shape: Shape, device: torch.device, *, divided: bool) -> None:
        torch.manual_seed(1)
        self.model = Gpt(shape).to(device)
        if divided:
            for block in self.model.blocks:
                fully_shard(block)
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-4, fused=device.type != "cpu"
        )
        self.wait_for_copy: Callable[[], object] = lambda: None
        self._device = device
        self._shape = shape
        self._fence_began = self._fenced = 0.0
        self.optimizer.register_step_pre_hook(lambda *_: self._before_fence())
        self.step()  # creates the optimizer's state

    @property
    def state(self) -> dict[str, object]:
        """The state to save."""
        return {"model": self.model, "optimizer": self.optimizer}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors of the state by name, except scalars."""
        named = {f"model.{name}": each.detach() for name, each in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                if value.dim():
                    named[f"optimizer.{name}.{key}"] = value
        return named

    def fence_ends_here(self) -> None:
        """Register the hook that ends the measurement, after the hooks registered so far."""
        self.optimizer.register_step_pre_hook(lambda *_: self._after_fence())

    def run(self, steps: int, save: Callable[[], object]) -> Timed:
        """Train, saving after each step."""
        timed = Timed()
        for _ in range(steps):
            start = time.perf_counter()
            self._fenced = 0.0
            self.step()
            stepped = time.perf_counter()
            save()
            end = time.perf_counter()
            timed.steps.append(end - start)
            timed.waited.append(end - stepped + self._fenced)
        return timed

    def run_ahead(self, steps: int, save: Callable[[], object]) -> Timed:
        """Train like `run`, but queue the next step before a device has completed the last one."""
        timed = Timed()
        events = [self._record_event()]
        for _ in range(steps):
            self._fenced = 0.0
            self.step(waits=False)
            stepped = time.perf_counter()
            save()
            timed.waited.append(time.perf_counter() - stepped + self._fenced)
            events.append(self._record_event())
        events[-1].synchronize()
        timed.steps = [a.elapsed_time(b) / 1000 for a, b in pairwise(events)]
        return timed

    def _record_event(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def step(self, *, waits: bool = True) -> None:
        """Train a step on random tokens, and wait until it is complete."""
        shape, device = self._shape, self._device
        words = torch.randint(shape.words, (shape.batch, shape.length + 1), device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu"):
            logits = self.model(words[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        if waits:
            loss.item()

    def _before_fence(self) -> None:
        self._fence_began = time.perf_counter()
        self.wait_for_copy()

    def _after_fence(self) -> None:
        self._fenced = time.perf_counter() - self._fence_began
