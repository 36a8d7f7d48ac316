"""Copies from accelerators: streams, events, and page-locked memory.

A rank's part of a snapshot is copied on separate streams, while the training continues on other
streams. The copy streams wait for the training's streams when the copy begins. The training's
streams wait for the copy streams before the state changes. So no thread of the training waits for a
copy.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from shardwise.kernel.engine.write_file import FileSource
from shardwise.kernel.store.store import Buffer
from shardwise.parts.memory.times import DEVICE_PAUSE
from shardwise.parts.memory.trainer.copying import Fill

_LOWEST_PRIORITY = 0  # for torch, negative priorities are higher
_CUDA_HOST_REGISTER_PORTABLE = 1  # page-locked for all devices


class TorchAccelerator:
    """Streams, events and page-locked memory of torch's accelerator.

    The accelerator is not initialized before a tensor on it is copied.

    On CUDA devices, all streams and events are of the classes in `torch.cuda`, whose events can
    block a thread. These classes cannot be mixed with `torch.Stream` and `torch.Event`.
    """

    def new_stream(self, device: torch.device) -> torch.Stream:
        """Create a stream with the lowest priority, which the default stream of CUDA has too.

        The priority matters for the kernels that gather non-contiguous tensors, not for copies.
        """
        if device.type == "cuda":
            return torch.cuda.Stream(device, _LOWEST_PRIORITY)  # type: ignore[no-untyped-call]
        return torch.Stream(device, priority=_LOWEST_PRIORITY)

    def current_stream(self, device: torch.device) -> torch.Stream:
        """Return the current stream of this thread on a device."""
        if device.type == "cuda":
            return torch.cuda.current_stream(device)
        return torch.accelerator.current_stream(device)

    def set_stream(self, stream: torch.Stream) -> None:
        """Make a stream the current one of this thread on its device."""
        torch.accelerator.set_stream(stream)

    def record_event(self, stream: torch.Stream) -> torch.Event:
        """Record an event that happens when all work queued on the stream so far is done."""
        if not isinstance(stream, torch.cuda.Stream):
            return stream.record_event()
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait_event(self, stream: torch.Stream, event: torch.Event) -> None:
        """Make later work on a stream wait for an event, without blocking this thread."""
        stream.wait_event(event)

    def synchronize(self, event: torch.Event) -> None:
        """Block this thread until an event has happened, without keeping a core busy.

        `torch.Event` ignores `blocking=True`, so its `synchronize` would keep a core busy. This
        polls such events.
        """
        if isinstance(event, torch.cuda.Event):
            event.synchronize()
            return
        while not event.query():
            time.sleep(DEVICE_PAUSE)

    def lock_pages(self, address: int, nbytes: int, device: torch.device) -> bool:
        """Page-lock memory of this process. Warn and return False if that fails."""
        failure = f"torch does not support it for {device.type}"
        if device.type == "cuda":
            flags = _CUDA_HOST_REGISTER_PORTABLE
            failure = _call_cuda(device, "cudaHostRegister", address, nbytes, flags)
        if failure:
            warnings.warn(
                f"{nbytes:,} bytes for snapshots could not be page-locked ({failure}): copies from "
                f"{device} take several times as long; see ulimit -l, and whether the directory "
                "of Memory(dir=…) is a memory file system",
                RuntimeWarning,
                stacklevel=2,
            )
        return not failure

    def unlock_pages(self, address: int, device: torch.device) -> None:
        """Unlock the memory that was page-locked at this address."""
        _call_cuda(device, "cudaHostUnregister", address)


def _call_cuda(device: torch.device, function: str, *args: int) -> str:
    """Call a function of the CUDA runtime, and return the error, or "".

    The runtime remembers the last error of each thread, and raises it at the next launch. So the
    call runs in a new thread. The new thread selects the device first, because it would otherwise
    create a context on another device.
    """

    def call() -> str:
        torch.cuda.set_device(device)
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = getattr(runtime, function)(*args)
        return "" if int(code) == 0 else str(runtime.cudaGetErrorString(code))

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()


class CopyStreams:
    """The copy streams: one for each device that holds data of a copy. Host memory needs none.

    Only one copy is in progress at a time.

    Args:
        accelerator: provides the streams.
    """

    def __init__(self, accelerator: TorchAccelerator) -> None:
        self._accelerator = accelerator
        self._streams: dict[torch.device, torch.Stream] = {}
        self._used_streams: dict[torch.device, torch.Stream] = {}
        self._copy_events: dict[torch.device, torch.Event] = {}

    def begin(self, devices: Iterable[torch.device]) -> None:
        """Begin a copy. It starts after the work queued so far on the devices' current streams."""
        self._copy_events = {}
        self._used_streams = {}
        for device in devices:
            if device not in self._streams:
                self._streams[device] = self._accelerator.new_stream(device)
            stream = self._used_streams[device] = self._streams[device]
            current = self._accelerator.current_stream(device)
            self._accelerator.wait_event(stream, self._accelerator.record_event(current))

    def has_devices(self) -> bool:
        """Return whether any device holds data of the current copy."""
        return bool(self._used_streams)

    def make_fill(self, source: FileSource, *, wait: bool) -> Fill:
        """Return a function that copies ranges of a source on these streams.

        Args:
            source: the data to copy.
            wait: block each call until its bytes are copied. Otherwise they are copied once
                `wait_for_copies` returns, and must not change until then.
        """
        if not source.devices:
            return source.fill

        def copy(low: int, high: int, out: Buffer) -> None:
            with self._as_current():
                source.fill(low, high, out, wait=wait)

        return copy

    def record_copies(self) -> None:
        """Record that all copies are queued, so that `fence` and `wait_for_copies` include them."""
        with self._as_current():
            self._copy_events = {
                device: self._accelerator.record_event(stream)
                for device, stream in self._used_streams.items()
            }

    def wait_for_copies(self) -> None:
        """Block this thread until the recorded copies are done."""
        for event in self._copy_events.values():
            self._accelerator.synchronize(event)

    def fence(self) -> None:
        """Make later work on this thread's current streams wait for the recorded copies."""
        for device, event in self._copy_events.items():
            self._accelerator.wait_event(self._accelerator.current_stream(device), event)

    def lock_pages(self, address: int, nbytes: int) -> bool:
        """Page-lock memory that devices copy to, and return whether that succeeded."""
        return self._accelerator.lock_pages(address, nbytes, next(iter(self._streams)))

    def unlock_pages(self, address: int) -> None:
        """Unlock the memory that was page-locked at this address."""
        self._accelerator.unlock_pages(address, next(iter(self._streams)))

    @contextmanager
    def _as_current(self) -> Iterator[None]:
        """Make the copy streams the current ones of this thread while the block runs.

        This also selects a device that is in use. Otherwise the thread would create a context on
        the first device.
        """
        accelerator = self._accelerator
        previous = [accelerator.current_stream(device) for device in self._used_streams]
        try:
            for stream in self._used_streams.values():
                accelerator.set_stream(stream)
            yield
        finally:
            for stream in previous:
                accelerator.set_stream(stream)
