"""Where output goes: text for people, one JSON document for programs, progress beside both."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column
from rich.text import Text

from shardwise.cli import wording

UNBOUNDED = 100_000
"""Columns of what is no terminal: nothing is cut off there."""

LONGEST_TASK = 24
"""Columns for what is being done, so that a bar and its numbers fit into 80."""

Advance = Callable[[str, int], None]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON: see docs/cli.md.")]


def output() -> Console:
    """The console of what was asked for."""
    return _console(sys.stdout)


def diagnostics() -> Console:
    """The console of errors and progress."""
    return _console(sys.stderr)


def complain(message: str) -> None:
    """Say on stderr what went wrong. Lines are not wrapped, so that paths can be copied."""
    said = "\n".join(map(wording.printable, message.split("\n")))
    diagnostics().print(Text.assemble(("shardwise: ", "bold red"), said), soft_wrap=True)


def print_json(document: object) -> None:
    """Print one JSON document, indented; not-a-number and infinities become null."""
    encoded = msgspec.json.encode(document)
    sys.stdout.write(msgspec.json.format(encoded, indent=2).decode() + "\n")


@contextmanager
def progress(total: int) -> Iterator[Advance]:
    """A bar over `total` bytes while the block runs, where somebody watches.

    Yields a function that takes what is being done, and how many bytes of it are done.
    """
    console = diagnostics()
    one_line = Column(no_wrap=True)
    bar = Progress(
        TextColumn(
            "{task.description}",
            style="dim",
            markup=False,
            table_column=Column(no_wrap=True, overflow="ellipsis", max_width=LONGEST_TASK),
        ),
        BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=10)),
        DownloadColumn(binary_units=True, table_column=one_line),
        TransferSpeedColumn(table_column=one_line),
        TimeRemainingColumn(table_column=one_line),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        expand=True,
    )
    with bar:
        task = bar.add_task("", total=total)

        def advance(doing: str, nbytes: int) -> None:
            bar.update(task, advance=nbytes, description=wording.printable(doing))

        yield advance


def _console(stream: IO[str]) -> Console:
    console = Console(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = UNBOUNDED
    return console
