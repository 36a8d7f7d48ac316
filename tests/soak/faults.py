"""The faults of a soak test: killed and stopped processes, lost nodes."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.soak.trainer import Journal, Orders, lines_of

LATEST = 0.8
STOPPED = 1.0
LARGEST_RECORD = 1 << 20


class Field:
    """The nodes of a soak test: directories, each with an agent that trainers start."""

    def __init__(self, nodes: list[Path]) -> None:
        self.nodes = nodes
        self.lost: set[str] = set()
        for node in nodes:
            node.mkdir()

    def agents(self) -> dict[str, list[int]]:
        """Return the process ids of each node's agents; there should be at most one."""
        found: dict[str, list[int]] = {str(node): [] for node in self.nodes}
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                for word in path.read_bytes().decode(errors="replace").split("\0"):
                    if word.startswith("--dir=") and word[6:] in found:
                        found[word[6:]].append(int(path.parent.name))
        return found

    def kill_agents(self, nodes: list[str]) -> None:
        """Kill the agents of these nodes and wait until they exit; trainers may start others."""
        killed = {each for node in nodes for each in self.agents()[node]}
        for process in killed:
            kill(process)
        while killed & {each for node in nodes for each in self.agents()[node]}:
            time.sleep(0.005)

    def lose(self, node: str) -> None:
        """Lose a node: kill its agent and delete its memory."""
        self.lost.add(node)
        while self.agents()[node]:
            self.kill_agents([node])
        shutil.rmtree(node, ignore_errors=True)
        Path(node).mkdir(exist_ok=True)

    def clear(self) -> None:
        """Empty all nodes."""
        for node in self.nodes:
            self.lose(str(node))

    def copy_records(self, to: Path) -> None:
        """Copy logs and records, and list all files, to examine after a failure."""
        for node in self.nodes:
            for directory, _, names in os.walk(node):  # processes may still run
                for name in sorted(names):
                    with suppress(OSError):
                        self._copy_record(Path(directory, name), node, to)

    def _copy_record(self, path: Path, node: Path, to: Path) -> None:
        size = path.stat().st_size
        with (to / f"{node.name}.txt").open("a") as listing:
            listing.write(f"{size:>12} {path.relative_to(node)}\n")
        is_secret = path.name in ("agent.json", "secret")
        if path.suffix in (".json", ".log") and size < LARGEST_RECORD and not is_secret:
            copy = to / node.name / path.relative_to(node)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)

    def inject(
        self, fault: Fault, orders: Orders, chance: random.Random, done: threading.Event
    ) -> None:
        """Cause a fault at a random moment, unless the cycle ends first."""
        self.lost = set()
        journal, world = Path(orders.journal), len(orders.nodes)
        awaited = "open" if fault.while_restoring else "restored"
        while sum(line.what == awaited for line in lines_of(journal)) < world:
            if done.wait(0.01):
                return
        if not done.wait(chance.random() * LATEST):
            trainers = {x.rank: int(x.text) for x in lines_of(journal) if x.what == "here"}
            Journal(orders.journal, -1).write("struck")
            fault.strike(Scene(self, orders, trainers, chance))


@dataclass(frozen=True, slots=True)
class Scene:
    """The targets of a fault: nodes, orders of the trainers, and their processes by rank."""

    field: Field
    orders: Orders
    trainers: dict[int, int]
    chance: random.Random

    def a_trainer(self) -> int:
        """Return a random rank."""
        return self.chance.choice(sorted(self.trainers))


def kill(process: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process, if it exists."""
    with suppress(ProcessLookupError):
        os.kill(process, number)


def nothing(_: Scene) -> None:
    """Cause no fault from outside."""


def kill_trainer(scene: Scene) -> None:
    kill(scene.trainers[scene.a_trainer()])


def kill_trainers(scene: Scene) -> None:
    for process in scene.trainers.values():
        kill(process)


def kill_agent(scene: Scene) -> None:
    scene.field.kill_agents([scene.chance.choice(scene.orders.nodes)])


def kill_agents(scene: Scene) -> None:
    scene.field.kill_agents(list(scene.orders.nodes))


def kill_agent_and_trainer(scene: Scene) -> None:
    scene.field.kill_agents([scene.chance.choice(scene.orders.nodes)])
    kill_trainer(scene)


def kill_all(scene: Scene) -> None:
    kill_trainers(scene)
    kill_agents(scene)


def stop_agent(scene: Scene) -> None:
    """Stop an agent for a while, so that it does not answer; then let it continue."""
    node = scene.chance.choice(scene.orders.nodes)
    stopped = scene.field.agents()[node]
    for process in stopped:
        kill(process, signal.SIGSTOP)
    time.sleep(scene.chance.random() * STOPPED)
    for process in stopped:
        kill(process, signal.SIGCONT)


def lose_node(scene: Scene) -> None:
    rank = scene.a_trainer()
    kill(scene.trainers[rank])
    scene.field.lose(scene.orders.nodes[rank])


def lose_idle_node(scene: Scene) -> None:
    idle = sorted({str(node) for node in scene.field.nodes} - set(scene.orders.nodes))
    if idle:
        scene.field.lose(scene.chance.choice(idle))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A kind of fault.

    Attributes:
        weight: probability, relative to the sum of all weights.
        strike: causes the fault, once all ranks have restored.
        ends_training: whether ranks die, or fail because others have died.
        while_restoring: call `strike` once all ranks have begun to restore.
        while_saving: a rank kills itself during a save.
        ends_well: the run is closed as if it were complete.
    """

    weight: int
    strike: Callable[[Scene], None]
    ends_training: bool = True
    while_restoring: bool = False
    while_saving: bool = False
    ends_well: bool = False


FAULTS = {
    "trainers leave": Fault(weight=2, strike=nothing, ends_training=False),
    "run ends well": Fault(weight=2, strike=nothing, ends_training=False, ends_well=True),
    "trainer killed": Fault(weight=4, strike=kill_trainer),
    "trainer killed while saving": Fault(weight=5, strike=nothing, while_saving=True),
    "trainer killed while restoring": Fault(weight=2, strike=kill_trainer, while_restoring=True),
    "all trainers killed": Fault(weight=3, strike=kill_trainers),
    "agent killed": Fault(weight=3, strike=kill_agent, ends_training=False),
    "all agents killed": Fault(weight=2, strike=kill_agents, ends_training=False),
    "agent stopped for a while": Fault(weight=2, strike=stop_agent, ends_training=False),
    "agent and trainer killed": Fault(weight=3, strike=kill_agent_and_trainer),
    "trainers and agents killed": Fault(weight=3, strike=kill_all),
    "node lost": Fault(weight=5, strike=lose_node),
    "idle node lost": Fault(weight=2, strike=lose_idle_node, ends_training=False),
}
