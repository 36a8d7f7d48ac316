"""Megatron-Core's models and optimizers.

Names, shapes and boxes are those of Megatron-Core's own `sharded_state_dict`, so that its
checkpoints fit. Where an optimizer keeps master weights, these are saved in place of the model's.
Megatron-Core is not imported: classes are recognised by their names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn

from shardwise.adapters.megatron_model import Description, ModelTensor, description_of
from shardwise.adapters.megatron_optimizer import (
    MASTER,
    BucketedState,
    BucketPlace,
    Master,
    inner_optimizers,
    links_of,
    masters_of,
    rebuild_weights,
    refuse_unknown_optimizer,
    saved_buckets,
)
from shardwise.adapters.modules import Contents
from shardwise.adapters.optimizers import OptimizerBinding, ParameterMap
from shardwise.adapters.parameters import Parameter, joined, unwrapped
from shardwise.errors import StateError, user_code
from shardwise.plan.lookup import SavedState
from shardwise.state.leaves import LocalState, TensorLeaf
from shardwise.state.objects import JsonValue, decode, encode
from shardwise.state.selection import Selection

VALUES = "megatron"
SCALER = "grad_scaler"
_WRAPPERS = ("DistributedDataParallel", "Float16Module")


def is_megatron_model(value: object) -> bool:
    """Return whether a value is a module of Megatron-Core's, wrapped or not."""
    if not isinstance(value, nn.Module):
        return False
    return _is(unwrapped(value), "transformer.module", "MegatronModule")


def is_megatron_scheduler(value: object) -> bool:
    """Return whether a value is Megatron-Core's scheduler, which adds the steps that it loads."""
    return _is(value, "optimizer_param_scheduler", "OptimizerParamScheduler")


def load_scheduler(scheduler: Any, state: object) -> None:
    """Set the saved state of a scheduler."""
    scheduler.num_steps = 0
    scheduler.load_state_dict(state)


