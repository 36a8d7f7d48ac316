"""Plain values from pickles: encode them as shardwise stores them, and compare those of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any, TypeAlias

import numpy as np
import torch

from shardwise.kernel.errors import StateError
from shardwise.kernel.state.plain_values import TAG
from shardwise.parts.formats.containers.pickle_values import (
    AllowedCallable,
    PickledInstance,
    UnknownObject,
)
from shardwise.parts.formats.foreign import StoredArray, StoredComposite, StoredTensor
from shardwise.parts.formats.nested import STORED
from shardwise.parts.formats.stored_composites import describe
from shardwise.ports.binding import JsonValue, encode

_Stored: TypeAlias = StoredArray | StoredTensor | StoredComposite
_MOST_OF_HYPERPARAMETER = 64
"""The most elements of a tensor that is a hyperparameter, such as a learning rate."""
_NAMESPACE_CLASSES = ("argparse.Namespace", "types.SimpleNamespace")


def bytes_of_tensor(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor in memory, row-major."""
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def read_small(value: object, read: Callable[[StoredArray], bytes]) -> object:
    """Return a hyperparameter; if it is an array with few elements, as a tensor.

    Args:
        value: the hyperparameter.
        read: returns the bytes of a contiguous array.
    """
    if isinstance(value, StoredTensor) and len(value.boxes) == 1:
        ((_, value),) = value.boxes
    if not isinstance(value, StoredArray) or not 0 < prod(value.shape) <= _MOST_OF_HYPERPARAMETER:
        return value
    if prod(value.shape) != 1 and not value.is_flat:
        return value
    dtype: torch.dtype = getattr(torch, value.dtype)
    return torch.frombuffer(bytearray(read(value)), dtype=dtype).reshape(value.shape)


def encode_plain(
    value: object, name: str, store: Callable[[torch.Tensor], StoredArray]
) -> tuple[JsonValue, Mapping[str, _Stored]]:
    """Encode a value as `shardwise.kernel.state.plain_values` does.

    Namespaces become dicts; other objects become dicts with the key `class`.

    Args:
        name: the name of the value.
        store: returns an array with the elements of a numpy array from a pickle.

    Returns:
        The encoded value, and the arrays that it refers to by name.

    Raises:
        StateError: a part of the value has no plain form.
    """
    arrays: dict[str, _Stored] = {}
    stored: dict[int, tuple[torch.Tensor, _Stored]] = {}

    def replace_array(array: _Stored) -> torch.Tensor:
        """Return a meta tensor, which `encode` passes on with its name."""
        tensor = torch.empty(array.shape, dtype=getattr(torch, array.dtype), device="meta")
        stored[id(tensor)] = tensor, array  # the tensor is kept, so that its id stays unique
        return tensor

    def record_array(path: str, array: torch.Tensor | np.ndarray[Any, Any]) -> None:
        if isinstance(array, np.ndarray):
            arrays[path] = store(torch.from_numpy(np.array(array, order="C")))
        else:
            arrays[path] = stored[id(array)][1]

    encoded = encode(_make_plain(value, name, replace_array), name, record_array)
    if any(isinstance(each, StoredComposite) for each in arrays.values()):
        encoded = _with_composites(encoded, arrays)
    return encoded, arrays


def _with_composites(encoded: JsonValue, arrays: Mapping[str, _Stored]) -> JsonValue:
    """Return an encoded value in which descriptions replace the names of composite tensors."""
    if isinstance(encoded, list):
        return [_with_composites(each, arrays) for each in encoded]
    if not isinstance(encoded, dict):
        return encoded
    name = encoded.get("name")
    found = arrays.get(name) if encoded.get(TAG) == "tensor" and isinstance(name, str) else None
    if isinstance(found, StoredComposite) and isinstance(name, str):
        return describe(name, found)
    return {key: _with_composites(each, arrays) for key, each in encoded.items()}


def _make_plain(value: Any, name: str, replace_array: Callable[[_Stored], torch.Tensor]) -> Any:
    """Return a value in which dicts replace objects, and other tensors replace stored tensors."""
    make = partial(_make_plain, name=name, replace_array=replace_array)
    if isinstance(value, STORED):
        return replace_array(value)
    if isinstance(value, PickledInstance):
        fields = {key: make(item) for key, item in value.fields.items()}
        if value.name in _NAMESPACE_CLASSES:
            return fields
        args = {"args": [make(item) for item in value.args]} if value.args else {}
        return {"class": value.name, **args, **fields}
    if isinstance(value, AllowedCallable):
        return {"class": value.name}
    if isinstance(value, UnknownObject):
        raise StateError(f"{name}: {value.reason}")
    if type(value) in (list, tuple):
        return type(value)(make(item) for item in value)
    if isinstance(value, dict):
        new_dict = type(value)()
        new_dict.update({key: make(item) for key, item in value.items()})
        return new_dict
    return value


def are_plain_values_equal(value: object, other: object) -> bool:
    """Return whether two values are equal; NaN equals NaN.

    Values without a plain form count as equal.
    """
    if value is other or (type(value) is type(other) and isinstance(value, (str, int))):
        return value == other
    contents: dict[bytes, int] = {}

    def store(tensor: torch.Tensor) -> StoredArray:
        number = contents.setdefault(bytes_of_tensor(tensor), len(contents))
        return StoredArray("", number, str(tensor.dtype), tuple(tensor.shape), ())

    try:
        return encode_plain(value, "", store) == encode_plain(other, "", store)
    except StateError:
        return True
