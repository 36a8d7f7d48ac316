"""Finds the optimizer state of each parameter of a rank, in each form that Megatron-LM saves it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, TypeAlias

from shardwise.errors import FormatError
from shardwise.formats.foreign import StoredArray
from shardwise.formats.optimizers import GROUPS, PARAMS, STATE
from shardwise.formats.readers.megatron_legacy.ranks import Parameter, Rank

MASTER = "param"
STEP = "step"
ALIGNMENTS = (64, 1)
"""Possible alignments of parameters in a buffer, in elements; old versions did not align."""
MOST_STATES = 64
_HALVES = ("float16", "bfloat16")
_INNER = "optimizer"
_MASTERS = ("fp32_from_fp16_params", "fp32_from_fp16")

Settings: TypeAlias = Mapping[str, Any]


def of_optimizers(
    parameters: Sequence[Parameter], parts: Sequence[Sequence[Settings]]
) -> list[list[Parameter]] | None:
    """Return the parameters of each part of an optimizer, or None if they are unknown.

    A model with experts has one optimizer for them and one for the rest; interleaved stages can
    have one for the first chunk.

    Args:
        parts: the param groups of each part.
    """
    expert = [bool(part) and all(_flag(g, "is_expert_parallel") for g in part) for part in parts]
    dense = len(parts) - sum(expert)
    if dense not in (1, 2) or sum(expert) > 1:
        return None
    shared = [p for p in parameters if not (p.of_expert and any(expert))]
    chunks: list[list[Parameter]] = [shared]
    if dense == 2:
        chunks = [[p for p in shared if p.chunk == 0], [p for p in shared if p.chunk]]
    rest = [p for p in parameters if p.of_expert]
    left = iter(chunks)
    return [rest if own else next(left) for own in expert]


def in_groups(
    parameters: Sequence[Parameter],
    groups: Sequence[Settings],
    fits: Callable[[Sequence[Sequence[Parameter]]], bool],
) -> list[list[Parameter]] | None:
    """Return the parameters of each param group in the module's order, or None if unknown.

    Args:
        fits: returns whether an assignment agrees with the stored state.
    """
    keys = [_key(group) for group in groups]
    ways: list[list[tuple[bool, bool]]] = []
    if len(set(keys)) == len(keys):
        ways.append(keys)
    if len(groups) == 2:  # the order in Megatron-LM before groups recorded their purpose
        ways.append([(True, False), (False, False)])
    if any(key[1] for key in keys):
        own = [lambda p: (p.decays, p.of_embedding)]
    else:
        own = [lambda p: (p.decays, False)]
    for way in ways:
        found = [[p for p in parameters if own[0](p) == key] for key in way]
        if sum(map(len, found)) == len(parameters) and fits(found):
            return found
    return [list(parameters)] if len(groups) == 1 and fits([parameters]) else None


def _key(group: Settings) -> tuple[bool, bool]:
    """Return whether the weights of a group decay, and whether their learning rate is separate."""
    factor = group.get("wd_mult", group.get("pre_wd_mult", group.get("weight_decay")))
    return factor != 0.0, _flag(group, "is_decoupled_lr") or group.get("default_config") is False


def _flag(group: Settings, key: str) -> bool:
    return group.get(key) is True


@dataclass(slots=True)
class State:
    """The optimizer state of one rank.

    Attributes:
        arrays: the arrays of each parameter, by key; `param` is the master weight.
        numbers: the numbers of each parameter, by key.
        groups: members and hyperparameters of each param group.
        others: other values, such as the gradient scaler.
        unknown: why the state cannot be assigned to parameters, or "".
    """

    arrays: dict[Parameter, dict[str, StoredArray]] = field(default_factory=dict)
    numbers: dict[Parameter, dict[str, float]] = field(default_factory=dict)
    groups: list[tuple[list[Parameter], dict[str, Any]]] = field(default_factory=list)
    others: dict[str, Any] = field(default_factory=dict)
    unknown: str = ""


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of an optimizer; a model with experts has several."""

    state: Mapping[Any, Any]
    groups: Sequence[Settings]
    masters: Sequence[Any]
    others: Mapping[str, Any]


