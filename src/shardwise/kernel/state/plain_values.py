"""Encode plain Python values as JSON values, and decode them, without pickle.

None, bool, int, finite float, str, list, and dict with text keys are encoded as themselves. Other
values are encoded as `{"$": kind, …}`; docs/format.md lists the kinds.
"""

from __future__ import annotations

import enum
import math
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from msgspec import UNSET

from shardwise.kernel.errors import ShardwiseError, StateError
from shardwise.kernel.plugins import load_built_in
from shardwise.kernel.state.hostile_keys import KeyCounter
from shardwise.kernel.state.json_fields import (
    Array,
    Fields,
    array_fields,
    array_of,
    bytes_of,
    bytes_text,
    dtype_of,
    dtype_text,
    enum_fields,
    enum_of,
    is_numeric,
    require_text,
    scalar_fields,
    scalar_of,
    tensor_fields,
    tensor_of,
    why_unsavable,
)
from shardwise.kernel.state.json_fields import JsonValue as JsonValue
from shardwise.kernel.state.local_state import Shards
from shardwise.kernel.state.tensors import detach_checked, is_composite, is_shard

OnTensor = Callable[[str, Any], None]
GetTensor = Callable[[str], torch.Tensor | Shards]

TAG = "$"
COMPOSITE = "composite"
"""The tag of values that describe a tensor that wraps others."""
COMPOSITES = "shardwise.composites"
MAX_DEPTH = 200

_INT64 = 2**63


def encode(
    value: object,
    name: str,
    on_tensor: OnTensor | None = None,
    *,
    allow_pickle: bool = False,
) -> JsonValue:
    """Return a plain value as a JSON value.

    Args:
        name: the full name of the value, for names of tensors and for error messages.
        on_tensor: called with the name and value of each tensor and array. The encoded value then
            has only the name. Default: tensors are encoded inline.
        allow_pickle: pickle values that have no plain form.

    Raises:
        StateError: a value has no plain form, or two tensors have the same name.
    """
    try:
        return _encode(value, _Cursor(name, on_tensor=on_tensor, allow_pickle=allow_pickle))
    except RecursionError as error:
        raise StateError(f"{name}: nested too deeply for Python: flatten the value") from error


def decode(
    encoded: JsonValue,
    name: str,
    get_tensor: GetTensor | None = None,
    *,
    allow_pickle: bool = False,
) -> object:
    """Return the value that `encode` encoded. The input is not trusted.

    Args:
        name: the full name of the value, for error messages.
        get_tensor: returns a tensor, given the name that `on_tensor` was called with.
        allow_pickle: unpickle pickled values, which runs code from the file.

    Raises:
        StateError: the input is malformed, or contains pickle and `allow_pickle` is not set.
    """
    try:
        return _decode(encoded, _Cursor(name, get_tensor=get_tensor, allow_pickle=allow_pickle))
    except RecursionError as error:
        raise StateError(
            f"{name}: nested too deeply for Python: leave it out with skip=[…]"
        ) from error


def find_differences(
    a: JsonValue, b: JsonValue, name: str
) -> Iterator[tuple[str, JsonValue, JsonValue]]:
    """Yield the parts in which two encoded values differ.

    For example, `{"lr": 0.1}` and `{"lr": 0.2}` with the name `x` differ in `("x.lr", 0.1, 0.2)`.

    Args:
        a, b: the encoded values.
        name: the full name of both values.

    Yields:
        The full name of the part, and what `a` and `b` have there: an encoded value, or
        `msgspec.UNSET` for a key that only the other one has.
    """
    if isinstance(a, dict) and isinstance(b, dict):
        if TAG not in a and TAG not in b:
            for key in dict.fromkeys([*a, *b]):
                yield from find_differences(a.get(key, UNSET), b.get(key, UNSET), f"{name}.{key}")
            return
        if a.get(TAG) == b.get(TAG) and isinstance(a.get("v"), list):
            a, b = a["v"], b.get("v")
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from find_differences(x, y, f"{name}.{index}")
    elif type(a) is not type(b) or a != b:
        yield name, a, b


def describes_tensor(encoded: object) -> TypeGuard[Fields]:
    """Return whether an encoded value describes a tensor that wraps others."""
    return isinstance(encoded, dict) and encoded.get(TAG) == COMPOSITE


