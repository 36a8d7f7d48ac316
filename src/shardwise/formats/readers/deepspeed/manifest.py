"""Adds tensors to the manifest: tensor-parallel shards, ZeRO's flat groups, steps, param groups."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from shardwise.errors import FormatError
from shardwise.formats.foreign import StoredArray
from shardwise.formats.foreign_builder import Builder, make_number_tensor
from shardwise.formats.optimizers import ParamGroup, merge_param_groups
from shardwise.formats.readers.deepspeed.agreement import STEP
from shardwise.formats.readers.deepspeed.states import ModelState, Number
from shardwise.formats.readers.deepspeed.tensor_parallel import (
    Placement,
    PlacementRule,
    place_whole,
)
from shardwise.formats.readers.deepspeed.zero import (
    MASTER,
    FlatArray,
    FlatBoxes,
    FlatGroup,
    boxes_of_flat_ranges,
    ranges_of_slices,
)
from shardwise.layout import find_overlaps, row_major
from shardwise.layout.columns import Int, padded_rows
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.layout import Pieces


def tensor_name(parameter: str, key: str) -> str:
    """Return the name of a parameter's weight (`MASTER`) or of its optimizer state."""
    return f"model.{parameter}" if key == MASTER else f"optimizer.{parameter}.{key}"


def ensure_tensor(builder: Builder, name: str, dtype: str, placement: Placement) -> tuple[str, ...]:
    """Add a tensor unless the builder has it, and return its name for each rank.

    If a parameter is averaged, each rank has a hidden tensor.

    Raises:
        FormatError: the shape is too large.
    """
    ranks = range(len(placement.parts))
    if name not in builder and placement.averaged:
        terms = [f"{name}.of_rank_{rank}" for rank in ranks]
        builder.add_mean(name, dtype, placement.shape, terms)
    elif name not in builder:
        builder.add_tensor(name, dtype, placement.shape)
    return builder.terms_of(name) or (name,) * len(ranks)


def add_shards(
    builder: Builder, name: str, arrays: Sequence[StoredArray], placement: Placement
) -> None:
    """Add a tensor of the ranks' shards; if the builder has it, add them as replicas.

    Raises:
        FormatError: dtypes differ, or the builder has the tensor with another dtype or shape.
    """
    dtype = arrays[0].dtype
    kinds = {array.dtype for array in arrays}
    replica = name in builder
    if replica:
        entry = builder.entry(name)
        if (entry.dtype, entry.shape) != (dtype, placement.shape):
            kinds.add(f"{entry.dtype} {list(entry.shape)}")
    if len(kinds) > 1:
        raise FormatError(
            f"{name}: ranks differ in its dtype or shape: {', '.join(sorted(kinds))}. The files "
            "are from different saves: copy all files of one save"
        )
    tensors = ensure_tensor(builder, name, dtype, placement)
    for rank, (array, boxes) in enumerate(zip(arrays, placement.parts, strict=True)):
        is_replica = replica or (placement.replicated and rank > 0)
        for box, offset in boxes:
            if box.size:
                builder.add_box(tensors[rank], offset, array, box, replica=is_replica)


def add_flat_group(builder: Builder, shards: Sequence[FlatGroup], place: PlacementRule) -> None:
    """Add a group of parameters that ZeRO divided: weights, optimizer state, and step counts.

    Args:
        shards: the group on each tensor-parallel rank.

    Raises:
        FormatError: the ranks have different parameters, or their shards do not fit together.
    """
    _add_flat_arrays(builder, shards, place)
    first = shards[0]
    for key in first.scalars:
        arrays = [array for group in shards for array in group.scalars.get(key, ())]
        # Numbers other than steps can differ between ranks: for example, norms of their parts.
        add_scalars(builder, first.names, key, arrays if key == STEP else arrays[:1])
    for key, number in first.numbers.items():
        add_number(builder, first.names, key, number)
    builder.left_out += first.left_out


