"""Composite tensors: tensors that wrap others, such as the codes and scales of a quantized tensor.

Example: a weight of torchao has the inner tensors `qdata` and `scale`. They are saved as tensors
`model.weight.qdata` and `model.weight.scale`. The plain value `model.weight` has the class of the
weight, and what else the class keeps (its context), such as the size of blocks. A load fills the
inner tensors of the live weight: the same bits come back, and nothing is quantized again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from shardwise.kernel.errors import StateError, user_code
from shardwise.kernel.manifest.dtypes import DTYPES
from shardwise.kernel.plugins import built_in, find_plugins, load_plugin
from shardwise.kernel.state.json_fields import Fields
from shardwise.kernel.state.plain_values import COMPOSITE
from shardwise.kernel.state.tensors import (
    SHARD,
    is_composite,
    local_tensor,
    parts_of_dtensor,
)
from shardwise.parts.tensor_classes.geometry import inner_box, inner_shape
from shardwise.parts.tensor_classes.layouts import (
    QUANTIZED_DTYPES,
    components,
    is_built_anew,
    needs_components,
    put_together,
    shape_of,
)
from shardwise.ports.binding import Box, Fragment, JsonValue, TensorLeaf, tensor_leaf
from shardwise.ports.module_binding import is_dtensor
from shardwise.ports.tensor_classes import Layout, Shape, TensorClass

GROUP = "shardwise.tensor_classes"
_ADVICE = (
    "register a rule for the class (docs/ports/tensor_classes.md), or save a plain tensor, for "
    "example .dequantize()"
)


@dataclass(frozen=True, slots=True)
class Composite:
    """A composite tensor, or the part of it that this rank holds.

    Attributes:
        class_name: its class, for example `torchao.optim.subclass_8bit:OptimState8bit`.
        rule: the rule of the class; None if it has none.
        inner: the inner tensors of this rank, by their names.
        context: what else the class keeps.
        shape: the shape of the outer tensor of this rank.
        dtype: the dtype of the outer tensor.
    """

    class_name: str
    rule: TensorClass | None
    inner: Mapping[str, torch.Tensor]
    context: Any
    shape: Shape
    dtype: torch.dtype

    def fields(self, encode: Callable[[object], JsonValue], inner: Fields) -> Fields:
        """Return the plain value that describes the tensor.

        Args:
            encode: encodes the context.
            inner: the encoded inner tensors, by their names.
        """
        context = portable(self.context, self.rule, self.shape)
        return {
            "$": COMPOSITE,
            "class": self.class_name,
            "context": encode(_as_plain(context)),
            "dtype": str(self.dtype).removeprefix("torch."),
            "shape": [*self.shape],
            "tensors": inner,
        }

    def refuse_unless_buildable(
        self, name: str, known: Mapping[str, type] = MappingProxyType({})
    ) -> None:
        """Refuse a tensor that a load could not build, because nothing says how.

        Raises:
            StateError: the class has no rule and is not known, or its context has objects.
        """
        find_class(name, self.class_name, known)
        if _as_plain(self.context) != self.context:
            raise StateError(
                f"{name}: a {self.class_name} keeps objects that no plain value describes "
                f"({self.context}), so a load can fill it only where it lives in a "
                "module: put the module into the state"
            )

    def leaves(
        self, name: str, like: torch.Tensor | None = None, shard: str = ""
    ) -> Iterator[TensorLeaf]:
        """Yield the inner tensors under their full names.

        Args:
            name: the name of the composite tensor.
            like: the DTensor whose local tensor this is. None: the tensor is whole, or it belongs
                to a shard in an unknown way.
            shard: ends the names of inner tensors that are saved for each shard. "": it follows
                from the DTensor.
        """
        pairs, sharding = None, None
        if is_dtensor(like) and (parts := parts_of_dtensor(name, like)) is not None:
            pairs, sharding = parts
            shard = SHARD + ",".join(map(str, sharding.splits)) if sharding.splits else ""
        whole = self.shape if like is None else tuple(like.shape)
        sizes = {key: tuple(each.shape) for key, each in self.inner.items()}
        layouts = self.rule.layouts(self.shape, sizes, self.context) if self.rule else {}
        for key, data in self.inner.items():
            full_name = f"{name}.{key}"
            if (nested := composite_of(full_name, data)) is not None:
                is_like = nested.shape == self.shape
                yield from nested.leaves(full_name, like if is_like else None, shard)
                continue
            leaf = tensor_leaf(full_name, data)
            placed = None
            if pairs is not None and key in layouts:
                placed = _place(layouts[key], leaf, self.shape, whole, pairs)
            if placed is not None:
                leaf = replace(placed, sharding=sharding if placed.shape == whole else None)
            elif shard:
                leaf = replace(leaf, of_shard=partial(replace, leaf, name=full_name + shard))
            yield leaf


def _place(
    layout: Layout,
    leaf: TensorLeaf,
    outer: Shape,
    whole: Shape,
    pairs: Sequence[tuple[Box, Box]],
) -> TensorLeaf | None:
    """Return an inner tensor as a part of the whole inner tensor; None if it cannot be placed.

    Args:
        layout: how it follows the outer tensor.
        leaf: the inner tensor of this rank.
        outer: the shape of the outer tensor of this rank.
        whole: the shape of the whole outer tensor.
        pairs: boxes of the whole outer tensor, and the same boxes on this rank.
    """
    if inner_shape(layout, outer, leaf.shape) != leaf.shape:
        return None
    shape = inner_shape(layout, whole, leaf.shape)
    fragments: dict[Box, Fragment] = {}
    for box, local in pairs:
        target = inner_box(layout, box, whole, shape)
        own = inner_box(layout, local, outer, leaf.shape)
        if target is None or own is None or target.shape != own.shape:
            return None
        for fragment in leaf.fragments:  # one, or none if it has no elements
            fragments[target] = Fragment(target, fragment.data[own.slices()])
    return replace(leaf, shape=shape, fragments=tuple(fragments.values()))


def composite_of(name: str, tensor: torch.Tensor) -> Composite | None:
    """Return the composite tensor that a tensor or the local tensor of a DTensor is; else None."""
    if not is_composite(tensor):
        return None
    local: Any = local_tensor(tensor)
    if needs_components(local):
        if is_dtensor(tensor):
            raise StateError(
                f"{name}: the local tensor of a DTensor is a {local.layout} tensor of "
                f"{local.dtype}, and which part of its values this rank holds is unknown: save "
                "a dense DTensor"
            )
        kind, inner, context = components(name, local)
        return Composite(kind, rule_of(kind), inner, context, shape_of(local), local.dtype)
    with user_code(name, "__tensor_flatten__()"):
        keys, context = local.__tensor_flatten__()
        inner = {key: getattr(local, key) for key in keys}
    for key, each in inner.items():
        if needs_components(each):
            raise StateError(
                f"{name}.{key}: a {type(local).__name__} that wraps a {each.layout} tensor of "
                f"{each.dtype} cannot be saved: {_ADVICE}"
            )
    name_of_class = class_name(type(local))
    rule = rule_of(name_of_class)
    return Composite(name_of_class, rule, inner, context, tuple(local.shape), local.dtype)


def encode_composite(
    tensor: torch.Tensor, name: str, encode: Callable[[object, object], JsonValue]
) -> Fields:
    """Return a composite tensor as a plain value, which is a part of another value.

    Args:
        tensor: the tensor.
        name: its full name, for error messages.
        encode: encodes a part of the tensor, given the key of the part.

    Raises:
        StateError: a load could not build the tensor.
    """
    composite = composite_of(name, tensor)
    if composite is None or is_dtensor(tensor):
        raise StateError(
            f"{name}: a DTensor of {type(local_tensor(tensor)).__name__} cannot be part of this "
            "value: make it an item of the state, or put the module that has it into the state"
        )
    composite.refuse_unless_buildable(name)
    parts = composite.inner
    if is_built_anew(composite.class_name):
        # A load fills what is encoded here. The live tensor would be left with half of the values.
        parts = {key: each.clone() for key, each in parts.items()}
    inner = {key: encode(key, each) for key, each in parts.items()}
    return composite.fields(partial(encode, "context"), inner)


def decode_composite(
    described: Fields, name: str, decode: Callable[[object, JsonValue], Any]
) -> torch.Tensor:
    """Return the tensor that `encode_composite` encoded. The input is not trusted.

    Raises:
        StateError: the input is malformed, or the class is unknown.
    """
    check_description(name, described)
    inner = {key: decode(key, each) for key, each in described["tensors"].items()}
    context = decode("context", described["context"])
    tensor: torch.Tensor = build(name, described, context, inner, tuple(described["shape"]))
    return tensor


def empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a composite tensor of the same class and context, whose memory is not initialized."""
    local: Any = local_tensor(tensor)
    if not hasattr(local, "__tensor_flatten__"):
        return torch.empty_like(tensor, device=device)  # a load builds it anew
    keys, context = local.__tensor_flatten__()
    inner: dict[str, torch.Tensor] = {}
    for key in keys:
        each = getattr(local, key)
        make = empty_like if is_composite(each) else torch.empty_like
        inner[key] = make(each, device=device)
    made: torch.Tensor = type(local).__tensor_unflatten__(
        inner, context, local.shape, local.stride()
    )
    if not is_dtensor(tensor):
        return made
    make_dtensor: Any = torch.distributed.tensor.DTensor  # from_local() needs more of the class
    wrapped: torch.Tensor = make_dtensor(made, tensor._spec, requires_grad=False)
    return wrapped


