"""What the commands say of checkpoints that are not ours."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import shardwise as sw
from tests.cli.conftest import Run


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    state = {"model": {"w": torch.arange(12.0).reshape(3, 4)}, "epoch": 3}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


def test_it_is_inspected(run: Run, foreign: Path) -> None:
    ran = run("inspect", foreign)
    assert ran.status == 0, ran.err
    assert "format" in ran.out
    assert "DCP" in ran.out
    ran = run("inspect", foreign, "--json")
    assert [(each["name"], each["shape"]) for each in ran.document["tensors"]] == [
        ("model.w", [3, 4])
    ]


def test_it_is_compared_with_what_it_became(run: Run, foreign: Path, tmp_path: Path) -> None:
    assert run("export", foreign, tmp_path / "ours", "--to", "native").status == 0
    ran = run("diff", foreign, tmp_path / "ours")
    assert (ran.status, ran.out) == (0, "✓ the same; 1 tensor compared\n"), ran.err
    data = next(foreign.glob("*.distcp"))
    content = bytearray(data.read_bytes())
    at = content.index(torch.tensor([5.0]).numpy().tobytes())
    content[at + 3] ^= 1
    data.write_bytes(content)
    ran = run("diff", foreign, tmp_path / "ours")
    assert ran.status == 1
    assert "model.w" in ran.out


def test_archives_in_it_are_verified(run: Run, foreign: Path) -> None:
    ran = run("verify", foreign)
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.startswith(f"✓ {foreign}")
    assert "1 file" in ran.out
    (data,) = foreign.glob("*.distcp")
    content = bytearray(data.read_bytes())
    at = content.index(torch.tensor([5.0]).numpy().tobytes())
    content[at] ^= 1
    data.write_bytes(content)
    ran = run("verify", foreign, "--json")
    assert (ran.status, ran.document["intact"]) == (1, False)
    (damage,) = ran.document["checkpoints"][0]["damage"]
    assert (damage["file"], damage["tensors"]) == (data.name, ["model.w"])
    assert damage["start"] <= at < damage["stop"] == damage["start"] + 48


def test_what_has_no_checksums_is_told(run: Run, tmp_path: Path) -> None:
    safetensors.torch.save_file({"v": torch.ones(2)}, tmp_path / "model.safetensors")
    ran = run("verify", tmp_path)
    assert (ran.status, "no checksums" in ran.err) == (2, True)
    assert ran.out == f"? {tmp_path}  8 B not checked, without checksums\n"
    ran = run("verify", tmp_path, "--json")
    (verdict,) = ran.document["checkpoints"]
    assert (ran.status, ran.document["intact"], verdict["intact"]) == (2, None, None)
    assert (verdict["bytes"], verdict["unchecked"]) == (0, 8)


def test_what_has_checksums_in_part_is_told(run: Run, tmp_path: Path) -> None:
    """The Trainer writes weights without checksums, and an optimizer with them."""
    safetensors.torch.save_file({"v": torch.ones(2)}, tmp_path / "model.safetensors")
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    ran = run("verify", tmp_path)
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.startswith(f"✓ {tmp_path}")
    assert ran.out.endswith("in 1 file; 8 B not checked, without checksums\n")
    ran = run("verify", tmp_path, "--json")
    (verdict,) = ran.document["checkpoints"]
    assert (ran.status, verdict["intact"], verdict["unchecked"]) == (0, True, 8)
    assert verdict["bytes"] > 0


def test_of_several_one_is_chosen(run: Run, foreign: Path, tmp_path: Path) -> None:
    safetensors.torch.save_file({"v": torch.ones(2)}, foreign / "model.safetensors")
    ran = run("export", foreign, tmp_path / "ours", "--to", "native")
    assert (ran.status, "--format dcp" in ran.err) == (2, True), ran.err
    ran = run("inspect", foreign, "--format", "hf", "--json")
    assert [each["name"] for each in ran.document["tensors"]] == ["model.v"]
    assert (
        run("export", foreign, tmp_path / "ours", "--to", "native", "--format", "dcp").status == 0
    )
    assert list(sw.open(tmp_path / "ours").tensors()) == ["model.w"]
    ran = run("verify", foreign)
    assert (ran.status, "choose one by --format dcp; keys: dcp or hf" in ran.err) == (2, True)
    assert run("verify", foreign, "--format", "dcp").status == 0
    assert run("verify", foreign, "--format", "hf").status == 2  # it has no checksums
    ran = run("diff", foreign, foreign)
    assert (ran.status, "--format-a dcp or --format-b dcp; keys" in ran.err) == (2, True)
    ran = run("diff", foreign, foreign, "--format-a", "dcp", "--format-b", "hf", "--json")
    assert (ran.document["only_in_a"], ran.document["only_in_b"]) == (
        ["model.w", "epoch"],
        ["model.v"],
    )


def test_an_unknown_directory_is_no_checkpoint(run: Run, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert run("inspect", tmp_path).status == 2
