"""`shardwise verify`: every byte against its checksum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from shardwise.cli import wording
from shardwise.cli.damage import Damage, ForeignSearch, Search
from shardwise.cli.places import Below, checkpoints_at, read_manifest, trusted_pieces
from shardwise.cli.terminal import AsJson, complain, output, print_json, progress
from shardwise.engine.buffers import Arena
from shardwise.errors import FormatError
from shardwise.manifest.names import MANIFEST

if TYPE_CHECKING:
    from shardwise.engine.opened import Opened


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of the check of one checkpoint.

    Attributes:
        intact: None if nothing could be checked.
        bytes, files: what was checked by checksums; 0 if the manifest cannot be trusted.
        compared: bytes of copies of tensors that were compared.
        unchecked: bytes of tensors that have no checksum.
    """

    path: str
    step: int | None
    intact: bool | None
    bytes: int
    files: int
    compared: int = 0
    unchecked: int = 0
    damage: list[Damage]


def verify(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A checkpoint, or a directory of checkpoints.")
    ],
    as_json: AsJson = False,
) -> None:
    """Check every byte of a checkpoint against its checksums.

    If something is damaged, this says which bytes of which file they are, and which tensors they
    belong to. Saves that were cut off are listed, and not checked. Checkpoints of other formats
    have checksums only in zip archives, as torch.save and PyTorch DCP write them; bytes of tensors
    without a checksum are counted. Copies of a tensor in such a checkpoint are compared.

    Exit status: 0 if all is intact, 1 if anything is damaged, 2 if a checkpoint has nothing to
    check it by.
    """
    found = checkpoints_at(path)
    unfinished = [each.name for each in found if not each.committed]
    console = output()
    arena = Arena()
    verdicts = []
    for each in found:
        if each.committed:
            verdicts.append(_verdict(each, arena))
            if not as_json:
                _show(verdicts[-1], console)
    damaged = sum(each.intact is False for each in verdicts)
    unknown = sum(each.intact is None for each in verdicts)
    if as_json:
        intact = False if damaged else None if unknown else True
        document = {"path": path, "intact": intact, "unfinished": unfinished}
        print_json({**document, "checkpoints": verdicts})
    else:
        for name in unfinished:
            console.print(Text(f"– {name}  unfinished, not checked", "yellow"))
    if damaged:
        total = wording.count(len(verdicts), "checkpoint")
        are = "is" if damaged == 1 else "are"
        complain(f"{damaged} of {total} {are} damaged: load another, or copy the files again")
        raise typer.Exit(1)
    if unknown:
        total = wording.count(len(verdicts), "checkpoint")
        complain(f"{unknown} of {total} could not be checked: there are no checksums")
        raise typer.Exit(2)


def _verdict(below: Below, arena: Arena) -> Verdict:
    if below.foreign is not None:
        return _foreign_verdict(below.foreign, arena)
    path = str(below.store)
    with below.store.hold(MANIFEST, shared=True):
        try:
            saved = read_manifest(below.store)
            search = Search(saved, trusted_pieces(saved))
        except FormatError as error:
            damage = [Damage(file=None, problem=str(error), tensors=[])]
            return Verdict(
                path=path, step=below.step, intact=False, bytes=0, files=0, damage=damage
            )
        with progress(saved.bytes) as advance:
            damage = list(search.run(arena, advance))
    return Verdict(
        path=path,
        step=saved.manifest.step,
        intact=not damage,
        bytes=saved.bytes,
        files=len(saved.manifest.files),
        damage=damage,
    )


def _foreign_verdict(opened: Opened, arena: Arena) -> Verdict:
    """That of what a foreign checkpoint has checksums of."""
    with progress(sum(file.size for file in opened.manifest.files)) as advance:
        found = ForeignSearch(opened, arena, advance)
        damage = list(found.run())
    nothing = not found.files and not found.compared
    return Verdict(
        path=str(opened.store),
        step=opened.manifest.step,
        intact=None if nothing else not damage,
        bytes=found.bytes,
        files=found.files,
        compared=found.compared,
        unchecked=found.unchecked,
        damage=damage,
    )


def _show(verdict: Verdict, console: Console) -> None:
    marks = {True: ("✓ ", "green"), False: ("✗ ", "bold red"), None: ("? ", "yellow")}
    files = wording.count(verdict.files, "file")
    details = [f"{wording.size(verdict.bytes)} in {files}"] if verdict.files else []
    if verdict.compared:
        details.append(f"{wording.size(verdict.compared)} of copies compared")
    if verdict.unchecked:
        details.append(f"{wording.size(verdict.unchecked)} not checked, without checksums")
    detail = "".join(f"  {each}" for each in ["; ".join(details)] if each)
    console.print(Text.assemble(marks[verdict.intact], verdict.path, (detail, "dim")))
    for each in verdict.damage:
        console.print(_told(each))


def _told(damage: Damage) -> Text:
    if damage.start is None:
        text = Text(f"  {damage.problem}")
    else:
        text = Text(f"  {damage.file}, bytes {damage.start}:{damage.stop}: {damage.problem}")
    if damage.tensors:
        tensors = wording.count(len(damage.tensors), "tensor")
        text.append(f"\n    {tensors}: {wording.listed(damage.tensors)}", "bold")
    return text
