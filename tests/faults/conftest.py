"""A directory in which syncs cost nothing, because fault sweeps sync thousands of times."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")


@pytest.fixture
def place() -> Iterator[Path]:
    """An empty directory, in memory if the system has a memory file system."""
    where = MEMORY if MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(dir=where, prefix="shardwise-faults-") as folder:
        yield Path(folder)
