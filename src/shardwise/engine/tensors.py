"""Local tensors: described for a plan, and copied to and from host buffers, box by box."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from shardwise.errors import StateError
from shardwise.layout import boxes_within
from shardwise.plan.load import Spans, Transfers
from shardwise.plan.tables import Description, Int, columns_of
from shardwise.state.leaves import Fragment, TensorLeaf, as_carrier, host_array, reach
from shardwise.store.store import Buffer

Array = npt.NDArray[np.generic]
Slices = tuple[slice, ...]


class Memory(Protocol):
    """The memory of one fragment, of any strides; `device` is None on the host."""

    itemsize: int
    dtype: np.dtype[np.generic]
    device: torch.device | None

    def read(self, index: Slices, out: Array, *, wait: bool = True) -> None:
        """Copy a box to `out`, which has the box's shape and this `dtype`.

        Args:
            wait: return when the box is copied. Otherwise a device copies on its current stream,
                and the memory and `out` must be kept until the stream has done so.
        """
        ...

    def write(self, index: Slices, source: Array) -> None:
        """Copy `source` to a box."""
        ...


class HostMemory:
    """A fragment in host memory."""

    device: torch.device | None = None

    def __init__(self, data: torch.Tensor) -> None:
        self._array = host_array(data)
        self.dtype = self._array.dtype
        self.itemsize = self.dtype.itemsize

    def read(self, index: Slices, out: Array, *, wait: bool = True) -> None:
        """Copy a box to `out`."""
        np.copyto(out, self._array[index])

    def write(self, index: Slices, source: Array) -> None:
        """Copy `source` to a box."""
        self._array[index] = source


class DeviceMemory:
    """A fragment in the memory of an accelerator."""

    def __init__(self, data: torch.Tensor) -> None:
        self._carrier = as_carrier(data)
        self.device: torch.device | None = data.device
        self.itemsize = data.element_size()
        self.dtype = torch.empty(0, dtype=self._carrier.dtype, device="cpu").numpy().dtype

    def read(self, index: Slices, out: Array, *, wait: bool = True) -> None:
        """Copy a box to `out`."""
        torch.from_numpy(out).copy_(self._carrier[index], non_blocking=not wait)

    def write(self, index: Slices, source: Array) -> None:
        """Copy `source` to a box."""
        self._carrier[index] = torch.from_numpy(np.ascontiguousarray(source)).to(
            self._carrier.device
        )


class CastingMemory:
    """A fragment that is filled with values of another dtype, `saved`, as `Tensor.to` converts."""

    device: torch.device | None = None

    def __init__(self, data: torch.Tensor, saved: torch.dtype) -> None:
        self._data = data.detach()
        self._saved = saved
        carrier = as_carrier(torch.empty(0, dtype=saved, device="cpu"))
        self.dtype = carrier.numpy().dtype
        self.itemsize = carrier.element_size()

    def read(self, index: Slices, out: Array, *, wait: bool = True) -> None:
        """Raise TypeError: saving does not cast."""
        raise TypeError("a casting fragment is only written to")

    def write(self, index: Slices, source: Array) -> None:
        """Convert `source` into a box."""
        values = torch.from_numpy(np.ascontiguousarray(source)).view(self._saved)
        self._data[index] = values.reshape(source.shape).to(self._data.device, self._data.dtype)


def check_memory(name: str, data: torch.Tensor) -> None:
    """Refuse a fragment without memory.

    Raises:
        StateError: it is on the meta device, or its storage was freed.
    """
    if data.is_meta:
        raise StateError(
            f"{name}: the tensor is on the meta device and has no values; materialize it first"
        )
    if data.numel():
        needed = (data.storage_offset() + reach(data)) * data.element_size()
        if data.untyped_storage().nbytes() < needed:
            raise StateError(
                f"{name}: the tensor's storage was freed (a framework moved its values elsewhere; "
                "FSDP, for example, into shards): save or load the object that has the values"
            )


def memory_of(data: torch.Tensor, saved: torch.dtype | None = None) -> Memory:
    """Return the memory of a fragment; `saved` is the dtype of the values to fill it with."""
    if saved is not None and saved != data.dtype:
        return CastingMemory(data, saved)
    return HostMemory(data) if data.device.type == "cpu" else DeviceMemory(data)


def describe(
    leaves: Sequence[TensorLeaf], per_rank: Sequence[str]
) -> tuple[Description, tuple[Fragment, ...]]:
    """Return a description of leaves for the plan, and the fragments that it numbers, in its order.

    Of several leaves with one identity only the first is listed, and the others are tied to it.

    Raises:
        StateError: two leaves have the same name, or one has no memory.
    """
    listed, ties = untied(leaves)
    fragments: list[Fragment] = []
    owner: list[int] = []
    seen: set[str] = {name for name, _ in ties}
    for i, leaf in enumerate(listed):
        if leaf.name in seen:
            raise StateError(f"{leaf.name!r}: two values of the state have this name")
        seen.add(leaf.name)
        for fragment in leaf.fragments:
            check_memory(leaf.name, fragment.data)
            fragments.append(fragment)
            owner.append(i)
    dims = max((len(leaf.shape) for leaf in listed), default=0)
    description = Description(
        tuple(leaf.name for leaf in listed),
        tuple(str(leaf.dtype).removeprefix("torch.") for leaf in listed),
        tuple(leaf.shape for leaf in listed),
        np.array(owner, np.int64),
        columns_of([fragment.box.offset for fragment in fragments], dims, 0),
        columns_of([fragment.box.shape for fragment in fragments], dims, 1),
        tuple(ties),
        tuple(per_rank),
    )
    return description, tuple(fragments)


def untied(leaves: Sequence[TensorLeaf]) -> tuple[list[TensorLeaf], list[tuple[str, str]]]:
    """Return the leaves of different memory, and pairs of a further name and a first name."""
    first: dict[object, str] = {}
    listed: list[TensorLeaf] = []
    ties: list[tuple[str, str]] = []
    for leaf in leaves:
        known = None if leaf.identity is None else first.setdefault(leaf.identity, leaf.name)
        if known is None or known == leaf.name:
            listed.append(leaf)
        else:
            ties.append((leaf.name, known))
    return listed, ties


@dataclass(frozen=True, slots=True)
class Wanted:
    """A fragment to fill: the name of its tensor, its offset in the global tensor, its memory."""

    name: str
    offset: tuple[int, ...]
    memory: Memory


class Copies:
    """Copies from spans of files, held in buffers, to fragments.

    The columns of the plan are kept as lists, which are faster to read row by row.

    Args:
        strides: the strides of all pieces, `(n, D)`, in elements.
    """

    def __init__(
        self, transfers: Transfers, spans: Spans, strides: Int, wanted: Sequence[Wanted]
    ) -> None:
        self._wanted = wanted
        self._first = spans.first.tolist()
        self._span_low = spans.low.tolist()
        self._rows = spans.rows.tolist()
        self._fragment = transfers.fragment.tolist()
        self._low = transfers.low.tolist()
        self._high = transfers.high.tolist()
        self._shape = transfers.shape.tolist()
        self._offset = transfers.offset.tolist()
        self._stride = strides[transfers.piece].tolist()

    def names(self, span: int) -> str:
        """Return the names of the tensors in a span, for an error message."""
        rows = self._rows[self._first[span] : self._first[span + 1]]
        names = list(dict.fromkeys(self._wanted[self._fragment[row]].name for row in rows))
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return ", ".join(names[:3]) + more

    def copy(self, span: int, data: Buffer) -> None:
        """Copy everything in a span, whose bytes `data` begins with."""
        low = self._span_low[span]
        high = low + len(data)
        for row in self._rows[self._first[span] : self._first[span + 1]]:
            wanted = self._wanted[self._fragment[row]]
            ndim = len(wanted.offset)
            shape = tuple(self._shape[row][:ndim])
            start = [o - w for o, w in zip(self._offset[row], wanted.offset, strict=False)]
            memory = wanted.memory
            strides = tuple(s * memory.itemsize for s in self._stride[row][:ndim])
            at = self._low[row] - low
            if at >= 0 and self._high[row] <= high:
                _copy(data, at, strides, memory, start, shape)
                continue
            for part in boxes_within(shape, strides, memory.itemsize, -at, high - low - at):
                there = at + sum(o * s for o, s in zip(part.offset, strides, strict=True))
                into = [s + o for s, o in zip(start, part.offset, strict=True)]
                _copy(data, there, strides, memory, into, part.shape)


def _copy(
    data: Buffer,
    at: int,
    strides: tuple[int, ...],
    memory: Memory,
    start: list[int],
    shape: tuple[int, ...],
) -> None:
    source: npt.NDArray[np.generic] = np.ndarray(shape, memory.dtype, data, at, strides)
    memory.write(tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True)), source)
