"""The first changes of CONTRIBUTING.md can be made as written, in a copy of the library."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, Block, blocks_of, changed_by

PAGE = "../CONTRIBUTING.md"
FIXED = "src/shardwise/ports/sequential.py"
"""The library has the change of this file already."""
DAMAGED = "TestZarr::test_a_damaged_file_raises_nothing_else"
"""A test of many damaged files, which takes long."""


LIMIT = "-o", "timeout=900"
LONG = pytest.param(True, marks=[pytest.mark.long, pytest.mark.timeout(1200)])


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the library, without the fix."""
    shutil.copytree(ROOT / "src" / "shardwise", tmp_path / "src" / "shardwise")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (fix,) = (block for block in blocks_of(PAGE) if block.title == FIXED)
    swapped = fix.text.translate(str.maketrans("+-", "-+"))
    change(tmp_path / FIXED, Block("diff", FIXED, swapped))
    return tmp_path


def change(path: Path, diff: Block) -> None:
    path.write_text(changed_by(diff, path.read_text(encoding="utf-8")), encoding="utf-8")


def run(folder: Path, *command: str) -> str:
    """Run a module of Python in a folder; return what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize("is_long", [False, LONG])
def test_the_first_changes_can_be_made(copy: Path, is_long: bool) -> None:
    commands = 0
    for block in blocks_of(PAGE):
        if block.language == "diff":
            change(copy / block.title, block)
        elif block.title:
            path = copy / block.title
            assert not (ROOT / block.title).exists(), f"{path} would replace a file"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
        for command, said in block.commands() if block.language == "sh" else ():
            python, _, *arguments = command
            assert python == ".venv/bin/python"
            count, result = said.partition(": ")[2].split()
            if "zarr" in arguments[-1] and not is_long:
                arguments += ["--deselect", f"{arguments[-1]}::{DAMAGED}"]
                count = str(int(count) - 1)
            printed = run(copy, *arguments, "-p", "no:cacheprovider", "-o", "addopts=", *LIMIT)
            assert f"{count} {result}" in printed, printed
            commands += 1
    assert commands == 4


def test_the_first_changes_have_the_style_of_the_rest(copy: Path) -> None:
    pytest.importorskip("ruff", reason="pip install '.[dev]'")
    written = [block for block in blocks_of(PAGE) if block.language == "python" and block.title]
    assert len(written) == 5
    for block in written:
        path = copy / block.title
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text, encoding="utf-8")
    titles = [block.title for block in written]
    for command in (["check"], ["format", "--check"]):
        printed = run(copy, "ruff", *command, "--no-cache", *titles)
        assert "passed" in printed or "already formatted" in printed, printed
