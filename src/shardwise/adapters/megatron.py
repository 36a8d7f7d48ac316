"""Bind Megatron-Core's models and optimizers.

Names, shapes and boxes are the same as in Megatron-Core's `sharded_state_dict`. So checkpoints of
Megatron-Core can be loaded too. If an optimizer keeps master weights, they are saved in place of
the model's weights. Megatron-Core is not imported: its classes are recognised by their names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn

from shardwise.adapters.megatron_buckets import (
    MASTER_KEY,
    BucketedState,
    ParameterInBucket,
    match_buckets,
)
from shardwise.adapters.megatron_model import ModelDescription, ModelTensor, describe_model
from shardwise.adapters.megatron_optimizer import (
    MasterWeight,
    inner_optimizers,
    master_weights_of,
    optimizers_in_chain,
    rebuild_weights,
    refuse_unknown_optimizer,
)
from shardwise.adapters.modules import ModuleContents
from shardwise.adapters.optimizers import OptimizerBinding, ParametersById
from shardwise.adapters.parameters import Parameter, join_leaves, unwrap_data_parallel
from shardwise.errors import StateError, user_code
from shardwise.plan.name_lookup import SavedNames
from shardwise.state.leaves import LocalState, TensorLeaf
from shardwise.state.plain_values import JsonValue, decode, encode
from shardwise.state.selection import Selection

VALUES_KEY = "megatron"
SCALER_KEY = "grad_scaler"
_WRAPPER_CLASSES = ("DistributedDataParallel", "Float16Module")


def is_megatron_model(value: object) -> bool:
    """Return whether a value is a module of Megatron-Core, also if it is wrapped."""
    if not isinstance(value, nn.Module):
        return False
    return _has_class(unwrap_data_parallel(value), "transformer.module", "MegatronModule")


def is_megatron_scheduler(value: object) -> bool:
    """Return whether a value is Megatron-Core's scheduler, which `load_scheduler` must load."""
    return _has_class(value, "optimizer_param_scheduler", "OptimizerParamScheduler")


def load_scheduler(scheduler: Any, state: object) -> None:
    """Set the state of Megatron-Core's scheduler."""
    scheduler.num_steps = 0  # load_state_dict adds the loaded steps to num_steps
    scheduler.load_state_dict(state)


def refuse_module_with_divided_parts(name: str, module: nn.Module) -> None:
    """Refuse a module with parts that Megatron-Core divides among ranks.

    Such a module is not a `MegatronModule`, so it does not describe how its parts are divided.

    Raises:
        StateError: the module has such parts.
    """
    parallel: Any = sys.modules.get("megatron.core.parallel_state")
    if parallel is None or not parallel.model_parallel_is_initialized():
        return
    sizes = (
        parallel.get_tensor_model_parallel_world_size(),
        parallel.get_pipeline_model_parallel_world_size(),
        parallel.get_expert_model_parallel_world_size(),
    )
    if max(sizes) == 1:
        return
    has_tensor_parallelism = any(
        getattr(each, "tensor_model_parallel", False) for each in module.parameters()
    )
    if has_tensor_parallelism or any(map(is_megatron_model, module.modules())):
        raise StateError(
            f"{name}: this module contains Megatron-Core modules that are divided among ranks, but "
            "does not describe how: put those modules into the state, or derive this one from "
            "MegatronModule"
        )


def _has_class(value: object, module: str, name: str) -> bool:
    wanted_class = f"megatron.core.{module}", name
    return any((cls.__module__, cls.__name__) == wanted_class for cls in type(value).__mro__)


