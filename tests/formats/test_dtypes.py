"""All dtypes that torch and safetensors share, in and out of each format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import shardwise as sw

CODES = {
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
    "U16": "uint16",
    "U64": "uint64",
    "C64": "complex64",
}


def saved_by_safetensors(place: Path) -> dict[str, torch.Tensor]:
    """Write a published model with safetensors itself, and return its tensors."""
    tensors = {}
    for index, (code, dtype) in enumerate(CODES.items()):
        itemsize = getattr(torch, dtype).itemsize
        data = torch.arange(24 * itemsize, dtype=torch.uint8).reshape(4, 6 * itemsize) + index
        tensors[code] = data.view(getattr(torch, dtype))
    place.mkdir()
    save_file(tensors, place / "model.safetensors")
    return tensors


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
    )


@pytest.mark.parametrize("to", ["native", "hf", "dcp", "torch", "deepspeed-universal"])
def test_dtypes_go_in_and_out_of_each_format(tmp_path: Path, to: str) -> None:
    expected = saved_by_safetensors(tmp_path / "published")
    found = sw.open(tmp_path / "published")
    assert found.left_out == ()
    assert all(same(found[f"model.{code}"][...], tensor) for code, tensor in expected.items())
    if to == "deepspeed-universal":
        pytest.skip("it holds trainings, in float32")
    report = sw.export(tmp_path / "published", tmp_path / "out", to=to)
    assert report.left_out == ()
    out = tmp_path / "out" / "checkpoint.pt" if to == "torch" else tmp_path / "out"
    copied = sw.open(out)
    assert all(same(copied[f"model.{code}"][...], tensor) for code, tensor in expected.items())
    assert len(copied) == len(expected)
    state = {"model": {code: torch.zeros_like(tensor) for code, tensor in expected.items()}}
    sw.load(out, state)
    assert all(same(state["model"][code], tensor) for code, tensor in expected.items())
    if to == "hf":
        with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
            assert all(same(file.get_tensor(code), tensor) for code, tensor in expected.items())


def test_dtypes_that_torch_saves_itself(tmp_path: Path) -> None:
    state = {"model": saved_by_safetensors(tmp_path / "published")}
    sw.save(tmp_path / "ours", state)
    found = sw.open(tmp_path / "ours")
    assert all(same(found[f"model.{code}"][...], tensor) for code, tensor in state["model"].items())


def test_what_is_left_out_stays_listed_in_copies(tmp_path: Path) -> None:
    """torch has no dtype of six bits, and its elements of F4 have two numbers."""
    place = tmp_path / "published"
    saved_by_safetensors(place)
    path = place / "model.safetensors"
    data = path.read_bytes()
    for name, new in (
        (
            b'"F8_E4M3":{"dtype":"F8_E4M3","shape":[4,6]',
            b'"F8_E4M3":{"dtype":"F6_E2M3","shape":[4,8]',
        ),
        (b'"F4":{"dtype":"F4","shape":[4,12]', b'"F4":{"dtype":"F4","shape":[16,3]'),
    ):
        assert name in data
        data = data.replace(name, new)
    path.write_bytes(data)
    found = sw.open(place)
    six, four = sorted(found.left_out, key=len)
    assert "F8_E4M3 in model.safetensors: torch has no dtype for 'F6_E2M3'" in (six, four)
    assert any(line.startswith("F4 in model.safetensors: ") for line in (six, four))
    assert len(found) == len(CODES) - 2
    report = sw.export(place, tmp_path / "ours", to="native")
    assert report.left_out == found.left_out
    assert sw.open(tmp_path / "ours").left_out == found.left_out
    sw.export(tmp_path / "ours", tmp_path / "again", to="native")
    assert sw.open(tmp_path / "again").left_out == found.left_out
    hf = sw.export(tmp_path / "again", tmp_path / "hf", to="hf")
    assert hf.left_out == found.left_out
