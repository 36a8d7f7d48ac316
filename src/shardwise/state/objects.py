"""Plain Python values as JSON values, without pickle.

None, bool, int, finite float, str, list, and dict with text as keys are themselves. Every other
value is `{"$": kind, …}`; docs/format.md lists the kinds.
"""

from __future__ import annotations

import enum
import math
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from shardwise.errors import ShardwiseError, StateError
from shardwise.state.fields import (
    Array,
    Fields,
    array_fields,
    array_of,
    bytes_of,
    bytes_text,
    dtype_of,
    dtype_text,
    is_numeric,
    list_of,
    member_fields,
    member_of,
    refusal,
    scalar_fields,
    scalar_of,
    tensor_fields,
    tensor_of,
    text_of,
)
from shardwise.state.keys import Keys

JsonValue: TypeAlias = Any
OnTensor = Callable[[str, Any], None]
GetTensor = Callable[[str], torch.Tensor]

TAG = "$"
DEEPEST = 200
_INT64 = 2**63
_ABSENT = object()


def encode(
    value: object,
    name: str,
    on_tensor: OnTensor | None = None,
    *,
    allow_pickle: bool = False,
) -> JsonValue:
    """Return a plain value as a JSON value.

    Args:
        name: dotted name of the value, for names of tensors and in errors.
        on_tensor: called with the name and value of each tensor and array, which is then encoded
            as its name. Without it, tensors are encoded inline.
        allow_pickle: pickle values that have no plain form.

    Raises:
        StateError: a value has no plain form, or two tensors have the same name.
    """
    give = None if on_tensor is None else _once_each(on_tensor)
    try:
        return _encode(value, _Encoding(name, 0, give, allow_pickle))
    except RecursionError as error:
        raise StateError(f"{name}: nested deeper than Python's stack allows here") from error


def decode(
    encoded: JsonValue,
    name: str,
    get_tensor: GetTensor | None = None,
    *,
    allow_pickle: bool = False,
) -> object:
    """Return the value that `encode` encoded. The input is not trusted.

    Args:
        get_tensor: returns a tensor by the name that `on_tensor` got.
        allow_pickle: unpickle pickled values, which runs code from the file.

    Raises:
        StateError: the input is malformed, or contains pickle and `allow_pickle` is not set.
    """
    try:
        return _decode(encoded, _Decoding(name, 0, get_tensor, allow_pickle))
    except RecursionError as error:
        raise StateError(f"{name}: nested deeper than Python's stack allows here") from error


def differences(a: JsonValue, b: JsonValue, name: str) -> list[str]:
    """Return the dotted names at which two encoded values differ."""
    found = []
    stack = [(name, a, b)]
    while stack:
        at, x, y = stack.pop()
        if isinstance(x, list) and isinstance(y, list) and len(x) == len(y):
            stack += reversed([(f"{at}.{i}", x[i], y[i]) for i in range(len(x))])
        elif not (isinstance(x, dict) and isinstance(y, dict)):
            if type(x) is not type(y) or x != y:
                found.append(at)
        elif TAG not in x and TAG not in y:
            keys = reversed(dict.fromkeys([*x, *y]))
            stack += [(f"{at}.{key}", x.get(key, _ABSENT), y.get(key, _ABSENT)) for key in keys]
        elif {**x, "v": None} != {**y, "v": None}:
            found.append(at)
        else:
            stack.append((at, x.get("v"), y.get("v")))
    return found


@dataclass(frozen=True, slots=True)
class _Encoding:
    """The position in a value while it is encoded, and the options."""

    name: str
    depth: int
    on_tensor: OnTensor | None
    allow_pickle: bool

    def within(self, part: object) -> _Encoding:
        name = f"{self.name}.{part}"
        return _Encoding(name, self.depth + 1, self.on_tensor, self.allow_pickle)

    def key(self) -> _Encoding:
        return _Encoding(f"{self.name}.<key>", self.depth + 1, _refuse_key, False)


@dataclass(frozen=True, slots=True)
class _Decoding:
    """The position in a value while it is decoded, and the options."""

    name: str
    depth: int
    get_tensor: GetTensor | None
    allow_pickle: bool

    def within(self, part: object) -> _Decoding:
        name = f"{self.name}.{part}"
        return _Decoding(name, self.depth + 1, self.get_tensor, self.allow_pickle)


