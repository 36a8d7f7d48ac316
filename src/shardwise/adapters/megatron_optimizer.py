"""Megatron-Core's optimizers: their master weights, and their state saved as `dp_reshardable`.

All values are read from the optimizers' objects, without communication. Classes are recognised by
their names.

A `dp_reshardable` checkpoint holds the state in buckets. Its files do not list the parameters of a
bucket, but an optimizer with the same tensor and pipeline parallelism has the same buckets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from shardwise.adapters.optimizer_state import STEP, read_state, write_state
from shardwise.adapters.parameters import join_leaves
from shardwise.errors import StateError
from shardwise.layout import Box
from shardwise.plan.name_lookup import SavedNames
from shardwise.state.leaves import Fragment, LocalState, TensorLeaf
from shardwise.state.plain_values import decode


@dataclass(frozen=True, slots=True)
class MasterWeight:
    """The tensor that an optimizer updates in place of a parameter.

    Attributes:
        parameter: the parameter of the model.
        tensor: the master weight, or the parameter itself if it has no master weight. None if the
            optimizer updates this parameter only on other ranks.
        low, high: the range of elements of the flattened parameter that the tensor holds.
    """

    parameter: torch.Tensor
    tensor: torch.Tensor | None
    low: int
    high: int


def is_megatron_optimizer(value: object) -> bool:
    """Return whether a value is one of Megatron-Core's optimizers, which wrap torch optimizers."""
    return any(
        (cls.__module__, cls.__name__) == ("megatron.core.optimizer.optimizer", "MegatronOptimizer")
        for cls in type(value).__mro__
    )


def optimizers_in_chain(optimizer: Any) -> list[Any]:
    """Return the optimizers in a chain of optimizers, except those without parameters."""
    chained = getattr(optimizer, "chained_optimizers", None)
    links = (
        [optimizer]
        if chained is None
        else [x for each in chained for x in optimizers_in_chain(each)]
    )
    return [each for each in links if not getattr(each, "is_stub_optimizer", False)]


def inner_optimizers(optimizer: object) -> list[Optimizer]:
    """Return the torch optimizers inside an optimizer of Megatron-Core."""
    return [each.optimizer for each in optimizers_in_chain(optimizer)]


def refuse_unknown_optimizer(name: str, optimizer: object) -> None:
    """Refuse an optimizer with features that this module cannot read.

    Raises:
        StateError: names the feature.
    """
    unsupported = ""
    if hasattr(optimizer, "chained_optimizers") and type(optimizer).__name__ != "ChainedOptimizer":
        unsupported = type(optimizer).__name__
    for link in optimizers_in_chain(optimizer):
        torch_optimizer, ddp = link.optimizer, getattr(link, "ddp_config", None)
        if getattr(ddp, "use_megatron_fsdp", False):
            unsupported = "Megatron-FSDP"
        elif type(link).__name__ not in _MASTERS_OF_TYPE:
            unsupported = type(link).__name__
        elif getattr(link.config, "use_precision_aware_optimizer", False):
            unsupported = "a precision-aware optimizer, which keeps weights and moments in parts,"
        elif type(torch_optimizer).__name__ == "HybridDeviceOptimizer":
            unsupported = "offloading the optimizer to the CPU"
        elif not isinstance(torch_optimizer, Optimizer):
            unsupported = f"{type(torch_optimizer).__name__}, which is not a torch optimizer,"
    if unsupported:
        raise StateError(
            f"{name}: {unsupported} is not supported for Megatron-Core optimizers: save with "
            "megatron.core.dist_checkpointing; shardwise can open such checkpoints"
        )


def master_weights_of(optimizer: object) -> Iterator[MasterWeight]:
    """Yield the tensors that an optimizer updates on this rank."""
    for link in optimizers_in_chain(optimizer):
        yield from _MASTERS_OF_TYPE[type(link).__name__](link)


def rebuild_weights(optimizer: object) -> None:
    """Compute the model's weights from the master weights. This is a collective."""
    gathering_chunks = []
    for link in optimizers_in_chain(optimizer):
        if type(link).__name__ == "DistributedOptimizer":
            gathering_chunks += [
                chunk for chunk in link.model_chunks if chunk not in gathering_chunks
            ]
    for chunk in gathering_chunks:
        if (
            chunk.ddp_config.overlap_param_gather
        ):  # finish a gather of old weights that is under way
            chunk.start_param_sync(force_sync=True)
    for link in optimizers_in_chain(optimizer):
        if hasattr(link, "_copy_main_params_to_model_params"):
            link._copy_main_params_to_model_params()
    for chunk in gathering_chunks:
        chunk.start_param_sync(force_sync=True)


