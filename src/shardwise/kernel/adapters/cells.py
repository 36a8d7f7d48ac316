"""Where modules and torch's optimizers keep their tensors, so that a save sees what has changed.

`ModuleCells` and `OptimizerCells` look at the dicts that hold tensors, and at what decides what a
`state_dict` returns. Anything unusual, such as an overridden `state_dict`, has no cells.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import itemgetter, methodcaller
from typing import Any
from weakref import ref

import torch
from torch import nn

from shardwise.kernel.adapters.optimizer_groups import hyperparameters_of
from shardwise.kernel.adapters.optimizer_views import (
    View,
    groups_of,
    has_own_methods,
    inner_optimizers,
)
from shardwise.kernel.state.local_state import LocalState
from shardwise.kernel.state.parameters import LOCAL
from shardwise.kernel.state.plain_values import encode

_values = methodcaller("values")
_HELD = itemgetter("_parameters", "_buffers", "_modules")
_HOOKS = itemgetter("_state_dict_hooks", "_state_dict_pre_hooks")
_NOT_SAVED = itemgetter("_non_persistent_buffers_set")
_ATTRIBUTES = {
    *("_parameters", "_buffers", "_modules", "_state_dict_hooks", "_state_dict_pre_hooks"),
    "_non_persistent_buffers_set",
}
_METHODS = {
    name: getattr(nn.Module, name)
    for name in (
        *("state_dict", "_save_to_state_dict", "get_extra_state", "_named_members"),
        *("modules", "named_modules", "parameters", "named_parameters", "buffers", "named_buffers"),
    )
}
"""The methods that decide what is saved of a module, as torch defines them."""
_NAMES = frozenset(_METHODS)
_DICTS = {dict, OrderedDict}
_NO_CODE_OF_USERS = "torch.distributed.fsdp._fully_shard."
"""The hooks of this package change nothing while a module is sharded, and then only its tensors."""

Facts = dict[str, object]


def module_cells(roots: Iterable[nn.Module]) -> ModuleCells | None:
    """Return the cells of modules; None if their state dicts may have other tensors."""
    modules: dict[nn.Module, None] = {}
    stack = [*roots]
    while stack:
        module = stack.pop()
        if module in modules:
            continue
        modules[module] = None
        if not vars(module).keys() >= _ATTRIBUTES:  # a ScriptModule
            return None
        hooks = chain.from_iterable(each.values() for each in _HOOKS(vars(module)))
        tensors = chain(module._parameters.values(), module._buffers.values())
        if not all(map(_is_harmless, hooks)) or not all(map(_is_tensor_or_none, tensors)):
            return None
        stack += [each for each in module._modules.values() if each is not None]
    cells = ModuleCells(modules)
    found = cells.look()
    return cells if found is not None and not found[0]["overrides"] else None


def _is_tensor_or_none(value: object) -> bool:
    return value is None or isinstance(value, torch.Tensor)


def _is_harmless(hook: Any) -> bool:
    function = getattr(hook, "hook", hook)  # torch wraps hooks
    return f"{getattr(function, '__module__', '')}.".startswith(_NO_CODE_OF_USERS)


class ModuleCells:
    """The parameters and buffers of modules.

    Args:
        modules: all modules, also those inside others.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = [*map(ref, modules)]

    def look(self) -> tuple[Facts, Sequence[torch.Tensor]] | None:
        """Return the facts and the tensors; see `Cells.look`."""
        modules = [get() for get in self._modules]
        attributes = [vars(each) for each in modules if each is not None]
        if len(attributes) < len(modules) or any(
            not each.keys() >= _ATTRIBUTES for each in attributes
        ):
            return None
        held = [*chain.from_iterable(map(_HELD, attributes))]
        if not _DICTS.issuperset(map(type, held)):
            return None
        hooks = [*chain.from_iterable(map(_HOOKS, attributes))]
        values = [*chain.from_iterable(map(_values, held))]
        classes = [*map(type, modules)]
        overrides = sum(not each.keys().isdisjoint(_NAMES) for each in attributes)
        overrides += sum(map(_overrides, {*classes}))
        facts: Facts = {
            "classes": classes,
            "sizes": [*map(len, held)],
            "names": [*chain.from_iterable(held)],
            "objects": [*map(id, values)],
            # A dict of hooks has a new number for each hook.
            "hooks": ([*map(len, hooks)], [*chain.from_iterable(hooks)]),
            "persistent": [
                frozenset(each) if each else None for each in map(_NOT_SAVED, attributes)
            ],
            "overrides": overrides,
        }
        return facts, [each for each in values if isinstance(each, torch.Tensor)]

    def values(self) -> LocalState:
        """Return nothing: extra state has no cells."""
        return LocalState()


