"""Lose a worker, and go on with those that are left, again and again: `make demo-reshape`.

A small GPT is trained by DeepSpeed, and one by Megatron-Core. Whenever a worker is killed, the run
goes on with fewer, and so in another shape: other stages of ZeRO, no pipeline any more, less tensor
parallelism. Its losses are held against those of a run that was never interrupted.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from reshape_plot import draw
from reshape_report import differing, faults, summary, table
from reshape_run import Outcome, Phase, Run, launch
from rich.console import Console


@dataclass(frozen=True)
class Act:
    """A framework, and the shapes that a run takes under it."""

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
            Phase(1, "nothing parallel", "reshape_megatron.py"),
        ),
    ),
)


@dataclass(frozen=True)
class Story:
    """A run under a framework.

    Attributes:
        title: the framework.
        reference: the same run, never interrupted.
        outcomes: of each phase.
        differing: by phase, names of what it restored that was not as it had been saved.
    """

    title: str
    reference: Outcome
    outcomes: list[Outcome] = field(default_factory=list)
    differing: dict[str, list[str]] = field(default_factory=dict)


def main() -> int:
    options = arguments()
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
        stories.append(played(console, shortened, run_of(shortened, options)))
    if not stories:
        return 0
    picture = options.out / "reshape.png"
    draw(stories, picture)
    wrong = [line for story in stories for line in faults(story)]
    console.print(f"\n{picture} shows it. {time.monotonic() - began:.0f} s in all.")
    for line in wrong:
        console.print(f"[red]✗[/] {line}", soft_wrap=True)
    return 1 if wrong else 0


def run_of(act: Act, options: argparse.Namespace) -> Run:
    """A run whose phases save twice each; nothing is left of an earlier one."""
    out = options.out / f"reshape-{act.package}"
    shutil.rmtree(out, ignore_errors=True)
    every = options.steps // (2 * len(act.phases))
    return Run(out, options.blocks, options.steps, every)


def played(console: Console, act: Act, run: Run) -> Story:
    """Train to the end, though all phases but the last are killed; tell how."""

    def say(line: str) -> None:
        console.print(line, soft_wrap=True)

    say(f"\n[bold]{act.name}[/]")
    whole = replace(run, out=run.out / "uninterrupted", every=run.steps)
    with console.status(f"{act.phases[0].name}, never interrupted"):
        story = Story(act.name, launch(whole, act.phases[0]))
    say(f"[green]✓[/] {act.phases[0].name}, never interrupted: {story.reference.seconds:.0f} s")
    for number, phase in enumerate(act.phases, start=1):
        killed = killed_at(number, len(act.phases), run) if phase != act.phases[-1] else None
        say(f"[dim]$ {phase.command}[/]")
        with console.status(phase.name):
            outcome = launch(run, phase, killed)
        story.outcomes.append(outcome)
        if outcome.restored:
            names = differing(Path(outcome.restored["place"]), outcome.again)
            story.differing[phase.name] = names
            same = f"[red]but for {len(names)} names[/]" if names else "the same to the byte"
            say(f"[green]✓[/] {phase.name} goes on from step {outcome.begun}, {same}")
        if outcome.killed:
            say(f"[red]✗[/] after step {outcome.killed} a worker is killed")
    say(f"[green]✓[/] trained to step {run.steps}\n")
    console.print(table(story))
    say(summary(story))
    return story


def killed_at(number: int, phases: int, run: Run) -> int:
    """When a phase is killed: all train about as long, and then some steps have not been saved."""
    saved = run.steps * number // phases // run.every * run.every
    return saved + run.every // 2 + 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="where everything goes")
    parser.add_argument("--steps", type=int, default=32, help="how long to train, at least 8")
    parser.add_argument("--blocks", type=int, default=2, help="how deep the models are")
    packages = [act.package for act in ACTS]
    parser.add_argument("--only", choices=packages, help="one of the frameworks")
    parser.add_argument("--last", type=int, default=4, help="only the last so many phases")
    options = parser.parse_args()
    if options.steps < 8 or options.last < 1:
        parser.error("at least 8 steps and 1 phase are needed")
    return options


if __name__ == "__main__":
    sys.exit(main())
