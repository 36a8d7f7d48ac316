"""`shardwise rm`: remove checkpoints below a root, by their steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from shardwise.cli import wording
from shardwise.cli.listing import Listed, listed
from shardwise.cli.places import Below, checkpoints_below
from shardwise.cli.terminal import AsJson, complain, output, print_json
from shardwise.engine.leftovers import collect_leftovers
from shardwise.errors import CheckpointNotFoundError, StateError, StoreError
from shardwise.retention import remove_checkpoint


def rm(
    root: Annotated[
        str, typer.Argument(metavar="ROOT", help="A directory of checkpoints, one for each step.")
    ],
    step: Annotated[
        list[int],
        typer.Option(metavar="N", help="The step to remove. May be given several times."),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Remove even the only intact checkpoint.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove checkpoints by their steps.

    Asks first, unless --yes is given. Refuses to remove the only intact checkpoint of ROOT, unless
    --force is given. A checkpoint that is being read or saved is not removed. `shardwise ls ROOT`
    lists the steps.
    """
    below = checkpoints_below(root)
    chosen = _of_steps(root, below, step)
    lines = {each.name: listed(each) for each in below}
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


def _of_steps(root: str, below: Sequence[Below], steps: Sequence[int]) -> list[Below]:
    by_step = {each.step: each for each in below if each.step is not None}
    missing = [str(step) for step in steps if step not in by_step]
    if missing:
        there = ", ".join(map(str, list(by_step)[-5:])) or "no directory of a step"
        raise CheckpointNotFoundError(
            f"{root} has no checkpoint of step {', '.join(missing)}; the newest are: {there}. "
            f"Nothing was removed; `shardwise ls {root}` lists all"
        )
    return [by_step[step] for step in dict.fromkeys(steps)]


def _refuse_last(root: str, lines: Sequence[Listed], gone: Sequence[Listed]) -> None:
    intact = [each.directory for each in lines if each.state == "committed"]
    left = set(intact) - {each.directory for each in gone}
    if intact and not left:
        raise StateError(
            f"{root} would have no intact checkpoint left: nothing was removed; --force removes it"
        )


def _ask(root: str, gone: Sequence[Listed]) -> None:
    shown = "\n".join(f"  {_described(each)}" for each in gone)
    try:
        agreed = typer.confirm(f"Remove from {root}:\n{shown}\nfor good?", err=True)
    except typer.Abort:
        complain("nothing was removed: nobody answered; --yes removes without asking")
        raise typer.Exit(2) from None
    if not agreed:
        complain("nothing was removed")
        raise typer.Exit(2)


def _remove(below: Below) -> None:
    if below.committed:
        if not remove_checkpoint(below.store):
            raise StoreError(
                f"{below.store} is being read, and was not removed: try again when it is not"
            )
    elif below.files and not collect_leftovers(below.store):
        raise StoreError(
            f"{below.store} was not removed: a save into it is under way, or no save made its files"
        )
    else:
        below.store.remove()


def _show(below: Below, line: Listed, console: Console) -> None:
    console.print(Text.assemble(("✓ ", "green"), f"removed {_described(line)}"), soft_wrap=True)
    rest = below.store.list()
    if rest:
        stay = f"  {below.store} stays: it has files that no save made: {wording.listed(rest)}"
        console.print(Text(stay, "yellow"), soft_wrap=True)


def _described(line: Listed) -> str:
    parts = [f"step {line.step}", line.state]
    if line.bytes is not None and line.files is not None:
        parts.append(f"{wording.size(line.bytes)} in {wording.count(line.files, 'file')}")
    if line.saved_at is not None:
        parts.append(f"saved {wording.moment(line.saved_at)} UTC")
    return ", ".join(parts)
