"""The code blocks of a page, and how to run them.

A `python` block runs, and prints what the comments of its calls of `print` say. A `py` block is a
fragment, which must only compile. `sh` blocks have commands that run. `bash` blocks only need a
correct syntax.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from tests.commands import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(r'^ *```(\w+)(?: title="([^"]*)")?\n(.*?)^ *```$', re.S | re.M)
PRINTED = re.compile(r"^ *print\(.*\)  # (.*)$", re.M)


@dataclass(frozen=True)
class Block:
    """A code block: its language, its title or "", and its lines."""

    language: str
    title: str
    text: str

    def commands(self) -> Iterator[tuple[list[str], str]]:
        """Yield each command of an `sh` block, and what its comment says that it prints."""
        for line in self.text.splitlines():
            command, _, printed = line.partition("  # ")
            yield shlex.split(command), printed


def blocks_of(page: str) -> list[Block]:
    """Return the code blocks of a page of docs/."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return [Block(*found) for found in FENCE.findall(text)]


def run_python(block: Block, names: dict[str, Any], page: str) -> None:
    """Run a block, and compare what it prints with its comments."""
    output = StringIO()
    with redirect_stdout(output):
        exec(compile(block.text, page, "exec"), names)
    assert output.getvalue().splitlines() == PRINTED.findall(block.text), block.text


def run_shardwise(command: list[str]) -> str:
    """Run a command of shardwise in this process; return its output."""
    assert command[0] == "shardwise", command
    result = CliRunner().invoke(app, command[1:])
    assert result.exit_code == 0, f"{command}: {result.output} {result.stderr}"
    return result.stdout


def check_syntax(block: Block) -> None:
    """Raise if a block does not parse."""
    check: Callable[[str], object] | None = {
        "bash": check_bash,
        "json": json.loads,
        "py": ast.parse,
        "python": ast.parse,
        "sh": check_bash,
        "yaml": lambda text: list(yaml.safe_load_all(text)),
    }.get(block.language)
    if check is not None:
        check(block.text)


def check_bash(text: str) -> None:
    """Raise if bash cannot parse a script."""
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def changed_by(diff: Block, text: str) -> str:
    """Return a text with the changes of a `diff` block, whose removed lines occur once each."""
    old, new = (
        "".join(f"{line[1:]}\n" for line in diff.text.splitlines() if line[:1] in (" ", sign))
        for sign in "-+"
    )
    assert text.count(old) == 1, old
    return text.replace(old, new)
