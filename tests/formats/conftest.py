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

from shardwise.testing import Gang
from tests.formats.dcp_checkpoints import FLAT, NESTED, save_with_dcp
from tests.formats.foreign_goldens import unpacked
from tests.multirank.models import WORLDS

PROGRAMS = Path(__file__).parent / "programs"
IMPORTED_LATE = "torch._dynamo,torch._inductor.compile_fx"
"""What DeepSpeed and Megatron-Core import when a first engine or model is made; for seconds."""
ON_TWO = (
    *("zero0-float32", "zero0-bfloat16", "zero1-float32", "zero1-bfloat16", "zero1-sgd"),
    *("zero1-bfloat16-optimizer", "zero2-bfloat16", "zero2-round-robin", "zero2-aligned"),
    *("zero2-elastic", "zero2-offload", "zero2-float16", "zero3-float32", "zero3-bfloat16"),
    "zero3-sub-groups",
)
# Experts first: DeepSpeed does not forget the ranks of a pipeline.
PARALLEL = ("experts-zero1", "experts-zero2-bfloat16", "pipeline-zero1", "pipeline-bfloat16")
CONVERTED = ("zero1-bfloat16", "zero2-float16", "zero3-sub-groups")
LEGACY = (
    *("float32", "bfloat16", "distributed", "distributed-bfloat16", "interleaved", "untied"),
    *("experts", "experts-distributed"),
)
ON_FOUR = ("zero1-bfloat16-optimizer", "zero2-bfloat16", "zero3-sub-groups")


class Checkpoints:
    """Where the checkpoint of a case is, and what its framework had when it wrote it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def place(self, case: str, ranks: int = 2) -> Path:
        return self._directory / str(ranks) / case

    def expected(self, case: str, ranks: int = 2) -> dict[str, Any]:
        path = self._directory / str(ranks) / f"{case}.expected.pt"
        held: dict[str, Any] = torch.load(path, weights_only=True)
        return held


def run(program: str, *args: str, ranks: int = 0) -> None:
    """Run a program, on so many ranks if any, and wait for it."""
    launch = [str(PROGRAMS / "forked.py"), str(ranks), IMPORTED_LATE]
    command = [sys.executable, *(launch if ranks else []), str(PROGRAMS / program), *args]
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


GOLDEN_OR_LIVE = ("golden", pytest.param("live", marks=pytest.mark.long))
"""Checkpoints of DeepSpeed 0.19.8 that are kept, or those that the installed version writes."""


def require_deepspeed() -> None:
    """Skip tests that run DeepSpeed, if it is not installed."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed: pip install '.[frameworks]'")


@pytest.fixture(scope="session", params=GOLDEN_OR_LIVE)
def checkpoints(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoints:
    """All cases on two ranks, some on four, some converted to universal checkpoints.

    The golden ones are what `make_checkpoints` made once: `tests/compat/foreign/deepspeed.tar.xz`.
    """
    directory = tmp_path_factory.mktemp("deepspeed")
    if request.param == "golden":
        return Checkpoints(unpacked("deepspeed", directory) / "deepspeed")
    require_deepspeed()
    make_checkpoints(directory)
    return Checkpoints(directory)


def make_checkpoints(directory: Path) -> None:
    """Have DeepSpeed write the checkpoints of the fixture `checkpoints`."""
    for ranks, cases in ((2, ON_TWO), (4, ON_FOUR)):
        place = directory / str(ranks)
        place.mkdir()
        run("train_deepspeed.py", str(place), *cases, ranks=ranks)
    run("to_universal.py", str(directory / "2"), *CONVERTED)


@pytest.fixture(scope="session", params=GOLDEN_OR_LIVE)
def parallel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pipelines of two stages, and experts on two ranks, twice each: on four ranks."""
    directory = tmp_path_factory.mktemp("deepspeed-parallel")
    if request.param == "golden":
        return unpacked("deepspeed_parallel", directory) / "deepspeed-parallel"
    require_deepspeed()
    run("parallel_deepspeed.py", str(directory), *PARALLEL, ranks=4)
    return directory


@pytest.fixture(scope="session")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Legacy checkpoints of Megatron-LM, of models that Megatron-Core trained: on four ranks.

    What it had is by `<parameter>|<key>`: the weight, its master (`param`), optimizer state. Of the
    cases `llama` and `experts` there is `<case>.logits.pt` too: logits, and those after it was gone
    on with.
    """
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("Megatron-Core is not installed: pip install '.[frameworks]'")
    directory = tmp_path_factory.mktemp("megatron")
    (directory / "4").mkdir()
    run("train_megatron.py", str(directory / "4"), *LEGACY, "llama", ranks=4)
    return Checkpoints(directory)


@pytest.fixture(scope="session")
def dcp_saved(gang: Gang, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of torch's DCP for each parallelism, of the same training."""
    root = tmp_path_factory.mktemp("dcp")
    for world in (2, 4):
        kinds = [kind for kind in (*NESTED, *FLAT, "pipeline") if WORLDS[kind] == world]
        gang.run(save_with_dcp, kinds, str(root), world=world)
    return root
