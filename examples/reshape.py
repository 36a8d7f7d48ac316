"""Lose workers and resume with fewer, under another parallelism: `make demo-reshape`.

The demo trains a small GPT with DeepSpeed, and another with Megatron-Core. Each time it kills a
worker, the run resumes on fewer workers with another ZeRO stage, without the pipeline, or with less
tensor parallelism. It compares every loss with those of an uninterrupted run.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from reshape_plot import draw_plot
from reshape_report import failed_checks, names_that_differ, phases_table, summarize_losses
from reshape_run import Outcome, Phase, Run, launch
from rich.console import Console


@dataclass(frozen=True)
class Act:
    """A framework, and the phases of a run under it."""

    name: str
    package: str
    phases: tuple[Phase, ...]


ACTS = (
    Act(
        "DeepSpeed",
        "deepspeed",
        (
            Phase(4, "2 stages × ZeRO 1", "reshape_deepspeed.py", "--stages 2 --zero 1"),
            Phase(3, "ZeRO 3", "reshape_deepspeed.py", "--zero 3"),
            Phase(2, "ZeRO 2", "reshape_deepspeed.py", "--zero 2"),
            Phase(1, "plain PyTorch", "train.py", "--wait"),
        ),
    ),
    Act(
        "Megatron-Core",
        "megatron",
        (
            Phase(8, "TP 2 × PP 2 × DP 2", "reshape_megatron.py", "--tensor 2 --pipeline 2"),
            Phase(4, "TP 2 × DP 2", "reshape_megatron.py", "--tensor 2"),
            Phase(3, "DP 3", "reshape_megatron.py"),
            Phase(1, "no parallelism", "reshape_megatron.py"),
        ),
    ),
)


@dataclass(frozen=True)
class Story:
    """A run under one framework.

    Attributes:
        title: name of the framework.
        reference: outcome of the same run, uninterrupted.
        outcomes: outcomes of the phases, in order.
        differing: by phase, the names whose restored values differ from the saved ones.
    """

    title: str
    reference: Outcome
    outcomes: list[Outcome] = field(default_factory=list)
    differing: dict[str, list[str]] = field(default_factory=dict)


def main() -> int:
    options = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    began = time.monotonic()
    stories = []
    for act in ACTS:
        if options.only not in (None, act.package):
            continue
        if importlib.util.find_spec(act.package) is None:
            missing = f"{act.name} is not installed: pip install '.\\[frameworks]'"
            console.print(f"[yellow]skipped[/]: {missing}", soft_wrap=True)
            continue
        shortened = replace(act, phases=act.phases[-options.last :])
        stories.append(play_act(console, shortened, make_run(shortened, options)))
    if not stories:
        return 0
    picture = options.out / "reshape.png"
    draw_plot(stories, picture)
    wrong = [line for story in stories for line in failed_checks(story)]
    console.print(f"\nPlot: {picture}. Total time: {time.monotonic() - began:.0f} s.")
    for line in wrong:
        console.print(f"[red]✗[/] {line}", soft_wrap=True)
    return 1 if wrong else 0


def make_run(act: Act, options: argparse.Namespace) -> Run:
    """Return a run that saves twice in each phase, and delete the output of an earlier one."""
    out = options.out / f"reshape-{act.package}"
    shutil.rmtree(out, ignore_errors=True)
    every = options.steps // (2 * len(act.phases))
    return Run(out, options.blocks, options.steps, every)


def play_act(console: Console, act: Act, run: Run) -> Story:
    """Train to the end, killing all phases but the last, and print the progress."""

    def say(line: str) -> None:
        console.print(line, soft_wrap=True)

    say(f"\n[bold]{act.name}[/]")
    whole = replace(run, out=run.out / "uninterrupted", every=run.steps)
    with console.status(f"{act.phases[0].name}, uninterrupted"):
        story = Story(act.name, launch(whole, act.phases[0]))
    say(f"[green]✓[/] {act.phases[0].name}, uninterrupted: {story.reference.seconds:.0f} s")
    for number, phase in enumerate(act.phases, start=1):
        killed = step_to_kill(number, len(act.phases), run) if phase != act.phases[-1] else None
        say(f"[dim]$ {phase.command}[/]")
        with console.status(phase.name):
            outcome = launch(run, phase, killed)
        story.outcomes.append(outcome)
        if outcome.restored:
            names = names_that_differ(Path(outcome.restored["place"]), outcome.again)
            story.differing[phase.name] = names
            same = f"[red]{len(names)} names differ[/]" if names else "all bytes match"
            say(f"[green]✓[/] {phase.name} resumed from step {outcome.begun}: {same}")
        if outcome.killed:
            say(f"[red]✗[/] after step {outcome.killed}: worker killed")
    say(f"[green]✓[/] trained to step {run.steps}\n")
    console.print(phases_table(story))
    say(summarize_losses(story))
    return story


def step_to_kill(number: int, phases: int, run: Run) -> int:
    """Return the step at which to kill a phase: half-way between two saves."""
    saved = run.steps * number // phases // run.every * run.every
    return saved + run.every // 2 + 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="output directory")
    parser.add_argument("--steps", type=int, default=32, help="training steps, at least 8")
    parser.add_argument("--blocks", type=int, default=2, help="number of transformer blocks")
    packages = [act.package for act in ACTS]
    parser.add_argument("--only", choices=packages, help="run this framework only")
    parser.add_argument(
        "--last", type=int, default=4, help="run only this many phases, the last ones"
    )
    options = parser.parse_args()
    if options.steps < 8 or options.last < 1:
        parser.error(
            f"--steps {options.steps} --last {options.last}: needs at least 8 steps and 1 phase"
        )
    return options


if __name__ == "__main__":
    sys.exit(main())
