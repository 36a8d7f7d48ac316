"""Pickles as torch.save writes them, of values in which parts of tensors stand for tensors."""

from __future__ import annotations

import _codecs
import io
import math
import pickle
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeAlias

import numpy as np
import torch

from shardwise.convert.output import Part
from shardwise.errors import StateError
from shardwise.formats.containers.torch_values import STORAGES

Array: TypeAlias = "np.ndarray[Any, Any]"
_PROTOCOL = 2
_TYPED = {dtype: getattr(torch, f"{kind}Storage") for kind, dtype in STORAGES.items()}
_REBUILD = torch._utils._rebuild_tensor_v2
_REBUILD_OF_DTYPE = torch._utils._rebuild_tensor_v3
_NAMED = frozenset(
    {
        *_TYPED.values(),
        *(torch.UntypedStorage, torch.Size, torch.device, _REBUILD, _REBUILD_OF_DTYPE),
        *(OrderedDict, Counter, bytearray, complex, _codecs.encode),
    }
)
_OF_TYPES = frozenset(
    {OrderedDict, Counter, torch.Size, torch.device, torch.dtype, bytearray, complex}
)
"""What `torch.load(weights_only=True)` reads, beside what every pickle can hold."""
_NAMES = (type, FunctionType, BuiltinFunctionType)


@dataclass(frozen=True, slots=True)
class Pickled:
    """A pickle, and the storages that it refers to by their numbers."""

    data: bytes
    storages: Sequence[Part | bytes]


def pickled(value: object, name: str) -> Pickled:
    """Pickle a value, such that `torch.load(weights_only=True)` reads it.

    Equal parts become tensors that share a storage. Numbers and arrays of numpy become Python's
    numbers, and tensors.

    Args:
        name: of the value, for messages.

    Raises:
        StateError: it holds something that torch does not load.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(_without_numpy(value))
    except StateError as error:
        raise StateError(f"{name}: {error}") from error
    except RecursionError as error:
        raise StateError(f"{name}: nested too deep for a pickle") from error
    return Pickled(file.getvalue(), pickler.storages)


@dataclass(frozen=True, slots=True)
class _Storage:
    """A storage within a pickle."""

    kind: type
    number: int
    elements: int


class _Pickler(pickle.Pickler):
    """Writes what torch's own does, and refuses what a reader that trusts nobody would."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self.storages: list[Part | bytes] = []
        self._numbers: dict[Part, int] = {}

    def persistent_id(self, obj: object) -> object:
        if isinstance(obj, _Storage):
            return "storage", obj.kind, str(obj.number), "cpu", obj.elements
        return None

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, Part):
            number = self._numbers.get(obj)
            if number is None:
                number = self._numbers[obj] = self._store(obj)
            return _tensor(number, obj.dtype, obj.box.shape, obj.size)
        if isinstance(obj, torch.Tensor):
            data = obj.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            dtype = str(obj.dtype).removeprefix("torch.")
            return _tensor(self._store(data), dtype, tuple(obj.shape), len(data))
        if type(obj) in _OF_TYPES or (isinstance(obj, _NAMES) and obj in _NAMED):
            return NotImplemented
        raise StateError(f"torch does not load a {type(obj).__name__} unless it is told to trust")

    def _store(self, data: Part | bytes) -> int:
        self.storages.append(data)
        return len(self.storages) - 1


def _tensor(number: int, dtype: str, shape: tuple[int, ...], size: int) -> tuple[Any, ...]:
    """How a reader makes a tensor of all of a storage: by a function, of arguments."""
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    if dtype in _TYPED:
        storage = _Storage(_TYPED[dtype], number, math.prod(shape))
        return _REBUILD, (storage, 0, shape, stride, False, OrderedDict())
    storage = _Storage(torch.UntypedStorage, number, size)
    kind = getattr(torch, dtype)
    return _REBUILD_OF_DTYPE, (storage, 0, shape, stride, False, OrderedDict(), kind)


def _without_numpy(value: object) -> object:
    kind = type(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return _tensor_of(value)
    if kind in (dict, OrderedDict):
        pairs = ((_without_numpy(k), _without_numpy(v)) for k, v in value.items())  # type: ignore[attr-defined]
        return kind(pairs)
    if kind in (list, tuple):
        return kind(map(_without_numpy, value))  # type: ignore[call-overload]
    return value


def _tensor_of(array: Array) -> torch.Tensor:
    try:
        return torch.from_numpy(np.ascontiguousarray(array).copy()).reshape(array.shape)
    except TypeError as error:
        raise StateError(f"torch has no tensors of numpy's {array.dtype}") from error
