"""A tensor in a checkpoint: `saved[10:20]` reads only the selected elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from types import EllipsisType
from typing import Any, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from shardwise.kernel.boxes import (
    Box,
    SelectedPositions,
    boxes_of_covers,
    cover_positions,
    select_positions,
    split_into_batches,
)
from shardwise.kernel.manifest.dtypes import DTYPES
from shardwise.kernel.manifest.manifest import TensorEntry
from shardwise.kernel.state.local_state import Fragment, TensorLeaf

IndexArray: TypeAlias = Sequence[int] | npt.NDArray[Any] | torch.Tensor
IndexPart: TypeAlias = SupportsIndex | slice | EllipsisType | IndexArray
Index: TypeAlias = IndexPart | tuple[IndexPart, ...]
ReadInto: TypeAlias = Callable[[Sequence[TensorLeaf]], None]
"""Fills the memory of tensors from the checkpoint."""

GAP = 64 << 10
"""The largest gap between two selected parts, in bytes, that is read to avoid a second read."""
LARGEST_BATCH = 64 << 20
"""The largest number of bytes that is read at once."""


class SavedTensor:
    """A tensor in a checkpoint, which is read when it is indexed or converted.

    Example:

        weight = sw.open("runs/1/step-00000100")["model.layers.0.wq.weight"]
        weight[10:20]          # reads ten rows
        numpy.asarray(weight)  # reads the whole tensor

    Attributes:
        name: the full name of the tensor.
        shape: the global shape, as `torch.Size`.
        dtype: the saved dtype.
    """

    def __init__(
        self,
        entry: TensorEntry,
        read_into: ReadInto,
        boxes: Callable[[], Sequence[tuple[Box, int]]],
    ) -> None:
        self._entry = entry
        self._read_into = read_into
        self._boxes = boxes
        self.name = entry.name
        self.shape = torch.Size(entry.shape)
        self.dtype: torch.dtype = getattr(torch, entry.dtype)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of the whole tensor in bytes."""
        return self.shape.numel() * DTYPES[self._entry.dtype].itemsize

    def __repr__(self) -> str:
        return f"SavedTensor({self.name!r}, {self.dtype}, {list(self.shape)})"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self.name}: a 0-d tensor has no length: read it with .tensor()")
        return self.shape[0]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Index) -> torch.Tensor:
        """Read the selected elements into a new CPU tensor. `saved[...]` reads the whole tensor.

        Gaps of at most 64 KiB between selected elements are read too. Besides the result, a read
        needs at most 64 MiB of host memory, or the selected part of one row of the first dimension
        if this part is larger.

        Args:
            index: integers, slices with positive steps, `...`, and at most one list of integers,
                integer array, or mask of one dimension; or a tuple of these.

        Returns:
            A CPU tensor with the saved dtype, of the same shape as if a `torch.Tensor` was indexed.

        Raises:
            IndexError: the index does not fit the shape.
            CorruptionError: bytes differ from the saved bytes.
        """
        parts = index if isinstance(index, tuple) else (index,)
        index_parts = tuple(
            part.cpu() if isinstance(part, torch.Tensor) else part for part in parts
        )
        try:
            selections = select_positions(index_parts, self.shape)
        except IndexError as error:
            raise IndexError(f"{self.name}: {error}") from None
        out = _read_selected(self._entry, selections, self._read_into)
        return out[
            tuple(
                torch.from_numpy(each.reindex)
                if isinstance(each.reindex, np.ndarray)
                else each.reindex
                for each in selections
            )
        ]

    def tensor(
        self, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """Read the whole tensor.

        Args:
            dtype: the dtype of the result. Default: the saved dtype.
            device: the device of the result.

        Raises:
            CorruptionError: bytes differ from the saved bytes.
        """
        return self[...].to(device, dtype or self.dtype)

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        """Read the whole tensor as a new NumPy array.

        Raises:
            ValueError: `copy` is False, but a read always makes a new array.
            TypeError: NumPy lacks the saved dtype (for example bfloat16), and `dtype` is None.
            CorruptionError: bytes differ from the saved bytes.
        """
        if copy is False:
            raise ValueError(
                f"{self.name}: reading makes a new array, so copy=False is not possible: leave out "
                "copy="
            )
        try:
            torch.empty(0, dtype=self.dtype, device="cpu").numpy()
            readable_dtype = self.dtype
        except TypeError as error:
            if dtype is None:
                raise TypeError(
                    f"{self.name}: numpy has no dtype {self.dtype}: pass a dtype, for example "
                    "numpy.float32, or use .tensor()"
                ) from error
            readable_dtype = torch.complex64 if self.dtype.is_complex else torch.float32
        array: npt.NDArray[Any] = self.tensor(dtype=readable_dtype).numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __dlpack__(self, **options: Any) -> object:
        """Read the whole tensor into CPU memory, as a DLPack capsule."""
        return self[...].__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's device type and index of the CPU."""
        return 1, 0  # kDLCPU


def _read_selected(
    entry: TensorEntry, selections: Sequence[SelectedPositions], read_into: ReadInto
) -> torch.Tensor:
    """Return the elements at the selected positions of each dimension, as a CPU tensor.

    Args:
        entry: the tensor.
        selections: the selected positions of each dimension.
        read_into: fills the memory of tensors.
    """
    dtype: torch.dtype = getattr(torch, entry.dtype)
    out = torch.empty([len(each.positions) for each in selections], dtype=dtype, device="cpu")
    if not out.numel():
        return out
    if not selections:
        read_into([TensorLeaf(entry.name, dtype, entry.shape, (Fragment(Box((), ()), out),))])
        return out
    itemsize = DTYPES[entry.dtype].itemsize
    gaps = [GAP // (itemsize * math.prod(entry.shape[dim + 1 :])) for dim in range(len(selections))]
    covers = [cover_positions(s.positions, gap) for s, gap in zip(selections, gaps, strict=True)]
    rows, inner_covers = selections[0].positions, covers[1:]
    row_bytes = itemsize * math.prod(each.length for each in inner_covers)
    for batch in split_into_batches(rows, gaps[0], max(1, LARGEST_BATCH // row_bytes)):
        batch_covers = [cover_positions(rows[batch], gaps[0]), *inner_covers]
        lengths = [each.length for each in batch_covers]
        has_gaps = lengths != [*out[batch].shape]
        data = torch.empty(lengths, dtype=dtype, device="cpu") if has_gaps else out[batch]
        fragments = [
            Fragment(box, data[box_in_data.slices()])
            for box, box_in_data in boxes_of_covers(batch_covers)
        ]
        read_into([TensorLeaf(entry.name, dtype, entry.shape, tuple(fragments))])
        if has_gaps:
            for dim, each in enumerate(batch_covers):
                data = data[(slice(None),) * dim + (each.packed_index,)]
            out[batch] = data
    return out
