"""A place whose syncs cost nothing: the sweeps make thousands of them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")


@pytest.fixture
def place() -> Iterator[Path]:
    """An empty directory, in memory where the system has such."""
    where = MEMORY if MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(dir=where, prefix="shardwise-faults-") as folder:
        yield Path(folder)
