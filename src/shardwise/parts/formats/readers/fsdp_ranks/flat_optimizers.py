"""Optimizer state of FSDP1: convert each rank's ranges of flat parameters to parts of parameters.

With `use_orig_params=False`, FSDP1's default, an entry of the state belongs to a flat parameter.
Each rank has an equal part of the flat parameter. With `use_orig_params=True`, an entry belongs to
a parameter, and each rank has a range of the flattened parameter, which may be empty.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Any, TypeAlias

from shardwise.parts.formats.reader import (
    Builder,
    StoredArray,
    StoredPart,
)
from shardwise.parts.formats.readers.fsdp_ranks.flat_units import find_flat_units

STATE, GROUPS, PARAMS, PARAM_NAMES = "state", "param_groups", "params", "param_names"
_MOST_CANDIDATES = 64
_NUMBER = re.compile(r"\d+")


class UnknownLayoutError(Exception):
    """The files do not say which parameters the ranges of the optimizer belong to."""


_Shards: TypeAlias = Mapping[int, tuple[int, int, int]]
"""For each shard, three numbers: the start and the end of its range of a flattened parameter, and
the offset of this range in the rank's array."""
_Entries: TypeAlias = Mapping[int, tuple[int, _Shards]]
"""For each parameter, the index of its entry in the optimizer, and its shards."""


@dataclass(frozen=True, slots=True)
class _Parameters:
    """The parameters of a model that FSDP shards, and the shard of each file."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    shard_of_rank: tuple[int, ...]
    shard_count: int

    @property
    def sizes(self) -> list[int]:
        return [prod(shape) for shape in self.shapes]

    def without(self, names: set[str]) -> _Parameters:
        kept = [i for i, name in enumerate(self.names) if name not in names]
        return _Parameters(
            tuple(self.names[i] for i in kept),
            tuple(self.shapes[i] for i in kept),
            self.shard_of_rank,
            self.shard_count,
        )


def is_flat_optimizer(state: Mapping[str, Any]) -> bool:
    """Return whether an optimizer has plain arrays of one dimension as state of parameters."""
    return any(_is_flat(value) for entry in _entries(state).values() for value in entry.values())


def is_whole_optimizer(model: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
    """Return whether neither a model nor its optimizer is sharded, as with FSDP1 on one rank.

    The arrays of flat parameters have one dimension, so an array with more belongs to a parameter.
    """
    return not any(isinstance(value, StoredPart) for value in model.values()) and any(
        isinstance(value, StoredArray) and len(value.shape) > 1
        for entry in _entries(state).values()
        for value in entry.values()
    )


def convert_flat_optimizers(
    models: Sequence[Mapping[str, Any]],
    optimizers: Sequence[Mapping[str, Any]],
    builder: Builder,
) -> list[dict[str, Any]]:
    """Return the optimizer state of each rank, with the parts of named parameters.

    Args:
        models: the model's state of each rank, with parts of tensors.
        optimizers: `optimizer.state_dict()` of each rank.
        builder: compares arrays of two files.

    Raises:
        UnknownLayoutError: the files do not say which parameters the ranges belong to.
    """
    if not all(map(_is_optimizer, optimizers)):
        raise UnknownLayoutError("a file is not the state_dict() of an optimizer")
    if len(optimizers[0][GROUPS]) != 1:
        raise UnknownLayoutError("it has several param groups, in an unknown order")
    parameters = _find_parameters(models)
    entry_count = len(optimizers[0][GROUPS][0][PARAMS])
    tied = _find_tied(models, parameters, builder)
    candidates = [parameters, parameters.without(tied)] if tied else [parameters]
    found, problem = _find_entries(candidates, optimizers)
    if not found and len(models) == 1:  # its plain tensors may be buffers
        kinds: dict[str, set[str]] = {}
        for name in parameters.names:
            kinds.setdefault(_NUMBER.sub("*", name), set()).add(name)
        candidates = [each.without(names) for each in candidates for names in kinds.values()]
        found, _ = _find_entries(candidates[:_MOST_CANDIDATES], optimizers)
        found = found if len(found) == 1 else []
    if not found:
        raise problem or UnknownLayoutError(
            f"the {entry_count} flat parameters do not fit the {len(parameters.names)} parameters "
            "of the model in exactly one way"
        )
    chosen, entries = found[0]
    return [
        _convert(optimizer, chosen, shard, entries)
        for optimizer, shard in zip(optimizers, chosen.shard_of_rank, strict=True)
    ]


def _find_entries(
    candidates: Sequence[_Parameters], optimizers: Sequence[Mapping[str, Any]]
) -> tuple[list[tuple[_Parameters, _Entries]], UnknownLayoutError | None]:
    """Return the sets of parameters that the entries fit; and why another one does not fit."""
    entry_count = len(optimizers[0][GROUPS][0][PARAMS])
    found: list[tuple[_Parameters, _Entries]] = []
    problem: UnknownLayoutError | None = None
    for parameters in candidates:
        is_by_parameter = entry_count == len(parameters.names)
        find = _entries_of_parameters if is_by_parameter else _entries_of_flat_parameters
        try:
            entries = find(parameters, optimizers)
        except UnknownLayoutError as error:  # the optimizer may count tied parameters once
            problem = error
            continue
        if entries is not None:
            found.append((parameters, entries))
    return found, problem


def _is_optimizer(state: Mapping[str, Any]) -> bool:
    groups, entries = state.get(GROUPS), state.get(STATE)
    return (
        isinstance(groups, list)
        and isinstance(entries, dict)
        and all(isinstance(entry, dict) for entry in entries.values())
        and all(isinstance(g, dict) and isinstance(g.get(PARAMS), list) for g in groups)
    )


def _entries(state: Mapping[str, Any]) -> Mapping[Any, Mapping[str, Any]]:
    """Return the state of each entry of an optimizer; none if it is not an optimizer's state."""
    entries: Mapping[Any, Mapping[str, Any]] = state[STATE] if _is_optimizer(state) else {}
    return entries


