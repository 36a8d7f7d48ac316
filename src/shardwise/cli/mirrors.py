"""Print the state of a mirror, for `ls` and `agent status`."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from shardwise.cli import formatting as fmt
from shardwise.memory.agent.status import MirrorStatus
from shardwise.tiers.record import MirrorRecord


def show_mirror_record(mirror: MirrorRecord, root_steps: set[int | None], console: Console) -> None:
    """Print the place of the mirror, the steps that only the mirror has, and why it fails."""
    mirror_only = [step for step in mirror.steps if step not in root_steps]
    line = f"mirror: {fmt.printable(mirror.place)}"
    if mirror_only:
        line += f", which also has step {fmt.indices(mirror_only)}"
    console.print(Text(line), soft_wrap=True)
    if reason := mirror.why_failing():
        text = f"copying to the mirror fails, and is tried again: {fmt.printable(reason)}"
        console.print(Text(text, "bold red"), soft_wrap=True)


def show_mirror_status(mirror: MirrorStatus, console: Console) -> None:
    """Print the newest step of a mirror, the steps that wait to be copied, and why it fails."""
    newest = "nothing" if mirror.newest is None else f"step {mirror.newest}"
    root, place = fmt.printable(mirror.root), fmt.printable(mirror.mirror)
    line = Text.assemble(("mirror ", "dim"), (place, "bold"), f" of {root}: has {newest}")
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
