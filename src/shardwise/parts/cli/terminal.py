"""Consoles, tables, JSON documents and progress bars.

Results go to stdout; errors and progress go to stderr.
"""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Callable, Iterator, Sequence
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
from rich.table import Column, Table
from rich.text import Text

import shardwise as sw
from shardwise.parts.cli import formatting as fmt

WIDTH_WITHOUT_TERMINAL = 100_000
"""The width, in columns, of output that is not a terminal. No line is longer, so none is cut
off."""
TASK_NAME_WIDTH = 24
"""The most columns of a task's name, so that the progress bar fits into 80 columns."""

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def stdout_console() -> Console:
    """Return the console for results."""
    return _console(sys.stdout)


def stderr_console() -> Console:
    """Return the console for errors and progress."""
    return _console(sys.stderr)


def print_error(message: str) -> None:
    """Print an error to stderr. Lines are not wrapped, so that paths can be copied."""
    escaped = "\n".join(map(fmt.printable, message.split("\n")))
    stderr_console().print(Text.assemble(("shardwise: ", "bold red"), escaped), soft_wrap=True)


def print_json(document: object) -> None:
    """Print one JSON document, indented. NaN and infinities become null."""
    encoded = msgspec.json.encode(document)
    text = msgspec.json.format(encoded, indent=2).decode()
    if codecs.lookup(sys.stdout.encoding or "utf-8").name != "utf-8":
        text = json.dumps(json.loads(text), indent=2)  # escapes what is not ASCII
    sys.stdout.write(text + "\n")


def table(*columns: Column | str, gap: int = 3) -> Table:
    """Return a table without rules, with `gap` blanks between its columns."""
    return Table(*columns, box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim")


def print_labelled(lines: Sequence[tuple[str, str]], console: Console) -> None:
    """Print pairs of a label and a text, each on one line."""
    width = max(len(label) for label, _ in lines) + 2
    for label, text in lines:
        console.print(Text.assemble((label.ljust(width), "dim"), text))


@contextmanager
def progress(total: int | None = None) -> Iterator[Callable[[sw.Event], None]]:
    """Show a progress bar over `total` bytes while the block runs, if stderr is a terminal.

    Yield a function to pass as `on_event`. If `total` is None, the event of the stage `plan` has
    the number.
    """
    console = stderr_console()
    one_line = Column(no_wrap=True)
    bar = Progress(
        TextColumn(
            "{task.description}",
            style="dim",
            markup=False,
            table_column=Column(no_wrap=True, overflow="ellipsis", max_width=TASK_NAME_WIDTH),
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

        def on_event(event: sw.Event) -> None:
            if total is None and event.stage == "plan":
                bar.update(task, total=event.bytes)
            else:
                bar.update(task, advance=event.bytes, description=fmt.printable(event.stage))

        yield on_event


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise the error again, because rich would exit with status 1, which means damage."""
        raise  # noqa: PLE0704 - rich calls this in `except BrokenPipeError`


def _console(stream: IO[str]) -> Console:
    console = _Console(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = WIDTH_WITHOUT_TERMINAL
    return console
