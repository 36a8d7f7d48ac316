"""Tests that run on a CUDA device. Elsewhere they are collected and skipped."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.tools.agents import end_agents

# Without it, cuBLAS may compute other bits when kernels run on several streams.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="needs a CUDA device: torch.accelerator finds none")
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.accelerator)
            if not (torch.accelerator.is_available() and torch.cuda.is_available()):
                item.add_marker(skip)


@pytest.fixture
def cuda() -> torch.device:
    """The first device. The current stream is the default stream again after the test."""
    return torch.device("cuda", 0)


@pytest.fixture
def shm() -> Iterator[Path]:
    """A directory in memory for the homes of nodes, whose agents are ended afterwards."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="shardwise-cuda-") as directory:
        yield Path(directory)
        end_agents(Path(directory))