class MegatronWeights:
    """The weights of a model, or of the chunks of a model that this rank holds.

    Args:
        name: name of the model in the state.
        chunks: the model, or its chunks.
        optimizers: Megatron-Core's optimizers in the state. More are added to this list while the
            state is being bound.
    """

    def __init__(
        self, name: str, chunks: Sequence[nn.Module], optimizers: Sequence[object]
    ) -> None:
        self._name = name
        self._modules = [_unwrap(name, chunk) for chunk in chunks]
        configs = [getattr(chunk, "ddp_config", None) for chunk in chunks]
        self._gathers_late = any(getattr(each, "overlap_param_gather", False) for each in configs)
        self._optimizers = optimizers

    def parameters(self) -> Iterator[Parameter]:
        """Yield all weights. A master weight replaces the weight that it belongs to."""
        for parameter, _ in self._weights():
            yield parameter

    def contents(self, module_name: str) -> ModuleContents:
        """Return this rank's part of the model, without tensors that another stage saves."""
        contents = self._extra_state(module_name, with_copies=False)
        leaves: list[TensorLeaf] = []
        for parameter, tensor in self._weights():
            if not parameter.is_copy:
                leaves += _parameter_leaves(module_name, parameter, tensor)
        contents.tensors = join_leaves(leaves, to_fill=False)
        return contents

    def targets(self, module_name: str, saved: SavedNames, selection: Selection) -> ModuleContents:
        """Return this rank's part of the model.

        Tensors have Megatron-Core's names if the checkpoint has these names, and otherwise the
        module's names.
        """

        def has_tensor(name: str) -> bool:
            return saved.tensor(f"{module_name}.{name}") is not None

        self._descriptions = [each.match_names(has_tensor) for each in self._descriptions]
        contents = self._extra_state(module_name, with_copies=True)
        extras = {
            f"{module_name}.{extra.name}" for each in self._descriptions for extra in each.extras
        }
        buckets = match_buckets(self._optimizers, saved)
        parts: dict[int, ParameterInBucket] = {}
        if all(selection.selects(f"{part.bucket}.{MASTER_KEY}") for part in buckets.parts.values()):
            parts, contents.problems = buckets.parts, list(buckets.problems)
        leaves: list[TensorLeaf] = []
        for parameter, tensor in self._weights():
            part = parts.get(id(parameter.tensor))
            if part is None:
                leaves += _parameter_leaves(module_name, parameter, tensor)
            else:
                leaves.append(part.leaf(MASTER_KEY, parameter.tensor))
                contents.unselected += [f"{module_name}.{each.name}" for each in parameter.flat]
        contents.tensors = join_leaves(leaves, to_fill=True)
        # Extra state that the module does not have at present is not loaded.
        contents.unselected += [
            name for name in extras - contents.extra_state.keys() if saved.kind(name)
        ]
        return contents

    def restore(self, module_name: str, extra_state: Mapping[str, object]) -> None:
        """Set extra state."""
        for module, described in zip(self._modules, self._descriptions, strict=True):
            states: dict[str, Any] = {}
            for extra in described.extras:
                name = f"{module_name}.{extra.name}"
                if name in extra_state:
                    states[extra.path] = extra.restore_type(extra_state[name])
            if not states:
                continue
            with user_code(module_name, "load_state_dict(), given its extra state,"):
                module.load_state_dict(states, strict=False)

    def update_from_master_weights(self) -> None:
        """Compute the model's weights from the loaded master weights. This is a collective."""
        tensor_ids = {
            id(each.tensor) for described in self._descriptions for each in described.tensors
        }
        for optimizer in self._optimizers:
            if any(id(each.parameter) in tensor_ids for each in master_weights_of(optimizer)):
                rebuild_weights(optimizer)

    @cached_property
    def _descriptions(self) -> list[ModelDescription]:
        return [describe_model(self._name, module) for module in self._modules]

    def _weights(self) -> Iterator[tuple[Parameter, ModelTensor]]:
        """Yield each tensor as a parameter: itself, or this rank's part of its master."""
        masters = {
            id(each.parameter): each
            for optimizer in self._optimizers
            for each in master_weights_of(optimizer)
        }
        for described in self._descriptions:
            for each in described.tensors:
                tensor = each.tensor
                master = masters.get(id(tensor), MasterWeight(tensor, tensor, 0, tensor.numel()))
                if id(tensor) not in masters and self._needs_missing_optimizer(tensor):
                    raise StateError(
                        f"{self._name}: an optimizer that is not in the state has more exact or "
                        "newer weights than the model: put the optimizer that "
                        "get_megatron_optimizer() returned into the state too, as in "
                        '{"model": model, "optimizer": optimizer}. To load without its moments, '
                        'use only=["model.*"]'
                    )
                if master.tensor is not None:
                    flat = each.cut(master.low, master.high)
                    yield Parameter(master.tensor, "", flat, each.is_copy), each

    def _needs_missing_optimizer(self, tensor: torch.Tensor) -> bool:
        """Return whether an optimizer that is not in the state has a tensor's current values."""
        return hasattr(tensor, "main_param") or (tensor.requires_grad and self._gathers_late)

    def _extra_state(self, module_name: str, *, with_copies: bool) -> ModuleContents:
        contents = ModuleContents()
        for described in self._descriptions:
            for extra in described.extras:
                plain = extra.plain_value
                if plain is not None and (with_copies or not extra.is_copy):
                    contents.extra_state[f"{module_name}.{extra.name}"] = plain
        return contents


def _parameter_leaves(
    module_name: str, parameter: Parameter, tensor: ModelTensor
) -> Iterator[TensorLeaf]:
    flat = parameter.tensor.detach().view(-1)
    for range_index, part in enumerate(parameter.flat):
        tie_key = id(tensor.tensor), range_index  # equal for weights that are tied on this rank
        yield part.leaf(f"{module_name}.{part.name}", flat, tie_key)


