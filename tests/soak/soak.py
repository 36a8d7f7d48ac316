"""Train, fail, restore and check every byte, repeatedly: `make soak ARGS="--minutes 60"`.

Four processes simulate four nodes, each with its own directory and agent. They take a snapshot of
each step, protected by parity, and persist every 20th. In every cycle a random fault happens at a
random moment. The next cycle restores with another number of ranks and another sharding.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.soak.faults import FAULTS, Fault, Field
from tests.soak.history import History
from tests.soak.judging import LONGEST_CYCLE, LONGEST_SILENCE, judged, longest_silence
from tests.soak.steadiness import Steadiness
from tests.soak.trainer import Line, Orders, lines_of, size_of, train
from tests.tools.gang import Gang, Outcome, Patience

NODES = 4
SLOW, SLOW_KEPT = 8.0, 10
GROUP_TIMEOUT = 20.0
SHOWN = 12
PRESSURE = Path("/proc/pressure/cpu")
"""How long processes have waited for a processor, on kernels that say so."""


@dataclass
class Tally:
    """Statistics of the cycles, by kind of fault."""

    cycles: Counter[str] = field(default_factory=Counter)
    sources: dict[str, Counter[str]] = field(default_factory=dict)
    lost: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    slow: list[int] = field(default_factory=list)
    silence: tuple[float, int] = 0.0, 0
    """The longest time in which no rank went on, in seconds, and its cycle."""


class Soak:
    """A run under test.

    Args:
        base: directory in memory, for the nodes' directories.
        disk: directory for the run's root and the journals.
        logs: directory for the logs of failed and slow cycles.
        seed: seed of all random choices.
        say: prints a line about each cycle.
    """

    def __init__(
        self, base: Path, disk: Path, logs: Path, seed: int, say: Callable[[str], None]
    ) -> None:
        self._chance = random.Random(seed)
        self._field = Field([base / f"node{i}" for i in range(NODES)])
        self._disk = disk
        self._logs = logs
        self._say = say
        self._root = disk / "root"
        self.tally = Tally()
        self.steadiness = Steadiness(base)
        self._history = History()

    def cycle(self, gang: Gang, number: int) -> None:
        """Run a cycle: train, cause a fault, and check the outcome."""
        fault = self._chance.choices(list(FAULTS), [kind.weight for kind in FAULTS.values()])[0]
        kind = FAULTS[fault]
        orders = self._orders(number, kind)
        journal = Path(orders.journal)
        alive = [node for node, processes in self._field.agents().items() if processes]
        self._history.begin(orders.nodes, alive)
        start = time.monotonic()
        done = threading.Event()
        injected = threading.Thread(
            target=self._field.inject,
            args=(kind, orders, random.Random(orders.seed + 1), done),
            daemon=True,
        )
        injected.start()
        outcomes = gang.run_outcomes(
            train,
            orders,
            world=len(orders.nodes),
            group_timeout=GROUP_TIMEOUT,
            patience=Patience(LONGEST_SILENCE, partial(size_of, journal), LONGEST_CYCLE),
        )
        ended_at = time.time()
        done.set()
        injected.join(LONGEST_SILENCE)
        self.tally.cycles[fault] += 1
        self.tally.seconds.append(time.monotonic() - start)
        lines = lines_of(journal)
        self.tally.silence = max(self.tally.silence, (longest_silence(lines, ended_at), number))
        wrong = judged(outcomes, lines, kind, ended_at)
        wrong += self._history.learn(number, orders.nodes, lines, self._field.lost)
        if self._history.source:
            self.tally.sources.setdefault(fault, Counter())[self._history.source] += 1
        self.tally.lost[fault] += self._history.lost
        slow = self.tally.seconds[-1] > SLOW
        if wrong or (slow and len(self.tally.slow) < SLOW_KEPT):
            self._keep_logs(number, fault, orders, outcomes, wrong)
        if slow:
            self.tally.slow.append(number)
        if wrong:
            self._begin_anew()
        else:
            self.steadiness.look(self._field.agents())
        self._say(
            f"cycle {number}: {len(orders.nodes)} ranks, {fault}: {self.tally.seconds[-1]:.1f} s, "
            f"from {self._history.source or 'nowhere'}, {self._history.lost} steps lost"
            f"{moments(lines)}"
        )
        journal.unlink(missing_ok=True)

    def _orders(self, number: int, kind: Fault) -> Orders:
        chance = self._chance
        world = chance.choice((2, 3, 4))
        steps = chance.randint(3, 25)
        dying = (chance.randrange(world), chance.randint(1, steps)) if kind.while_saving else None
        return Orders(
            cycle=number,
            nodes=tuple(map(str, chance.sample(self._field.nodes, world))),
            root=str(self._root),
            journal=str(self._disk / f"journal-{number}"),
            seed=chance.randrange(1 << 30),
            axis=chance.randrange(2),
            staging_bytes=chance.choice((1 << 20, 4 << 20, 64 << 20)),
            steps=1000 if kind.ends_training and dying is None else steps,
            overlap=chance.random() < 0.5,
            dies_saving=dying,
            ends_well=kind.ends_well,
        )

    def _keep_logs(
        self, number: int, fault: str, orders: Orders, outcomes: list[Outcome], wrong: list[str]
    ) -> None:
        kept = self._logs / f"cycle-{number}-{fault.replace(' ', '-')}"
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir(parents=True)
        text = "\n".join([*wrong, "", load_of_machine(), str(orders), ""])
        text += "\n".join(f"\nrank {each.rank} {each.kind}\n{each.report}" for each in outcomes)
        (kept / "what-happened.txt").write_text(text)
        with suppress(FileNotFoundError):
            shutil.copy(orders.journal, kept / "journal.jsonl")
        self._field.copy_records(kept)
        self.tally.failures += [f"cycle {number} ({fault}): {each} (see {kept})" for each in wrong]
        shown = self.tally.failures[-len(wrong) :] if wrong else [f"slow: see {kept}"]
        print("\n".join(shown), flush=True)

    def _begin_anew(self) -> None:
        """Start with an empty run, so that a failure does not affect later cycles."""
        self._field.clear()
        shutil.rmtree(self._root, ignore_errors=True)
        self._history = History()
        self.steadiness.begin_anew()

    def end(self) -> None:
        """Kill all agents and empty all nodes."""
        self._field.clear()


def load_of_machine() -> str:
    """Return how busy the machine is, to tell a slow cycle from one that hangs."""
    pressure = ""
    with suppress(OSError):
        pressure = PRESSURE.read_text(encoding="utf-8").partition("\n")[0]
    loads = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    return f"{os.cpu_count()} processors; load in the last 1, 5, 15 minutes: {loads}; {pressure}"


def moments(lines: list[Line]) -> str:
    """Return when each event last happened, in seconds from the beginning."""
    last = {line.what: line.at for line in lines}
    start = min((line.at for line in lines), default=0.0)
    shown = ("open", "restored", "saving", "struck", "raised", "ended")
    return "".join(f"; {what} {last[what] - start:.1f}" for what in shown if what in last)


def report(soak: Soak, seed: int, seconds: float) -> bool:
    """Print a report, and return whether there were no failures."""
    tally = soak.tally
    silence, cycle = tally.silence
    total = sum(tally.cycles.values())
    print(f"\n{'fault':34}{'cycles':>8}{'memory':>8}{'storage':>9}{'nothing':>9}{'steps lost':>12}")
    for fault, count in sorted(tally.cycles.items()):
        found = tally.sources.get(fault, Counter())
        cells = "".join(
            f"{found[source]:>{width}}"
            for source, width in (("memory", 8), ("storage", 9), ("nothing", 9))
        )
        print(f"{fault:34}{count:>8}{cells}{tally.lost[fault]:>12}")
    longest = max(tally.seconds, default=0.0)
    rate = f"{3600 * total / seconds:.0f} per hour, the longest took {longest:.1f} s"
    print(f"\n{total} cycles in {seconds:.0f} s ({rate}), seed {seed}")
    print(f"{len(tally.slow)} cycles took longer than {SLOW:.0f} s; logs of {SLOW_KEPT} are kept")
    print(f"the longest time in which no rank went on: {silence:.1f} s, in cycle {cycle}")
    failures = [*tally.failures, *soak.steadiness.failures()]
    for line in soak.steadiness.lines():
        print(line)
    for line in failures[:SHOWN]:
        print(f"FAILED: {line}")
    print("no failures" if not failures else f"{len(failures)} failures")
    return not failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logs", type=Path, default=Path("soak-out"), help="logs of failed cycles")
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="memory of the nodes")
    parser.add_argument("--verbose", action="store_true", help="print a line for each cycle")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    base = Path(tempfile.mkdtemp(prefix="shardwise-soak-", dir=options.dir))
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shardwise-soak-") as disk:
        say = partial(print, flush=True) if options.verbose else lambda _: None
        soak = Soak(base, Path(disk), options.logs, options.seed, say)
        try:
            with Gang(NODES) as gang:
                number = 0
                while time.monotonic() - start < 60 * options.minutes:
                    number += 1
                    soak.cycle(gang, number)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        finally:
            soak.end()
            shutil.rmtree(base, ignore_errors=True)
    sys.exit(0 if report(soak, options.seed, time.monotonic() - start) else 1)


if __name__ == "__main__":
    main()
