"""A run that stops and goes on is the run that never stopped, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B

import shardwise as sw
from tests.breadth import OLD_TORCH, mostly_long
from tests.multirank.models import (
    DEPTH,
    VOCABULARY,
    WORLDS,
    MakeOptimizer,
    adamw,
    build,
    optimizers_of,
)
from tests.multirank.test_matrix import contents
from tests.tools.gang import Gang


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def trainer(state: dict[str, Any]) -> Callable[[int], list[float]]:
    """Makes real steps; gives the losses that this rank sees."""
    model = state["model"]
    schedule: Any = None
    if isinstance(model, list):
        schedule = ScheduleInterleaved1F1B(model, 2, loss_fn=loss_of)
    elif isinstance(model, PipelineStage):
        schedule = ScheduleGPipe(model, 2, loss_fn=loss_of)
    stages = model if isinstance(model, list) else [model]

    def step(number: int) -> list[float]:
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, VOCABULARY, (8, 3), generator=generator)
        losses: list[Tensor] = []
        if schedule is None:
            losses.append(loss_of(model(tokens), tokens))
            losses[0].backward()
        else:
            first, last = (any(getattr(s, q) for s in stages) for q in ("is_first", "is_last"))
            target = {"target": tokens, "losses": losses} if last else {}
            schedule.step(*[tokens] if first else [], **target)
        for optimizer in optimizers_of(state):
            optimizer.step()
            optimizer.zero_grad()
        state["scheduler"].step()
        return [float(loss.detach()) for loss in losses]

    return step


def stop_and_go_on(kind: str, root: str, make: MakeOptimizer = adamw) -> None:
    """Five steps, saved after three; then the last two again, from what was saved."""
    state = build(kind, 1, make)
    step = trainer(state)
    for number in range(3):
        step(number)
    sw.save(f"{root}/middle", state)
    losses = [step(number) for number in (3, 4)]
    sw.save(f"{root}/uninterrupted", state)
    again = build(kind, 2, make)
    step = trainer(again)
    sw.load(f"{root}/middle", again)
    assert [step(number) for number in (3, 4)] == losses
    sw.save(f"{root}/resumed", again)


@pytest.mark.parametrize("kind", mostly_long(WORLDS, ["tp", "pipeline_fsdp"]))
def test_it_goes_on_bit_for_bit(gang: Gang, tmp_path: Path, kind: str) -> None:
    if OLD_TORCH and "pipeline" in kind:
        pytest.skip("before torch 2.10, gloo aborts in schedules of pipelines")
    gang.run(stop_and_go_on, kind, str(tmp_path), world=WORLDS[kind])
    middle, end = contents(tmp_path / "middle"), contents(tmp_path / "uninterrupted")
    assert contents(tmp_path / "resumed") == end
    changed = [name for name in end if name.endswith("weight") and middle[name] != end[name]]
    assert len(changed) == 3 * DEPTH + 2
