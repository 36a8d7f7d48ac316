"""An agent's decisions on freeing memory, carried out in the test's own thread."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.memory import decide
from shardwise.memory.agent.actions import free, look_up_root
from shardwise.memory.decide import DEFAULT_PERIODS, Action, Periods, decide_run
from shardwise.memory.home import Home, Run, SnapshotHeld
from shardwise.memory.observe import Observer, view_run
from shardwise.memory.reclaim import remove_if_vacant


def free_decided(run: Run) -> bool:
    """Free what newer snapshots have replaced; return whether that was anything."""
    held, freed = [], False
    for action in decide_run(view_run(run), 0.0):
        if isinstance(action, decide.Free):
            try:
                free(action)
                freed = True
            except SnapshotHeld as error:
                held.append(error)
    if held:
        raise held[0]
    return freed


class Attendant:
    """The agent of a node, as far as it frees memory; time passes as the test says."""

    def __init__(self, home: Home, periods: Periods = DEFAULT_PERIODS) -> None:
        self.now = 0.0
        self.home = home
        self.observer = Observer(home, "here", clock=lambda: self.now)
        self.periods = periods
        self.rescue: Callable[[decide.Rescue], object] = lambda action: None

    def look(self) -> list[Action]:
        """Look around once, and do what is decided."""
        actions = decide.decide(self.observer.node(), self.now, self.periods)
        for action in actions:
            if isinstance(action, decide.Free):
                free(action)
            elif isinstance(action, decide.FreeRun):
                remove_if_vacant(self.home, action.run)
            elif isinstance(action, decide.LookUpRoot):
                look_up_root(action, self.observer)
            elif isinstance(action, decide.Rescue):
                self.rescue(action)
        return actions

    def after(self, seconds: float) -> None:
        """Look around now, and twice so many seconds later: what is learnt is acted on."""
        self.look()
        self.now += seconds
        self.look()
        self.look()
