"""`shardwise report`: where the time of saves and loads went, as a page and as text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column
from rich.text import Text

import shardwise as sw
from shardwise.kernel.events import format_count
from shardwise.parts.cli import formatting as fmt
from shardwise.parts.cli.terminal import AsJson, print_json, stdout_console, table

MAX_LISTED = 8


def report(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH", help="A checkpoint, or the root of a run (then its newest checkpoint)."
        ),
    ],
    other: Annotated[
        str | None,
        typer.Argument(
            metavar="OTHER", help="A checkpoint or root to compare with.", show_default=False
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The page to write.")
    ] = Path("report.html"),
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write a trace for Perfetto (ui.perfetto.dev)."),
    ] = None,
    tensor: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Show the shards of this tensor. Repeatable."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show where the time of saves and loads went.

    Writes one HTML page, which needs no network: a heat map and a timeline of all ranks, their
    bandwidths, the growth of the run, its recoveries, and the shards of tensors. Prints the
    stragglers, and why the save was slow.

    Without OTHER, compares with the save of median duration among the earlier ones with the same
    number of ranks.

    Telemetry that is damaged or missing is listed, and the rest is shown.
    """
    made = sw.report(path, baseline=other, tensors=tensor or ())
    replaced = {str(file) for file in (output, trace) if file is not None and file.exists()}
    made.write_page(output)
    if trace is not None:
        made.write_trace(trace)
    written = {"page": str(output), "trace": None if trace is None else str(trace)}
    if as_json:
        names = ("operation", "stragglers", "slowdown", "problems")
        print_json({"path": made.path, **written, **{name: getattr(made, name) for name in names}})
        return
    console = stdout_console()
    _show_findings(made, console, has_other=other is not None)
    for name in filter(None, written.values()):
        verb = "replaced " if name in replaced else "wrote "
        console.print(Text.assemble(verb, (fmt.printable(name), "bold")), soft_wrap=True)


def _show_findings(made: sw.Report, console: Console, *, has_other: bool) -> None:
    console.print(Text(fmt.printable(made.headline), "bold"), soft_wrap=True)
    if made.operation is not None:
        console.print(made.operation.amounts)
    console.print(Text(fmt.printable(made.path), "dim"), soft_wrap=True)
    for problem in made.problems:
        console.print(Text(fmt.printable(problem), "yellow"), soft_wrap=True)
    if made.operation is None:
        return
    console.print()
    if made.stragglers:
        rows = [
            (each.stage, each.who, fmt.duration(each.seconds), fmt.duration(each.median))
            for each in made.stragglers
        ]
        _show_rows(("stage", "stragglers", "slowest", "median of all"), rows, console)
        for each in made.stragglers[:MAX_LISTED]:
            if each.retries:
                retries = format_count(each.retries, "retry", "retries")
                line = f"{each.stage} of {each.who}: {retries} of requests to the storage"
                console.print(fmt.printable(line), style="dim")
    else:
        console.print("no stragglers: no rank was much slower than the others in any stage")
    if not (made.slowdown or has_other) and made.operation.is_save:
        ranks = format_count(made.operation.ranks, "rank")
        console.print(f"no earlier {made.operation.operation} on {ranks} to compare with")
    _show_slowdown(made, console)
    console.print()


def _show_slowdown(made: sw.Report, console: Console) -> None:
    slowdown = made.slowdown
    if slowdown is None:
        return
    console.print()
    console.print(Text(fmt.printable(slowdown.sentence), "bold"), soft_wrap=True)
    for note in slowdown.notes:
        console.print(fmt.printable(note), soft_wrap=True)
    rows = [
        (each.stage, each.who, fmt.duration(each.before), fmt.duration(each.after))
        for each in slowdown.differences
    ]
    _show_rows(("stage", "who", "then", "now"), rows, console)
    for each in slowdown.differences[:MAX_LISTED]:
        if each.reason:
            line = f"{each.stage} of {each.who}: {each.reason}"
            console.print(fmt.printable(line), style="dim")


def _show_rows(
    header: Sequence[str], rows: Sequence[tuple[str, str, str, str]], console: Console
) -> None:
    """Print rows of a stage, ranks and two durations; the first eight."""
    if not rows:
        return
    stage, who, first, second = header
    shown = table(
        Column(stage, overflow="fold", max_width=18),
        Column(who, overflow="fold", style="bold"),
        Column(first, justify="right", no_wrap=True),
        Column(second, justify="right", no_wrap=True),
    )
    for row in rows[:MAX_LISTED]:
        shown.add_row(*(fmt.printable(cell) for cell in row))
    console.print(shown)
    if len(rows) > MAX_LISTED:
        console.print(f"… and {len(rows) - MAX_LISTED:,} more, on the page", style="dim")
