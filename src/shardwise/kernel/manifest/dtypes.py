"""Element types: torch's names, their sizes, and safetensors' codes for them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DType:
    """An element type.

    Attributes:
        itemsize: the size of an element, in bytes.
        safetensors_code: the code of the type in safetensors; None if safetensors lacks the type.
    """

    itemsize: int
    safetensors_code: str | None = None


_PACKED = [f"{sign}{bits}" for sign in ("int", "uint") for bits in range(1, 8)]
_BITS = ["bits8", "bits1x8", "bits2x4", "bits4x2"]

DTYPES: dict[str, DType] = {
    "float64": DType(8, "F64"),
    "float32": DType(4, "F32"),
    "float16": DType(2, "F16"),
    "bfloat16": DType(2, "BF16"),
    "float8_e4m3fn": DType(1, "F8_E4M3"),
    "float8_e5m2": DType(1, "F8_E5M2"),
    "float8_e4m3fnuz": DType(1),
    "float8_e5m2fnuz": DType(1),
    "float8_e8m0fnu": DType(1),
    "float4_e2m1fn_x2": DType(1),
    "int64": DType(8, "I64"),
    "int32": DType(4, "I32"),
    "int16": DType(2, "I16"),
    "int8": DType(1, "I8"),
    "uint64": DType(8, "U64"),
    "uint32": DType(4, "U32"),
    "uint16": DType(2, "U16"),
    "uint8": DType(1, "U8"),
    "bool": DType(1, "BOOL"),
    "complex128": DType(16),
    "complex64": DType(8, "C64"),
    "complex32": DType(4),
    "bcomplex32": DType(4),
    "bits16": DType(2),
    **{name: DType(1) for name in _PACKED + _BITS},
}
"""All types that a checkpoint can contain. Types without a code are stored as bytes (`U8`)."""
