"""The closed list of torch's values that a pickle may hold: tensors as places in files."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwise.errors import FormatError
from shardwise.formats.catalogue import StoredArray
from shardwise.formats.stored.pickled import Builder, Constant, Name, Opaque, Stubs
from shardwise.manifest.dtypes import DTYPES

RESOLVE = (
    "a conjugated or negated view, whose values are not the bytes that are stored: save "
    "tensor.resolve_conj().resolve_neg() instead"
)
MOST_DIMS = 64
EXPANDED = 2**26
"""Bytes that a tensor may claim to have beyond those of its storage, by strides of 0."""


class UnresolvedError(FormatError):
    """A tensor is a view whose values are not those that its storage has."""


@dataclass(frozen=True, slots=True)
class Unresolved:
    """In place of such a tensor."""


@dataclass(frozen=True, slots=True)
class Storage:
    """The memory of tensors, as it lies in a file: bytes `[start, start + size)`.

    `dtype` is torch's name; None of one that is only bytes.
    """

    file: int
    start: int
    size: int
    dtype: str | None


@dataclass(frozen=True, slots=True)
class StorageType:
    """A class of storages, by the dtype of their elements."""

    dtype: str | None

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return 1 if self.dtype is None else DTYPES[self.dtype].itemsize


def _tensor(
    storage: object,
    offset: object,
    shape: object,
    stride: object,
    requires_grad: object = False,
    hooks: object = None,
    metadata: object = None,
) -> object:
    if isinstance(storage, Opaque):
        return storage
    if not isinstance(storage, Storage) or storage.dtype is None:
        raise TypeError("a tensor has no typed storage")
    return _stored(storage, storage.dtype, offset, shape, stride, metadata)


def _tensor_of_dtype(
    storage: object,
    offset: object,
    shape: object,
    stride: object,
    requires_grad: object,
    hooks: object,
    dtype: object,
    metadata: object = None,
) -> object:
    if not isinstance(storage, Storage) or not isinstance(dtype, torch.dtype):
        raise TypeError("a tensor has no storage, or no dtype")
    return _stored(storage, _name(dtype), offset, shape, stride, metadata)


def _stored(
    storage: Storage, dtype: str, offset: object, shape: object, stride: object, metadata: object
) -> StoredArray:
    if metadata:
        raise UnresolvedError(RESOLVE)
    if not (isinstance(shape, tuple) and isinstance(stride, tuple) and isinstance(offset, int)):
        raise TypeError("a tensor's geometry is no numbers")
    if len(shape) != len(stride) or len(shape) > MOST_DIMS:
        raise ValueError(f"a tensor with {len(shape)} sizes and {len(stride)} strides")
    itemsize = DTYPES[dtype].itemsize
    reach, size = 1, itemsize
    for n, step in zip(shape, stride, strict=True):
        if type(n) is not int or type(step) is not int or n < 0 or step < 0:
            raise ValueError("sizes and strides of a tensor are no numbers, or below 0")
        reach += (n - 1) * step
        size *= n
    if offset < 0 or (size and (offset + reach) * itemsize > storage.size):
        raise ValueError(f"a tensor of shape {list(shape)[:8]} leads out of its storage")
    if size > max(storage.size, EXPANDED) or max(shape, default=0) > 2**62:
        raise ValueError(f"a tensor of shape {list(shape)[:8]} has few bytes, and repeats them")
    start = storage.start + offset * itemsize if size else storage.start
    return StoredArray(storage.file, start, dtype, tuple(shape), stride)


def _or_unresolved(build: Builder) -> Builder:
    def built(*args: object) -> object:
        try:
            return build(*args)
        except UnresolvedError:
            return Unresolved()

    return built


def _parameter(data: object, *_: object) -> object:
    return data


def _of_type(rebuild: object, kind: object, args: object, state: object = None) -> object:
    if isinstance(kind, Opaque) or isinstance(rebuild, Opaque):
        return kind if isinstance(kind, Opaque) else rebuild
    if not isinstance(rebuild, Name) or not isinstance(args, tuple):
        raise TypeError("a tensor that is made by no function")
    return rebuild.build(*args)


def _size(numbers: object = ()) -> torch.Size:
    if not isinstance(numbers, tuple) or not all(
        type(n) is int and -(2**63) <= n < 2**63 for n in numbers
    ):
        raise TypeError("a torch.Size of something that is no numbers")
    return torch.Size(numbers)


def _device(kind: object, index: object = None) -> torch.device:
    if not isinstance(kind, str) or not (index is None or type(index) is int):
        raise TypeError("a device of something that is no name and number")
    return torch.device(kind) if index is None else torch.device(kind, index)


def _layout(text: object) -> object:
    if not isinstance(text, str):
        raise TypeError("a layout of something that is no text")
    return text


def _version(text: object) -> object:
    return _layout(text)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


STORAGES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
}
"""Classes of storages that torch pickles: the first part of their names, and their dtypes."""

_TENSORS: dict[str, Builder] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
}
UNRESOLVED: Stubs = {name: _or_unresolved(build) for name, build in _TENSORS.items()}
"""In place of the same of `TORCH`, to see which tensors it was that could not be read."""

TORCH: Stubs = {
    **_TENSORS,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "torch.Tensor": _parameter,
    "torch.nn.parameter.Parameter": _parameter,
    "torch.nn.parameter.Buffer": _parameter,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.serialization._get_layout": _layout,
    "torch.torch_version.TorchVersion": _version,
    **{f"torch.{kind}Storage": Constant(StorageType(dtype)) for kind, dtype in STORAGES.items()},
    "torch.storage.UntypedStorage": Constant(StorageType(None)),
    **{
        f"torch.{name}": Constant(dtype)
        for name, dtype in vars(torch).items()
        if isinstance(dtype, torch.dtype) and _name(dtype) in DTYPES
    },
}
"""Sparse, quantized and other tensors that are no array in a storage are not on it, nor are
classes derived from tensors: they are told by these functions' and classes' names."""
