"""The port of bindings: how saves and loads access the values of a state.

A `Binding` gives access to one value, for example a model. A package that binds values of its own
types registers a function `bind(name, value, context)` by an entry point of the group
`shardwise.bindings`. docs/ports/binding.md shows a complete package.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch.optim import Optimizer

from shardwise.kernel.boxes import Box
from shardwise.kernel.state.local_state import (
    Fragment,
    LocalState,
    ParameterOrder,
    Shards,
    TensorLeaf,
)
from shardwise.kernel.state.name_lookup import SavedNames, Selection
from shardwise.kernel.state.parameters import FlatRange, Parameter
from shardwise.kernel.state.plain_values import JsonValue, decode, encode
from shardwise.kernel.state.stated_geometry import copy_statements
from shardwise.kernel.state.tensors import is_shard, tensor_leaf

__all__ = [
    "Bind",
    "Binding",
    "Box",
    "Cells",
    "Context",
    "FlatRange",
    "Fragment",
    "JsonValue",
    "Layers",
    "LocalState",
    "Parameter",
    "ParameterOrder",
    "SavedNames",
    "Selection",
    "Shards",
    "TensorLeaf",
    "copy_statements",
    "decode",
    "encode",
    "is_shard",
    "tensor_leaf",
]


class Cells(Protocol):
    """Where a value keeps its tensors: lets a save see cheaply that they are those of the last one.

    A `Checkpointer` keeps this object from save to save. It must not keep the value alive: use weak
    references. Both methods run at each save, in the thread of the training.
    """

    def look(self) -> tuple[Mapping[str, object], Sequence[torch.Tensor]] | None:
        """Return what decides which tensors `Binding.local_state` returns; and these tensors.

        The first result has a few facts by their names, for example `{"keys": ["w", "b"]}`. They
        are compared with `==` at the next save, so each call returns new objects. If they are equal
        to those of the last save, `local_state` must return tensors of the same names, shapes and
        boxes, in the memory of the tensors in the second result, which must come in the same order.
        A `Checkpointer` compares the addresses, shapes, strides, dtypes, devices and placements of
        these tensors itself. None: the value does not exist any more, or is of another kind now.
        """

    def values(self) -> LocalState:
        """Return what `Binding.local_state` returns, without the tensors.

        It is called only if `look` has returned the facts of the last save.
        """


class Layers(Protocol):
    """Layers of a library in a module, whose state dict lacks something that they need.

    Only shardwise's own parts provide it, under the group `shardwise.layers` in `built_in.py`. A
    function finds them. It gets the module, and returns None if the module has no such layers.
    """

    def hidden(self, keys: Collection[str]) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the entries that the state dict lacks, given its keys."""

    def restore(self, entries: Mapping[str, Any]) -> Collection[str]:
        """Set what `load_state_dict` does not set, and return the keys that it then need not get.

        Args:
            entries: the loaded values by the keys of the module's state dict. The tensors of the
                layers have the loaded values.

        Raises:
            StateError: the layers cannot use what was saved.
        """

    def problems(self, module_name: str, saved: SavedNames) -> Iterable[str]:
        """Return why the layers cannot load what a checkpoint has; nothing if they can."""


class Binding:
    """Saves and loads one value of the state.

    A subclass must define `local_state`, and `restore` if it saves plain values. All other methods
    have a default.

    Attributes:
        name: the name under which the value is saved. All its tensors and values have this name, or
            names below it, such as `model.weight` for `model`.
        kind: the kind of value. Modules are saved and loaded before optimizers, and other values
            last.
        optimizers: the torch optimizers that change the value. Their next step waits until a
            snapshot has copied the state.
    """

    name: str
    kind: ClassVar[Literal["module", "optimizer", "value"]] = "value"
    optimizers: Sequence[Optimizer] = ()

    def local_state(self) -> LocalState:
        """Return the tensors and values to save: the part of this rank."""
        raise NotImplementedError

    def cells(self) -> Cells | None:
        """Return where the value keeps its tensors. It is called after `local_state`.

        None, which is the default: unknown. Then each save calls `local_state`.
        """
        return None

    def targets(self, saved: SavedNames, selection: Selection) -> LocalState:
        """Return the tensors and values to load. The default is what `local_state` returns.

        Nothing of the value may change yet, because the load fails if names or shapes do not match.
        If the value lacks tensors that the checkpoint has, such as the moments of an optimizer
        before its first step, this method allocates them, and `restore` sets them.

        Args:
            saved: the contents of the checkpoint.
            selection: the names to load.
        """
        return selection.select_from(self.local_state())

    def restore(self, values: Mapping[str, JsonValue]) -> None:
        """Set plain values, after all tensors are filled.

        Args:
            values: the encoded values of the whole state, by their names in the target.
        """

    def restore_ranks(self, encoded: Sequence[JsonValue], rank: int, world: int) -> None:
        """Set the per-rank value of this binding: `LocalState.per_rank` has it under the binding's
        name.

        Args:
            encoded: the values of all ranks that saved, encoded. They may be read when they are
                asked for, so ask for those that are needed.
            rank: this rank.
            world: the number of ranks that load.
        """

    def rebuild_weights(self) -> None:
        """Compute a module's weights from the loaded master weights. This is a collective.

        It is called after the load has succeeded on all ranks.
        """

    def parameters(self) -> Iterable[Parameter]:
        """Return the parameters of a module that an optimizer may hold, named as in the module.

        From them, an optimizer in the same state learns the names and the sharding of its state.
        """
        return ()

    def parameter_order(self) -> ParameterOrder | None:
        """Return the order in which an optimizer numbers its parameters; None if it is unknown."""
        return None


@dataclass(frozen=True, slots=True)
class Context:
    """The state to which a value belongs.

    Attributes:
        bindings: the bindings of the state. More of them are added while the state is being bound,
            so use them in the methods of a binding only.
        prefix: the prefix of the names in the dict that holds the value, for example `"actor."`.
        allow_pickle: whether the user allows pickled values.
        bind: returns the binding of another object under this name; None if its type is unknown.
            Wrappers use it.
    """

    bindings: Sequence[Binding]
    prefix: str
    allow_pickle: bool
    bind: Callable[[str, object], Binding | None]


Bind = Callable[[str, object, Context], Binding | None]
"""Returns the binding of a value of this name; None if the value is of another type.

Raises StateError if the value cannot be saved.
"""