def refuse_parts_of_model(name: str, module: nn.Module) -> None:
    """Refuse another kind of module with modules of Megatron-Core's that are divided among ranks.

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
    divided = any(getattr(each, "tensor_model_parallel", False) for each in module.parameters())
    if divided or any(map(is_megatron_model, module.modules())):
        raise StateError(
            f"{name}: it has modules of Megatron-Core's that are divided among ranks, and does not "
            "describe how: put these modules into the state, or derive this one from "
            "MegatronModule"
        )


def _is(value: object, module: str, name: str) -> bool:
    wanted = f"megatron.core.{module}", name
    return any((kind.__module__, kind.__name__) == wanted for kind in type(value).__mro__)


class MegatronWeights:
    """The weights of a model, or of the chunks of one that this rank has.

    Args:
        name: name of the model in the state.
        optimizers: Megatron-Core's optimizers in the state; complete when all of it is bound.
    """

    def __init__(
        self, name: str, chunks: Sequence[nn.Module], optimizers: Sequence[object]
    ) -> None:
        self._name = name
        self._modules = [_unwrapped(name, chunk) for chunk in chunks]
        configs = [getattr(chunk, "ddp_config", None) for chunk in chunks]
        self._gathered_late = any(getattr(each, "overlap_param_gather", False) for each in configs)
        self._optimizers = optimizers

    def parameters(self) -> Iterator[Parameter]:
        """Yield all weights, or their master weights."""
        for parameter, _ in self._weights():
            yield parameter

    def contents(self, root: str) -> Contents:
        """Return this rank's part of the model, without copies of what another stage has."""
        found = self._extra_state(root, with_copies=False)
        leaves: list[TensorLeaf] = []
        for parameter, tensor in self._weights():
            if not parameter.copy:
                leaves += _leaves(root, parameter, tensor)
        found.tensors = joined(leaves, to_fill=False)
        return found

    def targets(self, root: str, saved: SavedState, selection: Selection) -> Contents:
        """Return all of this rank's part of the model.

        Tensors have Megatron-Core's names, or those of the module, as the checkpoint has them.
        """

        def has(name: str) -> bool:
            return saved.tensor(f"{root}.{name}") is not None

        self._described = [each.as_in(has) for each in self._described]
        found = self._extra_state(root, with_copies=True)
        extras = {f"{root}.{extra.name}" for each in self._described for extra in each.extras}
        buckets = saved_buckets(self._optimizers, saved)
        places: dict[int, BucketPlace] = {}
        if all(selection.chooses(f"{p.bucket}.{MASTER}") for p in buckets.places.values()):
            places, found.problems = buckets.places, list(buckets.problems)
        leaves: list[TensorLeaf] = []
        for parameter, tensor in self._weights():
            place = places.get(id(parameter.tensor))
            if place is None:
                leaves += _leaves(root, parameter, tensor)
            else:
                leaves.append(place.leaf(MASTER, parameter.tensor))
                found.left += [f"{root}.{part.name}" for part in parameter.flat]
        found.tensors = joined(leaves, to_fill=True)
        # Extra state that the module does not have now is not loaded.
        found.left += [name for name in extras - found.extra_state.keys() if saved.kind(name)]
        return found

    def restore(self, root: str, extra_state: Mapping[str, object]) -> None:
        """Set extra state."""
        for module, described in zip(self._modules, self._described, strict=True):
            states: dict[str, Any] = {}
            for extra in described.extras:
                name = f"{root}.{extra.name}"
                if name in extra_state:
                    states[extra.path] = extra.like(extra_state[name])
            if not states:
                continue
            with user_code(root, "load_state_dict(), given its extra state,"):
                module.load_state_dict(states, strict=False)

    def rebuild(self) -> None:
        """Compute the model's weights from loaded master weights. All ranks call it together."""
        mine = {id(each.tensor) for described in self._described for each in described.tensors}
        for optimizer in self._optimizers:
            if any(id(each.parameter) in mine for each in masters_of(optimizer)):
                rebuild_weights(optimizer)

    @cached_property
    def _described(self) -> list[Description]:
        return [description_of(self._name, module) for module in self._modules]

    def _weights(self) -> Iterator[tuple[Parameter, ModelTensor]]:
        """Yield each tensor as a parameter: itself, or this rank's part of its master weight."""
        masters = {
            id(each.parameter): each
            for optimizer in self._optimizers
            for each in masters_of(optimizer)
        }
        for described in self._described:
            for each in described.tensors:
                tensor = each.tensor
                master = masters.get(id(tensor), Master(tensor, tensor, 0, tensor.numel()))
                if id(tensor) not in masters and self._has_master_elsewhere(tensor):
                    raise StateError(
                        f"{self._name}: its optimizer has more exact or newer weights than the "
                        "model: put the optimizer that get_megatron_optimizer() returned into the "
                        'state too, as in {"model": model, "optimizer": optimizer}, and load with '
                        'only=["model.*"] if its moments are not wanted'
                    )
                if master.tensor is not None:
                    flat = each.cut(master.low, master.high)
                    yield Parameter(master.tensor, "", flat, each.copy), each

    def _has_master_elsewhere(self, tensor: torch.Tensor) -> bool:
        """Return whether an optimizer that is not in the state has a tensor's current values."""
        return hasattr(tensor, "main_param") or (tensor.requires_grad and self._gathered_late)

    def _extra_state(self, root: str, *, with_copies: bool) -> Contents:
        found = Contents()
        for described in self._described:
            for extra in described.extras:
                plain = extra.plain
                if plain is not None and (with_copies or not extra.copy):
                    found.extra_state[f"{root}.{extra.name}"] = plain
        return found


def _leaves(root: str, parameter: Parameter, tensor: ModelTensor) -> Iterator[TensorLeaf]:
    flat = parameter.tensor.detach().view(-1)
    for number, part in enumerate(parameter.flat):
        identity = id(tensor.tensor), number  # equal for weights that are tied on this rank
        yield part.leaf(f"{root}.{part.name}", flat, identity)


