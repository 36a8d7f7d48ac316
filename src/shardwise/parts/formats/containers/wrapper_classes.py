"""Tensors in pickles that wrap others, such as quantized tensors. No code of their classes runs.

A pickle has the class, the dtype and shape, and the attributes of such a tensor. Which attributes
the class keeps besides its inner tensors (its context), the rule of the class knows; see
`shardwise.ports.tensor_classes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from shardwise.kernel.manifest.dtypes import DTYPES
from shardwise.parts.formats.containers.pickle_values import (
    AllowedCallable,
    PickledInstance,
    UnknownObject,
    UnsupportedValueError,
)
from shardwise.parts.formats.foreign import StoredArray, StoredComposite, StoredPart
from shardwise.parts.tensor_classes.composite import has_rules, rule_of

MOST_DIMS = 64
_STORED = StoredArray, StoredComposite, StoredPart


def find_class(module: str, name: str) -> AllowedCallable | None:
    """Return a constructor for a class of a package that has rules for tensors; else None.

    Its objects become `PickledInstance`s, because the context of a tensor may have any of them.
    """
    if not has_rules(module.partition(".")[0]):
        return None
    class_name = f"{module}:{name}"[:200]
    return AllowedCallable(class_name, partial(_make_instance, class_name))


def _make_instance(class_name: str, *args: object) -> PickledInstance:
    return PickledInstance(class_name, args)


def rebuild_composite(class_name: str, args: object, state: object) -> object:
    """Return a tensor that wraps others. What only changes its use in training is left out.

    Args:
        class_name: its class.
        args: the class, the dtype, the shape and more.
        state: its attributes.

    Returns:
        The tensor; or the only inner tensor, if that is what a save of the tensor has; or an
        `UnknownObject`, if the class has no rule.

    Raises:
        TypeError, ValueError: an argument is malformed.
        UnsupportedValueError: an inner tensor is a DTensor, or the dtype is not supported.
    """
    if (rule := rule_of(class_name)) is None:
        return UnknownObject(class_name.replace(":", "."))
    if not isinstance(args, tuple) or len(args) < 3 or not isinstance(args[1], torch.dtype):
        raise TypeError(f"a {class_name} has no dtype and shape")
    dtype = str(args[1]).removeprefix("torch.")
    shape = require_sizes(args[2], f"the shape of a {class_name}")
    (instance := PickledInstance(class_name)).set_state(state)
    attributes = instance.fields
    if rule.saved_as is not None:
        inner = attributes.get(rule.saved_as)
        if not isinstance(inner, StoredArray) or (inner.dtype, inner.shape) != (dtype, shape):
            raise TypeError(
                f"a {class_name} has no plain tensor {rule.saved_as} of dtype {dtype} and shape "
                f"{list(shape)}"
            )
        return inner
    inner_tensors = {key: each for key, each in attributes.items() if isinstance(each, _STORED)}
    if any(isinstance(each, StoredPart) for each in inner_tensors.values()):
        raise UnsupportedValueError(
            f"a {class_name} that wraps a DTensor",
            "wrap plain tensors in it, and those in DTensors",
        )
    if not inner_tensors or dtype not in DTYPES:
        raise TypeError(f"a {class_name} of dtype {dtype} has no inner tensors")
    others = {key: each for key, each in attributes.items() if key not in inner_tensors}
    if rule.context_of is None:
        context: Any = others
    else:
        context = rule.context_of(_with_shape(attributes, args[1], shape))
    return StoredComposite(class_name, dtype, shape, context, (*inner_tensors.items(),))


def _with_shape(
    attributes: Mapping[str, object], dtype: torch.dtype, shape: tuple[int, ...]
) -> Mapping[str, object]:
    return {"shape": torch.Size(shape), "dtype": dtype, **attributes}


def require_sizes(values: object, subject: str) -> tuple[int, ...]:
    """Return integers from a pickle, for example a shape.

    Raises:
        TypeError: the value is not a list, or has too many items.
        ValueError: an item is not an integer from 0 to 2**62 - 1.
    """
    if not isinstance(values, (tuple, list)) or len(values) > MOST_DIMS:
        raise TypeError(f"{subject} is not a list of at most {MOST_DIMS} integers")
    if not all(type(n) is int and 0 <= n < 2**62 for n in values):
        raise ValueError(f"{subject} contains a value that is not an integer from 0 to 2**62 - 1")
    return tuple(values)
