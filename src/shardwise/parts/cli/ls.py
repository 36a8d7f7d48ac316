"""`shardwise ls`: list the checkpoints in a directory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column
from rich.text import Text

import shardwise as sw
from shardwise.kernel.events import format_bytes
from shardwise.parts.cli import formatting as fmt
from shardwise.parts.cli.terminal import AsJson, print_json, stdout_console, table
from shardwise.parts.words import format_time

STYLE_OF_STATE = {
    "committed": "green",
    "damaged": "bold red",
    "unfinished": "yellow",
    "removed": "dim",
}
Root = Annotated[
    str,
    typer.Argument(
        metavar="ROOT", help="The root of a run: a directory with a checkpoint for each step."
    ),
]


def ls(root: Root, as_json: AsJson = False) -> None:
    """List the checkpoints of a run.

    The state of a checkpoint is one of:

    \b
    committed   The save finished, and all files have the right sizes.
    damaged     The manifest cannot be read, or a file is missing or has
                the wrong size.
    unfinished  There is no manifest: the save is running or was interrupted.
    removed     Retention or `shardwise rm` removed it. In object stores, its
                files stay for an hour, for processes that read them.

    This compares sizes only. To check every byte, use `shardwise verify`.
    """
    listing = sw.list_checkpoints(root)
    if as_json:
        print_json(listing)
        return
    console = stdout_console()
    _show_table(listing.checkpoints, console)
    _show_mirror(listing, console)


def _show_table(checkpoints: Sequence[sw.ListedCheckpoint], console: Console) -> None:
    columns: dict[str, list[Text | str]] = {
        "directory": [Text(each.directory) for each in checkpoints],
        "step": [_number(each.step) for each in checkpoints],
        "state": [Text(each.state, STYLE_OF_STATE[each.state]) for each in checkpoints],
        "saved (UTC)": [
            fmt.printable(format_time(each.saved_at))[:16] if each.saved_at else "–"
            for each in checkpoints
        ],
        "size": ["–" if each.bytes is None else format_bytes(each.bytes) for each in checkpoints],
        "files": [_number(each.files) for each in checkpoints],
        "ranks": [_number(each.world_size) for each in checkpoints],
        "mirrored": [_mirrored_cell(each.mirrored) for each in checkpoints],
        "metrics": [Text(fmt.metrics(each.metrics or {})) for each in checkpoints],
    }
    if all(each.directory == f"step-{each.step or 0:08d}" for each in checkpoints):
        del columns["directory"]
    if all(each.mirrored is None for each in checkpoints):
        del columns["mirrored"]
    if not any(each.metrics for each in checkpoints):
        del columns["metrics"]
    folded = {
        "directory": Column("directory", overflow="fold", min_width=len("directory")),
        "metrics": Column("metrics", overflow="fold", min_width=len("metrics"), style="cyan"),
    }
    number = partial(Column, justify="right", no_wrap=True)
    numbers = {header: number(header) for header in ("size", "files", "ranks")}
    styled = {**folded, **numbers, "step": number("step", style="bold")}
    shown = table(*(styled.get(each) or Column(each, no_wrap=True) for each in columns), gap=2)
    for row in zip(*columns.values(), strict=True):
        shown.add_row(*row)
    console.print(shown)
    for each in checkpoints:
        if each.problem is not None:
            console.print(Text(each.problem, STYLE_OF_STATE[each.state]), soft_wrap=True)


def _show_mirror(listing: sw.Listing, console: Console) -> None:
    """Print the place of the mirror, the steps that only the mirror has, and why it fails."""
    mirror = listing.mirror
    if mirror is None:
        return
    in_root = {each.step for each in listing.checkpoints}
    line = f"mirror: {fmt.printable(mirror.place)}"
    if mirror_only := [step for step in mirror.steps if step not in in_root]:
        line += f", which also has step {fmt.indices(mirror_only)}"
    console.print(Text(line), soft_wrap=True)
    if reason := mirror.why_failing():
        text = f"copying to the mirror fails, and is tried again: {fmt.printable(reason)}"
        console.print(Text(text, "bold red"), soft_wrap=True)


def _mirrored_cell(mirrored: bool | None) -> Text:
    if mirrored is None:
        return Text("–")
    return Text("yes", "green") if mirrored else Text("no", "yellow")


def _number(value: int | None) -> str:
    return "–" if value is None else f"{value}"
