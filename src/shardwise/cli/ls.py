"""`shardwise ls`: the checkpoints below a root."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.cli import wording
from shardwise.cli.listing import Listed, State, listed
from shardwise.cli.places import checkpoints_below
from shardwise.cli.terminal import AsJson, output, print_json
from shardwise.manifest.names import step_directory

STYLES: dict[State, str] = {"committed": "green", "damaged": "bold red", "unfinished": "yellow"}


def ls(
    root: Annotated[
        str, typer.Argument(metavar="ROOT", help="A directory of checkpoints, one for each step.")
    ],
    as_json: AsJson = False,
) -> None:
    """List the checkpoints in a directory.

    The state of a checkpoint is one of:

    \b
    committed   The save was finished, and all files have the right sizes.
    damaged     The manifest cannot be read, or a file is missing or has
                another size.
    unfinished  There is no manifest: the save still runs, or was cut off.

    Only sizes are compared here. To check every byte, use `shardwise verify`.
    """
    lines = [listed(each) for each in checkpoints_below(root)]
    if as_json:
        print_json({"root": root, "checkpoints": lines})
    else:
        _show(lines, output())


def _show(lines: Sequence[Listed], console: Console) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    named = any(line.step is None or line.directory != step_directory(line.step) for line in lines)
    measured = any(line.metrics for line in lines)
    if named:
        table.add_column("directory", overflow="fold", min_width=len("directory"))
    table.add_column("step", justify="right", no_wrap=True, style="bold")
    table.add_column("state", no_wrap=True)
    table.add_column("saved (UTC)", no_wrap=True)
    for header in ("size", "files", "ranks"):
        table.add_column(header, justify="right", no_wrap=True)
    if measured:
        table.add_column("metrics", style="cyan", overflow="fold", min_width=len("metrics"))
    for line in lines:
        table.add_row(
            *([Text(line.directory)] if named else []),
            _number(line.step),
            Text(line.state, STYLES[line.state]),
            wording.moment(line.saved_at)[:16] if line.saved_at else "–",
            "–" if line.bytes is None else wording.size(line.bytes),
            _number(line.files),
            _number(line.world_size),
            *([Text(wording.metrics(line.metrics or {}))] if measured else []),
        )
    console.print(table)
    for line in lines:
        if line.problem is not None:
            console.print(Text(line.problem, STYLES[line.state]), soft_wrap=True)


def _number(value: int | None) -> str:
    return "–" if value is None else f"{value}"