def check_description(name: str, described: Fields) -> None:
    """Check what a checkpoint says of a composite tensor.

    Raises:
        StateError: it is malformed.
    """
    shape, inner = described.get("shape"), described.get("tensors")
    least = -1 if is_built_anew(described.get("class")) else 0
    is_shape = isinstance(shape, list) and all(type(n) is int and n >= least for n in shape)
    if not (is_shape and isinstance(inner, dict) and described.keys() >= {"class", "context"}):
        raise StateError(
            f"{name}: the saved description of a tensor is malformed: load another checkpoint, or "
            "leave it out with skip="
        )
    if described.get("dtype") not in DTYPES.keys() | QUANTIZED_DTYPES:
        raise StateError(f"{name}: the dtype {str(described.get('dtype'))[:40]!r} is unknown")


def build(
    name: str,
    described: Fields,
    context: object,
    inner: Mapping[str, Any],
    shape: Shape,
    known: Mapping[str, type] = MappingProxyType({}),
) -> Any:
    """Build a composite tensor from its inner tensors.

    Args:
        name: its full name, for error messages.
        described: what `Composite.fields` has returned; it is not trusted.
        context: the decoded context.
        inner: the inner tensors.
        shape: the shape of the tensor.
        known: classes that may be built without a rule, by their names.

    Raises:
        StateError: the class is unknown, or makes another tensor of them.
    """
    rule, cls = find_class(name, described["class"], known)
    if is_built_anew(described["class"]):
        tensor = put_together(name, described["class"], context, inner, shape)
    else:
        context = _of_shape(context, rule, torch.Size(shape))
        stride = torch.empty(shape, device="meta").stride()
        try:
            tensor = cls.__tensor_unflatten__(inner, context, torch.Size(shape), stride)
        except Exception as error:  # code of the class
            raise StateError(
                f"{name}: {cls.__name__}.__tensor_unflatten__() cannot build what was saved: "
                f"{type(error).__name__}: {error}: load with the version of the library that saved "
                "it, or leave it out with skip="
            ) from error
    if shape_of(tensor) != shape or str(tensor.dtype) != f"torch.{described['dtype']}":
        raise StateError(
            f"{name}: the saved inner tensors make a {tensor.dtype} tensor of shape "
            f"{[*shape_of(tensor)]}, but {described['dtype']} and {[*shape]} were saved: load with "
            "the version of the library that saved it"
        )
    return tensor


