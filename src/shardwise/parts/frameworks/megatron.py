"""Bind Megatron-Core's models and optimizers.

Names, shapes and boxes are the same as in Megatron-Core's `sharded_state_dict`. So checkpoints of
Megatron-Core can be loaded too. If an optimizer keeps master weights, they are saved in place of
the model's weights. Megatron-Core is not imported: its classes are recognised by their names.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from shardwise.kernel.errors import StateError, user_code
from shardwise.parts.frameworks.megatron_model import (
    ExtraState,
    cut_ranges,
    describe_model,
    with_checkpoint_name,
)
from shardwise.parts.frameworks.megatron_optimizer import (
    MASTER_KEY,
    BucketedState,
    MasterWeight,
    master_weights_of,
    match_buckets,
    optimizers_in_chain,
    rebuild_weights,
    refuse_unknown_optimizer,
)
from shardwise.ports.binding import (
    Binding,
    Context,
    JsonValue,
    LocalState,
    Parameter,
    SavedNames,
    Selection,
    TensorLeaf,
    decode,
    encode,
)
from shardwise.ports.module_binding import ObjectBinding, OptimizerBinding, has_class, modules_in

VALUES_KEY = "megatron"
SCALER_KEY = "grad_scaler"
_WRAPPER_CLASSES = ("DistributedDataParallel", "Float16Module")


def bind(name: str, value: object, context: Context) -> Binding | None:
    """Return the binding of a model, an optimizer or a scheduler of Megatron-Core.

    Raises:
        StateError: a module contains modules of Megatron-Core, but does not describe how they are
            divided, or a value has a feature that is not supported.
    """
    if has_class(value, "megatron.core.optimizer.optimizer", "MegatronOptimizer"):
        return MegatronOptimizerBinding(name, value, context)
    modules = modules_in(value)
    if modules and all(map(_is_model, modules)):
        return MegatronModelBinding(name, modules, context)
    for module in modules:
        _refuse_module_with_divided_parts(name, module)
    scheduler: Any = value
    if has_class(scheduler, "megatron.core.optimizer_param_scheduler", "OptimizerParamScheduler"):
        return ObjectBinding(
            name,
            scheduler.state_dict,
            partial(_load_scheduler, scheduler),
            allow_pickle=context.allow_pickle,
        )
    return None


def _is_model(module: nn.Module) -> bool:
    """Return whether a module is one of Megatron-Core, also if it is wrapped."""
    return has_class(module, "megatron.core.transformer.module", "MegatronModule")


def _load_scheduler(scheduler: Any, state: object) -> None:
    scheduler.num_steps = 0  # load_state_dict adds the loaded steps to num_steps
    scheduler.load_state_dict(state)


def _refuse_module_with_divided_parts(name: str, module: nn.Module) -> None:
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
    if has_tensor_parallelism or any(map(_is_model, module.modules())):
        raise StateError(
            f"{name}: this module contains Megatron-Core modules that are divided among ranks, but "
            "does not describe how: put those modules into the state, or derive this one from "
            "MegatronModule"
        )


class MegatronModelBinding(Binding):
    """A model, or the chunks of a model that this rank holds."""

    kind = "module"

    def __init__(self, name: str, chunks: Sequence[nn.Module], context: Context) -> None:
        self.name = name
        self._modules = [_unwrap(name, chunk) for chunk in chunks]
        configs = [getattr(chunk, "ddp_config", None) for chunk in chunks]
        self._gathers_late = any(getattr(each, "overlap_param_gather", False) for each in configs)
        self._bindings = context.bindings
        self._allow_pickle = context.allow_pickle

    def parameters(self) -> Iterator[Parameter]:
        """Yield all weights. A master weight replaces the weight that it belongs to."""
        for parameter, _ in self._weights():
            yield parameter

    def local_state(self) -> LocalState:
        """Return this rank's part of the model, without tensors that another stage saves."""
        local_state = LocalState(objects=self._extra_state(with_copies=False))
        for parameter, tensor in self._weights():
            if not parameter.is_copy:
                local_state.tensors += self._leaves(parameter, tensor)
        local_state.join_parts(to_fill=False)
        return local_state

    def targets(self, saved: SavedNames, selection: Selection) -> LocalState:
        """Return this rank's part of the model.

        Tensors have Megatron-Core's names if the checkpoint has these names, and otherwise the
        module's names.
        """

        def has_tensor(name: str) -> bool:
            return saved.tensor(f"{self.name}.{name}") is not None

        for tensors, _ in self._described:
            tensors[:] = [with_checkpoint_name(each, has_tensor) for each in tensors]
        targets = LocalState(objects=self._extra_state(with_copies=True))
        parts, problems = match_buckets(self._optimizers(), saved)
        if not all(
            selection.selects(f"{each.bucket.name}.{MASTER_KEY}") for each in parts.values()
        ):
            parts, problems = {}, []
        targets.problems = problems
        for parameter, tensor in self._weights():
            part = parts.get(id(parameter.tensor))
            if part is None:
                targets.tensors += self._leaves(parameter, tensor)
            else:
                targets.tensors.append(part.leaf(MASTER_KEY, parameter.tensor))
                targets.unselected += [f"{self.name}.{each.name}" for each in parameter.flat]
        targets.join_parts(to_fill=True)
        # Extra state that the module does not have at present is not loaded.
        extras = {f"{self.name}.{extra.name}" for _, each in self._described for extra in each}
        targets.unselected += [name for name in extras - targets.objects.keys() if saved.kind(name)]
        return selection.select_from(targets)

    def restore(self, values: Mapping[str, JsonValue]) -> None:
        """Set extra state."""
        for module, (_, extras) in zip(self._modules, self._described, strict=True):
            states: dict[str, Any] = {}
            for extra in extras:
                name = f"{self.name}.{extra.name}"
                if name in values and extra.plain_value is not None:
                    plain = decode(values[name], name, allow_pickle=self._allow_pickle)
                    states[extra.path] = extra.restore_type(plain)
            if states:
                with user_code(self.name, "load_state_dict(), given its extra state,"):
                    module.load_state_dict(states, strict=False)

    def rebuild_weights(self) -> None:
        """Compute the model's weights from the loaded master weights. This is a collective."""
        tensor_ids = {id(each.tensor) for tensors, _ in self._described for each in tensors}
        for optimizer in self._optimizers():
            if any(id(each.parameter) in tensor_ids for each in master_weights_of(optimizer)):
                with torch.no_grad():
                    rebuild_weights(optimizer)

    @cached_property
    def _described(self) -> list[tuple[list[Parameter], list[ExtraState]]]:
        return [describe_model(self.name, module) for module in self._modules]

    def _optimizers(self) -> list[object]:
        """Return the optimizers of Megatron-Core in the state."""
        return [
            each.wrapper for each in self._bindings if isinstance(each, MegatronOptimizerBinding)
        ]

    def _weights(self) -> Iterator[tuple[Parameter, torch.Tensor]]:
        """Yield a parameter for each tensor of the model, with the tensor.

        The parameter is this rank's part of the tensor's master weight. If the tensor has no
        master weight, the parameter is the tensor itself.
        """
        masters = {
            id(each.parameter): each
            for optimizer in self._optimizers()
            for each in master_weights_of(optimizer)
        }
        for each in (tensor for tensors, _ in self._described for tensor in tensors):
            tensor = each.tensor
            master = masters.get(id(tensor), MasterWeight(tensor, tensor, 0, tensor.numel()))
            is_updated_late = self._gathers_late and tensor.requires_grad
            if id(tensor) not in masters and (hasattr(tensor, "main_param") or is_updated_late):
                raise StateError(
                    f"{self.name}: an optimizer that is not in the state has more exact or newer "
                    "weights than the model: put the optimizer that get_megatron_optimizer() "
                    'returned into the state too, as in {"model": model, "optimizer": optimizer}. '
                    'To load without its moments, use only=["model.*"]'
                )
            if master.tensor is not None:
                flat = cut_ranges(each.flat, master.low, master.high)
                yield Parameter(master.tensor, "", flat, each.is_copy), tensor

    def _extra_state(self, *, with_copies: bool) -> dict[str, JsonValue]:
        encoded: dict[str, JsonValue] = {}
        for extra in (extra for _, extras in self._described for extra in extras):
            plain, name = extra.plain_value, f"{self.name}.{extra.name}"
            if plain is not None and (with_copies or not extra.is_copy):
                encoded[name] = encode(plain, name, allow_pickle=self._allow_pickle)
        return encoded

    def _leaves(self, parameter: Parameter, tensor: torch.Tensor) -> Iterator[TensorLeaf]:
        flat = parameter.tensor.detach().view(-1)
        for range_index, part in enumerate(parameter.flat):
            tie_key = id(tensor), range_index  # equal for weights that are tied on this rank
            yield part.leaf(f"{self.name}.{part.name}", flat, tie_key)


