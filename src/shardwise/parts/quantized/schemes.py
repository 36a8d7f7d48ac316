"""Block-scaled tensors: small numbers, of which those of a block share a scale.

Three schemes are known, by the names and dtypes of the tensors:

- block FP8 of DeepSeek: `weight` in FP8, and `weight_scale_inv` with a scale for each 128 × 128
  elements. Blocks at the edges may be partial.
- FP8 of compressed-tensors: `weight` in FP8, and `weight_scale` with one scale for the tensor, for
  each row, or for each block.
- MXFP4 of gpt-oss: `up_blocks` with two 4-bit numbers in each byte, 16 bytes a block, and
  `up_scales` with an exponent for each block. As in transformers, `up` has the rows as columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardwise.kernel.manifest.layout import Layout
from shardwise.kernel.manifest.manifest import TensorEntry

FP8 = ("float8_e4m3fn", "float8_e5m2")
_FLOAT_SCALES = ("float32", "bfloat16", "float16")
_EXPONENTS = ("float8_e8m0fnu", "uint8")
BLOCK_SIZE = (128, 128)
MXFP4_BYTES = 16
"""The bytes of a block in MXFP4, which hold 32 numbers."""
_ENDS = (
    ("_blocks", "_scales", True),
    ("", "_scale_inv", False),
    ("", "_scale", False),
    (".weight", ".scale", False),
    (".weight", ".qscale_weight", False),
)
"""How the names of a tensor and of its scales end, and whether the scheme is MXFP4."""


@dataclass(frozen=True, slots=True)
class BlockScaled:
    """A tensor that is stored as small numbers and scales.

    Attributes:
        name: the name of the tensor, which in MXFP4 is not the name of the numbers.
        shape: the shape of the tensor.
        data: the stored numbers.
        scales: the stored scales.
        block: the elements of `data` along each dimension that share a scale.
        is_mxfp4: whether `data` has packed 4-bit numbers.
        rounds_to: the dtype to which the product is rounded before it is converted to that of the
            target; "" for none.
        problem: why the values cannot be computed; "" if they can.
    """

    name: str
    shape: tuple[int, ...]
    data: TensorEntry
    scales: TensorEntry
    block: tuple[int, ...] = ()
    is_mxfp4: bool = False
    rounds_to: str = ""
    problem: str = ""


def find_block_scaled(layout: Layout) -> list[BlockScaled]:
    """Return the block-scaled tensors of a checkpoint, also those with a problem."""
    entries = {each.name: each for each in layout.tensors}
    means = {layout.tensors[index].name for index in layout.terms_of}
    found = {}
    for scales in layout.tensors:
        for data_end, scales_end, is_mxfp4 in _ENDS:
            if scales.name.endswith(scales_end):
                stem = scales.name.removesuffix(scales_end)
                data = entries.get(f"{stem}{data_end}")
                if data is not None and data.name != scales.name and _is_small(data, is_mxfp4):
                    describe = _describe_mxfp4 if is_mxfp4 else _describe_fp8
                    each = describe(stem if is_mxfp4 else data.name, data, scales)
                    if f"{data.name}_zero_point" in entries:
                        each = _refused(each, "it has zero points, which FP8 does not need")
                    found[data.name] = each
                    break
    for tied in layout.tensors:
        if tied.same_as in found and tied.name not in found:
            owner = found[tied.same_as]
            if not owner.is_mxfp4:
                found[tied.name] = _describe_fp8(tied.name, tied, owner.scales)
    return [*_refuse_means(found, means)]


def _is_small(data: TensorEntry, is_mxfp4: bool) -> bool:
    return data.dtype == "uint8" if is_mxfp4 else data.dtype in FP8


def _refuse_means(found: Mapping[str, BlockScaled], means: set[str]) -> Iterator[BlockScaled]:
    for each in found.values():
        averaged = sorted({each.data.name, each.scales.name} & means)
        yield _refused(each, f"{averaged[0]} is the mean of several tensors") if averaged else each


def _refused(each: BlockScaled, problem: str) -> BlockScaled:
    return BlockScaled(each.name, each.shape, each.data, each.scales, problem=problem)


def _describe_fp8(name: str, data: TensorEntry, scales: TensorEntry) -> BlockScaled:
    shape = data.shape
    is_inverse = not scales.name.endswith("_scale")  # the names of DeepSeek and its like
    block = _block_of(shape, scales.shape, is_inverse)
    problem = ""
    if scales.dtype not in (*_FLOAT_SCALES, *(_EXPONENTS if is_inverse else ())):
        problem = f"the scales {scales.name} have the dtype {scales.dtype}"
    elif block is None:
        expected = _expected_shapes(shape, is_inverse)
        problem = (
            f"the scales {scales.name} have the shape {list(scales.shape)}, but values of the "
            f"shape {list(shape)} need {expected}"
        )
    # transformers multiplies experts in float32, and lets compressed-tensors decompress the rest.
    is_rounded = not is_inverse and ".experts." not in name
    rounds_to = scales.dtype if is_rounded and scales.dtype != "float32" else ""
    return BlockScaled(name, shape, data, scales, block or (), False, rounds_to, problem)


def _block_of(
    shape: tuple[int, ...], scales: tuple[int, ...], is_inverse: bool
) -> tuple[int, ...] | None:
    """Return the block of elements that share a scale; None if the scales do not fit."""
    is_single = scales in ((), (1,)) or (not is_inverse and math.prod(scales) == 1)
    if is_single and len(scales) <= max(1, len(shape)):
        return tuple(max(1, n) for n in shape)
    if len(shape) < 2 or len(scales) != len(shape):
        return None
    *outer, rows, columns = shape
    if not is_inverse and scales == (*outer, rows, 1):
        return (*[1] * len(outer), 1, max(1, columns))
    block = (*[1] * len(outer), *BLOCK_SIZE)
    return block if scales == _grid(shape, block) else None


def _grid(shape: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-n // b) for n, b in zip(shape, block, strict=True))


def _expected_shapes(shape: tuple[int, ...], is_inverse: bool) -> str:
    if len(shape) < 2:
        return "[1]: one scale for all"
    block = (*[1] * (len(shape) - 2), *BLOCK_SIZE)
    blocks = f"{list(_grid(shape, block))} for blocks of {BLOCK_SIZE[0]} x {BLOCK_SIZE[1]}"
    rows = "" if is_inverse else f", {[*shape[:-1], 1]} for rows"
    return f"{blocks}{rows}, or [1] for all"


def _describe_mxfp4(name: str, data: TensorEntry, scales: TensorEntry) -> BlockScaled:
    shape = data.shape
    problem = ""
    if len(data.shape) == 4:
        experts, rows, groups, size = data.shape
        shape = (experts, groups * size * 2, rows)
    if len(data.shape) != 4 or data.shape[-1] != MXFP4_BYTES:
        problem = (
            f"{data.name} has the shape {list(data.shape)}, but the blocks of MXFP4 have four "
            f"dimensions, the last of {MXFP4_BYTES} bytes"
        )
    elif scales.dtype not in _EXPONENTS:
        problem = f"the scales {scales.name} have the dtype {scales.dtype}"
    elif scales.shape != data.shape[:-1]:
        problem = (
            f"the scales {scales.name} have the shape {list(scales.shape)}, but blocks of the "
            f"shape {list(data.shape)} need {list(data.shape[:-1])}"
        )
    block = (1, 1, 1, MXFP4_BYTES)
    return BlockScaled(name, shape, data, scales, block, True, problem=problem)
