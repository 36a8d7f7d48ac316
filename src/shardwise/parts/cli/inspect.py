"""`shardwise inspect`: show all names in a checkpoint, or one tensor or value."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column
from rich.text import Text

import shardwise as sw
from shardwise.kernel.events import format_bytes, format_count
from shardwise.parts.cli import formatting as fmt
from shardwise.parts.cli.name_tree import build_tree, list_leaves, print_tree
from shardwise.parts.cli.terminal import AsJson, print_json, print_labelled, stdout_console, table
from shardwise.parts.words import format_time

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
    checkpoint = sw.open(
        path, step="newest" if step is None else step, skip_unknown=True, format=format
    )
    names = [*checkpoint, *checkpoint.layout.per_rank]
    if name is not None and name in checkpoint.tensors():
        document = _tensor_document(checkpoint, name)
    elif name is not None and name in names:
        key = "values" if name in checkpoint.layout.per_rank else "value"
        document = {"path": checkpoint.path, "name": name, key: checkpoint.as_json(name)}
    else:
        shown = names if name is None else _names_below(checkpoint.path, names, name)
        document = _document(checkpoint, set(shown))
    console = stdout_console()
    if as_json:
        print_json(document)
    elif "boxes" in document:
        _show_tensor(document, console, show_all=show_all)
    elif "name" in document:
        _show_value(document, console)
    else:
        if name is None:
            _show_header(checkpoint, console)
        leaves = list_leaves(document["tensors"], document["values"], document["per_rank"])
        print_tree(build_tree(leaves, collapse=not show_all), console)


def _document(checkpoint: sw.Checkpoint, names: Collection[str]) -> dict[str, Any]:
    """Return what `--json` prints of some names of a checkpoint."""
    layout = checkpoint.layout
    document: dict[str, Any] = {
        "path": checkpoint.path,
        "step": checkpoint.step,
        "saved_at": layout.created,
        "save_id": layout.save_id,
        "world_size": checkpoint.world_size,
        "bytes": layout.nbytes,
        "metrics": checkpoint.metrics,
        "files": [
            {"name": file.name, "rank": _label_of(index, file), "bytes": file.size}
            for index, file in enumerate(layout.files)
        ],
        "tensors": _tensor_entries(checkpoint, names),
        "values": [entry for entry in layout.objects if entry.name in names],
        "per_rank": [name for name in layout.per_rank if name in names],
    }
    if checkpoint.frozen:
        document["frozen"] = checkpoint.frozen
    return document


def _tensor_entries(checkpoint: sw.Checkpoint, names: Collection[str]) -> list[dict[str, Any]]:
    tensors, boxes = checkpoint.tensors(), checkpoint.layout.piece_counts.tolist()
    return [
        {
            "name": entry.name,
            "dtype": entry.dtype,
            "shape": entry.shape,
            "bytes": tensors[entry.name].nbytes,
            "boxes": boxes[index],
            "same_as": entry.same_as,
        }
        for index, entry in enumerate(checkpoint.layout.tensors)
        if entry.name in names
    ]


def _label_of(index: int, file: Any) -> int:
    """Return the rank that wrote a file; for a foreign checkpoint, the index of the file."""
    return index if file.entry is None else file.entry.rank


def _tensor_document(checkpoint: sw.Checkpoint, name: str) -> dict[str, Any]:
    (document,) = _tensor_entries(checkpoint, {name})
    itemsize = checkpoint.tensors()[name].dtype.itemsize
    boxes = [
        {
            "offset": box.offset,
            "shape": box.shape,
            "rank": rank,
            "file": checkpoint.layout.file_of(rank).name,
            "bytes": box.size * itemsize,
        }
        for box, rank in checkpoint.boxes(name)
    ]
    return {"path": checkpoint.path, **document, "boxes": boxes}


def _names_below(path: str, names: Collection[str], name: str) -> list[str]:
    """Return the names that begin with `name` and a dot.

    Raises:
        StateError: there are none. The message suggests similar names: full names, or as many of
            the first parts of a name as `name` has.
    """
    prefix = name.rstrip(".") + "."
    if below := [each for each in names if each.startswith(prefix)]:
        return below
    parts = name.count(".") + 1
    candidates = {".".join(each.split(".")[:parts]) for each in names} | set(names)
    similar = [each for each in names if each.endswith("." + name)][:3]
    similar = similar or difflib.get_close_matches(name, sorted(candidates), n=3, cutoff=0.7)
    hint = ": leave NAME out to list all names"
    if similar:
        hint = f": did you mean {' or '.join(map(fmt.printable, similar))}?"
    raise sw.StateError(f"{path} has no name {name!r}, and no names that begin with it{hint}")


def _show_header(checkpoint: sw.Checkpoint, console: Console) -> None:
    layout = checkpoint.layout
    contents = [format_count(len(layout.tensors), "tensor")]
    if layout.objects:
        contents.append(format_count(len(layout.objects), "value"))
    if layout.per_rank:
        contents.append(f"{format_count(len(layout.per_rank), 'value')} for each rank")
    size = format_bytes(layout.nbytes)
    lines = [
        ("checkpoint", checkpoint.path),
        ("step", "–" if checkpoint.step is None else str(checkpoint.step)),
        ("saved", fmt.printable(format_time(layout.created)))
        if layout.created
        else ("format", layout.format),
        ("ranks", str(checkpoint.world_size)),
        ("contents", ", ".join(contents)),
        ("size", f"{size} in {format_count(len(layout.files), 'file')}"),
    ]
    for module, frozen in checkpoint.frozen.items():
        count = format_count(len(frozen), "frozen tensor")
        lines.append(("partial", f"only the trained part of {module}, without {count}"))
    if checkpoint.metrics:
        lines.append(("metrics", fmt.metrics(checkpoint.metrics)))
    print_labelled(lines, console)
    for line in checkpoint.left_out:
        console.print(Text(f"– left out: {fmt.printable(line)}", "yellow"))
    console.print()


def _show_tensor(tensor: dict[str, Any], console: Console, *, show_all: bool) -> None:
    type_text = f"{tensor['dtype']} {fmt.shape(tensor['shape'])}, {format_bytes(tensor['bytes'])}"
    lines = [("tensor", fmt.printable(tensor["name"])), ("type", type_text), ("in", tensor["path"])]
    if tensor["same_as"] is not None:
        lines.append(("tied to", fmt.printable(tensor["same_as"])))
    boxes = tensor["boxes"]
    files = format_count(len({each["file"] for each in boxes}), "file")
    lines.append(("stored as", f"{format_count(len(boxes), 'box', 'boxes')} in {files}"))
    print_labelled(lines, console)
    if not boxes:
        return
    console.print()
    shown = table(
        Column("rank", justify="right", no_wrap=True),
        Column("box", no_wrap=True),
        Column("size", justify="right", no_wrap=True),
        Column("file", no_wrap=True),
    )
    for each in boxes if show_all else boxes[:MAX_LISTED_BOXES]:
        box = str(sw.Box(each["offset"], each["shape"])).replace(",", ", ")
        size, file = format_bytes(each["bytes"]), Text(each["file"], "dim")
        shown.add_row(str(each["rank"]), Text(box), size, file)
    console.print(shown)
    unlisted = len(boxes) - MAX_LISTED_BOXES
    if unlisted > 0 and not show_all:
        console.print(Text(f"… {unlisted:,} more: --all lists them", "dim"))


def _show_value(value: dict[str, Any], console: Console) -> None:
    label = "value" if "value" in value else "value for each rank"
    print_labelled([(label, value["name"]), ("in", value["path"])], console)
    console.print()
    if "value" in value:
        text = json.dumps(value["value"], indent=2, ensure_ascii=False)
        console.print(Text("\n".join(map(fmt.printable, text.split("\n")))))
        return
    shown = table(Column("rank", justify="right"), Column("value", overflow="fold"))
    for rank, each in enumerate(value["values"]):
        shown.add_row(str(rank), Text(fmt.value(each), "green"))
    console.print(shown)
