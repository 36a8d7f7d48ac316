"""What one name of a checkpoint holds: the boxes of a tensor, or a value in full."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.cli import wording
from shardwise.cli.contents import show_facts
from shardwise.cli.outline import tensor_bytes
from shardwise.cli.picture import draw, rank_style
from shardwise.cli.places import Saved
from shardwise.cli.values import spelled
from shardwise.engine.datareader import DataReader
from shardwise.errors import FormatError
from shardwise.layout import Box, plane
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import TensorEntry
from shardwise.manifest.table import Pieces

MOST_BOXES = 32


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A box of a tensor, and where it lies."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    rank: int
    file: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """A tensor, and the boxes that it is stored in."""

    path: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    same_as: str | None
    boxes: list[StoredBox]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedValue:
    """A plain value that all ranks share."""

    path: str
    name: str
    value: object


@dataclass(frozen=True, slots=True, kw_only=True)
class RankValues:
    """A value that each rank has of its own, by rank."""

    path: str
    name: str
    values: list[object]


Named = NamedTensor | NamedValue | RankValues


def find(saved: Saved, pieces: Pieces, name: str) -> Named | None:
    """What a name holds, if it is one.

    Raises:
        CorruptionError: a value of each rank is not what was saved.
    """
    path = str(saved.store)
    for entry in saved.manifest.tensors:
        if entry.name == name:
            return _tensor(saved, pieces, entry)
    for each in saved.manifest.objects:
        if each.name == name:
            return NamedValue(path=path, name=name, value=each.value)
    if name in saved.manifest.per_rank:
        return RankValues(path=path, name=name, values=rank_values(saved, name))
    return None


def rank_values(saved: Saved, name: str) -> list[object]:
    """A value of each rank, encoded, by rank.

    Raises:
        CorruptionError: they are not what was saved.
    """
    values: list[object] = [None] * saved.manifest.world_size
    for entry in saved.manifest.files:
        reader = DataReader(saved.store, entry)
        try:
            held = msgspec.json.decode(reader.read_objects() or b"{}", type=dict[str, object])
        except msgspec.DecodeError as error:
            raise FormatError(f"{entry.name} in {saved.store}: {error}") from error
        finally:
            reader.close()
        values[entry.rank] = held.get(name)
    return values


def show(found: Named, console: Console, *, everything: bool) -> None:
    """Print what a name holds."""
    if isinstance(found, NamedTensor):
        _show_tensor(found, console, everything=everything)
    elif isinstance(found, NamedValue):
        show_facts([("value", found.name), ("in", found.path)], console)
        console.print()
        console.print(Text(_pretty(found.value)))
    else:
        show_facts([("value for each rank", found.name), ("in", found.path)], console)
        console.print()
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
        table.add_column("rank", justify="right")
        table.add_column("value", overflow="fold")
        for rank, value in enumerate(found.values):
            table.add_row(str(rank), Text(spelled(value), "green"))
        console.print(table)


def _show_tensor(found: NamedTensor, console: Console, *, everything: bool) -> None:
    kind = f"{found.dtype} {wording.shape(found.shape)}, {wording.size(found.bytes)}"
    lines = [("tensor", wording.printable(found.name)), ("is", kind), ("in", found.path)]
    if found.same_as is not None:
        lines.append(("tied to", wording.printable(found.same_as)))
    files = {each.file for each in found.boxes}
    boxes = wording.count(len(found.boxes), "box", "boxes")
    lines.append(("stored as", f"{boxes} in {wording.count(len(files), 'file')}"))
    show_facts(lines, console)
    if not found.boxes:
        return
    console.print()
    if len(found.boxes) > 1:
        _draw(found, console)
    _show_legend(found.boxes if everything else found.boxes[:MOST_BOXES], console)
    more = len(found.boxes) - MOST_BOXES
    if more > 0 and not everything:
        console.print(Text(f"… {more:,} more: --all lists them", "dim"))


def _draw(found: NamedTensor, console: Console) -> None:
    view = plane(found.shape, [Box(each.offset, each.shape) for each in found.boxes])
    for line in draw(view, [each.rank for each in found.boxes]):
        console.print(line, no_wrap=True)
    if view.hidden:
        hidden = ", ".join(map(str, view.hidden))
        console.print(Text(f"dimensions {view.down} and {view.across}, at 0 of {hidden}", "dim"))
    console.print()


def _show_legend(boxes: list[StoredBox], console: Console) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column("box", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("file", no_wrap=True)
    for each in boxes:
        rank = Text(f" {each.rank} ", rank_style(each.rank))
        box = str(Box(each.offset, each.shape)).replace(",", ", ")
        table.add_row(rank, Text(box), wording.size(each.bytes), Text(each.file, "dim"))
    console.print(table)


def _tensor(saved: Saved, pieces: Pieces, entry: TensorEntry) -> NamedTensor:
    manifest = saved.manifest
    stored = entry.same_as or entry.name
    number = next(i for i, each in enumerate(manifest.tensors) if each.name == stored)
    ndim = len(entry.shape)
    boxes = []
    for row in np.flatnonzero(pieces.tensor == number).tolist():
        file = manifest.files[int(pieces.file[row])]
        box = Box(
            tuple(pieces.offset[row, :ndim].tolist()), tuple(pieces.shape[row, :ndim].tolist())
        )
        nbytes = box.size * DTYPES[entry.dtype].itemsize
        boxes.append(StoredBox(box.offset, box.shape, file.rank, file.name, nbytes))
    return NamedTensor(
        path=str(saved.store),
        name=entry.name,
        dtype=entry.dtype,
        shape=entry.shape,
        bytes=tensor_bytes(entry),
        same_as=entry.same_as,
        boxes=boxes,
    )


def _pretty(value: object) -> str:
    text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    return "\n".join(map(wording.printable, text.split("\n")))
