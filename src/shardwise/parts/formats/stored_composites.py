"""Tensors in files that wrap others: describe them as a save does, and join their shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from shardwise.kernel.boxes import Box
from shardwise.kernel.errors import FormatError, ShardwiseError, StateError
from shardwise.kernel.state.plain_values import COMPOSITE, TAG
from shardwise.parts.formats.containers.pickle_values import PickledInstance
from shardwise.parts.formats.foreign import (
    Placed,
    StoredArray,
    StoredComposite,
    StoredTensor,
)
from shardwise.parts.tensor_classes.composite import portable, rule_of
from shardwise.parts.tensor_classes.geometry import inner_box, inner_shape
from shardwise.parts.tensor_classes.torchao_objects import FIELDS, MEMBERS
from shardwise.ports.binding import JsonValue, encode
from shardwise.ports.tensor_classes import Layout, Shape


class UnplaceableError(FormatError):
    """Nobody knows which part of an inner tensor belongs to a shard."""


def describe(name: str, tensor: StoredComposite) -> dict[str, Any]:
    """Return the plain value that describes a tensor, as a save describes it.

    Raises:
        StateError: the context has an object whose fields are unknown.
    """
    inner: dict[str, JsonValue] = {}
    for key, each in tensor.inner:
        full_name = f"{name}.{key}"
        inner[key] = {TAG: "tensor", "name": full_name}
        if isinstance(each, StoredComposite):
            inner[key] = describe(full_name, each)
    return {
        TAG: COMPOSITE,
        "class": tensor.class_name,
        "context": _context_of(name, tensor),
        "dtype": tensor.dtype,
        "shape": [*tensor.shape],
        "tensors": inner,
    }


def _context_of(name: str, tensor: StoredComposite) -> JsonValue:
    """Return the encoded context, without what follows from the shape of a shard."""
    with _refuse_malformed(name, tensor.class_name):
        context = portable(tensor.context, rule_of(tensor.class_name), tensor.shape)
    return _encode(context, f"{name}.context")


@contextmanager
def _refuse_malformed(name: str, class_name: str) -> Iterator[None]:
    """Raise a FormatError if a rule fails, because a file has values that no tensor has."""
    try:
        yield
    except ShardwiseError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise FormatError(
            f"{name}: the file is damaged, or another version of {class_name.replace(':', '.')} "
            f"wrote it: block sizes, shapes or inner tensors contradict each other: {error!r}"
        ) from error


def _encode(value: Any, name: str) -> JsonValue:
    if isinstance(value, PickledInstance):
        return _encode_object(value, name)
    if isinstance(value, dict) and all(type(key) is str and key != TAG for key in value):
        return {key: _encode(each, f"{name}.{key}") for key, each in value.items()}
    if type(value) in (list, tuple):
        items: JsonValue = [_encode(each, name) for each in value]
        return items if type(value) is list else {TAG: "tuple", "v": items}
    return encode(value, name)


def _encode_object(value: PickledInstance, name: str) -> JsonValue:
    """Return a member of an enum, a named tuple or a dataclass as a save encodes it."""
    members = MEMBERS.get(value.name, {})
    if len(value.args) == 1 and isinstance(value.args[0], (str, int)):
        member = value.args[0]
        if member in members or member in members.values():
            return {TAG: "enum", "class": value.name, "v": members.get(member, member)}
    keys = FIELDS.get(value.name, ()) if value.args else ()
    if len(value.args) != len(keys) or value.name in MEMBERS:
        raise StateError(
            f"{name}: it has an object of {value.name.replace(':', '.')} whose fields are unknown: "
            "load the file with the library of this class, and save it with shardwise"
        )
    fields = {**dict(zip(keys, value.args, strict=True)), **value.fields}
    return {"class": value.name, **{k: _encode(v, f"{name}.{k}") for k, v in fields.items()}}


Shard = tuple[Sequence[tuple[Box, Box]], StoredComposite]
"""The boxes of the whole tensor that a shard has, with those in the shard; and the shard."""


def join_shards(name: str, whole: Shape, shards: Sequence[Shard]) -> StoredComposite:
    """Return the whole tensor that shards make up.

    Args:
        name: its name, for messages.
        whole: its shape.
        shards: the shards; at least one.

    Raises:
        FormatError: the shards differ in their classes or contexts.
        UnplaceableError: nobody knows which part of an inner tensor belongs to a shard.
    """
    first = shards[0][1]
    contexts = [_context_of(name, each) for _, each in shards]
    kinds = {(each.class_name, each.dtype, *(key for key, _ in each.inner)) for _, each in shards}
    if len(kinds) > 1 or any(each != contexts[0] for each in contexts):
        raise FormatError(
            f"{name}: its shards differ in what their class {first.class_name} keeps: the files "
            "are from different saves: copy all files of one save"
        )
    rule = rule_of(first.class_name)
    with _refuse_malformed(name, first.class_name):
        layouts = [
            {} if rule is None else rule.layouts(each.shape, _shapes(each), each.context)
            for _, each in shards
        ]
        inner = tuple(
            (key, _join_inner(name, key, whole, shards, layouts)) for key, _ in first.inner
        )
        context = portable(first.context, rule, first.shape)
    return StoredComposite(first.class_name, first.dtype, whole, context, inner)


def _shapes(tensor: StoredComposite) -> dict[str, Shape]:
    return {key: each.shape for key, each in tensor.inner}


def _join_inner(
    name: str,
    key: str,
    whole: Shape,
    shards: Sequence[Shard],
    layouts: Sequence[Mapping[str, Layout]],
) -> StoredTensor:
    """Return the inner tensor of a key."""
    placed: list[tuple[Shape, Placed]] = []
    for (pairs, shard), of_shard in zip(shards, layouts, strict=True):
        array = dict(shard.inner)[key]
        layout = of_shard.get(key)
        is_whole = [box.shape for box, _ in pairs] == [whole]
        if not isinstance(array, StoredArray):
            raise _unplaceable(name, key, shard)
        if layout is None and (is_whole or array.shape in ((), (1,), (1, 1))):
            placed.append((array.shape, ((0,) * len(array.shape), array)))
            continue
        for box, local in pairs:
            if layout is None or inner_shape(layout, shard.shape, array.shape) != array.shape:
                raise _unplaceable(name, key, shard)
            shape = inner_shape(layout, whole, array.shape)
            target = inner_box(layout, box, whole, shape)
            own = inner_box(layout, local, shard.shape, array.shape)
            if target is None or own is None or target.shape != own.shape:
                raise _unplaceable(name, key, shard)
            placed.append((shape, (target.offset, array.part(own.offset, own.shape))))
    if len({(shape, array.dtype) for shape, (_, array) in placed}) != 1:
        raise _unplaceable(name, key, shards[0][1])
    boxes: dict[tuple[Shape, Shape], Placed] = {}
    replicas: list[Placed] = []
    for _, (offset, array) in placed:
        if boxes.setdefault((offset, array.shape), (offset, array))[1] is not array:
            replicas.append((offset, array))
    shape, (_, sample) = placed[0]
    return StoredTensor(sample.dtype, shape, (*boxes.values(),), (*replicas,))


def _unplaceable(name: str, key: str, shard: StoredComposite) -> UnplaceableError:
    return UnplaceableError(
        f"{name}: each shard has its own {key}, and the class "
        f"{shard.class_name.replace(':', '.')} does not say which part of the whole {key} it is: "
        "load the checkpoint with the program that wrote it, on as many ranks, and save it with "
        "shardwise; or leave the tensor out with skip_unknown=True"
    )