def _add_flat_arrays(builder: Builder, shards: Sequence[FlatGroup], place: PlacementRule) -> None:
    first = shards[0]
    for group in shards:
        if group.names != first.names or set(group.flat) != set(first.flat):
            example = [*sorted({*group.names} ^ {*first.names}), *first.names, "the weights"][0]
            raise FormatError(
                "tensor-parallel ranks have different parameters or optimizer state in a group, "
                f"for example {example[:200]}: their files are from different saves: copy all "
                "files of one save"
            )
    placements = [
        place(name, [group.shapes[i] for group in shards]) for i, name in enumerate(first.names)
    ]
    tensors = {key: _ensure_tensors(builder, first, key, placements) for key in first.flat}
    dims = max((len(shape) for group in shards for shape in group.shapes), default=0)
    for rank, group in enumerate(shards):
        shapes = padded_rows(group.shapes, dims, 1)
        boxes = boxes_of_flat_ranges(group.ranges, shapes)
        offset = boxes.offset
        if len(shards) > 1:
            boxes, offset = _place_in_parameters(boxes, shapes, placements, rank)
        stride = row_major(shapes)[boxes.parameter]
        for key, (indices, replicated) in tensors.items():
            flat = group.flat[key]
            file = np.array([builder.add_file(name) for name in flat.file], np.int64)
            start = flat.start[boxes.rank] + boxes.flat_start * DTYPES[flat.dtype].itemsize
            is_replica = replicated[rank][boxes.parameter]
            for rows, replica in ((~is_replica, False), (is_replica, True)):
                if rows.any():
                    pieces = Pieces(
                        indices[rank][boxes.parameter][rows],
                        file[boxes.rank][rows],
                        start[rows],
                        offset[rows],
                        boxes.shape[rows],
                        np.where(boxes.shape > 1, stride, 0)[rows],
                    )
                    builder.add_pieces(pieces, replica=replica)


def _ensure_tensors(
    builder: Builder, group: FlatGroup, key: str, placements: Sequence[Placement]
) -> tuple[Int, npt.NDArray[np.bool_]]:
    """Add the tensors of a group unless the builder has them.

    Returns:
        `(ranks, parameters)` each: the indices of the tensors, and whether the pieces are replicas.
    """
    ranks = len(placements[0].parts) if placements else 1
    indices = np.zeros((ranks, len(placements)), np.int64)
    replicated = np.zeros((ranks, len(placements)), np.bool_)
    for i, (parameter, placement) in enumerate(zip(group.names, placements, strict=True)):
        name = tensor_name(parameter, key)
        replicated[:, i] = name in builder
        if placement.replicated:
            replicated[1:, i] = True
        names = ensure_tensor(builder, name, group.flat[key].dtype, placement)
        indices[:, i] = [builder.index_of(each) for each in names]
        if builder.entry(name).shape != placement.shape:
            raise FormatError(
                f"{name}: pipeline stages have it in different shapes, "
                f"{list(builder.entry(name).shape)} and {list(placement.shape)}: their files are "
                "from different saves: copy all files of one save"
            )
    return indices, replicated


def _place_in_parameters(
    boxes: FlatBoxes, shapes: Int, placements: Sequence[Placement], rank: int
) -> tuple[FlatBoxes, Int]:
    """Return the boxes of a tensor-parallel shard, and their offsets in the whole parameters.

    A box is cut where the parts of the shard are not adjacent in the parameter.
    """
    parts = [(i, *part) for i, placement in enumerate(placements) for part in placement.parts[rank]]
    dims = shapes.shape[1]
    parameter = np.array([i for i, _, _ in parts], np.int64)
    local = padded_rows([box.offset for _, box, _ in parts], dims, 0)
    target = padded_rows([offset for _, _, offset in parts], dims, 0)
    extent = padded_rows([box.shape for _, box, _ in parts], dims, 1)
    overlaps = find_overlaps(
        (boxes.parameter, boxes.offset, boxes.shape), (parameter, local, extent)
    )
    row = overlaps.left
    strides = row_major(shapes)[boxes.parameter[row]]
    skipped = ((overlaps.offset - boxes.offset[row]) * strides).sum(axis=1)
    cut = FlatBoxes(
        boxes.parameter[row],
        boxes.rank[row],
        boxes.flat_start[row] + skipped,
        overlaps.offset,
        overlaps.shape,
    )
    return cut, overlaps.offset + (target - local)[overlaps.right]


