"""Local tensors: describe them for a plan, and copy their boxes to and from host buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import add, attrgetter, mul
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import torch

from shardwise.kernel.boxes import boxes_within
from shardwise.kernel.boxes.box import BoolArray, IntArray, padded_rows
from shardwise.kernel.errors import StateError
from shardwise.kernel.plan.load import Ranges, Transfers, assign_transfers
from shardwise.kernel.state.local_state import TensorLeaf, memory_extent, view_for_numpy
from shardwise.kernel.store.store import Buffer

Array = npt.NDArray[np.generic]
Slices = tuple[slice, ...]

ELEMENTS_AT_ONCE = (1 << 15) - 1
"""The most elements on the host to copy with one call of torch. For more elements, torch would use
further threads, which compete with the training."""
JOINED_BYTES = 1 << 20
"""The most bytes to join on an accelerator, which limits the memory that this takes there."""
_COPIED_EXACTLY = frozenset(
    [torch.float32, torch.float64, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
)
"""Dtypes that `torch.cat` copies bit by bit on all devices. Others are viewed as integers first: a
copy could change the bits of a 16-bit NaN, or a bool that is neither 0 nor 1."""


class HostMemory:
    """A fragment in host memory, of the dtype of the saved values, with any strides.

    Attributes:
        itemsize: the size of an element, in bytes.
        dtype: the NumPy dtype of the buffers to copy from and to.
        device: the accelerator that holds the memory; None for host memory.
    """

    device: torch.device | None = None

    def __init__(self, data: torch.Tensor) -> None:
        self._array: Array = view_for_numpy(data).numpy()
        self.dtype = self._array.dtype
        self.itemsize = self.dtype.itemsize

    def read(self, index: Slices, out: Array, *, wait: bool = True) -> None:
        """Copy a box of the fragment to a host buffer.

        Args:
            index: the box, as slices of the fragment.
            out: a buffer with the shape of the box and this memory's `dtype`.
            wait: return when the box is copied. Otherwise an accelerator copies on its current
                stream, and the caller keeps the memory and `out` until the copy is complete.
        """
        np.copyto(out, self._array[index])

    def write(self, index: Slices, source: Array) -> None:
        """Copy a host buffer to a box of the fragment.

        Args:
            index: the box, as slices of the fragment.
            source: a buffer with the shape of the box and this memory's `dtype`.
        """
        self._array[index] = source

    def bytes_of(self, index: Slices) -> Buffer | None:
        """Return the bytes of a box, if they are one range of host memory.

        Args:
            index: the box, as slices of the fragment.
        """
        part = self._array[index] if index else self._array  # `[()]` would return a number
        return part.reshape(-1).view(np.uint8) if part.flags.c_contiguous else None


class TorchMemory:
    """A fragment that torch copies: on an accelerator, or of another dtype than the saved values.

    Its attributes and methods are those of `HostMemory`. All writes run on the stream that was the
    current one when this object was created, even if another thread writes.

    Args:
        data: the memory of the fragment.
        saved_dtype: for a load, the dtype of the values to write, which are converted as by
            `Tensor.to`. Default: the dtype of `data`.
    """

    def __init__(self, data: torch.Tensor, saved_dtype: torch.dtype | None = None) -> None:
        if saved_dtype is None or saved_dtype == data.dtype:
            self._data = view_for_numpy(data)
            self._saved_dtype = self._data.dtype
        else:
            self._data, self._saved_dtype = data.detach(), saved_dtype
        self._stream = _current_stream(data.device)
        self.device: torch.device | None = None if data.device.type == "cpu" else data.device
        example = view_for_numpy(torch.empty(0, dtype=self._saved_dtype, device="cpu"))
        self.dtype = example.numpy().dtype
        self.itemsize = example.element_size()

    def read(self, index: Slices, out: Array, *, wait: bool = True) -> None:
        """Copy a box to a host buffer. A save never converts."""
        torch.from_numpy(out).copy_(self._data[index], non_blocking=not wait)

    def write(self, index: Slices, source: Array) -> None:
        """Copy a host buffer to a box."""
        values = _tensor_of(source).view(self._saved_dtype).reshape(source.shape)
        with _as_current(self._stream):
            self._data[index] = values.to(self._data.device, self._data.dtype)

    def bytes_of(self, index: Slices) -> Buffer | None:
        """Return None: torch copies, and may convert."""
        return None


TensorMemory = HostMemory | TorchMemory
"""The memory of one fragment."""


class BatchCopier:
    """Copies contiguous tensors to a host buffer, many of them with one call of torch.

    The call releases the interpreter lock once. Small tensors on an accelerator are joined there
    first, so that many tensors are one transfer.

    Use it inside `torch.no_grad()`, and call `flush` after the last tensor.

    Args:
        out: the buffer.
        wait: as for `HostMemory.read`, where `flush` completes the copies.
    """

    def __init__(self, out: Buffer, *, wait: bool) -> None:
        self._out = torch.from_numpy(out)
        self._wait = wait
        self._batch: list[torch.Tensor] = []
        # What the tensors of the batch have in common, and how they are viewed.
        self._dtype: torch.dtype | None = None
        self._view_dtype: torch.dtype | None = None
        self._device: torch.device | None = None
        # Offsets in the buffer: of the batch, and the largest one that it can grow to.
        self._low = self._high = self._limit = 0

    def add(self, data: torch.Tensor, low: int, high: int) -> bool:
        """Copy a tensor to bytes `low:high` of the buffer, here or in a later call.

        Returns:
            Whether the tensor is copied. The caller copies it otherwise if it is not contiguous,
            or large and on the host, or if the target is not aligned to its type.
        """
        if not data.is_contiguous():
            return False
        if (
            data.dtype is not self._dtype
            or low != self._high
            or high > self._limit
            or data.device != self._device
        ):
            self.flush()
            if not self._begin_batch(data, low, high):
                return False
        if self._view_dtype is not None:
            data = data.view(self._view_dtype)
        self._batch.append(data.flatten())
        self._high = high
        return True

    def _begin_batch(self, data: torch.Tensor, low: int, high: int) -> bool:
        """Begin a batch whose first tensor this is; return False if it cannot be copied."""
        itemsize = data.element_size()
        is_aligned = (self._out.data_ptr() | low) % itemsize == 0
        limit = low + (ELEMENTS_AT_ONCE * itemsize if data.is_cpu else JOINED_BYTES)
        if not is_aligned or (data.is_cpu and high > limit):
            return False
        self._dtype, self._device = data.dtype, data.device
        self._view_dtype = None if self._dtype in _COPIED_EXACTLY else view_for_numpy(data).dtype
        self._low, self._limit = low, limit
        return True

    def flush(self) -> None:
        """Copy the tensors that were added and not yet copied."""
        batch, self._batch, self._dtype = self._batch, [], None
        if not batch:
            return
        out = self._out[self._low : self._high].view(batch[0].dtype)
        if batch[0].is_cpu:
            torch.cat(batch, out=out)
            return
        if len(batch) > 1:
            with suppress(torch.OutOfMemoryError):  # then they are copied one by one
                # The allocator reuses this memory on the current stream only: after the transfer.
                batch = [torch.cat(batch)]
        targets = torch.split(out, [*map(len, batch)])
        for target, source in zip(targets, batch, strict=True):
            target.copy_(source, non_blocking=not self._wait)


def _current_stream(device: torch.device) -> torch.Stream | None:
    """Return the current stream of this thread on an accelerator; None for the host."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)


