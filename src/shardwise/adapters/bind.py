"""A state dict as bindings: each knows what some name holds, and how to fill it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.optim import Optimizer

from shardwise.adapters.binding import Binding
from shardwise.adapters.deepspeed import (
    EngineBinding,
    EngineOptimizerBinding,
    is_engine,
    refuse_inside_engine,
    stepped_by,
    wrapped_by,
)
from shardwise.adapters.megatron import (
    MegatronBinding,
    MegatronOptimizerBinding,
    is_megatron_model,
    is_megatron_scheduler,
    load_scheduler,
    refuse_parts_of_model,
)
from shardwise.adapters.megatron_optimizer import inner_optimizers, is_megatron_optimizer
from shardwise.adapters.modules import ModuleBinding
from shardwise.adapters.optimizers import OptimizerBinding
from shardwise.adapters.parameters import Parameter
from shardwise.adapters.values import (
    ObjectBinding,
    PerRankBinding,
    Stateful,
    TensorBinding,
    object_in,
)
from shardwise.adapters.zero import is_optimizer_of_engine
from shardwise.errors import StateError
from shardwise.state.leaves import LocalState, Shards
from shardwise.state.per_rank import PerRankValue

State = MutableMapping[str, object]
Modules = list[ModuleBinding | EngineBinding | MegatronBinding]
OF_MODULES = ModuleBinding, EngineBinding, MegatronBinding
OF_OPTIMIZERS = OptimizerBinding, EngineOptimizerBinding, MegatronOptimizerBinding


@dataclass(frozen=True, slots=True)
class _Seen:
    """What was found in a state so far: modules, and optimizers of Megatron-Core's."""

    modules: Modules = field(default_factory=list)
    optimizers: list[object] = field(default_factory=list)


def bind_state(state: State, *, allow_pickle: bool = False) -> list[Binding]:
    """Bind everything that hangs in a state dict.

    Modules come first and optimizers next, for what follows may build on them.

    Raises:
        StateError: something in it is of no kind that can be saved.
    """
    if not isinstance(state, MutableMapping):
        raise StateError(
            f"the state is a {type(state).__name__}: it must be a dict, such as "
            '{"model": model, "optimizer": optimizer}'
        )
    try:
        bindings = list(_bind(state, "", _Seen(), allow_pickle))
    except RecursionError as error:
        raise StateError(
            "a dict in the state is nested deeper than Python's stack allows, or holds itself"
        ) from error
    order: dict[type, int] = {**dict.fromkeys(OF_MODULES, 0), **dict.fromkeys(OF_OPTIMIZERS, 1)}
    return sorted(bindings, key=lambda binding: order.get(type(binding), 2))


def optimizer_names(bindings: Sequence[Binding]) -> list[str]:
    """The names of the optimizers among what hangs in a state."""
    return [binding.name for binding in bindings if isinstance(binding, OF_OPTIMIZERS)]


def asked_of(
    bindings: Sequence[Binding], targets: Sequence[LocalState]
) -> dict[str, Collection[str]]:
    """The names that a load is to fill of each module (tensors) and optimizer (all names)."""
    asked: dict[str, Collection[str]] = {}
    for binding, held in zip(bindings, targets, strict=True):
        if isinstance(binding, OF_MODULES):
            asked[binding.name] = [leaf.name for leaf in held.tensors]
        elif isinstance(binding, OF_OPTIMIZERS):
            asked[binding.name] = [*held.names()]
    return asked


def _bind(container: State, prefix: str, seen: _Seen, allow_pickle: bool) -> Iterator[Binding]:
    for key, value in container.items():
        if not isinstance(key, str) or not key:
            raise StateError(f"{prefix or 'the state'}: its key {key!r} is not a name (str)")
        name = f"{prefix}{key}"
        if isinstance(value, (torch.Tensor, np.ndarray, Shards)):
            yield TensorBinding(name, value)  # first, as a state may hold thousands
            continue
        parts = _parts(value)
        if any(map(is_engine, parts)):
            _refuse_engines_side_by_side(name, prefix, parts, seen.modules)
            engine = EngineBinding(name, prefix, parts[0], allow_pickle=allow_pickle)
            seen.modules.append(engine)
            yield engine
        elif is_optimizer_of_engine(value):
            find = _lookup([wrapped_by(name, value)], seen.modules)
            yield EngineOptimizerBinding(name, value, find, allow_pickle=allow_pickle)
        elif is_megatron_optimizer(value):
            seen.optimizers.append(value)
            find = _lookup(inner_optimizers(value), seen.modules)
            yield MegatronOptimizerBinding(name, prefix, value, find, allow_pickle=allow_pickle)
        elif parts and all(map(is_megatron_model, parts)):
            chunks = cast(list[nn.Module], parts)
            model = MegatronBinding(name, chunks, seen.optimizers, allow_pickle=allow_pickle)
            seen.modules.append(model)
            yield model
        elif parts and all(isinstance(part, nn.Module) for part in parts):
            for part in cast(list[nn.Module], parts):
                refuse_inside_engine(name, part)
                refuse_parts_of_model(name, part)
            module = ModuleBinding(name, cast(list[nn.Module], parts), allow_pickle=allow_pickle)
            seen.modules.append(module)
            yield module
        elif parts and all(isinstance(part, Optimizer) for part in parts):
            optimizers = cast(list[Optimizer], parts)
            yield OptimizerBinding(
                name, optimizers, _lookup(optimizers, seen.modules), allow_pickle=allow_pickle
            )
        else:
            yield from _bind_value(container, key, name, seen, allow_pickle)


