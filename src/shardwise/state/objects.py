"""Plain Python values to JSON values and back, without pickle.

What JSON has is itself: None, bool, int, finite float, str, list, and dict with names as keys.
Everything else is `{"$": kind, …}`; docs/format.md lists the kinds.
"""

from __future__ import annotations

import base64
import binascii
import enum
import math
import pickle
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

import numpy as np
import torch

from shardwise.errors import StateError

JsonValue = Any
OnTensor = Callable[[str, Any], None]
GetTensor = Callable[[str], torch.Tensor]

TAG = "$"
DEEPEST = 200
_INT64 = 2**63


def encode(
    value: object,
    name: str,
    on_tensor: OnTensor | None = None,
    *,
    allow_pickle: bool = False,
) -> JsonValue:
    """A plain value as a JSON value.

    Args:
        name: dotted name of the value; it is extended on the way down.
        on_tensor: is given each tensor and array, with its name, and only the name stays behind.
            Without it, tensors are stored inline.
        allow_pickle: store what has no plain form as pickle.

    Raises:
        StateError: a value has no plain form; names it, and says what to do.
    """
    return _Encoder(on_tensor, allow_pickle).encode(value, name, 0)


def decode(
    encoded: JsonValue,
    name: str,
    get_tensor: GetTensor | None = None,
    *,
    allow_pickle: bool = False,
) -> object:
    """The inverse of `encode`. The input is not trusted.

    Args:
        get_tensor: gives the tensors that were handed to `on_tensor`, by their names.
        allow_pickle: unpickle what was stored as pickle, which runs code from the file.

    Raises:
        StateError: it is malformed, or holds pickle and `allow_pickle` is not set.
    """
    return _Decoder(get_tensor, allow_pickle).decode(encoded, name, 0)


