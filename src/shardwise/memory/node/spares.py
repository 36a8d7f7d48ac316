"""Memory that an agent has taken for what it keeps for others, and takes again for the next."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from shardwise.memory.home import Run

SPARE = ".spare"


def spare(run: Run, path: Path) -> None:
    """Have a file, which is no longer needed, wait where free slots do."""
    path.rename(run.free / f"{secrets.token_hex(8)}{SPARE}")


def spares(run: Run) -> list[tuple[int, Path]]:
    """Those that wait, and the bytes of each, ascending."""
    found = []
    with suppress(FileNotFoundError), os.scandir(run.free) as entries:
        for entry in entries:
            if entry.name.endswith(SPARE):
                with suppress(FileNotFoundError):
                    found.append((entry.stat(follow_symlinks=False).st_size, Path(entry.path)))
    return sorted(found)


def take_spare(run: Run, size: int, to: Path) -> None:
    """Move one to where a file of so many bytes is made: one that is as large, or the largest.

    Nothing if there is none, or something is there already.
    """
    waiting = spares(run)
    large = [path for nbytes, path in waiting if nbytes >= size]
    small = [path for nbytes, path in reversed(waiting) if nbytes < size]
    for path in (*large, *small):
        if to.exists():
            return
        with suppress(FileNotFoundError):  # it was removed with all of the run
            path.rename(to)


def trim_spares(run: Run, most: int) -> None:
    """Give the memory of all but so many back; the largest stay."""
    waiting = spares(run)
    for _, path in waiting[: max(0, len(waiting) - most)]:
        path.unlink(missing_ok=True)