def _bind_value(
    container: State, key: str, name: str, seen: _Seen, allow_pickle: bool
) -> Iterator[Binding]:
    value = container[key]
    if isinstance(value, PerRankValue):
        yield PerRankBinding(name, value, allow_pickle=allow_pickle)
    elif isinstance(value, Stateful) and not isinstance(value, type):
        put: Callable[[object], object] = value.load_state_dict
        if is_megatron_scheduler(value):
            put = partial(load_scheduler, value)
        yield ObjectBinding(name, value.state_dict, put, allow_pickle=allow_pickle)
    elif _is_branch(value):
        yield from _bind(cast(State, value), f"{name}.", seen, allow_pickle)
    else:
        yield object_in(container, key, name, allow_pickle=allow_pickle)


def _is_branch(value: object) -> bool:
    """Whether a value is a dict of names, whose values have names of their own."""
    branch = isinstance(value, dict) and type(value) in (dict, OrderedDict) and bool(value)
    return branch and all(isinstance(key, str) for key in cast(State, value))


def _parts(value: object) -> list[object]:
    """The modules or optimizers that a value is made of, if it is."""
    values: list[object] = list(value) if isinstance(value, (list, tuple)) else [value]
    return [part.submod if isinstance(part, PipelineStage) else part for part in values]


def _lookup(optimizers: list[Optimizer], modules: Modules) -> Callable[[], dict[int, Parameter]]:
    """Finds what the modules of the state know of the parameters of these optimizers, by `id`.

    Below an optimizer, a name counts from its module, if all its parameters are of one module;
    else from the state.
    """

    def find() -> dict[int, Parameter]:
        mine = {
            id(tensor)
            for optimizer in optimizers
            for group in optimizer.param_groups
            for tensor in group["params"]
        }
        if not mine:
            _refuse_emptied(optimizers, modules)
        owners: list[tuple[str, dict[int, Parameter]]] = []
        for module in modules:
            found: dict[int, Parameter] = {}
            for parameter in module.parameters():
                if id(parameter.tensor) in mine:
                    found.setdefault(id(parameter.tensor), parameter)
            if found:
                owners.append((module.name, found))
        if len(owners) == 1:
            return owners[0][1]
        return {
            key: parameter.below(name)
            for name, found in reversed(owners)
            for key, parameter in found.items()
        }

    return find


def _refuse_engines_side_by_side(
    name: str, prefix: str, parts: Sequence[object], modules: Modules
) -> None:
    """Each engine has values of its own beside its key: of two at one place, which would be whose?

    Raises:
        StateError: it is in a list, or beside another.
    """
    beside = [m.name for m in modules if isinstance(m, EngineBinding) and m.prefix == prefix]
    if len(parts) > 1 or beside:
        where = f"{name} and {beside[0]}" if beside else f"{name} is a list, and"
        raise StateError(
            f"{where}: each engine of DeepSpeed needs a dict of its own, as in "
            '{"actor": {"model": engine, "optimizer": engine.optimizer}, "critic": {…}}'
        )


def _refuse_emptied(optimizers: list[Optimizer], modules: Modules) -> None:
    for module in modules:
        if isinstance(module, EngineBinding) and any(map(module.steps, optimizers)):
            raise StateError(
                "an optimizer in the state has no parameters, for DeepSpeed holds them: put "
                "engine.optimizer into the state in its place"
            )


def optimizers_in(value: object) -> Iterator[Optimizer]:
    """The optimizers that step what hangs in a state, those that others wrap included."""
    inner = stepped_by(value)
    if inner is not None:
        yield inner
    elif is_megatron_optimizer(value):
        yield from inner_optimizers(value)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from optimizers_in(each)
    elif isinstance(value, Mapping):
        yield from optimizers_in(list(value.values()))