def differences(a: JsonValue, b: JsonValue, name: str) -> list[str]:
    """The dotted names at which two encoded values differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = dict.fromkeys([*a, *b])
        return [
            line
            for key in keys
            for line in (
                differences(a[key], b[key], f"{name}.{key}")
                if key in a and key in b
                else [f"{name}.{key}"]
            )
        ]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return [line for i, (x, y) in pairs for line in differences(x, y, f"{name}.{i}")]
    return [] if type(a) is type(b) and a == b else [name]


@dataclass(slots=True)
class _Encoder:
    on_tensor: OnTensor | None
    allow_pickle: bool

    def encode(self, value: object, name: str, depth: int) -> JsonValue:
        if depth > DEEPEST:
            raise StateError(f"{name}: nested more than {DEEPEST} deep, or within itself")
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return _checked_text(value, name) if kind is str else value
        if kind is int:
            return value if -_INT64 <= value < _INT64 else {TAG: "int", "v": str(value)}  # type: ignore[operator]
        if kind is float:
            return value if math.isfinite(value) else {TAG: "float", "v": repr(value)}  # type: ignore[arg-type]
        if kind is list:
            return self._items(value, name, depth)
        if kind is dict and all(type(key) is str for key in value) and TAG not in value:  # type: ignore[attr-defined,operator]
            return {
                _checked_text(key, name): self.encode(item, f"{name}.{key}", depth + 1)
                for key, item in value.items()  # type: ignore[attr-defined]
            }
        return self._tagged(value, name, depth)

    def _tagged(self, value: Any, name: str, depth: int) -> JsonValue:
        if isinstance(value, enum.Enum):
            place = f"{type(value).__module__}:{type(value).__qualname__}"
            return {TAG: "enum", "class": place, "v": value.name}
        if isinstance(value, torch.Tensor):
            return self._tensor(value, name)
        if type(value) is np.ndarray:
            return self._array(value, name)
        if isinstance(value, np.generic) and value.dtype.kind in "biufc":
            return {TAG: "numpy", "dtype": value.dtype.str, "v": _to_text(value.tobytes())}
        if type(value) in (tuple, torch.Size):
            tag = "tuple" if type(value) is tuple else "size"
            return {TAG: tag, "v": self._items(value, name, depth)}
        if type(value) in _MAPPINGS:
            pairs = [
                [
                    self.encode(k, f"{name}.<key>", depth + 1),
                    self.encode(v, f"{name}.{k}", depth + 1),
                ]
                for k, v in value.items()
            ]
            return {TAG: _MAPPINGS[type(value)], "v": pairs}
        simple = _SIMPLE.get(type(value))
        if simple is not None:
            return {TAG: simple[0], "v": simple[1](value)}
        if self.allow_pickle:
            return {TAG: "pickle", "v": _to_text(pickle.dumps(value))}
        raise StateError(f"{name}: {_hint(value)}")

    def _items(self, values: Any, name: str, depth: int) -> list[JsonValue]:
        return [self.encode(v, f"{name}.{i}", depth + 1) for i, v in enumerate(values)]

    def _tensor(self, value: torch.Tensor, name: str) -> JsonValue:
        if self.on_tensor is not None:
            self.on_tensor(name, value)
            return {TAG: "tensor", "name": name}
        if hasattr(value, "placements"):
            raise StateError(f"{name}: a DTensor cannot be stored within a value of one rank")
        whole = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        data = whole.reshape(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b""
        dtype = str(value.dtype).removeprefix("torch.")
        return {TAG: "tensor", "dtype": dtype, "shape": list(value.shape), "v": _to_text(data)}

    def _array(self, value: np.ndarray[Any, np.dtype[Any]], name: str) -> JsonValue:
        if value.dtype.kind not in "biufc":
            raise StateError(f"{name}: numpy array of {value.dtype}: only numbers are stored")
        if self.on_tensor is not None:
            self.on_tensor(name, value)
            return {TAG: "array", "name": name}
        data = _to_text(np.ascontiguousarray(value).tobytes())
        return {TAG: "array", "dtype": value.dtype.str, "shape": list(value.shape), "v": data}


@dataclass(slots=True)
class _Decoder:
    get_tensor: GetTensor | None
    allow_pickle: bool

    def decode(self, encoded: JsonValue, name: str, depth: int) -> object:
        if depth > DEEPEST:
            raise StateError(f"{name}: nested more than {DEEPEST} deep")
        if encoded is None or isinstance(encoded, (bool, int, float, str)):
            return encoded
        if isinstance(encoded, list):
            return [self.decode(v, f"{name}.{i}", depth + 1) for i, v in enumerate(encoded)]
        if not isinstance(encoded, dict):
            raise StateError(f"{name}: {type(encoded).__name__} is no JSON value")
        if TAG not in encoded:
            return {k: self.decode(v, f"{name}.{k}", depth + 1) for k, v in encoded.items()}
        try:
            return self._tagged(encoded[TAG], encoded, name, depth)
        except (KeyError, TypeError, ValueError, OverflowError, binascii.Error) as error:
            if isinstance(error, StateError):
                raise
            raise StateError(f"{name}: malformed value ({error})") from error

    def _tagged(self, kind: object, encoded: dict[str, Any], name: str, depth: int) -> object:
        if kind in ("tensor", "array"):
            return self._tensor(kind == "array", encoded, name)
        if kind == "pickle":
            return self._pickle(encoded["v"], name)
        if kind == "enum":
            return _enum_member(_text(encoded["class"]), _text(encoded["v"]), name)
        if kind == "numpy":
            return _array_of(encoded["dtype"], (), encoded["v"], name)[()]
        if kind in ("tuple", "size"):
            items = self.decode(_list(encoded["v"]), name, depth + 1)
            return tuple(items) if kind == "tuple" else torch.Size(items)  # type: ignore[arg-type]
        for made, tag in _MAPPINGS.items():
            if kind == tag:
                return self._mapping(made, encoded["v"], name, depth)
        for tag, _, decoder in _SIMPLE.values():
            if kind == tag:
                return decoder(_text(encoded["v"]))
        raise StateError(f"{name}: unknown kind of value {str(kind)[:40]!r}")

    def _mapping(self, made: type[dict[Any, Any]], pairs: object, name: str, depth: int) -> object:
        items = made()
        for pair in _list(pairs):
            key, value = _list(pair)
            decoded = self.decode(key, f"{name}.<key>", depth + 1)
            items[decoded] = self.decode(value, f"{name}.{decoded}", depth + 1)
        return items

    def _tensor(self, array: bool, encoded: dict[str, Any], name: str) -> object:
        if "name" in encoded:
            if self.get_tensor is None:
                raise StateError(f"{name}: names a tensor where none can be")
            tensor = self.get_tensor(_text(encoded["name"]))
            return tensor.numpy() if array else tensor
        shape = tuple(_list(encoded["shape"]))
        if array:
            return _array_of(encoded["dtype"], shape, encoded["v"], name)
        dtype = getattr(torch, _text(encoded["dtype"]), None)
        if not isinstance(dtype, torch.dtype) or str(dtype).startswith("torch.q"):
            raise StateError(f"{name}: unknown dtype")
        data = _array_of("|u1", (_size(shape) * dtype.itemsize,), encoded["v"], name)
        if not len(data):
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(data).view(dtype).reshape(shape)

    def _pickle(self, data: object, name: str) -> object:
        if not self.allow_pickle:
            raise StateError(
                f"{name}: it was saved as pickle, which runs code from the file when it is loaded; "
                "if you trust the file, pass allow_pickle=True"
            )
        return pickle.loads(_from_text(data))


def _array_of(
    dtype: object, shape: tuple[int, ...], data: object, name: str
) -> np.ndarray[Any, np.dtype[Any]]:
    kind = np.dtype(_text(dtype))
    if kind.kind not in "biufc":
        raise StateError(f"{name}: dtype {kind} is not stored")
    content = _from_text(data)
    if len(content) != _size(shape) * kind.itemsize:
        raise StateError(f"{name}: {len(content)} bytes are not {kind} of shape {shape}")
    return np.frombuffer(bytearray(content), kind).reshape(shape)


def _size(shape: tuple[int, ...]) -> int:
    if not all(type(n) is int and n >= 0 for n in shape):
        raise StateError("a shape has only whole numbers")
    return math.prod(shape)


def _enum_member(place: str, member: str, name: str) -> object:
    module, _, qualname = place.partition(":")
    found: object = sys.modules.get(module)
    for part in qualname.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    if not (isinstance(found, type) and issubclass(found, enum.Enum)):
        raise StateError(
            f"{name}: a member of enum {place}, which is not imported: import it first"
        )
    if member not in found.__members__:
        raise StateError(f"{name}: enum {place} has no member {member}")
    return found.__members__[member]


def _hint(value: object) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if is_dataclass(value):
        return f"dataclass {kind} is not stored: save dataclasses.asdict(value)"
    if isinstance(value, (set, frozenset)):
        return f"{kind} has no order and is not stored: save sorted(value)"
    if isinstance(value, tuple):
        return f"{kind} would come back as a plain tuple: save tuple(value) or value._asdict()"
    if isinstance(value, dict):
        return f"{kind} would come back as a plain dict: save dict(value)"
    if isinstance(value, torch.Generator):
        return "a torch.Generator is not stored: save generator.get_state()"
    return (
        f"{kind} is not stored: give it state_dict() and load_state_dict(), save plain values, or "
        "pass allow_pickle=True when saving and when loading"
    )


def _checked_text(text: Any, name: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise StateError(f"{name}: text that is not valid Unicode: {error}") from error
    return str(text)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise StateError(f"{type(value).__name__} where text is needed")
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise StateError(f"{type(value).__name__} where a list is needed")
    return value


def _to_text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _from_text(text: object) -> bytes:
    return base64.b64decode(_text(text), validate=True)


def _dtype(text: str) -> torch.dtype:
    found = getattr(torch, text, None)
    if not isinstance(found, torch.dtype):
        raise StateError(f"torch has no dtype {text[:40]!r}")
    return found


def _complex(text: str) -> complex:
    return complex(text)


_MAPPINGS: Mapping[type[dict[Any, Any]], str] = {
    dict: "dict",
    OrderedDict: "ordered",
    Counter: "counter",
}

_SIMPLE: Mapping[type, tuple[str, Callable[[Any], str], Callable[[str], object]]] = {
    int: ("int", str, int),
    float: ("float", repr, float),
    complex: ("complex", repr, _complex),
    bytes: ("bytes", _to_text, _from_text),
    bytearray: ("bytearray", _to_text, lambda text: bytearray(_from_text(text))),
    torch.dtype: ("dtype", lambda value: str(value).removeprefix("torch."), _dtype),
    torch.device: ("device", str, torch.device),
}
