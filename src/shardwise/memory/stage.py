"""A rank's share to a slot: one copy, by several threads, and nothing else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from shardwise.engine.content import Content
from shardwise.store.store import Buffer

CHUNK = 8 << 20


def stage(content: Content, out: Buffer, pool: ThreadPoolExecutor) -> None:
    """Copy a file's content, all but its checksums, to `out`."""
    size = content.layout.checksums_at

    def copy(low: int) -> None:
        high = min(low + CHUNK, size)
        content.fill(low, high, out[low:high])

    for _ in pool.map(copy, range(0, size, CHUNK)):
        pass
