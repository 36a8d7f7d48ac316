"""Lays the weights and buffers of a module as DeepSpeed saves them beside what ZeRO divided."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwise.errors import FormatError
from shardwise.formats.foreign import PieceTable, StoredArray
from shardwise.formats.readers.deepspeed.laying import Laying
from shardwise.formats.readers.deepspeed.partitions import as_fragments, sliced
from shardwise.formats.readers.deepspeed.placements import Placing, whole
from shardwise.formats.readers.deepspeed.states import ModelState
from shardwise.layout import row_major
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.table import Pieces
from shardwise.manifest.validate import padded_shapes


@dataclass(frozen=True, slots=True)
class Module:
    """What the module of one tensor-parallel rank has, of all its pipeline stages.

    Attributes:
        arrays: parameters and buffers by name; under ZeRO 3 parameters are empty.
        buffers: which are buffers.
        frozen: parameters that are not trained, once more, where DeepSpeed stores them twice.
        shared: names of tied parameters, and of those that they are.
    """

    arrays: Mapping[str, StoredArray]
    buffers: frozenset[str]
    frozen: Mapping[str, StoredArray]
    shared: Mapping[str, str]

    def tied(self) -> dict[str, str]:
        """Names of tied parameters, and of those that they are."""
        first: dict[StoredArray, str] = {}
        tied = {}
        for name, array in self.arrays.items():
            if math.prod(array.shape) and first.setdefault(array, name) != name:
                tied[name] = first[array]
        return tied | dict(self.shared)


def lay_modules(laying: Laying, modules: Sequence[Module], place: Placing, *, sliced: bool) -> None:
    """Lay modules of all tensor-parallel ranks, after what was trained.

    Weights that were trained in another dtype are named `module`, all else `model`; if there are
    any of the first, `module` has all names.

    Args:
        sliced: under ZeRO 3, where parameters are not with the module.

    Raises:
        FormatError: ranks differ.
    """
    first = modules[0]
    if any(list(other.arrays) != list(first.arrays) for other in modules):
        raise FormatError("the modules of tensor-parallel ranks do not have the same names")
    ties = first.tied()
    lower = False
    for name, array in first.arrays.items():
        if name in ties or (sliced and name not in first.buffers):
            continue
        arrays = [module.arrays[name] for module in modules]
        shapes = [each.shape for each in arrays]
        buffer = name in first.buffers
        placement = (whole if buffer else place)(name, shapes)
        full = f"model.{name}"
        if full in laying and laying.entry(full).dtype != array.dtype:
            full, lower = f"module.{name}", True
        elif full not in laying and _may_be_tied(laying, name, placement.shape):
            full = f"module.{name}"
            laying.left_out.append(
                f"model.{name}: it may be one of tied_modules, which are named there; its weights "
                f"are {full}"
            )
        laying.shards(full, arrays, placement)
        again = [module.frozen.get(name) for module in modules]
        if all(each is not None for each in again) and again != arrays:
            laying.shards(full, [each for each in again if each is not None], placement)
    for alias, owner in ties.items():
        owner = ties.get(owner, owner)
        for top in ("model", "module"):
            if f"{top}.{owner}" in laying and f"{top}.{alias}" not in laying:
                laying.tie(f"{top}.{alias}", f"{top}.{owner}")
    for name in (*first.arrays, *ties) if lower else ():
        if f"module.{name}" not in laying and f"model.{name}" in laying:
            laying.tie(f"module.{name}", f"model.{name}")


def _may_be_tied(laying: Laying, name: str, shape: tuple[int, ...]) -> bool:
    """Whether a pipeline's layer may be one that is trained under the name of what it is tied to.

    DeepSpeed does not store which layers are.
    """
    layer, _, key = name.partition(".")
    return layer.isdigit() and any(
        laying.entry(tied).shape == shape
        for tied in laying.below("model.tied_modules.")
        if tied.endswith(f".{key}")
    )


def lay_frozen_slices(laying: Laying, grid: Sequence[Sequence[ModelState]], place: Placing) -> None:
    """Lay parameters that are not trained, which ZeRO 3 divided as it does all.

    Args:
        grid: of each tensor-parallel rank, the model states of all data-parallel ranks.

    Raises:
        FormatError: ranks do not fit together.
    """
    names = list(grid[0][0].frozen_shapes)
    if any(list(state.frozen_shapes) != names for states in grid for state in states):
        raise FormatError("ranks have different frozen parameters")
    laid = []
    for name in names:
        shapes = [states[0].frozen_shapes[name] for states in grid]
        placement = place(name, shapes)
        if len(shapes) > 1 and not placement.replicated:
            laying.left_out.append(
                f"model.{name}: frozen, and divided by ZeRO 3 within tensor-parallel shards"
            )
        else:
            laid.append(name)
    if laid:
        _lay_slices(laying, laid, grid[0])


def _lay_slices(laying: Laying, names: Sequence[str], states: Sequence[ModelState]) -> None:
    shapes = [states[0].frozen_shapes[name] for name in names]
    sizes = [math.prod(shape) for shape in shapes]
    slices = [
        _slices_of(name, -(-size // len(states)), states)
        for name, size in zip(names, sizes, strict=True)
    ]
    ranges = sliced(np.array(sizes, np.int64), len(states))
    padded = padded_shapes(shapes, max(map(len, shapes)))
    held = as_fragments(replace(ranges, at=np.zeros_like(ranges.at)), padded)
    kinds = [parts[0].dtype for parts in slices]
    numbers = [
        laying.add(f"model.{name}", kind, shape)
        for name, kind, shape in zip(names, kinds, shapes, strict=True)
    ]
    at = held.parameter, held.rank
    file = np.array([[part.file for part in parts] for parts in slices], np.int64)[at]
    start = np.array([[part.start for part in parts] for parts in slices], np.int64)[at]
    itemsize = np.array([DTYPES[kind].itemsize for kind in kinds], np.int64)
    start = start + held.at * itemsize[held.parameter]
    stride = np.where(held.shape > 1, row_major(padded)[held.parameter], 0)
    tensor = np.array(numbers, np.int64)[held.parameter]
    laying.lay(PieceTable(Pieces(tensor, file, start, held.offset, held.shape), stride))


def _slices_of(name: str, each: int, states: Sequence[ModelState]) -> list[StoredArray]:
    """What ranks have of a frozen parameter, `each` elements and padding."""
    arrays = [state.frozen.get(name) for state in states]
    parts = [array for array in arrays if array is not None and len(array.shape) == 1]
    if len(parts) != len(states) or any(part.shape[0] < each for part in parts):
        raise FormatError(f"{name}: a rank has not its slice of this frozen parameter")
    if len({part.dtype for part in parts}) != 1:
        raise FormatError(f"{name}: ranks have it in different dtypes")
    return parts
