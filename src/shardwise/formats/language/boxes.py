"""Boxes of global tensors in stored arrays: which boxes each array holds, and where they lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwise.errors import LayoutError
from shardwise.formats.foreign import Catalogue
from shardwise.formats.language.rules import DimensionMap
from shardwise.formats.language.shapes import Sizes, Term, expand_terms
from shardwise.layout import row_major
from shardwise.layout.columns import Bool, Int
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.layout import Pieces

MOST_BOXES = 2**26


@dataclass(frozen=True, slots=True)
class ArrayGroup:
    """Arrays that match the same target of a rule and have the same sizes.

    Attributes:
        rows: rows of the catalogue; repeated for an array that is part of several tensors.
        tensor: the index of each array's tensor.
        positions: the position of each array along each axis of the ranks, captured number and
            axis that splits it.
        dimension_map: the map from dimensions of the arrays to dimensions of the tensor.
        sizes: the sizes of all axes. For a ragged axis `name`, `sizes["name"]` is the size in these
            arrays, and `sizes["~name"]` is the sum over all ranks.
        strides: the strides of the arrays, in elements.
    """

    rows: Int
    tensor: Int
    positions: Mapping[str, Int]
    dimension_map: DimensionMap
    sizes: Sizes
    strides: tuple[int, ...]

    def select(self, rows: Bool | Int) -> ArrayGroup:
        """Return a group of some of the arrays."""
        positions = {axis: column[rows] for axis, column in self.positions.items()}
        return replace(self, rows=self.rows[rows], tensor=self.tensor[rows], positions=positions)


def find_boxes(catalogue: Catalogue, group: ArrayGroup, shape: Sequence[int]) -> Iterator[Pieces]:
    """Yield the boxes that arrays hold, a table for each part of the arrays.

    Args:
        catalogue: the arrays.
        group: the arrays that have these boxes.
        shape: the shape of the tensors; padding beyond it is left out.

    Raises:
        LayoutError: there are too many boxes.
    """
    dimension_map, sizes = group.dimension_map, group.sizes
    array_terms = {
        frozenset(term.steps): term for term in expand_terms(dimension_map.array_dims, sizes)
    }
    for term in expand_terms(dimension_map.tensor_dims, sizes):
        local_axes = {axis for axis in term.steps if dimension_map.is_local(axis)}
        if all(sizes[axis] for axis in local_axes):
            array_term = array_terms[frozenset(local_axes | set(dimension_map.split_axes))]
            yield _place_boxes(catalogue, group, term, array_term, np.array(shape, np.int64))


def _place_boxes(
    catalogue: Catalogue, group: ArrayGroup, term: Term, array_term: Term, tensor_shape: Int
) -> Pieces:
    """Return the boxes of one term: as few as possible, each as large as possible.

    If the positions along all indexed axes are 0, all arrays have the same boxes. Each position
    along an indexed axis shifts them.
    """
    dims = len(tensor_shape)
    array_steps = {
        axis: step * group.strides[dim] for axis, (dim, step) in array_term.steps.items()
    }
    first = sum(a * b for a, b in zip(array_term.starts, group.strides, strict=True))
    start = np.array([first], np.int64)
    offset = np.array([term.starts], np.int64).reshape(1, dims)
    size, stride, is_closed = np.ones(dims, np.int64), np.zeros(dims, np.int64), [False] * dims
    # The innermost axes of each dimension come first, and are merged into it. After an axis that
    # cannot be merged, each further one adds boxes.
    for axis, (dim, step) in sorted(term.steps.items(), key=lambda item: item[1][1]):
        count = group.sizes[axis]
        if not group.dimension_map.is_local(axis) or count == 1:
            continue
        array_step = array_steps[axis]
        is_contiguous = size[dim] == 1 or array_step == size[dim] * stride[dim]
        if step == size[dim] and is_contiguous and not is_closed[dim]:
            stride[dim] = array_step if size[dim] == 1 else stride[dim]
            size[dim] *= count
            continue
        is_closed[dim] = True
        if len(group.rows) * len(start) * count > MOST_BOXES:
            raise LayoutError(
                f"the rule cuts {len(group.rows)} arrays into more than {MOST_BOXES} boxes; put "
                "axes that are adjacent in the arrays next to each other in the tensor"
            )
        start = np.add.outer(start, np.arange(count) * array_step).ravel()
        offset = np.repeat(offset, count, axis=0)
        offset[:, dim] += np.tile(np.arange(count) * step, len(offset) // count)
    array_start, array_offset = np.zeros_like(group.rows), np.zeros((len(group.rows), dims), int)
    for axis, (dim, step) in term.steps.items():
        if not group.dimension_map.is_local(axis):
            array_offset[:, dim] += step * group.positions[axis]
    for axis in group.dimension_map.split_axes:
        array_start += array_steps[axis] * group.positions[axis]
    offsets = (array_offset[:, None, :] + offset).reshape(len(group.rows) * len(start), dims)
    shape = np.minimum(size, tensor_shape - offsets)
    is_kept = (shape > 0).all(axis=1)
    itemsizes = np.array([DTYPES[dtype].itemsize for dtype in catalogue.dtypes], np.int64)
    starts = np.add.outer(array_start, start) * itemsizes[catalogue.dtype[group.rows], None]
    pieces = Pieces(
        np.repeat(group.tensor, len(start)),
        np.repeat(catalogue.file[group.rows], len(start)),
        (catalogue.start[group.rows, None] + starts).ravel(),
        offsets,
        shape,
        # A dimension of size 1 may have any stride: use the stride of a row-major box.
        np.where(shape == 1, row_major(shape), stride),
    )
    return pieces if is_kept.all() else pieces.select(is_kept)
