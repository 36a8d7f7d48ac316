"""A rank's share to its data file: copied, checksummed and written chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.engine.arena import Arena, aligned_buffer
from shardwise.engine.memory import Memory
from shardwise.layout import boxes_of_range
from shardwise.manifest.checksums import BLOCK, block_checksums, block_count, crc32
from shardwise.manifest.datafile import DataFile
from shardwise.store import Store, WritableFile
from shardwise.store.store import Buffer

IN_CACHE = 1 << 20


@dataclass(frozen=True, slots=True)
class PieceSource:
    """A piece to write: `shape` elements of `memory`, from `offset` on, at byte `start` of the
    data section of the file."""

    start: int
    nbytes: int
    memory: Memory
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Content:
    """The file but for its checksums: pieces (and header and objects) by their byte offsets."""

    layout: DataFile
    sources: Sequence[PieceSource]
    starts: npt.NDArray[np.int64]
    objects: bytes

    def fill(self, low: int, high: int, out: Buffer) -> None:
        """Copy bytes `low:high` of the file to `out`."""
        layout = self.layout
        _copy_bytes(layout.header, 0, low, high, out)
        _copy_bytes(self.objects, layout.objects_at, low, high, out)
        first = int(np.searchsorted(self.starts, low - layout.data_at, side="right")) - 1
        last = int(np.searchsorted(self.starts, high - layout.data_at, side="left"))
        for source in self.sources[max(first, 0) : last]:
            at = layout.data_at + source.start
            a, b = max(low, at), min(high, at + source.nbytes)
            if a < b:
                _copy_piece(source, a - at, b - at, out[a - low : b - low])


def write_data_file(
    store: Store,
    key: str,
    layout: DataFile,
    sources: Sequence[PieceSource],
    objects: bytes,
    arena: Arena,
) -> int:
    """Write a data file and make it durable.

    Every byte is copied once, into a buffer of the arena, and its checksum is taken while it is
    in the cache; several chunks are in flight.

    Args:
        sources: the pieces, by ascending start, end to end.
        objects: this rank's encoded objects; may be empty.

    Returns:
        CRC-32 of the file's checksums.
    """
    starts = np.array([source.start for source in sources], np.int64)
    content = _Content(layout, sources, starts, objects)
    table = np.zeros(block_count(layout.checksums_at), "<u4")
    # The last, unaligned part of the content is written together with the checksums after it.
    aligned = layout.checksums_at // store.alignment * store.alignment
    tail = aligned_buffer(_round_up(layout.size - aligned, store.alignment))
    file = store.create(key, layout.size)
    try:
        with ThreadPoolExecutor(arena.threads, "shardwise-write") as pool:
            chunks = range(0, layout.checksums_at, arena.chunk)
            target = _Target(file, store.alignment, arena, table)
            jobs = [pool.submit(_write_chunk, content, at, target) for at in chunks]
            try:
                for job in jobs:
                    job.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        content.fill(aligned, layout.checksums_at, tail)
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
    file: WritableFile
    alignment: int
    arena: Arena
    table: npt.NDArray[np.uint32]


def _write_chunk(content: _Content, low: int, target: _Target) -> None:
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


def _copy_bytes(data: bytes, at: int, low: int, high: int, out: Buffer) -> None:
    a, b = max(low, at), min(high, at + len(data))
    if a < b:
        out[a - low : b - low] = np.frombuffer(data, np.uint8)[a - at : b - at]


def _copy_piece(source: PieceSource, low: int, high: int, out: Buffer) -> None:
    """Copy bytes `low:high` of a piece, as it lies in the file, to `out`."""
    memory, itemsize = source.memory, source.memory.itemsize
    if low == 0 and high == source.nbytes:
        _copy_box(memory, source.offset, source.shape, out)
        return
    at = 0
    for box in boxes_of_range(source.shape, low // itemsize, high // itemsize):
        nbytes = box.size * itemsize
        offset = tuple(o + b for o, b in zip(source.offset, box.offset, strict=True))
        _copy_box(memory, offset, box.shape, out[at : at + nbytes])
        at += nbytes


def _copy_box(memory: Memory, offset: tuple[int, ...], shape: tuple[int, ...], out: Buffer) -> None:
    index = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
    memory.read(index, out.view(memory.dtype).reshape(shape))


def _round_up(n: int, to: int) -> int:
    return -(-n // to) * to
