"""What staging asks of an accelerator: streams, events, and pages that it can copy to by itself."""

from __future__ import annotations

import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

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
