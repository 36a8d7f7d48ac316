"""Tensors, arrays, numpy scalars and enum members as fields of a JSON object.

Readers do not trust the fields. Each raises ValueError, TypeError, LookupError or RuntimeError for
fields that no writer here makes, before it allocates more memory than the text takes.
"""

from __future__ import annotations

import base64
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

Fields: TypeAlias = dict[str, Any]
Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_MOST_DIMS = 64
_MOST_LENGTH = 2**62
# What numpy writes for numbers. numpy.dtype() parses much more, and evaluates some of it.
_DTYPE = re.compile(r"[<>|][biufc]\d{1,2}")


def is_numeric(dtype: np.dtype[Any]) -> bool:
    """Return whether arrays of this dtype can be saved."""
    return _DTYPE.fullmatch(dtype.str) is not None


def tensor_fields(tensor: torch.Tensor) -> Fields | None:
    """Return `dtype`, `shape` and `v`; None if sparse, quantized or on the meta device."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        return None
    whole = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    data = whole.reshape(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b""
    return {"dtype": dtype_text(tensor.dtype), "shape": list(tensor.shape), "v": bytes_text(data)}


def tensor_of(fields: Fields) -> torch.Tensor:
    """Return a new CPU tensor."""
    shape, dtype = _shape(fields["shape"]), dtype_of(fields["dtype"])
    if fields["dtype"].startswith("q"):
        raise ValueError("quantized tensors cannot be saved")
    data = _numbers("|u1", (math.prod(shape) * dtype.itemsize,), fields["v"])
    if not len(data):
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.from_numpy(data).view(dtype).reshape(shape)


def array_fields(array: Array) -> Fields | None:
    """Return `dtype`, `shape` and `v`; None if the array does not hold numbers."""
    if not is_numeric(array.dtype):
        return None
    data = bytes_text(array.tobytes())
    return {"dtype": array.dtype.str, "shape": list(array.shape), "v": data}


def array_of(fields: Fields) -> Array:
    """Return a new array."""
    return _numbers(text_of(fields["dtype"]), _shape(fields["shape"]), fields["v"])


def scalar_fields(scalar: np.generic) -> Fields | None:
    """Return `dtype` and `v`; None if the scalar is not a number."""
    if not is_numeric(scalar.dtype):
        return None
    return {"dtype": scalar.dtype.str, "v": bytes_text(scalar.tobytes())}


def scalar_of(fields: Fields) -> object:
    """Return the numpy scalar."""
    return _numbers(text_of(fields["dtype"]), (), fields["v"])[()]


def dtype_text(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype."""
    return str(dtype).removeprefix("torch.")


def dtype_of(text: object) -> torch.dtype:
    """Return the dtype of this name."""
    # Not getattr(), which makes the torch module import submodules.
    found = vars(torch).get(text_of(text))
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no dtype {str(text)[:40]!r}")
    return found


def bytes_text(data: bytes) -> str:
    """Return bytes as base64."""
    return base64.b64encode(data).decode()


def bytes_of(text: object) -> bytes:
    """Return the bytes of a base64 text."""
    return base64.b64decode(text_of(text), validate=True)


def text_of(value: object) -> str:
    """Return the value if it is text.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} where text is needed")
    return value


def list_of(value: object) -> list[Any]:
    """The value, if it is a list."""
    if not isinstance(value, list):
        raise TypeError(f"{type(value).__name__} where a list is needed")
    return value


def _shape(encoded: object) -> tuple[int, ...]:
    shape = list_of(encoded)
    if len(shape) > _MOST_DIMS or not all(type(n) is int and 0 <= n < _MOST_LENGTH for n in shape):
        raise ValueError("invalid shape")
    return tuple(shape)


def _numbers(dtype: str, shape: tuple[int, ...], text: object) -> Array:
    if not _DTYPE.fullmatch(dtype):
        raise ValueError(f"{dtype[:40]!r} is not a dtype of numbers")
    kind, data = np.dtype(dtype), bytes_of(text)
    if len(data) != math.prod(shape) * kind.itemsize:
        raise ValueError(f"{len(data)} bytes are not {dtype} of shape {list(shape)}")
    return np.frombuffer(bytearray(data), kind).reshape(shape)


def member_fields(member: enum.Enum) -> Fields | None:
    """Return `class` and `v`; None if the member cannot be found by its name."""
    made = type(member)
    place = f"{made.__module__}:{made.__qualname__}"
    if _imported(place) is not made or member.name not in made.__members__:
        return None
    return {"class": place, "v": member.name}


def member_of(fields: Fields) -> enum.Enum:
    """Return the member of an enum that this process has imported. Runs no code.

    Raises:
        LookupError: no such enum is imported, or it has no such member.
    """
    place, name = text_of(fields["class"]), text_of(fields["v"])
    made = _imported(place)
    if not (isinstance(made, type) and issubclass(made, enum.Enum)):
        raise LookupError(f"{place[:200]} is not an imported enum: import it first")
    if name not in made.__members__:
        raise LookupError(f"{place} has no member {name[:200]!r}")
    return made.__members__[name]


def _imported(place: str) -> object:
    module, _, qualname = place.partition(":")
    found: object = sys.modules.get(module)
    for part in qualname.split("."):
        found = vars(found).get(part) if isinstance(found, (ModuleType, type)) else None
    return found


_INSTEAD: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (enum.Enum, "is not a named member of an importable enum: save its value"),
    ((set, frozenset), "has no order and cannot be saved: save sorted(value)"),
    (pathlib.PurePath, "cannot be saved: save str(value)"),
    (torch.Generator, "cannot be saved: save generator.get_state()"),
    (torch.Tensor, "is sparse, quantized or on the meta device and cannot be saved: save it dense"),
    ((np.ndarray, np.generic), "has a dtype that cannot be saved: only numbers can"),
)
_PLAIN = (int, float, complex, str, bytes, bytearray, list, tuple, dict)


def refusal(value: object) -> str:
    """Return why a value cannot be saved, and what to save instead."""
    made = type(value)
    kind = f"{made.__module__}.{made.__qualname__}"
    for refused, instead in _INSTEAD:
        if isinstance(value, refused):
            return f"{kind} {instead}"
    if is_dataclass(value):
        return f"{kind}, a dataclass, cannot be saved: save dataclasses.asdict(value)"
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return f"{kind} would come back as a plain tuple: save tuple(value) or value._asdict()"
    if made is int:
        return "an int of more digits than Python converts to text cannot be saved: save bytes"
    for plain in _PLAIN:
        if isinstance(value, plain):
            name = plain.__name__
            return f"{kind} would come back as a plain {name}: save {name}(value)"
    return (
        f"{kind} cannot be saved: give it state_dict() and load_state_dict(), save plain values, "
        "or pass allow_pickle=True when saving and when loading"
    )
