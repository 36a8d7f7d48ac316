"""Print what a node holds, for `shardwise agent status` and `shardwise agent clear`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Column
from rich.text import Text

import shardwise as sw
from shardwise.kernel.events import format_bytes, format_count
from shardwise.parts.cli import formatting as fmt
from shardwise.parts.cli.terminal import table

PARTICIPLE_OF_STAGE = {"commit": "committed", "protect": "protected", "persist": "persisted"}
STYLE_OF_STATE = {"done": "green", "under way": "yellow", "failed": "bold red", "": "dim"}


def show_status(node: sw.NodeStatus, console: Console) -> None:
    """Print the state of a node: its agent, runs, snapshots and mirrors."""
    console.print(_agent_line(node))
    console.print(
        f"{format_bytes(node.bytes)} kept in {fmt.printable(node.directory)}, "
        f"{format_bytes(node.bytes_left)} left; "
        f"{'training runs' if node.training else 'no training runs'} on this node",
        soft_wrap=True,
    )
    for run in node.runs:
        console.print()
        _show_run(run, console)
    _show_mirrors(node, console)


def show_runs(home: str, runs: Sequence[sw.RunStatus], cleared: bool, console: Console) -> None:
    """Print the runs with snapshots on this node, or the runs that were cleared."""
    if not runs:
        console.print(f"{fmt.printable(home)} keeps no snapshots")
        return
    shown = table(
        Column("run", no_wrap=True, style="bold"),
        Column("size", justify="right", no_wrap=True),
        *(Column(each, min_width=len(each)) for each in ("steps", "in storage", "training")),
    )
    for run in runs:
        steps = [each.step for each in run.snapshots]
        persisted = [each.step for each in run.snapshots if each.persist.state == "done"]
        in_storage = Text(str(persisted[-1]) if persisted else "–")
        if steps and steps[-1] not in persisted:
            in_storage = Text(f"not {steps[-1]}", "bold red")
        training = "yes" if run.training else "no"
        shown.add_row(
            run.run, format_bytes(run.bytes), fmt.indices(steps) or "–", in_storage, training
        )
    console.print(shown)
    for run in runs:
        if run.root:
            console.print(f"{run.run} saves to {fmt.printable(run.root)}", soft_wrap=True)
    total = format_bytes(sum(run.bytes for run in runs))
    if cleared:
        console.print(f"cleared {format_count(len(runs), 'run')}: {total} freed")
    else:
        console.print(f"{total} in total. Nothing was removed: pass --run ID or --all")


def _agent_line(node: sw.NodeStatus) -> Text:
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
        text.append(f", {format_bytes(node.agent_bytes)}")
    return text


def _show_run(run: sw.RunStatus, console: Console) -> None:
    used, free = format_count(run.slots_used, "slot"), format_bytes(run.bytes_free)
    slots = f"{used} used, {run.slots_free} free ({free})"
    console.print(Text.assemble(("run ", "dim"), (run.run, "bold"), f"   {slots}"))
    if not run.snapshots:
        return
    console.print(Text("   ").join(_lag_text(run, stage) for stage in PARTICIPLE_OF_STAGE))
    shown = table(
        Column("step", justify="right", no_wrap=True, style="bold"),
        *(Column(each, justify="right", no_wrap=True) for each in ("age", "size", "copies")),
        *(Column(each, min_width=len(each)) for each in PARTICIPLE_OF_STAGE.values()),
        Column("protected by", overflow="fold", min_width=len("protected by")),
        gap=2,
    )
    for each in run.snapshots:
        shown.add_row(*_snapshot_cells(each))
    console.print(shown)
    for line in _failure_lines(run):
        console.print(line)


def _lag_text(run: sw.RunStatus, stage: str) -> Text:
    """Return the newest step of a stage: `committed 12`, `persisted 10 (2 steps, 1.6 s behind)`."""
    lag = run.lag[stage]
    if lag.step is None:
        return Text(f"none {PARTICIPLE_OF_STAGE[stage]}", "dim")
    text = Text(f"{PARTICIPLE_OF_STAGE[stage]} {lag.step}")
    if lag.steps:
        steps = format_count(lag.steps, "step")
        text.append(f" ({steps}, {fmt.duration(lag.seconds)} behind)", "yellow")
    return text


def _show_mirrors(node: sw.NodeStatus, console: Console) -> None:
    """Print the newest step of each mirror, what waits to be copied, and why it fails."""
    for mirror in node.mirrors:
        newest = "nothing" if mirror.newest is None else f"step {mirror.newest}"
        root, place = fmt.printable(mirror.root), fmt.printable(mirror.mirror)
        line = Text.assemble(("\nmirror ", "dim"), (place, "bold"), f" of {root}: has {newest}")
        if mirror.waiting:
            waiting = fmt.indices(sorted(mirror.waiting))
            line.append(f"; step {waiting} waits to be copied", "yellow")
        console.print(line, soft_wrap=True)
        if mirror.failing is not None:
            duration = fmt.duration(mirror.failing)
            text = f"copying has failed for {duration}: {fmt.printable(mirror.failure)}"
            console.print(Text(text, "bold red"), soft_wrap=True)
        if mirror.pinned:
            text = f"step {fmt.indices(mirror.pinned)} stays in the root only until it is copied"
            console.print(Text(text, "yellow"), soft_wrap=True)


def _snapshot_cells(each: sw.SnapshotStatus) -> Iterator[Text]:
    yield Text(str(each.step))
    yield Text(fmt.duration(each.age))
    yield Text(format_bytes(each.bytes))
    yield Text(format_bytes(each.bytes_for_others) if each.bytes_for_others else "–")
    for stage in (each.commit, each.protect, each.persist):
        text = stage.state or "–"
        if stage.state == "done":
            text = "" if stage.seconds is None else f"in {fmt.duration(stage.seconds)}"
        elif stage.seconds is not None:
            text += f" {fmt.duration(stage.seconds)}"
        yield Text(text or "done", STYLE_OF_STATE[stage.state])
    yield _protectors_text(each)


def _protectors_text(each: sw.SnapshotStatus) -> Text:
    """Return the nodes that protect a snapshot, or what else protects it from the node's loss."""
    if each.protected_by:
        return Text(", ".join(map(fmt.printable, each.protected_by)))
    if each.persist.state == "done":
        return Text("storage")
    is_own = each.bytes > 0 and each.protect.state not in ("under way", "failed")
    return Text("nothing", "yellow") if is_own else Text("–")


def _failure_lines(run: sw.RunStatus) -> Iterator[Text]:
    for each in run.snapshots:
        for stage in PARTICIPLE_OF_STAGE:
            if (status := getattr(each, stage)).failure:
                style = "red" if status.state == "failed" else "yellow"
                yield Text(f"step {each.step}: {stage}: {fmt.printable(status.failure)}", style)
