"""`shardwise rm`."""

from __future__ import annotations

from datetime import datetime, tzinfo
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.integrations.dcp.partial_save import PartialSave
from tests.cli.conftest import Run

MANIFEST = "manifest.json"


class Past(datetime):
    """A clock that is years slow."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Past:
        return cls(2020, 1, 1, tzinfo=tz)


def steps(root: Path) -> list[int]:
    return [int(path.name[5:]) for path in sorted(root.glob("step-*"))]


def damage(checkpoint: Path) -> None:
    next(checkpoint.glob("*.safetensors")).unlink()


def test_steps_are_removed_and_the_others_stay(run: Run, root: Path) -> None:
    kept = {path: path.read_bytes() for path in (root / "step-00000200").iterdir()}
    size = sum(path.stat().st_size for path in (root / "step-00000100").glob("*.safetensors"))
    ran = run("rm", root, "--step", "100", "--step", "300", "--yes", "--json")
    assert (ran.status, ran.err) == (0, "")
    assert ran.document["root"] == str(root)
    assert ran.document["removed"][0] == {"step": 100, "state": "committed", "bytes": size}
    assert steps(root) == [200]
    assert {path: path.read_bytes() for path in kept} == kept


@pytest.mark.parametrize(("typed", "status"), [("y\n", 0), ("n\n", 2), ("\n", 2), ("", 2)])
def test_it_asks(run: Run, root: Path, typed: str, status: int) -> None:
    ran = run("rm", root, "--step", "200", typed=typed)
    assert ran.status == status
    assert "step 200, committed" in ran.err
    assert steps(root) == ([100, 300] if status == 0 else [100, 200, 300])
    assert ("nothing was removed" in ran.err) == (status == 2)


def test_the_only_intact_one_is_removed_by_force_alone(run: Run, root: Path) -> None:
    damage(root / "step-00000100")
    (root / "step-00000200" / MANIFEST).unlink()
    ran = run("rm", root, "--step", "300", "--yes")
    assert (ran.status, "no intact checkpoint left" in ran.err) == (2, True)
    assert steps(root) == [100, 200, 300]
    ran = run("rm", root, "--step", "100", "--step", "200", "--yes")
    assert ran.status == 0, ran.err
    assert steps(root) == [300]
    assert run("rm", root, "--step", "300", "--yes", "--force").status == 0
    assert steps(root) == []


def test_what_is_being_read_stays_and_the_others_go(run: Run, root: Path) -> None:
    checkpoint = root / "step-00000100"
    before = {path: path.read_bytes() for path in checkpoint.iterdir()}
    opened = sw.open(checkpoint)
    ran = run("rm", root, "--step", "100-200", "--yes")
    assert (ran.status, "another process reads it" in ran.err) == (2, True)
    assert steps(root) == [100, 300]
    assert {path: path.read_bytes() for path in checkpoint.iterdir()} == before
    del opened
    assert run("rm", root, "--step", "100", "--yes").status == 0


@pytest.mark.parametrize(
    ("options", "left"),
    [
        (["--step", "100-200"], [300]),
        (["--step", "0-150", "--step", "250-9999"], [200]),
        (["--before", "300"], [300]),
        (["--before", "200"], [200, 300]),
        (["--older-than", "1h"], [200, 300]),
        (["--older-than", "1h", "--before", "100"], None),
        (["--step", "101-199"], None),
        (["--step", "200-100"], None),
        (["--step", "1,2"], None),
        (["--older-than", "yesterday"], None),
        (["--older-than", "0s"], None),
        ([], None),
    ],
)
def test_ranges_and_ages(
    run: Run,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    left: list[int] | None,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("shardwise.kernel.engine.planning.datetime", Past)
        sw.save(root / "step-00000100", {"x": 1}, step=100, overwrite=True)
    for flag in ("--dry-run", "--yes"):
        assert steps(root) == [100, 200, 300]
        ran = run("rm", root, *options, flag, "--json")
        if left is None:
            assert (ran.status, "nothing was removed" in ran.err) == (2, True), ran.err
        else:
            assert ran.status == 0, ran.err
            removed = [each["step"] for each in ran.document["removed"]]
            assert sorted(left + removed) == [100, 200, 300]
    assert steps(root) == (left or [100, 200, 300])


def test_a_dry_run_needs_no_answer(run: Run, root: Path) -> None:
    ran = run("rm", root, "--before", "250", "--dry-run")
    assert ran.status == 0
    assert [line.split(",")[0] for line in ran.out.splitlines()] == [
        "would remove step 100",
        "would remove step 200",
    ]
    assert steps(root) == [100, 200, 300]


def test_an_unfinished_save_is_removed_unless_it_still_runs(run: Run, root: Path) -> None:
    checkpoint = root / "step-00000400"
    save = PartialSave(checkpoint)
    save.begin(world_size=1)
    save.write({"x": torch.ones(3)}, rank=0)
    ran = run("rm", root, "--step", "400", "--yes")
    assert (ran.status, "a save is writing to it" in ran.err) == (2, True)
    assert list(checkpoint.glob("*.safetensors"))
    save.close()
    assert run("rm", root, "--step", "400", "--yes").status == 0
    assert not checkpoint.exists()


def test_files_that_no_save_made_stay(run: Run, root: Path) -> None:
    (root / "step-00000100" / "notes.txt").write_text("mine")
    ran = run("rm", root, "--step", "100", "--yes")
    assert (ran.status, "notes.txt" in ran.out) == (0, True)
    assert [path.name for path in (root / "step-00000100").iterdir()] == ["notes.txt"]


def test_a_step_that_is_not_there_removes_nothing(run: Run, root: Path) -> None:
    ran = run("rm", root, "--step", "100", "--step", "7", "--yes")
    assert ran.status == 2
    assert "has no checkpoint of step 7 (newest steps: 100, 200, 300)" in ran.err
    assert steps(root) == [100, 200, 300]


def test_a_root_goes_on_without_the_step(run: Run, root: Path) -> None:
    assert run("rm", root, "--step", "300", "--yes").status == 0
    assert sw.Checkpointer(root, memory=None).latest() == 200
