"""Show a checkpoint in a notebook: tables in HTML, and plots of the boxes of a tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from shardwise.events import format_bytes
from shardwise.layout import Box, choose_plane
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.layout import Layout
from shardwise.manifest.manifest import ObjectEntry, TensorEntry

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_ROWS = 30
LONGEST_CELL = 80
MOST_LABELS = 64
MOST_FULL_LABELS = 16
MATPLOTLIB_MISSING = "plot() needs matplotlib: pip install 'shardwise[plot]'"


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
        "size": format_bytes(sum(file.size for file in layout.files)),
    }
    return _table(path, properties, ("key", "tensors", "dtype", "size", "values"), rows)


def tensor_html(entry: TensorEntry, boxes: Sequence[tuple[Box, int]]) -> str:
    """Return a summary of a tensor as HTML."""
    properties = {
        "dtype": entry.dtype,
        "shape": str(list(entry.shape)),
        "size": format_bytes(_nbytes(entry)),
        "boxes": f"{len(boxes)}, of {len({rank for _, rank in boxes})} rank(s) or file(s)",
    }
    if entry.same_as is not None:
        properties["tied to"] = entry.same_as
    return _table(entry.name, properties, (), ())


def draw_boxes(
    title: str,
    shape: Sequence[int],
    boxes: Sequence[tuple[Box, int]],
    noun: str,
    axes: Axes | None,
) -> Axes:
    """Draw the boxes of a tensor, each in the colour of its rank or file.

    Args:
        title: the title of the plot.
        shape: the global shape of the tensor.
        boxes: the boxes, each with its rank or the index of its file.
        noun: "rank" or "file", for labels.
        axes: the matplotlib axes to draw on; None for a new figure.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib import pyplot as plt
        from matplotlib.patches import Rectangle
    except ImportError as error:
        raise ImportError(MATPLOTLIB_MISSING) from error
    if axes is None:
        axes = plt.subplots(layout="constrained")[1]
    view = choose_plane(shape, [box for box, _ in boxes])
    owner_ids = sorted({owner_id for _, owner_id in boxes})
    has_few_owners = len(owner_ids) <= 10
    palette = mpl.colormaps["tab10" if has_few_owners else "viridis"]
    colour = {
        n: palette(i if has_few_owners else i / len(owner_ids)) for i, n in enumerate(owner_ids)
    }
    for (top, left, bottom, right), owner in zip(view.boxes, view.owners, strict=True):
        owner_id = boxes[owner][1]
        style: dict[str, Any] = {"facecolor": (*colour[owner_id][:3], 0.6), "edgecolor": "white"}
        axes.add_patch(Rectangle((left, top), right - left, bottom - top, **style))
        if len(view.boxes) <= MOST_LABELS:
            label = f"{noun} {owner_id}" if len(view.boxes) <= MOST_FULL_LABELS else str(owner_id)
            middle = (left + right) / 2, (top + bottom) / 2
            axes.text(*middle, label, ha="center", va="center", clip_on=True)
    axes.set_xlim(0, max(view.width, 1))
    axes.set_ylim(max(view.height, 1), 0)
    axes.set_xlabel(f"dimension {view.horizontal_dim}" if shape else "one element")
    if view.vertical_dim is None:
        axes.set_yticks([])
    else:
        axes.set_ylabel(f"dimension {view.vertical_dim}")
    hidden = f", at 0 of dimensions {list(view.hidden)}" if view.hidden else ""
    axes.set_title(f"{title}{hidden}")
    return axes


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
