"""`shardwise export`."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist

import shardwise as sw
from tests.cli.conftest import Run
from tests.commands import app
from tests.tools.gang import Gang


@pytest.fixture
def step(root: Path) -> Path:
    return root / "step-00000200"


def test_a_model_is_exported(run: Run, step: Path, tmp_path: Path) -> None:
    ran = run("export", step, tmp_path / "hf", "--dtype", "bfloat16")
    assert ran.status == 0, ran.err
    assert ran.out.endswith(f"✓ {tmp_path / 'hf'}  1 file\n")
    found = safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors")
    saved = sw.open(step).tensors()
    below = {name: t for name, t in saved.items() if name.startswith("model.")}
    assert {f"model.{name}" for name in found} == below.keys() - {"model.head.weight"}
    assert "– left out: head.weight: tied to model.embed.weight" in ran.out
    for name, tensor in found.items():
        wanted = below[f"model.{name}"][...]
        wanted = wanted.bfloat16() if wanted.is_floating_point() else wanted
        assert tensor.dtype == wanted.dtype
        assert (tensor == wanted).all()


def test_a_checkpoint_is_converted_and_goes_on(run: Run, step: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    sizes = ("--max-file", "1K")
    ran = run("export", step, new, "--to", "native", "--json", *sizes)
    assert ran.status == 0, ran.err
    assert ran.document["path"] == str(new)
    assert ran.document["files"] == len(list(new.glob("*.safetensors")))
    assert set(sw.open(new)) == set(sw.open(step))
    assert run("verify", new).status == 0
    assert run("export", step.parent, tmp_path / "of", "--to=native", "--step=200").status == 0
    assert run("diff", tmp_path / "of", new).status == 0
    ran = run("export", step, new, "--to", "native")
    assert (ran.status, "not empty" in ran.err) == (2, True)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--max-file", "much"), "expected a size, for example 500M"),
        (("--max-file", "0"), "at least 1"),
        (("--dtype", "bf16"), "bfloat16"),
        (("--to", "gguf"), "hf, dcp"),
        (("--only", "x"), "nothing to write"),
    ],
)
def test_wrong_use_is_said(
    run: Run, step: Path, tmp_path: Path, options: tuple[str, str], says: str
) -> None:
    ran = run("export", step, tmp_path / "new", "--to", "native", *options)
    assert (ran.status, says in ran.err) == (2, True), ran.err


def export_as_rank(*args: str) -> str:
    """Run the command in a process with the environment of torchrun; return what it prints."""
    dist.destroy_process_group()
    printed = io.StringIO()
    with redirect_stdout(printed), pytest.raises(SystemExit) as ended:
        app(["export", *args])
    assert ended.value.code == 0
    return printed.getvalue()


def test_ranks_share_the_work(gang: Gang, step: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    printed = gang.run(export_as_rank, "--to=native", str(step), str(new), "--max-file=1K", world=2)
    assert sum("✓" in each for each in printed) == 1
    assert sw.open(new).verify().bytes_checked > 0


@pytest.mark.long  # the test above runs the command with the environment that torchrun sets
@pytest.mark.ranks
def test_torchrun_shares_the_work(step: Path, tmp_path: Path) -> None:
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "shardwise"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            *command,
            "export",
            "--to=native",
            str(step),
            str(tmp_path / "new"),
            "--max-file=1K",
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("✓") == 1
    assert sw.open(tmp_path / "new").verify().bytes_checked > 0


def test_a_specification_is_followed(run: Run, tmp_path: Path) -> None:
    for rank in range(2):
        torch.save({"w": torch.full((2, 3), float(rank))}, tmp_path / f"{rank}.pt")
    text = tmp_path / "mine.spec"
    text.write_text("ranks r\nlet n\nw -> model.w.{n} [(r a) b]\n")
    options = ("--spec", text, "--files", "{r}.pt", "--let", "n=5")
    ran = run("export", tmp_path, tmp_path / "hf", *options)
    assert ran.status == 0, ran.err
    found = safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors")
    assert found["w.5"].tolist() == [[0] * 3] * 2 + [[1] * 3] * 2
    assert run("export", tmp_path, tmp_path / "x", "--files", "{r}.pt").status == 2
    assert run("export", tmp_path, tmp_path / "x", *options[:-1], "n=five").status == 2
