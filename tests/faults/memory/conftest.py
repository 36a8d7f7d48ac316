"""Directories for the homes of nodes. Their agents end with the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.agents import end_agents


@pytest.fixture
def shm(place: Path) -> Iterator[Path]:
    """The directory that contains the homes of nodes."""
    directory = place / "shm"
    directory.mkdir()
    yield directory
    end_agents(directory)


@pytest.fixture
def root(place: Path) -> Path:
    """The root to which runs persist their checkpoints."""
    return place / "root"
