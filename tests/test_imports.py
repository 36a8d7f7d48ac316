"""What `sw.save`, `sw.load` and `sw.open` import beyond torch: the first call waits for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys, torch, torch.distributed

state = {"model": torch.nn.Linear(2, 2), "w": torch.ones(4), "step": 3}
before = set(sys.modules)
import shardwise as sw

if sys.argv[1] == "functions":
    sw.save(sys.argv[2], state)
    sw.load(sys.argv[2], state)
    sw.open(sys.argv[2])["w"]
else:
    with sw.Checkpointer(sys.argv[2], memory=None) as checkpointer:
        checkpointer.restore(state)
        checkpointer.save(3, state)
print(*sorted(set(sys.modules) - before))
"""
EXTERNAL = {"cython_runtime", "isal", "msgspec", "numpy", "shardwise"}


@pytest.mark.parametrize("front", ["functions", "Checkpointer"])
def test_no_slow_module_is_imported(front: str, tmp_path: Path) -> None:
    """torch's DTensor, FSDP and pipelines, sympy and dynamo take 1.3 s, our readers 0.2 s."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, front, str(tmp_path / "checkpoint")],
        stdout=subprocess.PIPE,
        encoding="utf-8",
        check=True,
    )
    names = done.stdout.split()
    assert "shardwise.kernel.api" in names
    packages = {name.partition(".")[0] for name in names if not name.startswith("_")}
    assert packages - sys.stdlib_module_names <= EXTERNAL
    small = {
        "shardwise.parts.formats",
        "shardwise.parts.formats.steps",
    }  # the step may be in the path
    assert not [name for name in {*names} - small if name.startswith("shardwise.parts.formats")]


FOREIGN_SCRIPT = """
import sys, torch
import shardwise as sw

torch.save({"model": {"w": torch.ones(4)}}, sys.argv[1])
sw.open(sys.argv[1])["model.w"]
print(*sys.modules)
"""


def test_a_foreign_checkpoint_needs_few_readers(tmp_path: Path) -> None:
    """Neither those of formats with other names of files, nor the language of specifications."""
    done = subprocess.run(
        [sys.executable, "-c", FOREIGN_SCRIPT, str(tmp_path / "last.pt")],
        stdout=subprocess.PIPE,
        encoding="utf-8",
        check=True,
    )
    names = done.stdout.split()
    assert "shardwise.parts.formats.readers.torch_save" in names
    others = ("readers.deepspeed", "readers.megatron", "readers.fsdp_ranks", "language")
    unwanted = tuple(f"shardwise.parts.formats.{other}" for other in others)
    assert not [name for name in names if name.startswith(unwanted)]
