"""Engines with DeepSpeed's own Muon: each way of ZeRO to keep its momentum loads all others."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from tests.formats.conftest import run
from tests.multirank.test_matrix import contents

pytestmark = [
    pytest.mark.timeout(300),  # the first test waits for all engines
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="DeepSpeed is not installed: pip install '.[frameworks]'",
    ),
]

# Trained on four ranks: the partitions of ZeRO 1 and 2 cut matrices. Name and case.
TRAINED = {"zero1": "zero1-muon", "bfloat16": "zero2-muon-bfloat16"}
# What goes on from them, on two, one after the other: name, case and source.
RESUMED = {
    "zero2": ("zero2-muon", "zero1"),
    "zero3": ("zero3-muon", "zero2"),
    "memory": ("zero3-muon-memory", "zero3"),
    "memory-again": ("zero3-muon-memory", "memory"),
    "zero0": ("zero0-muon", "memory-again"),
    "offload": ("zero2-muon-float32-offload", "zero0"),
    "zero1-again": ("zero1-muon", "offload"),
    "aligned": ("zero2-muon-aligned", "zero1-again"),
    "native": ("zero2-muon", "zero1-native"),
    "bfloat16-again": ("zero2-muon-bfloat16", "bfloat16"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of all runs."""
    root = tmp_path_factory.mktemp("muon")
    trained = [f"{name}:{case}" for name, case in TRAINED.items()]
    resumed = [":".join((name, *RESUMED[name])) for name in RESUMED]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_COMPILE_DISABLE", "1")  # Muon's kernels would take minutes
        run("live_deepspeed.py", str(root), *trained, "--", "2", str(root), *resumed, ranks=4)
    return root


def losses(root: Path, name: str) -> Any:
    return torch.load(root / f"{name}.expected.pt", weights_only=True)["losses"]


def origin(name: str) -> str:
    while name in RESUMED:
        name = RESUMED[name][1]
    return name.removesuffix("-native")


@pytest.mark.parametrize("name", RESUMED)
def test_it_goes_on_as_if_nothing_had_happened(runs: Path, name: str) -> None:
    before, after = contents(runs / origin(name)), contents(runs / name)
    momenta = [key for key in before if key.endswith(".momentum_buffer")]
    assert len(momenta) == 3
    assert after == before
    close = 1e-2 if "bfloat16" in name else 1e-5
    assert losses(runs, name) == pytest.approx(losses(runs, origin(name)), abs=close)


def test_the_momentum_is_what_deepspeed_saves(runs: Path) -> None:
    ours, native = sw.open(runs / "zero1"), sw.open(runs / "zero1-native")
    for name in ("embedding.weight", "first.weight", "second.weight"):
        key = f"optimizer.{name}.momentum_buffer"
        assert torch.equal(ours[key][...], native[key][...])
        assert ours[key][...].count_nonzero() > ours[key][...].numel() // 2
