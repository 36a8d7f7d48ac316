"""torchao's names in safetensors: `layer.weight` is `layer._weight_qdata`, `layer._weight_scale`, …

The metadata of a file has a JSON text for each tensor, with its class, what the class keeps, and
the names of the inner tensors. `tensor_names` lists the tensors. If a model has several files, each
may have the metadata of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from shardwise.kernel.decoding import prepare_decoding
from shardwise.kernel.errors import FormatError
from shardwise.parts.formats.containers.pickle_values import PickledInstance
from shardwise.parts.formats.foreign import StoredArray, StoredComposite
from shardwise.parts.tensor_classes.composite import rule_of
from shardwise.parts.tensor_classes.torchao_objects import (
    OBJECTS_IN_SAFETENSORS,
    TENSORS_IN_SAFETENSORS,
)

TENSOR_NAMES = "tensor_names"
_PLAIN = "Tensor"
_MOST_DEPTH = 20
_KEYS_OF_DTYPE = ("dtype", "orig_dtype")
_COPY_AGAIN = "copy the file again from an intact source, or save it again with torchao"


@prepare_decoding
class _Entry(msgspec.Struct, frozen=True):
    """What the metadata says of a tensor."""

    type: str = msgspec.field(name="_type")
    data: dict[str, Any] = msgspec.field(name="_data", default_factory=dict)
    parts: tuple[str, ...] = msgspec.field(name="_tensor_data_names", default=())


@dataclass(frozen=True, slots=True)
class Described:
    """The tensors that metadata of torchao describes.

    Attributes:
        tensors: by name.
        used: the names of the arrays that are their inner tensors.
        unknown: for each tensor of a class that is not read, the class and its arrays.
    """

    tensors: Mapping[str, StoredComposite]
    used: frozenset[str]
    unknown: Mapping[str, str]


def keys_of(metadata: Mapping[str, str]) -> set[str]:
    """Return the keys of the metadata that are torchao's."""
    if TENSOR_NAMES not in metadata:
        return set()
    return {TENSOR_NAMES, *_names_in(metadata, "the metadata")} & metadata.keys()


def find_composites(
    metadata: Mapping[str, str], arrays: Mapping[str, StoredArray], label: str
) -> Described:
    """Return the tensors that wrap others.

    Args:
        metadata: the metadata of all files.
        arrays: the arrays of all files, by name.
        label: the path, for messages.

    Raises:
        FormatError: the metadata is malformed, or an inner tensor is missing.
    """
    tensors: dict[str, StoredComposite] = {}
    unknown: dict[str, str] = {}
    used: set[str] = set()
    for name in _names_in(metadata, label) if TENSOR_NAMES in metadata else ():
        entry = _entry_of(name, metadata, label)
        module, _, parameter = name.rpartition(".")
        prefix = f"{module}._{parameter}_"
        if entry.type == _PLAIN or not any(f"{prefix}{part}" in arrays for part in entry.parts):
            continue
        if clashes := [part for part in entry.parts if f"{prefix}{part}" in used]:
            raise FormatError(f"{label}: {name}: {prefix}{clashes[0]} is part of two tensors")
        used |= {f"{prefix}{part}" for part in entry.parts}
        if entry.type not in TENSORS_IN_SAFETENSORS:
            unknown[name] = entry.type
            continue
        inner = {part: arrays.get(f"{prefix}{part}") for part in entry.parts}
        found = {part: array for part, array in inner.items() if array is not None}
        if missing := [part for part in entry.parts if part not in found]:
            raise FormatError(
                f"{label}: {name}: the inner tensor {prefix}{missing[0]} is missing: copy all "
                "files of the model"
            )
        tensors[name] = _composite(entry, found, f"{label}: {name}")
    return Described(tensors, frozenset(used), unknown)


def _names_in(metadata: Mapping[str, str], label: str) -> list[str]:
    try:
        names = msgspec.json.decode(metadata[TENSOR_NAMES], type=list[str])
    except msgspec.DecodeError as error:
        raise FormatError(
            f"{label}: {TENSOR_NAMES} is not a list of names: {error}: {_COPY_AGAIN}"
        ) from error
    return [*dict.fromkeys(names)]


def _entry_of(name: str, metadata: Mapping[str, str], label: str) -> _Entry:
    try:
        return msgspec.json.decode(metadata[name], type=_Entry)
    except (KeyError, msgspec.DecodeError) as error:
        raise FormatError(
            f"{label}: {name[:200]}: the metadata does not describe this tensor: {error}: "
            f"{_COPY_AGAIN}"
        ) from error


def _composite(entry: _Entry, inner: Mapping[str, StoredArray], label: str) -> StoredComposite:
    """Return a tensor, whose shape and dtype follow as in the constructor of its class."""
    class_name = TENSORS_IN_SAFETENSORS[entry.type]
    try:
        attributes = {key: _object_of(value) for key, value in entry.data.items()}
        codes = inner["qdata"]
        shape = codes.shape
        if entry.type == "Int4Tensor":
            shape, dtype = tuple(attributes["shape"]), inner["scale"].dtype
            attributes["shape"] = torch.Size(shape)
        else:
            key = next(key for key in _KEYS_OF_DTYPE if key in attributes)
            dtype = str(attributes[key]).removeprefix("torch.")
        is_fp4 = attributes.get("elem_dtype", torch.float4_e2m1fn_x2) == torch.float4_e2m1fn_x2
        if entry.type in ("MXTensor", "NVFP4Tensor") and is_fp4:
            shape = (*shape[:-1], 2 * shape[-1])  # two values in each byte
    except (AttributeError, IndexError, LookupError, StopIteration, TypeError, ValueError) as error:
        raise FormatError(
            f"{label}: the metadata does not describe a {entry.type}: {error!r}: {_COPY_AGAIN}"
        ) from error
    rule = rule_of(class_name)
    context = attributes
    if rule is not None and rule.context_of is not None:
        context = rule.context_of(attributes)
    return StoredComposite(class_name, dtype, shape, context, (*inner.items(),))


def _object_of(value: Any, depth: int = 0) -> Any:
    """Return a value of the metadata, with records for objects."""
    if depth > _MOST_DEPTH:
        raise ValueError("the value is nested too deeply")
    if isinstance(value, list):
        return [_object_of(each, depth + 1) for each in value]
    if not isinstance(value, dict):
        return value
    if "_type" not in value:
        return {key: _object_of(each, depth + 1) for key, each in value.items()}
    kind, data = value["_type"], value["_data"]
    if kind == "torch.dtype":
        dtype = getattr(torch, data)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{data[:40]!r} is no dtype")
        return dtype
    class_name = OBJECTS_IN_SAFETENSORS[kind]
    if isinstance(data, str):  # the name of the member of an enum
        return PickledInstance(class_name, (data,))
    return PickledInstance(
        class_name, (), {key: _object_of(each, depth + 1) for key, each in data.items()}
    )
