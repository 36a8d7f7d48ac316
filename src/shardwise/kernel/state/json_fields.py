"""Encode values that JSON lacks, such as arrays and enum members, as fields of a JSON object.

Functions that decode do not trust the fields. For invalid fields, they raise ValueError, TypeError,
LookupError or RuntimeError, before they allocate more memory than the text takes.
"""

from __future__ import annotations

import base64
import collections
import datetime
import enum
import math
import pathlib
import re
import sys
from dataclasses import is_dataclass
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader

Fields: TypeAlias = dict[str, Any]
JsonValue: TypeAlias = Any
Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_MOST_DIMS = 64
_LARGEST_DIM = 2**62
# The codes that NumPy writes for dtypes of numbers. numpy.dtype() accepts much other text, and
# evaluates some of this text.
_DTYPE = re.compile(r"[<>|][biufc]\d{1,2}")


def is_numeric(dtype: np.dtype[Any]) -> bool:
    """Return whether arrays of this dtype can be saved."""
    return _DTYPE.fullmatch(dtype.str) is not None


def tensor_fields(tensor: torch.Tensor) -> Fields | None:
    """Return the fields of a tensor: `dtype`, `shape` and `v`, its bytes.

    The result is None if the tensor is sparse, quantized or on the meta device.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        return None
    whole = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    data = whole.reshape(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b""
    return {"dtype": dtype_text(tensor.dtype), "shape": list(tensor.shape), "v": bytes_text(data)}


def tensor_of(fields: Fields) -> torch.Tensor:
    """Return a new CPU tensor from its fields."""
    shape, dtype = _shape(fields["shape"]), dtype_of(fields["dtype"])
    if fields["dtype"].startswith("q"):
        raise ValueError("quantized tensors cannot be saved")
    data = _decode_numbers("|u1", (math.prod(shape) * dtype.itemsize,), fields["v"])
    if not len(data):
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.from_numpy(data).view(dtype).reshape(shape)


def array_fields(array: Array) -> Fields | None:
    """Return the fields of an array: `dtype`, `shape` and `v`; None if it does not hold numbers."""
    if not is_numeric(array.dtype):
        return None
    data = bytes_text(array.tobytes())
    return {"dtype": array.dtype.str, "shape": list(array.shape), "v": data}


def array_of(fields: Fields) -> Array:
    """Return a new array from its fields."""
    return _decode_numbers(require_text(fields["dtype"]), _shape(fields["shape"]), fields["v"])


def scalar_fields(scalar: np.generic) -> Fields | None:
    """Return the fields of a NumPy scalar: `dtype` and `v`; None if it is not a number."""
    if not is_numeric(scalar.dtype):
        return None
    return {"dtype": scalar.dtype.str, "v": bytes_text(scalar.tobytes())}


def scalar_of(fields: Fields) -> object:
    """Return a NumPy scalar from its fields."""
    return _decode_numbers(require_text(fields["dtype"]), (), fields["v"])[()]


def dtype_text(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype."""
    return str(dtype).removeprefix("torch.")


def dtype_of(text: object) -> torch.dtype:
    """Return the dtype of this name."""
    # Not getattr(), which makes the torch module import submodules.
    found = vars(torch).get(require_text(text))
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no dtype {str(text)[:40]!r}")
    return found


def bytes_text(data: bytes) -> str:
    """Return bytes as base64."""
    return base64.b64encode(data).decode()


def bytes_of(text: object) -> bytes:
    """Return the bytes of a base64 text."""
    return base64.b64decode(require_text(text), validate=True)


def require_text(value: object) -> str:
    """Return a value after checking that it is text.

    Raises:
        TypeError: the value is not text.
    """
    if not isinstance(value, str):
        raise TypeError(f"expected text, not {type(value).__name__}")
    return value


def _shape(encoded: object) -> tuple[int, ...]:
    if (
        not isinstance(encoded, list)
        or len(encoded) > _MOST_DIMS
        or not all(type(n) is int and 0 <= n < _LARGEST_DIM for n in encoded)
    ):
        raise ValueError(
            f"shape {str(encoded)[:40]}: expected a list of up to {_MOST_DIMS} integers, from 0 "
            f"to {_LARGEST_DIM - 1}"
        )
    return tuple(encoded)