def is_empty(encoded: JsonValue) -> bool:
    """Return whether an encoded value is None, or an empty dict, list or tuple."""
    if isinstance(encoded, dict) and isinstance(encoded.get(TAG), str):
        return encoded[TAG] in ("dict", "ordered", "tuple") and encoded.get("v") == []
    return encoded is None or (isinstance(encoded, (dict, list)) and not encoded)


class _Cursor:
    """The position of the encoder or decoder in a value, and what it needs there.

    Args:
        name: the full name of the value.
        on_tensor, get_tensor, allow_pickle: as for `encode` and `decode`.

    Attributes:
        path: the name of the value, and the keys and indices from there to the position.
        tensors: the names of the tensors that the encoder has found so far.
        is_in_key: whether the encoder is in the key of a dict.
    """

    def __init__(
        self,
        name: str,
        *,
        on_tensor: OnTensor | None = None,
        get_tensor: GetTensor | None = None,
        allow_pickle: bool,
    ) -> None:
        self.path: list[object] = [name]
        self.on_tensor = on_tensor
        self.get_tensor = get_tensor
        self.allow_pickle = allow_pickle
        self.tensors: set[str] = set()
        self.is_in_key = False

    @property
    def name(self) -> str:
        """The full name of the position."""
        return ".".join(map(format, self.path))


def _encode(value: Any, cursor: _Cursor) -> JsonValue:
    if len(cursor.path) > MAX_DEPTH + 1:
        problem = f"nested more than {MAX_DEPTH} levels deep, or contains itself"
        raise StateError(f"{cursor.name}: {problem}: flatten it")
    value_type = type(value)
    if value is None or value_type is bool:
        return value
    if value_type is str:
        if not value.isascii():
            _check_text(value, cursor)
        return value
    if (value_type is int and -_INT64 <= value < _INT64) or (
        value_type is float and math.isfinite(value)
    ):
        return value
    if value_type is list:
        return _convert_parts(enumerate(value), cursor, _encode)
    if value_type is dict and TAG not in value and set(map(type, value)) <= {str}:
        for key in value:
            if not key.isascii():
                _check_text(key, cursor)
        return dict(zip(value, _convert_parts(value.items(), cursor, _encode), strict=True))
    tag = _TAG_BY_TYPE.get(value_type) or next(
        (tag for tag in _WITH_SUBCLASSES if isinstance(value, _KINDS[tag].value_type)), "pickle"
    )
    fields = _KINDS[tag].encode(value, cursor)
    if fields is None and tag != "pickle":
        tag, fields = "pickle", _encode_pickle(value, cursor)
    if fields is None:
        raise StateError(f"{cursor.name}: {why_unsavable(value)}")
    return {TAG: tag, **fields}


def _convert_parts(
    parts: Iterable[tuple[object, Any]], cursor: _Cursor, convert: Callable[[Any, _Cursor], Any]
) -> list[Any]:
    """Encode or decode the parts of a container, given with their keys or indices."""
    converted = []
    for key, part in parts:
        cursor.path.append(key)
        converted.append(convert(part, cursor))
        cursor.path.pop()
    return converted


def _convert_part(
    cursor: _Cursor, convert: Callable[[Any, _Cursor], Any], key: object, part: Any
) -> Any:
    return _convert_parts([(key, part)], cursor, convert)[0]


def _decode(encoded: JsonValue, cursor: _Cursor) -> object:
    if len(cursor.path) > MAX_DEPTH + 1:
        raise StateError(
            f"{cursor.name}: more than {MAX_DEPTH} levels deep: leave it out with skip=[…]"
        )
    if encoded is None or isinstance(encoded, (bool, int, float, str)):
        return encoded
    if isinstance(encoded, list):
        return _convert_parts(enumerate(encoded), cursor, _decode)
    if not isinstance(encoded, dict):
        raise StateError(f"{cursor.name}: {type(encoded).__name__} is not a JSON value")
    if TAG not in encoded:
        return dict(zip(encoded, _convert_parts(encoded.items(), cursor, _decode), strict=True))
    tag = encoded[TAG]
    if not isinstance(tag, str) or tag not in _KINDS:
        raise StateError(
            f"{cursor.name}: the type {str(tag)[:40]!r} is unknown: load the checkpoint with a "
            "newer version of shardwise, or leave the value out of the load with skip=[…]"
        )
    try:
        return _KINDS[tag].decode(encoded, cursor)
    except (ShardwiseError, RecursionError):
        raise
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        advice = "load another checkpoint, or leave the value out of the load with skip=[…]"
        raise StateError(
            f"{cursor.name}: the saved {tag} is invalid: "
            f"{'it has no ' if isinstance(error, KeyError) else ''}{error}; {advice}"
        ) from error


