"""Trainers on several hosts: started as torchrun would, watched, and ended when one of them is."""

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

from shardwise.testing.hosts import Host

TRAIN = Path(__file__).parent / "failures_train.py"
PATIENCE = 90.0
POLL = 0.01
FIRST_PORT = 29500  # each launch of a run has the next: the last one's may still be held


@dataclass(frozen=True)
class Run:
    """What all launches of a run share."""

    out: Path
    name: str
    blocks: int
    steps: int
    every: int
    in_memory: bool

    def command(self, parallel: str, journal: Path, host: Host) -> list[str]:
        """What a host runs."""
        return [
            *(sys.executable, str(TRAIN), "--parallel", parallel, "--steps", str(self.steps)),
            *("--blocks", str(self.blocks), "--every", str(self.every)),
            *("--root", str(self.out / self.name), "--journal", str(journal)),
            *(("--address", host.address) if self.in_memory else ()),
        ]


@dataclass
class Launch:
    """One trainer on each of some hosts.

    Attributes:
        title: what this is, in a few words.
        hosts: the names of the hosts, by rank.
        journals: what each rank tells.
        processes: by the name of the host.
        lost: the hosts that were destroyed since.
    """

    title: str
    parallel: str
    hosts: list[str]
    journals: list[Path]
    processes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)

    def entries(self, rank: int = 0) -> list[dict[str, Any]]:
        """The whole lines of a rank's journal; the last may be in the making."""
        path = self.journals[rank]
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def event(self, name: str, rank: int = 0) -> dict[str, Any]:
        """An event that a rank tells of."""
        found = [each for each in self.entries(rank) if each.get("event") == name]
        if not found:
            self._give_up(f"the event {name!r} of rank {rank}")
        return found[0]

    def steps_saved(self) -> list[int]:
        """The steps that were saved."""
        return [each["at"] for each in self.entries() if each.get("event") == "saved"]

    @property
    def saved(self) -> int:
        """The last of them."""
        return max(self.steps_saved(), default=0)

    @property
    def losses(self) -> dict[int, float]:
        """The loss of each step."""
        return {each["step"]: each["loss"] for each in self.entries() if "loss" in each}

    def first_step(self) -> float:
        """When the first step was made."""
        return float(next(each["time"] for each in self.entries() if "loss" in each))

    def wait_for(self, step: int) -> None:
        """Wait until a step is saved."""
        self._wait(lambda: self.saved >= step, f"step {step}")

    def wait_for_a_step(self) -> None:
        """Wait until all have restored, and made a step."""
        self._wait(lambda: bool(self.losses), "a step")

    def wait_until_broken(self) -> float:
        """Wait until a host that is left sees its trainer end; when it did."""
        watched = [each for host, each in self.processes.items() if host not in self.lost]
        deadline = time.monotonic() + PATIENCE
        while all(each.poll() is None for each in watched):
            if time.monotonic() > deadline:
                self._give_up("the end of a trainer that lost another")
            time.sleep(POLL)
        return time.monotonic()

    def wait_until_done(self) -> None:
        """Wait until all have trained to the end."""
        started = self.processes.values()
        self._wait(lambda: all(each.poll() is not None for each in started), "the end")

    def end(self) -> None:
        """Kill all that are left, as torchrun does before it starts them again."""
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait(PATIENCE)

    def _wait(self, true: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not true():
            failed = any(each.poll() for each in self.processes.values())
            if failed or time.monotonic() > deadline:
                self._give_up(what)
            time.sleep(POLL)

    def _give_up(self, what: str) -> NoReturn:
        said = [path.with_suffix(".txt").read_text()[-1500:] for path in self.journals]
        sys.exit(f"{self.title}: {what} was not reached; the trainers said\n" + "\n".join(said))


@contextmanager
def launched(run: Run, title: str, parallel: str, hosts: Sequence[Host]) -> Iterator[Launch]:
    """A trainer on each host, until the block ends."""
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
