"""Carry out the decisions of an agent: in the thread of the test, or in threads of its process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardwise.kernel.deadline import Deadline
from shardwise.parts.lineage import Lineage
from shardwise.parts.memory import decide
from shardwise.parts.memory.agent.actions import Follower, look_up_root
from shardwise.parts.memory.agent.agent import Agent
from shardwise.parts.memory.agent.process import make_agent
from shardwise.parts.memory.decide import decide_run
from shardwise.parts.memory.files import listen_to_bell
from shardwise.parts.memory.home import Home, Run, SnapshotDirectory
from shardwise.parts.memory.observe import Observer, read_snapshots
from shardwise.parts.memory.reclaim import discard_superseded, free, remove_if_unused
from shardwise.parts.memory.records import RESCUE
from shardwise.parts.memory.seal import MappedFiles
from shardwise.parts.memory.states import SaveStates
from shardwise.parts.memory.view import RunView


def free_decided(run: Run) -> bool:
    """Free what newer snapshots have replaced; return whether there was some, and it is free."""
    view = RunView(run=run, snapshots=read_snapshots(run.snapshots(abandoned=True)))
    found = [each for each in decide_run(view, 0.0) if each.kind == decide.FREE]
    freed = [free(each, SaveStates()) for each in found if isinstance(each, decide.Action)]
    return bool(freed) and all(freed)


def free_now(place: SnapshotDirectory) -> None:
    """Free a snapshot that nobody uses."""
    assert free(decide.Action(decide.FREE, place, decide.REPLACED), SaveStates())


def free_abandoned(run: Run) -> None:
    """Free what trainers have marked as abandoned."""
    for place in run.snapshots(abandoned=True):
        if place.is_abandoned():
            assert free(decide.Action(decide.FREE, place, decide.ABANDONED), SaveStates())


def home_of(run: Run) -> Home:
    """The home of the node that a run is on."""
    return Home(run.path.parents[2])


def resume(run: Run, step: int | None, lineage: Lineage, nodes: list[str], slots: int) -> None:
    """What a run no longer needs is freed when it is resumed from a step."""
    discard_superseded(home_of(run), run, step, lineage, nodes, slots)
    free_abandoned(run)


def _free_unlocked(action: decide.Action) -> None:
    """Free a snapshot, after the agent's process has released its locks."""
    assert any(free(action, SaveStates()) for _ in Deadline(20.0).attempts(pause=0.01))


class Attendant:
    """The part of an agent that frees memory, on a clock that the test sets."""

    def __init__(self, home: Home) -> None:
        self.now = 0.0
        self.home = home
        self.observer = Observer(home, "here", clock=lambda: self.now)
        self.rescue: Callable[[decide.Action], object] = lambda action: None

    def look(self) -> list[decide.AnyAction]:
        """Decide once, and carry out the actions."""
        actions: list[decide.AnyAction] = []
        for run in self.observer.runs():
            actions += decide_run(self.observer.run(run), self.now)
        for action in actions:
            if action.kind == decide.FREE:
                _free_unlocked(action)
            elif action.kind == decide.FREE_RUN:
                remove_if_unused(self.home, action.run)
            elif action.kind == decide.LOOK_UP_ROOT:
                look_up_root(action, self.observer)
            elif action.kind == RESCUE:
                self.rescue(action)
        return actions

    def after(self, seconds: float) -> None:
        """Decide now, and twice after this many seconds: the second time acts on what the first one
        read.
        """
        self.look()
        self.now += seconds
        self.look()
        self.look()


@contextmanager
def agent_in_threads(home: Home, node: str, follower: Follower | None = None) -> Iterator[Agent]:
    """Run the agent of a node in this process while the block runs, without its server.

    Args:
        follower: what a server of the node shares with the agent; None without a server.
    """
    follower = follower or Follower(node, MappedFiles())
    agent, _ = make_agent(home, follower)
    threading.Thread(target=listen_to_bell, args=(home.bell_path, agent.wake), daemon=True).start()
    agent.start()
    agent.wake()
    try:
        yield agent
    finally:
        agent.stop(20.0)
