"""Checkpoints that the frameworks themselves wrote, made once for all tests."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.formats.dcp_checkpoints import FLAT, NESTED, save_with_dcp
from tests.formats.foreign_goldens import unpacked
from tests.multirank.models import WORLDS
from tests.tools.gang import Gang

PROGRAMS = Path(__file__).parent / "programs"
IMPORTED_LATE = "torch._dynamo,torch._inductor.compile_fx"
"""The slow imports of DeepSpeed and Megatron-Core when they make their first engine or model."""
ON_TWO = (
    *("zero0-float32", "zero0-bfloat16", "zero1-float32", "zero1-bfloat16", "zero1-sgd"),
    *("zero1-bfloat16-optimizer", "zero2-bfloat16", "zero2-round-robin", "zero2-aligned"),
    *("zero2-elastic", "zero2-offload", "zero2-float16", "zero3-float32", "zero3-bfloat16"),
    "zero3-sub-groups",
)
# Experts come first, because DeepSpeed keeps the ranks of an earlier pipeline.
PARALLEL = (
    *("experts-zero1", "experts-zero2-bfloat16", "pipeline-zero1", "pipeline-bfloat16"),
    "pipeline-bfloat16-zero0",
)
CONVERTED = ("zero1-bfloat16", "zero2-float16", "zero3-sub-groups")
ON_FOUR = ("zero1-bfloat16-optimizer", "zero2-bfloat16", "zero3-sub-groups")


class Checkpoints:
    """The checkpoints of all cases, and the values that their framework had when it wrote them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def place(self, case: str, ranks: int = 2) -> Path:
        return self._directory / str(ranks) / case

    def expected(self, case: str, ranks: int = 2) -> dict[str, Any]:
        path = self._directory / str(ranks) / f"{case}.expected.pt"
        held: dict[str, Any] = torch.load(path, weights_only=True)
        return held


def run(program: str, *args: str, ranks: int = 0) -> None:
    """Run a program and wait for it; with `ranks`, run it on this many ranks.

    Args:
        program: a file in `PROGRAMS`, or an absolute path.
    """
    launch = [str(PROGRAMS / "forked.py"), str(ranks), IMPORTED_LATE]
    command = [sys.executable, *(launch if ranks else []), str(PROGRAMS / program), *args]
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


GOLDEN_OR_LIVE = ("golden", pytest.param("live", marks=pytest.mark.long))
"""Archived checkpoints of DeepSpeed 0.19.8, or new ones of the installed version."""


def require_deepspeed() -> None:
    """Skip tests that run DeepSpeed, if it is not installed."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed: pip install '.[frameworks]'")


@pytest.fixture(scope="session", params=GOLDEN_OR_LIVE)
def checkpoints(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoints:
    """All cases on two ranks, some on four, and some converted to universal checkpoints.

    `make_checkpoints` made the golden ones: `tests/compat/foreign/deepspeed.tar.xz`.
    """
    directory = tmp_path_factory.mktemp("deepspeed")
    if request.param == "golden":
        return Checkpoints(unpacked("deepspeed", directory) / "deepspeed")
    require_deepspeed()
    make_checkpoints(directory)
    return Checkpoints(directory)


def make_checkpoints(directory: Path) -> None:
    """Let DeepSpeed write the checkpoints of the fixture `checkpoints`."""
    for ranks, cases in ((2, ON_TWO), (4, ON_FOUR)):
        place = directory / str(ranks)
        place.mkdir()
        run("train_deepspeed.py", str(place), *cases, ranks=ranks)
    run("to_universal.py", str(directory / "2"), *CONVERTED)


@pytest.fixture(scope="session", params=GOLDEN_OR_LIVE)
def parallel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of four ranks: pipelines of two stages, and experts on two ranks, each twice."""
    directory = tmp_path_factory.mktemp("deepspeed-parallel")
    if request.param == "golden":
        return unpacked("deepspeed_parallel", directory) / "deepspeed-parallel"
    require_deepspeed()
    run("parallel_deepspeed.py", str(directory), *PARALLEL, ranks=4)
    return directory


@pytest.fixture(scope="session")
def dcp_saved(gang: Gang, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DCP checkpoints of the same training, one for each parallelism."""
    root = tmp_path_factory.mktemp("dcp")
    for world in (2, 4):
        kinds = [kind for kind in (*NESTED, *FLAT, "pipeline") if WORLDS[kind] == world]
        gang.run(save_with_dcp, kinds, str(root), world=world)
    return root
