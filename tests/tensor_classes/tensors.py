"""Tensors of each class of torchao that shardwise has a rule for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip(
    "torchao.quantization", reason="of torchao 0.18 and torch 2.10", exc_type=ImportError
)
from torchao.float8.float8_linear import LinearMMConfig
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor
from torchao.prototype.moe_training.config import Float8TrainingOpConfig, MXFP8TrainingOpConfig
from torchao.prototype.moe_training.tensor import (
    Float8TrainingWeightWrapperTensor,
    MXFP8TrainingWeightWrapperTensor,
)
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int4Tensor,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    quantize_,
)
from torchao.quantization.granularity import PerGroup, PerTensor

ROWS, COLUMNS = 512, 256


def quantized(config: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def make(values: torch.Tensor) -> torch.Tensor:
        linear = nn.Linear(*values.shape[::-1], bias=False, dtype=values.dtype)
        with torch.no_grad():
            linear.weight.copy_(values)
        quantize_(linear, config)
        return linear.weight.data

    return make


def int4(values: torch.Tensor) -> torch.Tensor:
    """Int4Tensor.from_hp needs a GPU: fill the inner tensors with bits of the values."""
    rows, columns = values.shape
    bits = values.contiguous().view(torch.int8)[:, : columns // 2].clone()
    scale = values[:, ::32].t().contiguous()
    return Int4Tensor(bits, scale, scale * 2, [1, 32], torch.Size((rows, columns)))


MAKERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "int8": quantized(Int8WeightOnlyConfig()),
    "int8, activations": quantized(Int8DynamicActivationInt8WeightConfig()),
    "int8, one scale": quantized(Int8WeightOnlyConfig(granularity=PerTensor())),
    "float8": quantized(Float8WeightOnlyConfig()),
    "intx": quantized(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))),
    "int4": int4,
    "mxfp8": lambda w: MXTensor.to_mx(w, torch.float8_e4m3fn, 32),
    "mxfp4": lambda w: MXTensor.to_mx(w, torch.float4_e2m1fn_x2, 32),
    "mxfp8, swizzled": lambda w: MXTensor.to_mx(
        w, torch.float8_e4m3fn, 32, is_swizzled_scales=True
    ),
    "nvfp4": lambda w: NVFP4Tensor.to_nvfp4(w),
    "nvfp4, swizzled": lambda w: NVFP4Tensor.to_nvfp4(
        w, per_tensor_scale=w.abs().max().float() / 2688, is_swizzled_scales=True
    ),
    "float8 training": lambda w: WeightWithDynamicFloat8CastTensor(
        w, LinearMMConfig(), torch.float8_e4m3fn
    ),
    "float8 experts": lambda w: Float8TrainingWeightWrapperTensor(w, Float8TrainingOpConfig()),
    "mxfp8 experts": lambda w: MXFP8TrainingWeightWrapperTensor(w, MXFP8TrainingOpConfig()),
}
TRAINING = ("float8 training", "float8 experts", "mxfp8 experts")
"""Wrappers of plain weights. They are saved as what they wrap."""


def values(seed: int = 0, rows: int = ROWS, columns: int = COLUMNS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, dtype=torch.bfloat16, generator=generator)


class Holder(nn.Module):
    """A module with one weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)


def bits(tensor: Any) -> dict[str, Any]:
    """Return the bytes, shapes and dtypes of the inner tensors of a tensor."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    if not hasattr(tensor, "__tensor_flatten__"):
        data = tensor.detach()
        raw = data.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {"": (data.dtype, tuple(data.shape), data.stride(), raw)}
    found: dict[str, Any] = {}
    for key in tensor.__tensor_flatten__()[0]:
        for inner, value in bits(getattr(tensor, key)).items():
            found[f"{key}.{inner}"] = value
    return found