class MegatronOptimizerBinding(OptimizerBinding):
    """An optimizer of Megatron-Core, whose state is saved under the names of the parameters.

    Args:
        prefix: prefix of the name of the loss scale.
    """

    def __init__(
        self,
        name: str,
        prefix: str,
        optimizer: object,
        parameters: Callable[[], ParametersById],
        *,
        allow_pickle: bool,
    ) -> None:
        refuse_unknown_optimizer(name, optimizer)
        super().__init__(name, inner_optimizers(optimizer), parameters, allow_pickle=allow_pickle)
        self._scaler_name = f"{prefix}{VALUES_KEY}.{SCALER_KEY}"
        self._optimizer = optimizer
        self._bucketed_state: BucketedState | None = None

    def local_state(self) -> LocalState:
        """Return the state, hyperparameters, and the loss scale."""
        local_state = super().local_state()
        for scaler in self._dynamic_scalers():
            local_state.objects[self._scaler_name] = encode(
                _read_scaler_state(scaler), self._scaler_name
            )
        return local_state

    def targets(self, saved: SavedNames, selection: Selection) -> LocalState:
        """Return the state to load. The loss scale stays if the checkpoint lacks it."""
        buckets = match_buckets([self._optimizer], saved)
        self._bucketed_state = BucketedState(buckets, saved) if buckets.parts else None
        if self._bucketed_state is not None:
            local_state = self._bucketed_state.targets()
            if self._dynamic_scalers():
                local_state.problems.append(
                    f"{self._scaler_name}: the loss scale cannot be restored from a checkpoint "
                    "that was saved as dp_reshardable: save it as fully_reshardable"
                )
            selected = selection.select_from(local_state)
            if not selected.tensors:
                self._bucketed_state.discard_state()
            return selected
        local_state = super().targets(saved, selection)
        if self._dynamic_scalers() and saved.has_object(self._scaler_name):
            local_state.add(selection.select_from(LocalState(objects={self._scaler_name: None})))
        return local_state

    def restore(self, values: Mapping[str, JsonValue]) -> None:
        """Set state, hyperparameters and the loss scale, after the tensors are filled."""
        if self._bucketed_state is not None:
            self._bucketed_state.restore()
            return
        super().restore(values)
        if self._scaler_name in values:
            for scaler in self._dynamic_scalers():
                value = decode(values[self._scaler_name], self._scaler_name)
                _load_scaler_state(self._scaler_name, scaler, value)

    def parameter_order(self) -> None:
        """Return None: checkpoints of Megatron-Core do not identify parameters by position."""

    def _dynamic_scalers(self) -> list[Any]:
        """Return the loss scalers with a dynamic scale."""
        scalers = [getattr(each, SCALER_KEY, None) for each in optimizers_in_chain(self._optimizer)]
        return [each for each in scalers if type(each).__name__ == "DynamicGradScaler"]


def _read_scaler_state(scaler: Any) -> dict[str, object]:
    state = scaler.state_dict()
    return {
        key: value.item() if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }


def _load_scaler_state(name: str, scaler: Any, value: object) -> None:
    current_state = scaler.state_dict()
    if not isinstance(value, Mapping) or value.keys() != current_state.keys():
        raise StateError(
            f"{name}: expected a loss scaler's state with keys {', '.join(current_state)} in the "
            f"checkpoint, found {value!r}: leave it out with skip=[{name!r}]"
        )
    scaler.load_state_dict(
        {
            key: torch.full_like(current, value[key])
            if isinstance(current, torch.Tensor)
            else value[key]
            for key, current in current_state.items()
        }
    )


def _unwrap(name: str, chunk: nn.Module) -> nn.Module:
    """Return the module inside the wrappers of torch and Megatron-Core.

    Raises:
        StateError: the wrapper or the kind of weights is not supported.
    """
    module = unwrap_data_parallel(chunk)
    while type(module).__name__ in _WRAPPER_CLASSES and isinstance(module.module, nn.Module):
        module = module.module
    unsupported = ""
    if _has_class(module, "distributed.data_parallel_base", "_BaseDataParallel"):
        unsupported = f"{type(module).__name__}, which divides the weights,"
    elif any(type(each.data) is not torch.Tensor for each in module.parameters()):
        unsupported = "weights that are quantized or divided by FSDP"
    if unsupported:
        raise StateError(
            f"{name}: {unsupported} is not supported for Megatron-Core models: save with "
            "megatron.core.dist_checkpointing; shardwise can open such checkpoints"
        )
    return module
