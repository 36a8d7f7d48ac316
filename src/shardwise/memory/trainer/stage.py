"""Bytes of a file to a slot: one copy, by several threads, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

from shardwise.store.store import Buffer

BUCKET = 8 << 20
Fill = Callable[[int, int, Buffer], None]
"""`fill(low, high, out)` copies these bytes of a file to `out`."""


def stage(fill: Fill, low: int, high: int, out: Buffer, pool: ThreadPoolExecutor) -> None:
    """Copy bytes `low:high` of a file to where they belong in `out`, which has room for all."""

    def copy(at: int) -> None:
        stop = min(at + BUCKET, high)
        fill(at, stop, out[at:stop])

    starts = range(low, high, BUCKET)
    try:
        jobs = [pool.submit(copy, at) for at in starts]
    except RuntimeError:  # the process is ending, and gives threads no more work
        for at in starts:
            copy(at)
        return
    try:
        for job in jobs:
            job.result()
    finally:  # when this returns, nothing is copied to `out` any more
        for job in jobs:
            job.cancel()
        wait(jobs)
