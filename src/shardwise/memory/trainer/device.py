"""Copying from accelerators: streams, events, and page-locked memory.

A part of a snapshot is copied on streams of our own, while the training continues on others. Our
streams wait for the current streams when the part is begun, and the current streams wait for ours
before the state changes. So no thread of the training waits for a copy.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol

import torch

from shardwise.memory.trainer.copying import Fill
from shardwise.store.store import Buffer

_LOWEST = 0  # for torch, negative priorities are higher
_POLL = 0.0005
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all devices


class Accelerator(Protocol):
    """Streams, events and page-locked memory."""

    def new_stream(self, device: torch.device) -> torch.Stream:
        """Create a stream with the lowest priority."""
        ...

    def current_stream(self, device: torch.device) -> torch.Stream:
        """Return the current stream of this thread on a device."""
        ...

    def set_stream(self, stream: torch.Stream) -> None:
        """Make a stream the current one of this thread on its device."""
        ...

    def mark(self, stream: torch.Stream) -> torch.Event:
        """Record an event that happens when all work queued on the stream so far is done."""
        ...

    def follow(self, stream: torch.Stream, event: torch.Event) -> None:
        """Make later work on a stream wait for an event, without blocking this thread."""
        ...

    def wait(self, event: torch.Event) -> None:
        """Block this thread until an event has happened."""
        ...

    def lock_pages(self, address: int, nbytes: int, device: torch.device) -> bool:
        """Page-lock memory of this process. Warn and return False if that fails."""
        ...

    def unlock_pages(self, address: int, device: torch.device) -> None:
        """Unlock the memory that was page-locked at this address."""
        ...


class TorchAccelerator:
    """The accelerator of torch. Not initialized before a tensor on it is copied."""

    def new_stream(self, device: torch.device) -> torch.Stream:
        """Create a stream with the lowest priority, which in CUDA is that of the default stream.

        Priorities apply to kernels (which gather non-contiguous tensors), not to copies.
        """
        return torch.Stream(device, priority=_LOWEST)

    def current_stream(self, device: torch.device) -> torch.Stream:
        """Return the current stream of this thread on a device."""
        return torch.accelerator.current_stream(device)

    def set_stream(self, stream: torch.Stream) -> None:
        """Make a stream the current one of this thread on its device."""
        torch.accelerator.set_stream(stream)

    def mark(self, stream: torch.Stream) -> torch.Event:
        """Record an event that happens when all work queued on the stream so far is done."""
        return stream.record_event()

    def follow(self, stream: torch.Stream, event: torch.Event) -> None:
        """Make later work on a stream wait for an event, without blocking this thread."""
        stream.wait_event(event)

    def wait(self, event: torch.Event) -> None:
        """Block this thread until an event has happened. Polls: `synchronize` would use a core."""
        while not event.query():
            time.sleep(_POLL)

    def lock_pages(self, address: int, nbytes: int, device: torch.device) -> bool:
        """Page-lock memory of this process. Warn and return False if that fails."""
        why = f"torch does not support it for {device.type}"
        if device.type == "cuda":
            why = _cuda(device, "cudaHostRegister", address, nbytes, _PORTABLE)
        if why:
            warnings.warn(
                f"{nbytes:,} bytes for snapshots could not be page-locked ({why}): copies from "
                f"{device} take several times as long; see ulimit -l, and whether the directory "
                "of Memory(dir=…) is a memory file system",
                RuntimeWarning,
                stacklevel=2,
            )
        return not why

    def unlock_pages(self, address: int, device: torch.device) -> None:
        """Unlock the memory that was page-locked at this address."""
        _cuda(device, "cudaHostUnregister", address)


def _cuda(device: torch.device, name: str, *args: int) -> str:
    """Call the CUDA runtime, and return the error, or "".

    The runtime remembers the last error of each thread, and raises it at the next launch. So the
    call runs in a thread of its own. That thread selects the device first: otherwise it would
    create a context on another one.
    """

    def call() -> str:
        torch.cuda.set_device(device)
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = getattr(runtime, name)(*args)
        return "" if int(code) == 0 else str(runtime.cudaGetErrorString(code))

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()


class Source(Protocol):
    """Bytes, some of which may be on devices."""

    @property
    def devices(self) -> frozenset[torch.device]:
        """The devices on which some of the bytes are."""
        ...

    def fill(self, low: int, high: int, out: Buffer, *, wait: bool = True) -> None:
        """Copy bytes `low:high` to `out`. Without `wait`, the copies are only queued on streams."""
        ...


class Streams:
    """Our streams: one for each device that holds data of a part. Without such devices, a no-op.

    Only one part is copied at a time.

    Args:
        accelerator: provides the streams.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._all: dict[torch.device, torch.Stream] = {}
        self._used: dict[torch.device, torch.Stream] = {}
        self._marks: dict[torch.device, torch.Event] = {}

    def begin(self, devices: Iterable[torch.device]) -> None:
        """Begin a part: copy what the devices hold once their current streams reach this point."""
        self._marks = {}
        self._used = {}
        for device in devices:
            if device not in self._all:
                self._all[device] = self._accelerator.new_stream(device)
            stream = self._used[device] = self._all[device]
            now = self._accelerator.mark(self._accelerator.current_stream(device))
            self._accelerator.follow(stream, now)

    def are_used(self) -> bool:
        """Whether the current part has data on any device."""
        return bool(self._used)

    def fill(self, source: Source, *, wait: bool) -> Fill:
        """Return the `fill` of a source, running on these streams.

        Args:
            source: the data to copy.
            wait: block each call until its bytes are copied. Otherwise they are copied once
                `Streams.wait` returns, and must not change until then.
        """
        if not source.devices:
            return source.fill

        def copy(low: int, high: int, out: Buffer) -> None:
            with self._as_current():
                source.fill(low, high, out, wait=wait)

        return copy

    def mark(self) -> None:
        """Record that all copies of the part are queued."""
        with self._as_current():
            self._marks = {
                device: self._accelerator.mark(stream) for device, stream in self._used.items()
            }

    def wait(self) -> None:
        """Wait until the copies before the last `mark` are done."""
        for event in self._marks.values():
            self._accelerator.wait(event)

    def fence(self) -> None:
        """Make later work on this thread's current streams wait for these copies."""
        for device, event in self._marks.items():
            self._accelerator.follow(self._accelerator.current_stream(device), event)

    def lock(self, address: int, nbytes: int) -> bool:
        """Page-lock memory that devices copy to, and return whether that succeeded."""
        return self._accelerator.lock_pages(address, nbytes, next(iter(self._all)))

    def unlock(self, address: int) -> None:
        """Unlock what was locked from this address on."""
        self._accelerator.unlock_pages(address, next(iter(self._all)))

    @contextmanager
    def _as_current(self) -> Iterator[None]:
        """Make our streams the current ones of this thread.

        That also selects a device that is in use. Otherwise the thread would create a context on
        the first device.
        """
        accelerator = self._accelerator
        before = [accelerator.current_stream(device) for device in self._used]
        try:
            for stream in self._used.values():
                accelerator.set_stream(stream)
            yield
        finally:
            for stream in before:
                accelerator.set_stream(stream)
