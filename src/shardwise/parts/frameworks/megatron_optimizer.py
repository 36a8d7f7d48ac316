"""Megatron-Core's optimizers: their master weights, and their state in buckets.

All values are read from the optimizers' objects, without communication. Classes are recognised by
their names.

Checkpoints that were saved as `dp_reshardable` have the state in buckets, and do not say which
parameters a bucket contains. But an optimizer with the same tensor and pipeline parallelism has the
same buckets, and so shows which parameters they contain.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from shardwise.kernel.errors import StateError
from shardwise.ports.binding import Box, FlatRange, LocalState, SavedNames, TensorLeaf, decode
from shardwise.ports.module_binding import STEP, Group

MASTER_KEY = "param"
"""The key of the master weights in a bucket."""
_BUCKET_NAME = re.compile(r"((?:chained_\d+\.)?)optimizer\.distributed\.dp_group_idx_(\d+)\.(.+)")
_GROUP_IDENTITY_KEYS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
_NOT_HYPERPARAMETERS = ("params", STEP)
_CHAINS = ("ChainedOptimizer", "LayerWiseDistributedOptimizer")


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


def optimizers_in_chain(optimizer: Any) -> list[Any]:
    """Return the optimizers in a chain of optimizers, except those without parameters."""
    chained = getattr(optimizer, "chained_optimizers", None)
    chained_optimizers = (
        [optimizer]
        if chained is None
        else [x for each in chained for x in optimizers_in_chain(each)]
    )
    return [each for each in chained_optimizers if not getattr(each, "is_stub_optimizer", False)]


def refuse_unknown_optimizer(name: str, optimizer: object) -> None:
    """Refuse an optimizer with features that this module cannot read.

    Raises:
        StateError: names the feature.
    """
    kind, unsupported = type(optimizer).__name__, []
    if hasattr(optimizer, "chained_optimizers") and kind not in _CHAINS:
        unsupported.append(kind)
    for chained in optimizers_in_chain(optimizer):
        inner, inner_kind = chained.optimizer, type(chained.optimizer).__name__
        ddp = getattr(chained, "ddp_config", None)
        features = {
            "Megatron-FSDP": getattr(ddp, "use_megatron_fsdp", False),
            type(chained).__name__: type(chained).__name__ not in _MASTERS_OF_TYPE,
            "a precision-aware optimizer, which keeps weights and moments in parts,": getattr(
                chained.config, "use_precision_aware_optimizer", False
            ),
            "offloading the optimizer to the CPU": inner_kind == "HybridDeviceOptimizer",
            f"{inner_kind}, which is not a torch optimizer,": not isinstance(inner, Optimizer),
        }
        unsupported += [feature for feature, is_used in features.items() if is_used]
    if unsupported:
        raise StateError(
            f"{name}: {unsupported[0]} is not supported for Megatron-Core optimizers: save with "
            "megatron.core.dist_checkpointing; shardwise can open such checkpoints"
        )


def master_weights_of(optimizer: object) -> Iterator[MasterWeight]:
    """Yield the tensors that an optimizer updates on this rank."""
    owned: set[int] = set()
    for chained_optimizer in optimizers_in_chain(optimizer):
        for master in _MASTERS_OF_TYPE[type(chained_optimizer).__name__](chained_optimizer):
            owned.add(id(master.parameter))
            yield master
    for parameter in _divided_by_layer(optimizer):
        if id(parameter) not in owned:
            has_master = parameter.dtype != torch.float32  # on the rank that owns it
            end = 0 if has_master else parameter.numel()
            yield MasterWeight(parameter, None if has_master else parameter, 0, end)


def _divided_by_layer(optimizer: object) -> Iterator[torch.Tensor]:
    """Yield the parameters that a layer-wise optimizer divides among the data-parallel ranks."""
    for key in ("dp_cp_params_list", "expt_dp_params_list"):
        yield from chain.from_iterable(getattr(optimizer, key, None) or ())


def rebuild_weights(optimizer: Any) -> None:
    """Compute the model's weights from the master weights. This is a collective."""
    gathering_chunks = []
    for chained_optimizer in optimizers_in_chain(optimizer):
        if type(chained_optimizer).__name__ == "DistributedOptimizer":
            gathering_chunks += [
                chunk for chunk in chained_optimizer.model_chunks if chunk not in gathering_chunks
            ]
    for chunk in gathering_chunks:
        if chunk.ddp_config.overlap_param_gather:  # finish the gather of old weights first
            chunk.start_param_sync(force_sync=True)
    for chained_optimizer in optimizers_in_chain(optimizer):
        if hasattr(chained_optimizer, "_copy_main_params_to_model_params"):
            chained_optimizer._copy_main_params_to_model_params()
    if any(True for _ in _divided_by_layer(optimizer)):
        optimizer.allgather_params()
    for chunk in gathering_chunks:
        chunk.start_param_sync(force_sync=True)


