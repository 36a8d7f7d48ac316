"""Bind a state: find the `Binding` of each value, by the value's type."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.adapters.binding import Binding
from shardwise.adapters.deepspeed import (
    EngineCounters,
    EngineWeights,
    is_deepspeed_engine,
    refuse_module_of_engine,
    require_torch_optimizer,
    torch_optimizer_of,
)
from shardwise.adapters.deepspeed_optimizer import fill_param_groups, is_deepspeed_optimizer
from shardwise.adapters.megatron import (
    MegatronOptimizerBinding,
    MegatronWeights,
    is_megatron_model,
    is_megatron_scheduler,
    load_scheduler,
    refuse_module_with_divided_parts,
)
from shardwise.adapters.megatron_optimizer import inner_optimizers, is_megatron_optimizer
from shardwise.adapters.modules import ModuleBinding, ModuleWeights, Weights
from shardwise.adapters.optimizers import OptimizerBinding
from shardwise.adapters.parameters import Parameter
from shardwise.adapters.trainable import Trainable, TrainableWeights
from shardwise.adapters.values import (
    ObjectBinding,
    PerRankBinding,
    Stateful,
    TensorBinding,
    bind_dict_item,
)
from shardwise.errors import StateError
from shardwise.state.leaves import LocalState, Shards
from shardwise.state.per_rank import PerRankValue
from shardwise.state.tensor_memory import is_instance

State = MutableMapping[str, object]
_ORDER_OF_KINDS = {"module": 0, "optimizer": 1, "value": 2}


@dataclass(frozen=True, slots=True)
class _BoundObjects:
    """The objects of a state that are bound so far.

    Attributes:
        modules: bindings of all modules.
        engines: the names and weights of DeepSpeed engines. The key is the prefix of the dict that
            holds the engine.
        megatron_optimizers: optimizers of Megatron-Core.
    """

    modules: list[ModuleBinding] = field(default_factory=list)
    engines: dict[str, tuple[str, EngineWeights]] = field(default_factory=dict)
    megatron_optimizers: list[object] = field(default_factory=list)


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
        bindings = list(_bind_dict(state, "", _BoundObjects(), allow_pickle))
    except RecursionError as error:
        raise StateError(
            "the state has a dict that is nested deeper than Python's stack allows, or that "
            f"contains itself, under one of the keys {[*state]}: remove the reference of the dict "
            "to itself, or flatten it"
        ) from error
    return sorted(bindings, key=lambda binding: _ORDER_OF_KINDS[binding.kind])


def optimizer_names(bindings: Sequence[Binding]) -> list[str]:
    """Return the names of the optimizers in a state."""
    return [binding.name for binding in bindings if binding.kind == "optimizer"]


def names_to_fill(
    bindings: Sequence[Binding], targets: Sequence[LocalState]
) -> dict[str, Collection[str]]:
    """Return the names that a load fills, by module and optimizer; for modules, only tensors."""
    names: dict[str, Collection[str]] = {}
    for binding, target in zip(bindings, targets, strict=True):
        if binding.kind == "module":
            names[binding.name] = [leaf.name for leaf in target.tensors]
        elif binding.kind == "optimizer":
            names[binding.name] = [*target.names()]
    return names


def _bind_dict(
    container: State, prefix: str, bound: _BoundObjects, allow_pickle: bool
) -> Iterator[Binding]:
    for key, value in container.items():
        if not isinstance(key, str) or not key:
            where = prefix.removesuffix(".") or "the state"
            raise StateError(
                f"{where}: the key {key!r} is not a nonempty string: use text, for example 'model'"
            )
        name = f"{prefix}{key}"
        if isinstance(value, (torch.Tensor, np.ndarray, Shards)):
            yield TensorBinding(name, value)  # checked first: a state may have thousands of tensors
            continue
        spec = value if isinstance(value, Trainable) else None
        parts = _list_parts(value if spec is None else spec.module)
        if any(map(is_deepspeed_engine, parts)):
            yield from _bind_engine(name, prefix, parts, bound, allow_pickle, spec)
        elif is_deepspeed_optimizer(value):
            torch_optimizers = [require_torch_optimizer(name, value)]
            find_parameters, fill_groups = (
                _make_parameter_finder(name, torch_optimizers, bound),
                partial(fill_param_groups, value),
            )
            yield OptimizerBinding(
                name,
                torch_optimizers,
                find_parameters,
                allow_pickle=allow_pickle,
                fill_param_groups=fill_groups,
            )
        elif is_megatron_optimizer(value):
            bound.megatron_optimizers.append(value)
            find_parameters = _make_parameter_finder(name, inner_optimizers(value), bound)
            yield MegatronOptimizerBinding(
                name, prefix, value, find_parameters, allow_pickle=allow_pickle
            )
        elif parts and all(isinstance(part, nn.Module) for part in parts):
            weights = _weights_of(name, cast(list[nn.Module], parts), bound)
            weights = weights if spec is None else TrainableWeights.of(name, weights, spec)
            module = ModuleBinding(name, weights, allow_pickle=allow_pickle)
            bound.modules.append(module)
            yield module
        elif parts and all(isinstance(part, Optimizer) for part in parts):
            optimizers = cast(list[Optimizer], parts)
            find_parameters = _make_parameter_finder(name, optimizers, bound)
            yield OptimizerBinding(name, optimizers, find_parameters, allow_pickle=allow_pickle)
        elif spec is not None:
            raise StateError(
                f"{name}: sw.trainable got a {type(spec.module).__name__}: pass a module, a list "
                "of the parts of a model, or a DeepSpeed engine"
            )
        elif any(isinstance(part, Trainable) for part in parts):
            raise StateError(
                f"{name}: a list of sw.trainable(…): pass sw.trainable([…]) with the parts of one "
                "model, or put several models into a dict, each under a separate key"
            )
        else:
            yield from _bind_value(container, key, name, bound, allow_pickle)


def _weights_of(name: str, modules: list[nn.Module], bound: _BoundObjects) -> Weights:
    if all(map(is_megatron_model, modules)):
        return MegatronWeights(name, modules, bound.megatron_optimizers)
    for module in modules:
        refuse_module_of_engine(name, module)
        refuse_module_with_divided_parts(name, module)
    return ModuleWeights(modules)


def _bind_engine(
    name: str,
    prefix: str,
    parts: Sequence[object],
    bound: _BoundObjects,
    allow_pickle: bool,
    spec: Trainable | None,
) -> Iterator[Binding]:
    """Bind an engine as a module, and its counters as values in the same dict.

    Raises:
        StateError: the engine is in a list, or another engine is in the same dict.
    """
    if len(parts) > 1 or prefix in bound.engines:
        problem = "a list has DeepSpeed engines"
        if prefix in bound.engines:
            problem = f"{bound.engines[prefix][0]} is another DeepSpeed engine in the same dict"
        raise StateError(
            f"{name}: {problem}: put each engine into a separate dict, as in "
            '{"actor": {"model": engine, "optimizer": engine.optimizer}, "critic": {…}}'
        )
    weights = EngineWeights(name, parts[0])
    saved = weights if spec is None else TrainableWeights(weights, spec)
    module = ModuleBinding(name, saved, allow_pickle=allow_pickle)
    bound.modules.append(module)
    bound.engines[prefix] = name, weights
    yield module
    yield EngineCounters(prefix, parts[0])


def _bind_value(
    container: State, key: str, name: str, bound: _BoundObjects, allow_pickle: bool
) -> Iterator[Binding]:
    value = container[key]
    if isinstance(value, PerRankValue):
        yield PerRankBinding(name, value, allow_pickle=allow_pickle)
    elif isinstance(value, Stateful) and not isinstance(value, type):
        set_state: Callable[[object], object] = value.load_state_dict
        if is_megatron_scheduler(value):
            set_state = partial(load_scheduler, value)
        yield ObjectBinding(name, value.state_dict, set_state, allow_pickle=allow_pickle)
    elif _is_nested_state(value):
        yield from _bind_dict(cast(State, value), f"{name}.", bound, allow_pickle)
    else:
        yield bind_dict_item(container, key, name, allow_pickle=allow_pickle)


def _is_nested_state(value: object) -> bool:
    """Return whether a value is a nonempty dict with string keys, to bind value by value."""
    nonempty = isinstance(value, dict) and type(value) in (dict, OrderedDict) and bool(value)
    return nonempty and all(isinstance(key, str) for key in cast(State, value))


def _list_parts(value: object) -> list[object]:
    """Return the items of a list, or a list of the value. Pipeline stages become their modules."""
    values: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value]
    stage = ("torch.distributed.pipelining", "PipelineStage")
    return [part.submod if is_instance(part, *stage) else part for part in values]


def _make_parameter_finder(
    optimizer_name: str, optimizers: list[Optimizer], bound: _BoundObjects
) -> Callable[[], dict[int, Parameter]]:
    """Return a function that finds the parameters of these optimizers in the state's modules.

    Names are relative to the module if one module has all parameters, and to the state otherwise.
    """

    def find_parameters() -> dict[int, Parameter]:
        optimized_ids = {
            id(tensor)
            for optimizer in optimizers
            for group in optimizer.param_groups
            for tensor in group["params"]
        }
        if not optimized_ids:
            _refuse_optimizer_of_engine(optimizer_name, optimizers, bound)
        parameters_by_module: list[tuple[str, dict[int, Parameter]]] = []
        for module in bound.modules:
            found: dict[int, Parameter] = {}
            for parameter in module.parameters():
                if id(parameter.tensor) in optimized_ids:
                    found.setdefault(id(parameter.tensor), parameter)
            if found:
                parameters_by_module.append((module.name, found))
        if len(parameters_by_module) == 1:
            return parameters_by_module[0][1]
        return {
            key: parameter.add_prefix(name)
            for name, found in reversed(parameters_by_module)
            for key, parameter in found.items()
        }

    return find_parameters


def _refuse_optimizer_of_engine(
    name: str, optimizers: list[Optimizer], bound: _BoundObjects
) -> None:
    for engine_name, engine in bound.engines.values():
        if any(map(engine.owns_optimizer, optimizers)):
            raise StateError(
                f"{name}: this optimizer has no parameters, because the DeepSpeed engine "
                f"{engine_name} holds them: put engine.optimizer into the state instead"
            )


def torch_optimizers_in(value: object) -> Iterator[Optimizer]:
    """Yield the torch optimizers in a state, also those that other optimizers wrap."""
    torch_optimizers = torch_optimizer_of(value)
    if torch_optimizers is not None:
        yield torch_optimizers
    elif is_megatron_optimizer(value):
        yield from inner_optimizers(value)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from torch_optimizers_in(each)
    elif isinstance(value, Mapping):
        yield from torch_optimizers_in(list(value.values()))
