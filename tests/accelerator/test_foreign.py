"""Checkpoints of others that were written from CUDA tensors, and exports of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw


def trained(device: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(2, 16, device=device)).sum().backward()
    optimizer.step()
    return model, optimizer


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for name, value in one.state_dict().items():
        assert torch.equal(value.cpu(), other.state_dict()[name].cpu()), name


@pytest.mark.parametrize("target", ["cuda", "cpu"])
@pytest.mark.parametrize("writer", ["torch", "dcp", "safetensors"])
def test_checkpoints_written_from_the_device(writer: str, target: str, tmp_path: Path) -> None:
    model, optimizer = trained("cuda", 1)
    state: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    path = tmp_path / "a"
    if writer == "torch":
        path = tmp_path / "a.pt"
        torch.save(state, path)
    elif writer == "dcp":
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict

        weights, optim = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": optim}, checkpoint_id=str(path))
    else:
        from safetensors.torch import save_file

        path = tmp_path / "a.safetensors"
        save_file(model.state_dict(), path)
    opened = sw.open(path)
    for name, value in model.state_dict().items():
        assert torch.equal(opened[f"model.{name}"].tensor(), value.cpu())
    other, _ = trained(target, 2)
    sw.load(path, {"model": other}, strict=False)
    assert_same(other, model)


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_exports_of_checkpoints_from_the_device(kind: str, tmp_path: Path) -> None:
    model, optimizer = trained("cuda", 1)
    sw.save(tmp_path / "a", {"model": model, "optimizer": optimizer})
    if kind == "torch":
        sw.export(tmp_path / "a", tmp_path / "out", to="torch")
        (file,) = (tmp_path / "out").glob("*.pt")
        loaded = torch.load(file, weights_only=True)
        weights = loaded["model"]
    else:
        from safetensors.torch import load_file

        sw.export(tmp_path / "a", tmp_path / "out", to="hf")
        (file,) = (tmp_path / "out").glob("*.safetensors")
        weights = load_file(file)
    for name, value in model.state_dict().items():
        assert torch.equal(weights[name], value.cpu()), name
        assert weights[name].device.type == "cpu"
