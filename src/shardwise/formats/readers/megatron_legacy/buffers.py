"""Finds parameters in the flat buffers of Megatron's distributed optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from shardwise.errors import FormatError
from shardwise.formats.foreign import StoredArray
from shardwise.formats.readers.megatron_legacy.ranks import Parameter

ALIGNMENTS = (64, 1)
"""Possible alignments of parameters in a buffer, in elements; old versions did not align."""
MOST_STATES = 64


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
                "list, "
                "an older Megatron-LM wrote it; load and save it with a newer one"
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
