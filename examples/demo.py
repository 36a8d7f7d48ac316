"""Save under one parallelism, kill a process, resume under three others: `make demo`.

The demo trains with FSDP on four processes and kills one of them. It resumes from the newest
checkpoint with tensor parallelism on two processes, then with both on four, then on one. It
compares every loss with those of an uninterrupted run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import journal
from demo_plot import draw_plot
from rich.console import Console
from rich.table import Table

import shardwise as sw

TRAIN = Path(__file__).parent / "train.py"
BOUND = 1e-5
"""Largest allowed difference of the first loss after a resume; each further step adds as much.

The weights are identical, but sums are computed in a different order. Measured differences stay
below 1e-6.
"""


@dataclass(frozen=True)
class Phase:
    """One launch: `world` processes that train to step `stop`, unless killed at step `killed`."""

    title: str
    parallel: str
    world: int
    stop: int
    killed: int | None = None


@dataclass(frozen=True)
class Outcome:
    """The journal of a phase: the loss of each step and the cost of each save and load."""

    phase: Phase
    losses: dict[int, float]
    costs: list[dict[str, Any]]

    def gaps(self, reference: dict[int, float]) -> dict[int, float]:
        """Return the difference of each loss from the reference, by step."""
        return {step: abs(loss - reference[step]) for step, loss in self.losses.items()}

    def bounds(self) -> dict[int, float]:
        """Return the largest allowed difference, by step."""
        return {step: BOUND * n for n, step in enumerate(self.losses, start=1)}


def main() -> int:
    options = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    began = time.monotonic()
    every = options.steps // 12
    killed = 4 * every + every // 2 + 1
    phases = (
        Phase(f"FSDP on 4, killed at step {killed}", "fsdp", 4, options.steps, killed),
        Phase("tensor-parallel on 2", "tp", 2, 7 * every),
        Phase("FSDP × tensor-parallel on 4", "fsdp_tp", 4, 10 * every),
        Phase("1 process, no parallelism", "none", 1, options.steps),
    )
    uninterrupted = Phase("FSDP on 4, uninterrupted", "fsdp", 4, options.steps)

    out = fresh_directory(options.out)
    reference = launch(console, uninterrupted, out, "reference", every=options.steps)
    story = [launch(console, phase, out, "story", every=every) for phase in phases]
    console.print(costs_table(story), comparison_table(story, reference.losses), sep="\n")
    draw_plot(story, reference, out / "losses.png")
    report = sw.report(out / "story")
    report.write_page(out / "report.html")
    console.print(f"Plot: {out / 'losses.png'}. Report of all saves: {out / 'report.html'}.")
    console.print(f"Total time: {time.monotonic() - began:.0f} s.")

    wrong = [*failed_checks(story, reference.losses), *report.problems]
    for line in wrong:
        console.print(f"[red]✗[/] {line}")
    return 1 if wrong else 0


def launch(console: Console, phase: Phase, out: Path, run: str, *, every: int) -> Outcome:
    """Train one phase of a run and show its progress."""
    log = out / f"{run}-{phase.parallel}.jsonl"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(phase.world))
    command = [
        *(sys.executable, *(torchrun if phase.world > 1 else ()), str(TRAIN)),
        *("--parallel", phase.parallel, "--root", str(out / run), "--journal", str(log)),
        *("--steps", str(phase.stop), "--every", str(every)),
        *(("--die-at", str(phase.killed)) if phase.killed else ()),
    ]
    began = time.monotonic()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    output = log.with_suffix(".txt")
    with (
        output.open("w") as file,
        console.status(phase.title) as status,
        subprocess.Popen(command, stdout=file, stderr=file, env=environment) as process,
    ):
        while process.poll() is None:
            time.sleep(0.3)
            losses = read_outcome(phase, log).losses
            status.update(f"{phase.title}: step {max(losses, default=0)} of {phase.stop}")
    as_planned = (
        "SIGKILL" in output.read_text(encoding="utf-8") if phase.killed else process.returncode == 0
    )
    outcome = read_outcome(phase, log)
    if not as_planned or not outcome.losses:
        tail = output.read_text(encoding="utf-8")[-3000:]
        sys.exit(f"{phase.title}: exit status {process.returncode}; {output} ends with\n{tail}")
    steps = f"steps {min(outcome.losses)} to {max(outcome.losses)}"
    console.print(f"[green]✓[/] {phase.title}: {steps}, {time.monotonic() - began:.0f} s")
    return outcome


def read_outcome(phase: Phase, log: Path) -> Outcome:
    """Return what a phase has logged so far."""
    entries = journal.entries(log)
    losses = {entry["step"]: entry["loss"] for entry in entries if "loss" in entry}
    return Outcome(phase, losses, [entry for entry in entries if "event" in entry])


def costs_table(story: list[Outcome]) -> Table:
    """Return a table of the cost of each save and load."""
    table = Table(title="saves and loads", title_justify="left")
    table.add_column("")
    table.add_column("step", justify="right")
    table.add_column("from → to")
    for column in ("MB", "files", "seconds", "GB/s"):
        table.add_column(column, justify="right")
    saved_by = ""
    for outcome in story:
        ranks = f"{outcome.phase.world} {outcome.phase.parallel}"
        for cost in outcome.costs:
            table.add_row(
                cost["event"],
                str(cost["at"]),
                f"{saved_by} → {ranks}" if cost["event"] == "load" else ranks,
                f"{cost['bytes'] / 1e6:.1f}",
                str(cost["files"]),
                f"{cost['seconds']:.3f}",
                f"{cost['bytes'] / 1e9 / cost['seconds']:.2f}",
                end_section=cost is outcome.costs[-1],
            )
            saved_by = ranks
    return table


def comparison_table(story: list[Outcome], reference: dict[int, float]) -> Table:
    """Return a table that compares the losses of each phase with the reference."""
    table = Table(title="losses compared with the uninterrupted run", title_justify="left")
    table.add_column("phase")
    for column in ("first step", "its loss", "reference", "difference", "largest later"):
        table.add_column(column, justify="right")
    for outcome in story:
        step, loss = next(iter(outcome.losses.items()))
        first, *later = outcome.gaps(reference).values()
        table.add_row(
            outcome.phase.title,
            str(step),
            f"{loss:.6f}",
            f"{reference[step]:.6f}",
            f"{first:.1e}",
            f"{max(later, default=0):.1e}",
        )
    return table


def failed_checks(story: list[Outcome], reference: dict[int, float]) -> list[str]:
    """Return a line for each check that failed."""
    wrong = []
    for before, after in pairwise(story):
        newest, first = before.costs[-1]["at"], min(after.losses)
        if first != newest:
            wrong.append(
                f"{after.phase.title}: resumed at step {first}, but the newest save is {newest}"
            )
    for outcome in story:
        bounds = outcome.bounds()
        for step, gap in outcome.gaps(reference).items():
            if not gap <= bounds[step]:
                off = f"the loss of step {step} differs by {gap:.1e} (limit: {bounds[step]:.0e})"
                wrong.append(f"{outcome.phase.title}: {off}")
                break
    return wrong


def fresh_directory(path: Path) -> Path:
    """Create the directory, or delete the output of an earlier demo from it."""
    for name in ("reference", "story"):
        shutil.rmtree(path / name, ignore_errors=True)
        for old in path.glob(f"{name}-*"):
            old.unlink()
    path.mkdir(parents=True, exist_ok=True)
    return path


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="output directory")
    parser.add_argument("--steps", type=int, default=60, help="training steps, at least 24")
    options = parser.parse_args()
    if options.steps < 24:
        parser.error(f"--steps {options.steps}: the four phases need at least 24")
    return options


if __name__ == "__main__":
    sys.exit(main())
