"""`shardwise agent status`, for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.cli import wording
from shardwise.memory.agent.status import STAGES, Behind, NodeStatus, RunStatus, SnapshotStatus
from shardwise.memory.agent.tensors import TensorsStatus, TensorStatus
from shardwise.memory.node.clearing import KeptRun

DONE = {"commit": "committed", "protect": "protected", "persist": "persisted"}
STYLES = {"done": "green", "under way": "yellow", "failed": "bold red", "": "dim"}


def show_status(node: NodeStatus, console: Console) -> None:
    """Print what is known of a node, its runs and its snapshots."""
    console.print(_agent(node))
    console.print(
        f"{wording.size(node.bytes)} kept in {wording.printable(node.directory)}, "
        f"{wording.size(node.bytes_left)} left; "
        f"{'training runs' if node.training else 'no training runs'} on this node",
        soft_wrap=True,
    )
    for run in node.runs:
        console.print()
        _show_run(run, console)


def show_kept(home: str, runs: Sequence[KeptRun], cleared: bool, console: Console) -> None:
    """Print what a node keeps of runs, or what was removed of it."""
    if not runs:
        console.print(f"{wording.printable(home)} keeps nothing")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("run", no_wrap=True, style="bold")
    table.add_column("size", justify="right", no_wrap=True)
    for header in ("steps", "in storage", "training"):
        table.add_column(header, min_width=len(header))
    table.add_column("root", overflow="fold")
    for each in runs:
        stored = Text("–" if each.persisted is None else str(each.persisted))
        if each.steps and each.persisted != each.steps[-1]:
            stored = Text(f"not {each.steps[-1]}", "bold red")
        table.add_row(
            each.run,
            wording.size(each.bytes),
            wording.indices(each.steps) or "–",
            stored,
            "yes" if each.training else "no",
            wording.printable(each.root or "–"),
        )
    console.print(table)
    total = wording.size(sum(each.bytes for each in runs))
    if cleared:
        console.print(f"cleared {wording.count(len(runs), 'run')}: {total} freed")
    else:
        console.print(f"{total} in all. Nothing was removed: pass --run ID or --all")


def _agent(node: NodeStatus) -> Text:
    if node.node is None:
        return Text.assemble(("no agent runs here", "bold red"))
    said = Text.assemble("agent of ", (wording.printable(node.node), "bold"))
    if node.domain:
        said.append(f" in domain {wording.printable(node.domain)}")
    if not node.alive:
        return said.append(": ").append("not running", "bold red")
    said.append(f" at {wording.printable(node.url or '')}: ")
    if node.answers is False:
        said.append("runs, but does not answer", "bold red")
    else:
        said.append("runs", "green")
    if node.process is not None:
        said.append(f", process {node.process}")
    if node.agent_bytes is not None:
        said.append(f", {wording.size(node.agent_bytes)} of memory")
    return said


def _show_run(run: RunStatus, console: Console) -> None:
    used, free = wording.count(run.slots_used, "slot"), wording.size(run.bytes_free)
    slots = f"{used} used, {run.slots_free} free ({free})"
    console.print(Text.assemble(("run ", "dim"), (run.run, "bold"), f"   {slots}"))
    if not run.snapshots:
        return
    console.print(Text("   ").join(_behind(stage, run.behind[stage]) for stage in STAGES))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("step", justify="right", no_wrap=True, style="bold")
    for header in ("age", "size", "others'"):
        table.add_column(header, justify="right", no_wrap=True)
    for stage in STAGES:
        table.add_column(DONE[stage], min_width=len(DONE[stage]))
    table.add_column("protected by", overflow="fold", min_width=len("protected by"))
    for each in run.snapshots:
        table.add_row(*_cells(each))
    console.print(table)
    for line in _failures(run):
        console.print(line)
    if run.tensors is not None:
        _show_tensors(run.tensors, console)


def _show_tensors(found: TensorsStatus, console: Console) -> None:
    console.print(f"\ntensors of step {found.step}")
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("tensor", overflow="fold", style="bold")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("lies on", overflow="fold")
    table.add_column("protected", overflow="fold")
    for each in found.tensors:
        name, size = wording.printable(each.name), wording.size(each.bytes)
        table.add_row(name, size, wording.listed(each.nodes), _guarded(each))
    console.print(table)


def _guarded(tensor: TensorStatus) -> Text:
    """By what, and against the loss of how many nodes."""
    shown = "; ".join(f"{each.kind} on {wording.listed(each.nodes)}" for each in tensor.guards)
    if not tensor.survives:
        return Text(f"not all of it: {shown}" if shown else "not", "bold red")
    lost = wording.count(tensor.survives, "node")
    return Text(f"against the loss of {lost}: {shown}", "green")


def _behind(stage: str, behind: Behind) -> Text:
    """What a stage has reached: `committed 12`, `persisted 10 (2 steps, 1.6 s behind)`."""
    if behind.step is None:
        return Text(f"none here is {DONE[stage]}", "dim")
    said = Text(f"{DONE[stage]} {behind.step}")
    if behind.steps:
        lag = wording.count(behind.steps, "step")
        said.append(f" ({lag}, {_seconds(behind.seconds)} behind)", "yellow")
    return said


def _cells(each: SnapshotStatus) -> Iterator[Text]:
    yield Text(str(each.step))
    yield Text(_seconds(each.age))
    yield Text(wording.size(each.bytes))
    yield Text(wording.size(each.bytes_for_others) if each.bytes_for_others else "–")
    for stage in (each.commit, each.protect, each.persist):
        said = stage.state or "–"
        if stage.state == "done":
            said = "" if stage.seconds is None else f"in {_seconds(stage.seconds)}"
        elif stage.seconds is not None:
            said += f" {_seconds(stage.seconds)}"
        yield Text(said or "done", STYLES[stage.state])
    yield Text(", ".join(map(wording.printable, each.protected_by)) or "–")


def _failures(run: RunStatus) -> Iterator[Text]:
    for each in run.snapshots:
        for stage in STAGES:
            failure = getattr(each, stage).failure
            if failure:
                yield Text(f"step {each.step}: {stage}: {wording.printable(failure)}", "red")


def _seconds(seconds: float | None) -> str:
    """`0.12 s`, `42 s`, `3 min`, `5 h`, `2 d`: as exact as it matters."""
    if seconds is None:
        return "–"
    for most, unit, length in ((100, "s", 1), (6000, "min", 60), (172_800, "h", 3600)):
        if seconds < most:
            decimals = 2 if unit == "s" and seconds < 10 else 0
            return f"{seconds / length:.{decimals}f} {unit}"
    return f"{seconds / 86_400:.0f} d"
