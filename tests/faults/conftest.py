"""A directory in which syncs cost nothing, because fault sweeps sync thousands of times."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")
ENOUGH = 256 << 20  # bytes; containers have 64 MiB


@pytest.fixture
def place() -> Iterator[Path]:
    """An empty directory, in memory if the system has a memory file system with enough room."""
    has_room = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= ENOUGH
    where = MEMORY if has_room else None
    with tempfile.TemporaryDirectory(dir=where, prefix="shardwise-faults-") as folder:
        yield Path(folder)
