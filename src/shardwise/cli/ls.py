"""`shardwise ls`: list the checkpoints in a directory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.text import Text

from shardwise.cli import formatting as fmt
from shardwise.cli.find_checkpoints import Entry, checkpoints_below, read_manifest
from shardwise.cli.terminal import AsJson, output, print_json, table
from shardwise.errors import FormatError
from shardwise.manifest.manifest import FileEntry
from shardwise.manifest.names import step_directory
from shardwise.store import Store

State = Literal["committed", "damaged", "unfinished"]
STYLES: dict[State, str] = {"committed": "green", "damaged": "bold red", "unfinished": "yellow"}
THREADS = 16
MOST_PROBLEMS = 3

Root = Annotated[
    str, typer.Argument(metavar="ROOT", help="A directory of checkpoints, one for each step.")
]


def ls(root: Root, as_json: AsJson = False) -> None:
    """List the checkpoints in a directory.

    The state of a checkpoint is one of:

    \b
    committed   The save finished, and all files have the right sizes.
    damaged     The manifest cannot be read, or a file is missing or has
                the wrong size.
    unfinished  There is no manifest: the save is running or was interrupted.

    This compares sizes only. To check every byte, use `shardwise verify`.
    """
    lines = [examine(entry) for entry in checkpoints_below(root)]
    if as_json:
        print_json({"root": root, "checkpoints": lines})
    else:
        _show(lines, output())


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A checkpoint in a directory. Fields that only a manifest has are None without one."""

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


def examine(entry: Entry) -> Listed:
    """Read the manifest of a checkpoint, and compare the sizes of its files."""
    step = entry.step
    if not entry.committed:
        return Listed(directory=entry.name, step=step, state="unfinished")
    try:
        saved = read_manifest(entry.store)
    except FormatError as error:
        return Listed(directory=entry.name, step=step, state="damaged", problem=str(error))
    manifest = saved.manifest
    problems = list(_problems(entry, manifest.files))
    return Listed(
        directory=entry.name,
        step=manifest.step if step is None else step,
        state="damaged" if problems else "committed",
        problem=f"{entry.store}: {'; '.join(problems)}" if problems else None,
        saved_at=manifest.created,
        tensors=len(manifest.tensors),
        bytes=saved.bytes,
        files=len(manifest.files),
        world_size=manifest.world_size,
        metrics=manifest.metrics,
    )


def _problems(entry: Entry, files: tuple[FileEntry, ...]) -> Iterator[str]:
    missing = [file.name for file in files if file.name not in entry.files]
    if missing:
        yield f"{fmt.count(len(missing), 'file')} missing: {fmt.names(missing)}"
    present = [file for file in files if file.name in entry.files]
    with ThreadPoolExecutor(THREADS, "shardwise-ls") as pool:
        found = [each for each in pool.map(partial(_problem, entry.store), present) if each]
    yield from found[:MOST_PROBLEMS]
    if len(found) > MOST_PROBLEMS:
        yield f"{len(found) - MOST_PROBLEMS:,} more files with problems"


def _problem(store: Store, file: FileEntry) -> str | None:
    try:
        reader = store.open(file.name)
    except OSError as error:
        return f"{file.name} cannot be opened: {error.strerror or error}"
    try:
        size = reader.size
    finally:
        reader.close()
    if size == file.size:
        return None
    return f"{file.name} has {size:,} bytes, but {file.size:,} were saved"


def _show(lines: Sequence[Listed], console: Console) -> None:
    found = table(gap=2)
    named = any(line.step is None or line.directory != step_directory(line.step) for line in lines)
    measured = any(line.metrics for line in lines)
    if named:
        found.add_column("directory", overflow="fold", min_width=len("directory"))
    found.add_column("step", justify="right", no_wrap=True, style="bold")
    found.add_column("state", no_wrap=True)
    found.add_column("saved (UTC)", no_wrap=True)
    for header in ("size", "files", "ranks"):
        found.add_column(header, justify="right", no_wrap=True)
    if measured:
        found.add_column("metrics", style="cyan", overflow="fold", min_width=len("metrics"))
    for line in lines:
        found.add_row(
            *([Text(line.directory)] if named else []),
            _number(line.step),
            Text(line.state, STYLES[line.state]),
            fmt.time(line.saved_at)[:16] if line.saved_at else "–",
            "–" if line.bytes is None else fmt.size(line.bytes),
            _number(line.files),
            _number(line.world_size),
            *([Text(fmt.metrics(line.metrics or {}))] if measured else []),
        )
    console.print(found)
    for line in lines:
        if line.problem is not None:
            console.print(Text(line.problem, STYLES[line.state]), soft_wrap=True)


def _number(value: int | None) -> str:
    return "–" if value is None else f"{value}"
