"""State of Megatron-Core's distributed optimizer that was saved as `dp_reshardable`, by buckets.

The files do not tell which parameter lies where in a bucket. An optimizer of the same tensor and
pipeline parallelism has the same buckets, and knows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from shardwise.adapters.parameters import joined
from shardwise.adapters.stepped import links_of, stepped_by
from shardwise.adapters.steps import STEP, set_state, state_of
from shardwise.layout import Box
from shardwise.plan.saved import SavedState
from shardwise.state.leaves import Fragment, LocalState, TensorLeaf
from shardwise.state.objects import decode

MASTER = "param"
_BUCKET = re.compile(r"((?:chained_\d+\.)?)optimizer\.distributed\.dp_group_idx_(\d+)\.(.+)")
_IDENTIFYING = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
_BESIDES = ("params", STEP)


@dataclass(frozen=True, slots=True)
class BucketPlace:
    """Where what this rank steps of a parameter lies: elements from `start` on of a bucket.

    Attributes:
        link: the DistributedOptimizer that steps it.
        group: the name that all values of its model-parallel group begin with.
        bucket: the name of the bucket; `numel` are its elements, without padding at the end.
    """

    link: Any
    group: str
    bucket: str
    numel: int
    start: int
    tensor: torch.Tensor

    def leaf(self, key: str, value: torch.Tensor) -> TensorLeaf:
        """A tensor like the parameter's as a part of the bucket's tensor of this key."""
        flat = value.detach().view(-1)
        fragments = (Fragment(Box((self.start,), (len(flat),)), flat),) if len(flat) else ()
        return TensorLeaf(f"{self.bucket}.{key}", value.dtype, (self.numel,), fragments)


@dataclass(slots=True)
class Buckets:
    """The buckets of a checkpoint, as some optimizers have them.

    Attributes:
        places: by the `id` of what is stepped; empty if the checkpoint has no buckets.
        problems: why they are not those of these optimizers.
    """

    places: dict[int, BucketPlace] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def saved_buckets(optimizers: Sequence[object], saved: SavedState) -> Buckets:
    """The buckets that a checkpoint has of these optimizers of Megatron-Core's."""
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
    stepped = {id(each.parameter): each.tensor for each in stepped_by(link)}
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
    """State and hyperparameters of optimizers, filled from buckets."""

    def __init__(self, buckets: Buckets, saved: SavedState) -> None:
        self._buckets = buckets
        self._saved = saved
        self._made: list[tuple[BucketPlace, Mapping[str, Any], dict[str, object]]] = []

    def targets(self) -> LocalState:
        """The parts of buckets to fill; state is made that does not exist yet."""
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
        """Restore nothing."""
        self._made = []

    def restore(self) -> None:
        """Give the optimizers what was made, once the tensors are filled."""
        for place, settings, state in self._made:
            group = _group_of(place)
            set_state(place.link.optimizer, group, place.tensor, state)
            for key, value in settings.items():
                if key not in _BESIDES:
                    group[key] = value

    def _settings(self, place: BucketPlace, held: LocalState) -> Mapping[str, Any] | None:
        """The saved settings of the group that a parameter is in; None, and why, if unknown."""
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
                f"{name}: it has no settings and step count for the parameter group with "
                f"{dict(zip(_IDENTIFYING, _identity(here), strict=True))}"
            )
            held.problems += [problem] if problem not in held.problems else []
            return None
        return found[0]


def _identity(group: Mapping[str, Any]) -> tuple[object, ...]:
    """What Megatron-Core tells groups apart by; NeMo has other names for it."""
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in _IDENTIFYING)


def _group_of(place: BucketPlace) -> dict[str, Any]:
    groups = place.link.optimizer.param_groups
    return next(group for group in groups if any(each is place.tensor for each in group["params"]))
