"""Start, watch and stop the trainers on several hosts, as torchrun would."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from hosts import Host

TRAIN = Path(__file__).parent / "failures_train.py"
PATIENCE = 90.0
POLL = 0.01
FIRST_PORT = 29500  # each launch takes the next port, as the last one may still be in use


@dataclass(frozen=True)
class Run:
    """The settings that all launches of a run share."""

    out: Path
    name: str
    blocks: int
    steps: int
    every: int
    in_memory: bool

    def command(self, parallel: str, journal: Path, host: Host) -> list[str]:
        """Return the command that a host runs."""
        return [
            *(sys.executable, str(TRAIN), "--parallel", parallel, "--steps", str(self.steps)),
            *("--blocks", str(self.blocks), "--every", str(self.every)),
            *("--root", str(self.out / self.name), "--journal", str(journal)),
            *(("--address", host.address) if self.in_memory else ()),
        ]


@dataclass
class Launch:
    """A set of trainers, one on each host.

    Attributes:
        title: short description.
        hosts: names of the hosts, by rank.
        journals: paths of the ranks' journals.
        processes: trainers by host name.
        lost: names of the hosts that were destroyed.
    """

    title: str
    parallel: str
    hosts: list[str]
    journals: list[Path]
    processes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)

    def entries(self, rank: int = 0) -> list[dict[str, Any]]:
        """Return the complete lines of a rank's journal; the last one may still be written."""
        path = self.journals[rank]
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def event(self, name: str, rank: int = 0) -> dict[str, Any]:
        """Return an event from a rank's journal."""
        found = [each for each in self.entries(rank) if each.get("event") == name]
        if not found:
            self._fail(f"the event {name!r} of rank {rank}")
        return found[0]

    def steps_saved(self) -> list[int]:
        """Return the steps that were saved."""
        return [each["at"] for each in self.entries() if each.get("event") == "saved"]

    @property
    def saved(self) -> int:
        """The last step that was saved, or 0."""
        return max(self.steps_saved(), default=0)

    @property
    def losses(self) -> dict[int, float]:
        """The loss of each step."""
        return {each["step"]: each["loss"] for each in self.entries() if "loss" in each}

    def first_step(self) -> float:
        """Return the time of the first step."""
        return float(next(each["time"] for each in self.entries() if "loss" in each))

    def wait_for(self, step: int) -> None:
        """Wait until a step is saved."""
        self._wait(lambda: self.saved >= step, f"step {step}")

    def wait_for_a_step(self) -> None:
        """Wait until the trainers have restored and completed a step."""
        self._wait(lambda: bool(self.losses), "a step")

    def wait_until_broken(self) -> float:
        """Wait until the trainer on a remaining host exits, and return the time."""
        watched = [each for host, each in self.processes.items() if host not in self.lost]
        deadline = time.monotonic() + PATIENCE
        while all(each.poll() is None for each in watched):
            if time.monotonic() > deadline:
                self._fail("the exit of a trainer that lost a peer")
            time.sleep(POLL)
        return time.monotonic()

    def wait_until_done(self) -> None:
        """Wait until all trainers have finished."""
        started = self.processes.values()
        self._wait(lambda: all(each.poll() is not None for each in started), "the end")

    def end(self) -> None:
        """Kill the remaining trainers, as torchrun does before a restart."""
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait(PATIENCE)

    def _wait(self, true: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not true():
            failed = any(each.poll() for each in self.processes.values())
            if failed or time.monotonic() > deadline:
                self._fail(what)
            time.sleep(POLL)

    def _fail(self, what: str) -> NoReturn:
        said = [
            path.with_suffix(".txt").read_text(encoding="utf-8")[-1500:] for path in self.journals
        ]
        sys.exit(f"{self.title}: {what} did not happen; trainer output:\n" + "\n".join(said))


@contextmanager
def launch_trainers(run: Run, title: str, parallel: str, hosts: Sequence[Host]) -> Iterator[Launch]:
    """Run a trainer on each host until the block ends."""
    number = len(list(run.out.glob(f"{run.name}-*-0.jsonl")))
    journals = [run.out / f"{run.name}-{number}-{rank}.jsonl" for rank in range(len(hosts))]
    launch = Launch(title, parallel, [host.name for host in hosts], journals)
    try:
        for rank, (host, journal) in enumerate(zip(hosts, journals, strict=True)):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(hosts)),
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": str(FIRST_PORT + number),
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": "1",
            }
            command = run.command(parallel, journal, host)
            with journal.with_suffix(".txt").open("w") as said:
                process = host.run(command, environment, stdout=said, stderr=said)
            launch.processes[host.name] = process
        yield launch
    finally:
        launch.end()
