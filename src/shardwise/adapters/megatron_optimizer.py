"""Megatron-Core's optimizers: their master weights, and their state saved as `dp_reshardable`.

Everything is read from their own structures, without communication. Classes are recognised by
their names.

A `dp_reshardable` checkpoint has the state in buckets. Its files do not say where in a bucket a
parameter lies, but an optimizer of the same tensor and pipeline parallelism has the same buckets.
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

from shardwise.adapters.optimizer_state import STEP, set_state, state_of
from shardwise.adapters.parameters import joined
from shardwise.errors import StateError
from shardwise.layout import Box
from shardwise.plan.lookup import SavedState
from shardwise.state.leaves import Fragment, LocalState, TensorLeaf
from shardwise.state.objects import decode


@dataclass(frozen=True, slots=True)
class Master:
    """What an optimizer steps for a parameter: elements `low:high` of the flattened parameter.

    `tensor` is the parameter itself if there are no master weights, and None if only other ranks
    have any part of it.
    """

    parameter: torch.Tensor
    tensor: torch.Tensor | None
    low: int
    high: int


def is_megatron_optimizer(value: object) -> bool:
    """Return whether a value is one of Megatron-Core's optimizers, which wrap torch's."""
    return any(
        (kind.__module__, kind.__name__)
        == ("megatron.core.optimizer.optimizer", "MegatronOptimizer")
        for kind in type(value).__mro__
    )


def links_of(optimizer: Any) -> list[Any]:
    """Return the optimizers in a chain, without those that have nothing to step."""
    chained = getattr(optimizer, "chained_optimizers", None)
    links = [optimizer] if chained is None else [x for each in chained for x in links_of(each)]
    return [each for each in links if not getattr(each, "is_stub_optimizer", False)]


def inner_optimizers(optimizer: object) -> list[Optimizer]:
    """Return the torch optimizers inside."""
    return [each.optimizer for each in links_of(optimizer)]


def refuse_unknown_optimizer(name: str, optimizer: object) -> None:
    """Refuse an optimizer whose structures are not known to be read correctly.

    Raises:
        StateError: the optimizer is of an unknown kind.
    """
    what = ""
    if hasattr(optimizer, "chained_optimizers") and type(optimizer).__name__ != "ChainedOptimizer":
        what = type(optimizer).__name__
    for link in links_of(optimizer):
        inner, ddp = link.optimizer, getattr(link, "ddp_config", None)
        if getattr(ddp, "use_megatron_fsdp", False):
            what = "Megatron-FSDP"
        elif type(link).__name__ not in _KINDS:
            what = type(link).__name__
        elif getattr(link.config, "use_precision_aware_optimizer", False):
            what = "a precision-aware optimizer, which keeps weights and moments in parts,"
        elif type(inner).__name__ == "HybridDeviceOptimizer":
            what = "offloading the optimizer to the CPU"
        elif not isinstance(inner, Optimizer):
            what = f"{type(inner).__name__}, which is not a torch optimizer,"
    if what:
        raise StateError(
            f"{name}: {what} is not supported for Megatron-Core optimizers: save with "
            "megatron.core.dist_checkpointing; shardwise can open such checkpoints"
        )


def masters_of(optimizer: object) -> Iterator[Master]:
    """Yield what an optimizer steps on this rank."""
    for link in links_of(optimizer):
        yield from _KINDS[type(link).__name__](link)


def rebuild_weights(optimizer: object) -> None:
    """Compute the model's weights from the master weights. All its ranks call it together."""
    gathering = []
    for link in links_of(optimizer):
        if type(link).__name__ == "DistributedOptimizer":
            gathering += [chunk for chunk in link.model_chunks if chunk not in gathering]
    for chunk in gathering:
        if chunk.ddp_config.overlap_param_gather:  # else a gather of the old weights may end later
            chunk.start_param_sync(force_sync=True)
    for link in links_of(optimizer):
        if hasattr(link, "_copy_main_params_to_model_params"):
            link._copy_main_params_to_model_params()
    for chunk in gathering:
        chunk.start_param_sync(force_sync=True)


def _of_float32(optimizer: Any) -> Iterator[Master]:
    for group in optimizer.optimizer.param_groups:
        for parameter in group["params"]:
            yield _whole(parameter, parameter)


