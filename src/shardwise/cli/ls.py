"""`shardwise ls`: list the checkpoints in a directory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.text import Text

from shardwise.cli import formatting as fmt
from shardwise.cli.find_checkpoints import (
    CheckpointDirectory,
    list_checkpoints_below,
    open_committed,
)
from shardwise.cli.mirrors import show_mirror_record
from shardwise.cli.terminal import AsJson, print_json, stdout_console, table
from shardwise.errors import FormatError
from shardwise.manifest.manifest import FileEntry
from shardwise.manifest.names import step_directory
from shardwise.store import open_store
from shardwise.tiers.record import MirrorRecord, read_mirror_record

State = Literal["committed", "damaged", "unfinished", "removed"]
STYLE_OF_STATE: dict[State, str] = {
    "committed": "green",
    "damaged": "bold red",
    "unfinished": "yellow",
    "removed": "dim",
}
THREADS = 16
MAX_FILES = 2**20
MAX_LISTED_PROBLEMS = 3

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
    mirror = _read_mirror_record(root)
    with ThreadPoolExecutor(THREADS, "shardwise-ls") as pool:
        directories = list_checkpoints_below(root)
        checkpoints = list(pool.map(partial(examine_directory, mirror=mirror), directories))
    if as_json:
        print_json({"root": root, "checkpoints": checkpoints, "mirror": mirror})
        return
    console = stdout_console()
    _show_table(checkpoints, console)
    if mirror is not None:
        show_mirror_record(mirror, {each.step for each in checkpoints}, console)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedCheckpoint:
    """A checkpoint below a root. If the manifest is missing or damaged, its fields are None.

    Attributes:
        directory: name of the directory.
        problem: a description of the damage; None unless the checkpoint is damaged.
        saved_at: ISO 8601 time of the save, in UTC.
        bytes: size of all data files.
        files: the number of data files.
        mirrored: whether the mirror of the root has this checkpoint; None if there is no mirror.
    """

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
    mirrored: bool | None = None


def examine_directory(
    entry: CheckpointDirectory, mirror: MirrorRecord | None = None
) -> ListedCheckpoint:
    """Examine a directory: read its manifest, and compare the sizes of its files.

    Args:
        mirror: the record of the root's mirror; None if there is no mirror.
    """
    step = entry.step
    if not entry.committed:
        state: State = "removed" if entry.removed else "unfinished"
        return ListedCheckpoint(directory=entry.name, step=step, state=state)
    try:
        checkpoint = open_committed(entry.store)
    except FormatError as error:
        return ListedCheckpoint(
            directory=entry.name, step=step, state="damaged", problem=str(error)
        )
    manifest = checkpoint.manifest
    problems = list(_find_problems(entry, manifest.files))
    return ListedCheckpoint(
        directory=entry.name,
        step=manifest.step if step is None else step,
        state="damaged" if problems else "committed",
        problem=f"{entry.store}: {'; '.join(problems)}" if problems else None,
        saved_at=manifest.created,
        tensors=len(manifest.tensors),
        bytes=checkpoint.bytes,
        files=len(manifest.files),
        world_size=manifest.world_size,
        metrics=manifest.metrics,
        mirrored=None if mirror is None else mirror.has(step or 0, manifest.save_id),
    )


def _read_mirror_record(root: str) -> MirrorRecord | None:
    with suppress(OSError):  # list the checkpoints of the root even if the record is unreadable
        return read_mirror_record(open_store(root))
    return None


def _find_problems(entry: CheckpointDirectory, files: tuple[FileEntry, ...]) -> Iterator[str]:
    sizes = {path: status.size for path, status in entry.store.walk(MAX_FILES).items()}
    missing = [file.name for file in files if file.name not in sizes]
    if missing:
        yield f"{fmt.count(len(missing), 'file')} missing: {fmt.names(missing)}"
    wrong_sizes = [
        f"{file.name} has {sizes[file.name]:,} bytes, but {file.size:,} were saved"
        for file in files
        if file.name in sizes and sizes[file.name] != file.size
    ]
    yield from wrong_sizes[:MAX_LISTED_PROBLEMS]
    if len(wrong_sizes) > MAX_LISTED_PROBLEMS:
        yield f"{len(wrong_sizes) - MAX_LISTED_PROBLEMS:,} more files with problems"


def _show_table(checkpoints: Sequence[ListedCheckpoint], console: Console) -> None:
    checkpoints_table = table(gap=2)
    show_directory = any(
        checkpoint.step is None or checkpoint.directory != step_directory(checkpoint.step)
        for checkpoint in checkpoints
    )
    show_metrics = any(checkpoint.metrics for checkpoint in checkpoints)
    if show_directory:
        checkpoints_table.add_column("directory", overflow="fold", min_width=len("directory"))
    checkpoints_table.add_column("step", justify="right", no_wrap=True, style="bold")
    checkpoints_table.add_column("state", no_wrap=True)
    checkpoints_table.add_column("saved (UTC)", no_wrap=True)
    for header in ("size", "files", "ranks"):
        checkpoints_table.add_column(header, justify="right", no_wrap=True)
    show_mirror = any(checkpoint.mirrored is not None for checkpoint in checkpoints)
    if show_mirror:
        checkpoints_table.add_column("mirrored", no_wrap=True)
    if show_metrics:
        checkpoints_table.add_column(
            "metrics", style="cyan", overflow="fold", min_width=len("metrics")
        )
    for checkpoint in checkpoints:
        checkpoints_table.add_row(
            *([Text(checkpoint.directory)] if show_directory else []),
            _format_number(checkpoint.step),
            Text(checkpoint.state, STYLE_OF_STATE[checkpoint.state]),
            fmt.time(checkpoint.saved_at)[:16] if checkpoint.saved_at else "–",
            "–" if checkpoint.bytes is None else fmt.format_bytes(checkpoint.bytes),
            _format_number(checkpoint.files),
            _format_number(checkpoint.world_size),
            *([_mirrored_cell(checkpoint.mirrored)] if show_mirror else []),
            *([Text(fmt.metrics(checkpoint.metrics or {}))] if show_metrics else []),
        )
    console.print(checkpoints_table)
    for checkpoint in checkpoints:
        if checkpoint.problem is not None:
            console.print(
                Text(checkpoint.problem, STYLE_OF_STATE[checkpoint.state]), soft_wrap=True
            )


def _mirrored_cell(mirrored: bool | None) -> Text:
    if mirrored is None:
        return Text("–")
    return Text("yes", "green") if mirrored else Text("no", "yellow")


def _format_number(value: int | None) -> str:
    return "–" if value is None else f"{value}"
