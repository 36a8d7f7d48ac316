"""`shardwise diff`: in what two checkpoints differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.cli import wording
from shardwise.cli.places import checkpoint_at
from shardwise.cli.terminal import output, print_json
from shardwise.cli.values import spelled
from shardwise.manifest.names import MANIFEST

if TYPE_CHECKING:
    from shardwise.cli.compare import Comparison, Differing, Unlike

MOST_NAMES = 20


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="The directory of a checkpoint.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The directory of another.")],
    everything: Annotated[
        bool, typer.Option("--all", help="List all differences, however many.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Compare what the checkpoints at A and B hold, down to the byte.

    Exits with 1 if they differ: in names, dtypes, shapes, plain values, or the bytes of tensors.
    How they are sharded makes no difference. Takes little memory, however large they are.

    With --json: {"a", "b", "same", "tensors_compared", "only_in_a": [names], "only_in_b":
    [names], "kinds", "dtypes", "shapes", "values": [{"name", "a", "b"}], "tensors": [{"name",
    "elements", "differing", "max_abs_difference"}]}; the last is null where it is no number.
    """
    from shardwise.cli.compare import compare  # torch takes a second: only those wait who need it

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
    compared = wording.count(found.tensors_compared, "tensor")
    if found.same:
        console.print(Text.assemble(("✓ ", "green"), f"the same; {compared} compared"))
        return
    console.print(Text.assemble(("a  ", "red"), found.a))
    console.print(Text.assemble(("b  ", "green"), found.b))
    _section(console, "only in a", [(name, Text()) for name in found.only_in_a], most)
    _section(console, "only in b", [(name, Text()) for name in found.only_in_b], most)
    spellings: tuple[tuple[str, list[Unlike], Callable[[Any], str]], ...] = (
        ("of another kind", found.kinds, str),
        ("of another dtype", found.dtypes, str),
        ("of another shape", found.shapes, wording.shape),
        ("of another value", found.values, spelled),
    )
    for title, unlike, spell in spellings:
        rows = [(each.name, _both(spell(each.a), spell(each.b))) for each in unlike]
        _section(console, title, rows, most)
    rows = [(each.name, _extent(each)) for each in found.tensors]
    _section(console, "of other bytes", rows, most)
    console.print()
    differences = wording.count(found.differences, "difference")
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
        table.add_row(Text("  " + wording.printable(name)), detail)
    console.print(table)
    if len(shown) < len(rows):
        console.print(Text(f"  … {len(rows) - len(shown):,} more: --all lists them", "dim"))


def _both(a: str, b: str) -> Text:
    if a == b:
        return Text.assemble((a, "cyan"), ("  in its contents", "dim"))
    return Text.assemble((a, "red"), ("  →  ", "dim"), (b, "green"))


def _extent(tensor: Differing) -> Text:
    share = tensor.differing / tensor.elements
    percent = f"{share:.2%}" if share >= 0.0001 else "< 0.01%"
    count = f"{tensor.differing:,} of {tensor.elements:,} elements"
    text = Text.assemble((count, "cyan"), (f"  {percent}", "dim"))
    if tensor.max_abs_difference is not None:
        text.append("  by at most ", "dim").append(f"{tensor.max_abs_difference:.4g}")
    return text
