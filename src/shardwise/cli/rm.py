"""`shardwise rm`: remove checkpoints by their steps or ages."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from shardwise.cli import formatting as fmt
from shardwise.cli.find_checkpoints import CheckpointDirectory, list_checkpoints_below
from shardwise.cli.ls import ListedCheckpoint, Root, examine_directory
from shardwise.cli.terminal import AsJson, print_error, print_json, stdout_console
from shardwise.engine.leftovers import remove_leftovers
from shardwise.errors import CheckpointNotFoundError, StateError, StoreError
from shardwise.manifest.names import REMOVED
from shardwise.retention import duration_in_seconds, remove_checkpoint, time_in_seconds

_STEPS = re.compile(r"(\d+)(?:-(\d+))?")


def rm(
    root: Root,
    step: Annotated[
        list[str] | None,
        typer.Option(metavar="N", help="A step, or a range of steps: 10-190. Repeatable."),
    ] = None,
    before: Annotated[int | None, typer.Option(metavar="N", help="Only steps less than N.")] = None,
    older_than: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Only checkpoints saved longer ago: 90s, 30m, 2h or 7d."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be removed.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Allow removing the only intact checkpoint.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove checkpoints by their steps or ages.

    A checkpoint is removed if all of --step, --before and --older-than that are given select it.

    Asks for confirmation unless --yes is given. Refuses to remove the only intact checkpoint in
    ROOT unless --force is given, and never removes a checkpoint that is being read or saved.
    `shardwise ls ROOT` lists the steps.

    \b
    Example:
      shardwise rm RUN --before 1000 --older-than 7d
    """
    directories = list_checkpoints_below(root)
    listed = {each.name: examine_directory(each) for each in directories}
    selects = _parse_selection(root, listed.values(), step, before, older_than)
    selected = [each for each in directories if selects(listed[each.name])]
    to_remove = [listed[each.name] for each in selected]
    if not to_remove:
        raise CheckpointNotFoundError(f"no checkpoint of {root} is selected; nothing was removed")
    if not force:
        _refuse_removing_last(root, list(listed.values()), to_remove)
    if not (yes or dry_run):
        _confirm(root, to_remove)
    removed, failures = ([], []) if dry_run else _remove_all(selected)
    if as_json:
        done = to_remove if dry_run else [listed[each.name] for each in removed]
        documents = [{"step": each.step, "state": each.state, "bytes": each.bytes} for each in done]
        print_json({"root": root, "dry_run": dry_run, "removed": documents})
    else:
        console = stdout_console()
        for checkpoint in to_remove if dry_run else ():
            console.print(f"would remove {_describe(checkpoint)}", soft_wrap=True)
        for entry in removed:
            _show_removed(entry, listed[entry.name], console)
    if failures:
        raise StoreError("\n".join(failures))


def _parse_selection(
    root: str,
    listed: Collection[ListedCheckpoint],
    steps: Sequence[str] | None,
    before: int | None,
    older_than: str | None,
) -> Callable[[ListedCheckpoint], bool]:
    """Return the function that tells whether the options select a checkpoint.

    Raises:
        StateError: an option is invalid, or there is none.
        CheckpointNotFoundError: there is no checkpoint of a step or in a range.
    """
    if not steps and before is None and older_than is None:
        raise StateError("nothing was removed: pass --step, --before or --older-than")
    ranges = [_parse_steps(each) for each in steps or ()]
    found = [each.step for each in listed if each.step is not None]
    missing = [
        text
        for text, numbers in zip(steps or (), ranges, strict=True)
        if not any(step in numbers for step in found)
    ]
    if missing:
        newest_steps = ", ".join(map(str, found[-5:])) or "none"
        raise CheckpointNotFoundError(
            f"{root} has no checkpoint of step {', '.join(missing)} (newest steps: "
            f"{newest_steps}); nothing was removed. `shardwise ls {root}` lists all steps"
        )
    oldest = None
    if older_than is not None:
        try:
            oldest = time.time() - duration_in_seconds(older_than, f"--older-than {older_than}")
        except ValueError as error:
            raise StateError(f"nothing was removed: {error}") from None

    def selects(checkpoint: ListedCheckpoint) -> bool:
        number = checkpoint.step
        if number is None or (before is not None and number >= before):
            return False
        if ranges and not any(number in numbers for numbers in ranges):
            return False
        return oldest is None or _was_saved_before(checkpoint, oldest)

    return selects


