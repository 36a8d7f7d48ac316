"""What staging asks of an accelerator: streams, events, and pages that it can copy to by itself."""

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

_LOWEST = 0  # torch's numbers: negative ones come first
_POLL = 0.0005
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all devices


class Accelerator(Protocol):
    """Streams, events and page-locked memory."""

    def new_stream(self, device: torch.device) -> torch.Stream:
        """A stream of our own, of the lowest priority."""
        ...

    def current_stream(self, device: torch.device) -> torch.Stream:
        """The one that this thread's work on a device goes to."""
        ...

    def set_stream(self, stream: torch.Stream) -> None:
        """Have this thread's work on the stream's device go to it."""
        ...

    def mark(self, stream: torch.Stream) -> torch.Event:
        """When all that was put on a stream until now is done."""
        ...

    def follow(self, stream: torch.Stream, event: torch.Event) -> None:
        """Have all that is put on a stream from now on wait for an event; this thread does not."""
        ...

    def wait(self, event: torch.Event) -> None:
        """Have this thread wait for an event."""
        ...

    def lock_pages(self, address: int, nbytes: int, device: torch.device) -> bool:
        """Page-lock memory of this process; False, and a warning, where that cannot be."""
        ...

    def unlock_pages(self, address: int, device: torch.device) -> None:
        """Unlock what was page-locked from this address on."""
        ...


class TorchAccelerator:
    """The accelerator that torch has; not touched before a tensor on it is to be copied."""

    def new_stream(self, device: torch.device) -> torch.Stream:
        """A stream of our own, of the lowest priority: that of the default stream, in CUDA.

        Priorities are of kernels (those that gather what is not contiguous), not of copies.
        """
        return torch.Stream(device, priority=_LOWEST)

    def current_stream(self, device: torch.device) -> torch.Stream:
        """The one that this thread's work on a device goes to."""
        return torch.accelerator.current_stream(device)

    def set_stream(self, stream: torch.Stream) -> None:
        """Have this thread's work on the stream's device go to it."""
        torch.accelerator.set_stream(stream)

    def mark(self, stream: torch.Stream) -> torch.Event:
        """When all that was put on a stream until now is done."""
        return stream.record_event()

    def follow(self, stream: torch.Stream, event: torch.Event) -> None:
        """Have all that is put on a stream from now on wait for an event; this thread does not."""
        stream.wait_event(event)

    def wait(self, event: torch.Event) -> None:
        """Have this thread wait for an event; by looking, as `synchronize` takes a whole core."""
        while not event.query():
            time.sleep(_POLL)

    def lock_pages(self, address: int, nbytes: int, device: torch.device) -> bool:
        """Page-lock memory of this process; False, and a warning, where that cannot be."""
        why = f"torch has no way to do it for {device.type}"
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
        """Unlock what was page-locked from this address on."""
        _cuda(device, "cudaHostUnregister", address)


def _cuda(device: torch.device, name: str, *args: int) -> str:
    """Call the CUDA runtime; what failed, or "".

    It remembers the last failure for each thread, and raises it at whatever is next launched
    there. So the call has a thread of its own, which is first put on the device: another one would
    be given a context.
    """

    def call() -> str:
        torch.cuda.set_device(device)
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = getattr(runtime, name)(*args)
        return "" if int(code) == 0 else str(runtime.cudaGetErrorString(code))

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()


class Source(Protocol):
    """Bytes, some of which lie on devices."""

    @property
    def devices(self) -> frozenset[torch.device]:
        """Those on which some lie."""
        ...

    def fill(self, low: int, high: int, out: Buffer, *, wait: bool = True) -> None:
        """Copy bytes `low:high` to `out`; without `wait`, as soon as current streams get there."""
        ...


class Streams:
    """One for each device that a part lies on; without any, there is nothing to it.

    Only one part is under way at a time.

    Args:
        accelerator: has the streams.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._all: dict[torch.device, torch.Stream] = {}
        self._used: dict[torch.device, torch.Stream] = {}
        self._marks: dict[torch.device, torch.Event] = {}

    def begin(self, devices: Iterable[torch.device]) -> None:
        """From now on copy what these devices hold when their current streams have come to here."""
        self._marks = {}
        self._used = {}
        for device in devices:
            if device not in self._all:
                self._all[device] = self._accelerator.new_stream(device)
            stream = self._used[device] = self._all[device]
            now = self._accelerator.mark(self._accelerator.current_stream(device))
            self._accelerator.follow(stream, now)

    def are_used(self) -> bool:
        """Whether the part that is under way lies on any device."""
        return bool(self._used)

    def fill(self, source: Source, *, wait: bool) -> Fill:
        """The source's `fill` on these streams.

        Args:
            wait: until it is copied; otherwise it is when `wait` returns, and what is copied must
                be kept until then.
        """
        if not source.devices:
            return source.fill

        def copy(low: int, high: int, out: Buffer) -> None:
            with self._as_current():
                source.fill(low, high, out, wait=wait)

        return copy

    def mark(self) -> None:
        """All that is to be waited for is on the streams."""
        with self._as_current():
            self._marks = {
                device: self._accelerator.mark(stream) for device, stream in self._used.items()
            }

    def wait(self) -> None:
        """Wait until all that was marked is copied."""
        for event in self._marks.values():
            self._accelerator.wait(event)

    def fence(self) -> None:
        """Have what this thread puts on its current streams from now on wait for the same."""
        for device, event in self._marks.items():
            self._accelerator.follow(self._accelerator.current_stream(device), event)

    def lock(self, address: int, nbytes: int) -> bool:
        """Page-lock memory that a part is copied to; whether that could be."""
        return self._accelerator.lock_pages(address, nbytes, next(iter(self._all)))

    def unlock(self, address: int) -> None:
        """Unlock what was locked from this address on."""
        self._accelerator.unlock_pages(address, next(iter(self._all)))

    @contextmanager
    def _as_current(self) -> Iterator[None]:
        """Also puts this thread on a device of its own: on the first one, where it would start
        otherwise, whatever it does would make a context."""
        accelerator = self._accelerator
        before = [accelerator.current_stream(device) for device in self._used]
        try:
            for stream in self._used.values():
                accelerator.set_stream(stream)
            yield
        finally:
            for stream in before:
                accelerator.set_stream(stream)
