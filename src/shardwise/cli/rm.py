"""`shardwise rm`: remove checkpoints by their steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from shardwise.cli import formatting as fmt
from shardwise.cli.find_checkpoints import Entry, checkpoints_below
from shardwise.cli.ls import Listed, Root, examine
from shardwise.cli.terminal import AsJson, complain, output, print_json
from shardwise.engine.leftovers import collect_leftovers
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
    below = checkpoints_below(root)
    chosen = _of_steps(root, below, step)
    lines = {each.name: examine(each) for each in below}
    gone = [lines[each.name] for each in chosen]
    if not force:
        _refuse_last(root, list(lines.values()), gone)
    if not yes:
        _ask(root, gone)
    console = output()
    removed = []
    for each in chosen:
        _remove(each)
        removed.append(lines[each.name])
        if not as_json:
            _show(each, lines[each.name], console)
    if as_json:
        document = [{"step": each.step, "state": each.state, "bytes": each.bytes} for each in gone]
        print_json({"root": root, "removed": document})


def _of_steps(root: str, below: Sequence[Entry], steps: Sequence[int]) -> list[Entry]:
    by_step = {each.step: each for each in below if each.step is not None}
    missing = [str(step) for step in steps if step not in by_step]
    if missing:
        there = ", ".join(map(str, list(by_step)[-5:])) or "none"
        raise CheckpointNotFoundError(
            f"{root} has no checkpoint of step {', '.join(missing)} (newest steps: {there}); "
            f"nothing was removed. `shardwise ls {root}` lists all steps"
        )
    return [by_step[step] for step in dict.fromkeys(steps)]


def _refuse_last(root: str, lines: Sequence[Listed], gone: Sequence[Listed]) -> None:
    intact = [each.directory for each in lines if each.state == "committed"]
    left = set(intact) - {each.directory for each in gone}
    if intact and not left:
        raise StateError(
            f"nothing was removed: {root} would have no intact checkpoint left. "
            "Pass --force to remove it anyway"
        )


def _ask(root: str, gone: Sequence[Listed]) -> None:
    shown = "\n".join(f"  {_described(each)}" for each in gone)
    try:
        agreed = typer.confirm(f"Remove permanently from {root}:\n{shown}\nContinue?", err=True)
    except typer.Abort:
        complain("nothing was removed: no answer on stdin. Pass --yes to remove without asking")
        raise typer.Exit(2) from None
    if not agreed:
        complain("nothing was removed")
        raise typer.Exit(2)


def _remove(entry: Entry) -> None:
    if entry.committed:
        if not remove_checkpoint(entry.store):
            raise StoreError(f"{entry.store} is being read, and was not removed: try again later")
    elif entry.files and not collect_leftovers(entry.store):
        raise StoreError(
            f"{entry.store} was not removed: a save into it is running, or other programs made its "
            "files"
        )
    else:
        entry.store.remove()


def _show(entry: Entry, line: Listed, console: Console) -> None:
    console.print(Text.assemble(("✓ ", "green"), f"removed {_described(line)}"), soft_wrap=True)
    rest = entry.store.list()
    if rest:
        stay = f"  kept {entry.store}, which has files of other programs: {fmt.names(rest)}"
        console.print(Text(stay, "yellow"), soft_wrap=True)


def _described(line: Listed) -> str:
    parts = [f"step {line.step}", line.state]
    if line.bytes is not None and line.files is not None:
        parts.append(f"{fmt.size(line.bytes)} in {fmt.count(line.files, 'file')}")
    if line.saved_at is not None:
        parts.append(f"saved {fmt.time(line.saved_at)} UTC")
    return ", ".join(parts)
