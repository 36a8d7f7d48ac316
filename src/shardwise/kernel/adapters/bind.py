"""Bind a state: find the `Binding` of each value, by the value's type."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from importlib.metadata import EntryPoint
from operator import attrgetter
from typing import Any, cast

import numpy as np
import torch
from torch.optim import Optimizer

from shardwise.kernel.adapters.modules import ModuleBinding, modules_in
from shardwise.kernel.adapters.optimizers import OptimizerBinding
from shardwise.kernel.adapters.values import ObjectBinding, PerRankBinding, TensorBinding
from shardwise.kernel.errors import ShardwiseError, StateError
from shardwise.kernel.manifest.manifest import check_name
from shardwise.kernel.plugins import (
    SWITCH,
    PluginError,
    built_in,
    failure_of,
    find_plugins,
    ignore_failure,
    load_plugin,
    package_of,
)
from shardwise.kernel.state.local_state import LocalState, Shards
from shardwise.kernel.state.per_rank import PerRankValue, Stateful
from shardwise.ports.binding import Bind, Binding, Context

State = MutableMapping[str, object]
GROUP = "shardwise.bindings"


def bind_state(state: State, *, allow_pickle: bool = False) -> list[Binding]:
    """Return bindings for all values in a state dict: modules first, then optimizers, then others.

    Raises:
        StateError: a value cannot be saved, or the package that binds it has failed.
    """
    if not isinstance(state, MutableMapping):
        raise StateError(
            f"the state is a {type(state).__name__}: it must be a dict, such as "
            '{"model": model, "optimizer": optimizer}'
        )
    bindings: list[Binding] = []
    functions = [function for _, function in binders()]
    try:
        for binding in _bind_dict(state, "", bindings, functions, allow_pickle):
            bindings.append(binding)  # noqa: PERF402 - other bindings look at the list so far
    except RecursionError as error:
        raise StateError(
            "the state has a dict that is nested deeper than Python's stack allows, or that "
            f"contains itself, under one of the keys {[*state]}: remove the reference of the dict "
            "to itself, or flatten it"
        ) from error
    return sorted(bindings, key=attrgetter("kind"))  # this is also the order of the alphabet


def binders() -> list[tuple[str, Bind]]:
    """Return the functions that bind values of plug-ins and frameworks, by the modules of these.

    Only modules that are imported count, because no others can have made a value.
    """
    plugins = [plugin for plugin in find_plugins(GROUP) if plugin.name in sys.modules]
    names = " ".join(plugin.name for plugin in plugins)
    found: list[tuple[str, Bind]]
    found = [(names, partial(_bind_by_plugins, plugins=plugins))] if plugins else []
    return found + [
        (each.name, each.load()) for each in built_in(GROUP) if each.name in sys.modules
    ]


def local_state_of(state: State, *, allow_pickle: bool) -> LocalState:
    """Return the local state: the tensors and values that this rank saves of a state.

    Raises:
        StateError: a value cannot be saved, or its name is not allowed in a manifest.
    """
    return unite(each.local_state() for each in bind_state(state, allow_pickle=allow_pickle))


def unite(parts: Iterable[LocalState]) -> LocalState:
    """Return the local state of a state, given those of its values; see `local_state_of`."""
    local_state = LocalState.unite(parts)
    for name in local_state.names():
        check_name(name)
    return local_state


def torch_optimizers_in(state: Mapping[str, object]) -> list[Optimizer]:
    """Return the torch optimizers in a state, also those that other optimizers wrap.

    The list is empty if a value cannot be saved: the save of the state raises this error.
    """
    try:
        bindings = bind_state(dict(state), allow_pickle=True)
    except ShardwiseError:
        return []
    return [optimizer for binding in bindings for optimizer in binding.optimizers]


def _bind_dict(
    container: State,
    prefix: str,
    bindings: list[Binding],
    functions: Sequence[Bind],
    allow_pickle: bool,
) -> Iterator[Binding]:
    """Yield bindings for the items of a dict, and for those of the dicts in it.

    Args:
        container: the dict.
        prefix: the prefix of the names of all items.
        bindings: the bindings of the whole state so far.
        functions: the functions that bind types of plugins and frameworks.
        allow_pickle: whether the user allows pickled values.
    """

    def bind(name: str, value: object) -> Binding | None:
        return _bind_object(name, value, context, functions)

    context = Context(bindings, prefix, allow_pickle, bind)
    for key, value in container.items():
        if not isinstance(key, str) or not key:
            where = prefix.removesuffix(".") or "the state"
            raise StateError(
                f"{where}: the key {key!r} is not a nonempty string: use text, for example 'model'"
            )
        name = f"{prefix}{key}"
        if isinstance(value, (torch.Tensor, np.ndarray, Shards)):
            yield TensorBinding(name, value)  # checked first: a state may have thousands of tensors
        elif (binding := _bind_object(name, value, context, functions)) is not None:
            yield binding
        elif is_nested_state(value):
            yield from _bind_dict(cast(State, value), f"{name}.", bindings, functions, allow_pickle)
        else:
            yield _bind_item(name, container, key, allow_pickle=allow_pickle)


def _bind_item(name: str, container: State, key: str, *, allow_pickle: bool) -> ObjectBinding:
    get_item, set_item = partial(container.__getitem__, key), partial(container.__setitem__, key)
    return ObjectBinding(name, get_item, set_item, allow_pickle=allow_pickle)


def bind_value(name: str, container: State, key: str, *, allow_pickle: bool) -> Binding:
    """Return the binding of one value of a state, as `bind_state` does.

    Args:
        name: the name of the value.
        container: the dict that has it. It must not be a dict to bind value by value.
        key: its key there.
        allow_pickle: whether the user allows pickled values.
    """
    value = container[key]
    if isinstance(value, (torch.Tensor, np.ndarray, Shards)):
        return TensorBinding(name, value)
    functions = [function for _, function in binders()]

    def bind(name: str, value: object) -> Binding | None:
        return _bind_object(name, value, context, functions)

    context = Context((), name.removesuffix(key), allow_pickle, bind)
    return _bind_object(name, value, context, functions) or _bind_item(
        name, container, key, allow_pickle=allow_pickle
    )


def _bind_object(
    name: str, value: object, context: Context, functions: Sequence[Bind]
) -> Binding | None:
    """Return the binding of an object that the load changes in place; None for plain values."""
    for bind in functions:
        if (binding := bind(name, value, context)) is not None:
            return binding
    if modules := modules_in(value):
        return ModuleBinding(name, modules, context)
    parts: Sequence[Any] = value if isinstance(value, (list, tuple)) else [value]
    if parts and all(isinstance(part, Optimizer) for part in parts):
        return OptimizerBinding(name, parts, context)
    if isinstance(value, PerRankValue):
        return PerRankBinding(name, value, allow_pickle=context.allow_pickle)
    if isinstance(value, Stateful) and not isinstance(value, type):
        return ObjectBinding(
            name, value.state_dict, value.load_state_dict, allow_pickle=context.allow_pickle
        )
    return None


def _bind_by_plugins(
    name: str, value: object, context: Context, plugins: Sequence[EntryPoint]
) -> Binding | None:
    """Return the binding that a package makes for an object; None if none does.

    A package that fails is ignored, unless the object belongs to the module that it binds.

    Raises:
        StateError: the package of the object's module fails, or several packages bind the object.
    """
    made: dict[str, Binding] = {}
    for plugin in plugins:
        try:
            function = load_plugin(plugin)
            try:
                binding = function(name, value, context)
            except ShardwiseError:
                raise
            except (Exception, SystemExit) as error:
                raise failure_of(plugin, error) from error
        except PluginError as error:  # noqa: PERF203 - few plug-ins
            if _is_of_module(value, plugin.name):
                raise
            ignore_failure(error)
        else:
            if binding is not None:
                made[package_of(plugin)] = binding
    if len(made) > 1:
        raise StateError(
            f"{name}: the packages {' and '.join(made)} both bind this {type(value).__name__}: "
            f"uninstall one of them, or set {SWITCH} to the names of the packages to use"
        )
    return next(iter(made.values()), None)


def _is_of_module(value: object, module: str) -> bool:
    """Return whether a module of Python defines the class of an object, or of a part of a model."""
    parts: list[object] = [part for each in modules_in(value) or () for part in each.modules()]
    classes = {cls for part in parts or [value] for cls in type(part).__mro__}
    return any(f"{cls.__module__}.".startswith(f"{module}.") for cls in classes)


def is_nested_state(value: object) -> bool:
    """Return whether a value is a nonempty dict with string keys, to bind value by value."""
    nonempty = isinstance(value, dict) and type(value) in (dict, OrderedDict) and bool(value)
    return nonempty and all(isinstance(key, str) for key in cast(Mapping[object, object], value))
