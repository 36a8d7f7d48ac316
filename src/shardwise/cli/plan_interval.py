"""`shardwise plan-interval`: compute how often to take snapshots and to save to storage."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.cli.interval_formulas import (
    DAY,
    Costs,
    Failures,
    IntervalPlan,
    Waste,
    plan_intervals,
)
from shardwise.cli.terminal import AsJson, print_json, stdout_console, table

DEFAULT_GROUP = 8
HIGH_WASTE = 0.5
"""Above this fraction of wasted time, the formulas give too little."""


def _option(metavar: str, text: str) -> Any:
    return typer.Option(metavar=metavar, help=text)


Step = Annotated[float, _option("SECONDS", "Duration of one training step.")]
Snapshot = Annotated[float, _option("SECONDS", "How long a snapshot in memory delays training.")]
Persist = Annotated[float, _option("SECONDS", "How long a save to storage delays training.")]
Protect = Annotated[float, _option("SECONDS", "Time until other nodes protect a snapshot.")]
MemoryRestore = Annotated[float, _option("SECONDS", "Time to resume from memory after a failure.")]
StorageRestore = Annotated[
    float, _option("SECONDS", "Time to resume from storage after a failure.")
]
Nodes = Annotated[int, _option("N", "Number of nodes that train.")]
FailuresPerDay = Annotated[
    float | None, _option("X", "Node failures per day, in the whole cluster.")
]
NodeMtbf = Annotated[
    float | None,
    _option("DAYS", "Mean time between failures of one node, instead of --failures-per-day."),
]
MemoryLost = Annotated[
    float, _option("X", "Fraction of failures in which a node's memory is lost.")
]
Group = Annotated[
    int | None,
    _option(
        "N", f"Number of nodes that protect each other. Default: {DEFAULT_GROUP}, or all if fewer."
    ),
]
Parity = Annotated[int, _option("N", "Number of nodes of a group that may be lost at once.")]
Rebuild = Annotated[
    float, _option("MINUTES", "Time after a loss until all data is protected again.")
]
Correlated = Annotated[
    float, _option("X", "Failures per day that lose all memory, for example power cuts.")
]


def plan_interval(
    step_time: Step,
    snapshot_cost: Snapshot,
    persist_cost: Persist,
    nodes: Nodes,
    failures_per_day: FailuresPerDay = None,
    node_mtbf_days: NodeMtbf = None,
    protect_time: Protect = 0.0,
    memory_restore: MemoryRestore = 0.0,
    storage_restore: StorageRestore = 0.0,
    memory_lost: MemoryLost = 1.0,
    group: Group = None,
    parity: Parity = 1,
    rebuild_minutes: Rebuild = 10.0,
    correlated_per_day: Correlated = 0.0,
    as_json: AsJson = False,
) -> None:
    """Compute how often to save.

    Frequent saves cost time. With rare saves, more work is lost when a node fails. This command
    computes the two intervals that waste the least time: one for snapshots in memory, and one for
    saves to storage. It uses the formulas of Young and Daly.

    \b
    Example:
      shardwise plan-interval --step-time 1 --snapshot-cost 0.1 \\
          --persist-cost 1 --nodes 16 --failures-per-day 3
    """
    try:
        costs = Costs(
            step=step_time,
            snapshot=snapshot_cost,
            persist=persist_cost,
            redundancy=protect_time,
            memory_restore=memory_restore,
            storage_restore=storage_restore,
        )
        failures = Failures(
            nodes=nodes,
            rate=_failure_rate(failures_per_day, node_mtbf_days, nodes),
            lost=memory_lost,
            correlated=correlated_per_day / DAY,
            group=min(DEFAULT_GROUP, nodes) if group is None else group,
            survives=parity,
            rebuild=rebuild_minutes * 60,
        )
        plan = plan_intervals(costs, failures)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        print_json(_plan_document(plan))
    else:
        _show_plan(plan, stdout_console())


def _failure_rate(per_day: float | None, node_mtbf_days: float | None, nodes: int) -> float:
    """Return the node failures per second, given one of the two options."""
    if per_day is not None and node_mtbf_days is None:
        return per_day / DAY
    if node_mtbf_days is not None and per_day is None:
        if not node_mtbf_days > 0:
            raise ValueError(f"--node-mtbf-days {node_mtbf_days:g}: must be more than 0")
        return nodes / node_mtbf_days / DAY
    given = "neither" if per_day is None else "both"
    raise ValueError(f"pass exactly one of --failures-per-day and --node-mtbf-days ({given} given)")


def _plan_document(plan: IntervalPlan) -> dict[str, Any]:
    return {
        "memory": asdict(plan.memory),
        "storage": asdict(plan.storage),
        "waste": plan.waste,
        "failures_per_day": plan.interruption_rate * DAY,
        "days_between_losses": _days_between_losses(plan),
    }


def _days_between_losses(plan: IntervalPlan) -> float:
    return 1 / plan.memory_loss_rate / DAY


def _show_plan(plan: IntervalPlan, console: Console) -> None:
    intervals = Table.grid(padding=(0, 3, 0, 0))
    options = (("Memory(snapshot_every", plan.memory), ("Checkpointer(save_every", plan.storage))
    for option, interval in options:
        every = Text(f"sw.{option}={interval.steps})", "bold")
        intervals.add_row(every, Text(f"every {_format_duration(interval.seconds)}"))
    console.print(intervals)
    console.print()
    waste_table = table()
    waste_table.add_column("wasted time", no_wrap=True)
    for header in ("saving", "repeated work", "restoring", "total"):
        waste_table.add_column(header, justify="right", no_wrap=True)
    memory, storage = plan.memory.waste, plan.storage.waste
    total = Waste(*(getattr(memory, part) + getattr(storage, part) for part in Waste.__slots__))
    for name, waste in (("memory", memory), ("storage", storage), ("both", total)):
        fractions = (waste.snapshots, waste.lost, waste.restores, waste.total)
        waste_table.add_row(name, *map(_format_percent, fractions))
    console.print(waste_table)
    console.print()
    time_between_losses = _format_duration(_days_between_losses(plan) * DAY)
    message = f"On average, a failure needs the save in storage once in {time_between_losses}."
    console.print(Text(message))
    if plan.waste > HIGH_WASTE:
        warning = "The formulas are too low if much time is wasted: expect more waste than this."
        console.print(Text(warning, "yellow"))


def _format_percent(fraction: float) -> str:
    return "0%" if fraction == 0 else "< 0.01%" if fraction < 0.0001 else f"{fraction:.2%}"


def _format_duration(seconds: float) -> str:
    """Return seconds in the largest unit that gives at least 2: `33.4 s`, `22.0 years`."""
    units = (("years", 365.25 * DAY), ("days", DAY), ("h", 3600.0), ("min", 60.0))
    for unit, length in units:
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:.3g} s"
