"""Bindings for the values of a state dict."""

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
    EngineCounters,
    EngineWeights,
    is_engine,
    refuse_inside_engine,
    torch_optimizer_of,
    wrapped_by,
)
from shardwise.adapters.deepspeed_optimizer import filled_groups, is_optimizer_of_engine
from shardwise.adapters.megatron import (
    MegatronOptimizerBinding,
    MegatronWeights,
    is_megatron_model,
    is_megatron_scheduler,
    load_scheduler,
    refuse_parts_of_model,
)
from shardwise.adapters.megatron_optimizer import inner_optimizers, is_megatron_optimizer
from shardwise.adapters.modules import ModuleBinding, ModuleWeights, Weights
from shardwise.adapters.optimizers import OptimizerBinding
from shardwise.adapters.parameters import Parameter
from shardwise.adapters.values import (
    ObjectBinding,
    PerRankBinding,
    Stateful,
    TensorBinding,
    object_in,
)
from shardwise.errors import StateError
from shardwise.state.leaves import LocalState, Shards
from shardwise.state.per_rank import PerRankValue

State = MutableMapping[str, object]
_ORDER = {"module": 0, "optimizer": 1, "value": 2}


@dataclass(frozen=True, slots=True)
class _Seen:
    """The modules, engines and optimizers of Megatron-Core's found in a state so far.

    `engines` are by the prefix of their values' names, with the names of their modules.
    """

    modules: list[ModuleBinding] = field(default_factory=list)
    engines: dict[str, tuple[str, EngineWeights]] = field(default_factory=dict)
    optimizers: list[object] = field(default_factory=list)


def bind_state(state: State, *, allow_pickle: bool = False) -> list[Binding]:
    """Return bindings for all values in a state dict: modules first, then optimizers, then others.

    Raises:
        StateError: a value cannot be saved.
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
    return sorted(bindings, key=lambda binding: _ORDER[binding.kind])


def optimizer_names(bindings: Sequence[Binding]) -> list[str]:
    """Return the names of the optimizers in a state."""
    return [binding.name for binding in bindings if binding.kind == "optimizer"]


def asked_of(
    bindings: Sequence[Binding], targets: Sequence[LocalState]
) -> dict[str, Collection[str]]:
    """Return the names that a load fills of each module (tensors only) and each optimizer."""
    asked: dict[str, Collection[str]] = {}
    for binding, held in zip(bindings, targets, strict=True):
        if binding.kind == "module":
            asked[binding.name] = [leaf.name for leaf in held.tensors]
        elif binding.kind == "optimizer":
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
            yield from _bind_engine(name, prefix, parts, seen, allow_pickle)
        elif is_optimizer_of_engine(value):
            inner = [wrapped_by(name, value)]
            find, fill = _lookup(inner, seen), partial(filled_groups, value)
            yield OptimizerBinding(name, inner, find, allow_pickle=allow_pickle, filled_groups=fill)
        elif is_megatron_optimizer(value):
            seen.optimizers.append(value)
            find = _lookup(inner_optimizers(value), seen)
            yield MegatronOptimizerBinding(name, prefix, value, find, allow_pickle=allow_pickle)
        elif parts and all(isinstance(part, nn.Module) for part in parts):
            weights = _weights_of(name, cast(list[nn.Module], parts), seen)
            module = ModuleBinding(name, weights, allow_pickle=allow_pickle)
            seen.modules.append(module)
            yield module
        elif parts and all(isinstance(part, Optimizer) for part in parts):
            optimizers = cast(list[Optimizer], parts)
            find = _lookup(optimizers, seen)
            yield OptimizerBinding(name, optimizers, find, allow_pickle=allow_pickle)
        else:
            yield from _bind_value(container, key, name, seen, allow_pickle)


def _weights_of(name: str, modules: list[nn.Module], seen: _Seen) -> Weights:
    if all(map(is_megatron_model, modules)):
        return MegatronWeights(name, modules, seen.optimizers)
    for module in modules:
        refuse_inside_engine(name, module)
        refuse_parts_of_model(name, module)
    return ModuleWeights(modules)


def _bind_engine(
    name: str, prefix: str, parts: Sequence[object], seen: _Seen, allow_pickle: bool
) -> Iterator[Binding]:
    """Bind an engine, as its module and as its counters, which lie next to it in the dict.

    Raises:
        StateError: the engine is in a list, or another is in the same dict.
    """
    if len(parts) > 1 or prefix in seen.engines:
        where = f"{name} is a list, and"
        if prefix in seen.engines:
            where = f"{name} and {seen.engines[prefix][0]}"
        raise StateError(
            f"{where}: each engine of DeepSpeed needs a dict of its own, as in "
            '{"actor": {"model": engine, "optimizer": engine.optimizer}, "critic": {…}}'
        )
    weights = EngineWeights(name, parts[0])
    module = ModuleBinding(name, weights, allow_pickle=allow_pickle)
    seen.modules.append(module)
    seen.engines[prefix] = name, weights
    yield module
    yield EngineCounters(prefix, parts[0])


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
    """Return whether a value is a dict of names, whose values are bound one by one."""
    branch = isinstance(value, dict) and type(value) in (dict, OrderedDict) and bool(value)
    return branch and all(isinstance(key, str) for key in cast(State, value))


def _parts(value: object) -> list[object]:
    """Return the items of a list, or the value alone; of pipeline stages, the modules."""
    values: list[object] = list(value) if isinstance(value, (list, tuple)) else [value]
    return [part.submod if isinstance(part, PipelineStage) else part for part in values]


def _lookup(optimizers: list[Optimizer], seen: _Seen) -> Callable[[], dict[int, Parameter]]:
    """Return a function that finds the parameters of these optimizers in the state's modules.

    Names count from the module if all parameters are of one module, else from the state.
    """

    def find() -> dict[int, Parameter]:
        mine = {
            id(tensor)
            for optimizer in optimizers
            for group in optimizer.param_groups
            for tensor in group["params"]
        }
        if not mine:
            _refuse_emptied(optimizers, seen)
        owners: list[tuple[str, dict[int, Parameter]]] = []
        for module in seen.modules:
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


def _refuse_emptied(optimizers: list[Optimizer], seen: _Seen) -> None:
    for _, engine in seen.engines.values():
        if any(map(engine.steps, optimizers)):
            raise StateError(
                "an optimizer in the state has no parameters, because DeepSpeed holds them: put "
                "engine.optimizer into the state in its place"
            )


def optimizers_in(value: object) -> Iterator[Optimizer]:
    """Yield the torch optimizers in a state, including those that others wrap."""
    inner = torch_optimizer_of(value)
    if inner is not None:
        yield inner
    elif is_megatron_optimizer(value):
        yield from inner_optimizers(value)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from optimizers_in(each)
    elif isinstance(value, Mapping):
        yield from optimizers_in(list(value.values()))