def _masters_of_float32(optimizer: Any) -> Iterator[MasterWeight]:
    for group in optimizer.optimizer.param_groups:
        for parameter in group["params"]:
            yield _whole_weight(parameter, parameter)


def _masters_of_float16(optimizer: Any) -> Iterator[MasterWeight]:
    groups = zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True)
    for parameters, masters in groups:
        for parameter, master in zip(parameters, masters, strict=True):
            yield _whole_weight(parameter, master)
    for parameter in chain.from_iterable(optimizer.fp32_from_fp32_groups):
        yield _whole_weight(parameter, parameter)


def _masters_of_distributed(optimizer: Any) -> Iterator[MasterWeight]:
    groups = chain(
        zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True),
        zip(optimizer.model_fp32_groups, optimizer.shard_fp32_groups, strict=True),
    )
    parameter_ids: set[int] = set()
    for parameters, shards in groups:
        for parameter, shard in zip(parameters, shards, strict=True):
            own_range = optimizer._get_model_param_range_map(parameter)["param"]
            parameter_ids.add(id(parameter))
            yield MasterWeight(parameter, shard, own_range.start, own_range.end)
    for buffer in optimizer.buffers:
        for parameter in buffer.param_index_map:
            if id(parameter) not in parameter_ids:
                yield MasterWeight(parameter, None, 0, 0)


def _whole_weight(parameter: torch.Tensor, tensor: torch.Tensor) -> MasterWeight:
    return MasterWeight(parameter, tensor, 0, parameter.numel())


_MASTERS_OF_TYPE: dict[str, Callable[[Any], Iterator[MasterWeight]]] = {
    "FP32Optimizer": _masters_of_float32,
    "Float16OptimizerWithFloat16Params": _masters_of_float16,
    "DistributedOptimizer": _masters_of_distributed,
}


MASTER = "param"
"""The key of the master weights in a bucket."""
_BUCKET_NAME = re.compile(r"((?:chained_\d+\.)?)optimizer\.distributed\.dp_group_idx_(\d+)\.(.+)")
_GROUP_IDENTITY_KEYS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
_NOT_HYPERPARAMETERS = ("params", STEP)


@dataclass(frozen=True, slots=True)
class ParameterInBucket:
    """This rank's part of a parameter, and its position in a bucket.

    Attributes:
        optimizer: the DistributedOptimizer that updates the parameter.
        group_prefix: start of the names of all values of the optimizer's data-parallel group.
        bucket: name of the bucket.
        bucket_numel: number of elements of the bucket, without padding at the end.
        start: index of the part's first element in the bucket.
        tensor: the tensor that the optimizer updates.
    """

    link: Any
    group: str
    bucket: str
    numel: int
    start: int
    tensor: torch.Tensor

    def leaf(self, key: str, value: torch.Tensor) -> TensorLeaf:
        """Return a leaf that fills `value`, the state tensor `key`, from its part of the bucket."""
        flat = value.detach().view(-1)
        fragments = (Fragment(Box((self.start,), (len(flat),)), flat),) if len(flat) else ()
        return TensorLeaf(f"{self.bucket}.{key}", value.dtype, (self.numel,), fragments)


@dataclass(slots=True)
class Buckets:
    """The buckets of a checkpoint, matched with optimizers.

    Attributes:
        places: parameters in buckets, by the `id` of the tensor that is stepped; empty if the
            checkpoint has no buckets.
        problems: differences between the buckets of the checkpoint and of the optimizers.
    """

    places: dict[int, ParameterInBucket] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def match_buckets(optimizers: Sequence[object], saved: SavedNames) -> Buckets:
    """Match the buckets of a checkpoint with optimizers of Megatron-Core."""
    groups: dict[str, set[int]] = {}
    for entry in saved.manifest.tensors:
        match = _BUCKET_NAME.fullmatch(entry.name)
        if match is not None:
            groups.setdefault(match[1], set()).add(int(match[2]))
    buckets = Buckets()
    for optimizer in optimizers if groups else ():
        for place in _parameters_in_buckets(optimizer, chained=any(groups)):
            buckets.places[id(place.tensor)] = place
            master = saved.tensor(f"{place.bucket}.{MASTER}")
            prefix = place.group.partition("optimizer.")[0]
            ranks = dist.get_world_size() // place.link.data_parallel_group.size()
            if (
                master is None
                or master.shape != (place.numel,)
                or groups.get(prefix) != {*range(ranks)}
            ):
                buckets.problems.append(
                    f"{place.bucket}: the checkpoint holds the optimizer in buckets (it was saved "
                    "as dp_reshardable), but this optimizer has other buckets: load with the same "
                    "tensor and pipeline parallelism and bucket size, or save as fully_reshardable"
                )
                return buckets
    return buckets


