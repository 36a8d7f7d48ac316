"""`shardwise verify`: check every byte of a checkpoint against its checksums."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from rich.console import Console
from rich.text import Text

from shardwise.cli import formatting as fmt
from shardwise.cli.find_checkpoints import (
    CheckpointDirectory,
    CommittedCheckpoint,
    checked_pieces,
    find_checkpoints,
    open_committed,
)
from shardwise.cli.terminal import (
    Advance,
    AsJson,
    print_error,
    print_json,
    progress,
    stdout_console,
)
from shardwise.engine.buffers import Arena
from shardwise.engine.data_reader import DataReader
from shardwise.errors import CorruptionError, FormatError
from shardwise.events import Event, Recorder
from shardwise.manifest.checksums import BLOCK
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import FileEntry
from shardwise.manifest.names import MANIFEST
from shardwise.manifest.pieces import Pieces
from shardwise.store import open_store
from shardwise.store.store import Buffer

if TYPE_CHECKING:
    from shardwise.engine.opened import Opened

CHANGED_BYTES = "not the bytes that were saved"
ByteRange = tuple[int, int]


def verify(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH", help="A checkpoint, or the root of a run: all its checkpoints."
        ),
    ],
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
    directories = find_checkpoints(path)
    removed = [each.name for each in directories if each.removed]
    unfinished = [each.name for each in directories if not (each.committed or each.removed)]
    console = stdout_console()
    arena = Arena()
    verdicts = []
    for each in directories:
        if each.committed:
            verdicts.append(_verify_directory(each, arena))
            if not as_json:
                _show_verdict(verdicts[-1], console)
    damaged = sum(each.intact is False for each in verdicts)
    unchecked = sum(each.intact is None for each in verdicts)
    if as_json:
        intact = False if damaged else None if unchecked else True
        document = {"path": path, "intact": intact, "unfinished": unfinished, "removed": removed}
        print_json({**document, "checkpoints": verdicts})
    else:
        for name in unfinished:
            console.print(Text(f"– {name}  unfinished, not checked", "yellow"))
        for name in removed:
            console.print(Text(f"– {name}  removed, not checked", "dim"))
    total = fmt.count(len(verdicts), "checkpoint")
    if damaged:
        verb = "is" if damaged == 1 else "are"
        print_error(f"{damaged} of {total} {verb} damaged: load another, or copy the files again")
        raise typer.Exit(1)
    if unchecked:
        files = "its files have" if unchecked == 1 else "their files have"
        print_error(f"{unchecked} of {total} could not be checked: {files} no checksums")
        raise typer.Exit(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """Bytes of a file, in whole blocks, that differ from the bytes that were saved.

    Attributes:
        file: name of the file; None if the manifest is damaged, or if two copies of a tensor
            differ.
        start, stop: range of damaged bytes; None if the whole file is damaged.
        problem: description of the damage.
        tensors: names of the tensors that have bytes in the range.
    """

    file: str | None
    start: int | None = None
    stop: int | None = None
    problem: str
    tensors: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result for one checkpoint.

    Attributes:
        intact: whether no damage was found; None if nothing could be checked.
        bytes, files: the number of bytes and files that were compared with checksums; 0 if the
            manifest is damaged.
        compared: the bytes in copies of tensors that were compared with each other.
        unchecked: the bytes of tensors without checksums.
    """

    path: str
    step: int | None
    intact: bool | None
    bytes: int
    files: int
    compared: int = 0
    unchecked: int = 0
    damage: list[Damage]


def _verify_directory(entry: CheckpointDirectory, arena: Arena) -> Verdict:
    if entry.foreign is not None:
        return _verify_foreign(entry.foreign, arena)
    path = str(entry.store)
    with entry.store.hold(MANIFEST, shared=True):
        try:
            checkpoint = open_committed(entry.store)
            pieces = checked_pieces(checkpoint)
        except FormatError as error:
            damage = [Damage(file=None, problem=str(error), tensors=[])]
            return Verdict(
                path=path, step=entry.step, intact=False, bytes=0, files=0, damage=damage
            )
        with progress(checkpoint.bytes) as advance:
            damage = list(_find_damage(checkpoint, pieces, arena, advance))
    return Verdict(
        path=path,
        step=checkpoint.manifest.step,
        intact=not damage,
        bytes=checkpoint.bytes,
        files=len(checkpoint.manifest.files),
        damage=damage,
    )


def _find_damage(
    checkpoint: CommittedCheckpoint, pieces: Pieces, arena: Arena, advance: Advance
) -> Iterator[Damage]:
    """Read every byte of every file, and yield the damage."""
    with ThreadPoolExecutor(arena.threads, "shardwise-verify") as pool:
        for file_index, entry in enumerate(checkpoint.manifest.files):
            try:
                reader = DataReader(checkpoint.store, entry)
            except CorruptionError as error:
                names = _tensors_in_range(checkpoint, pieces, file_index, (0, entry.size))
                yield Damage(file=entry.name, problem=str(error), tensors=names)
                continue

            def check(start: int, reader: DataReader = reader) -> list[ByteRange]:
                stop = min(start + arena.buffer_size, reader.entry.checksums_at)
                with arena.buffer() as buffer:
                    ranges = list(_damaged_ranges(reader, start, stop, buffer))
                advance(reader.entry.name, stop - start)
                return ranges

            try:
                chunk_starts = range(0, entry.checksums_at, arena.buffer_size)
                ranges = [each for part in pool.map(check, chunk_starts) for each in part]
            finally:
                reader.close()
            for start, stop in _join_adjacent(ranges):
                yield Damage(
                    file=entry.name,
                    start=start,
                    stop=stop,
                    problem=_describe_damage(entry, start, stop),
                    tensors=_tensors_in_range(checkpoint, pieces, file_index, (start, stop)),
                )