def add_scalars(
    builder: Builder, names: Sequence[str], key: str, arrays: Sequence[StoredArray]
) -> None:
    """Add the first of the 0-d arrays as state of each parameter; the others are replicas."""
    first = arrays[0]
    tensors = [tensor_name(name, key) for name in names if tensor_name(name, key) not in builder]
    for tensor in tensors:
        builder.add_tensor(tensor, first.dtype, first.shape)
    if not tensors or any(array.shape for array in arrays):
        return
    for tensor in tensors:
        builder.add_box(tensor, (), first)
    for array in arrays[1:]:
        builder.add_box(tensors[0], (), array, replica=True)


def add_number(builder: Builder, names: Sequence[str], key: str, number: Number) -> None:
    """Add a number as state of some parameters; a step count becomes a tensor, as in torch."""
    if key == STEP and not isinstance(number, bool):
        add_scalars(builder, names, key, [builder.add_content(make_number_tensor(number, key))])
        return
    for name in names:
        if tensor_name(name, key) not in builder:
            builder.add_value(tensor_name(name, key), number)


def add_param_groups(builder: Builder, groups: Iterable[ParamGroup]) -> None:
    """Add `optimizer.param_groups`; groups with equal hyperparameters become one.

    Call it after the state of all parameters was added. Steps in param groups become state of the
    parameters that have none.
    """
    cleaned = []
    for group in groups:
        hyperparameters = dict(group.hyperparameters)
        step = hyperparameters.get(STEP)
        if isinstance(step, (int, float)):
            # DeepSpeed's Adam counts steps by group, torch's by parameter.
            del hyperparameters[STEP]
            names = [name for name in group.names if tensor_name(name, STEP) not in builder]
            add_number(builder, names, STEP, step)
        if hyperparameters.get("bias_correction") is True:
            del hyperparameters["bias_correction"]  # torch's Adam always corrects the bias
        cleaned.append(replace(group, hyperparameters=hyperparameters))
    if cleaned:
        builder.add_groups(merge_param_groups(cleaned), "optimizer.param_groups")


def add_frozen_slices(
    builder: Builder, models: Sequence[Sequence[ModelState]], place: PlacementRule
) -> None:
    """Add the frozen parameters that ZeRO 3 divided.

    Args:
        models: for each tensor-parallel rank, the model states of all data-parallel ranks.

    Raises:
        FormatError: ranks have different parameters, or lack their slices.
    """
    states = models[0]
    names = list(states[0].frozen_shapes)
    for state in (state for ranks in models for state in ranks):
        if list(state.frozen_shapes) != names:
            raise FormatError(
                f"{state.path}: its frozen parameters differ from those in {states[0].path}: the "
                "files are from different saves: copy all files of one save"
            )
    for name in names:
        shape = states[0].frozen_shapes[name]
        placement = place(name, [ranks[0].frozen_shapes[name] for ranks in models])
        if len(models) > 1 and not placement.replicated:
            builder.left_out.append(
                f"model.{name}: frozen, and divided by ZeRO 3 within tensor-parallel shards"
            )
            continue
        ranges = ranges_of_slices(np.array([math.prod(shape)], np.int64), len(states))
        flat = {MASTER: _join_frozen_slices(name, shape, states)}
        group = FlatGroup((name,), (shape,), ranges, flat, {}, {}, 0, ())
        _add_flat_arrays(builder, [group], place_whole)


def _join_frozen_slices(
    name: str, shape: tuple[int, ...], states: Sequence[ModelState]
) -> FlatArray:
    """Return the array that consists of all ranks' slices of a frozen parameter."""
    slice_length = -(-math.prod(shape) // len(states))
    slices: list[StoredArray] = []
    for state in states:
        array = state.frozen.get(name)
        if array is None or len(array.shape) != 1 or array.shape[0] < slice_length:
            raise FormatError(
                f"{state.path}: {name}: the file lacks the rank's slice of this frozen parameter: "
                "the files are damaged, or from different saves: copy all files of one save"
            )
        if slices and array.dtype != slices[0].dtype:
            raise FormatError(
                f"{state.path}: {name}: the slice of this frozen parameter is {array.dtype}, but "
                f"{slices[0].dtype} in {states[0].path}: the files are from different saves: copy "
                "all files of one save"
            )
        slices.append(array)
    file = tuple(array.file for array in slices)
    start: Int = np.array([array.start for array in slices], np.int64)
    return FlatArray(slices[0].dtype, file, start)