def find_class(
    name: str, name_of_class: object, known: Mapping[str, type] = MappingProxyType({})
) -> tuple[TensorClass | None, Any]:
    """Return the rule of a class that a checkpoint names, and the class. Nothing is imported.

    Raises:
        StateError: the class has no rule and is not known, or is not imported.
    """
    text = str(name_of_class)
    module, _, qualified = text.partition(":")
    rule = rule_of(text)
    found: Any = known.get(text)
    if is_built_anew(text):
        return rule, torch.Tensor
    if rule is not None:
        found = sys.modules.get(module)
        for part in qualified.split("."):
            found = getattr(found, "__dict__", {}).get(part)
    if not (isinstance(found, type) and issubclass(found, torch.Tensor)):
        raise StateError(
            f"{name}: a tensor of the class {text[:80]}, "
            + (f"which has no rule: {_ADVICE}" if rule is None else f"which needs: import {module}")
        )
    return rule, found


def class_name(cls: type) -> str:
    """Return the name of a class, with its module."""
    return f"{cls.__module__}:{cls.__qualname__}"


def has_rules(package: str) -> bool:
    """Return whether a package has rules for classes of tensors.

    PyTorch has none: its rules are for layouts, whose names are no classes.
    """
    return package != "torch" and any(
        entry.name == package for entry in (*find_plugins(GROUP), *built_in(GROUP))
    )


