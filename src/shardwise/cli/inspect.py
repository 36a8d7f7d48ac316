"""`shardwise inspect`: show all names in a checkpoint, or one tensor or value."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
import numpy as np
import typer
from rich.console import Console
from rich.text import Text

from shardwise.cli import formatting as fmt
from shardwise.cli.find_checkpoints import CommittedCheckpoint, checked_pieces, open_checkpoint
from shardwise.cli.name_tree import build_tree, list_leaves, print_tree, tensor_bytes
from shardwise.cli.terminal import AsJson, print_json, print_labelled, stdout_console, table
from shardwise.engine.data_reader import DataReader
from shardwise.errors import FormatError, StateError
from shardwise.layout import Box
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import Manifest, TensorEntry
from shardwise.manifest.pieces import Pieces

MAX_LISTED_BOXES = 32


def inspect(
    path: Annotated[
        str,
        typer.Argument(metavar="PATH", help="A checkpoint, or the root of a run: its newest one."),
    ],
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="A tensor, a value, or the beginning of names."),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(metavar="N", help="The step, if PATH is a root. Default: the newest."),
    ] = None,
    format: Annotated[  # noqa: A002 - the option's name
        str | None,
        typer.Option(metavar="FORMAT", help="The format to read, if PATH has several: hf, dcp, …"),
    ] = None,
    show_all: Annotated[
        bool, typer.Option("--all", help="Show every layer and every part of a tensor.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a checkpoint contains.

    Without NAME, prints a tree of all names, with dtypes, shapes and sizes. Layers with equal
    contents are printed once.

    If NAME is a tensor, prints the boxes that it is stored in, and the ranks that wrote them. If
    NAME is a value, prints the value. If NAME is the beginning of names, for example model.layers,
    prints the tree below it.

    Tensor data is not read, so this is fast for checkpoints of any size.
    """
    checkpoint = open_checkpoint(path, format, step)
    pieces = checked_pieces(checkpoint)
    if name is not None and _show_name(checkpoint, pieces, name, show_all=show_all, json=as_json):
        return
    shown = checkpoint if name is None else _restrict_to_prefix(checkpoint, name)
    if as_json:
        print_json(_checkpoint_document(shown))
        return
    console = stdout_console()
    if name is None:
        _show_header(checkpoint, console)
    print_tree(build_tree(list_leaves(shown.manifest), collapse=not show_all), console)


def _show_name(
    checkpoint: CommittedCheckpoint, pieces: Pieces, name: str, *, show_all: bool, json: bool
) -> bool:
    """Print the tensor or value with this name. Return whether the checkpoint has it."""
    manifest, path, console = checkpoint.manifest, str(checkpoint.store), stdout_console()
    tensors = {entry.name: entry for entry in manifest.tensors}
    values = {entry.name: entry.value for entry in manifest.objects}
    if name in tensors:
        entry = tensors[name]
        boxes = _list_stored_boxes(checkpoint, pieces, entry)
        if json:
            print_json(_tensor_document(path, entry, boxes))
        else:
            _show_tensor(path, entry, boxes, console, show_all=show_all)
    elif name in values:
        if json:
            print_json({"path": path, "name": name, "value": values[name]})
        else:
            print_labelled([("value", name), ("in", path)], console)
            console.print()
            console.print(Text(_format_json(values[name])))
    elif name in manifest.per_rank:
        values_by_rank = rank_values(checkpoint, name)
        if json:
            print_json({"path": path, "name": name, "values": values_by_rank})
        else:
            _show_rank_values(path, name, values_by_rank, console)
    else:
        return False
    return True


