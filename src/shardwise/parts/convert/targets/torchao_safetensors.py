"""torchao's names in safetensors, for tensors that wrap others: `layer._weight_qdata`, …

The metadata says what the class of each tensor keeps. Each file has the metadata of all tensors,
because transformers keeps the metadata of one file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from shardwise.kernel.errors import StateError
from shardwise.kernel.manifest.manifest import ObjectEntry
from shardwise.kernel.state.json_fields import Fields
from shardwise.kernel.state.plain_values import TAG
from shardwise.parts.convert.plan import TargetTensor
from shardwise.parts.tensor_classes.composite import rule_of
from shardwise.parts.tensor_classes.torchao_objects import (
    OBJECTS_IN_SAFETENSORS,
    TENSORS_IN_SAFETENSORS,
)

_SHORT_NAMES = {
    full: short
    for names in (TENSORS_IN_SAFETENSORS, OBJECTS_IN_SAFETENSORS)
    for short, full in names.items()
}


def name_as_torchao(
    tensors: Sequence[TargetTensor], composites: Sequence[ObjectEntry], model_key: str
) -> tuple[list[TargetTensor], dict[str, str]]:
    """Return the tensors under the names of torchao, and its metadata.

    Args:
        tensors: the tensors of the model, with names relative to it.
        composites: the plain values that describe tensors of the model, which wrap others.
        model_key: the key of the model in the state.

    Returns:
        The tensors; and the metadata, which is empty if no tensor wraps others.

    Raises:
        StateError: torchao has no name for the class of a tensor, or an inner tensor is missing.
    """
    start = f"{model_key}." if model_key else ""
    renamed: dict[str, str] = {}
    metadata: dict[str, str] = {}
    by_name = {each.name: each for each in tensors}
    for each in composites:
        name = each.name.removeprefix(start)
        module, _, parameter = name.rpartition(".")
        if missing := [key for key in each.value["tensors"] if f"{name}.{key}" not in by_name]:
            raise StateError(
                f"{each.name}: its inner tensor {missing[0]} is not written, or was saved for each "
                "shard: select all of its tensors, or load the checkpoint on as many ranks as "
                "saved it, and save the whole tensor"
            )
        if not module:
            raise StateError(
                f"{each.name}: torchao has no name for a tensor that is no part of a module: set "
                "model_key= to the key of the model"
            )
        renamed |= {f"{name}.{k}": f"{module}._{parameter}_{k}" for k in each.value["tensors"]}
        if all(by_name[f"{name}.{k}"].entry.same_as is None for k in each.value["tensors"]):
            metadata[name] = msgspec.json.encode(_entry_of(each.name, each.value)).decode()
    if not renamed:
        return [*tensors], {}
    plain = {each.name: '{"_type":"Tensor"}' for each in tensors if each.name not in renamed}
    clashes = {*renamed.values()} & plain.keys()
    if clashes:
        raise StateError(f"{min(clashes)}: torchao names an inner tensor so: rename this tensor")
    metadata |= plain
    metadata["tensor_names"] = msgspec.json.encode([*metadata]).decode()
    return [replace(each, name=renamed.get(each.name, each.name)) for each in tensors], metadata


def _entry_of(name: str, described: Fields) -> Fields:
    """Return what torchao's metadata has for a tensor.

    Raises:
        StateError: torchao has no name for a class.
    """
    class_name = described["class"]
    short = class_name.rpartition(":")[2]
    rule = rule_of(class_name)
    if TENSORS_IN_SAFETENSORS.get(short) != class_name or rule is None:
        raise StateError(
            f"{name}: torchao's names in safetensors have no {class_name}: leave it out with "
            "skip=, or export to another format"
        )
    shape: list[int] = described["shape"]
    data = {key: _object_of(name, value) for key, value in described["context"].items()}
    if rule.shape_in is not None:
        data[str(rule.shape_in)] = shape
    if rule.blocks_in is not None and isinstance(sizes := data.get(rule.blocks_in), list):
        pairs = zip(sizes, shape, strict=False)
        data[rule.blocks_in] = [whole if n is None else n for n, whole in pairs]
    return {"_type": short, "_data": data, "_tensor_data_names": [*described["tensors"]]}


def _object_of(name: str, value: Any) -> Any:
    """Return an encoded value of a context as torchao encodes it."""
    if isinstance(value, list):
        return [_object_of(name, each) for each in value]
    if not isinstance(value, Mapping):
        return value
    tag, fields = value.get(TAG), value
    if tag in ("tuple", "size"):
        return _object_of(name, value["v"])
    if tag == "dtype":
        return {"_type": "torch.dtype", "_data": value["v"]}
    if "class" in value:
        if (short := _SHORT_NAMES.get(value["class"])) is None:
            raise StateError(
                f"{name}: torchao's names in safetensors have no {value['class']}, which the "
                "tensor keeps: leave the tensor out with skip=, or export to another format"
            )
        if tag == "enum":
            return {"_type": short, "_data": value["v"]}
        fields = {key: each for key, each in value.items() if key != "class"}
        return {"_type": short, "_data": {k: _object_of(name, v) for k, v in fields.items()}}
    if tag is not None:
        raise StateError(f"{name}: torchao cannot store a value of kind {tag} of the context")
    return {key: _object_of(name, each) for key, each in fields.items()}
