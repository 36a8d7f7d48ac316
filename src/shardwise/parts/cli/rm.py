"""`shardwise rm`: remove checkpoints by their steps or ages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import Annotated

import typer
from rich.text import Text

import shardwise as sw
from shardwise.kernel.events import format_bytes, format_count
from shardwise.parts.cli import formatting as fmt
from shardwise.parts.cli.ls import Root
from shardwise.parts.cli.terminal import AsJson, print_error, print_json, stdout_console
from shardwise.parts.words import format_time, parse_time

_STEPS = re.compile(r"(\d+)(?:-(\d+))?")
_AGE = re.compile(r"(\d+(?:\.\d+)?) ?([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


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

    If you give several of --step, --before and --older-than, a checkpoint is removed only if each
    of them selects it.

    Asks for confirmation unless --yes is given. Refuses to remove the only intact checkpoint in
    ROOT unless --force is given, and never removes a checkpoint that is being read or saved.
    `shardwise ls ROOT` lists the steps.

    \b
    Example:
      shardwise rm RUN --before 1000 --older-than 7d
    """
    listed = sw.list_checkpoints(root).checkpoints
    selected = _select(root, listed, step, before, older_than)
    if not selected:
        raise sw.CheckpointNotFoundError(
            f"no checkpoint of {root} is selected; nothing was removed. `shardwise ls {root}` "
            "lists all steps"
        )
    if not force:
        _refuse_removing_last(root, listed, selected)
    if not (yes or dry_run):
        _confirm(root, selected)
    removed, failures = [], []
    for each in selected:
        try:
            kept = [] if dry_run else sw.remove(each.path)
        except OSError as error:
            failures.append(str(error))
            continue
        removed.append({"step": each.step, "state": each.state, "bytes": each.bytes})
        if not as_json:
            _show_removed(each, kept, dry_run=dry_run)
    if as_json:
        print_json({"root": root, "dry_run": dry_run, "removed": removed})
    if failures:
        raise sw.StoreError("\n".join(failures))


def _show_removed(checkpoint: sw.ListedCheckpoint, kept: Sequence[str], *, dry_run: bool) -> None:
    console = stdout_console()
    verb = Text("would remove ") if dry_run else Text.assemble(("✓ ", "green"), "removed ")
    console.print(verb.append(_describe(checkpoint)), soft_wrap=True)
    if "removed.json" in kept:
        message = (
            "  its files stay for an hour, for processes that read them: then the next save of "
            "the run, or this command again, deletes them"
        )
        console.print(Text(message, "dim"), soft_wrap=True)
    elif kept:
        message = f"  kept {checkpoint.path}, which has files of other programs: {fmt.names(kept)}"
        console.print(Text(message, "yellow"), soft_wrap=True)


def _select(
    root: str,
    listed: Sequence[sw.ListedCheckpoint],
    steps: Sequence[str] | None,
    before: int | None,
    older_than: str | None,
) -> list[sw.ListedCheckpoint]:
    """Return the checkpoints that all given options select.

    Raises:
        StateError: an option is invalid, or there is none.
        CheckpointNotFoundError: there is no checkpoint of a step or in a range.
    """
    if not steps and before is None and older_than is None:
        raise sw.StateError("nothing was removed: pass --step, --before or --older-than")
    selected = [each for each in listed if each.step is not None]
    found = [each.step for each in selected]
    ranges = {text: _parse_steps(text) for text in steps or ()}
    missing = [text for text, numbers in ranges.items() if not any(n in numbers for n in found)]
    if missing:
        newest_steps = ", ".join(map(str, found[-5:])) or "none"
        raise sw.CheckpointNotFoundError(
            f"{root} has no checkpoint of step {', '.join(missing)} (newest steps: "
            f"{newest_steps}); nothing was removed. `shardwise ls {root}` lists all steps"
        )
    if ranges:
        chosen = list(ranges.values())
        selected = [each for each in selected if any(each.step in numbers for numbers in chosen)]
    if before is not None:
        selected = [each for each in selected if (each.step or 0) < before]
    if older_than is not None:
        cutoff = datetime.now(timezone.utc) - _parse_age(older_than)
        times = [parse_time(each.saved_at or "") for each in selected]
        pairs = zip(selected, times, strict=True)
        selected = [each for each, saved in pairs if saved is not None and saved < cutoff]
    return selected


def _parse_steps(text: str) -> range:
    match = _STEPS.fullmatch(text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match is not None else (1, 0)
    if first > last:
        raise sw.StateError(
            f"--step {text}: expected a step or an ascending range, such as 10-190; nothing was "
            "removed"
        )
    return range(first, last + 1)


def _parse_age(text: str) -> timedelta:
    match = _AGE.fullmatch(text)
    age = timedelta(**{_UNITS[match[2]]: float(match[1])}) if match is not None else timedelta()
    if not age:
        raise sw.StateError(
            f"nothing was removed: --older-than {text}: expected a duration longer than 0, such "
            "as '90s' or '7d'"
        )
    return age


def _refuse_removing_last(
    root: str, listed: Sequence[sw.ListedCheckpoint], selected: Sequence[sw.ListedCheckpoint]
) -> None:
    intact = [each for each in listed if each.state == "committed"]
    if intact and all(each in selected for each in intact):
        raise sw.StateError(
            f"nothing was removed: {root} would have no intact checkpoint left. "
            "Pass --force to remove it anyway"
        )


def _confirm(root: str, to_remove: Sequence[sw.ListedCheckpoint]) -> None:
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


def _describe(checkpoint: sw.ListedCheckpoint) -> str:
    parts = [f"step {checkpoint.step}", checkpoint.state]
    if checkpoint.bytes is not None and checkpoint.files is not None:
        parts.append(
            f"{format_bytes(checkpoint.bytes)} in {format_count(checkpoint.files, 'file')}"
        )
    if checkpoint.saved_at is not None:
        parts.append(f"saved {fmt.printable(format_time(checkpoint.saved_at))}")
    return ", ".join(parts)