def _parameters_in_buckets(optimizer: Any, *, chained: bool) -> Iterator[ParameterInBucket]:
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    for index, each in enumerate(chain):
        for link in optimizers_in_chain(each):
            if type(link).__name__ != "DistributedOptimizer":
                continue
            prefix = f"chained_{index}." if chained else ""
            group = f"{prefix}optimizer.distributed.dp_group_idx_{link.data_parallel_group_idx}"
            yield from _parameters_in_buckets_of(link, group)


def _parameters_in_buckets_of(link: Any, group: str) -> Iterator[ParameterInBucket]:
    stepped_tensors = {id(each.parameter): each.tensor for each in master_weights_of(link)}
    for buffer_index, by_dtype in enumerate(link.gbuf_ranges):
        for dtype, buckets in by_dtype.items():
            for bucket_index, bucket in enumerate(buckets):
                name = f"{group}.gbuf_idx_{buffer_index}.dtype_{dtype}.bucket_idx_{bucket_index}"
                numel = link.buffers[buffer_index].buckets[bucket_index].numel_unpadded
                for parameter, ranges in bucket["param_map"].items():
                    tensor = stepped_tensors[id(parameter)]
                    if tensor is not None:
                        start = ranges["gbuf_world_in_bucket"].start
                        yield ParameterInBucket(link, group, name, numel, start, tensor)


class BucketedState:
    """Loads optimizer state and hyperparameters from buckets."""

    def __init__(self, buckets: Buckets, saved: SavedNames) -> None:
        self._buckets = buckets
        self._saved = saved
        self._created: list[tuple[ParameterInBucket, Mapping[str, Any], dict[str, object]]] = []

    def targets(self) -> LocalState:
        """Return the parts of buckets to load. Missing state is created."""
        local_state = LocalState(problems=list(self._buckets.problems))
        if local_state.problems:
            return local_state
        leaves: list[TensorLeaf] = []
        for place in self._buckets.places.values():
            settings = self._saved_settings(place, local_state)
            if settings is None:
                continue
            optimizer, group = place.link.optimizer, _param_group_of(place)
            state = read_state(optimizer, group, place.tensor)
            for key in self._saved.below(place.bucket):
                entry = self._saved.tensor(f"{place.bucket}.{key}")
                if key == MASTER or entry is None:
                    continue
                dtype = getattr(torch, entry.dtype)
                current = state.get(key)
                if not isinstance(current, torch.Tensor) or current.dtype != dtype:
                    current = torch.zeros_like(place.tensor, dtype=dtype)
                state[key] = current
                leaves.append(place.leaf(key, current))
            state[STEP] = torch.tensor(float(settings[STEP]), device="cpu")
            self._created.append((place, settings, state))
        local_state.tensors = join_leaves(leaves, to_fill=True)
        names = map(_BUCKET_NAME.fullmatch, self._saved.all_names())
        local_state.unselected = [match[0] for match in names if match is not None]
        return local_state

    def discard_state(self) -> None:
        """Drop the created state, so that `restore` does nothing."""
        self._created = []

    def restore(self) -> None:
        """Set the created state and hyperparameters, after the tensors are filled."""
        for place, settings, state in self._created:
            group = _param_group_of(place)
            write_state(place.link.optimizer, group, place.tensor, state)
            for key, value in settings.items():
                if key not in _NOT_HYPERPARAMETERS:
                    group[key] = value

    def _saved_settings(
        self, place: ParameterInBucket, local_state: LocalState
    ) -> Mapping[str, Any] | None:
        """Return the saved settings of a parameter's group, or add a problem and return None."""
        name, group = f"{place.group}.optimizer", _param_group_of(place)
        matching: list[dict[str, Any]] = []
        if self._saved.has_object(name):
            value = decode(self._saved.object(name), name)
            saved_groups = value.get("param_groups") if isinstance(value, dict) else None
            matching = [
                each
                for each in (saved_groups if isinstance(saved_groups, list) else ())
                if isinstance(each, dict) and _group_identity(each) == _group_identity(group)
            ]
        if len(matching) != 1 or not isinstance(matching[0].get(STEP), (int, float)):
            problem = (
                f"{name}: the checkpoint has no settings and step count for the param group with "
                f"{dict(zip(_GROUP_IDENTITY_KEYS, _group_identity(group), strict=True))}"
            )
            local_state.problems += [problem] if problem not in local_state.problems else []
            return None
        return matching[0]


def _group_identity(group: Mapping[str, Any]) -> tuple[object, ...]:
    """Return the values that identify a param group. NeMo adds `pre_` to their keys."""
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in _GROUP_IDENTITY_KEYS)


def _param_group_of(place: ParameterInBucket) -> dict[str, Any]:
    groups = place.link.optimizer.param_groups
    return next(group for group in groups if any(each is place.tensor for each in group["params"]))
