"""`shardwise diff`: compare two checkpoints."""

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
from shardwise.cli.find_checkpoints import checkpoint_at
from shardwise.cli.terminal import AsJson, output, print_json
from shardwise.manifest.names import MANIFEST

if TYPE_CHECKING:
    from shardwise.cli.differences import Comparison, Differing, Unlike

MOST_NAMES = 20


def diff(
    a: Annotated[
        str,
        typer.Argument(metavar="A", help="A checkpoint; for a run's directory, the newest."),
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="Another checkpoint, in any format.")],
    everything: Annotated[
        bool, typer.Option("--all", help=f"List all differences, not only the first {MOST_NAMES}.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints.

    Compares names, dtypes, shapes, plain values, and every byte of the tensors, regardless of how
    the tensors are sharded. Memory use does not grow with the size of the checkpoints.

    Exit status: 0 if they are the same, 1 if they differ or one of them is damaged.
    """
    from shardwise.cli.differences import compare  # imports torch, which takes a second

    one, other = checkpoint_at(a), checkpoint_at(b)
    with ExitStack() as held:
        for saved in (one, other):
            held.enter_context(saved.store.hold(MANIFEST, shared=True))
        found = compare(one, other)
    if as_json:
        print_json(found)
    else:
        _show(found, output(), math.inf if everything else MOST_NAMES)
    if not found.same:
        raise typer.Exit(1)


def _show(found: Comparison, console: Console, most: float) -> None:
    compared = fmt.count(found.tensors_compared, "tensor")
    if found.same:
        console.print(Text.assemble(("✓ ", "green"), f"the same; {compared} compared"))
        return
    console.print(Text.assemble(("a  ", "red"), found.a))
    console.print(Text.assemble(("b  ", "green"), found.b))
    _section(console, "only in a", [(name, Text()) for name in found.only_in_a], most)
    _section(console, "only in b", [(name, Text()) for name in found.only_in_b], most)
    spellings: tuple[tuple[str, list[Unlike], Callable[[Any], str]], ...] = (
        ("different kinds", found.kinds, str),
        ("different dtypes", found.dtypes, str),
        ("different shapes", found.shapes, fmt.shape),
        ("different values", found.values, fmt.value),
    )
    for title, unlike, spell in spellings:
        rows = [(each.name, _both(spell(each.a), spell(each.b))) for each in unlike]
        _section(console, title, rows, most)
    rows = [(each.name, _extent(each)) for each in found.tensors]
    _section(console, "different data", rows, most)
    console.print()
    differences = fmt.count(found.differences, "difference")
    console.print(Text(f"{differences}; {compared} compared", "dim"))


def _section(console: Console, title: str, rows: Sequence[tuple[str, Text]], most: float) -> None:
    if not rows:
        return
    console.print(Text.assemble((f"\n{title}", "bold"), (f"  {len(rows):,}", "dim")))
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    shown = rows if len(rows) <= most else rows[: int(most)]
    for name, detail in shown:
        table.add_row(Text("  " + fmt.printable(name)), detail)
    console.print(table)
    if len(shown) < len(rows):
        console.print(Text(f"  … {len(rows) - len(shown):,} more: --all lists them", "dim"))


def _both(a: str, b: str) -> Text:
    if a == b:
        return Text.assemble((a, "cyan"), ("  (differs inside)", "dim"))
    return Text.assemble((a, "red"), ("  →  ", "dim"), (b, "green"))


def _extent(tensor: Differing) -> Text:
    share = tensor.differing / tensor.elements
    percent = f"{share:.2%}" if share >= 0.0001 else "< 0.01%"
    count = f"{tensor.differing:,} of {tensor.elements:,} elements"
    text = Text.assemble((count, "cyan"), (f"  {percent}", "dim"))
    if tensor.max_abs_difference is not None:
        text.append("  by at most ", "dim").append(f"{tensor.max_abs_difference:.4g}")
    return text
