"""`shardwise rm`: remove checkpoints by their steps."""

from __future__ import annotations

from collections.abc import Sequence
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
from shardwise.retention import remove_checkpoint


def rm(
    root: Root,
    step: Annotated[
        list[int],
        typer.Option(metavar="N", help="The step to remove. Repeatable."),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Allow removing the only intact checkpoint.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove checkpoints by their steps.

    Asks for confirmation unless --yes is given. Refuses to remove the only intact checkpoint in
    ROOT unless --force is given, and never removes a checkpoint that is being read or saved.
    `shardwise ls ROOT` lists the steps.
    """
    directories = list_checkpoints_below(root)
    selected = _select_steps(root, directories, step)
    listed = {each.name: examine_directory(each) for each in directories}
    to_remove = [listed[each.name] for each in selected]
    if not force:
        _refuse_removing_last(root, list(listed.values()), to_remove)
    if not yes:
        _confirm(root, to_remove)
    console = stdout_console()
    for each in selected:
        _remove_directory(each)
        if not as_json:
            _show_removed(each, listed[each.name], console)
    if as_json:
        document = [
            {"step": each.step, "state": each.state, "bytes": each.bytes} for each in to_remove
        ]
        print_json({"root": root, "removed": document})


def _select_steps(
    root: str, directories: Sequence[CheckpointDirectory], steps: Sequence[int]
) -> list[CheckpointDirectory]:
    by_step = {each.step: each for each in directories if each.step is not None}
    missing = [str(step) for step in steps if step not in by_step]
    if missing:
        newest_steps = ", ".join(map(str, list(by_step)[-5:])) or "none"
        raise CheckpointNotFoundError(
            f"{root} has no checkpoint of step {', '.join(missing)} (newest steps: "
            f"{newest_steps}); nothing was removed. `shardwise ls {root}` lists all steps"
        )
    return [by_step[step] for step in dict.fromkeys(steps)]


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


def _remove_directory(entry: CheckpointDirectory) -> None:
    if entry.committed:
        if not remove_checkpoint(entry.store):
            raise StoreError(
                f"{entry.store} was not removed: another process is reading it. Try again later"
            )
    elif entry.files and not remove_leftovers(entry.store):
        raise StoreError(
            f"{entry.store} was not removed: a save is writing to it, or its files are not from "
            "shardwise. Wait for the save, or remove the directory by hand"
        )
    else:
        entry.store.remove()


def _show_removed(
    entry: CheckpointDirectory, checkpoint: ListedCheckpoint, console: Console
) -> None:
    console.print(
        Text.assemble(("✓ ", "green"), f"removed {_describe(checkpoint)}"), soft_wrap=True
    )
    other_files = entry.store.list()
    if other_files:
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
