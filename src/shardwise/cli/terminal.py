"""Where output goes: text for people, one JSON document for programs, progress beside both."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from shardwise.cli import wording

UNBOUNDED = 100_000
"""Columns of what is no terminal: nothing is cut off there."""

Advance = Callable[[str, int], None]


def output() -> Console:
    """The console of what was asked for."""
    return _console(sys.stdout)


def diagnostics() -> Console:
    """The console of errors and progress."""
    return _console(sys.stderr)


def complain(message: str) -> None:
    """Say on stderr what went wrong."""
    said = "\n".join(map(wording.printable, message.split("\n")))
    diagnostics().print(Text.assemble(("shardwise: ", "bold red"), said))


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
    bar = Progress(
        TextColumn("{task.description}", style="dim", markup=False),
        BarColumn(bar_width=None),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
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
