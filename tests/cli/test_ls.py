"""`shardwise ls`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardwise as sw
from tests.cli.conftest import Run


def data_file(checkpoint: Path) -> Path:
    return next(checkpoint.glob("*.safetensors"))


def test_all_steps_are_listed_in_order(run: Run, root: Path) -> None:
    document = run("ls", root, "--json").document
    assert document["root"] == str(root)
    assert [line["step"] for line in document["checkpoints"]] == [100, 200, 300]
    manifest = sw.open(root / "step-00000200").manifest
    assert document["checkpoints"][1] == {
        "directory": "step-00000200",
        "step": 200,
        "state": "committed",
        "problem": None,
        "saved_at": manifest.created,
        "tensors": len(manifest.tensors),
        "bytes": data_file(root / "step-00000200").stat().st_size,
        "files": 1,
        "world_size": 1,
        "metrics": {"loss": 1 / 200},
    }


def test_the_list_for_people_has_a_line_for_each(run: Run, root: Path) -> None:
    ran = run("ls", root)
    header, *lines = ran.out.splitlines()
    assert header.split() == [
        *("step", "saved", "(UTC)", "tensors", "size", "files", "ranks", "metrics", "state")
    ]
    assert [line.split()[0] for line in lines] == ["100", "200", "300"]
    assert all(line.rstrip().endswith("committed") for line in lines)
    assert "loss 0.005" in lines[1]
    assert (ran.err, ran.status) == ("", 0)


def test_what_is_not_committed_is_told_from_what_is(run: Run, root: Path) -> None:
    manifest = root / "step-00000100" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-20])
    missing = data_file(root / "step-00000200")
    missing.unlink()
    (root / "step-00000300" / "manifest.json").unlink()
    (root / "step-00000400").mkdir()
    lines = run("ls", root, "--json").document["checkpoints"]
    assert [(line["step"], line["state"]) for line in lines] == [
        (100, "damaged"),
        (200, "damaged"),
        (300, "unfinished"),
        (400, "unfinished"),
    ]
    assert "cut off" in lines[0]["problem"]
    assert missing.name in lines[1]["problem"]
    assert lines[0]["tensors"] is lines[2]["tensors"] is lines[2]["problem"] is None
    out = run("ls", root).out
    assert missing.name in out
    assert "cut off" in out


def test_checkpoints_are_listed_whatever_their_directories_are_called(
    run: Run, tmp_path: Path
) -> None:
    sw.save(tmp_path / "final", {"x": torch.ones(2)})
    (tmp_path / "notes").mkdir()
    (tmp_path / "a name with blanks").mkdir()
    (tmp_path / "readme").write_text("nothing")
    (line,) = run("ls", tmp_path, "--json").document["checkpoints"]
    assert (line["directory"], line["step"], line["state"]) == ("final", None, "committed")
    assert run("ls", tmp_path).out.split("\n")[1].startswith("final")


def test_a_crashed_save_is_seen(run: Run, tmp_path: Path) -> None:
    sw.save(tmp_path / "mine", {"x": torch.ones(2)})
    (tmp_path / "mine" / "manifest.json").unlink()
    (line,) = run("ls", tmp_path, "--json").document["checkpoints"]
    assert (line["directory"], line["state"]) == ("mine", "unfinished")


def test_a_checkpoint_is_no_root(run: Run, root: Path) -> None:
    ran = run("ls", root / "step-00000100")
    assert "is a checkpoint, not a root" in ran.err
    assert (ran.out, ran.status, ran.err.count("\n")) == ("", 2, 1)


@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_a_directory_of_other_things_is_said_to_be_one(
    run: Run, tmp_path: Path, as_json: tuple[str, ...]
) -> None:
    ran = run("ls", tmp_path, *as_json)
    assert "holds no checkpoint" in ran.err
    assert (ran.out, ran.status) == ("", 2)
