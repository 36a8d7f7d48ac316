"""A training that fails and is started again: by torchrun, or in the same processes.

`make nvrx` installs NVIDIA's wrapper into `.venv-nvrx`; its test is skipped without.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

PROJECT = Path(__file__).parents[2]
NVRX_PYTHON = Path(os.environ.get("NVRX_PYTHON", PROJECT / ".venv-nvrx" / "bin" / "python"))
PROGRAM = Path(__file__).parent / "programs" / "restarting.py"


def free_port() -> int:
    with closing(socket.socket()) as server:
        server.bind(("localhost", 0))
        port: int = server.getsockname()[1]
        return port


def run(how: str, directory: Path) -> list[dict[str, Any]]:
    """Run the program on two ranks, and return what rank 0 recorded."""
    directory.mkdir()
    python = NVRX_PYTHON if how == "nvrx" else sys.executable
    environ = {
        **os.environ,
        "PYTHONPATH": str(PROJECT / "src"),
        "NVRX_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        *(str(python), "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--monitor-interval=0.1"),
        *(str(PROGRAM), how, str(directory)),
    ]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads(line) for line in (directory / "record.jsonl").read_text().splitlines()]


def steps_of(record: list[dict[str, Any]]) -> list[tuple[int, str]]:
    return [(line["step"], line["loss"]) for line in record if "step" in line]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str]]:
    steps = steps_of(run("nobody", tmp_path_factory.mktemp("restart") / "nobody"))
    assert [step for step, _ in steps] == [1, 2, 3, 4, 5, 6]
    return steps


@pytest.mark.long
@pytest.mark.parametrize(
    "how",
    [
        "function",
        "torchrun",
        pytest.param(
            "nvrx",
            marks=pytest.mark.skipif(
                not NVRX_PYTHON.exists(), reason="`make nvrx` installs what this test needs"
            ),
        ),
    ],
)
def test_the_next_attempt_restores_from_memory(
    how: str, uninterrupted: list[tuple[int, str]], tmp_path: Path
) -> None:
    record = run(how, tmp_path / how)
    assert steps_of(record) == uninterrupted
    assert {"source": "memory", "restored": 3} in record
    processes = {line["pid"] for line in record if "pid" in line}
    assert len(processes) == (2 if how == "torchrun" else 1)
