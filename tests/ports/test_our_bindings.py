"""The conformance suite of bindings, for those of shardwise."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn, optim

import shardwise as sw
from shardwise.testing.binding_suite import BindingSuite, State, content


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model(torch.randn(8, 3))
    return model


class WithExtraState(nn.Linear):
    """A module whose extra state is a plain value."""

    calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class TestModules(BindingSuite):
    def make_state(self, seed: int, rank: int, world: int) -> State:
        counted = WithExtraState(2, 2)
        counted.calls = seed
        return {"model": nn.ModuleDict({"plain": model_of(seed), "counted": counted})}


class TestOptimizers(BindingSuite):
    def make_state(self, seed: int, rank: int, world: int) -> State:
        model = model_of(seed)
        first, *others = model.parameters()
        groups = [{"params": [first], "lr": 0.1 * seed}, {"params": others}]
        optimizer = optim.AdamW(groups, lr=0.01 * seed)
        for _ in range(seed):
            model(torch.randn(8, 3)).square().sum().backward()
            optimizer.step()
        return {"model": model, "optimizer": optimizer}

    def test_a_load_before_the_first_step_makes_the_state(self, tmp_path: Path) -> None:
        saved, target = self.make_state(1, 0, 1), self.make_state(2, 0, 1)
        sw.save(tmp_path / "c", saved)
        target["optimizer"].state.clear()
        sw.load(tmp_path / "c", target)
        assert content([target]) == content([saved])
        target["optimizer"].state.clear()
        sw.save(tmp_path / "none", target)
        sw.load(tmp_path / "none", saved)
        assert not saved["optimizer"].state


class TestPlainValues(BindingSuite):
    fits_any_shape = True

    def make_state(self, seed: int, rank: int, world: int) -> State:
        value: dict[str, Any] = {"step": seed, "best": [0.5 * seed, None], "text": f"run {seed}"}
        return {"value": value | {"weights": torch.full((3,), float(seed))}}


class TestObjects(BindingSuite):
    fits_any_shape = True

    def make_state(self, seed: int, rank: int, world: int) -> State:
        scheduler = optim.lr_scheduler.StepLR(optim.SGD([torch.zeros(1)], lr=0.1), 2)
        scheduler.last_epoch = seed
        return {"scheduler": scheduler}


class TestTensors(BindingSuite):
    def make_state(self, seed: int, rank: int, world: int) -> State:
        return {"a": torch.full((2, 3), seed), "b": np.full(4, seed, np.float64)}


class TestShards(BindingSuite):
    def make_state(self, seed: int, rank: int, world: int) -> State:
        low, high = 7 * rank // world, 7 * (rank + 1) // world
        whole = torch.arange(14.0).reshape(7, 2) * seed
        box = sw.Box((low, 0), (high - low, 2))
        return {"table": sw.Shards((7, 2), whole.dtype, [(box, whole[low:high].clone())])}


class TestTrainable(BindingSuite):
    def make_state(self, seed: int, rank: int, world: int) -> State:
        frozen, trained = nn.Linear(2, 2), model_of(seed)
        for parameter in frozen.parameters():
            nn.init.constant_(parameter.requires_grad_(False), 1.0)
        return {"model": sw.trainable(nn.ModuleDict({"frozen": frozen, "trained": trained}))}


class TestPerRankValues(BindingSuite):
    numbers_of_ranks = ((1, 1), (3, 3))

    def make_state(self, seed: int, rank: int, world: int) -> State:
        return {"offset": sw.PerRank({"position": 100 * seed + rank})}


class TestRandomGenerators(BindingSuite):
    """They are those of the process, so there is only one rank."""

    numbers_of_ranks = ((1, 1),)

    def make_state(self, seed: int, rank: int, world: int) -> State:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        return {"rng": sw.RngState()}
