"""A training that fails and is started again: by torchrun, or in the same processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "programs" / "restarting.py"


def run(how: str, directory: Path) -> list[dict[str, Any]]:
    """Run the program on two ranks, and return what rank 0 recorded."""
    directory.mkdir()
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--monitor-interval=0.1"),
        *(str(PROGRAM), how, str(directory)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads(line) for line in (directory / "record.jsonl").read_text().splitlines()]


def steps_of(record: list[dict[str, Any]]) -> list[tuple[int, str]]:
    return [(line["step"], line["loss"]) for line in record if "step" in line]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str]]:
    steps = steps_of(run("nobody", tmp_path_factory.mktemp("restart") / "nobody"))
    assert [step for step, _ in steps] == [1, 2, 3, 4, 5, 6]
    return steps


@pytest.mark.parametrize("how", ["function", pytest.param("torchrun", marks=pytest.mark.long)])
def test_the_next_attempt_restores_from_memory(
    how: str, uninterrupted: list[tuple[int, str]], tmp_path: Path
) -> None:
    record = run(how, tmp_path / how)
    assert steps_of(record) == uninterrupted
    assert {"source": "memory", "restored": 3} in record
    processes = {line["pid"] for line in record if "pid" in line}
    assert len(processes) == (2 if how == "torchrun" else 1)
