"""All that a checkpoint holds: as values, as a header, as a tree of names."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from shardwise.cli import wording
from shardwise.cli.outline import Node, Row, rows, tensor_bytes
from shardwise.cli.places import Saved
from shardwise.errors import StateError
from shardwise.manifest.manifest import Manifest, TensorEntry


@dataclass(frozen=True, slots=True)
class File:
    """A data file, and the rank that wrote it."""

    name: str
    rank: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor, and in how many boxes it is stored."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    boxes: int
    same_as: str | None


@dataclass(frozen=True, slots=True)
class Value:
    """A plain value that all ranks share, as the manifest encodes it."""

    name: str
    value: object


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """All that a manifest says, but for where the boxes lie."""

    path: str
    step: int | None
    saved_at: str
    save_id: str
    world_size: int
    bytes: int
    metrics: dict[str, float | None]
    files: list[File]
    tensors: list[Tensor]
    values: list[Value]
    per_rank: list[str]


def contents(saved: Saved) -> Contents:
    """All that a checkpoint holds."""
    manifest = saved.manifest
    return Contents(
        path=str(saved.store),
        step=manifest.step,
        saved_at=manifest.created,
        save_id=manifest.save_id,
        world_size=manifest.world_size,
        bytes=saved.bytes,
        metrics=manifest.metrics,
        files=[File(file.name, file.rank, file.size) for file in manifest.files],
        tensors=[_tensor(entry) for entry in manifest.tensors],
        values=[Value(entry.name, entry.value) for entry in manifest.objects],
        per_rank=list(manifest.per_rank),
    )


def below(saved: Saved, name: str) -> Saved:
    """The same checkpoint, of which only the names below one are left.

    Raises:
        StateError: there are none; says which come close.
    """
    prefix = name.rstrip(".") + "."
    manifest = msgspec.structs.replace(
        saved.manifest,
        tensors=tuple(each for each in saved.manifest.tensors if each.name.startswith(prefix)),
        objects=tuple(each for each in saved.manifest.objects if each.name.startswith(prefix)),
        per_rank=tuple(each for each in saved.manifest.per_rank if each.startswith(prefix)),
    )
    if not (manifest.tensors or manifest.objects or manifest.per_rank):
        raise StateError(f"{saved.store} has no {name!r}{_meant(saved.manifest, name)}")
    return replace(saved, manifest=manifest)


def show_header(saved: Saved, console: Console) -> None:
    """Print where the checkpoint is, when it was saved and by how many, and how large it is."""
    manifest = saved.manifest
    held = [wording.count(len(manifest.tensors), "tensor")]
    if manifest.objects:
        held.append(wording.count(len(manifest.objects), "value"))
    if manifest.per_rank:
        held.append(f"{wording.count(len(manifest.per_rank), 'value')} for each rank")
    files = wording.count(len(manifest.files), "file")
    lines = [
        ("checkpoint", str(saved.store)),
        ("step", "–" if manifest.step is None else str(manifest.step)),
        ("format", manifest.format)
        if saved.foreign is not None
        else ("saved", f"{wording.moment(manifest.created)} UTC"),
        ("ranks", str(manifest.world_size)),
        ("holds", ", ".join(held)),
        ("size", f"{wording.size(saved.bytes)} in {files}"),
    ]
    if manifest.metrics:
        lines.append(("metrics", wording.metrics(manifest.metrics)))
    show_facts(lines, console)
    for line in saved.foreign.left_out if saved.foreign is not None else ():
        console.print(Text(f"– left out: {wording.printable(line)}", "yellow"))
    console.print()


def show_facts(lines: Sequence[tuple[str, str]], console: Console) -> None:
    """Print what is known, one fact to a line, after its name."""
    width = max(len(label) for label, _ in lines) + 2
    for label, text in lines:
        console.print(Text.assemble((label.ljust(width), "dim"), text))


def show_tree(nodes: tuple[Node, ...], console: Console) -> None:
    """Print names as a tree, with dtypes, shapes, sizes and short values beside them."""
    lines = list(rows(nodes))
    tensors = [leaf for row in lines if (leaf := row.node.leaf) is not None and leaf.dtype]
    sizes = {id(row): _size(row.node) for row in lines}
    widths = (
        max((cell_len(_label(row)) for row in lines), default=0) + 3,
        max((len(leaf.dtype) for leaf in tensors), default=0) + 2,
        max((len(wording.shape(leaf.shape)) for leaf in tensors), default=0) + 2,
        max(map(len, sizes.values()), default=0),
    )
    for row in lines:
        line = _line(row, sizes[id(row)], widths)
        console.print(line, no_wrap=True, overflow="ellipsis", crop=True)


def _line(row: Row, size: str, widths: tuple[int, int, int, int]) -> Text:
    name, dtype, shape, of_size = widths
    node, leaf = row.node, row.node.leaf
    style = "bold" if node.children and not row.branches else ""
    line = Text.assemble((row.branches, "dim"), (wording.printable(node.label), style))
    line.append(" " * (name - cell_len(_label(row))))
    if leaf is not None and not leaf.dtype:
        return line.append(leaf.text, "green")
    if leaf is None:
        return line.append(" " * (dtype + shape) + size.rjust(of_size) if size else "", "dim")
    line.append(leaf.dtype.ljust(dtype), "magenta")
    line.append(wording.shape(leaf.shape).ljust(shape), "cyan")
    return line.append(size.rjust(of_size)).append(f"   {leaf.text}" if leaf.text else "", "dim")


def _label(row: Row) -> str:
    return row.branches + wording.printable(row.node.label)


def _size(node: Node) -> str:
    if not node.nbytes or (node.leaf is not None and not node.leaf.nbytes):
        return ""
    each = wording.size(node.nbytes // node.count)
    return f"{node.count} × {each}" if node.count > 1 else each


def _tensor(entry: TensorEntry) -> Tensor:
    boxes = sum(piece.repeat.count if piece.repeat else 1 for piece in entry.pieces)
    return Tensor(entry.name, entry.dtype, entry.shape, tensor_bytes(entry), boxes, entry.same_as)


def _meant(manifest: Manifest, name: str) -> str:
    """A hint at names that come close: whole ones, or as many parts as were given."""
    parts = name.count(".") + 1
    names = [each.name for each in manifest.tensors]
    names += [*(each.name for each in manifest.objects), *manifest.per_rank]
    known = {".".join(each.split(".")[:parts]) for each in names} | set(names)
    ending = [each for each in names if each.endswith("." + name)]
    near = ending[:3] or difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.7)
    return f": did you mean {' or '.join(map(wording.printable, near))}?" if near else ""
