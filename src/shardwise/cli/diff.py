"""`shardwise diff`: compare two checkpoints, and print the differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.cli import formatting as fmt
from shardwise.cli.find_checkpoints import open_checkpoint
from shardwise.cli.terminal import AsJson, print_json, stdout_console
from shardwise.manifest.names import MANIFEST

if TYPE_CHECKING:
    from shardwise.cli.differences import Comparison, Difference, TensorDifference

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
    from shardwise.cli.differences import compare_checkpoints  # imports torch, which takes a second

    first, second = open_checkpoint(a), open_checkpoint(b)
    with ExitStack() as locks:
        for checkpoint in (first, second):
            locks.enter_context(checkpoint.store.hold(MANIFEST, shared=True))
        comparison = compare_checkpoints(first, second)
    if as_json:
        print_json(comparison)
    else:
        _show_comparison(comparison, stdout_console(), math.inf if show_all else MAX_LISTED)
    if not comparison.same:
        raise typer.Exit(1)


def _show_comparison(comparison: Comparison, console: Console, max_rows: float) -> None:
    compared = fmt.count(comparison.tensors_compared, "tensor")
    if comparison.same:
        console.print(Text.assemble(("✓ ", "green"), f"the same; {compared} compared"))
        return
    console.print(Text.assemble(("a  ", "red"), comparison.a))
    console.print(Text.assemble(("b  ", "green"), comparison.b))
    _show_section(console, "only in a", [(name, Text()) for name in comparison.only_in_a], max_rows)
    _show_section(console, "only in b", [(name, Text()) for name in comparison.only_in_b], max_rows)
    sections: tuple[tuple[str, list[Difference], Callable[[Any], str]], ...] = (
        ("different kinds", comparison.kinds, str),
        ("different dtypes", comparison.dtypes, str),
        ("different shapes", comparison.shapes, fmt.shape),
        ("different values", comparison.values, fmt.value),
    )
    for title, differences, format_value in sections:
        rows = [
            (each.name, _change_text(format_value(each.a), format_value(each.b)))
            for each in differences
        ]
        _show_section(console, title, rows, max_rows)
    rows = [(each.name, _difference_text(each)) for each in comparison.tensors]
    _show_section(console, "different data", rows, max_rows)
    console.print()
    total = fmt.count(comparison.differences, "difference")
    console.print(Text(f"{total}; {compared} compared", "dim"))


def _show_section(
    console: Console, title: str, rows: Sequence[tuple[str, Text]], max_rows: float
) -> None:
    if not rows:
        return
    console.print(Text.assemble((f"\n{title}", "bold"), (f"  {len(rows):,}", "dim")))
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
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


def _difference_text(tensor: TensorDifference) -> Text:
    """Return how many elements differ, and by how much. It fits into a line with a usual name."""
    if tensor.differing == tensor.elements:
        count = "its only element" if tensor.elements == 1 else f"all {tensor.elements:,} elements"
        text = Text(count, "cyan")
    else:
        fraction = tensor.differing / tensor.elements
        percent = f"{fraction * 100:.3g}%" if fraction >= 0.0001 else "< 0.01%"
        count = f"{tensor.differing:,} of {tensor.elements:,} elements"
        text = Text.assemble((count, "cyan"), (f" ({percent})", "dim"))
    if tensor.max_abs_difference is not None:
        by = ", by " if tensor.elements == 1 else ", by at most "
        text.append(by, "dim").append(f"{tensor.max_abs_difference:.4g}")
    return text