def optimizer_state(
    rank: Rank, parameters: Sequence[Parameter], bucketings: Sequence[Bucketing]
) -> State:
    """Return a rank's optimizer state by parameter; it is empty if none was saved.

    Raises:
        FormatError: the state is malformed, or not of these parameters.
    """
    found = State()
    if rank.optimizer is None:
        return found
    listed = rank.optimizer if isinstance(rank.optimizer, list) else [rank.optimizer]
    parts = [_part(each, rank.where) for each in listed]
    for part in parts:
        found.others.update(part.others)
    owned = of_optimizers(parameters, [part.groups for part in parts])
    if owned is None:
        found.unknown = (
            f"it has {len(parts)} parts, and the checkpoint does not say which parameters each has"
        )
        return found
    flat = rank.flat if isinstance(rank.flat, list) else [rank.flat]
    for number, (part, own) in enumerate(zip(parts, owned, strict=True)):
        grouped = in_groups(own, part.groups, _Fits(part))
        if grouped is None:
            found.unknown = (
                "the checkpoint does not name its parameters, and their shapes do not match "
                "Megatron-LM's own param groups"
            )
            return found
        for members, group in zip(grouped, part.groups, strict=True):
            _take_settings(found, members, group)
        _take_numbered(found, part, grouped)
        buffers = flat[number] if number < len(flat) else None
        if buffers is not None:
            found.arrays |= parameters_in_buffers(buffers, own, bucketings, rank.where)
    return found


def _part(held: Any, where: str) -> _Part:
    outer = held if isinstance(held, dict) else {}
    inner = outer.get(_INNER, outer)
    groups = inner.get(GROUPS) if isinstance(inner, dict) else None
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise FormatError(f"{where}: its optimizer has no param groups")
    state = inner.get(STATE, {})
    masters: Any = next((outer[key] for key in _MASTERS if key in outer), [])
    if not isinstance(state, dict) or not isinstance(masters, list):
        raise FormatError(f"{where}: the state of its optimizer is malformed")
    if not all(isinstance(each, list) for each in masters):
        raise FormatError(f"{where}: the masters of its optimizer are not in groups")
    apart = {_INNER, GROUPS, STATE, *_MASTERS}
    others = {str(key): value for key, value in outer.items() if key not in apart}
    return _Part(state, groups, masters, others)


@dataclass(frozen=True, slots=True)
class _Fits:
    """Checks whether parameters can be those of a part's groups, by their count and shapes."""

    part: _Part

    def __call__(self, grouped: Sequence[Sequence[Parameter]]) -> bool:
        return all(
            self._group(members, group)
            for members, group in zip(grouped, self.part.groups, strict=True)
        ) and all(
            [p.array.shape for p in members if p.array.dtype in _HALVES]
            == [master.shape for master in masters if isinstance(master, StoredArray)]
            for members, masters in zip(grouped, self.part.masters, strict=False)
        )

    def _group(self, members: Sequence[Parameter], group: Settings) -> bool:
        numbers = group.get(PARAMS)
        if numbers is None:
            return True  # the distributed optimizer does not number them
        if not isinstance(numbers, list) or len(numbers) != len(members):
            return False
        return all(
            array.shape in ((), parameter.array.shape)
            for number, parameter in zip(numbers, members, strict=True)
            for array in _state_of(self.part, number).values()
            if isinstance(array, StoredArray)
        )


def _state_of(part: _Part, number: object) -> Mapping[Any, Any]:
    found = part.state.get(number) if type(number) is int else None
    return found if isinstance(found, dict) else {}


def _take_settings(found: State, members: list[Parameter], group: Settings) -> None:
    kept = {key: value for key, value in group.items() if key not in (PARAMS, STEP)}
    step = group.get(STEP)
    if isinstance(step, (int, float)):
        for parameter in members:
            found.numbers.setdefault(parameter, {})[STEP] = step
    elif step is not None:
        kept[STEP] = step
    found.groups.append((members, kept))


def _take_numbered(found: State, part: _Part, grouped: Sequence[Sequence[Parameter]]) -> None:
    """Take the state of a torch optimizer, which numbers parameters, and the master weights."""
    for place, (members, group) in enumerate(zip(grouped, part.groups, strict=True)):
        for parameter, number in zip(members, group.get(PARAMS, ()), strict=False):
            for key, value in _state_of(part, number).items():
                if isinstance(value, StoredArray):
                    found.arrays.setdefault(parameter, {})[str(key)] = value
                elif type(value) in (int, float):
                    found.numbers.setdefault(parameter, {})[str(key)] = value
        masters = part.masters[place] if place < len(part.masters) else []
        halves = [p for p in members if p.array.dtype in _HALVES]
        for parameter, master in zip(halves, masters, strict=False):
            if isinstance(master, StoredArray):
                found.arrays.setdefault(parameter, {})[MASTER] = master


@dataclass(frozen=True, slots=True)
class Bucketing:
    """How buffers were divided into buckets.

    Attributes:
        size: elements after which a bucket is full, or None if there is one bucket.
        alone: names of parameters that have a separate bucket.
    """

    size: int | None
    alone: frozenset[str]


