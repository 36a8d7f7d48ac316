"""The homes of nodes that are directories, whose agents end with the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.memory.scenario import end_agents


@pytest.fixture
def shm(place: Path) -> Iterator[Path]:
    """Where the homes of nodes are made."""
    directory = place / "shm"
    directory.mkdir()
    yield directory
    end_agents(directory)


@pytest.fixture
def root(place: Path) -> Path:
    """Where runs persist their checkpoints."""
    return place / "root"
