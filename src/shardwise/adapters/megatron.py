"""Megatron-Core: a model in chunks, and its optimizer, whatever divides them.

Names, shapes and boxes are those of Megatron-Core's own `sharded_state_dict`, so that its
checkpoints fit; what an optimizer keeps of a weight in full precision stands for the weight.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn

from shardwise.adapters.binding import Binding
from shardwise.adapters.megatron_model import Contents, Sharded, contents_of
from shardwise.adapters.megatron_optimizer import (
    MASTER,
    BucketedState,
    Buckets,
    Stepped,
    inner_optimizers,
    links_of,
    refuse_unknown_optimizer,
    saved_buckets,
    settle,
    stepped_by,
)
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
    """Whether a value is a module of Megatron-Core's, wrapped or not."""
    if not isinstance(value, nn.Module):
        return False
    return _is(unwrapped(value), "transformer.module", "MegatronModule")


def is_megatron_scheduler(value: object) -> bool:
    """Whether a value is Megatron-Core's scheduler, which steps on from where it is as it loads."""
    return _is(value, "optimizer_param_scheduler", "OptimizerParamScheduler")


def load_scheduler(scheduler: Any, state: object) -> None:
    """Have a scheduler be as one was that was saved."""
    scheduler.num_steps = 0
    scheduler.load_state_dict(state)


def refuse_parts_of_model(name: str, module: nn.Module) -> None:
    """Refuse a module of another kind that has one of Megatron-Core's in it, divided among ranks.

    Raises:
        StateError: it is one.
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
            f"{name}: it has modules of Megatron-Core's in it that are divided among ranks, and is "
            "none itself, which could say how: put these into the state, or derive it from "
            "MegatronModule"
        )


def _is(value: object, module: str, name: str) -> bool:
    wanted = f"megatron.core.{module}", name
    return any((kind.__module__, kind.__name__) == wanted for kind in type(value).__mro__)


class MegatronBinding(Binding):
    """A model, or the chunks of one that this rank has, below one name.

    Args:
        optimizers: those of Megatron-Core's that are in the state, known when all of it is bound.
    """

    def __init__(
        self,
        name: str,
        chunks: Sequence[nn.Module],
        optimizers: Sequence[object],
        *,
        allow_pickle: bool,
    ) -> None:
        self.name = name
        self._modules = [_unwrapped(name, chunk) for chunk in chunks]
        configs = [getattr(chunk, "ddp_config", None) for chunk in chunks]
        self._gathered_late = any(getattr(each, "overlap_param_gather", False) for each in configs)
        self._optimizers = optimizers
        self._allow_pickle = allow_pickle

    def parameters(self) -> Iterator[Parameter]:
        """All weights, or what is stepped in their place."""
        for held, _ in self._held():
            yield held

    def local_state(self) -> LocalState:
        """What this rank has of the model, but for copies of what another stage has."""
        return self._local_state(to_fill=False)

    def targets(self, saved: SavedState, selection: Selection) -> LocalState:
        """All that this rank has of the model.

        It goes by Megatron-Core's names, or by the module's own: whichever the checkpoint has.
        """

        def has(name: str) -> bool:
            return saved.tensor(f"{self.name}.{name}") is not None

        self._contents = [contents.as_in(has) for contents in self._contents]
        buckets = saved_buckets(self._optimizers, saved)
        if all(selection.chooses(f"{p.bucket}.{MASTER}") for p in buckets.places.values()):
            held = self._local_state(to_fill=True, buckets=buckets)
        else:
            held = self._local_state(to_fill=True)
        extras = {f"{self.name}.{extra.name}" for each in self._contents for extra in each.extras}
        # Of extra state that a module does not have now, it takes none.
        held.left += [name for name in extras - held.objects.keys() if saved.kind(name)]
        return selection.of(held)

    def restore(self, values: Mapping[str, JsonValue]) -> None:
        """Set extra state. `rebuild_weights` computes the weights that have master weights."""
        for module, contents in zip(self._modules, self._contents, strict=True):
            states: dict[str, Any] = {}
            for extra in contents.extras:
                name = f"{self.name}.{extra.name}"
                if name in values:
                    plain = decode(values[name], name, allow_pickle=self._allow_pickle)
                    states[extra.path] = extra.like(plain)
            if not states:
                continue
            with user_code(self.name, "load_state_dict(), given its extra state,"):
                module.load_state_dict(states, strict=False)

    def rebuild_weights(self) -> None:
        """Compute the model's weights from the master weights that were loaded."""
        mine = {id(each.tensor) for contents in self._contents for each in contents.tensors}
        with torch.no_grad():
            for optimizer in self._optimizers:
                if any(id(each.parameter) in mine for each in stepped_by(optimizer)):
                    settle(optimizer)

    @cached_property
    def _contents(self) -> list[Contents]:
        return [contents_of(self.name, module) for module in self._modules]

    def _held(self) -> Iterator[tuple[Parameter, Sharded]]:
        """What stands for each tensor: itself, or what is stepped in its place, if it is here."""
        stepped = {
            id(each.parameter): each
            for optimizer in self._optimizers
            for each in stepped_by(optimizer)
        }
        for contents in self._contents:
            for sharded in contents.tensors:
                tensor = sharded.tensor
                each = stepped.get(id(tensor), Stepped(tensor, tensor, 0, tensor.numel()))
                if id(tensor) not in stepped and self._is_stepped_elsewhere(tensor):
                    raise StateError(
                        f"{self.name}: its optimizer has the weights as they are, and the model "
                        "less of them: put it, as get_megatron_optimizer() made it, into the "
                        'state too, as in {"model": model, "optimizer": optimizer}, and load with '
                        'only=["model.*"] if its moments are not wanted'
                    )
                if each.tensor is not None:
                    parts = sharded.parts(each.low, each.high)
                    yield Parameter(each.tensor, "", parts, sharded.copy), sharded

    def _is_stepped_elsewhere(self, tensor: torch.Tensor) -> bool:
        """Whether an optimizer has a tensor in full precision, or before the others get it."""
        return hasattr(tensor, "main_param") or (tensor.requires_grad and self._gathered_late)

    def _local_state(self, *, to_fill: bool, buckets: Buckets | None = None) -> LocalState:
        held = LocalState(problems=[] if buckets is None else list(buckets.problems))
        leaves: list[TensorLeaf] = []
        for parameter, sharded in self._held():
            place = None if buckets is None else buckets.places.get(id(parameter.tensor))
            if place is not None:
                leaves.append(place.leaf(MASTER, parameter.tensor))
                held.left += [f"{self.name}.{part.name}" for part in parameter.flat]
            elif to_fill or not parameter.copy:
                leaves += self._leaves(parameter, sharded)
        held.tensors = joined(leaves, to_fill=to_fill)
        for contents in self._contents:
            for extra in contents.extras:
                name, plain = f"{self.name}.{extra.name}", extra.plain
                if plain is not None and (to_fill or not extra.copy):
                    held.objects[name] = encode(plain, name, allow_pickle=self._allow_pickle)
        return held

    def _leaves(self, parameter: Parameter, sharded: Sharded) -> Iterator[TensorLeaf]:
        flat = parameter.tensor.detach().view(-1)
        for number, part in enumerate(parameter.flat):
            name, fragments = f"{self.name}.{part.name}", part.fragments(flat)
            identity = id(sharded.tensor), number  # of a weight that is tied on this rank
            yield TensorLeaf(name, flat.dtype, part.shape, fragments, identity, padded=part.padded)


