"""`shardwise verify`: check every byte of a checkpoint against its checksums."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

import shardwise as sw
from shardwise.kernel.events import format_bytes, format_count
from shardwise.parts.cli import formatting as fmt
from shardwise.parts.cli.terminal import AsJson, print_error, print_json, progress, stdout_console


def verify(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH", help="A checkpoint, or the root of a run: all its checkpoints."
        ),
    ],
    format: Annotated[  # noqa: A002 - the option's name
        str | None,
        typer.Option(metavar="FORMAT", help="The format to read, if PATH has several: hf, dcp, …"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check every byte of a checkpoint against its checksums.

    For damaged files, prints the byte ranges and the tensors in them. Unfinished saves
    and removed checkpoints are listed, but not checked.

    Checkpoints of other formats have checksums only in zip archives, which torch.save and PyTorch
    DCP write. For other files, prints how many bytes could not be checked. If such a checkpoint
    stores several copies of a tensor, compares them.

    Exit status: 0 if everything is intact, 1 if anything is damaged, 2 if a checkpoint has no
    checksums.
    """
    try:
        listed = sw.list_checkpoints(path).checkpoints
    except sw.CheckpointNotFoundError:  # the path is a checkpoint, or sw.open says what it is
        listed = []
    unfinished = [each.directory for each in listed if each.state == "unfinished"]
    removed = [each.directory for each in listed if each.state == "removed"]
    paths = {each.path: each.step for each in listed if each.state in ("committed", "damaged")}
    console = stdout_console()
    verdicts = []
    for place, step in (paths if listed else {path: None}).items():
        verdicts.append(_verify(place, step, format))
        if not as_json:
            _show_verdict(verdicts[-1], console)
    damaged = sum(each["intact"] is False for each in verdicts)
    unchecked = sum(each["intact"] is None for each in verdicts)
    if as_json:
        intact = False if damaged else None if unchecked else True
        document = {"path": path, "intact": intact, "unfinished": unfinished, "removed": removed}
        print_json({**document, "checkpoints": verdicts})
    else:
        for name in unfinished:
            console.print(Text(f"– {name}  unfinished, not checked", "yellow"))
        for name in removed:
            console.print(Text(f"– {name}  removed, not checked", "dim"))
    total = format_count(len(verdicts), "checkpoint")
    if damaged:
        verb = "is" if damaged == 1 else "are"
        print_error(f"{damaged} of {total} {verb} damaged: load another, or copy the files again")
        raise typer.Exit(1)
    if unchecked:
        files = "its files have" if unchecked == 1 else "their files have"
        print_error(f"{unchecked} of {total} could not be checked: {files} no checksums")
        raise typer.Exit(2)


def _verify(path: str, step: int | None, format_key: str | None) -> dict[str, Any]:
    """Return the result for one checkpoint, as docs/cli.md describes it."""
    try:
        checkpoint = sw.open(path, skip_unknown=True, format=format_key)
    except sw.CorruptionError as error:  # the manifest is damaged
        damage = [sw.Damage(file=None, problem=str(error), tensors=[])]
        numbers = dict.fromkeys(("bytes", "files", "compared", "unchecked"), 0)
        return {"path": path, "step": step, "intact": False, **numbers, "damage": damage}
    with progress(checkpoint.layout.nbytes) as on_event:
        report = checkpoint.find_damage(on_event)
    return {
        "path": report.path,
        "step": report.step,
        "intact": report.intact,
        "bytes": report.bytes_checked,
        "files": report.files,
        "compared": report.bytes_compared,
        "unchecked": report.bytes_unchecked,
        "damage": report.damage,
    }


def _show_verdict(verdict: dict[str, Any], console: Console) -> None:
    symbols = {True: ("✓ ", "green"), False: ("✗ ", "bold red"), None: ("? ", "yellow")}
    details = []
    if verdict["files"]:
        details.append(
            f"{format_bytes(verdict['bytes'])} in {format_count(verdict['files'], 'file')}"
        )
    if verdict["compared"]:
        details.append(f"{format_bytes(verdict['compared'])} of copies compared")
    if verdict["unchecked"]:
        details.append(f"{format_bytes(verdict['unchecked'])} not checked, without checksums")
    detail = f"  {'; '.join(details)}" if details else ""
    line = Text.assemble(symbols[verdict["intact"]], verdict["path"], (detail, "dim"))
    console.print(line, soft_wrap=True)
    for each in verdict["damage"]:
        location = "" if each.start is None else f"{each.file}, bytes {each.start}:{each.stop}: "
        text = Text(f"  {location}{each.problem}")
        if each.tensors:
            tensors = format_count(len(each.tensors), "tensor")
            text.append(f"\n    {tensors}: {fmt.names(each.tensors)}", "bold")
        console.print(text, soft_wrap=True)
