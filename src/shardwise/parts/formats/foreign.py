"""Arrays in files, the pieces of tensors that they make up, and catalogues of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import Any, TypeAlias

import numpy as np

from shardwise.kernel.boxes import (
    Box,
    boxes_of_range,
    boxes_of_ranges,
    find_overlaps,
    row_major_strides,
)
from shardwise.kernel.boxes.box import IntArray, padded_rows
from shardwise.kernel.errors import FormatError
from shardwise.kernel.manifest.dtypes import DTYPES
from shardwise.kernel.manifest.manifest import TensorEntry
from shardwise.kernel.manifest.pieces import Pieces


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array in a file. Its bytes were not read.

    Attributes:
        file: the name of the file.
        start: the offset of the first element in the file, in bytes.
        dtype: torch's name.
        shape: the shape.
        stride: the strides in elements.
    """

    file: str
    start: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """The size of an element in bytes.

        Raises:
            FormatError: torch has no such dtype, or shardwise does not support it.
        """
        if self.dtype not in DTYPES:
            raise FormatError(
                f"{self.file[:200]!r}: the tensor at byte {self.start}, of shape "
                f"{list(self.shape)}, has the dtype {self.dtype[:40]!r}, which is not supported: "
                "load the checkpoint with the program that wrote it, and convert the tensor"
            )
        return DTYPES[self.dtype].itemsize

    @property
    def is_flat(self) -> bool:
        """Whether it is contiguous and has one dimension."""
        return len(self.shape) == 1 and self.stride == (1,)

    @classmethod
    def contiguous(cls, file: str, start: int, dtype: str, shape: tuple[int, ...]) -> StoredArray:
        """Return a contiguous row-major array."""
        strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        return cls(file, start, dtype, shape, strides)

    def part(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> StoredArray:
        """Return a box of the array."""
        skipped = sum(o * step for o, step in zip(offset, self.stride, strict=True))
        start = self.start + skipped * self.itemsize
        return StoredArray(self.file, start, self.dtype, shape, self.stride)

    def boxes_in(self, shape: tuple[int, ...], first: int) -> list[Placed]:
        """Return the boxes that this contiguous array has, if it is a range of a flattened tensor.

        Args:
            shape: the shape of the tensor.
            first: the first element of the range.

        Raises:
            LayoutError: the range is longer than the rest of the tensor.
        """
        placed, start = [], self.start
        for box in boxes_of_range(shape, first, first + math.prod(self.shape)):
            placed.append((box.offset, self.contiguous(self.file, start, self.dtype, box.shape)))
            start += box.size * self.itemsize
        return placed


Placed: TypeAlias = tuple[tuple[int, ...], StoredArray]
"""The offset of a box in a tensor, and the array with its elements."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor whose boxes are arrays in files. Their bytes were not read.

    Attributes:
        dtype: torch's name.
        shape: the shape.
        boxes: the boxes, which cover each element exactly once.
        replicas: further copies of boxes.
    """

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Placed, ...]
    replicas: tuple[Placed, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class StoredPart:
    """The part of a tensor that one rank stored: of a DTensor, or of a ShardedTensor.

    Attributes:
        kind: "DTensor" or "ShardedTensor".
        dtype: torch's name.
        shape: the shape of the whole tensor.
        boxes: the boxes of the part; none if it is empty.
        place, places: the index of the part, and the number of parts, along each dimension of the
            mesh that divides the tensor.
        arrangement: what else the parts of all ranks have in common, for example the mesh.
        local: the local tensor of a DTensor.
        pairs: if the local tensor wraps others, the boxes of the whole tensor that it has, each
            with the same box in the local tensor. `boxes` is then empty.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Placed, ...]
    place: tuple[int, ...]
    places: tuple[int, ...]
    arrangement: tuple[object, ...] = ()
    local: StoredArray | StoredComposite | None = None
    pairs: tuple[tuple[Box, Box], ...] = ()


@dataclass(frozen=True, slots=True)
class StoredComposite:
    """A tensor that wraps others, such as the codes and scales of a quantized tensor.

    Attributes:
        class_name: its class, with its module: `torchao.quantization:Int8Tensor`.
        dtype: the dtype of the outer tensor, by torch's name.
        shape: the shape of the outer tensor.
        context: what else the class keeps. Objects in it are `PickledInstance`s.
        inner: the inner tensors, with their names.
    """

    class_name: str
    dtype: str
    shape: tuple[int, ...]
    context: Any = field(compare=False)
    inner: tuple[tuple[str, StoredArray | StoredTensor | StoredPart | StoredComposite], ...]


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The n arrays in the files of all ranks, as a table.

    Attributes:
        axes: the axes of the ranks and their sizes: `{"tp": 2, "pp": 4}`.
        names: the distinct names of arrays; `name` is an index into them.
        dtypes: the distinct dtypes, by torch's names; `dtype` is an index into them.
        name, dtype, file: `(n,)`, indices. The caller numbers the files.
        start: `(n,)`, the offset of the first element in the file, in bytes.
        ndim: `(n,)`, the number of dimensions.
        shape, stride: `(n, D)`, padded on the right with 1 and 0; strides in elements.
        coordinate: `(n, len(axes))`, the coordinate of the rank along each axis.
    """

    axes: Mapping[str, int]
    names: Sequence[str]
    dtypes: Sequence[str]
    name: IntArray
    dtype: IntArray
    file: IntArray
    start: IntArray
    ndim: IntArray
    shape: IntArray
    stride: IntArray
    coordinate: IntArray

    def __len__(self) -> int:
        return len(self.name)


def hide_terms(
    entries: Sequence[TensorEntry], terms: Mapping[str, Sequence[str]]
) -> tuple[tuple[TensorEntry, ...], tuple[int, ...], IntArray]:
    """Separate the terms of means from the tensors that users see.

    Args:
        entries: tensors and terms.
        terms: for the name of each mean, the names of its terms.

    Returns:
        The tensors without the terms; `Layout.terms`; and for each of `entries`, its index in
        `Pieces.tensor`.
    """
    mean_of = {term: mean for mean, names in terms.items() for term in names}
    tensors = tuple(entry for entry in entries if entry.name not in mean_of)
    index = {entry.name: i for i, entry in enumerate(tensors)}
    means = tuple(index.get(mean, 0) for mean in mean_of.values())
    index |= {term: len(tensors) + i for i, term in enumerate(mean_of)}
    return tensors, means, np.array([index[entry.name] for entry in entries], np.int64)


Row: TypeAlias = tuple[str, StoredArray, tuple[int, ...]]
"""The name of an array, the array, and the coordinate of its rank along each axis."""


def build_catalogue(
    axes: Mapping[str, int], rows: Iterable[Row], file_index: Callable[[str], int]
) -> Catalogue:
    """Return a catalogue of arrays.

    Args:
        axes: the axes of the ranks and their sizes.
        rows: the arrays.
        file_index: returns the number of a file, given its name.

    Raises:
        FormatError: there are too many arrays of too many dimensions for a table.
    """
    rows = list(rows)
    arrays = [array for _, array, _ in rows]
    names = list(dict.fromkeys(name for name, _, _ in rows))
    dtypes = list(dict.fromkeys(array.dtype for array in arrays))
    name_index = {name: i for i, name in enumerate(names)}
    max_ndim = max((len(array.shape) for array in arrays), default=0)

    def column(values: Iterable[int]) -> IntArray:
        return np.array(list(values), np.int64)

    return Catalogue(
        axes=axes,
        names=names,
        dtypes=dtypes,
        name=column(name_index[name] for name, _, _ in rows),
        dtype=column(dtypes.index(array.dtype) for array in arrays),
        file=column(file_index(array.file) for array in arrays),
        start=column(array.start for array in arrays),
        ndim=column(len(array.shape) for array in arrays),
        shape=padded_rows([array.shape for array in arrays], max_ndim, 1),
        stride=padded_rows([array.stride for array in arrays], max_ndim, 0),
        coordinate=np.array([coordinate for _, _, coordinate in rows], np.int64).reshape(
            len(rows), len(axes)
        ),
    )


MOST_PIECES_OF_ARRAY = 4096
"""The most pieces that an array is cut into. Arrays are cut if elements share bytes (`expand`)."""

_Row = tuple[int, int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""A piece: tensor, file, start, offset, shape, stride."""

Block: TypeAlias = tuple[int, tuple[int, ...], tuple[tuple[Box, tuple[int, ...]], ...]]
"""What was flattened: the index of the tensor, the shape of the flattened part, and the boxes of
that part with their offsets in the tensor; no boxes if the part is a box at offset 0."""


def pieces_of_boxes(
    boxes: Sequence[tuple[int, int, tuple[int, ...], StoredArray]],
    name_of: Callable[[int], str] = "tensor {}".format,
) -> Pieces:
    """Return the pieces of boxes, each an array. Empty arrays have no piece.

    Args:
        boxes: the index of the tensor, the index of the file, the offset of the box, and the array.
        name_of: returns the name of a tensor by its index, for messages.

    Raises:
        FormatError: an array has to be cut into too many pieces, because its elements share bytes,
            as after `expand`; or the pieces have too many dimensions.
    """
    rows: list[_Row] = []
    for tensor, file, offset, array in boxes:
        shared_dims, shape, stride = _split_off_shared_dims(array.shape, array.stride)
        if not shared_dims:
            if 0 not in shape:
                rows.append((tensor, file, array.start, offset, shape, stride))
            continue
        if math.prod(array.shape[dim] for dim in shared_dims) > MOST_PIECES_OF_ARRAY:
            raise FormatError(
                f"{name_of(tensor)}: an array of shape {list(array.shape)} and strides "
                f"{list(array.stride)} has too many elements that share bytes: make it contiguous "
                "before saving it"
            )
        counts = (n if dim in shared_dims else 1 for dim, n in enumerate(array.shape))
        for inner in product(*map(range, counts)) if 0 not in shape else ():
            elements = sum(i * step for i, step in zip(inner, array.stride, strict=True))
            place = tuple(map(sum, zip(offset, inner, strict=True)))
            start = array.start + elements * array.itemsize
            rows.append((tensor, file, start, place, shape, stride))
    max_ndim = max((len(row[3]) for row in rows), default=0)
    columns = np.array([row[:3] for row in rows], np.int64).reshape(len(rows), 3)
    offsets = padded_rows([row[3] for row in rows], max_ndim, 0)
    shapes = padded_rows([row[4] for row in rows], max_ndim, 1)
    strides = padded_rows([row[5] for row in rows], max_ndim, 0)
    return Pieces(columns[:, 0], columns[:, 1], columns[:, 2], offsets, shapes, strides)


@lru_cache(4096)
def _split_off_shared_dims(
    shape: tuple[int, ...], stride: tuple[int, ...]
) -> tuple[list[int], tuple[int, ...], tuple[int, ...]]:
    """Return the dimensions whose elements share bytes, and the shape and strides of the parts."""
    shared_dims = []
    extent = 0  # the distance of the first and last element, along the dimensions so far
    for step, dim in sorted((step, dim) for dim, step in enumerate(stride) if shape[dim] > 1):
        if step <= extent:
            shared_dims.append(dim)
        else:
            extent += (shape[dim] - 1) * step
    part_shape = tuple(1 if dim in shared_dims else n for dim, n in enumerate(shape))
    # The stride of a dimension with one element has no meaning, and may have any value.
    strides = tuple(0 if n == 1 else step for n, step in zip(part_shape, stride, strict=True))
    return shared_dims, part_shape, strides


def pieces_of_ranges(
    blocks: Sequence[Block],
    block: IntArray,
    start: IntArray,
    stop: IntArray,
    file: IntArray,
    position: IntArray,
    itemsize: int,
) -> Pieces:
    """Return the pieces of elements `start:stop` of blocks.

    Args:
        blocks: the blocks; `block` is an index into them.
        file: the index of the file of each range.
        position: the first byte of each range in the file.
        itemsize: the size of an element in bytes.
    """
    dims = max(len(shape) for _, shape, _ in blocks)
    shapes = padded_rows([shape for _, shape, _ in blocks], dims, 1)
    parts = [
        (index, box.offset, box.shape, offset)
        for index, (_, shape, own) in enumerate(blocks)
        for box, offset in own or ((Box.whole(shape), (0,) * len(shape)),)
    ]
    offsets = padded_rows([offset for _, offset, _, _ in parts], dims, 0)
    part_shapes = padded_rows([shape for _, _, shape, _ in parts], dims, 1)
    shift = padded_rows([offset for *_, offset in parts], dims, 0) - offsets
    boxes = boxes_of_ranges(shapes[block], start, stop)
    row = boxes.range_index
    cut, part, offset, shape = find_overlaps(
        (block[row], boxes.offset, boxes.shape),
        (np.array([index for index, *_ in parts], np.int64), offsets, part_shapes),
    )
    row, first = row[cut], boxes.first[cut]
    stride = row_major_strides(shapes)[block[row]]
    first = first + ((offset - boxes.offset[cut]) * stride).sum(axis=1)
    return Pieces(
        np.array([tensor for tensor, _, _ in blocks], np.int64)[block[row]],
        file[row],
        position[row] + (first - start[row]) * itemsize,
        offset + shift[part],
        shape,
        np.where(shape > 1, stride, 0),
    )
