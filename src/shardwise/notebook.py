"""Show a checkpoint in a notebook: tables in HTML."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from shardwise.boxes import Box
from shardwise.events import format_bytes
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.layout import Layout
from shardwise.manifest.manifest import ObjectEntry, TensorEntry

MOST_ROWS = 30
LONGEST_CELL = 80


def checkpoint_html(path: str, layout: Layout) -> str:
    """Return a summary of a checkpoint as HTML, with a row for each key of the state."""
    tensors: dict[str, list[TensorEntry]] = {}
    values: dict[str, list[ObjectEntry]] = {}
    for tensor in layout.tensors:
        tensors.setdefault(tensor.name.split(".")[0], []).append(tensor)
    for entry in layout.objects:
        values.setdefault(entry.name.split(".")[0], []).append(entry)
    rows = []
    for key in dict.fromkeys([*tensors, *values]):
        entries, plain = tensors.get(key, []), values.get(key, [])
        nbytes = sum(_nbytes(each) for each in entries if each.same_as is None)
        dtypes = ", ".join(sorted({each.dtype for each in entries}))
        is_value = len(plain) == 1 and plain[0].name == key
        shown = str(plain[0].value) if is_value else str(len(plain) or "")
        rows.append(
            (key, str(len(entries) or ""), dtypes, format_bytes(nbytes) if entries else "", shown)
        )
    properties = {
        "format": layout.format,
        "step": str(layout.step),
        "ranks": str(layout.world_size),
        "size": format_bytes(layout.nbytes),
    }
    return _table(path, properties, ("key", "tensors", "dtype", "size", "values"), rows)


def tensor_html(entry: TensorEntry, boxes: Sequence[tuple[Box, int]]) -> str:
    """Return a summary of a tensor as HTML.

    Args:
        entry: the tensor.
        boxes: its boxes, each with the number of the rank or file that holds it.
    """
    properties = {
        "dtype": entry.dtype,
        "shape": str(list(entry.shape)),
        "size": format_bytes(_nbytes(entry)),
        "boxes": f"{len(boxes)}, of {len({rank for _, rank in boxes})} rank(s) or file(s)",
    }
    if entry.same_as is not None:
        properties["tied to"] = entry.same_as
    return _table(entry.name, properties, (), ())


def _cell(text: str) -> str:
    return escape(text if len(text) <= LONGEST_CELL else text[: LONGEST_CELL - 1] + "…")


def _table(
    title: str, properties: Mapping[str, str], columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> str:
    """Return a title, a line of facts and a table as HTML.

    All texts are escaped. Long texts and long tables are truncated.
    """
    line = " · ".join(f"{_cell(name)} {_cell(value)}" for name, value in properties.items())
    head = "".join(f"<th style='text-align:left'>{_cell(each)}</th>" for each in columns)
    body = "".join(
        "<tr>"
        + "".join(f"<td style='text-align:left'>{_cell(each)}</td>" for each in row)
        + "</tr>"
        for row in rows[:MOST_ROWS]
    )
    more = len(rows) - MOST_ROWS
    rest = f"<div>… and {more} more</div>" if more > 0 else ""
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if rows else ""
    return f"<div><b>{_cell(title)}</b><div>{line}</div>{table}{rest}</div>"


def _nbytes(entry: TensorEntry) -> int:
    return math.prod(entry.shape) * DTYPES[entry.dtype].itemsize
