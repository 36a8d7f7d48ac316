"""Lose a process, a host, then two hosts at once, and resume each time: `make demo-failures`.

Network namespaces simulate four hosts, each with its own memory and agent. A small GPT trains on
all four and takes a snapshot in memory at every step. The demo makes it fail three times and
compares every loss with those of an uninterrupted run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from demo import fresh_directory
from failures_hosts import Launch, Run, launch_trainers
from failures_plot import draw_plot
from failures_report import comparison_table, failed_checks, sources_table, times_table
from hosts import Host, Hosts, HostsUnavailable
from rich.console import Console

COUNT = 4
SLOTS = 2  # committed snapshots kept in memory: the default of sw.Memory


@dataclass(frozen=True)
class Failure:
    """A failure and how the run resumes after it.

    Attributes:
        title: short description of the failure.
        step: the failure happens once this step is saved.
        strike: causes the failure.
        parallel: sharding with which the run resumes.
        repair: returns the hosts on which the run resumes.
        source: where the run should find its state, "memory" or "storage".
        cost: largest number of steps that the run may lose.
    """

    title: str
    step: int
    strike: Callable[[Hosts, Launch], None]
    parallel: str
    repair: Callable[[Hosts], Sequence[Host]]
    source: str
    cost: int


@dataclass(frozen=True)
class Recovery:
    """How a run recovered from a failure.

    Attributes:
        step: step of the snapshot or checkpoint that was restored.
        source: "memory" or "storage".
        reached: last step that had been saved before the failure.
        skipped: newer steps, and why each was not restored.
        noticed: seconds until a launcher on a remaining host saw its trainer exit.
        seconds: time after that, split into starting the trainers, restoring, and the first step.
        restore: seconds of the restore alone.
        phases: seconds of each phase of the restore.
        origin: bytes read by all ranks, by where they came from.
        read: bytes of the state among them, according to the load reports.
        received: bytes that the hosts received over the network during the restore.
    """

    failure: Failure
    step: int
    source: str
    reached: int
    skipped: list[tuple[int, str]]
    noticed: float
    seconds: dict[str, float]
    restore: float
    phases: dict[str, float]
    origin: dict[str, int]
    read: int
    received_bytes: int


def failures_after(every: int) -> list[Failure]:
    """Return the failures; all happen between the first and the second save to storage."""
    return [
        Failure(
            title="trainer on host-1 killed",
            step=every + every // 4,
            strike=kill_trainer,
            parallel="fsdp",
            repair=list,
            source="memory",
            cost=1,  # a trainer may not have copied its part of the newest step yet
        ),
        Failure(
            title="host-2 destroyed",
            step=every + every // 2,
            strike=lambda hosts, launch: destroy(launch, [hosts[2]]),
            parallel="tp",
            repair=lambda hosts: [host for host in hosts if host.running],
            source="memory",
            cost=SLOTS + 1,  # the parity of the newest steps may be incomplete
        ),
        Failure(
            title="host-0 and host-1 destroyed",
            step=every + every * 3 // 4,
            strike=lambda hosts, launch: destroy(launch, [hosts[0], hosts[1]]),
            parallel="fsdp",
            repair=replace_lost,
            source="storage",
            cost=every,
        ),
    ]


def kill_trainer(_: Hosts, launch: Launch) -> None:
    launch.processes["host-1"].kill()


def destroy(launch: Launch, victims: list[Host]) -> None:
    launch.lost.update(host.name for host in victims)
    for host in victims:
        host.destroy()


def replace_lost(hosts: Hosts) -> list[Host]:
    """Replace the lost hosts with new ones, whose memory is empty."""
    for host in hosts:
        if not host.running:
            host.start()
    return list(hosts)


class Story:
    """A run that fails several times, reported as it proceeds.

    Attributes:
        launches: one for each start of the trainers.
        recoveries: one for each launch but the first.
    """

    def __init__(self, console: Console, hosts: Hosts, run: Run) -> None:
        self.launches: list[Launch] = []
        self.recoveries: list[Recovery] = []
        self._console = console
        self._hosts = hosts
        self._run = run

    def play(self, failures: Sequence[Failure]) -> None:
        """Train to the end, despite the failures."""
        present: Sequence[Host] = list(self._hosts)
        struck = noticed = 0.0
        parallel = "fsdp"
        for number in range(len(failures) + 1):
            title = f"{parallel.upper()} on {len(present)}"
            with launch_trainers(self._run, title, parallel, present) as launch:
                self.launches.append(launch)
                if number:
                    launch.wait_for_a_step()
                    self._record(failures[number - 1], struck, noticed)
                if number == len(failures):
                    launch.wait_until_done()
                    self._say(f"[green]✓[/] trained to step {launch.saved}")
                    break
                failure = failures[number]
                launch.wait_for(failure.step)
                struck = time.monotonic()
                failure.strike(self._hosts, launch)
                noticed = launch.wait_until_broken()
            self._say(f"[red]✗[/] after step {launch.saved}: {failure.title}")
            present, parallel = failure.repair(self._hosts), failure.parallel

    def _record(self, failure: Failure, struck: float, noticed: float) -> None:
        *earlier, launch = self.launches
        restored = launch.event("restored")
        there, first = launch.event("ready")["time"], launch.first_step()
        step = restored["at"]
        ranks = [launch.event("restored", rank) for rank in range(len(launch.hosts))]
        origin: Counter[str] = Counter()
        for each in ranks:
            origin.update(each["origins"])
        recovery = Recovery(
            failure=failure,
            step=step,
            source=restored["source"],
            reached=earlier[-1].saved,
            skipped=[(number, why) for number, why in restored["skipped"]],
            noticed=noticed - struck,
            seconds={
                "start": there - noticed,
                "restore": restored["time"] - there,
                "first step": first - restored["time"],
            },
            restore=restored["seconds"],
            phases=restored["phases"],
            origin=dict(origin),
            read=sum(each["read"] for each in ranks),
            received_bytes=sum(each["received"] for each in ranks),
        )
        self.recoveries.append(recovery)
        self._print(recovery, launch)

    def _print(self, recovery: Recovery, launch: Launch) -> None:
        lost = recovery.reached - recovery.step
        self._say(
            f"[green]✓[/] resumed as {launch.title} from [bold]{recovery.source}[/] at step "
            f"{recovery.step}: {lost or 'no'} step{'' if lost == 1 else 's'} lost; training again "
            f"after {sum(recovery.seconds.values()):.1f} s, of which the restore took "
            f"{recovery.restore:.2f} s"
        )
        phases = {name: each for name, each in recovery.phases.items() if name != "total"}
        self._say("  [dim]" + ", ".join(f"{n} {each:.2f} s" for n, each in phases.items()) + "[/]")
        for step, why in recovery.skipped:
            self._say(f"  [dim]skipped step {step}: {why}[/]")

    def _say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True)


def main() -> int:
    options = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    began = time.monotonic()
    out = fresh_directory(options.out)
    every = options.steps // 3
    run = Run(out, "story", options.blocks, options.steps, every, in_memory=True)
    try:
        with Hosts(COUNT, out / "hosts") as hosts:
            reference = run_without_failures(console, hosts, run)
            story = Story(console, hosts, run)
            story.play(failures_after(every)[: options.failures])
    except HostsUnavailable as error:
        console.print(f"[yellow]skipped[/]: {error}", soft_wrap=True)
        return 0
    tables = (times_table(story), sources_table(story), comparison_table(story, reference))
    console.print("", *tables, sep="\n")
    picture = out / "failures.png"
    draw_plot(story, reference, picture)
    console.print(f"Plot: {picture}. Total time: {time.monotonic() - began:.0f} s.")
    wrong = failed_checks(story, reference)
    for line in wrong:
        console.print(f"[red]✗[/] {line}", soft_wrap=True)
    return 1 if wrong else 0


def run_without_failures(console: Console, hosts: Hosts, story: Run) -> Launch:
    """Run the same training without failures and without saving anything."""
    run = Run(story.out, "reference", story.blocks, story.steps, story.steps + 1, in_memory=False)
    began = time.monotonic()
    with launch_trainers(run, "FSDP on 4, uninterrupted", "fsdp", list(hosts)) as launch:
        launch.wait_until_done()
    steps, took = len(launch.losses), time.monotonic() - began
    console.print(f"[green]✓[/] {launch.title}: {steps} steps, {took:.0f} s")
    return launch


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    out = Path("demo-out") / "failures"
    parser.add_argument("--out", type=Path, default=out, help="output directory")
    parser.add_argument("--steps", type=int, default=36, help="training steps, at least 15")
    parser.add_argument("--blocks", type=int, default=3, help="number of transformer blocks")
    parser.add_argument("--failures", type=int, default=3, help="number of failures, up to 3")
    options = parser.parse_args()
    if options.steps < 15:
        parser.error(f"--steps {options.steps}: the failures need at least 15")
    return options


if __name__ == "__main__":
    sys.exit(main())
