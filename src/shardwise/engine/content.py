"""What a rank's data file holds: any range of its bytes, copied from where they lie in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shardwise.engine.memory import Memory, memory_of
from shardwise.layout import Box, boxes_of_range
from shardwise.manifest.datafile import DataFile
from shardwise.plan.section import Section
from shardwise.state.leaves import Fragment
from shardwise.store.store import Buffer


@dataclass(frozen=True, slots=True)
class Data:
    """The data section of a file.

    Attributes:
        memory: gives the memory of a fragment, by its number.
        devices: those on which some of it lies.
    """

    section: Section
    memory: Callable[[int], Memory]
    devices: frozenset[torch.device]

    def fill(self, low: int, high: int, out: Buffer, *, wait: bool = True) -> None:
        """Copy bytes `low:high` of the section to `out`; what lies outside of it is left alone.

        Args:
            wait: as for `Memory.read`.
        """
        start = self.section.start
        first = max(int(np.searchsorted(start, low, side="right")) - 1, 0)
        last = min(int(np.searchsorted(start, high, side="left")), len(self.section))
        bounds = start[first : last + 1].tolist()
        for i, at, end in zip(range(first, last), bounds, bounds[1:], strict=False):
            a, b = max(low, at), min(high, end)
            if a < b:
                self._copy_piece(i, (a - at, b - at), end - at, out[a - low : b - low], wait)

    def _copy_piece(
        self, i: int, part: tuple[int, int], nbytes: int, out: Buffer, wait: bool
    ) -> None:
        """Copy a part of the bytes of a piece, as it lies in the file, to `out`."""
        section = self.section
        memory = self.memory(section.fragment[i])
        offset, shape = section.offset[i], section.shape[i]
        if part == (0, nbytes):
            index = () if section.whole[i] else Box(offset, shape).slices()
            memory.read(index, out.view(memory.dtype).reshape(shape), wait=wait)
            return
        itemsize = memory.itemsize
        at = 0
        for box in boxes_of_range(shape, part[0] // itemsize, part[1] // itemsize):
            size = box.size * itemsize
            within = tuple(o + b for o, b in zip(offset, box.offset, strict=True))
            target = out[at : at + size].view(memory.dtype).reshape(box.shape)
            memory.read(Box(within, box.shape).slices(), target, wait=wait)
            at += size


@dataclass(frozen=True, slots=True)
class Content:
    """The file but for its checksums: data (and header and objects)."""

    layout: DataFile
    data: Data
    objects: bytes

    @property
    def devices(self) -> frozenset[torch.device]:
        """Those on which some of it lies."""
        return self.data.devices

    def fill(self, low: int, high: int, out: Buffer, *, wait: bool = True) -> None:
        """Copy bytes `low:high` of the file to `out`; `wait` is as for `Memory.read`."""
        layout = self.layout
        _copy_bytes(layout.header, 0, low, high, out)
        _copy_bytes(self.objects, layout.objects_at, low, high, out)
        self.data.fill(low - layout.data_at, high - layout.data_at, out, wait=wait)


def data_of(section: Section, fragments: Sequence[Fragment]) -> Data:
    """The data section of a file, out of the memory of the fragments that `section` counts."""
    devices = {fragments[i].data.device for i in section.fragment}
    return Data(
        section,
        lambda i: memory_of(fragments[i].data),
        frozenset(each for each in devices if each.type != "cpu"),
    )


def _copy_bytes(data: bytes, at: int, low: int, high: int, out: Buffer) -> None:
    a, b = max(low, at), min(high, at + len(data))
    if a < b:
        out[a - low : b - low] = np.frombuffer(data, np.uint8)[a - at : b - at]