def _decode_numbers(dtype: str, shape: tuple[int, ...], text: object) -> Array:
    if not _DTYPE.fullmatch(dtype):
        raise ValueError(f"{dtype[:40]!r} is not a dtype of numbers")
    numpy_dtype, data = np.dtype(dtype), bytes_of(text)
    needed = math.prod(shape) * numpy_dtype.itemsize
    if len(data) != needed:
        raise ValueError(
            f"it has {len(data)} bytes, but {dtype} of shape {list(shape)} needs {needed}"
        )
    return np.frombuffer(bytearray(data), numpy_dtype).reshape(shape)


def enum_fields(member: enum.Enum) -> Fields | None:
    """Return the fields of an enum member: `class` and `v`; None if it has no unique name."""
    enum_class = type(member)
    path = f"{enum_class.__module__}:{enum_class.__qualname__}"
    if _find_imported(path) is not enum_class or member.name not in enum_class.__members__:
        return None
    return {"class": path, "v": member.name}


def enum_of(fields: Fields) -> enum.Enum:
    """Return an enum member from its fields. The function imports nothing and runs no code.

    Raises:
        LookupError: the process has not imported the enum, or the enum has no such member.
    """
    path, name = require_text(fields["class"]), require_text(fields["v"])
    enum_class = _find_imported(path)
    if not (isinstance(enum_class, type) and issubclass(enum_class, enum.Enum)):
        raise LookupError(
            f"the saved value is a member of {path[:200]}, which is not an enum that this process "
            "has imported: import its module before the load"
        )
    if name not in enum_class.__members__:
        raise LookupError(
            f"the saved value is {name[:200]!r} of the enum {path[:200]}, which has no such "
            "member: add it"
        )
    return enum_class.__members__[name]


def _find_imported(path: str) -> object:
    """Return the object at `module:qualname`, if the module is imported; None otherwise."""
    module, _, qualname = path.partition(":")
    found: object = sys.modules.get(module)
    for part in qualname.split("."):
        found = vars(found).get(part) if isinstance(found, (ModuleType, type)) else None
    return found


_ADVICE_BY_TYPE: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (enum.Enum, "is not a named member of an importable enum: save its value"),
    ((set, frozenset), "has no order and cannot be saved: save sorted(value)"),
    (pathlib.PurePath, "cannot be saved: save str(value)"),
    (torch.Generator, "cannot be saved: save generator.get_state()"),
    (np.random.Generator, "cannot be saved: save generator.bit_generator.state"),
    ((datetime.date, datetime.time), "cannot be saved: save value.isoformat()"),
    (datetime.timedelta, "cannot be saved: save value.total_seconds()"),
    (collections.deque, "cannot be saved: save list(value)"),
    (DataLoader, "has no state to save: use a loader of shardwise.data, see docs/data.md"),
    (torch.Tensor, "is sparse, quantized or on the meta device and cannot be saved: save it dense"),
    ((np.ndarray, np.generic), "has a dtype that cannot be saved: only numbers can"),
)
_PLAIN_TYPES = (int, float, complex, str, bytes, bytearray, list, tuple, dict)


def why_unsavable(value: object) -> str:
    """Return why a value cannot be saved, and what to save in its place."""
    value_type = type(value)
    type_name = f"{value_type.__module__}.{value_type.__qualname__}"
    if isinstance(value, np.ndarray) and value_type not in (np.ndarray, np.memmap):
        return f"{type_name} would come back as a plain array: save np.asarray(value), and its mask"
    for refused, advice in _ADVICE_BY_TYPE:
        if isinstance(value, refused):
            return f"{type_name} {advice}"
    if is_dataclass(value):
        return f"{type_name}, a dataclass, cannot be saved: save dataclasses.asdict(value)"
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return f"{type_name} would come back as a plain tuple: save tuple(value) or value._asdict()"
    if value_type is int:
        return "an int of more digits than Python converts to text cannot be saved: save bytes"
    for plain in _PLAIN_TYPES:
        if isinstance(value, plain):
            name = plain.__name__
            return f"{type_name} would come back as a plain {name}: save {name}(value)"
    return (
        f"{type_name} cannot be saved: give it state_dict() and load_state_dict(), save plain "
        "values, or pass allow_pickle=True when saving and when loading"
    )
