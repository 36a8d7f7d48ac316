"""The tables that `shardwise agent status` and `clear` print."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from shardwise.cli import formatting as fmt
from shardwise.cli.terminal import table
from shardwise.memory.agent.status import (
    STAGES,
    Behind,
    KeptRun,
    NodeStatus,
    RunStatus,
    SnapshotStatus,
)
from shardwise.memory.agent.tensor_status import TensorsStatus, TensorStatus

DONE = {"commit": "committed", "protect": "protected", "persist": "persisted"}
STYLES = {"done": "green", "under way": "yellow", "failed": "bold red", "": "dim"}


def show_status(node: NodeStatus, console: Console) -> None:
    """Print the state of a node, its agent, its runs and its snapshots."""
    console.print(_agent(node))
    console.print(
        f"{fmt.size(node.bytes)} kept in {fmt.printable(node.directory)}, "
        f"{fmt.size(node.bytes_left)} left; "
        f"{'training runs' if node.training else 'no training runs'} on this node",
        soft_wrap=True,
    )
    for run in node.runs:
        console.print()
        _show_run(run, console)


def show_kept(home: str, runs: Sequence[KeptRun], cleared: bool, console: Console) -> None:
    """Print the runs that a node keeps snapshots of, or those that were cleared."""
    if not runs:
        console.print(f"{fmt.printable(home)} keeps no snapshots")
        return
    shown = table()
    shown.add_column("run", no_wrap=True, style="bold")
    shown.add_column("size", justify="right", no_wrap=True)
    for header in ("steps", "in storage", "training"):
        shown.add_column(header, min_width=len(header))
    shown.add_column("root", overflow="fold")
    for each in runs:
        stored = Text("–" if each.persisted is None else str(each.persisted))
        if each.steps and each.persisted != each.steps[-1]:
            stored = Text(f"not {each.steps[-1]}", "bold red")
        shown.add_row(
            each.run,
            fmt.size(each.bytes),
            fmt.indices(each.steps) or "–",
            stored,
            "yes" if each.training else "no",
            fmt.printable(each.root or "–"),
        )
    console.print(shown)
    total = fmt.size(sum(each.bytes for each in runs))
    if cleared:
        console.print(f"cleared {fmt.count(len(runs), 'run')}: {total} freed")
    else:
        console.print(f"{total} in total. Nothing was removed: pass --run ID or --all")


def _agent(node: NodeStatus) -> Text:
    if node.node is None:
        return Text.assemble(("no agent runs here", "bold red"))
    said = Text.assemble("agent of ", (fmt.printable(node.node), "bold"))
    if node.domain:
        said.append(f" in domain {fmt.printable(node.domain)}")
    if not node.alive:
        return said.append(": ").append("not running", "bold red")
    said.append(f" at {fmt.printable(node.url or '')}: ")
    if node.answers is False:
        said.append("runs, but does not answer", "bold red")
    else:
        said.append("runs", "green")
    if node.process is not None:
        said.append(f", process {node.process}")
    if node.agent_bytes is not None:
        said.append(f", {fmt.size(node.agent_bytes)} of memory")
    return said


def _show_run(run: RunStatus, console: Console) -> None:
    used, free = fmt.count(run.slots_used, "slot"), fmt.size(run.bytes_free)
    slots = f"{used} used, {run.slots_free} free ({free})"
    console.print(Text.assemble(("run ", "dim"), (run.run, "bold"), f"   {slots}"))
    if not run.snapshots:
        return
    console.print(Text("   ").join(_behind(stage, run.behind[stage]) for stage in STAGES))
    shown = table(gap=2)
    shown.add_column("step", justify="right", no_wrap=True, style="bold")
    for header in ("age", "size", "others'"):
        shown.add_column(header, justify="right", no_wrap=True)
    for stage in STAGES:
        shown.add_column(DONE[stage], min_width=len(DONE[stage]))
    shown.add_column("protected by", overflow="fold", min_width=len("protected by"))
    for each in run.snapshots:
        shown.add_row(*_cells(each))
    console.print(shown)
    for line in _failures(run):
        console.print(line)
    if run.tensors is not None:
        _show_tensors(run.tensors, console)


def _show_tensors(found: TensorsStatus, console: Console) -> None:
    console.print(f"\ntensors of step {found.step}")
    shown = table()
    shown.add_column("tensor", overflow="fold", style="bold")
    shown.add_column("size", justify="right", no_wrap=True)
    shown.add_column("nodes", overflow="fold")
    shown.add_column("protected", overflow="fold")
    for each in found.tensors:
        name, size = fmt.printable(each.name), fmt.size(each.bytes)
        shown.add_row(name, size, fmt.names(each.nodes), _guarded(each))
    console.print(shown)


def _guarded(tensor: TensorStatus) -> Text:
    """Return how many lost nodes a tensor survives, and where its copies or parity are."""
    guards = "; ".join(f"{each.kind} on {fmt.names(each.nodes)}" for each in tensor.guards)
    if not tensor.survives:
        return Text(f"partly: {guards}" if guards else "not", "bold red")
    lost = fmt.count(tensor.survives, "node")
    return Text(f"against the loss of {lost}: {guards}", "green")


def _behind(stage: str, behind: Behind) -> Text:
    """Return the newest step of a stage: `committed 12`, `persisted 10 (2 steps, 1.6 s behind)`."""
    if behind.step is None:
        return Text(f"no step {DONE[stage]}", "dim")
    said = Text(f"{DONE[stage]} {behind.step}")
    if behind.steps:
        lag = fmt.count(behind.steps, "step")
        said.append(f" ({lag}, {fmt.duration(behind.seconds)} behind)", "yellow")
    return said


def _cells(each: SnapshotStatus) -> Iterator[Text]:
    yield Text(str(each.step))
    yield Text(fmt.duration(each.age))
    yield Text(fmt.size(each.bytes))
    yield Text(fmt.size(each.bytes_for_others) if each.bytes_for_others else "–")
    for stage in (each.commit, each.protect, each.persist):
        said = stage.state or "–"
        if stage.state == "done":
            said = "" if stage.seconds is None else f"in {fmt.duration(stage.seconds)}"
        elif stage.seconds is not None:
            said += f" {fmt.duration(stage.seconds)}"
        yield Text(said or "done", STYLES[stage.state])
    yield Text(", ".join(map(fmt.printable, each.protected_by)) or "–")


def _failures(run: RunStatus) -> Iterator[Text]:
    for each in run.snapshots:
        for stage in STAGES:
            failure = getattr(each, stage).failure
            if failure:
                yield Text(f"step {each.step}: {stage}: {fmt.printable(failure)}", "red")