class MegatronOptimizerBinding(OptimizerBinding):
    """An optimizer of Megatron-Core, whose state is saved under the names of the parameters.

    Attributes:
        wrapper: the optimizer. The attribute `optimizers` has the torch optimizers inside.
    """

    is_inside_framework = True

    def __init__(self, name: str, wrapper: object, context: Context) -> None:
        refuse_unknown_optimizer(name, wrapper)
        super().__init__(name, [each.optimizer for each in optimizers_in_chain(wrapper)], context)
        self.wrapper = wrapper
        self._scaler_name = f"{context.prefix}{VALUES_KEY}.{SCALER_KEY}"
        self._bucketed_state: BucketedState | None = None

    def local_state(self) -> LocalState:
        """Return the state, hyperparameters, and the loss scale."""
        local_state = super().local_state()
        for scaler in self._dynamic_scalers():
            state = {
                key: value.item() if isinstance(value, torch.Tensor) else value
                for key, value in scaler.state_dict().items()
            }
            local_state.objects[self._scaler_name] = encode(state, self._scaler_name)
        return local_state

    def targets(self, saved: SavedNames, selection: Selection) -> LocalState:
        """Return the state to load. The loss scale stays if the checkpoint lacks it."""
        parts, problems = match_buckets([self.wrapper], saved)
        if parts:
            bucketed_state = BucketedState(parts, saved)
            local_state = LocalState(problems=problems) if problems else bucketed_state.targets()
            if self._dynamic_scalers():
                local_state.problems.append(
                    f"{self._scaler_name}: the loss scale cannot be restored from a checkpoint "
                    "that was saved as dp_reshardable: save it as fully_reshardable"
                )
            selected = selection.select_from(local_state)
            if selected.tensors:
                self._bucketed_state = bucketed_state
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
        scalers = [getattr(each, SCALER_KEY, None) for each in optimizers_in_chain(self.wrapper)]
        return [each for each in scalers if type(each).__name__ == "DynamicGradScaler"]


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


def _unwrap(name: str, module: nn.Module) -> nn.Module:
    """Return the module inside the wrappers of Megatron-Core.

    Raises:
        StateError: the wrapper or the kind of weights is not supported.
    """
    while type(module).__name__ in _WRAPPER_CLASSES and isinstance(module.module, nn.Module):
        module = module.module
    unsupported = ""
    if has_class(module, "megatron.core.distributed.data_parallel_base", "_BaseDataParallel"):
        unsupported = f"{type(module).__name__}, which divides the weights,"
    elif any(type(each.data) is not torch.Tensor for each in module.parameters()):
        unsupported = "weights that are quantized or divided by FSDP"
    if unsupported:
        raise StateError(
            f"{name}: {unsupported} is not supported for Megatron-Core models: save with "
            "megatron.core.dist_checkpointing; shardwise can open such checkpoints"
        )
    return module
