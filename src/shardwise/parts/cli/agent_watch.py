"""`shardwise agent status --watch`: what the ranks are doing, and which ranks others wait for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from datetime import datetime

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Column
from rich.text import Text

import shardwise as sw
from shardwise.kernel.events import format_count
from shardwise.parts.cli import formatting as fmt
from shardwise.parts.cli.terminal import table

PERIOD = 1.0  # seconds
MOST_LINES = 6


def watch(
    read: Callable[[], Sequence[sw.RunProgress]],
    console: Console,
    sleep: Callable[[float], object] = time.sleep,
    clock: Callable[[], datetime] = datetime.now,
) -> None:
    """Draw what the ranks do now, every second, until the user interrupts it.

    If the output is not a terminal, each drawing is printed below the last one, with its time.

    Args:
        read: returns what the ranks of each run do now.
        console: where to draw.
        sleep: waits between two drawings.
        clock: returns the time of day.
    """
    try:
        with (
            Live(console=console, auto_refresh=False) if console.is_terminal else nullcontext()
        ) as live:
            while True:
                drawing = draw(read())
                if live is None:
                    console.print(f"\n{clock():%Y-%m-%d %H:%M:%S}", drawing, sep="\n")
                else:
                    live.update(drawing, refresh=True)
                sleep(PERIOD)
    except KeyboardInterrupt:
        return


def draw(runs: Sequence[sw.RunProgress]) -> Group:
    """Return what the ranks of some runs do now, at most 80 columns wide."""
    if not runs:
        return Group(Text("no training with snapshots runs on this node"))
    return Group(*(part for run in runs for part in _draw_run(run)))


def _draw_run(run: sw.RunProgress) -> Iterator[RenderableType]:
    nodes = format_count(run.nodes, "node")
    yield Text.assemble(
        ("run ", "dim"), (run.run, "bold"), f": {format_count(run.ranks, 'rank')} on {nodes}"
    )
    if run.unanswered:
        yield Text(f"  no answer yet from {format_count(run.unanswered, 'node')}", "yellow")
    if run.lost:
        yield Text(f"  lost: rank {fmt.indices(run.lost)}", "bold red")
    for operation, step, stage, waits, count in run.counts[:MOST_LINES]:
        yield Text(
            f"  {format_count(count, 'rank')}: {_describe(operation, step, stage, waits=waits)}"
        )
    if len(run.counts) > MOST_LINES:
        yield Text(f"  and {format_count(len(run.counts) - MOST_LINES, 'other state')}", "dim")
    if not run.slowest:
        return
    yield Text("  waiting for:")
    shown = table(
        Column("rank", justify="right", no_wrap=True, style="bold"),
        Column("node", overflow="ellipsis", no_wrap=True, max_width=32),
        Column("stage", no_wrap=True, max_width=20),
        Column("for", justify="right", no_wrap=True),
        gap=2,
    )
    for node, each in run.slowest:
        stage = fmt.printable(each.stage or "has not begun")
        shown.add_row(str(each.rank), fmt.printable(node), stage, fmt.duration(each.seconds))
    yield shown


def _describe(operation: str, step: int | None, stage: str, *, waits: bool) -> str:
    if not operation:
        return "training"
    place = fmt.printable(operation) + ("" if step is None else f" of step {step}")
    if waits:
        return f"{place}: waiting for others" + (f" after {fmt.printable(stage)}" if stage else "")
    return f"{place}: {fmt.printable(stage)}" if stage else place
