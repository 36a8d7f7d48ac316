"""Block-scaled tensors as published models have them, and what they mean."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

FP8 = torch.float8_e4m3fn
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclass(frozen=True)
class Stored:
    """A tensor with the name `w`, and what a file has of it.

    Attributes:
        files: the stored tensors by name.
        values: the values, before they are rounded to the dtype of a target.
    """

    files: Mapping[str, Tensor]
    values: Tensor


def random_fp8(*shape: int, seed: int = 0) -> Tensor:
    """All bytes, also NaN, in random order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(FP8)


def spread(scales: Tensor, shape: tuple[int, ...], block: tuple[int, int] = (128, 128)) -> Tensor:
    """Give each element of a tensor the scale of its block."""
    rows = scales.float().repeat_interleave(block[0], -2)[..., : shape[-2], :]
    return rows.repeat_interleave(block[1], -1)[..., : shape[-1]]


def block_fp8(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Stored:
    """As DeepSeek stores it."""
    weight = random_fp8(*shape, seed=seed)
    grid = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    generator = torch.Generator().manual_seed(seed)
    scales = torch.rand(grid, generator=generator) + 0.001
    scales = scales.to(dtype)
    values = weight.float() * spread(scales, shape)
    return Stored({"w": weight, "w_scale_inv": scales}, values)


def exponents(*shape: int, dtype: torch.dtype) -> Stored:
    """Block FP8 with powers of two as scales."""
    stored = torch.arange(4 * 3).reshape(4, 3) * 5 + 90
    scales = stored[: -(-shape[0] // 128), : -(-shape[1] // 128)].to(torch.uint8).view(dtype)
    weight = random_fp8(*shape)
    factors = 2.0 ** (scales.view(torch.uint8).float() - 127)
    return Stored({"w": weight, "w_scale_inv": scales}, weight.float() * spread(factors, shape))


def compressed(*shape: int, scales: Tensor, name: str = "w") -> Stored:
    """As compressed-tensors stores it, which multiplies in the dtype of the scales."""
    weight = random_fp8(*shape)
    if scales.numel() == 1:
        factors = scales.reshape([1] * len(shape))
    elif scales.shape[-1] == 1 and scales.shape[-2] == shape[-2]:
        factors = scales
    else:
        factors = spread(scales, shape).to(scales.dtype)
    product = weight.to(scales.dtype) * factors
    if ".experts." in name:
        product = weight.float() * factors.float()
    return Stored({name: weight, f"{name}_scale": scales}, product.float())


def mxfp4(experts: int, rows: int, groups: int) -> Stored:
    """As gpt-oss stores it; transformers has rows and columns the other way round."""
    generator = torch.Generator().manual_seed(experts)
    shape = (experts, rows, groups, 16)
    blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 255, shape[:-1], dtype=torch.uint8, generator=generator)
    numbers = FP4.double()[torch.stack([blocks & 15, blocks >> 4], -1).long()].flatten(-2)
    values = torch.ldexp(numbers, scales.int()[..., None] - 127)
    values = values.reshape(experts, rows, groups * 32).transpose(1, 2).contiguous()
    return Stored({"w_blocks": blocks, "w_scales": scales}, values)


def publish(place: Path, files: Mapping[str, Tensor], *, in_files: int = 1) -> Path:
    """Write a published model; in several files, no tensor is in the file of its scales."""
    place.mkdir()
    if in_files == 1:
        save_file(dict(files), place / "model.safetensors")
        return place
    names = [f"model-{i + 1:05}-of-{in_files:05}.safetensors" for i in range(in_files)]
    file_of = {name: names[i % in_files] for i, name in enumerate(files)}
    for file in names:
        save_file({n: t for n, t in files.items() if file_of[n] == file}, place / file)
    index = {"metadata": {}, "weight_map": file_of}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    return place