def _masters_of_float32(optimizer: Any) -> Iterator[MasterWeight]:
    for group in optimizer.optimizer.param_groups:
        for parameter in group["params"]:
            yield MasterWeight(parameter, parameter, 0, parameter.numel())


def _masters_of_float16(optimizer: Any) -> Iterator[MasterWeight]:
    groups = zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True)
    for parameters, masters in groups:
        for parameter, master in zip(parameters, masters, strict=True):
            yield MasterWeight(parameter, master, 0, parameter.numel())
    for parameter in chain.from_iterable(optimizer.fp32_from_fp32_groups):
        yield MasterWeight(parameter, parameter, 0, parameter.numel())


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


_MASTERS_OF_TYPE: dict[str, Callable[[Any], Iterator[MasterWeight]]] = {
    "FP32Optimizer": _masters_of_float32,
    "Float16OptimizerWithFloat16Params": _masters_of_float16,
    "DistributedOptimizer": _masters_of_distributed,
}


@dataclass(frozen=True, slots=True)
class ParameterInBucket:
    """This rank's part of a parameter, and its position in a bucket.

    Attributes:
        chained_optimizer: the DistributedOptimizer that updates the parameter.
        group_prefix: start of the names of all values of the optimizer's data-parallel group.
        bucket: the range of the bucket, without padding at its end, that the tensor holds.
        tensor: the tensor that the optimizer updates.
    """

    chained_optimizer: Any
    group_prefix: str
    bucket: FlatRange
    tensor: torch.Tensor

    def leaf(self, key: str, value: torch.Tensor) -> TensorLeaf:
        """Return a leaf through which a load fills the state tensor `value` of this key."""
        return self.bucket.leaf(f"{self.bucket.name}.{key}", value.detach().view(-1))


def match_buckets(
    optimizers: Sequence[object], saved: SavedNames
) -> tuple[dict[int, ParameterInBucket], list[str]]:
    """Match the buckets of a checkpoint with optimizers of Megatron-Core.

    Returns:
        The parameters in buckets, by the `id` of the tensor that is updated (none, if the
        checkpoint has no buckets); and the problems, which say how the buckets of the checkpoint
        differ from those of the optimizers.
    """
    groups: dict[str, set[int]] = {}
    for match in map(_BUCKET_NAME.fullmatch, saved.all_names()):
        if match is not None:
            groups.setdefault(match[1], set()).add(int(match[2]))
    parts: dict[int, ParameterInBucket] = {}
    for optimizer in optimizers if groups else ():
        for part in _parameters_in_buckets(optimizer, chained=any(groups)):
            parts[id(part.tensor)] = part
            master = saved.tensor(f"{part.bucket.name}.{MASTER_KEY}")
            prefix = part.group_prefix.partition("optimizer.")[0]
            ranks = dist.get_world_size() // part.chained_optimizer.data_parallel_group.size()
            if (
                master is None
                or master.shape != part.bucket.shape
                or groups.get(prefix) != {*range(ranks)}
            ):
                return parts, [
                    f"{part.bucket.name}: the checkpoint holds the optimizer in buckets (it was "
                    "saved as dp_reshardable), but this optimizer has other buckets: load with the "
                    "same tensor and pipeline parallelism and bucket size, or save as "
                    "fully_reshardable"
                ]
    return parts, []


def _parameters_in_buckets(optimizer: Any, *, chained: bool) -> Iterator[ParameterInBucket]:
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    for index, each in enumerate(chain):
        for chained_optimizer in optimizers_in_chain(each):
            if type(chained_optimizer).__name__ != "DistributedOptimizer":
                continue
            prefix = f"chained_{index}." if chained else ""
            group_index = chained_optimizer.data_parallel_group_idx
            group = f"{prefix}optimizer.distributed.dp_group_idx_{group_index}"
            yield from _parameters_in_buckets_of(chained_optimizer, group)