def _overrides(cls: type) -> bool:
    return any(getattr(cls, name) is not plain for name, plain in _METHODS.items())


def optimizer_cells(
    views: Sequence[View], saved: LocalState, groups_name: str, *, allow_pickle: bool
) -> OptimizerCells | None:
    """Return the cells of optimizers; None if their state is not tensors alone.

    Args:
        views: the optimizers.
        saved: what was saved of them.
        groups_name: the name of the param groups.
        allow_pickle: whether the user allows pickled values.
    """
    for view in views:
        optimizer = view.optimizer
        if type(view) is not View or not type(optimizer).__module__.startswith("torch.optim."):
            return None
    if not all(name.endswith(LOCAL) for name in saved.objects):
        return None
    cells = OptimizerCells(views, saved, groups_name, allow_pickle=allow_pickle)
    found = cells.look()
    return cells if found is not None and not found[0]["overrides"] else None


class OptimizerCells:
    """The state of torch's optimizers.

    Args:
        views, saved, groups_name, allow_pickle: as for `optimizer_cells`.
    """

    def __init__(
        self, views: Sequence[View], saved: LocalState, groups_name: str, *, allow_pickle: bool
    ) -> None:
        self._optimizers = [ref(view.optimizer) for view in views]
        self._values = replace(saved, tensors=[])
        self._groups_name, self._allow_pickle = groups_name, allow_pickle
        self._names = [names for names, _ in saved.grouped[groups_name]]

    def look(self) -> tuple[Facts, Sequence[torch.Tensor]] | None:
        """Return the facts and the tensors; see `Cells.look`."""
        optimizers = [each for get in self._optimizers if (each := get()) is not None]
        if len(optimizers) < len(self._optimizers):
            return None
        states: list[Mapping[Any, Mapping[str, object]]] = [each.state for each in optimizers]
        of_parameters = [*chain.from_iterable(map(_values, states))]
        if not {*map(type, of_parameters)} <= {dict}:
            return None
        names = [*chain.from_iterable(of_parameters)]
        if not {*map(type, names)} <= {str}:  # others may be equal, but are saved in another way
            return None
        values: list[Any] = [*chain.from_iterable(map(_values, of_parameters))]
        if not all(issubclass(each, torch.Tensor) for each in {*map(type, values)}):
            return None
        groups = [*chain.from_iterable(map(groups_of, optimizers))]
        parameters = [each["params"] for each in groups]
        facts: Facts = {
            "classes": [*map(type, optimizers)],
            "overrides": sum(
                has_own_methods(each) or bool(inner_optimizers(each)) for each in optimizers
            ),
            "parameters with state": [[*map(id, each)] for each in states],
            "sizes": [*map(len, of_parameters)],
            "names": names,
            "objects": [*map(id, values)],
            "members": [[*map(id, each)] for each in parameters],
        }
        return facts, values

    def values(self) -> LocalState:
        """Return the hyperparameters as they are now, and values that tell how to load tensors."""
        optimizers = [each for get in self._optimizers if (each := get()) is not None]
        encoded = []
        groups = chain.from_iterable(map(groups_of, optimizers))
        for names, settings in zip(self._names, groups, strict=True):
            value = hyperparameters_of(settings)
            name, allow_pickle = self._groups_name, self._allow_pickle
            encoded.append((names, encode(value, name, allow_pickle=allow_pickle)))
        grouped = {**self._values.grouped, self._groups_name: encoded}
        return replace(self._values, grouped=grouped)