def _require_list(value: object) -> list[Any]:
    """Return a value after checking that it is a list.

    Raises:
        TypeError: the value is not a list.
    """
    if not isinstance(value, list):
        raise TypeError(f"expected a list, not {type(value).__name__}")
    return value


def _check_text(text: str, cursor: _Cursor) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise StateError(f"{cursor.name}: invalid Unicode: {error}: save it as bytes") from error


def _encode_pairs(value: Mapping[object, object], cursor: _Cursor) -> Fields:
    was_in_key, cursor.is_in_key = cursor.is_in_key, True
    keys = _convert_parts([("<key>", key) for key in value], cursor, _encode)
    cursor.is_in_key = was_in_key
    items = _convert_parts(value.items(), cursor, _encode)
    return {"v": [[*pair] for pair in zip(keys, items, strict=True)]}


def _decode_pairs(encoded: Fields, cursor: _Cursor) -> dict[object, object]:
    pairs: dict[object, object] = {}
    keys = KeyCounter()
    for pair in _require_list(encoded["v"]):
        key, item = _require_list(pair)
        [decoded_key] = _convert_parts([("<key>", key)], cursor, _decode)
        keys.add([decoded_key])
        if decoded_key in pairs:
            raise ValueError(f"duplicate key {str(decoded_key)[:40]!r}")
        [pairs[decoded_key]] = _convert_parts([(decoded_key, item)], cursor, _decode)
    return pairs


def _encode_int(value: int, cursor: _Cursor) -> Fields | None:
    try:
        return {"v": str(value)}
    except ValueError:
        return None


def _make_size(items: list[Any]) -> torch.Size:
    if not all(type(n) is int and -_INT64 <= n < _INT64 for n in items):
        raise ValueError(f"{str(items)[:40]} are not 64-bit integers")
    return torch.Size(items)


def _encode_tensor(value: torch.Tensor | Shards, cursor: _Cursor) -> Fields | None:
    if is_composite(value):
        encode_composite: Callable[..., Fields] = load_built_in(COMPOSITES, "encode")
        return encode_composite(value, cursor.name, partial(_convert_part, cursor, _encode))
    if cursor.on_tensor is not None or cursor.is_in_key:
        return _name_tensor(value, cursor)
    if isinstance(value, Shards) or is_shard(cursor.name, value):
        raise StateError(
            f"{cursor.name}: a {type(value).__name__} cannot be part of this value, because it is "
            "a part of a global tensor: save the full tensor, or make it an item of the state"
        )
    return tensor_fields(detach_checked(cursor.name, value))


def _decode_tensor(encoded: Fields, cursor: _Cursor) -> torch.Tensor | Shards:
    return _get_named_tensor(encoded, cursor) if "name" in encoded else tensor_of(encoded)


def _decode_composite(encoded: Fields, cursor: _Cursor) -> object:
    decode_composite = load_built_in(COMPOSITES, "decode")
    return decode_composite(encoded, cursor.name, partial(_convert_part, cursor, _decode))


def _encode_array(value: Array, cursor: _Cursor) -> Fields | None:
    is_named = is_numeric(value.dtype) and (cursor.on_tensor is not None or cursor.is_in_key)
    return _name_tensor(value, cursor) if is_named else array_fields(value)


def _decode_array(encoded: Fields, cursor: _Cursor) -> Array | Shards:
    found = _get_named_tensor(encoded, cursor) if "name" in encoded else array_of(encoded)
    return found.cpu().numpy() if isinstance(found, torch.Tensor) else found


def _get_named_tensor(encoded: Fields, cursor: _Cursor) -> torch.Tensor | Shards:
    if cursor.get_tensor is None:
        raise StateError(
            f"{cursor.name}: the saved value refers to a tensor, but is loaded without tensors: "
            "leave the value out of the load with skip=[…]"
        )
    return cursor.get_tensor(require_text(encoded["name"]))


def _name_tensor(value: object, cursor: _Cursor) -> Fields:
    if cursor.is_in_key or cursor.on_tensor is None:
        raise StateError(
            f"{cursor.name}: a tensor cannot be a key: use text or a number as the key"
        )
    name = cursor.name
    if name in cursor.tensors:
        raise StateError(f"{name}: two tensors have this name: rename a key of one of them")
    cursor.tensors.add(name)
    cursor.on_tensor(name, value)
    return {"name": name}


