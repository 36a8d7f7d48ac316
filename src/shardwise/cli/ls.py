"""`shardwise ls`: the checkpoints below a root."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.cli import wording
from shardwise.cli.places import Below, Saved, checkpoints_below, read_manifest
from shardwise.cli.terminal import output, print_json
from shardwise.errors import FormatError
from shardwise.manifest.names import step_directory

State = Literal["committed", "damaged", "unfinished"]
STYLES: dict[State, str] = {"committed": "green", "damaged": "bold red", "unfinished": "yellow"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A line of the list; what only a manifest knows is None where there is none to read."""

    directory: str
    step: int | None
    state: State
    problem: str | None = None
    saved_at: str | None = None
    tensors: int | None = None
    bytes: int | None = None
    files: int | None = None
    world_size: int | None = None
    metrics: dict[str, float | None] | None = None


def ls(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="The directory above the steps.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """List the checkpoints below ROOT, by step.

    A checkpoint is committed; or damaged, if its manifest cannot be read or names a file that is
    not there; or unfinished, if there is no manifest: its save is still under way, or was never
    finished. To check every byte, use `shardwise verify`.

    With --json: {"root", "checkpoints": [{"directory", "step", "state", "problem", "saved_at",
    "tensors", "bytes", "files", "world_size", "metrics"}]}; unknown is null.
    """
    lines = [_listed(each) for each in checkpoints_below(root)]
    if as_json:
        print_json({"root": root, "checkpoints": lines})
    else:
        _show(lines, output())


def _listed(below: Below) -> Listed:
    step = below.step
    if not below.committed:
        return Listed(directory=below.name, step=step, state="unfinished")
    try:
        saved = read_manifest(below.store)
    except FormatError as error:
        return Listed(directory=below.name, step=step, state="damaged", problem=str(error))
    manifest = saved.manifest
    problem = _missing_files(below, saved)
    return Listed(
        directory=below.name,
        step=manifest.step if step is None else step,
        state="damaged" if problem else "committed",
        problem=problem,
        saved_at=manifest.created,
        tensors=len(manifest.tensors),
        bytes=saved.bytes,
        files=len(manifest.files),
        world_size=manifest.world_size,
        metrics=manifest.metrics,
    )


def _missing_files(below: Below, saved: Saved) -> str | None:
    missing = [file.name for file in saved.manifest.files if file.name not in below.files]
    if not missing:
        return None
    return (
        f"{below.store}: {wording.count(len(missing), 'file')} missing: {wording.listed(missing)}"
    )


def _show(lines: Sequence[Listed], console: Console) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    named = any(line.step is None or line.directory != step_directory(line.step) for line in lines)
    if named:
        table.add_column("directory", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True, style="bold")
    table.add_column("saved (UTC)", no_wrap=True)
    for header in ("tensors", "size", "files", "ranks"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("metrics", style="cyan", overflow="ellipsis", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for line in lines:
        cells = [line.directory] if named else []
        cells += [_number(line.step), wording.moment(line.saved_at) if line.saved_at else "–"]
        cells += [_number(line.tensors), "–" if line.bytes is None else wording.size(line.bytes)]
        cells += [
            _number(line.files),
            _number(line.world_size),
            wording.metrics(line.metrics or {}),
        ]
        table.add_row(*map(Text, cells), Text(line.state, STYLES[line.state]))
    console.print(table)
    for line in lines:
        if line.problem is not None:
            console.print(Text(line.problem, STYLES[line.state]))


def _number(value: int | None) -> str:
    return "–" if value is None else f"{value}"