def _describe_damage(entry: FileEntry, start: int, stop: int) -> str:
    parts = []
    if start < entry.data_at:
        parts.append("the header")
    if stop > entry.objects_at and entry.objects_at < entry.checksums_at:
        parts.append(f"values of rank {entry.rank}")
    return CHANGED_BYTES + (f" ({', '.join(parts)})" if parts else "")


def _tensors_in_range(
    checkpoint: CommittedCheckpoint, pieces: Pieces, file_index: int, byte_range: ByteRange
) -> list[str]:
    """Return the names of tensors that have bytes in a range of a file, including tied tensors."""
    manifest = checkpoint.manifest
    itemsize = np.array([DTYPES[entry.dtype].itemsize for entry in manifest.tensors], np.int64)
    start = pieces.start + manifest.files[file_index].data_at
    stop = start + pieces.shape.prod(axis=1) * itemsize[pieces.tensor]
    overlapping = (pieces.file == file_index) & (start < byte_range[1]) & (stop > byte_range[0])
    names = {manifest.tensors[i].name for i in set(pieces.tensor[overlapping].tolist())}
    return [t.name for t in manifest.tensors if t.name in names or t.same_as in names]


def _damaged_ranges(
    reader: DataReader, start: int, stop: int, buffer: Buffer
) -> Iterator[ByteRange]:
    try:
        reader.read(start, stop, buffer)
    except CorruptionError:
        if stop - start <= BLOCK:
            yield start, stop
            return
        for block_start in range(start, stop, BLOCK):
            block_stop = min(block_start + BLOCK, stop)
            yield from _damaged_ranges(reader, block_start, block_stop, buffer)


def _join_adjacent(ranges: list[ByteRange]) -> list[ByteRange]:
    """Join adjacent ranges. The ranges are in ascending order."""
    joined: list[ByteRange] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return joined


def _verify_foreign(opened: Opened, arena: Arena) -> Verdict:
    """Check the ranges of a foreign checkpoint that have checksums, and compare its copies."""
    # These import torch, which takes a second.
    from shardwise.engine.replicas import find_differences
    from shardwise.engine.verify import verify_foreign_files

    damage: list[Damage] = []
    nbytes = files = unchecked = 0
    with progress(sum(file.size for file in opened.manifest.files)) as advance:

        def on_event(event: Event) -> None:
            advance(event.stage, event.bytes)

        recorder = Recorder(on_event)
        for file in verify_foreign_files(opened, arena, recorder):
            nbytes += file.bytes_checked
            files += file.bytes_checked > 0
            unchecked += file.bytes_unchecked
            damage += [
                Damage(
                    file=each.file,
                    start=each.start,
                    stop=each.stop,
                    problem=CHANGED_BYTES,
                    tensors=each.tensors,
                )
                for each in file.damaged
            ]
        compared, problems = find_differences(opened, arena, recorder)
        damage += [Damage(file=None, problem=problem, tensors=[]) for problem in problems]
    return Verdict(
        path=str(opened.store),
        step=opened.manifest.step,
        intact=not damage if files or compared else None,
        bytes=nbytes,
        files=files,
        compared=compared,
        unchecked=unchecked,
        damage=damage,
    )


def _show_verdict(verdict: Verdict, console: Console) -> None:
    symbols = {True: ("✓ ", "green"), False: ("✗ ", "bold red"), None: ("? ", "yellow")}
    details = []
    if verdict.files:
        details.append(f"{fmt.format_bytes(verdict.bytes)} in {fmt.count(verdict.files, 'file')}")
    if verdict.compared:
        details.append(f"{fmt.format_bytes(verdict.compared)} of copies compared")
    if verdict.unchecked:
        details.append(f"{fmt.format_bytes(verdict.unchecked)} not checked, without checksums")
    detail = f"  {'; '.join(details)}" if details else ""
    line = Text.assemble(symbols[verdict.intact], verdict.path, (detail, "dim"))
    console.print(line, soft_wrap=True)
    for each in verdict.damage:
        location = ""
        if each.start is not None:
            file = "" if open_store(verdict.path).name == each.file else f"{each.file}, "
            location = f"{file}bytes {each.start}:{each.stop}: "
        text = Text(f"  {location}{each.problem}")
        if each.tensors:
            tensors = fmt.count(len(each.tensors), "tensor")
            text.append(f"\n    {tensors}: {fmt.names(each.tensors)}", "bold")
        console.print(text, soft_wrap=True)
