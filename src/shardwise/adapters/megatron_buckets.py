"""Loads the state of Megatron-Core's optimizers from buckets, as `dp_reshardable` saves them.

The files do not say which parameters a bucket contains. But an optimizer with the same tensor and
pipeline parallelism has the same buckets, and so shows which parameters they contain.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from shardwise.adapters.megatron_optimizer import master_weights_of, optimizers_in_chain
from shardwise.adapters.optimizer_state import STEP, read_state, write_state
from shardwise.adapters.parameters import join_leaves
from shardwise.layout import Box
from shardwise.plan.name_lookup import SavedNames
from shardwise.state.leaves import Fragment, LocalState, TensorLeaf
from shardwise.state.plain_values import decode

MASTER_KEY = "param"
"""The key of the master weights in a bucket."""
_BUCKET_NAME = re.compile(r"((?:chained_\d+\.)?)optimizer\.distributed\.dp_group_idx_(\d+)\.(.+)")
_GROUP_IDENTITY_KEYS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
_NOT_HYPERPARAMETERS = ("params", STEP)


@dataclass(frozen=True, slots=True)
class ParameterInBucket:
    """This rank's part of a parameter, and its position in a bucket.

    Attributes:
        chained_optimizer: the DistributedOptimizer that updates the parameter.
        group_prefix: start of the names of all values of the optimizer's data-parallel group.
        bucket: name of the bucket.
        bucket_numel: number of elements of the bucket, without padding at the end.
        start: index of the part's first element in the bucket.
        tensor: the tensor that the optimizer updates.
    """

    chained_optimizer: Any
    group_prefix: str
    bucket: str
    bucket_numel: int
    start: int
    tensor: torch.Tensor

    def leaf(self, key: str, value: torch.Tensor) -> TensorLeaf:
        """Return a leaf through which a load fills the state tensor `value` of this key."""
        flat = value.detach().view(-1)
        fragments = (Fragment(Box((self.start,), (len(flat),)), flat),) if len(flat) else ()
        return TensorLeaf(f"{self.bucket}.{key}", value.dtype, (self.bucket_numel,), fragments)


@dataclass(slots=True)
class Buckets:
    """The buckets of a checkpoint, matched with optimizers.

    Attributes:
        parts: the parameters in buckets, keyed by the `id` of the updated tensor; empty if the
            checkpoint has no buckets.
        problems: differences between the buckets of the checkpoint and of the optimizers.
    """

    parts: dict[int, ParameterInBucket] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def match_buckets(optimizers: Sequence[object], saved: SavedNames) -> Buckets:
    """Match the buckets of a checkpoint with optimizers of Megatron-Core."""
    groups: dict[str, set[int]] = {}
    for entry in saved.layout.tensors:
        match = _BUCKET_NAME.fullmatch(entry.name)
        if match is not None:
            groups.setdefault(match[1], set()).add(int(match[2]))
    buckets = Buckets()
    for optimizer in optimizers if groups else ():
        for part in _parameters_in_buckets(optimizer, chained=any(groups)):
            buckets.parts[id(part.tensor)] = part
            master = saved.tensor(f"{part.bucket}.{MASTER_KEY}")
            prefix = part.group_prefix.partition("optimizer.")[0]
            ranks = dist.get_world_size() // part.chained_optimizer.data_parallel_group.size()
            if (
                master is None
                or master.shape != (part.bucket_numel,)
                or groups.get(prefix) != {*range(ranks)}
            ):
                buckets.problems.append(
                    f"{part.bucket}: the checkpoint holds the optimizer in buckets (it was saved "
                    "as dp_reshardable), but this optimizer has other buckets: load with the same "
                    "tensor and pipeline parallelism and bucket size, or save as fully_reshardable"
                )
                return buckets
    return buckets


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
                        start = ranges["gbuf_world_in_bucket"].start
                        yield ParameterInBucket(
                            chained_optimizer, group, name, numel, start, tensor
                        )


class BucketedState:
    """Loads optimizer state and hyperparameters from buckets."""

    def __init__(self, buckets: Buckets, saved: SavedNames) -> None:
        self._buckets = buckets
        self._saved = saved
        self._created_states: list[
            tuple[ParameterInBucket, Mapping[str, Any], dict[str, object]]
        ] = []

    def targets(self) -> LocalState:
        """Return the parts of buckets to load. Missing state is created."""
        local_state = LocalState(problems=list(self._buckets.problems))
        if local_state.problems:
            return local_state
        leaves: list[TensorLeaf] = []
        for part in self._buckets.parts.values():
            settings = self._saved_settings(part, local_state)
            if settings is None:
                continue
            optimizer, group = part.chained_optimizer.optimizer, _param_group_of(part)
            state = read_state(optimizer, group, part.tensor)
            for key in self._saved.names_below(part.bucket):
                entry = self._saved.tensor(f"{part.bucket}.{key}")
                if key == MASTER_KEY or entry is None:
                    continue
                dtype = getattr(torch, entry.dtype)
                current = state.get(key)
                if not isinstance(current, torch.Tensor) or current.dtype != dtype:
                    current = torch.zeros_like(part.tensor, dtype=dtype)
                state[key] = current
                leaves.append(part.leaf(key, current))
            state[STEP] = torch.tensor(float(settings[STEP]), device="cpu")
            self._created_states.append((part, settings, state))
        local_state.tensors = join_leaves(leaves, to_fill=True)
        names = map(_BUCKET_NAME.fullmatch, self._saved.all_names())
        local_state.unselected = [match[0] for match in names if match is not None]
        return local_state

    def discard_state(self) -> None:
        """Drop the created state, so that `restore` does nothing."""
        self._created_states = []

    def restore(self) -> None:
        """Set the created state and hyperparameters, after the tensors are filled."""
        for part, settings, state in self._created_states:
            group = _param_group_of(part)
            write_state(part.chained_optimizer.optimizer, group, part.tensor, state)
            for key, value in settings.items():
                if key not in _NOT_HYPERPARAMETERS:
                    group[key] = value

    def _saved_settings(
        self, part: ParameterInBucket, local_state: LocalState
    ) -> Mapping[str, Any] | None:
        """Return the saved settings of a parameter's group, or add a problem and return None."""
        name, group = f"{part.group_prefix}.optimizer", _param_group_of(part)
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
                f"{dict(zip(_GROUP_IDENTITY_KEYS, _group_identity(group), strict=True))}: make the "
                "optimizer with the same param groups as in the saved training, or leave it out "
                "with skip="
            )
            local_state.problems += [problem] if problem not in local_state.problems else []
            return None
        return matching[0]


def _group_identity(group: Mapping[str, Any]) -> tuple[object, ...]:
    """Return the values that identify a param group. NeMo adds `pre_` to their keys."""
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in _GROUP_IDENTITY_KEYS)


def _param_group_of(part: ParameterInBucket) -> dict[str, Any]:
    groups = part.chained_optimizer.optimizer.param_groups
    return next(group for group in groups if any(each is part.tensor for each in group["params"]))
