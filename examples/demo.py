"""Save under one parallelism, lose a process, go on under three others: `make demo`.

A run of four FSDP processes is killed in the middle. It goes on with two tensor-parallel ones,
then four with both, then a single one, each time from the newest checkpoint, and its losses are
held against a run that was never interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from rich.console import Console
from rich.table import Table

TRAIN = Path(__file__).parent / "train.py"
FIRST_LOSS = 1e-5
"""The first loss after a resume: the same weights, only summed in another order."""
LATER_LOSS = 1e-4
"""Any later loss: what reordered sums have grown to by then."""


@dataclass(frozen=True)
class Phase:
    """One launch: `world` processes, training until `stop`, or killed at `killed`."""

    title: str
    parallel: str
    world: int
    stop: int
    killed: int | None = None


REFERENCE = Phase("FSDP on 4, never interrupted", "fsdp", 4, 60)
STORY = (
    Phase("FSDP on 4, killed at step 23", "fsdp", 4, 60, killed=23),
    Phase("tensor-parallel on 2", "tp", 2, 35),
    Phase("FSDP × tensor-parallel on 4", "fsdp_tp", 4, 50),
    Phase("1 process, not parallel at all", "none", 1, 60),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    out = parser.parse_args().out
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    console = Console(width=None if sys.stdout.isatty() else 100)
    began = time.monotonic()
    reference = launch(console, REFERENCE, out / "reference", out / "reference.jsonl", every=1000)
    story = [
        launch(console, phase, out / "checkpoints", out / f"phase-{i}.jsonl", every=5)
        for i, phase in enumerate(STORY)
    ]
    losses = {entry["step"]: entry["loss"] for entry in reference if "step" in entry}
    console.print(costs(story))
    table, wrong = comparison(story, losses)
    console.print(table)
    draw(story, losses, out / "losses.png")
    console.print(f"picture: {out / 'losses.png'} · {time.monotonic() - began:.0f} s in all")
    for line in wrong:
        console.print(f"[red]wrong:[/] {line}")
    return 1 if wrong else 0


def launch(console: Console, phase: Phase, root: Path, journal: Path, every: int) -> list[dict]:
    """Run a phase under torchrun, telling how far it is; returns its journal."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"),
        *(str(phase.world), str(TRAIN), "--parallel", phase.parallel, "--root", str(root)),
        *("--steps", str(phase.stop), "--every", str(every), "--journal", str(journal.resolve())),
        *(("--die-at", str(phase.killed)) if phase.killed else ()),
    ]
    errors = journal.with_suffix(".stderr")
    with errors.open("w") as stderr, console.status(phase.title) as status:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdout=stderr, stderr=stderr, env=environment)
        while process.poll() is None:
            time.sleep(0.3)
            steps = [entry["step"] for entry in read(journal) if "step" in entry]
            if steps:
                status.update(f"{phase.title}: step {steps[-1]} of {phase.stop}")
    if bool(process.returncode) != bool(phase.killed):
        sys.exit(f"{phase.title}: exit status {process.returncode}\n{errors.read_text()[-3000:]}")
    entries = read(journal)
    steps = [entry["step"] for entry in entries if "step" in entry]
    end = f"killed after step {steps[-1]}" if phase.killed else f"steps {steps[0]} to {steps[-1]}"
    console.print(f"[green]✓[/] {phase.title}: {end}")
    return entries


def read(journal: Path) -> list[dict]:
    """The whole lines of a journal."""
    if not journal.exists():
        return []
    return [
        json.loads(line)
        for line in journal.read_text().splitlines(keepends=True)
        if line[-1] == "\n"
    ]


def costs(story: list[list[dict]]) -> Table:
    """What each save and load cost."""
    table = Table(title="saves and loads", title_justify="left")
    for column in ("", "at step", "processes", "parallel", "MB", "files", "seconds", "MB/s"):
        table.add_column(column, justify="left" if column in ("", "parallel") else "right")
    for entries in story:
        for entry in entries:
            if "event" in entry:
                megabytes, seconds = entry["bytes"] / 1e6, entry["seconds"]
                table.add_row(
                    entry["event"],
                    str(entry["at"]),
                    str(entry["world"]),
                    entry["parallel"],
                    f"{megabytes:.1f}",
                    str(entry["files"]),
                    f"{seconds:.3f}",
                    f"{megabytes / seconds:.0f}",
                )
    return table


def comparison(story: list[list[dict]], reference: dict[int, float]) -> tuple[Table, list[str]]:
    """Each phase's losses against the reference, and what is out of bounds."""
    table = Table(title="losses against the run that was not interrupted", title_justify="left")
    table.add_column("phase")
    for column in ("first step", "its loss", "reference", "difference", "largest later"):
        table.add_column(column, justify="right")
    wrong = []
    for phase, entries in zip(STORY, story, strict=True):
        losses = [(entry["step"], entry["loss"]) for entry in entries if "step" in entry]
        gaps = [abs(loss - reference[step]) for step, loss in losses]
        step, loss = losses[0]
        table.add_row(
            phase.title, str(step), f"{loss:.6f}", f"{reference[step]:.6f}", f"{gaps[0]:.1e}",
            f"{max(gaps):.1e}",
        )  # fmt: skip
        if not gaps[0] <= FIRST_LOSS:
            wrong.append(
                f"{phase.title}: the first loss is {gaps[0]:.1e} off; {FIRST_LOSS} allowed"
            )
        if not max(gaps) <= LATER_LOSS:
            wrong.append(f"{phase.title}: a loss is {max(gaps):.1e} off; {LATER_LOSS} allowed")
    return table, wrong


def draw(story: list[list[dict]], reference: dict[int, float], path: Path) -> None:
    """Losses of all phases over the reference, and how far they are from it."""
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(10, 6), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    above.plot(*zip(*sorted(reference.items()), strict=True), color="0.75", linewidth=6,
               label=REFERENCE.title, solid_capstyle="round")  # fmt: skip
    for phase, entries in zip(STORY, story, strict=True):
        losses = [(entry["step"], entry["loss"]) for entry in entries if "step" in entry]
        steps, values = zip(*losses, strict=True)
        (line,) = above.plot(steps, values, linewidth=1.8, label=phase.title)
        if phase.killed:
            above.plot(steps[-1], values[-1], "x", color=line.get_color(), markersize=10,
                       markeredgewidth=2.5)  # fmt: skip
        gaps = [max(abs(loss - reference[step]), 1e-9) for step, loss in losses]
        below.semilogy(steps, gaps, ".-", color=line.get_color(), linewidth=1)
    below.axhline(FIRST_LOSS, color="0.6", linestyle=":", linewidth=1)
    below.text(0, FIRST_LOSS, " bound on the first after a resume", va="bottom", fontsize=8,
               color="0.4")  # fmt: skip
    above.set_ylabel("loss")
    below.set_ylabel("|difference|")
    below.set_xlabel("step")
    above.set_title("one run, four parallelisms: the loss goes on as if nothing had happened")
    above.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    sys.exit(main())
