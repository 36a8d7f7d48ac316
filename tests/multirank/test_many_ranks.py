"""Hundreds of processes save and load together, and survive that any of them is killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOON = 60.0  # hundreds of processes share few processors, and write their files first


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("fan_out", "saving", "loading", "killed"),
    [
        (3, 12, 9, [1]),
        pytest.param(32, 36, 33, [1], marks=pytest.mark.long),
        pytest.param(32, 256, 192, [0, 37, 255], marks=pytest.mark.long),
    ],
)
def test_many_processes_save_and_load(
    tmp_path: Path, fan_out: int, saving: int, loading: int, killed: list[int]
) -> None:
    program = [sys.executable, "-m", "tests.multirank.many_ranks", str(tmp_path)]
    numbers = map(str, (fan_out, saving, loading, *killed))
    result = subprocess.run([*program, *numbers], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-5000:]
    phases = {each["name"]: each for each in map(json.loads, result.stdout.splitlines())}
    for name, ranks in (("save", saving), ("load", loading), ("load again", 2)):
        found = {rank: error for rank, error, _ in phases[name]["outcomes"]}
        assert found == dict.fromkeys(range(ranks), ""), name
    for lost in killed:
        outcomes = phases[f"kill {lost}"]["outcomes"]
        others = set(range(saving)) - {lost}
        assert {rank: error for rank, error, _ in outcomes} == dict.fromkeys(
            others, f"lost [{lost}]"
        )
        assert max(at for *_, at in outcomes) - phases[f"kill {lost}"]["died"] < SOON
    assert not (tmp_path / "bad" / "manifest.json").exists()
