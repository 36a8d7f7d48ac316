"""The port of tensor classes: how tensors that wrap other tensors are saved and split.

A quantized tensor, for example, wraps the tensor of its codes and that of its scales. PyTorch calls
such a class a traceable wrapper subclass: it has `__tensor_flatten__` and `__tensor_unflatten__`.
Each inner tensor is saved under a name of its own, such as `model.weight.qdata`. The plain value
`model.weight` has the class and what else the class keeps (its context).

Without a rule, the inner tensors of a sharded tensor are saved for each shard, and load with the
same sharding only. A package registers rules for its classes by an entry point of the group
`shardwise.tensor_classes`, whose name is that of the package, such as `torchao`. The entry point is
a function `rule(class_name)`, which returns a `TensorClass`, or None for a class without a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Axis:
    """A dimension of an inner tensor: which dimension of the outer tensor it follows, and how.

    Attributes:
        dim: the dimension of the outer tensor. None: the inner dimension is the same on all ranks.
        block: how many indices of the outer dimension share one index of the inner dimension. At
            the end of the outer dimension, there may be fewer.
        align: a shard must begin and end at a multiple of this many outer indices, or at the end.
            Default: at a multiple of `block`.
    """

    dim: int | None
    block: int = 1
    align: int = 1


@dataclass(frozen=True, slots=True)
class Flat:
    """An inner tensor of one dimension, which follows the flattened outer tensor.

    Attributes:
        block: how many elements of the outer tensor share one element of the inner tensor.
    """

    block: int = 1


Layout = Flat | Sequence[Axis]
"""How an inner tensor follows the outer tensor: flattened, or one `Axis` for each dimension."""


@dataclass(frozen=True, slots=True)
class TensorClass:
    """The rule of a class.

    Attributes:
        layouts: returns how the inner tensors follow the outer one. It gets the shape of the outer
            tensor, the shapes of the inner tensors by their names, and the context. Inner tensors
            that it leaves out are saved for each shard. The shapes are those of a shard at a save,
            and those of the whole tensors at a load.
        shape_in: the key or index of the context that has the shape of the outer tensor.
        blocks_in: the key of the context that has the size of a block in each dimension. A block
            that spans a dimension does so on all ranks.
        saved_as: the inner tensor that is the whole state, if it has the shape and dtype of the
            outer one. It is saved under the name of the outer tensor, without the context. So a
            checkpoint also loads into a plain tensor.
        after_load: called with the tensor after a load has filled it.
        not_compared: keys of the context that choose an implementation, and change no value. The
            target keeps its own.
        context_of: returns the context, given the attributes of a tensor in a pickle, which include
            the `shape` and `dtype` of the outer tensor. Objects among them are records of their
            attributes. Default: a dict of the attributes that are no tensors.
    """

    layouts: Callable[[Shape, Mapping[str, Shape], Any], Mapping[str, Layout]]
    shape_in: str | int | None = None
    blocks_in: str | None = None
    saved_as: str | None = None
    after_load: Callable[[Any], object] | None = None
    not_compared: Collection[str] = ()
    context_of: Callable[[Mapping[str, Any]], Any] | None = None