def _is_flat(value: object) -> bool:
    return isinstance(value, StoredArray) and len(value.shape) == 1


def _find_parameters(models: Sequence[Mapping[str, Any]]) -> _Parameters:
    """Return the parameters, which are the sharded tensors: buffers are plain tensors.

    On one rank, FSDP1 does not shard, and all tensors are plain.
    """
    parts = {name: value for name, value in models[0].items() if isinstance(value, StoredPart)}
    if not parts and len(models) == 1:
        whole = {n: value for n, value in models[0].items() if isinstance(value, StoredArray)}
        return _Parameters(tuple(whole), tuple(each.shape for each in whole.values()), (0,), 1)
    if not parts:
        raise UnknownLayoutError("the model's files have no sharded tensors")
    shards: list[int] = []
    counts: set[int] = set()
    for model in models:
        places = {_place_of(part) for part in model.values() if isinstance(part, StoredPart)}
        if len(places) != 1:
            raise UnknownLayoutError("the model is sharded over several dimensions of the mesh")
        ((shard, count),) = places
        shards.append(shard)
        counts.add(count)
    if len(counts) != 1:
        raise UnknownLayoutError("the ranks shard the model over different numbers of ranks")
    shapes = tuple(part.shape for part in parts.values())
    return _Parameters(tuple(parts), shapes, tuple(shards), counts.pop())


def _place_of(part: StoredPart) -> tuple[int, int]:
    """Return the index of a rank's shard, and the number of shards."""
    if len(part.places) != 1:
        raise UnknownLayoutError("a tensor is not sharded over exactly one dimension of the mesh")
    return part.place[0], part.places[0]


def _find_tied(
    models: Sequence[Mapping[str, Any]], parameters: _Parameters, builder: Builder
) -> set[str]:
    """Return names of matrices whose first elements equal those of an earlier matrix.

    FSDP1 saves tied parameters several times, but flattens them once.
    """
    tied: set[str] = set()
    earlier: dict[tuple[int, ...], list[str]] = {}
    for name, shape in zip(parameters.names, parameters.shapes, strict=True):
        others = earlier.setdefault(shape, [])
        if len(shape) > 1 and any(
            all(_have_equal_first_elements(model[name], model[other], builder) for model in models)
            for other in others
        ):
            tied.add(name)
        others.append(name)
    return tied


def _have_equal_first_elements(
    one: StoredPart | StoredArray, other: StoredPart | StoredArray, builder: Builder
) -> bool:
    arrays = [
        [each] if isinstance(each, StoredArray) else [array for _, array in each.boxes]
        for each in (one, other)
    ]
    return [array.shape for array in arrays[0]] == [array.shape for array in arrays[1]] and all(
        builder.have_equal_first_elements(a, b) for a, b in zip(*arrays, strict=True)
    )


