"""Objects that tensors of torchao 0.18 keep: the members of enums, and the fields of tuples.

Files have the values of members and the items of tuples, but not their names. torchao need not be
installed where such files are read.
"""

from __future__ import annotations

from collections.abc import Mapping

_QUANTIZE = "torchao.quantization.quantize_"
_SCALING_MODE = "torchao.prototype.mx_formats.config:ScaleCalculationMode"

MEMBERS: Mapping[str, Mapping[object, str]] = {
    "torchao.quantization.quant_primitives:MappingType": {
        1: "SYMMETRIC",
        2: "SYMMETRIC_NO_CLIPPING_ERR",
        3: "ASYMMETRIC",
    },
    f"{_QUANTIZE}.common.kernel_preference:KernelPreference": {
        name.lower(): name for name in ("AUTO", "TORCH", "MSLK", "EMULATED", "TRITON")
    },
    _SCALING_MODE: {name.lower(): name for name in ("FLOOR", "RCEIL", "CEIL", "EVEN")},
}
"""For each enum, the name of the member that has a value."""
FIELDS: Mapping[str, tuple[str, ...]] = {
    "torchao.float8.inference:Float8MMConfig": ("emulate", "use_fast_accum", "pad_inner_dim"),
}
"""For each named tuple, the names of its fields."""

_OF_TENSORS = {
    **dict.fromkeys(
        ("Float8Tensor", "Int4Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor"),
        "torchao.quantization",
    ),
    "MXTensor": "torchao.prototype.mx_formats.mx_tensor",
    "NVFP4Tensor": "torchao.prototype.mx_formats.nvfp4_tensor",
}
_OF_OBJECTS = {
    "Float8MMConfig": "torchao.float8.inference",
    "KernelPreference": f"{_QUANTIZE}.common.kernel_preference",
    "MappingType": "torchao.quantization.quant_primitives",
    "PerRow": "torchao.quantization.granularity",
    "PerTensor": "torchao.quantization.granularity",
    "QuantizeTensorToFloat8Kwargs": f"{_QUANTIZE}.workflows.float8.float8_tensor",
    "QuantizeTensorToInt8Kwargs": f"{_QUANTIZE}.workflows.int8.int8_tensor",
    "QuantizeTensorToMXKwargs": "torchao.prototype.mx_formats.mx_tensor",
    "QuantizeTensorToNVFP4Kwargs": "torchao.prototype.mx_formats.nvfp4_tensor",
    "ScaleCalculationMode": "torchao.prototype.mx_formats.config",
}
TENSORS_IN_SAFETENSORS = {name: f"{module}:{name}" for name, module in _OF_TENSORS.items()}
"""For each name of a class of tensors in torchao's metadata of safetensors, the class."""
OBJECTS_IN_SAFETENSORS = {name: f"{module}:{name}" for name, module in _OF_OBJECTS.items()}
"""For each name of another class in torchao's metadata of safetensors, the class."""
