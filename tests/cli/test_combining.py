"""`shardwise average` and `shardwise merge-lora`."""

from __future__ import annotations

from pathlib import Path

import torch

import shardwise as sw
from tests.cli.conftest import Run


def test_checkpoints_are_averaged(run: Run, tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 5.0)):
        sw.save(tmp_path / name, {"model": {"w": torch.full((3,), value)}, "epoch": value})
    places = (tmp_path / "a", tmp_path / "b", tmp_path / "mean")
    ran = run("average", *places, "--weight", "3", "--weight", "1")
    assert ran.status == 0
    assert "left out: epoch" in ran.out
    assert sw.open(tmp_path / "mean")["model.w"][...].tolist() == [2.0] * 3
    assert run("average", tmp_path / "a", tmp_path / "x").status == 2
    assert run("average", *places, "--to", "gguf").status == 2


def test_an_adapter_is_merged(run: Run, tmp_path: Path) -> None:
    factors = {"lora_A": torch.ones(2, 3), "lora_B": torch.ones(4, 2)}
    sw.save(tmp_path / "base", {"model": {"x.weight": torch.zeros(4, 3)}})
    sw.save(tmp_path / "adapter", {"adapter": {"x": factors}})
    places = (tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    ran = run("merge-lora", *places)
    assert (ran.status, "pass its LoRA alpha as alpha=" in ran.err) == (2, True)
    assert run("merge-lora", *places, "--alpha", "3").status == 0
    assert sw.open(tmp_path / "merged")["model.x.weight"][...].tolist() == [[3.0] * 3] * 4
