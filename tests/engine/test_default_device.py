"""Saves and loads do not depend on torch's default device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwise as sw
from tests.equal import same_bytes
from tests.tools.gang import Gang


def state() -> dict[str, Any]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "values": {(1, 2): torch.arange(3)},  # a plain value with a tensor in it
        "mine": sw.PerRank([torch.empty(0, 2), torch.ones(2)]),
        "overlapping": torch.ones(2, 2).as_strided((2, 2), (1, 1)),
        "rng": sw.RngState(),
    }


def test_all_works_under_another_default_device(tmp_path: Path) -> None:
    saved = state()
    moment = saved["optimizer"].state[saved["model"].weight]["exp_avg"].clone()
    target = {**state(), "values": None}
    half = {"model": nn.Linear(3, 2).bfloat16()}
    with torch.device("meta"):
        sw.save(tmp_path / "a", saved)
        part = sw.open(tmp_path / "a")["model.weight"][1:]
        sw.load(tmp_path / "a", target)
        sw.load(tmp_path / "a", half, cast=True)
        sw.export(tmp_path / "a", tmp_path / "b", to="torch")
        exported = sw.open(tmp_path / "b" / "checkpoint.pt")["model.weight"][...]
        made = {"model": nn.Linear(3, 2)}
        sw.load(tmp_path / "a", made)
    assert target["values"][1, 2].tolist() == [0, 1, 2]
    assert same_bytes(part, saved["model"].weight[1:])
    assert same_bytes(exported, saved["model"].weight)
    assert same_bytes(half["model"].weight, saved["model"].weight.bfloat16())
    assert same_bytes(made["model"].weight, saved["model"].weight)
    assert same_bytes(target["model"].weight, saved["model"].weight)
    loaded = target["optimizer"].state[target["model"].weight]["exp_avg"]
    assert same_bytes(loaded, moment)


def on_ranks(path: str) -> list[float]:
    target = {"w": torch.zeros(3), "large": torch.zeros(20_000, dtype=torch.uint8)}
    with torch.device("meta"):
        sw.save(path, {"w": torch.full((3,), 2.0, device="cpu"), "large": target["large"] + 1})
        sw.load(path, target)
    return [float(target["w"].sum()), float(target["large"].sum(dtype=torch.int64))]


def test_ranks_talk_under_another_default_device(gang: Gang, tmp_path: Path) -> None:
    assert gang.run(on_ranks, str(tmp_path / "a"), world=2) == [[6.0, 20_000.0]] * 2