def parameters_in_buffers(
    state: Any, parameters: Sequence[Parameter], bucketings: Sequence[Bucketing], where: str
) -> dict[Parameter, dict[str, StoredArray]]:
    """Return the arrays of each parameter in the distributed optimizer, by key: param, exp_avg, …

    Data-parallel rank 0 gathers one buffer for each dtype of each chunk of the model, without the
    padding between buckets (`DistributedOptimizer.get_parameter_state_dp_zero`). Parameters lie in
    it from the last to the first (`_ParamAndGradBuffer`).

    Args:
        state: flat arrays of an optimizer, by number of the buffer, by dtype.
        bucketings: the possible ones, the most likely first.

    Raises:
        FormatError: the state is malformed, or not of these parameters.
    """
    groups: dict[tuple[int, str], list[Parameter]] = {}
    for parameter in parameters:
        groups.setdefault((parameter.chunk, parameter.array.dtype), []).append(parameter)
    if not isinstance(state, dict):
        raise FormatError(f"{where}: the state of the distributed optimizer is not a dict")
    buffers = [each for key, each in state.items() if type(key) is int]
    if len(buffers) != len(groups):
        raise FormatError(
            f"{where}: the distributed optimizer has {len(buffers)} buffers, but the model needs "
            f"{len(groups)} (chunks of the model times dtypes)"
        )
    found: dict[Parameter, dict[str, StoredArray]] = {p: {} for p in parameters}
    for buffer, own in zip(buffers, groups.values(), strict=True):
        for key, flat in _flat_arrays(buffer, where):
            starts = _starts(own, bucketings, flat.shape[0])
            if starts is None:
                raise FormatError(
                    f"{where}: {key} of the distributed optimizer has {flat.shape[0]} elements, "
                    f"which do not match its {len(own)} parameters"
                )
            for parameter, start in zip(own, starts, strict=True):
                found[parameter][key] = _slice(flat, start, parameter.array.shape)
    return found


def _flat_arrays(buffer: object, where: str) -> Iterator[tuple[str, StoredArray]]:
    inner = list(buffer.values()) if isinstance(buffer, dict) else []
    if len(inner) != 1 or not isinstance(inner[0], dict) or len(inner[0]) > MOST_STATES:
        raise FormatError(
            f"{where}: a buffer of the distributed optimizer does not have exactly one dtype"
        )
    for key, value in inner[0].items():
        # Older versions had a list with an array for each bucket; a single one is the whole buffer.
        flat = value[0] if isinstance(value, list) and len(value) == 1 else value
        if isinstance(flat, StoredArray) and len(flat.shape) == 1 and flat.stride in ((1,), (0,)):
            yield str(key), flat
        elif type(flat) is not int:
            raise FormatError(
                f"{where}: {key} of the distributed optimizer is not a flat array: if it is a "
                "list, an older Megatron-LM wrote it; load and save it with a newer one"
            )


def _starts(
    parameters: Sequence[Parameter], bucketings: Sequence[Bucketing], total: int
) -> list[int] | None:
    """Return where each parameter begins, if the buffer then has its length, else None."""
    for bucketing, alignment in product(bucketings, ALIGNMENTS):
        starts, end = _placed(parameters, bucketing, alignment)
        if end == total:
            return starts
    return None


def _placed(
    parameters: Sequence[Parameter], bucketing: Bucketing, alignment: int
) -> tuple[list[int], int]:
    starts = []
    bucket = at = 0  # where the bucket begins, and how full it is
    for parameter in reversed(parameters):
        alone = parameter.name in bucketing.alone
        at = -(-at // alignment) * alignment
        if alone and at:
            bucket, at = bucket + at, 0
        starts.append(bucket + at)
        at += math.prod(parameter.array.shape)
        if alone or (bucketing.size is not None and at >= bucketing.size):
            bucket, at = bucket + at, 0
    return starts[::-1], bucket + at


def _slice(flat: StoredArray, start: int, shape: tuple[int, ...]) -> StoredArray:
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return replace(flat, start=flat.start + start * flat.itemsize, shape=shape, stride=stride)


def possible_bucketings(args: Mapping[str, Any], pipeline: tuple[int, int]) -> list[Bucketing]:
    """Return how the buckets can have been made, the most likely way first.

    Args:
        pipeline: the rank's stage, and the number of stages.
    """
    stage, stages = pipeline
    tied = args.get("untie_embeddings_and_output_weights") is False
    alone: list[frozenset[str]] = [frozenset()]
    if stages > 1 and stage in (0, stages - 1):
        names = "embedding.word_embeddings.weight" if stage == 0 else "output_layer.weight"
        alone.insert(0 if tied else 1, frozenset({names, f"language_model.{names}"}))
    given = args.get("ddp_bucket_size")
    ranks = args.get("data_parallel_size")
    sizes: list[int | None] = [None]
    if type(given) is int and given > 0:
        sizes.append(given)
    elif type(ranks) is int:
        sizes.append(max(40_000_000, 1_000_000 * ranks))
    if args.get("overlap_grad_reduce") is True and stage == 0:
        sizes.reverse()
    return [Bucketing(size, own) for own in alone for size in sizes]