class MegatronOptimizerBinding(Binding):
    """An optimizer of Megatron-Core's: state of what it steps, by the names of the parameters.

    Args:
        prefix: what the names of values of its own begin with.
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
        self.name = name
        self._scaler_name = f"{prefix}{VALUES}.{SCALER}"
        self._optimizer = optimizer
        inner = inner_optimizers(optimizer)
        self._bound = OptimizerBinding(name, inner, parameters, allow_pickle=allow_pickle)
        self._bucketed: BucketedState | None = None

    def local_state(self) -> LocalState:
        """As of any optimizer, and how losses are scaled."""
        held = self._bound.local_state()
        for scaler in self._scalers():
            held.objects[self._scaler_name] = encode(_scale_of(scaler), self._scaler_name)
        return held

    def targets(self, saved: SavedState, selection: Selection) -> LocalState:
        """The same. A scale that the checkpoint lacks, not being of Megatron, stays as it is."""
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
        held = self._bound.targets(saved, Selection())
        if self._scalers() and saved.has_object(self._scaler_name):
            held.objects[self._scaler_name] = None
        return selection.of(held)

    def restore(self, values: Mapping[str, JsonValue]) -> None:
        """As of any optimizer."""
        if self._bucketed is not None:
            self._bucketed.restore()
            return
        self._bound.restore(values)
        if self._scaler_name in values:
            for scaler in self._scalers():
                value = decode(values[self._scaler_name], self._scaler_name)
                _set_scale(self._scaler_name, scaler, value)

    def _scalers(self) -> list[Any]:
        """What scales losses, where the scale changes as the training goes on."""
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
        raise StateError(f"{name}: {value!r} is no state of a scaler of losses")
    scaler.load_state_dict(
        {
            key: torch.full_like(old, value[key]) if isinstance(old, torch.Tensor) else value[key]
            for key, old in here.items()
        }
    )


def _unwrapped(name: str, chunk: nn.Module) -> nn.Module:
    """The module inside wrappers of torch's and Megatron-Core's.

    Raises:
        StateError: it is wrapped or made in a way that is not known to be described as it is.
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
            f"{name}: {what} is more than is known of Megatron-Core's models: save by its "
            "dist_checkpointing; such checkpoints can be opened where they lie"
        )
    return module
