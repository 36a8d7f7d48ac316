"""Boxes of local memory to and from buffers: on the host, on a device, with or without a cast."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from shardwise.errors import StateError
from shardwise.state.leaves import as_carrier, host_array, reach

Array = npt.NDArray[np.generic]
Slices = tuple[slice, ...]


class Memory(Protocol):
    """A strided piece of local memory that holds one fragment; `device` is None on the host."""

    itemsize: int
    dtype: np.dtype[np.generic]
    device: torch.device | None

    def read(self, index: Slices, out: Array, *, wait: bool = True) -> None:
        """Copy a box of it to `out`, which has the box's shape and this `dtype`.

        Args:
            wait: until it is copied; otherwise, where there is a device, it is when that has done
                what is on its current stream, and the memory and `out` must be kept until then.
        """
        ...

    def write(self, index: Slices, source: Array) -> None:
        """Copy `source` to a box of it."""
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
    """A fragment that is filled from another dtype, `saved`, as `Tensor.to` converts."""

    device: torch.device | None = None

    def __init__(self, data: torch.Tensor, saved: torch.dtype) -> None:
        self._data = data.detach()
        self._saved = saved
        carrier = as_carrier(torch.empty(0, dtype=saved, device="cpu"))
        self.dtype = carrier.numpy().dtype
        self.itemsize = carrier.element_size()

    def read(self, index: Slices, out: Array, *, wait: bool = True) -> None:
        """Saving does not cast."""
        raise TypeError("a casting fragment is only written to")

    def write(self, index: Slices, source: Array) -> None:
        """Convert `source` into a box."""
        values = torch.from_numpy(np.ascontiguousarray(source)).view(self._saved)
        self._data[index] = values.reshape(source.shape).to(self._data.device, self._data.dtype)


def check_memory(name: str, data: torch.Tensor) -> None:
    """Refuse a fragment that has no memory.

    Raises:
        StateError: it is on the meta device, or its storage was freed.
    """
    if data.is_meta:
        raise StateError(f"{name}: it is on the meta device, and has no values and no memory")
    if data.numel():
        needed = (data.storage_offset() + reach(data)) * data.element_size()
        if data.untyped_storage().nbytes() < needed:
            raise StateError(
                f"{name}: its storage was freed (a framework has put its values elsewhere, such "
                "as FSDP into shards): save or load what holds the values"
            )


def memory_of(data: torch.Tensor, saved: torch.dtype | None = None) -> Memory:
    """The memory of a fragment; `saved` is the dtype it is filled from, if that is another."""
    if saved is not None and saved != data.dtype:
        return CastingMemory(data, saved)
    return HostMemory(data) if data.device.type == "cpu" else DeviceMemory(data)