@contextmanager
def _as_current(stream: torch.Stream | None) -> Iterator[None]:
    """Make a stream the current one of this thread while the block runs.

    `with stream:` would not do: no two threads can use the same stream in this way.
    """
    if stream is None:
        yield
        return
    with torch.accelerator.device_index(stream.device.index):
        previous = torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(previous)


def _tensor_of(source: Array) -> torch.Tensor:
    """Return a tensor of a contiguous array's memory, which is only read.

    torch warns of arrays that are not writable, such as mapped files. So the function claims that
    the memory is writable; nobody writes to it.
    """
    array = np.ascontiguousarray(source)
    if not array.flags.writeable:
        memory = {**array.__array_interface__, "data": (array.ctypes.data, False)}
        array = np.asarray(SimpleNamespace(__array_interface__=memory, keeps_alive=array))
    return torch.from_numpy(array)


def accelerators_of(tensors: Iterable[torch.Tensor]) -> frozenset[torch.device]:
    """Return the accelerators that hold some of the tensors."""
    return frozenset(each.device for each in tensors if not each.is_cpu)


def wait_for_current_streams(devices: Iterable[torch.device]) -> None:
    """Block this thread until the work is done that is queued on its current streams.

    Other threads, whose current streams differ, then read the results of this work.
    """
    for device in devices:
        torch.accelerator.current_stream(device).synchronize()


