"""Quantized models: their weights and scales are converted together or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import shardwise as sw

FP8 = torch.float8_e4m3fn


def ints(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(torch.uint8).view(dtype)


def published(place: Path, tensors: dict[str, torch.Tensor]) -> Path:
    place.mkdir()
    save_file({**tensors, "norm.weight": torch.rand(8)}, place / "model.safetensors")
    return place


SCHEMES = {
    "deepseek": {"a.weight": ints(FP8, 8, 8), "a.weight_scale_inv": torch.rand(1, 1)},
    "deepseek-ue8m0": {
        "a.weight": ints(FP8, 8, 8),
        "a.weight_scale_inv": ints(torch.float8_e8m0fnu, 1, 1),
        "a.bias": torch.rand(8),
    },
    "experts": {"a.up_proj": ints(FP8, 2, 8, 8), "a.up_proj_scale_inv": torch.rand(2, 1, 1)},
    "compressed-tensors": {
        "a.weight_packed": torch.ones(8, 1, dtype=torch.int32),
        "a.weight_scale": torch.rand(8, 1),
        "a.weight_shape": torch.tensor([8, 8]),
    },
    "nvfp4": {
        "a.weight_packed": ints(torch.uint8, 8, 4),
        "a.weight_scale": ints(FP8, 8, 1),
        "a.weight_global_scale": torch.rand(1),
    },
    "gptq": {
        "a.qweight": torch.ones(1, 8, dtype=torch.int32),
        "a.qzeros": torch.ones(1, 1, dtype=torch.int32),
        "a.scales": torch.rand(1, 8),
    },
    "mxfp4": {"a.up_blocks": ints(torch.uint8, 8, 2, 16), "a.up_scales": ints(torch.uint8, 8, 2)},
    "bitsandbytes": {
        "a.weight": ints(torch.uint8, 32, 1),
        "a.weight.absmax": torch.rand(2),
        "a.weight.quant_map": torch.rand(16),
    },
    "bitsandbytes-int8": {"a.weight": ints(torch.int8, 8, 8), "a.SCB": torch.rand(8)},
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_exports_do_not_convert_parts_of_quantized_tensors(tmp_path: Path, scheme: str) -> None:
    place = published(tmp_path / "model", SCHEMES[scheme])
    with pytest.raises(sw.StateError, match=r"quantized tensors, .*a\..*leave out dtype=.*dequant"):
        sw.export(place, tmp_path / "out", to="hf", dtype="bfloat16")
    assert not (tmp_path / "out").exists()
    sw.export(place, tmp_path / "rest", to="hf", dtype="bfloat16", skip=["model.a.*"])
    (rest,) = load_file(tmp_path / "rest" / "model.safetensors").values()
    assert rest.dtype == torch.bfloat16
    sw.export(place, tmp_path / "same", to="native")
    copied = sw.open(tmp_path / "same")
    for name, tensor in SCHEMES[scheme].items():
        read = copied.tensors()[f"model.{name}"][...]
        assert read.dtype == tensor.dtype
        assert torch.equal(read.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_loads_do_not_cast_parts_of_quantized_tensors(tmp_path: Path, scheme: str) -> None:
    place = published(tmp_path / "model", SCHEMES[scheme])
    for name, tensor in SCHEMES[scheme].items():
        out = torch.zeros(tensor.shape, dtype=torch.bfloat16)
        message = rf"model\.{name}: .*quantized together with model\.a\..*dequantize"
        if name == "a.bias":
            sw.load(place, {"model": {name: out}}, cast=True, strict=False)
            continue
        for cast in (True, False):
            with pytest.raises(sw.MismatchError, match=message):
                sw.load(place, {"model": {name: out}}, cast=cast, strict=False)
        assert not out.any()
    same = {name: torch.zeros_like(tensor) for name, tensor in SCHEMES[scheme].items()}
    norm = torch.zeros(8, dtype=torch.bfloat16)
    sw.load(place, {"model": {**same, "norm.weight": norm}}, cast=True)
    for name, tensor in SCHEMES[scheme].items():
        assert torch.equal(same[name].view(torch.uint8), tensor.view(torch.uint8))
    assert norm.any()


def test_small_floats_and_integers_without_scales_are_converted_as_before(tmp_path: Path) -> None:
    tensors = {"w": ints(FP8, 4, 4), "ids": torch.arange(4), "ids_scale": torch.rand(4)}
    place = published(tmp_path / "model", tensors)
    out = torch.zeros(4, 4)
    sw.load(place, {"model": {"w": out}}, cast=True, strict=False)
    assert torch.equal(out, tensors["w"].float())
    sw.export(place, tmp_path / "out", to="hf", dtype="bfloat16")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written["ids_scale"].dtype == torch.bfloat16
