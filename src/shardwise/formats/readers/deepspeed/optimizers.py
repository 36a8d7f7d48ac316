"""Lays the weights and the optimizer's state that ZeRO divided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardwise.errors import FormatError
from shardwise.formats import optimizers as param_groups
from shardwise.formats.foreign import PieceTable
from shardwise.formats.readers.deepspeed.groups import MASTER, Flat, Group
from shardwise.formats.readers.deepspeed.laying import Laying
from shardwise.formats.readers.deepspeed.partitions import Fragments, as_fragments
from shardwise.formats.readers.deepspeed.placements import Placement, Placing
from shardwise.formats.readers.deepspeed.states import Number
from shardwise.layout import find_overlaps, row_major
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.table import Int, Pieces
from shardwise.manifest.validate import padded_shapes

STEP = "step"


def lay_group(laying: Laying, shards: Sequence[Group], place: Placing) -> None:
    """Lay a group of parameters.

    Args:
        shards: the group as each tensor-parallel rank has it.

    Raises:
        FormatError: the ranks do not have the same, or their shards do not fit together.
    """
    first = shards[0]
    if any(other.names != first.names or set(other.flat) != set(first.flat) for other in shards):
        raise FormatError("tensor-parallel ranks have different parameters, or state, in a group")
    placements = [
        place(name, [group.shapes[i] for group in shards]) for i, name in enumerate(first.names)
    ]
    tensors = {key: _declare(laying, first, key, placements) for key in first.flat}
    dims = max((len(shape) for group in shards for shape in group.shapes), default=0)
    for rank, group in enumerate(shards):
        shapes = padded_shapes(group.shapes, dims)
        held = as_fragments(group.ranges, shapes)
        offset = held.offset
        if len(shards) > 1:
            held, offset = _placed(held, shapes, placements, rank)
        stride = row_major(shapes)[held.parameter]
        for key, (numbers, there_already) in tensors.items():
            _lay(laying, group.flat[key], held, offset, stride, numbers[rank], there_already[rank])
    _lay_small(laying, shards)


def _declare(
    laying: Laying, group: Group, key: str, placements: Sequence[Placement]
) -> tuple[Int, Int]:
    """The numbers of tensors, by rank and parameter; and which of them others lay already."""
    ranks = len(placements[0].parts) if placements else 1
    numbers = np.zeros((ranks, len(placements)), np.int64)
    replica = np.zeros((ranks, len(placements)), np.int64)
    for i, (name, placement) in enumerate(zip(group.names, placements, strict=True)):
        full = _name(name, key)
        replica[:, i] = full in laying
        if placement.replicated:
            replica[1:, i] = True
        numbers[:, i] = laying.declare(full, group.flat[key].dtype, placement)
        if laying.entry(full).shape != placement.shape:
            raise FormatError(f"{full}: pipeline stages have it in different shapes")
    return numbers, replica


def _name(parameter: str, key: str) -> str:
    return f"model.{parameter}" if key == MASTER else f"optimizer.{parameter}.{key}"


def _placed(
    held: Fragments, shapes: Int, placements: Sequence[Placement], rank: int
) -> tuple[Fragments, Int]:
    """Boxes of a shard cut where its parts lie apart in the parameter, and their offsets there."""
    boxes = [(i, *part) for i, placed in enumerate(placements) for part in placed.parts[rank]]
    dims = shapes.shape[1]
    owner = np.array([i for i, _, _ in boxes], np.int64)
    local = padded_shapes([box.offset for _, box, _ in boxes], dims) - _beyond(boxes, dims)
    there = padded_shapes([to for _, _, to in boxes], dims) - _beyond(boxes, dims)
    extent = padded_shapes([box.shape for _, box, _ in boxes], dims)
    common = find_overlaps((held.parameter, held.offset, held.shape), (owner, local, extent))
    row = common.left
    inside = ((common.offset - held.offset[row]) * row_major(shapes)[held.parameter[row]]).sum(
        axis=1
    )
    cut = Fragments(
        held.parameter[row], held.rank[row], held.at[row] + inside, common.offset, common.shape
    )
    return cut, common.offset + (there - local)[common.right]


def _beyond(boxes: Sequence[tuple[int, Any, tuple[int, ...]]], dims: int) -> Int:
    """1 in the dimensions that a box has not, which offsets are padded with."""
    return np.array([[d >= len(to) for d in range(dims)] for _, _, to in boxes], np.int64)


def _lay(
    laying: Laying, flat: Flat, held: Fragments, offset: Int, stride: Int, numbers: Int, again: Int
) -> None:
    start = flat.start[held.rank] + held.at * DTYPES[flat.dtype].itemsize
    replica = again[held.parameter].astype(bool)
    for rows, as_replica in ((~replica, False), (replica, True)):
        if rows.any():
            pieces = Pieces(
                numbers[held.parameter][rows],
                flat.file[held.rank][rows],
                start[rows],
                offset[rows],
                held.shape[rows],
            )
            strides = np.where(pieces.shape > 1, stride[rows], 0)
            laying.lay(PieceTable(pieces, strides), replica=as_replica)


def _lay_small(laying: Laying, shards: Sequence[Group]) -> None:
    """Lay counts of steps and other numbers, which all parameters of a group share."""
    first = shards[0]
    for key in first.arrays:
        arrays = [array for group in shards for array in group.arrays.get(key, ())]
        # Of other numbers each rank may have its own, as a norm of its part of the parameters.
        laying.scalars(
            [_name(name, key) for name in first.names], arrays[: None if key == STEP else 1]
        )
    for key, number in first.numbers.items():
        lay_number(laying, first.names, key, number)
    laying.left_out.extend(first.left_out)


def lay_number(laying: Laying, names: Sequence[str], key: str, number: Number) -> None:
    """Lay a plain number of the state of some parameters; a count of steps as torch's tensor."""
    if key == STEP and not isinstance(number, bool):
        laying.scalars([_name(name, key) for name in names], [laying.number(number)])
        return
    for name in names:
        if _name(name, key) not in laying:
            laying.value(_name(name, key), number)


class Settings:
    """Hyperparameters of groups of parameters, as they become `optimizer.param_groups`."""

    def __init__(self, laying: Laying) -> None:
        self._laying = laying
        self._groups: list[param_groups.Group] = []

    def add(self, names: Sequence[str], settings: Mapping[str, Any]) -> None:
        """Say which settings some parameters have."""
        kept = dict(settings)
        step = kept.get(STEP)
        if isinstance(step, (int, float)):
            # Where DeepSpeed's own Adam counts; torch's counts with each parameter.
            del kept[STEP]
            new = [name for name in names if _name(name, STEP) not in self._laying]
            lay_number(self._laying, new, STEP, step)
        if kept.get("bias_correction") is True:
            # As torch's Adam always does, which has no such setting.
            del kept["bias_correction"]
        for index, group in enumerate(self._groups):
            if group.settings == kept:
                members = dict.fromkeys((*group.members, *names))
                self._groups[index] = param_groups.Group(tuple(members), kept)
                return
        self._groups.append(param_groups.Group(tuple(names), kept))

    def lay(self) -> None:
        """Lay them as one value."""
        if self._groups:
            self._laying.groups("optimizer.param_groups", self._groups)
