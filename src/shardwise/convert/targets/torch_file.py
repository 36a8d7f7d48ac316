"""One file as torch.save writes it: a zip archive with a pickle and the tensors' bytes."""

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

from shardwise.convert.plan import Chosen, Part, Target
from shardwise.convert.targets.archive import Archive, Growing
from shardwise.convert.targets.nested import nested
from shardwise.errors import StateError
from shardwise.formats.containers.torch_values import STORAGE_DTYPES

Array: TypeAlias = "np.ndarray[Any, Any]"
FILE = "checkpoint.pt"
_FOLDER = "archive"
_VERSION = b"3\n"
_PROTOCOL = 2
_TYPED = {dtype: getattr(torch, f"{kind}Storage") for kind, dtype in STORAGE_DTYPES.items()}
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
"""Types that `torch.load(weights_only=True)` reads, besides those of every pickle."""
_NAMES = (type, FunctionType, BuiltinFunctionType)


def torch_target(chosen: Chosen) -> Target:
    """Plan one file that `torch.load(weights_only=True)` reads, with nested state_dicts.

    Values that torch loads only with `weights_only=False` are left out.
    """
    state = nested(chosen)
    left_out = list(state.left_out)
    whole: dict[str, Any] = {}
    for path, value in state.parts.items():
        why = refusal(value, ".".join(path))
        if why:
            left_out.append(why)
            continue
        *above, key = path
        here = whole.setdefault(above[0], {}) if above else whole
        here[key] = value
    for name, optimizer in state.optimizers.items():
        whole[name] = optimizer.numbered()
        left_out += [f"{name}.{lost}: not in any param group" for lost in optimizer.ungrouped()]
    file = Growing(FILE)
    add_torch_file(file, whole, FILE)
    return Target((file.output(),), lambda sums: {}, tuple(left_out))


def refusal(value: Any, name: str) -> str:
    """Return why torch would not load a value; empty if it would."""
    if isinstance(value, Part):
        return ""
    try:
        pickled(value, name)
    except StateError as error:
        return str(error)
    return ""


def add_torch_file(file: Growing, value: Any, name: str) -> None:
    """Append a file of torch.save to a file, aligned.

    Args:
        name: the name of the value, for messages.

    Raises:
        StateError: the value contains something that torch does not load.
    """
    pickle = pickled(value, name)
    file.align()
    archive = Archive(file)
    archive.add(f"{_FOLDER}/data.pkl", pickle.data)
    archive.add(f"{_FOLDER}/byteorder", b"little")
    for number, storage in enumerate(pickle.storages):
        archive.add(f"{_FOLDER}/data/{number}", storage)
    archive.add(f"{_FOLDER}/version", _VERSION)
    archive.close()


@dataclass(frozen=True, slots=True)
class Pickled:
    """A pickle, and the storages that it refers to by number."""

    data: bytes
    storages: Sequence[Part | bytes]


def pickled(value: object, name: str) -> Pickled:
    """Pickle a value so that `torch.load(weights_only=True)` reads it.

    Equal parts become tensors that share a storage. NumPy scalars become Python numbers, and NumPy
    arrays become tensors.

    Args:
        name: the name of the value, for messages.

    Raises:
        StateError: the value contains something that torch does not load.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(_without_numpy(value))
    except StateError as error:
        raise StateError(f"{name}: {error}") from error
    except RecursionError as error:
        raise StateError(f"{name}: nested too deeply to be pickled") from error
    return Pickled(file.getvalue(), pickler.storages)


@dataclass(frozen=True, slots=True)
class _Storage:
    """A storage within a pickle."""

    kind: type
    number: int
    elements: int


class _Pickler(pickle.Pickler):
    """Writes pickles as torch does; refuses types that `weights_only=True` does not read."""

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
        raise StateError(f"torch.load reads a {type(obj).__name__} only with weights_only=False")

    def _store(self, data: Part | bytes) -> int:
        self.storages.append(data)
        return len(self.storages) - 1


def _tensor(number: int, dtype: str, shape: tuple[int, ...], size: int) -> tuple[Any, ...]:
    """Return the function and arguments that make a tensor of a whole storage."""
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
        raise StateError(f"torch has no dtype for NumPy's {array.dtype}") from error