def rule_of(class_name: str) -> TensorClass | None:
    """Return the rule of a class. Packages are asked first."""
    package = class_name.partition(":")[0].partition(".")[0]
    for entry in (*find_plugins(GROUP), *built_in(GROUP)):
        found = load_plugin(entry)(class_name) if entry.name == package else None
        if isinstance(found, TensorClass):
            return found
    return None


def portable(context: Any, rule: TensorClass | None, shape: Shape) -> Any:
    """Return a context without what follows from the shape of a shard."""
    if rule is not None and rule.shape_in is not None:
        context = _with(context, rule.shape_in, None)
    if rule is not None and rule.blocks_in is not None and (sizes := context.get(rule.blocks_in)):
        pairs = zip(sizes, shape, strict=False)
        spans = type(sizes)(None if n == whole else n for n, whole in pairs)
        context = _with(context, rule.blocks_in, spans)
    return context


def _of_shape(context: Any, rule: TensorClass | None, shape: torch.Size) -> Any:
    """Return a context with what `portable` left out, for another shape."""
    if rule is not None and rule.shape_in is not None:
        context = _with(context, rule.shape_in, shape)
    if rule is not None and rule.blocks_in is not None and (spans := context.get(rule.blocks_in)):
        pairs = zip(spans, shape, strict=False)
        sizes = type(spans)(whole if n is None else n for n, whole in pairs)
        context = _with(context, rule.blocks_in, sizes)
    return context


def _with(context: Any, key: str | int, value: object) -> Any:
    """Return a copy of a context with another value under a key or index."""
    changed: Any = dict(context) if isinstance(context, Mapping) else [*context]
    changed[key] = value
    return changed


def _as_plain(context: Any) -> Any:
    """Return a context with dicts in place of objects, whose classes the dicts name."""
    if is_dataclass(context) and not isinstance(context, type):
        values = {each.name: _as_plain(getattr(context, each.name)) for each in fields(context)}
        return {"class": class_name(type(context)), **values}
    if isinstance(context, tuple) and hasattr(context, "_asdict"):
        return {"class": class_name(type(context)), **_as_plain(context._asdict())}
    if isinstance(context, Mapping):
        return {key: _as_plain(value) for key, value in context.items()}
    if type(context) in (list, tuple):
        return type(context)(map(_as_plain, context))
    return context