def _parameters_in_buckets_of(chained_optimizer: Any, group: str) -> Iterator[ParameterInBucket]:
    masters = master_weights_of(chained_optimizer)
    updated_tensors = {id(each.parameter): each.tensor for each in masters}
    for buffer_index, buckets_by_dtype in enumerate(chained_optimizer.gbuf_ranges):
        for dtype, buckets in buckets_by_dtype.items():
            for bucket_index, bucket in enumerate(buckets):
                name = f"{group}.gbuf_idx_{buffer_index}.dtype_{dtype}.bucket_idx_{bucket_index}"
                numel = chained_optimizer.buffers[buffer_index].buckets[bucket_index].numel_unpadded
                for parameter, ranges in bucket["param_map"].items():
                    tensor = updated_tensors[id(parameter)]
                    if tensor is not None:
                        start, count = ranges["gbuf_world_in_bucket"].start, tensor.numel()
                        boxes = (Box((start,), (count,)),) if count else ()
                        in_bucket = FlatRange(name, (numel,), 0, boxes)
                        yield ParameterInBucket(chained_optimizer, group, in_bucket, tensor)


class BucketedState:
    """Loads optimizer state and hyperparameters from buckets."""

    def __init__(self, parts: Mapping[int, ParameterInBucket], saved: SavedNames) -> None:
        self._parts = parts
        self._saved = saved
        self._created_states: list[
            tuple[Group, torch.Tensor, Mapping[str, Any], dict[str, object]]
        ] = []

    def targets(self) -> LocalState:
        """Return the parts of buckets to load. Missing state is created."""
        local_state = LocalState()
        for part in self._parts.values():
            optimizer, tensor = part.chained_optimizer.optimizer, part.tensor
            group = next(
                Group(optimizer, settings, [])
                for settings in optimizer.param_groups
                if any(each is tensor for each in settings["params"])
            )
            settings = self._saved_settings(part, group, local_state)
            if settings is None:
                continue
            state = group.read_state(part.tensor)
            for key in self._saved.names_below(part.bucket.name):
                entry = self._saved.tensor(f"{part.bucket.name}.{key}")
                if key == MASTER_KEY or entry is None:
                    continue
                dtype = getattr(torch, entry.dtype)
                current = state.get(key)
                if not isinstance(current, torch.Tensor) or current.dtype != dtype:
                    current = torch.zeros_like(part.tensor, dtype=dtype)
                state[key] = current
                local_state.tensors.append(part.leaf(key, current))
            state[STEP] = torch.tensor(float(settings[STEP]), device="cpu")
            self._created_states.append((group, part.tensor, settings, state))
        local_state.join_parts(to_fill=True)
        names = map(_BUCKET_NAME.fullmatch, self._saved.all_names())
        local_state.unselected = [match[0] for match in names if match is not None]
        return local_state

    def restore(self) -> None:
        """Set the created state and hyperparameters, after the tensors are filled."""
        for group, tensor, settings, state in self._created_states:
            group.write_state(tensor, state)
            for key, value in settings.items():
                if key not in _NOT_HYPERPARAMETERS:
                    group.settings[key] = value

    def _saved_settings(
        self, part: ParameterInBucket, group: Group, local_state: LocalState
    ) -> Mapping[str, Any] | None:
        """Return the saved settings of a parameter's group, or add a problem and return None."""
        name, identity = f"{part.group_prefix}.optimizer", _group_identity(group.settings)
        matching: list[dict[str, Any]] = []
        if self._saved.has_object(name):
            value = decode(self._saved.object(name), name)
            saved_groups = value.get("param_groups") if isinstance(value, dict) else None
            matching = [
                each
                for each in (saved_groups if isinstance(saved_groups, list) else ())
                if isinstance(each, dict) and _group_identity(each) == identity
            ]
        if len(matching) != 1 or not isinstance(matching[0].get(STEP), (int, float)):
            problem = (
                f"{name}: the checkpoint has no settings and step count for the param group with "
                f"{dict(zip(_GROUP_IDENTITY_KEYS, identity, strict=True))}: make the "
                "optimizer with the same param groups as in the saved training, or leave it out "
                "with skip="
            )
            local_state.problems += [problem] if problem not in local_state.problems else []
            return None
        return matching[0]


def _group_identity(group: Mapping[str, Any]) -> tuple[object, ...]:
    """Return the values that identify a param group. NeMo adds `pre_` to their keys."""
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in _GROUP_IDENTITY_KEYS)