def _encode(value: Any, at: _Encoding) -> JsonValue:
    if at.depth > DEEPEST:
        raise StateError(f"{at.name}: nested more than {DEEPEST} deep, or within itself")
    made = type(value)
    if value is None or made is bool:
        return value
    if made is str:
        return _valid(value, at)
    if (made is int and -_INT64 <= value < _INT64) or (made is float and math.isfinite(value)):
        return value
    if made is list:
        return _encode_items(value, at)
    if made is dict and TAG not in value and all(type(key) is str for key in value):
        return {_valid(key, at): _encode(item, at.within(key)) for key, item in value.items()}
    tag = _tag_of(value)
    fields = _KINDS[tag].encode(value, at) if tag else None
    if fields is not None:
        return {TAG: tag, **fields}
    if at.allow_pickle:
        return {TAG: "pickle", **_pickled(value, at)}
    raise StateError(f"{at.name}: {refusal(value)}")


def _decode(encoded: JsonValue, at: _Decoding) -> object:
    if at.depth > DEEPEST:
        raise StateError(f"{at.name}: nested more than {DEEPEST} deep")
    if encoded is None or isinstance(encoded, (bool, int, float, str)):
        return encoded
    if isinstance(encoded, list):
        return _decode_items(encoded, at)
    if not isinstance(encoded, dict):
        raise StateError(f"{at.name}: {type(encoded).__name__} is not a JSON value")
    if TAG not in encoded:
        return {key: _decode(item, at.within(key)) for key, item in encoded.items()}
    tag = encoded[TAG]
    if not isinstance(tag, str) or tag not in _KINDS:
        raise StateError(f"{at.name}: {str(tag)[:40]!r} is an unknown kind of value")
    try:
        return _KINDS[tag].decode(encoded, at)
    except (ShardwiseError, RecursionError):
        raise
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise StateError(f"{at.name}: this {tag} cannot be read: {error}") from error


def _tag_of(value: object) -> str | None:
    exact = _EXACT.get(type(value))
    return exact or next((tag for made, tag in _DERIVED if isinstance(value, made)), None)


def _valid(text: str, at: _Encoding) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise StateError(f"{at.name}: invalid Unicode text: {error}") from error
    return text


def _encode_items(values: Any, at: _Encoding) -> list[JsonValue]:
    return [_encode(value, at.within(i)) for i, value in enumerate(values)]


def _decode_items(encoded: object, at: _Decoding) -> list[Any]:
    return [_decode(value, at.within(i)) for i, value in enumerate(list_of(encoded))]


def _encode_pairs(value: Mapping[object, object], at: _Encoding) -> Fields:
    pairs = []
    for key, item in value.items():
        pairs.append([_encode(key, at.key()), _encode(item, at.within(key))])
    return {"v": pairs}


def _decode_pairs(encoded: Fields, at: _Decoding) -> dict[object, object]:
    pairs: dict[object, object] = {}
    keys = Keys()
    for pair in list_of(encoded["v"]):
        key, item = list_of(pair)
        decoded = _decode(key, at.within("<key>"))
        keys.add([decoded])
        if decoded in pairs:
            raise ValueError(f"duplicate key {str(decoded)[:40]!r}")
        pairs[decoded] = _decode(item, at.within(decoded))
    return pairs


def _encode_int(value: int, at: _Encoding) -> Fields | None:
    try:
        return {"v": str(value)}
    except ValueError:
        return None


def _size(items: list[Any]) -> torch.Size:
    if not all(type(n) is int and -_INT64 <= n < _INT64 for n in items):
        raise ValueError("expected 64-bit integers")
    return torch.Size(items)


def _encode_tensor(value: torch.Tensor, at: _Encoding) -> Fields | None:
    if at.on_tensor is not None:
        at.on_tensor(at.name, value)
        return {"name": at.name}
    if hasattr(value, "placements"):
        raise StateError(
            f"{at.name}: a DTensor cannot be part of a plain value: save its full tensor, or make "
            "it an item of the state"
        )
    return tensor_fields(value)


def _decode_tensor(encoded: Fields, at: _Decoding) -> torch.Tensor:
    return _named_tensor(encoded, at) if "name" in encoded else tensor_of(encoded)


def _encode_array(value: Array, at: _Encoding) -> Fields | None:
    if at.on_tensor is None or not is_numeric(value.dtype):
        return array_fields(value)
    at.on_tensor(at.name, value)
    return {"name": at.name}


