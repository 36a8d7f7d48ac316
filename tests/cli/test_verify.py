"""`shardwise verify`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardwise as sw
from tests.cli.conftest import Run

BLOCK = 64 * 1024


def data_file(checkpoint: Path) -> Path:
    return next(checkpoint.glob("*.safetensors"))


def flip(path: Path, *places: int) -> None:
    data = bytearray(path.read_bytes())
    for at in places:
        data[at] ^= 0x40
    path.write_bytes(data)


@pytest.fixture
def step(root: Path) -> Path:
    return root / "step-00000200"


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Two tensors of forty blocks each, and one of a few bytes."""
    state = {"first": torch.zeros(40 * BLOCK // 4), "second": torch.zeros(40 * BLOCK // 4)}
    sw.save(tmp_path / "large", {**state, "last": torch.zeros(3), "own": sw.PerRank(1)}, step=5)
    return tmp_path / "large"


def test_an_intact_checkpoint_passes(run: Run, step: Path) -> None:
    ran = run("verify", step)
    assert ran.out.startswith(f"✓ {step}")
    assert (ran.err, ran.status) == ("", 0)
    assert run("verify", step, "--json").document == {
        "path": str(step),
        "intact": True,
        "unfinished": [],
        "removed": [],
        "checkpoints": [
            {
                "path": str(step),
                "step": 200,
                "intact": True,
                "bytes": data_file(step).stat().st_size,
                "files": 1,
                "compared": 0,
                "unchecked": 0,
                "damage": [],
            }
        ],
    }


def test_every_flipped_byte_is_found(run: Run, step: Path) -> None:
    path = data_file(step)
    whole = path.read_bytes()
    for at in {*range(0, len(whole), 997), len(whole) - 1}:
        flip(path, at)
        assert run("verify", step, "--json").status == 1, at
        path.write_bytes(whole)
    assert run("verify", step).status == 0


def test_damage_is_told_by_file_range_and_tensors(run: Run, large: Path) -> None:
    path = data_file(large)
    data_at = sw.open(large).layout.files[0].entry.data_at
    second = data_at + 40 * BLOCK
    flip(path, BLOCK + 5, 2 * BLOCK, second + 3 * BLOCK)
    ran = run("verify", large, "--json")
    (checkpoint,) = ran.document["checkpoints"]
    assert ran.status == 1
    assert (checkpoint["intact"], checkpoint["step"]) == (False, 5)
    start = (second + 3 * BLOCK) // BLOCK * BLOCK
    assert [
        (each["file"], each["start"], each["stop"], each["tensors"])
        for each in checkpoint["damage"]
    ] == [
        (path.name, BLOCK, 3 * BLOCK, ["first"]),
        (path.name, start, start + BLOCK, ["second"]),
    ]
    ran = run("verify", large)
    assert f"{path.name}, bytes {BLOCK}:{3 * BLOCK}" in ran.out
    assert "1 tensor: first" in ran.out
    advice = "load another, or copy the files again"
    assert ran.err == f"shardwise: 1 of 1 checkpoint is damaged: {advice}\n"


def test_damage_outside_of_tensors_is_told(run: Run, large: Path) -> None:
    file = sw.open(large).layout.files[0].entry
    assert file is not None
    flip(data_file(large), 9, file.objects_at)
    (checkpoint,) = run("verify", large, "--json").document["checkpoints"]
    first, last = checkpoint["damage"]
    assert "the header" in first["problem"]
    assert "values of rank 0" in last["problem"]
    assert last["tensors"] == ["second", "last"]


def test_tied_tensors_are_damaged_together(run: Run, step: Path) -> None:
    flip(data_file(step), sw.open(step).layout.files[0].entry.data_at)
    out = run("verify", step, "--json").document["checkpoints"][0]["damage"]
    assert {"model.embed.weight", "model.head.weight"} <= set(out[0]["tensors"])


def test_the_checksums_themselves_are_checked(run: Run, step: Path) -> None:
    flip(data_file(step), data_file(step).stat().st_size - 1)
    ((damage,),) = [
        each["damage"] for each in run("verify", step, "--json").document["checkpoints"]
    ]
    assert "checksums" in damage["problem"]
    assert damage["start"] is damage["stop"] is None


def test_files_that_are_missing_or_cut_off_are_damage(run: Run, root: Path) -> None:
    data_file(root / "step-00000100").unlink()
    cut = data_file(root / "step-00000200")
    cut.write_bytes(cut.read_bytes()[:-1])
    ran = run("verify", root, "--json")
    lost, short, intact = ran.document["checkpoints"]
    assert ran.status == 1
    assert "is missing" in lost["damage"][0]["problem"]
    assert "truncated" in short["damage"][0]["problem"]
    assert len(lost["damage"][0]["tensors"]) == len(sw.open(root / "step-00000300").tensors())
    assert intact["intact"]
    assert "2 of 3 checkpoints are damaged" in ran.err


def test_a_root_is_verified_with_all_its_steps(run: Run, root: Path) -> None:
    manifest = root / "step-00000300" / "manifest.json"
    (root / "step-00000400").mkdir()
    ran = run("verify", root)
    assert ran.status == 0
    assert [line[0] for line in ran.out.splitlines()] == ["✓", "✓", "✓", "–"]
    manifest.write_bytes(manifest.read_bytes().replace(b'"step":300', b'"step":301'))
    ran = run("verify", root, "--json")
    assert ran.status == 1
    assert ran.document["unfinished"] == ["step-00000400"]
    last = ran.document["checkpoints"][-1]
    assert (last["step"], last["intact"], last["damage"][0]["file"]) == (300, False, None)
    assert "altered" in last["damage"][0]["problem"]


def test_a_checkpoint_of_many_ranks_passes(run: Run, sharded: Path) -> None:
    document = run("verify", sharded, "--json").document
    assert document["checkpoints"][0]["files"] == 4
    assert document["intact"]
