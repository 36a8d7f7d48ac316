"""A rank's data file: the source of its bytes, and the loop that writes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from shardwise.engine.buffers import Arena, aligned_buffer
from shardwise.engine.tensors import Memory, memory_of
from shardwise.layout import Box, boxes_of_range
from shardwise.manifest.checksums import BLOCK, block_checksums, block_count, crc32
from shardwise.manifest.datafile import DataFile
from shardwise.plan.section import Section
from shardwise.state.leaves import Fragment
from shardwise.store import Store, WritableFile
from shardwise.store.store import Buffer

IN_CACHE = 1 << 20


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


def write_data_file(store: Store, key: str, content: Content, arena: Arena) -> int:
    """Write a data file and make it durable.

    Every byte is copied once, into a buffer, and both its checksum and what is written come from
    that copy: another thread may change the tensors meanwhile. Several chunks are in flight.

    Returns:
        CRC-32 of the file's checksums.
    """
    layout = content.layout
    table = np.zeros(block_count(layout.checksums_at), "<u4")
    # The last, unaligned part of the content is written together with the checksums after it.
    aligned = layout.checksums_at // store.alignment * store.alignment
    tail = aligned_buffer(_round_up(layout.size - aligned, store.alignment))
    file = store.create(key, layout.size)
    try:
        with ThreadPoolExecutor(arena.threads, "shardwise-write") as pool:
            chunks = range(0, layout.checksums_at, arena.chunk)
            target = _Target(file, store.alignment, arena, table, tail)
            jobs = [pool.submit(_write_chunk, content, at, target) for at in chunks]
            try:
                for job in jobs:
                    job.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        encoded = table.view(np.uint8)
        at = layout.checksums_at - aligned
        tail[at : at + len(encoded)] = encoded
        file.write_at(aligned, tail)
        file.commit()
    finally:
        file.close()
    return crc32(encoded)


@dataclass(frozen=True, slots=True)
class _Target:
    """Where chunks go: the file, the checksums of its blocks, and its last, unaligned bytes."""

    file: WritableFile
    alignment: int
    arena: Arena
    table: npt.NDArray[np.uint32]
    tail: Buffer


def _write_chunk(content: Content, low: int, target: _Target) -> None:
    high = min(low + target.arena.chunk, content.layout.checksums_at)
    with target.arena.buffer() as buffer:
        for at in range(low, high, IN_CACHE):
            stop = min(at + IN_CACHE, high)
            part = buffer[at - low : stop - low]
            content.fill(at, stop, part)
            sums = block_checksums(part)
            target.table[at // BLOCK : at // BLOCK + len(sums)] = sums
        aligned = (high - low) // target.alignment * target.alignment
        if aligned:
            target.file.write_at(low, buffer[:aligned])
        rest = high - low - aligned  # of the last chunk alone: others are as long as the arena's
        target.tail[:rest] = buffer[aligned : aligned + rest]


def _round_up(n: int, to: int) -> int:
    return -(-n // to) * to
