"""Streams of our own, on which a part leaves the devices while the training goes on on others.

A part is what the current streams hold when it is begun: ours follow those. Before it changes, the
current streams follow ours. No thread of the training waits for a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from shardwise.memory.trainer.device import Accelerator
from shardwise.memory.trainer.stage import Fill
from shardwise.store.store import Buffer


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
