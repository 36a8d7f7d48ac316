"""`shardwise ls`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardwise as sw
from tests.cli.conftest import Run

HEADER = ["step", "state", "saved", "(UTC)", "size", "files", "ranks", "metrics"]


def data_file(checkpoint: Path) -> Path:
    return next(checkpoint.glob("*.safetensors"))


def test_all_steps_are_listed_in_order(run: Run, root: Path) -> None:
    document = run("ls", root, "--json").document
    assert document["root"] == str(root)
    assert [line["step"] for line in document["checkpoints"]] == [100, 200, 300]
    manifest = sw.open(root / "step-00000200").layout
    assert document["checkpoints"][1] == {
        "path": str(root / "step-00000200"),
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
        "mirrored": None,
    }


def test_the_list_for_people_has_a_line_for_each(run: Run, root: Path) -> None:
    ran = run("ls", root)
    header, *lines = ran.out.splitlines()
    assert header.split() == HEADER
    assert [line.split()[:2] for line in lines] == [[s, "committed"] for s in ("100", "200", "300")]
    assert "loss=0.005" in lines[1]
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
    assert "truncated" in lines[0]["problem"]
    assert missing.name in lines[1]["problem"]
    assert lines[0]["tensors"] is lines[2]["tensors"] is lines[2]["problem"] is None
    out = run("ls", root).out
    assert missing.name in out
    assert "truncated" in out


def test_a_file_of_another_size_is_damage(run: Run, root: Path) -> None:
    data = data_file(root / "step-00000200")
    size = data.stat().st_size
    with data.open("r+b") as file:
        file.truncate(size - 1)
    lines = run("ls", root, "--json").document["checkpoints"]
    assert [line["state"] for line in lines] == ["committed", "damaged", "committed"]
    assert f"{data.name} has {size - 1:,} bytes, but {size:,}" in lines[1]["problem"]


def test_a_foreign_checkpoint_is_named_and_leads_to_inspect(run: Run, tmp_path: Path) -> None:
    place = tmp_path / "run" / "step_10"
    dcp.save({"w": torch.ones(2)}, checkpoint_id=place, no_dist=True)
    torch.save({"w": torch.ones(2)}, tmp_path / "last.pt")
    for path, kind, leads_to in [
        (place, "one checkpoint (PyTorch DCP)", place),
        (tmp_path / "last.pt", "one checkpoint (a file of torch.save)", tmp_path / "last.pt"),
        (place.parent, "Open a checkpoint below: step_10", place),
    ]:
        ran = run("ls", path)
        assert kind in ran.err
        assert (ran.out, ran.status, ran.err.count("\n")) == ("", 2, 1)
        assert run("inspect", leads_to).status == 0


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
    for command, *options in (("ls",), ("rm", "--step", "100")):
        ran = run(command, root / "step-00000100", *options)
        assert "is a checkpoint, not a directory of checkpoints" in ran.err
        assert "pass the root above it, as in `shardwise rm ROOT --step N`" in ran.err
        assert (ran.out, ran.status, ran.err.count("\n")) == ("", 2, 1)


@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_a_directory_of_other_things_is_said_to_be_one(
    run: Run, tmp_path: Path, as_json: tuple[str, ...]
) -> None:
    ran = run("ls", tmp_path, *as_json)
    assert "there is no checkpoint" in ran.err
    assert (ran.out, ran.status) == ("", 2)