def rank_values(checkpoint: CommittedCheckpoint, name: str) -> list[object]:
    """Return the encoded values of a name that differs between ranks, ordered by rank.

    Raises:
        CorruptionError: the values do not match their checksums.
    """
    values: list[object] = [None] * checkpoint.manifest.world_size
    for entry in checkpoint.manifest.files:
        reader = DataReader(checkpoint.store, entry)
        try:
            values_of_file = msgspec.json.decode(
                reader.read_objects() or b"{}", type=dict[str, object]
            )
        except msgspec.DecodeError as error:
            raise FormatError(
                f"{checkpoint.store}/{entry.name}: the values of rank {entry.rank} are not "
                f"valid JSON: {error}; copy the file again, or inspect another checkpoint"
            ) from error
        finally:
            reader.close()
        values[entry.rank] = values_of_file.get(name)
    return values


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A box of a tensor, the file that it is stored in, and the rank that wrote it."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    rank: int
    file: str
    bytes: int


def _list_stored_boxes(
    checkpoint: CommittedCheckpoint, pieces: Pieces, entry: TensorEntry
) -> list[StoredBox]:
    manifest = checkpoint.manifest
    stored_name = entry.same_as or entry.name
    tensor_index = next(i for i, each in enumerate(manifest.tensors) if each.name == stored_name)
    ndim = len(entry.shape)
    boxes = []
    for row in np.flatnonzero(pieces.tensor == tensor_index).tolist():
        file = manifest.files[int(pieces.file[row])]
        offset = tuple(pieces.offset[row, :ndim].tolist())
        shape = tuple(pieces.shape[row, :ndim].tolist())
        nbytes = Box(offset, shape).size * DTYPES[entry.dtype].itemsize
        boxes.append(StoredBox(offset, shape, file.rank, file.name, nbytes))
    return boxes


def _checkpoint_document(checkpoint: CommittedCheckpoint) -> dict[str, Any]:
    manifest = checkpoint.manifest
    return {
        "path": str(checkpoint.store),
        "step": manifest.step,
        "saved_at": manifest.created,
        "save_id": manifest.save_id,
        "world_size": manifest.world_size,
        "bytes": checkpoint.bytes,
        "metrics": manifest.metrics,
        "files": [
            {"name": file.name, "rank": file.rank, "bytes": file.size} for file in manifest.files
        ],
        "tensors": [
            {
                "name": entry.name,
                "dtype": entry.dtype,
                "shape": entry.shape,
                "bytes": tensor_bytes(entry),
                "boxes": sum(each.repeat.count if each.repeat else 1 for each in entry.pieces),
                "same_as": entry.same_as,
            }
            for entry in manifest.tensors
        ],
        "values": manifest.objects,
        "per_rank": manifest.per_rank,
    }


def _tensor_document(path: str, entry: TensorEntry, boxes: list[StoredBox]) -> dict[str, Any]:
    return {
        "path": path,
        "name": entry.name,
        "dtype": entry.dtype,
        "shape": entry.shape,
        "bytes": tensor_bytes(entry),
        "same_as": entry.same_as,
        "boxes": boxes,
    }


def _restrict_to_prefix(checkpoint: CommittedCheckpoint, name: str) -> CommittedCheckpoint:
    """Return the part of a checkpoint with the names that begin with `name` and a dot.

    Raises:
        StateError: the checkpoint has no such names. The message suggests similar names.
    """
    prefix = name.rstrip(".") + "."
    manifest = msgspec.structs.replace(
        checkpoint.manifest,
        tensors=tuple(each for each in checkpoint.manifest.tensors if each.name.startswith(prefix)),
        objects=tuple(each for each in checkpoint.manifest.objects if each.name.startswith(prefix)),
        per_rank=tuple(each for each in checkpoint.manifest.per_rank if each.startswith(prefix)),
    )
    if not (manifest.tensors or manifest.objects or manifest.per_rank):
        raise StateError(
            f"{checkpoint.store} has no name {name!r}, and no names that begin with it"
            f"{_suggest_names(checkpoint.manifest, name)}"
        )
    return replace(checkpoint, manifest=manifest)