def check_memory(name: str, data: torch.Tensor) -> None:
    """Refuse a tensor without memory.

    Args:
        name: the name of the tensor, for the error message.
        data: the local tensor.

    Raises:
        StateError: the tensor is on the meta device, or its storage was freed.
    """
    if data.is_meta:
        raise StateError(
            f"{name}: the tensor is on the meta device and has no values; materialize it first"
        )
    if data.numel():
        needed = (data.storage_offset() + memory_extent(data)) * data.element_size()
        if data.untyped_storage().nbytes() < needed:
            raise StateError(
                f"{name}: the tensor's storage was freed, because a framework keeps the values "
                "elsewhere (FSDP, for example, in shards): save or load the object that has them"
            )


def memory_of(data: torch.Tensor, saved_dtype: torch.dtype | None = None) -> TensorMemory:
    """Return the memory of a fragment.

    Args:
        data: the local tensor.
        saved_dtype: for a load, the dtype of the values to write. Default: the tensor's dtype.
    """
    is_plain = data.device.type == "cpu" and saved_dtype in (None, data.dtype)
    return HostMemory(data) if is_plain else TorchMemory(data, saved_dtype)


def split_ties(
    leaves: Sequence[TensorLeaf],
) -> tuple[list[TensorLeaf], list[tuple[str, str]]]:
    """Separate tied leaves, which share memory with an earlier leaf, from all other leaves.

    Returns:
        The leaves that are not tied, and for each tied leaf its name and the earlier leaf's name.
    """
    first_name: dict[object, str] = {}
    listed: list[TensorLeaf] = []
    ties: list[tuple[str, str]] = []
    for leaf in leaves:
        untied = leaf.tie_key is None
        first = leaf.name if untied else first_name.setdefault(leaf.tie_key, leaf.name)
        if first == leaf.name:
            listed.append(leaf)
        else:
            ties.append((leaf.name, first))
    return listed, ties


