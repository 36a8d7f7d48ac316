"""Boxes of global tensors in stored arrays: which boxes each array holds, at which strides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.errors import LayoutError
from shardwise.formats.language.rules import DimensionMap
from shardwise.formats.language.shapes import Sizes, Term, expand_terms, size_of_axis
from shardwise.layout.columns import Int, Table

MOST_BOXES = 2**26


@dataclass(frozen=True, slots=True)
class RelativeBoxes:
    """The K boxes that an array holds if its position along every indexed axis is 0.

    Arrays with the same axis sizes share these boxes.

    Attributes:
        start: `(K,)`, elements from the start of the array to the start of the box.
        offset: `(K, D)`, offsets of the boxes in the tensor.
        shape: `(D,)`, the shape of each box.
        stride: `(D,)`, strides in the array, in elements.
        shift_per_axis: for each indexed axis, how far one step along it shifts the boxes:
            `(elements in the array, dimension of the tensor, elements along this dimension)`.
    """

    start: Int
    offset: Int
    shape: Int
    stride: Int
    shift_per_axis: Mapping[str, tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class BoxTable(Table):
    """The n boxes of tensors in stored arrays, in columns.

    Attributes:
        tensor: `(n,)`, the index of the tensor.
        array_row: `(n,)`, the row of the array in the catalogue.
        start: `(n,)`, elements from the start of the array to the start of the box.
        offset, shape: `(n, D)`, the box in the tensor.
        stride: `(n, D)`, strides in the array, in elements.
    """

    tensor: Int
    array_row: Int
    start: Int
    offset: Int
    shape: Int
    stride: Int


@dataclass(slots=True)
class _BoxDim:
    """A dimension of a box, while axes are merged into it from the innermost outwards."""

    size: int = 1
    stride: int = 0
    is_closed: bool = False  # whether an axis could not be merged, so further axes add boxes


def find_relative_boxes(
    dimension_map: DimensionMap, sizes: Sizes, strides: Sequence[int]
) -> list[RelativeBoxes]:
    """Return the boxes of each part of the stored array that belongs to the tensor.

    Args:
        sizes: the sizes of all axes. For a ragged axis `name`, `sizes["name"]` is the size in this
            array, and `sizes["~name"]` is the sum over all ranks.
        strides: the strides of the stored array, in elements.

    Raises:
        LayoutError: there are too many boxes.
    """
    array_terms = {
        frozenset(term.steps): term for term in expand_terms(dimension_map.array_dims, sizes)
    }
    boxes_of_terms = []
    for tensor_term in expand_terms([dim.axes for dim in dimension_map.tensor_dims], sizes):
        local_axes = {axis for axis in tensor_term.steps if dimension_map.is_local(axis)}
        array_term = array_terms[frozenset(local_axes | set(dimension_map.split_axes))]
        if all(size_of_axis(axis, sizes) for axis in local_axes):
            boxes_of_terms.append(
                _find_boxes_of_term(dimension_map, tensor_term, array_term, sizes, strides)
            )
    return boxes_of_terms


def _find_boxes_of_term(
    dimension_map: DimensionMap,
    tensor_term: Term,
    array_term: Term,
    sizes: Sizes,
    strides: Sequence[int],
) -> RelativeBoxes:
    """Return the boxes of one term: as few as possible, each as large as possible."""
    array_steps = {axis: step * strides[dim] for axis, (dim, step) in array_term.steps.items()}
    box_dims = [_BoxDim() for _ in dimension_map.tensor_dims]
    first_element = sum(a * b for a, b in zip(array_term.starts, strides, strict=True))
    start = np.array([first_element], np.int64)
    offset = np.array([tensor_term.starts], np.int64).reshape(1, len(box_dims))
    # The innermost axes of each dimension come first.
    for axis, (dim, step) in sorted(tensor_term.steps.items(), key=lambda item: item[1][1]):
        if not dimension_map.is_local(axis):
            continue
        size, box_dim = size_of_axis(axis, sizes), box_dims[dim]
        if size == 1:
            continue
        is_contiguous = array_steps[axis] == box_dim.size * box_dim.stride
        extends_box = step == box_dim.size and (box_dim.size == 1 or is_contiguous)
        if extends_box and not box_dim.is_closed:
            box_dim.stride = array_steps[axis] if box_dim.size == 1 else box_dim.stride
            box_dim.size *= size
            continue
        box_dim.is_closed = True
        if len(start) * size > MOST_BOXES:
            raise LayoutError(
                f"the rule cuts an array into more than {MOST_BOXES} boxes; put axes that are "
                "adjacent in the array next to each other in the tensor"
            )
        positions = np.arange(size)
        start = (start[:, None] + positions * array_steps[axis]).ravel()
        offset = np.repeat(offset, size, axis=0)
        offset[:, dim] += np.tile(positions * step, len(offset) // size)
    shift_per_axis = {
        axis: (0, dim, step)
        for axis, (dim, step) in tensor_term.steps.items()
        if not dimension_map.is_local(axis)
    }
    shift_per_axis |= {axis: (array_steps[axis], 0, 0) for axis in dimension_map.split_axes}
    return RelativeBoxes(
        start,
        offset,
        np.array([dim.size for dim in box_dims], np.int64),
        np.array([dim.stride for dim in box_dims], np.int64),
        shift_per_axis,
    )


def place_boxes(
    boxes: RelativeBoxes, rows: Int, tensor: Int, positions: Mapping[str, Int], tensor_shape: Int
) -> BoxTable:
    """Return the boxes of many arrays.

    Args:
        rows, tensor: for each array, its row in the catalogue and the index of its tensor.
        positions: for each array, the position along each indexed axis.
        tensor_shape: `(D,)`; padding beyond it is left out.

    Raises:
        LayoutError: there are too many boxes.
    """
    count, dims = len(boxes.start), boxes.offset.shape[1]
    if len(rows) * count > MOST_BOXES:
        raise LayoutError(
            f"the rule cuts {len(rows)} arrays into {count} boxes each, more than {MOST_BOXES} in "
            "all; put axes that are adjacent in the arrays next to each other in the tensor"
        )
    start, offset = np.zeros(len(rows), np.int64), np.zeros((len(rows), dims), np.int64)
    for axis, (elements, dim, step) in boxes.shift_per_axis.items():
        start += elements * positions[axis]
        if step:
            offset[:, dim] += step * positions[axis]
    starts = (start[:, None] + boxes.start).ravel()
    offsets = (offset[:, None, :] + boxes.offset).reshape(len(starts), dims)
    shape = np.minimum(boxes.shape, tensor_shape - offsets)
    is_kept = (shape > 0).all(axis=1)
    return BoxTable(
        np.repeat(tensor, count)[is_kept],
        np.repeat(rows, count)[is_kept],
        starts[is_kept],
        offsets[is_kept],
        shape[is_kept],
        np.broadcast_to(boxes.stride, shape.shape)[is_kept],
    )
