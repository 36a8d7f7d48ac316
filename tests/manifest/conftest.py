"""A small checkpoint whose manifest tests may replace."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.manifest.documents import save_small


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that no test changes."""
    place = tmp_path_factory.mktemp("small") / "checkpoint"
    save_small(place)
    return place


@pytest.fixture
def small(pristine: Path, tmp_path: Path) -> Path:
    """A copy of `pristine` that the test may change."""
    return Path(shutil.copytree(pristine, tmp_path / "checkpoint"))
