"""cast=True gives a fresh optimizer moments of the dtype that it would create itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.fsdp import fully_shard

import shardwise as sw
from tests.tools.gang import Gang

MAKERS: dict[str, Any] = {
    "AdamW": lambda p: optim.AdamW(p, amsgrad=True, foreach=False),
    "AdamW foreach": lambda p: optim.AdamW(p, foreach=True),
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "RMSprop": lambda p: optim.RMSprop(p, momentum=0.5, centered=True),
    "Adagrad": optim.Adagrad,
    "NAdam": optim.NAdam,
    "ASGD": optim.ASGD,
    "Adafactor": optim.Adafactor,
    "Rprop": optim.Rprop,
    "LBFGS": lambda p: optim.LBFGS(p, max_iter=2),
}


class Scaled(nn.Linear):
    """Has a parameter without dimensions, beside others."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def make(name: str, dtype: torch.dtype) -> tuple[Any, Any]:
    torch.manual_seed(0)
    module = Scaled().to(dtype)
    return module, MAKERS[name](module.parameters())


def step(module: nn.Module, optimizer: Any, count: int) -> None:
    for index in range(count):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(3, 4, generator=generator).to(next(module.parameters()).dtype)

        def closure(x: torch.Tensor = x) -> Any:
            optimizer.zero_grad()
            loss = module(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def dtypes(optimizer: optim.Optimizer) -> list[Any]:
    return [
        {
            key: (each.dtype if isinstance(each, torch.Tensor) else str(type(each)))
            for key, each in sorted(state.items())
            if key != "H_diag"  # a scalar keeps its dtype
        }
        for state in optimizer.state.values()
    ]


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float64),
        (torch.float16, torch.bfloat16),
    ],
)
def test_a_fresh_optimizer_is_as_a_used_one(
    tmp_path: Path, name: str, saved: torch.dtype, loaded: torch.dtype
) -> None:
    module, optimizer = make(name, saved)
    step(module, optimizer, 3)
    sw.save(tmp_path, {"net": module, "optimizer": optimizer})
    fresh, optimizer_of_fresh = make(name, loaded)
    used, optimizer_of_used = make(name, loaded)
    step(used, optimizer_of_used, 3)
    for target, its_optimizer in ((fresh, optimizer_of_fresh), (used, optimizer_of_used)):
        sw.load(tmp_path, {"net": target, "optimizer": its_optimizer}, cast=True)
    own, other = (dtypes(each) for each in (optimizer_of_fresh, optimizer_of_used))
    assert own == other
    step(fresh, optimizer_of_fresh, 2)
    step(used, optimizer_of_used, 2)
    for a, b in zip(fresh.parameters(), used.parameters(), strict=True):
        assert torch.equal(a, b) or name == "LBFGS"


def test_moments_of_another_dtype_than_their_parameter_keep_it(tmp_path: Path) -> None:
    module = nn.Linear(2, 2).bfloat16()
    optimizer = optim.AdamW(module.parameters())
    for each in module.parameters():
        moments = {key: torch.rand(each.shape) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[each] = {"step": torch.tensor(2.0), **moments, "q": torch.ones(2).byte()}
    sw.save(tmp_path, {"model": module, "optimizer": optimizer})
    fresh = nn.Linear(2, 2).half()
    other = optim.AdamW(fresh.parameters())
    sw.load(tmp_path, {"net": fresh, "optimizer": other}, cast=True, rename={"net": "model"})
    for a, b in zip(optimizer.state.values(), other.state.values(), strict=True):
        for key in a:
            assert a[key].dtype == b[key].dtype
            assert torch.equal(a[key], b[key])


def test_without_cast_nothing_changes(tmp_path: Path) -> None:
    module, optimizer = make("AdamW", torch.bfloat16)
    step(module, optimizer, 1)
    sw.save(tmp_path, {"net": module, "optimizer": optimizer})
    fresh, other = make("AdamW", torch.float32)
    state = {"net": fresh, "optimizer": other}
    with pytest.raises(sw.MismatchError, match="bfloat16 in the checkpoint, float32 in the target"):
        sw.load(tmp_path, state, only=["optimizer.*"])
    sw.load(tmp_path, state, only=["optimizer.*"], cast=True)
    assert {each["exp_avg"].dtype for each in other.state.values()} == {torch.float32}


def shard(place: str) -> None:
    def made(dtype: torch.dtype) -> tuple[Any, Any]:
        module: Any = fully_shard(nn.Linear(4, 4).to(dtype))
        return module, optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

    module, optimizer = made(torch.bfloat16)
    module(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    sw.save(place, {"model": module, "optimizer": optimizer})
    fresh, other = made(torch.float32)
    sw.load(place, {"model": fresh, "optimizer": other}, cast=True)
    for a, b in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert b["momentum_buffer"].dtype == torch.float32
        assert torch.equal(
            a["momentum_buffer"].full_tensor().float(), b["momentum_buffer"].full_tensor()
        )


def test_shards(tmp_path: Path, gang: Gang) -> None:
    gang.run(shard, str(tmp_path), world=2)
