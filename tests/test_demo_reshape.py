"""The demo of reshaped runs runs, and would tell if something were not as it should be."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shardwise as sw

EXAMPLES = Path(__file__).parent.parent / "examples"
SHORT = ("--steps", "8", "--blocks", "1", "--last", "2")


def demo(out: Path, *options: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "reshape.py"), "--out", str(out), *options],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=580,
    )


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("package", "first", "last"),
    [
        ("deepspeed", "ZeRO 2 on 2", "plain PyTorch on 1"),
        ("megatron", "DP 3 on 3", "no parallelism on 1"),
    ],
)
def test_a_run_that_loses_a_worker_goes_on_with_fewer(
    package: str, first: str, last: str, tmp_path: Path
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install '.[frameworks]'")
    done = demo(tmp_path, "--only", package, *SHORT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{first}, uninterrupted" in done.stdout
    assert "after step 6: worker killed" in done.stdout
    assert re.findall(r"(.+) resumed from step (\d+): (.+)", done.stdout) == [
        (f"✓ {last}", "4", "all bytes match")
    ]
    assert (tmp_path / "reshape.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import reshape_report

    return reshape_report


@pytest.fixture
def story(report: Any) -> Any:
    """A story in which all went well."""
    import reshape_run

    def outcome(name: str, first: int, last: int, saved: list[int]) -> Any:
        return reshape_run.Outcome(
            phase=SimpleNamespace(name=name),
            killed=None,
            losses={step: 3.0 - 0.1 * step for step in range(first, last)},
            saved=saved,
            restored={"at": first} if first else None,
            again=Path(),
            seconds=0.0,
        )

    return SimpleNamespace(
        reference=outcome("reference", 0, 9, []),
        outcomes=[outcome("before", 0, 5, [2, 4]), outcome("after", 4, 9, [])],
        differing={"after": []},
    )


def test_what_went_well_is_no_fault(report: Any, story: Any) -> None:
    assert report.failed_checks(story) == []


@pytest.mark.parametrize(
    ("phase", "step", "off", "is_fault"),
    [(0, 3, 1e-15, True), (1, 4, 9e-6, False), (1, 4, 2e-5, True), (1, 8, 4e-5, False)],
)
def test_losses_that_are_off_are_told(
    report: Any, story: Any, phase: int, step: int, off: float, is_fault: bool
) -> None:
    story.outcomes[phase].losses[step] += off
    assert bool(report.failed_checks(story)) == is_fault


def test_another_step_than_the_newest_is_told(report: Any, story: Any) -> None:
    story.outcomes[0].saved.append(5)
    expected = "restored step 4, resumed at step 4, but the newest save is step 5"
    assert expected in report.failed_checks(story)[0]


def test_a_restore_that_is_followed_by_another_step_is_told(report: Any, story: Any) -> None:
    del story.outcomes[1].losses[4]
    assert "restored step 4, resumed at step 5" in report.failed_checks(story)[0]


def test_a_run_that_ends_too_early_is_told(report: Any, story: Any) -> None:
    del story.outcomes[1].losses[8]
    assert report.failed_checks(story) == ["after: did not train to the end"]


def test_other_bytes_are_told(report: Any, story: Any) -> None:
    story.differing["after"] = ["model.weight"]
    assert report.failed_checks(story) == ["after: restored values differ: model.weight"]


def test_states_are_compared_by_name_and_to_the_byte(report: Any, tmp_path: Path) -> None:
    state = {"model": {"same": torch.ones(3), "w": torch.ones(3)}, "optimizer": {"lr": 0.1}}
    sw.save(tmp_path / "a", {**state, "rng": 1})
    sw.save(tmp_path / "b", {**state, "rng": 2})
    assert report.names_that_differ(tmp_path / "a", tmp_path / "b") == []
    state["model"] |= {"w": torch.tensor([1, 1, 1 + 1e-7]), "more": torch.ones(1)}
    sw.save(tmp_path / "c", {**state, "optimizer": {"lr": 0.2}})
    found = report.names_that_differ(tmp_path / "a", tmp_path / "c")
    assert found == ["model.more", "model.w", "optimizer.lr"]


def test_settings_are_compared_by_parameter(report: Any, tmp_path: Path) -> None:
    def save(place: Path, names: list[str], lr: float) -> None:
        weights = {name: torch.nn.Parameter(torch.ones(1)) for name in sorted(names)}
        optimizer = torch.optim.SGD([weights[name] for name in names], lr=lr)
        sw.save(place, {"model": torch.nn.ParameterDict(weights), "optimizer": optimizer})

    for place, names, lr in (
        ("a", ["v", "w"], 0.1),
        ("b", ["w", "v"], 0.1),
        ("c", ["w", "v"], 0.2),
    ):
        save(tmp_path / place, names, lr)
    assert report.names_that_differ(tmp_path / "a", tmp_path / "b") == []
    assert report.names_that_differ(tmp_path / "a", tmp_path / "c") == ["optimizer.param_groups"]


@pytest.mark.parametrize("killed", [None, 3])
def test_a_phase_that_does_not_end_as_it_should_is_told(
    report: Any, killed: int | None, tmp_path: Path
) -> None:
    import reshape_run

    def phase(program: str) -> Any:
        return SimpleNamespace(name="it", arguments=lambda: [sys.executable, "-c", program])

    run = reshape_run.Run(tmp_path, blocks=1, steps=8, every=2)
    status = 0 if killed else 3
    with pytest.raises(SystemExit, match=rf"it: exit status {status};.*ends with\nsaid so"):
        reshape_run.launch(run, phase(f"print('said so'); exit({status})"), killed)


def test_frameworks_that_are_not_there_are_told(
    report: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import reshape

    monkeypatch.setattr(sys, "argv", ["reshape.py", "--out", str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert reshape.main() == 0
    skipped = re.findall(r"skipped: (.+) is not installed: pip install", capsys.readouterr().out)
    assert skipped == ["DeepSpeed", "Megatron-Core"]
