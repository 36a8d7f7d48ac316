"""The code on the pages runs, and files and tests that they name exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from tests.commands import run_command

ROOT = Path(__file__).parents[2]


def test_the_guide_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And ends where it says."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "guide.md").read_text(encoding="utf-8"), re.S
    )
    assert len(blocks) >= 5
    for block in blocks:
        exec(compile(block, "docs/guide.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "[40, 50]\n" in printed
    for tuned, base in zip(names["tuned"].children(), names["model"].children(), strict=True):
        if isinstance(base, torch.nn.Linear):
            assert torch.equal(tuned.weight, base.weight)
            assert torch.equal(tuned.bias, base.bias)


def test_the_page_of_formats_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And prints what it says; the commands succeed."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    said = []
    for block in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(compile(block, "docs/formats.md", "exec"), names)
        said += re.findall(r"^print.*  # (.*)$", block, re.M)
    assert len(said) >= 4
    assert capsys.readouterr().out.splitlines() == said
    shell = "".join(re.findall(r"```sh\n(.*?)```", page, re.S))
    commands = re.findall(r"^shardwise (.*)$", shell, re.M)
    assert len(commands) >= 4
    for command in commands:
        ran = run_command(*command.split())
        assert ran.status == 0, f"{command}: {ran.err}"


def test_the_page_of_tiers_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "tiers.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.S)
    exec(compile(block, "docs/tiers.md", "exec"), {})
    steps = [len(list(Path("tiers", tier).glob("step-*"))) for tier in ("root", "mirror")]
    assert steps == [1, 3]


def test_the_page_of_data_loaders_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    said = []
    for block in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(compile(block, "docs/data.md", "exec"), names)
        said += re.findall(r"^print.*  # (.*)$", block, re.M)
    assert len(said) == 2
    assert capsys.readouterr().out.splitlines() == said


def test_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    names: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    names |= {"total": 200, "train": lambda *_: None}
    block, *others = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S
    )
    for other in others:
        compile(other, "README.md", "exec")
    exec(compile(block, "README.md", "exec"), names)
    assert sw.Checkpointer("runs/a").steps() == [100, 200]


def test_the_page_of_what_is_supported_names_tests_that_exist() -> None:
    named = re.findall(
        r"`((?:packages/[\w-]+/)?tests/[\w/.]+)`",
        (ROOT / "docs" / "supported.md").read_text(encoding="utf-8"),
    )
    assert len(named) >= 20
    for path in named:
        assert (ROOT / path).exists(), path


def test_the_architecture_page_names_files_and_functions_that_exist() -> None:
    """The first column of each walk is `file: function`, below the file of the row above."""
    source = ROOT / "src" / "shardwise"
    pages = [ROOT / "docs" / "architecture.md", *(ROOT / "docs" / "parts").glob("*.md")]
    page = "".join(each.read_text(encoding="utf-8") for each in pages).replace("`tests/", "")
    named = re.findall(r"`([\w/]+\.py)(?:: ([\w.]+))?`((?:, `[\w.]+`)*)", page)
    assert len(named) >= 60
    for file, function, more in named:
        found = [each for each in source.rglob("*.py") if each.as_posix().endswith(f"/{file}")]
        assert found, file
        for name in [function, *re.findall(r"`([\w.]+)`", more)]:
            for part in name.split(".") if not name.endswith(".py") else ():
                pattern = re.compile(rf"^ *(?:def|class) {part}\b|^{part}\b", re.M)
                assert not part or any(
                    pattern.search(each.read_text(encoding="utf-8")) for each in found
                ), name
