"""Values that lie in foreign files, encoded; arrays in them become tensors with names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shardwise.errors import FormatError, StateError
from shardwise.formats.containers.pickle_values import Name, Opaque, Record
from shardwise.formats.containers.torch_values import Storage
from shardwise.formats.foreign import StoredArray
from shardwise.state.objects import JsonValue, encode

_NAMESPACES = ("argparse.Namespace", "types.SimpleNamespace")


@dataclass(frozen=True, slots=True)
class Plain:
    """A value encoded, and the arrays that it refers to by their names.

    `contents` are those that lie in no file: numpy arrays, whose bytes are in a pickle.
    """

    value: JsonValue
    arrays: Mapping[str, StoredArray]
    contents: Mapping[str, torch.Tensor]


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor that lies in memory, row-major."""
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def number_tensor(value: float) -> torch.Tensor:
    """A number as a 0-d float32 tensor, which is what optimizers count steps with.

    Raises:
        FormatError: it is too large.
    """
    try:
        return torch.tensor(float(value), dtype=torch.float32, device="cpu")
    except OverflowError as error:
        raise FormatError("a number of an optimizer's state is absurdly large") from error


def encode_plain(value: object, name: str) -> Plain:
    """Encode a value as `shardwise.state.objects` does.

    Namespaces become dicts; other objects of classes become dicts too, with the `class`.

    Raises:
        StateError: something in it has no plain form.
    """
    found: dict[str, StoredArray] = {}
    contents: dict[str, torch.Tensor] = {}
    standing_in: dict[int, StoredArray] = {}

    def give(where: str, array: torch.Tensor | np.ndarray[Any, Any]) -> None:
        if isinstance(array, np.ndarray):
            contents[where] = torch.from_numpy(np.array(array, order="C"))
        else:
            found[where] = standing_in[id(array)]

    stood_in: list[torch.Tensor] = []

    def stand_in(array: StoredArray) -> torch.Tensor:
        tensor = torch.empty(array.shape, dtype=getattr(torch, array.dtype), device="meta")
        standing_in[id(tensor)] = array
        stood_in.append(tensor)  # so that no other takes its id
        return tensor

    def plain(value: Any) -> Any:
        if isinstance(value, StoredArray):
            return stand_in(value)
        if isinstance(value, Storage):
            itemless = StoredArray(value.file, value.start, "uint8", (value.size,), (1,))
            return stand_in(itemless)
        if isinstance(value, Record):
            fields = {key: plain(each) for key, each in value.fields.items()}
            if value.name in _NAMESPACES:
                return fields
            args = {"args": [plain(each) for each in value.args]} if value.args else {}
            return {"class": value.name, **args, **fields}
        if isinstance(value, Name):
            return {"class": value.name}
        if isinstance(value, Opaque):
            raise StateError(f"{name}: {value.name} is not read from pickles")
        if type(value) in (list, tuple):
            return type(value)(plain(each) for each in value)
        if isinstance(value, dict):
            made = type(value)()
            made.update({key: plain(each) for key, each in value.items()})
            return made
        return value

    return Plain(encode(plain(value), name, give), found, contents)


def same_plain(value: object, other: object) -> bool:
    """Whether two values are equal; those that are not taken, as they have no plain form, are."""
    if value is other:
        return True
    try:
        one, two = encode_plain(value, ""), encode_plain(other, "")
    except StateError:
        return True
    known, found = ({k: bytes_of(t) for k, t in each.contents.items()} for each in (one, two))
    return (one.value, one.arrays, known) == (two.value, two.arrays, found)