def _suggest_names(manifest: Manifest, name: str) -> str:
    """Return the end of an error message: similar names, or how to list all names.

    A similar name is a full name, or as many of its first parts as `name` has.
    """
    parts = name.count(".") + 1
    names = [each.name for each in manifest.tensors]
    names += [*(each.name for each in manifest.objects), *manifest.per_rank]
    candidates = {".".join(each.split(".")[:parts]) for each in names} | set(names)
    names_with_ending = [each for each in names if each.endswith("." + name)]
    similar = names_with_ending[:3] or difflib.get_close_matches(
        name, sorted(candidates), n=3, cutoff=0.7
    )
    if similar:
        return f": did you mean {' or '.join(map(fmt.printable, similar))}?"
    return ": leave NAME out to list all names"


def _show_header(checkpoint: CommittedCheckpoint, console: Console) -> None:
    manifest = checkpoint.manifest
    contents = [fmt.count(len(manifest.tensors), "tensor")]
    if manifest.objects:
        contents.append(fmt.count(len(manifest.objects), "value"))
    if manifest.per_rank:
        contents.append(f"{fmt.count(len(manifest.per_rank), 'value')} for each rank")
    lines = [
        ("checkpoint", str(checkpoint.store)),
        ("step", "–" if manifest.step is None else str(manifest.step)),
        ("format", manifest.format)
        if checkpoint.foreign is not None
        else ("saved", f"{fmt.time(manifest.created)} UTC"),
        ("ranks", str(manifest.world_size)),
        ("contents", ", ".join(contents)),
        (
            "size",
            f"{fmt.format_bytes(checkpoint.bytes)} in {fmt.count(len(manifest.files), 'file')}",
        ),
    ]
    if manifest.metrics:
        lines.append(("metrics", fmt.metrics(manifest.metrics)))
    print_labelled(lines, console)
    for line in checkpoint.foreign.left_out if checkpoint.foreign is not None else ():
        console.print(Text(f"– left out: {fmt.printable(line)}", "yellow"))
    console.print()


def _show_tensor(
    path: str,
    entry: TensorEntry,
    boxes: list[StoredBox],
    console: Console,
    *,
    show_all: bool,
) -> None:
    type_text = f"{entry.dtype} {fmt.shape(entry.shape)}, {fmt.format_bytes(tensor_bytes(entry))}"
    lines = [("tensor", fmt.printable(entry.name)), ("type", type_text), ("in", path)]
    if entry.same_as is not None:
        lines.append(("tied to", fmt.printable(entry.same_as)))
    files = fmt.count(len({each.file for each in boxes}), "file")
    lines.append(("stored as", f"{fmt.count(len(boxes), 'box', 'boxes')} in {files}"))
    print_labelled(lines, console)
    if not boxes:
        return
    console.print()
    boxes_table = table()
    boxes_table.add_column("rank", justify="right", no_wrap=True)
    boxes_table.add_column("box", no_wrap=True)
    boxes_table.add_column("size", justify="right", no_wrap=True)
    boxes_table.add_column("file", no_wrap=True)
    for each in boxes if show_all else boxes[:MAX_LISTED_BOXES]:
        box = str(Box(each.offset, each.shape)).replace(",", ", ")
        boxes_table.add_row(
            str(each.rank), Text(box), fmt.format_bytes(each.bytes), Text(each.file, "dim")
        )
    console.print(boxes_table)
    unlisted = len(boxes) - MAX_LISTED_BOXES
    if unlisted > 0 and not show_all:
        console.print(Text(f"… {unlisted:,} more: --all lists them", "dim"))


def _show_rank_values(path: str, name: str, values_by_rank: list[object], console: Console) -> None:
    print_labelled([("value for each rank", name), ("in", path)], console)
    console.print()
    values_table = table()
    values_table.add_column("rank", justify="right")
    values_table.add_column("value", overflow="fold")
    for rank, value in enumerate(values_by_rank):
        values_table.add_row(str(rank), Text(fmt.value(value), "green"))
    console.print(values_table)


def _format_json(value: object) -> str:
    text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    return "\n".join(map(fmt.printable, text.split("\n")))