def _decode_enum(encoded: Fields, cursor: _Cursor) -> enum.Enum:
    try:
        return enum_of(encoded)
    except LookupError as error:
        raise StateError(
            f"{cursor.name}: {error}, or leave the value out of the load with skip=[…]"
        ) from error


def _encode_pickle(value: object, cursor: _Cursor) -> Fields | None:
    if not cursor.allow_pickle or cursor.is_in_key:
        return None
    try:
        return {"v": bytes_text(pickle.dumps(value))}
    except Exception as error:  # pickling runs code of the value
        raise StateError(
            f"{cursor.name}: a {type(value).__name__} is not a plain value, and pickle cannot "
            f"save it: {error}: leave it out of the state, or give it state_dict() and "
            "load_state_dict()"
        ) from error


def _decode_pickle(encoded: Fields, cursor: _Cursor) -> object:
    if not cursor.allow_pickle:
        raise StateError(
            f"{cursor.name}: saved as pickle, which runs code from the file when it is loaded; "
            "if you trust the file, pass allow_pickle=True"
        )
    data = bytes_of(encoded["v"])
    try:
        return pickle.loads(data)
    except Exception as error:  # unpickling runs code of the value
        raise StateError(
            f"{cursor.name}: the pickled value cannot be unpickled: {error}: make its class "
            "importable, or leave the value out of the load with skip=[…]"
        ) from error


class _Kind(NamedTuple):
    """How values of one type are encoded and decoded.

    Attributes:
        value_type: the type.
        encode: returns the fields next to the tag; None if the value cannot be encoded.
        decode: returns the value.
    """

    value_type: type
    encode: Callable[[Any, _Cursor], Fields | None]
    decode: Callable[[Fields, _Cursor], object]


def _text_kind(
    value_type: type, to_text: Callable[[Any], str], from_text: Callable[[str], object]
) -> _Kind:
    return _Kind(
        value_type,
        lambda value, cursor: {"v": to_text(value)},
        lambda fields, cursor: from_text(require_text(fields["v"])),
    )


def _items_kind(value_type: type, make: Callable[[Any], object]) -> _Kind:
    return _Kind(
        value_type,
        lambda value, cursor: {"v": _encode(list(value), cursor)},
        lambda fields, cursor: make(_decode(_require_list(fields["v"]), cursor)),
    )


def _pairs_kind(value_type: type[dict[Any, Any]]) -> _Kind:
    return _Kind(
        value_type,
        _encode_pairs,
        lambda fields, cursor: value_type(_decode_pairs(fields, cursor)),
    )


_KINDS: Mapping[str, _Kind] = {
    "enum": _Kind(enum.Enum, lambda v, _: enum_fields(v), _decode_enum),
    "numpy": _Kind(np.generic, lambda v, cursor: scalar_fields(v), lambda f, cursor: scalar_of(f)),
    "tensor": _Kind(torch.Tensor, _encode_tensor, _decode_tensor),
    COMPOSITE: _Kind(torch.Tensor, _encode_tensor, _decode_composite),
    "array": _Kind(np.ndarray, _encode_array, _decode_array),
    "tuple": _items_kind(tuple, tuple),
    "size": _items_kind(torch.Size, _make_size),
    "dict": _pairs_kind(dict),
    "ordered": _pairs_kind(OrderedDict),
    "counter": _pairs_kind(Counter),
    "int": _Kind(int, _encode_int, lambda fields, cursor: int(require_text(fields["v"]))),
    "float": _text_kind(float, repr, float),
    "complex": _text_kind(complex, repr, complex),
    "bytes": _text_kind(bytes, bytes_text, bytes_of),
    "bytearray": _text_kind(bytearray, bytes_text, lambda text: bytearray(bytes_of(text))),
    "dtype": _text_kind(torch.dtype, dtype_text, dtype_of),
    "device": _text_kind(torch.device, str, torch.device),
    "pickle": _Kind(object, _encode_pickle, _decode_pickle),
}
_WITH_SUBCLASSES = ("enum", "numpy", "tensor")
_TAG_BY_TYPE = {kind.value_type: tag for tag, kind in _KINDS.items() if tag != "pickle"}
_TAG_BY_TYPE[torch.Tensor] = _TAG_BY_TYPE[Shards] = "tensor"
_TAG_BY_TYPE[np.memmap] = "array"  # comes back in memory
