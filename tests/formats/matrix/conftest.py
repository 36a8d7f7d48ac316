"""The matrix reads golden checkpoints. The tests of each format also read new ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.formats.conftest import Checkpoints
from tests.formats.foreign_goldens import unpacked


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Checkpoints of DeepSpeed on two and on four ranks."""
    directory = tmp_path_factory.mktemp("matrix-deepspeed")
    return Checkpoints(unpacked("deepspeed", directory) / "deepspeed")


@pytest.fixture(scope="session")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of DeepSpeed with pipelines and with experts."""
    directory = tmp_path_factory.mktemp("matrix-parallel")
    return unpacked("deepspeed_parallel", directory) / "deepspeed-parallel"
