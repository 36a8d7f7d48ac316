"""`shardwise diff`: compare two checkpoints, and print the differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

import shardwise as sw
from shardwise.kernel.events import format_count
from shardwise.parts.cli import formatting as fmt
from shardwise.parts.cli.terminal import AsJson, print_json, progress, stdout_console

MAX_LISTED = 20


def diff(
    a: Annotated[
        str,
        typer.Argument(
            metavar="A", help="A checkpoint, or the root of a run: its newest checkpoint."
        ),
    ],
    b: Annotated[
        str, typer.Argument(metavar="B", help="The other checkpoint or root, in any format.")
    ],
    format_a: Annotated[
        str | None,
        typer.Option(metavar="FORMAT", help="The format to read, if A has several: hf, dcp, …"),
    ] = None,
    format_b: Annotated[
        str | None,
        typer.Option(metavar="FORMAT", help="The format to read, if B has several: hf, dcp, …"),
    ] = None,
    show_all: Annotated[
        bool, typer.Option("--all", help=f"List all differences, not only the first {MAX_LISTED}.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints.

    Compares names, dtypes, shapes, plain values, and every byte of the tensors. The checkpoints may
    be sharded differently. Memory use does not grow with their size.

    Exit status: 0 if they are the same, 1 if they differ or one of them is damaged.
    """
    first = sw.open(a, skip_unknown=True, format=format_a)
    second = sw.open(b, skip_unknown=True, format=format_b)
    with progress(sum(each.nbytes for each in first.tensors().values())) as on_event:
        comparison = first.compare(second, on_event)
    if as_json:
        print_json(comparison)
    else:
        _show_comparison(comparison, stdout_console(), math.inf if show_all else MAX_LISTED)
    if not comparison.same:
        raise typer.Exit(1)


def _show_comparison(comparison: sw.Comparison, console: Console, max_rows: float) -> None:
    compared = format_count(comparison.tensors_compared, "tensor")
    if comparison.same:
        console.print(Text.assemble(("✓ ", "green"), f"the same; {compared} compared"))
        return
    console.print(Text.assemble(("a  ", "red"), comparison.a))
    console.print(Text.assemble(("b  ", "green"), comparison.b))
    _show_section(console, "only in a", [(name, Text()) for name in comparison.only_in_a], max_rows)
    _show_section(console, "only in b", [(name, Text()) for name in comparison.only_in_b], max_rows)
    formats: tuple[tuple[str, list[Any], Callable[[Any], str]], ...] = (
        ("different kinds", comparison.kinds, str),
        ("different dtypes", comparison.dtypes, str),
        ("different shapes", comparison.shapes, fmt.shape),
        ("different values", comparison.values, fmt.value),
    )
    for title, differences, format_value in formats:
        rows = [
            (each.name, _change_text(format_value(each.a), format_value(each.b)))
            for each in differences
        ]
        _show_section(console, title, rows, max_rows)
    rows = [
        (each.name, _difference_text(each.elements, each.differing, each.max_abs_difference))
        for each in comparison.tensors
    ]
    _show_section(console, "different data", rows, max_rows)
    console.print()
    total = format_count(comparison.differences, "difference")
    console.print(Text(f"{total}; {compared} compared", "dim"))


def _show_section(
    console: Console, title: str, rows: Sequence[tuple[str, Text]], max_rows: float
) -> None:
    if not rows:
        return
    console.print(Text.assemble((f"\n{title}", "bold"), (f"  {len(rows):,}", "dim")))
    columns = Column(overflow="fold"), Column(overflow="fold")
    table = Table.grid(*columns, padding=(0, 3, 0, 0))
    shown = rows if len(rows) <= max_rows else rows[: int(max_rows)]
    for name, detail in shown:
        table.add_row(Text("  " + fmt.printable(name)), detail)
    console.print(table)
    if len(shown) < len(rows):
        console.print(Text(f"  … {len(rows) - len(shown):,} more: --all lists them", "dim"))


def _change_text(a: str, b: str) -> Text:
    if a == b:
        return Text.assemble((a, "cyan"), ("  (differs inside)", "dim"))
    return Text.assemble((a, "red"), ("  →  ", "dim"), (b, "green"))


def _difference_text(elements: int, differing: int, max_abs_difference: float | None) -> Text:
    """Return how many elements differ, and by how much; short enough for a line with a name."""
    if differing == elements:
        count = "its only element" if elements == 1 else f"all {elements:,} elements"
        text = Text(count, "cyan")
    else:
        fraction = differing / elements
        percent = f"{fraction * 100:.3g}%" if fraction >= 0.0001 else "< 0.01%"
        count = f"{differing:,} of {elements:,} elements"
        text = Text.assemble((count, "cyan"), (f" ({percent})", "dim"))
    if max_abs_difference is not None:
        by = ", by " if elements == 1 else ", by at most "
        text.append(by, "dim").append(f"{max_abs_difference:.4g}")
    return text