def _decode_array(encoded: Fields, at: _Decoding) -> Array:
    return _named_tensor(encoded, at).numpy() if "name" in encoded else array_of(encoded)


def _named_tensor(encoded: Fields, at: _Decoding) -> torch.Tensor:
    if at.get_tensor is None:
        raise StateError(f"{at.name}: contains the name of a tensor where no tensor can be")
    return at.get_tensor(text_of(encoded["name"]))


def _once_each(on_tensor: OnTensor) -> OnTensor:
    names: set[str] = set()

    def give(name: str, value: object) -> None:
        if name in names:
            raise StateError(f"{name}: two tensors have this name: rename a key of one of them")
        names.add(name)
        on_tensor(name, value)

    return give


def _refuse_key(name: str, value: object) -> None:
    raise StateError(f"{name}: a tensor cannot be a key of a saved value")


def _pickled(value: object, at: _Encoding) -> Fields:
    try:
        return {"v": bytes_text(pickle.dumps(value))}
    except Exception as error:  # pickling runs code of the value
        raise StateError(f"{at.name}: it cannot be pickled either: {error}") from error


def _unpickled(encoded: Fields, at: _Decoding) -> object:
    if not at.allow_pickle:
        raise StateError(
            f"{at.name}: saved as pickle, which runs code from the file when it is loaded; "
            "if you trust the file, pass allow_pickle=True"
        )
    data = bytes_of(encoded["v"])
    try:
        return pickle.loads(data)
    except Exception as error:  # so does unpickling
        raise StateError(f"{at.name}: it cannot be unpickled: {error}") from error


@dataclass(frozen=True, slots=True)
class _Kind:
    """How values of one type are encoded and decoded.

    Attributes:
        made: the type.
        encode: returns the fields next to the tag; None if the value cannot be encoded.
        decode: returns the value.
        derived: whether subclasses of the type are encoded too.
    """

    made: type
    encode: Callable[[Any, _Encoding], Fields | None]
    decode: Callable[[Fields, _Decoding], object]
    derived: bool = False


def _in_fields(
    made: type, to: Callable[[Any], Fields | None], of: Callable[[Fields], object]
) -> _Kind:
    return _Kind(made, lambda value, at: to(value), lambda encoded, at: of(encoded), derived=True)


def _in_text(made: type, to: Callable[[Any], str], of: Callable[[str], object]) -> _Kind:
    def decode_text(encoded: Fields, at: _Decoding) -> object:
        return of(text_of(encoded["v"]))

    return _Kind(made, lambda value, at: {"v": to(value)}, decode_text)


def _in_items(made: type, of: Callable[[list[Any]], object]) -> _Kind:
    def decode_items(encoded: Fields, at: _Decoding) -> object:
        return of(_decode_items(encoded["v"], at))

    return _Kind(made, lambda value, at: {"v": _encode_items(value, at)}, decode_items)


def _in_pairs(made: type[dict[Any, Any]]) -> _Kind:
    return _Kind(made, _encode_pairs, lambda encoded, at: made(_decode_pairs(encoded, at)))


_KINDS: Mapping[str, _Kind] = {
    "enum": _in_fields(enum.Enum, member_fields, member_of),
    "numpy": _in_fields(np.generic, scalar_fields, scalar_of),
    "tensor": _Kind(torch.Tensor, _encode_tensor, _decode_tensor, derived=True),
    "array": _Kind(np.ndarray, _encode_array, _decode_array),
    "tuple": _in_items(tuple, tuple),
    "size": _in_items(torch.Size, _size),
    "dict": _in_pairs(dict),
    "ordered": _in_pairs(OrderedDict),
    "counter": _in_pairs(Counter),
    "int": _Kind(int, _encode_int, lambda encoded, at: int(text_of(encoded["v"]))),
    "float": _in_text(float, repr, float),
    "complex": _in_text(complex, repr, complex),
    "bytes": _in_text(bytes, bytes_text, bytes_of),
    "bytearray": _in_text(bytearray, bytes_text, lambda text: bytearray(bytes_of(text))),
    "dtype": _in_text(torch.dtype, dtype_text, dtype_of),
    "device": _in_text(torch.device, str, torch.device),
    "pickle": _Kind(object, _pickled, _unpickled),
}
_EXACT = {kind.made: tag for tag, kind in _KINDS.items() if tag != "pickle"}
_DERIVED = [(kind.made, tag) for tag, kind in _KINDS.items() if kind.derived]
