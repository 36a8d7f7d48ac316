"""A rank's share to its data file: copied, checksummed and written chunk by chunk."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.engine.arena import Arena, aligned_buffer
from shardwise.engine.content import Content
from shardwise.manifest.checksums import BLOCK, block_checksums, block_count, crc32
from shardwise.store import Store, WritableFile
from shardwise.store.store import Buffer

IN_CACHE = 1 << 20


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
