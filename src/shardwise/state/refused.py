"""Why a value is not stored, and what to save instead."""

from __future__ import annotations

import enum
import pathlib
from dataclasses import is_dataclass

import numpy as np
import torch

_INSTEAD: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (enum.Enum, "is no named member of an enum that can be imported: save its value"),
    ((set, frozenset), "has no order and is not stored: save sorted(value)"),
    (pathlib.PurePath, "is not stored: save str(value)"),
    (torch.Generator, "is not stored: save generator.get_state()"),
    (torch.Tensor, "is sparse, quantized or without memory and is not stored: save it dense"),
    ((np.ndarray, np.generic), "has a dtype that is not stored: only numbers are"),
)
_PLAIN = (int, float, complex, str, bytes, bytearray, list, tuple, dict)


def why(value: object) -> str:
    """The reason and the remedy, for a value that has no plain form."""
    made = type(value)
    kind = f"{made.__module__}.{made.__qualname__}"
    for refused, instead in _INSTEAD:
        if isinstance(value, refused):
            return f"{kind} {instead}"
    if is_dataclass(value):
        return f"{kind}, a dataclass, is not stored: save dataclasses.asdict(value)"
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return f"{kind} would come back as a plain tuple: save tuple(value) or value._asdict()"
    if made is int:
        return "an int of more digits than Python turns into text is not stored: save its bytes"
    for plain in _PLAIN:
        if isinstance(value, plain):
            name = plain.__name__
            return f"{kind} would come back as a plain {name}: save {name}(value)"
    return (
        f"{kind} is not stored: give it state_dict() and load_state_dict(), save plain values, or "
        "pass allow_pickle=True when saving and when loading"
    )
