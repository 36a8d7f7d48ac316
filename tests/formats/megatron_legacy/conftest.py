"""Legacy checkpoints of Megatron-LM, of models that Megatron-Core trained; made once."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

PROGRAM = Path(__file__).parents[1] / "programs" / "train_megatron.py"
CASES = (
    *("float32", "bfloat16", "distributed", "distributed-bfloat16", "interleaved"),
    *("experts", "experts-distributed"),
)


class Checkpoints:
    """Where the checkpoint of a case is, and what Megatron-Core had when it was written."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def place(self, case: str) -> Path:
        return self._directory / case

    def expected(self, case: str) -> dict[str, Any]:
        """By `<parameter>|<key>`: its weight, its master (`param`), state of its optimizer."""
        path = self._directory / f"{case}.expected.pt"
        held: dict[str, Any] = torch.load(path, weights_only=True)
        return held


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """All cases, on four ranks."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("Megatron-Core is not installed: pip install '.[frameworks]'")
    directory = tmp_path_factory.mktemp("megatron")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    command = [sys.executable, *launch, str(PROGRAM), str(directory), *CASES]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return Checkpoints(directory)