def _of_float16(optimizer: Any) -> Iterator[Master]:
    groups = zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True)
    for parameters, masters in groups:
        for parameter, master in zip(parameters, masters, strict=True):
            yield _whole(parameter, master)
    for parameter in chain.from_iterable(optimizer.fp32_from_fp32_groups):
        yield _whole(parameter, parameter)


def _of_distributed(optimizer: Any) -> Iterator[Master]:
    groups = chain(
        zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True),
        zip(optimizer.model_fp32_groups, optimizer.shard_fp32_groups, strict=True),
    )
    held: set[int] = set()
    for parameters, shards in groups:
        for parameter, shard in zip(parameters, shards, strict=True):
            own = optimizer._get_model_param_range_map(parameter)["param"]
            held.add(id(parameter))
            yield Master(parameter, shard, own.start, own.end)
    for buffer in optimizer.buffers:
        for parameter in buffer.param_index_map:
            if id(parameter) not in held:
                yield Master(parameter, None, 0, 0)


def _whole(parameter: torch.Tensor, tensor: torch.Tensor) -> Master:
    return Master(parameter, tensor, 0, parameter.numel())


_KINDS: dict[str, Callable[[Any], Iterator[Master]]] = {
    "FP32Optimizer": _of_float32,
    "Float16OptimizerWithFloat16Params": _of_float16,
    "DistributedOptimizer": _of_distributed,
}


MASTER = "param"
_BUCKET = re.compile(r"((?:chained_\d+\.)?)optimizer\.distributed\.dp_group_idx_(\d+)\.(.+)")
_IDENTIFYING = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
_BESIDES = ("params", STEP)


@dataclass(frozen=True, slots=True)
class BucketPlace:
    """Where this rank's part of a parameter lies in a bucket.

    Attributes:
        link: the DistributedOptimizer that steps the parameter.
        group: prefix of the names of all values of its model-parallel group.
        bucket: name of the bucket.
        numel: elements of the bucket, without padding at the end.
        start: first element in the bucket.
        tensor: the tensor that is stepped.
    """

    link: Any
    group: str
    bucket: str
    numel: int
    start: int
    tensor: torch.Tensor

    def leaf(self, key: str, value: torch.Tensor) -> TensorLeaf:
        """Return a state tensor of the parameter as a part of the bucket's tensor of this key."""
        flat = value.detach().view(-1)
        fragments = (Fragment(Box((self.start,), (len(flat),)), flat),) if len(flat) else ()
        return TensorLeaf(f"{self.bucket}.{key}", value.dtype, (self.numel,), fragments)


@dataclass(slots=True)
class Buckets:
    """The buckets of a checkpoint, matched with optimizers.

    Attributes:
        places: by the `id` of the stepped tensor; empty if the checkpoint has no buckets.
        problems: differences from the buckets of these optimizers.
    """

    places: dict[int, BucketPlace] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def saved_buckets(optimizers: Sequence[object], saved: SavedState) -> Buckets:
    """Match the buckets of a checkpoint with these optimizers of Megatron-Core's."""
    groups: dict[str, set[int]] = {}
    for entry in saved.manifest.tensors:
        match = _BUCKET.fullmatch(entry.name)
        if match is not None:
            groups.setdefault(match[1], set()).add(int(match[2]))
    found = Buckets()
    for optimizer in optimizers if groups else ():
        for place in _places(optimizer, chained=any(groups)):
            found.places[id(place.tensor)] = place
            master = saved.tensor(f"{place.bucket}.{MASTER}")
            prefix = place.group.partition("optimizer.")[0]
            ranks = dist.get_world_size() // place.link.data_parallel_group.size()
            if (
                master is None
                or master.shape != (place.numel,)
                or groups.get(prefix) != {*range(ranks)}
            ):
                found.problems.append(
                    f"{place.bucket}: the checkpoint's optimizer was saved as dp_reshardable, by "
                    "buckets, and this optimizer has other buckets: load under the same tensor "
                    "and pipeline parallelism and bucket size, or save it as fully_reshardable"
                )
                return found
    return found