def _parse_steps(text: str) -> range:
    match = _STEPS.fullmatch(text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match is not None else (1, 0)
    if first > last:
        raise StateError(
            f"--step {text}: expected a step or an ascending range, such as 10-190; nothing was "
            "removed"
        )
    return range(first, last + 1)


def _was_saved_before(checkpoint: ListedCheckpoint, moment: float) -> bool:
    """Return whether a checkpoint is older. One without a readable time is not."""
    saved_at = None if checkpoint.saved_at is None else time_in_seconds(checkpoint.saved_at)
    return saved_at is not None and saved_at < moment


def _refuse_removing_last(
    root: str, listed: Sequence[ListedCheckpoint], to_remove: Sequence[ListedCheckpoint]
) -> None:
    intact = [each.directory for each in listed if each.state == "committed"]
    remaining = set(intact) - {each.directory for each in to_remove}
    if intact and not remaining:
        raise StateError(
            f"nothing was removed: {root} would have no intact checkpoint left. "
            "Pass --force to remove it anyway"
        )


def _confirm(root: str, to_remove: Sequence[ListedCheckpoint]) -> None:
    listing = "\n".join(f"  {_describe(each)}" for each in to_remove)
    try:
        confirmed = typer.confirm(
            f"Remove permanently from {root}:\n{listing}\nContinue?", err=True
        )
    except typer.Abort:
        print_error("nothing was removed: no answer on stdin. Pass --yes to remove without asking")
        raise typer.Exit(2) from None
    if not confirmed:
        print_error("nothing was removed")
        raise typer.Exit(2)


def _remove_all(
    selected: Sequence[CheckpointDirectory],
) -> tuple[list[CheckpointDirectory], list[str]]:
    """Remove checkpoints. Return those that were removed, and why others were not."""
    removed, failures = [], []
    for entry in selected:
        try:
            _remove_directory(entry)
            removed.append(entry)
        except OSError as error:  # noqa: PERF203 - the others can still be removed
            failures.append(str(error))
    return removed, failures


def _remove_directory(entry: CheckpointDirectory) -> None:
    store = entry.store
    if entry.committed:
        if not remove_checkpoint(store):
            raise StoreError(f"{store} was not removed: another process reads it. Try again later")
    elif entry.files and not remove_leftovers(store) and not entry.removed:
        raise StoreError(
            f"{store} was not removed: a save is writing to it, or its files are not from "
            "shardwise. Wait for the save, or remove the directory by hand"
        )
    elif not entry.removed:
        store.remove()


def _show_removed(
    entry: CheckpointDirectory, checkpoint: ListedCheckpoint, console: Console
) -> None:
    console.print(
        Text.assemble(("✓ ", "green"), f"removed {_describe(checkpoint)}"), soft_wrap=True
    )
    other_files = entry.store.list()
    if REMOVED in other_files:
        grace = fmt.duration(entry.store.traits.reading_grace)
        message = (
            f"  its files stay for {grace}, for processes that read them: then the next save of "
            "the run, or this command again, deletes them"
        )
        console.print(Text(message, "dim"), soft_wrap=True)
    elif other_files:
        message = (
            f"  kept {entry.store}, which has files of other programs: {fmt.names(other_files)}"
        )
        console.print(Text(message, "yellow"), soft_wrap=True)


def _describe(checkpoint: ListedCheckpoint) -> str:
    parts = [f"step {checkpoint.step}", checkpoint.state]
    if checkpoint.bytes is not None and checkpoint.files is not None:
        parts.append(
            f"{fmt.format_bytes(checkpoint.bytes)} in {fmt.count(checkpoint.files, 'file')}"
        )
    if checkpoint.saved_at is not None:
        parts.append(f"saved {fmt.time(checkpoint.saved_at)} UTC")
    return ", ".join(parts)