class MegatronOptimizerBinding(OptimizerBinding):
    """An optimizer of Megatron-Core's: state of master weights by the names of the parameters.

    Args:
        prefix: prefix of the names of values that are not of a parameter.
    """

    def __init__(
        self,
        name: str,
        prefix: str,
        optimizer: object,
        parameters: Callable[[], ParameterMap],
        *,
        allow_pickle: bool,
    ) -> None:
        refuse_unknown_optimizer(name, optimizer)
        super().__init__(name, inner_optimizers(optimizer), parameters, allow_pickle=allow_pickle)
        self._scaler_name = f"{prefix}{VALUES}.{SCALER}"
        self._optimizer = optimizer
        self._bucketed: BucketedState | None = None

    def local_state(self) -> LocalState:
        """Return the state, hyperparameters, and the loss scale."""
        held = super().local_state()
        for scaler in self._scalers():
            held.objects[self._scaler_name] = encode(_scale_of(scaler), self._scaler_name)
        return held

    def targets(self, saved: SavedState, selection: Selection) -> LocalState:
        """Return what a load fills. The loss scale stays if the checkpoint has none."""
        buckets = saved_buckets([self._optimizer], saved)
        self._bucketed = BucketedState(buckets, saved) if buckets.places else None
        if self._bucketed is not None:
            held = self._bucketed.targets()
            if self._scalers():
                held.problems.append(
                    f"{self._scaler_name}: a checkpoint saved as dp_reshardable cannot restore the "
                    "loss scale: save it as fully_reshardable"
                )
            chosen = selection.of(held)
            if not chosen.tensors:
                self._bucketed.forget()
            return chosen
        held = super().targets(saved, selection)
        if self._scalers() and saved.has_object(self._scaler_name):
            held.add(selection.of(LocalState(objects={self._scaler_name: None})))
        return held

    def restore(self, values: Mapping[str, JsonValue]) -> None:
        """Set state, hyperparameters and the loss scale, once the tensors are filled."""
        if self._bucketed is not None:
            self._bucketed.restore()
            return
        super().restore(values)
        if self._scaler_name in values:
            for scaler in self._scalers():
                value = decode(values[self._scaler_name], self._scaler_name)
                _set_scale(self._scaler_name, scaler, value)

    def parameter_order(self) -> None:
        """Return None: foreign checkpoints of Megatron-Core do not number parameters."""

    def _scalers(self) -> list[Any]:
        """Return the loss scalers whose scale changes during the training."""
        scalers = [getattr(link, SCALER, None) for link in links_of(self._optimizer)]
        return [each for each in scalers if type(each).__name__ == "DynamicGradScaler"]


def _scale_of(scaler: Any) -> dict[str, object]:
    state = scaler.state_dict()
    return {
        key: value.item() if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }


def _set_scale(name: str, scaler: Any, value: object) -> None:
    here = scaler.state_dict()
    if not isinstance(value, Mapping) or value.keys() != here.keys():
        raise StateError(f"{name}: expected the state of a loss scaler, found {value!r}")
    scaler.load_state_dict(
        {
            key: torch.full_like(old, value[key]) if isinstance(old, torch.Tensor) else value[key]
            for key, old in here.items()
        }
    )


def _unwrapped(name: str, chunk: nn.Module) -> nn.Module:
    """Return the module inside wrappers of torch's and Megatron-Core's.

    Raises:
        StateError: the wrapper or the kind of weights is not supported.
    """
    module = unwrapped(chunk)
    while type(module).__name__ in _WRAPPERS and isinstance(module.module, nn.Module):
        module = module.module
    what = ""
    if _is(module, "distributed.data_parallel_base", "_BaseDataParallel"):
        what = f"{type(module).__name__}, which divides the weights,"
    elif any(type(each.data) is not torch.Tensor for each in module.parameters()):
        what = "weights that are quantized or divided by FSDP"
    if what:
        raise StateError(
            f"{name}: {what} is not supported for Megatron-Core models: save with "
            "megatron.core.dist_checkpointing; shardwise can open such checkpoints"
        )
    return module