class SpanCopier:
    """Copies boxes from spans of files, which are in host buffers, to fragments.

    The columns of the plan are kept as lists, which are faster to read row by row.

    Args:
        transfers: the boxes to copy.
        spans: the spans.
        strides: the strides of all runs of pieces, `(n, D)`, in elements.
        leaves: the tensors whose fragments `transfers` refers to.
        memory: the memory of each of these fragments.
    """

    def __init__(
        self,
        transfers: Transfers,
        spans: Ranges,
        strides: IntArray,
        leaves: Sequence[TensorLeaf],
        memory: Sequence[TensorMemory],
    ) -> None:
        self._memory, self._names, self._ndims = memory, [], []
        offsets = []
        for leaf in leaves:
            for fragment in leaf.fragments:
                offsets.append(fragment.box.offset)
                self._names.append(leaf.name)
                self._ndims.append(len(fragment.box.offset))
        fragment_offsets = padded_rows(offsets, transfers.offset.shape[1], 0)
        itemsizes = np.array([*map(attrgetter("itemsize"), memory)], np.int64)
        start = transfers.offset - fragment_offsets[transfers.fragment]
        stride = strides[transfers.run] * itemsizes[transfers.fragment, np.newaxis]
        first, rows = assign_transfers(transfers, spans)
        self._first = first.tolist()
        self._span_low, self._span_high = spans.low.tolist(), spans.high.tolist()
        self._rows = rows.tolist()
        self._fragment = transfers.fragment.tolist()
        self._low = transfers.low.tolist()
        self._high = transfers.high.tolist()
        self._shape = transfers.shape.tolist()
        self._start = start.tolist()
        self._stop = (start + transfers.shape).tolist()
        self._stride = stride.tolist()
        self._is_dense = _is_dense(transfers.shape, stride, itemsizes[transfers.fragment]).tolist()
        self._only_row = _rows_that_contain(spans, transfers, first, rows)
        self._bytes_of_row: dict[int, Buffer | None] = {}  # of large boxes, as far as asked for

    def tensor_names(self, span: int) -> str:
        """Return the names of the tensors in a span, for an error message."""
        rows = self._rows[self._first[span] : self._first[span + 1]]
        names = list(dict.fromkeys(self._names[self._fragment[row]] for row in rows))
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return ", ".join(names[:3]) + more

    def target(self, span: int) -> Buffer | None:
        """Return the memory of a span, if its bytes are one range of one host tensor's memory.

        They can be read straight into this memory, or copied at once.
        """
        row = self._only_row[span]
        memory = None if row < 0 else self._bytes_of(row)
        if memory is None:
            return None
        low = self._low[row]
        return memory[self._span_low[span] - low : self._span_high[span] - low]

    def _bytes_of(self, row: int) -> Buffer | None:
        """Return the memory of a box, if it is one range of bytes, as in the file; else None."""
        if row not in self._bytes_of_row:
            found = None
            if self._is_dense[row]:
                ndim = self._ndims[self._fragment[row]]
                index = tuple(map(slice, self._start[row][:ndim], self._stop[row][:ndim]))
                found = self._memory[self._fragment[row]].bytes_of(index)
            self._bytes_of_row[row] = found
        return self._bytes_of_row[row]

    def copy(self, span: int, data: Buffer) -> None:
        """Copy all boxes that have bytes in a span.

        Args:
            span: the index of the span.
            data: the bytes of the span, possibly followed by some further bytes of the file.
        """
        low = self._span_low[span]
        high = low + len(data)
        for row in self._rows[self._first[span] : self._first[span + 1]]:
            fragment = self._fragment[row]
            memory, ndim = self._memory[fragment], self._ndims[fragment]
            shape, strides = tuple(self._shape[row][:ndim]), tuple(self._stride[row][:ndim])
            start, stop = self._start[row][:ndim], self._stop[row][:ndim]
            position = self._low[row] - low
            if position >= 0 and self._high[row] <= high:
                source: Array = np.ndarray(shape, memory.dtype, data, position, strides)
                memory.write(tuple(map(slice, start, stop)), source)
                continue
            # Only a part of the box is in this span.
            target = self._bytes_of(row)
            if target is not None:
                first, last = max(0, -position), min(len(target), high - low - position)
                target[first:last] = data[position + first : position + last]
                continue
            limits = -position, high - low - position
            for part in boxes_within(shape, strides, memory.itemsize, *limits):
                begin = position + sum(map(mul, part.offset, strides))
                source = np.ndarray(part.shape, memory.dtype, data, begin, strides)
                corner = tuple(map(add, start, part.offset))
                memory.write(tuple(map(slice, corner, map(add, corner, part.shape))), source)


def _is_dense(shape: IntArray, stride: IntArray, itemsize: IntArray) -> BoolArray:
    """Return whether the elements of each box lie in the file as in a contiguous tensor, `(n,)`.

    Args:
        shape, stride: the shape of each box, and its strides in the file in bytes, `(n, D)`.
        itemsize: the size of an element of each box, in bytes, `(n,)`.
    """
    elements = np.cumprod(shape[:, ::-1], axis=1)[:, ::-1] // np.maximum(shape, 1)
    found: BoolArray = ((stride == elements * itemsize[:, np.newaxis]) | (shape == 1)).all(axis=1)
    return found


def _rows_that_contain(
    spans: Ranges, transfers: Transfers, first: IntArray, rows: IntArray
) -> list[int]:
    """Return the transfer that contains each span, if no other needs bytes of the span; else -1.

    Args:
        first, rows: the result of `assign_transfers`.
    """
    found = np.full(len(spans), -1, np.int64)
    single = np.flatnonzero(np.diff(first) == 1)
    row = rows[first[single]]
    contains = (transfers.low[row] <= spans.low[single]) & (
        spans.high[single] <= transfers.high[row]
    )
    found[single[contains]] = row[contains]
    result: list[int] = found.tolist()
    return result
