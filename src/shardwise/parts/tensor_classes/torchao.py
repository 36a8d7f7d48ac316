"""The tensor classes of torchao: how their inner tensors follow the tensor that they stand for.

Example: an `Int4Tensor` of 4,096 × 4,096 has two values in each byte of `qdata`, `(4096, 2048)`,
and one scale for each row and 128 columns. Its `scale` is transposed, `(32, 4096)`. So dimension 0
of the scale follows dimension 1 of the tensor in blocks of 128, and dimension 1 dimension 0.

The rules follow the classes of torchao 0.18.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardwise.ports.tensor_classes import Axis, Flat, Layout, Shape, TensorClass

_UNSPLIT = sys.maxsize
"""An alignment that no border inside of a tensor has."""
_ROWS_OF_TILE = 128


def rule(class_name: str) -> TensorClass | None:
    """Return the rule of a class of torchao, given its module and name."""
    return _RULES.get(class_name.rpartition(":")[2])


def _of_optimizer_state(
    outer: Shape, inner: Mapping[str, Shape], context: Any
) -> dict[str, Layout]:
    """Follow the flattened tensor with the scales of its blocks. The table of codes is the same.

    The codes have the shape of the tensor; those of 4 bits are flat, with two in each byte.
    """
    size = math.prod(outer)
    layouts: dict[str, Layout] = {"qmap": (Axis(None),)}
    for key, shape in inner.items():
        if key == "codes" and shape == outer:
            layouts[key] = tuple(map(Axis, range(len(outer))))
        elif key != "qmap" and len(shape) == 1 and shape[0] and size % shape[0] == 0:
            layouts[key] = Flat(size // shape[0])
    return layouts


def _in_blocks(outer: Shape, inner: Mapping[str, Shape], context: Any) -> dict[str, Layout]:
    """Follow each dimension in blocks. A scale may lack the dimensions that have only one block.

    Scales for the whole tensor have no layout: ranks share one if it has the same value on all.
    """
    sizes = context.get("block_size") if isinstance(context, Mapping) else None
    layouts: dict[str, Layout] = {}
    for key, shape in inner.items():
        dims = [*range(len(outer))]
        if len(shape) < len(outer) and isinstance(sizes, (list, tuple)):
            dims = [d for d, n in enumerate(sizes) if d < len(outer) and n < outer[d]]
        if math.prod(shape) > 1 and len(dims) == len(shape) and not key.startswith("act_"):
            layouts |= _divided(key, outer, shape, dims)
    return layouts


def _of_int4(outer: Shape, inner: Mapping[str, Shape], context: Any) -> dict[str, Layout]:
    """Follow the rows and packed columns with the codes, and with transposed scales."""
    dims = [*range(len(outer))]
    transposed = [*dims[:-2], *reversed(dims[-2:])]
    return {
        **_divided("qdata", outer, inner["qdata"], dims),
        **_divided("scale", outer, inner["scale"], transposed),
        **_divided("zero_point", outer, inner["zero_point"], transposed),
    }


def _of_microscaling(outer: Shape, inner: Mapping[str, Shape], context: Any) -> dict[str, Layout]:
    """Follow with the codes, and with one scale for each block. Swizzled scales lie in tiles.

    A tile has the scales of 128 rows in 32 rows of the scale, so shards of whole tiles of rows are
    possible.
    """
    layouts = _in_blocks(outer, inner, context)
    if context["is_swizzled_scales"]:
        layouts.pop("scale", None)
        rows, columns = inner["scale"] if len(inner["scale"]) == len(outer) == 2 else (0, 0)
        are_tiles = rows and columns and 4 * rows == outer[0] and outer[0] % _ROWS_OF_TILE == 0
        if are_tiles and outer[1] % columns == 0:
            across = Axis(1, outer[1] // columns, _UNSPLIT)
            layouts["scale"] = Axis(0, 4, _ROWS_OF_TILE), across
    return layouts


def _divided(key: str, outer: Shape, shape: Shape, dims: Sequence[int]) -> dict[str, Layout]:
    """Return the layout of an inner tensor whose sizes divide those of the outer dimensions."""
    pairs = [*zip(dims, shape, strict=len(dims) == len(shape))]
    if len(dims) != len(shape) or any(n == 0 or outer[d] % n for d, n in pairs):
        return {}
    return {key: tuple(Axis(d, outer[d] // n) for d, n in pairs)}


def _forget_scale(tensor: Any) -> None:
    """Let the next forward compute the scale of the loaded values anew."""
    tensor._precomputed_scale = None


def _named(*names: str) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return `context_of` for a context that is a dict.

    Attributes that the file lacks, because another version wrote it, are left out. A load then
    names them.
    """
    return lambda attributes: {name: attributes[name] for name in names if name in attributes}


def _listed(*names: str) -> Callable[[Mapping[str, Any]], list[Any]]:
    """Return `context_of` for a context that is a list."""
    return lambda attributes: [attributes[name] for name in names]


_CHOICES = ("kernel_preference", "use_triton_kernel")
_BLOCKS = TensorClass(_in_blocks, blocks_in="block_size", not_compared=_CHOICES)
_STATE = TensorClass(_of_optimizer_state)
_SCALED = TensorClass(_of_microscaling, not_compared=_CHOICES)
_TRAINING = TensorClass(_in_blocks, saved_as="_data")
_RULES = {
    "OptimState8bit": replace(_STATE, context_of=_listed("signed", "dtype")),
    "OptimStateFp8": replace(_STATE, context_of=_listed("dtype")),
    "OptimState4bit": replace(_STATE, shape_in=1, context_of=_listed("signed", "_shape", "dtype")),
    "Int8Tensor": replace(
        _BLOCKS, context_of=_named("block_size", "dtype", "act_quant_kwargs", "reduce_range")
    ),
    "Float8Tensor": replace(
        _BLOCKS,
        context_of=_named(
            "block_size", "mm_config", "act_quant_kwargs", "kernel_preference", "dtype"
        ),
    ),
    "IntxUnpackedToInt8Tensor": replace(
        _BLOCKS,
        context_of=_named("target_dtype", "block_size", "dtype", "activation_quantization"),
    ),
    "Int4Tensor": TensorClass(
        _of_int4,
        shape_in="shape",
        context_of=_named("block_size", "shape", "activation_dtype"),
    ),
    "MXTensor": replace(
        _SCALED,
        context_of=_named(
            *("elem_dtype", "block_size", "orig_dtype", "kernel_preference"),
            *("act_quant_kwargs", "is_swizzled_scales"),
        ),
    ),
    "NVFP4Tensor": replace(
        _SCALED,
        context_of=_named(
            *("block_size", "orig_dtype", "is_swizzled_scales", "use_triton_kernel"),
            "act_quant_kwargs",
        ),
    ),
    "WeightWithDynamicFloat8CastTensor": TensorClass(
        _in_blocks, saved_as="_tensor", after_load=_forget_scale
    ),
    "Float8TrainingWeightWrapperTensor": _TRAINING,
    "MXFP8TrainingWeightWrapperTensor": _TRAINING,
}
