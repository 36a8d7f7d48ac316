"""Print what a node holds, for `shardwise agent status` and `shardwise agent clear`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from shardwise.cli import formatting as fmt
from shardwise.cli import mirrors
from shardwise.cli.terminal import table
from shardwise.memory.agent.status import (
    SHOWN_STAGES,
    NodeStatus,
    RunStatus,
    SnapshotStatus,
    StageLag,
    StoredRun,
)

PARTICIPLE_OF_STAGE = {"commit": "committed", "protect": "protected", "persist": "persisted"}
STYLE_OF_STATE = {"done": "green", "under way": "yellow", "failed": "bold red", "": "dim"}


def show_status(node: NodeStatus, console: Console) -> None:
    """Print the state of a node: its agent, runs, snapshots and mirrors."""
    console.print(_agent_line(node))
    console.print(
        f"{fmt.format_bytes(node.bytes)} kept in {fmt.printable(node.directory)}, "
        f"{fmt.format_bytes(node.bytes_left)} left; "
        f"{'training runs' if node.training else 'no training runs'} on this node",
        soft_wrap=True,
    )
    for run in node.runs:
        console.print()
        _show_run(run, console)
    for mirror in node.mirrors:
        console.print()
        mirrors.show_mirror_status(mirror, console)


def show_stored_runs(home: str, runs: Sequence[StoredRun], cleared: bool, console: Console) -> None:
    """Print the runs with snapshots on this node, or the runs that were cleared."""
    if not runs:
        console.print(f"{fmt.printable(home)} keeps no snapshots")
        return
    shown = table()
    shown.add_column("run", no_wrap=True, style="bold")
    shown.add_column("size", justify="right", no_wrap=True)
    for header in ("steps", "in storage", "training"):
        shown.add_column(header, min_width=len(header))
    for each in runs:
        in_storage = Text("–" if each.persisted is None else str(each.persisted))
        if each.steps and each.persisted != each.steps[-1]:
            in_storage = Text(f"not {each.steps[-1]}", "bold red")
        shown.add_row(
            each.run,
            fmt.format_bytes(each.bytes),
            fmt.indices(each.steps) or "–",
            in_storage,
            "yes" if each.training else "no",
        )
    console.print(shown)
    for each in (run for run in runs if run.root):
        console.print(f"{each.run} saves to {fmt.printable(each.root or '')}", soft_wrap=True)
    total = fmt.format_bytes(sum(each.bytes for each in runs))
    if cleared:
        console.print(f"cleared {fmt.count(len(runs), 'run')}: {total} freed")
    else:
        console.print(f"{total} in total. Nothing was removed: pass --run ID or --all")


def _agent_line(node: NodeStatus) -> Text:
    if node.node is None:
        return Text.assemble(("no agent runs here", "bold red"))
    text = Text.assemble("agent of ", (fmt.printable(node.node), "bold"))
    if node.domain:
        text.append(f" in domain {fmt.printable(node.domain)}")
    if not node.alive:
        return text.append(": ").append("not running", "bold red")
    text.append(f" at {fmt.printable(node.url or '')}: ")
    if node.answers is False:
        text.append("runs, but does not answer", "bold red")
    else:
        text.append("runs", "green")
    if node.process is not None:
        text.append(f", process {node.process}")
    if node.agent_bytes is not None:
        text.append(f", {fmt.format_bytes(node.agent_bytes)}")
    return text


def _show_run(run: RunStatus, console: Console) -> None:
    used, free = fmt.count(run.slots_used, "slot"), fmt.format_bytes(run.bytes_free)
    slots = f"{used} used, {run.slots_free} free ({free})"
    console.print(Text.assemble(("run ", "dim"), (run.run, "bold"), f"   {slots}"))
    if not run.snapshots:
        return
    console.print(Text("   ").join(_lag_text(stage, run.lag[stage]) for stage in SHOWN_STAGES))
    shown = table(gap=2)
    shown.add_column("step", justify="right", no_wrap=True, style="bold")
    for header in ("age", "size", "copies"):
        shown.add_column(header, justify="right", no_wrap=True)
    for stage in SHOWN_STAGES:
        shown.add_column(PARTICIPLE_OF_STAGE[stage], min_width=len(PARTICIPLE_OF_STAGE[stage]))
    shown.add_column("protected by", overflow="fold", min_width=len("protected by"))
    for each in run.snapshots:
        shown.add_row(*_snapshot_cells(each))
    console.print(shown)
    for line in _failure_lines(run):
        console.print(line)


def _lag_text(stage: str, lag: StageLag) -> Text:
    """Return the newest step of a stage: `committed 12`, `persisted 10 (2 steps, 1.6 s behind)`."""
    if lag.step is None:
        return Text(f"none {PARTICIPLE_OF_STAGE[stage]}", "dim")
    text = Text(f"{PARTICIPLE_OF_STAGE[stage]} {lag.step}")
    if lag.steps:
        steps = fmt.count(lag.steps, "step")
        text.append(f" ({steps}, {fmt.duration(lag.seconds)} behind)", "yellow")
    return text


def _snapshot_cells(each: SnapshotStatus) -> Iterator[Text]:
    yield Text(str(each.step))
    yield Text(fmt.duration(each.age))
    yield Text(fmt.format_bytes(each.bytes))
    yield Text(fmt.format_bytes(each.bytes_for_others) if each.bytes_for_others else "–")
    for stage in (each.commit, each.protect, each.persist):
        text = stage.state or "–"
        if stage.state == "done":
            text = "" if stage.seconds is None else f"in {fmt.duration(stage.seconds)}"
        elif stage.seconds is not None:
            text += f" {fmt.duration(stage.seconds)}"
        yield Text(text or "done", STYLE_OF_STATE[stage.state])
    yield _protectors_text(each)


def _protectors_text(each: SnapshotStatus) -> Text:
    """Return the nodes that protect a snapshot, or what else protects it from the node's loss."""
    if each.protected_by:
        return Text(", ".join(map(fmt.printable, each.protected_by)))
    if each.persist.state == "done":
        return Text("storage")
    is_own = each.bytes > 0 and each.protect.state not in ("under way", "failed")
    return Text("nothing", "yellow") if is_own else Text("–")


def _failure_lines(run: RunStatus) -> Iterator[Text]:
    for each in run.snapshots:
        for stage in SHOWN_STAGES:
            if (status := getattr(each, stage)).failure:
                style = "red" if status.state == "failed" else "yellow"
                yield Text(f"step {each.step}: {stage}: {fmt.printable(status.failure)}", style)