def _places(optimizer: Any, *, chained: bool) -> Iterator[BucketPlace]:
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    for number, each in enumerate(chain):
        for link in links_of(each):
            if type(link).__name__ != "DistributedOptimizer":
                continue
            prefix = f"chained_{number}." if chained else ""
            group = f"{prefix}optimizer.distributed.dp_group_idx_{link.data_parallel_group_idx}"
            yield from _places_of(link, group)


def _places_of(link: Any, group: str) -> Iterator[BucketPlace]:
    stepped = {id(each.parameter): each.tensor for each in masters_of(link)}
    for index, by_dtype in enumerate(link.gbuf_ranges):
        for dtype, buckets in by_dtype.items():
            for number, bucket in enumerate(buckets):
                name = f"{group}.gbuf_idx_{index}.dtype_{dtype}.bucket_idx_{number}"
                numel = link.buffers[index].buckets[number].numel_unpadded
                for parameter, ranges in bucket["param_map"].items():
                    tensor = stepped[id(parameter)]
                    if tensor is not None:
                        start = ranges["gbuf_world_in_bucket"].start
                        yield BucketPlace(link, group, name, numel, start, tensor)


class BucketedState:
    """Optimizer state and hyperparameters, loaded from buckets."""

    def __init__(self, buckets: Buckets, saved: SavedState) -> None:
        self._buckets = buckets
        self._saved = saved
        self._made: list[tuple[BucketPlace, Mapping[str, Any], dict[str, object]]] = []

    def targets(self) -> LocalState:
        """Return the parts of buckets that a load fills. Missing state is created."""
        held = LocalState(problems=list(self._buckets.problems))
        if held.problems:
            return held
        leaves: list[TensorLeaf] = []
        for place in self._buckets.places.values():
            settings = self._settings(place, held)
            if settings is None:
                continue
            optimizer, here = place.link.optimizer, _group_of(place)
            state = state_of(optimizer, here, place.tensor)
            for key in self._saved.below(place.bucket):
                entry = self._saved.tensor(f"{place.bucket}.{key}")
                if key == MASTER or entry is None:
                    continue
                dtype = getattr(torch, entry.dtype)
                known = state.get(key)
                if not isinstance(known, torch.Tensor) or known.dtype != dtype:
                    known = torch.zeros_like(place.tensor, dtype=dtype)
                state[key] = known
                leaves.append(place.leaf(key, known))
            state[STEP] = torch.tensor(float(settings[STEP]), device="cpu")
            self._made.append((place, settings, state))
        held.tensors = joined(leaves, to_fill=True)
        names = map(_BUCKET.fullmatch, self._saved.all_names())
        held.left = [match[0] for match in names if match is not None]
        return held

    def forget(self) -> None:
        """Drop the created state, so that `restore` does nothing."""
        self._made = []

    def restore(self) -> None:
        """Set the created state and hyperparameters, once the tensors are filled."""
        for place, settings, state in self._made:
            group = _group_of(place)
            set_state(place.link.optimizer, group, place.tensor, state)
            for key, value in settings.items():
                if key not in _BESIDES:
                    group[key] = value

    def _settings(self, place: BucketPlace, held: LocalState) -> Mapping[str, Any] | None:
        """Return the saved settings of a parameter's group; add a problem if there are none."""
        name, here = f"{place.group}.optimizer", _group_of(place)
        found: list[dict[str, Any]] = []
        if self._saved.has_object(name):
            value = decode(self._saved.object(name), name)
            listed = value.get("param_groups") if isinstance(value, dict) else None
            found = [
                each
                for each in (listed if isinstance(listed, list) else ())
                if isinstance(each, dict) and _identity(each) == _identity(here)
            ]
        if len(found) != 1 or not isinstance(found[0].get(STEP), (int, float)):
            problem = (
                f"{name}: the checkpoint lacks settings and a step count for the param group with "
                f"{dict(zip(_IDENTIFYING, _identity(here), strict=True))}"
            )
            held.problems += [problem] if problem not in held.problems else []
            return None
        return found[0]


def _identity(group: Mapping[str, Any]) -> tuple[object, ...]:
    """Return the values that tell groups apart in Megatron-Core. NeMo has other names for them."""
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in _IDENTIFYING)


def _group_of(place: BucketPlace) -> dict[str, Any]:
    groups = place.link.optimizer.param_groups
    return next(group for group in groups if any(each is place.tensor for each in group["params"]))
