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
from shardwise.plan.tables import PieceTable
from shardwise.state.leaves import Fragment
from shardwise.store import Store, WritableFile
from shardwise.store.store import Buffer

IN_CACHE = 1 << 20


@dataclass(frozen=True, slots=True)
class FileSource:
    """A data file before it is written, without its checksums: any range of its bytes.

    Attributes:
        layout: where the header, the pieces and the objects lie in the file.
        objects: the encoded per-rank values.
        memory: gives the memory of a fragment, by its number in `pieces`.
        devices: the accelerators that have some of the fragments.
    """

    layout: DataFile
    pieces: PieceTable
    objects: bytes
    memory: Callable[[int], Memory]
    devices: frozenset[torch.device]

    @classmethod
    def of(
        cls,
        pieces: PieceTable,
        fragments: Sequence[Fragment],
        layout: DataFile | None = None,
        objects: bytes = b"",
    ) -> FileSource:
        """Return the source of a file with these pieces.

        Args:
            fragments: the fragments that `pieces` numbers.
            layout: the layout of the file; default: the data section alone.
        """
        if layout is None:
            end = int(pieces.start[-1])
            layout = DataFile(b"", 0, end, end, end)
        devices = {fragments[i].data.device for i in pieces.fragment}
        return cls(
            layout,
            pieces,
            objects,
            lambda i: memory_of(fragments[i].data),
            frozenset(each for each in devices if each.type != "cpu"),
        )

    def fill(self, low: int, high: int, out: Buffer, *, wait: bool = True) -> None:
        """Copy bytes `low:high` of the file to `out`; `wait` is as for `Memory.read`."""
        layout = self.layout
        _copy_bytes(layout.header, 0, low, high, out)
        _copy_bytes(self.objects, layout.objects_at, low, high, out)
        self._fill_pieces(low - layout.data_at, high - layout.data_at, out, wait)

    def _fill_pieces(self, low: int, high: int, out: Buffer, wait: bool) -> None:
        """Copy bytes `low:high` of the data section; leave bytes outside the section unchanged."""
        start = self.pieces.start
        first = max(int(np.searchsorted(start, low, side="right")) - 1, 0)
        last = min(int(np.searchsorted(start, high, side="left")), len(self.pieces))
        bounds = start[first : last + 1].tolist()
        for i, at, end in zip(range(first, last), bounds, bounds[1:], strict=False):
            a, b = max(low, at), min(high, end)
            if a < b:
                self._copy_piece(i, (a - at, b - at), end - at, out[a - low : b - low], wait)

    def _copy_piece(
        self, i: int, part: tuple[int, int], nbytes: int, out: Buffer, wait: bool
    ) -> None:
        """Copy a range of the bytes of piece `i`, which has `nbytes`, to `out`."""
        pieces = self.pieces
        memory = self.memory(pieces.fragment[i])
        offset, shape = pieces.offset[i], pieces.shape[i]
        if part == (0, nbytes):
            index = () if pieces.whole[i] else Box(offset, shape).slices()
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


def write_data_file(store: Store, key: str, source: FileSource, arena: Arena) -> int:
    """Write a data file and make it durable.

    Every byte is copied once, into a buffer. Both its checksum and the written bytes come from
    that copy, since another thread may change the tensors meanwhile. Several chunks are in flight.

    Returns:
        CRC-32 of the file's checksums.
    """
    layout = source.layout
    table = np.zeros(block_count(layout.checksums_at), "<u4")
    # The last, unaligned bytes before the checksums are written together with the checksums.
    aligned = layout.checksums_at // store.alignment * store.alignment
    tail = aligned_buffer(_round_up(layout.size - aligned, store.alignment))
    file = store.create(key, layout.size)
    try:
        with ThreadPoolExecutor(arena.threads, "shardwise-write") as pool:
            chunks = range(0, layout.checksums_at, arena.chunk)
            target = _Target(file, store.alignment, arena, table, tail)
            jobs = [pool.submit(_write_chunk, source, at, target) for at in chunks]
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


def _write_chunk(source: FileSource, low: int, target: _Target) -> None:
    high = min(low + target.arena.chunk, source.layout.checksums_at)
    with target.arena.buffer() as buffer:
        for at in range(low, high, IN_CACHE):
            stop = min(at + IN_CACHE, high)
            part = buffer[at - low : stop - low]
            source.fill(at, stop, part)
            sums = block_checksums(part)
            target.table[at // BLOCK : at // BLOCK + len(sums)] = sums
        aligned = (high - low) // target.alignment * target.alignment
        if aligned:
            target.file.write_at(low, buffer[:aligned])
        rest = high - low - aligned  # only of the last chunk: others are as long as the arena's
        target.tail[:rest] = buffer[aligned : aligned + rest]


def _copy_bytes(data: bytes, at: int, low: int, high: int, out: Buffer) -> None:
    a, b = max(low, at), min(high, at + len(data))
    if a < b:
        out[a - low : b - low] = np.frombuffer(data, np.uint8)[a - at : b - at]


def _round_up(n: int, to: int) -> int:
    return -(-n // to) * to