def _flat_size(optimizer: Mapping[str, Any], entry: int) -> int | None:
    """Return the size of a rank's arrays of an entry; None without arrays."""
    values = optimizer[STATE].get(entry, {}).values()
    sizes = {value.shape[0] for value in values if _is_flat(value)}
    if len(sizes) > 1:
        raise UnknownLayoutError(f"the arrays of entry {entry} have different sizes")
    return sizes.pop() if sizes else None


def _sizes_by_shard(
    parameters: _Parameters, optimizers: Sequence[Mapping[str, Any]], entry: int
) -> list[int | None]:
    """Return for each shard the size of the arrays of an entry; replicas must agree."""
    sizes: dict[int, int | None] = {}
    for shard, optimizer in zip(parameters.shard_of_rank, optimizers, strict=True):
        size = _flat_size(optimizer, entry)
        if sizes.setdefault(shard, size) != size:
            raise UnknownLayoutError(f"replicas have different sizes of entry {entry}")
    return [sizes.get(shard) for shard in range(parameters.shard_count)]


def _entries_of_parameters(
    parameters: _Parameters, optimizers: Sequence[Mapping[str, Any]]
) -> _Entries | None:
    """Return the shards if each entry is a parameter; None if the sizes do not fit."""
    entries: dict[int, tuple[int, _Shards]] = {}
    for parameter, size in enumerate(parameters.sizes):
        sizes = _sizes_by_shard(parameters, optimizers, parameter)
        if all(each is None for each in sizes):
            continue  # a frozen parameter
        ends = list(accumulate((each or 0 for each in sizes), initial=0))
        if ends[-1] != size:
            return None
        shards = {i: (*pair, 0) for i, pair in enumerate(pairwise(ends))}
        entries[parameter] = parameter, shards
    return entries


def _entries_of_flat_parameters(
    parameters: _Parameters, optimizers: Sequence[Mapping[str, Any]]
) -> _Entries | None:
    """Return the shards if each entry is a flat parameter; None if this is not certain."""
    count = parameters.shard_count
    lengths = []
    for entry in range(len(optimizers[0][GROUPS][0][PARAMS])):
        sizes = _sizes_by_shard(parameters, optimizers, entry)
        if sizes[0] is None or len(set(sizes)) != 1:
            raise UnknownLayoutError(f"entry {entry} has no state, or parts of different sizes")
        lengths.append(sizes[0])
    flat_sizes = [length * count for length in lengths]
    units = find_flat_units(parameters.names, parameters.sizes, flat_sizes, count)
    if units is None:
        return None
    entries: dict[int, tuple[int, _Shards]] = {}
    positions = [0] * len(lengths)
    for parameter, (entry, size) in enumerate(zip(units, parameters.sizes, strict=True)):
        begin, length = positions[entry], lengths[entry]
        positions[entry] = end = begin + size
        shards = {}
        for shard in range(begin // length, -(-end // length)):
            low, high = max(begin, shard * length), min(end, (shard + 1) * length)
            shards[shard] = low - begin, high - begin, low - shard * length
        entries[parameter] = entry, shards
    return entries


def _convert(
    optimizer: Mapping[str, Any], parameters: _Parameters, shard: int, entries: _Entries
) -> dict[str, Any]:
    """Return one rank's state, with named parameters as entries."""
    state: dict[int, dict[str, Any]] = {}
    for parameter, (entry, shards) in entries.items():
        shape, converted = parameters.shapes[parameter], {}
        start, stop, skipped = shards.get(shard, (0, 0, 0))
        for key, value in optimizer[STATE].get(entry, {}).items():
            converted[key] = value
            if _is_flat(value):
                boxes = value.part((skipped,), (stop - start,)).boxes_in(shape, start)
                places = (shard,), (parameters.shard_count,)
                converted[key] = StoredPart(
                    "ShardedTensor", value.dtype, shape, tuple(boxes), *places
                )
        state[parameter] = converted
    (group,) = optimizer[GROUPS]
    names = [*parameters.names]  # also of frozen parameters, which have no state
    return {STATE: state, GROUPS: [{**group, PARAMS: [*range(len(names))], PARAM_NAMES: names}]}
