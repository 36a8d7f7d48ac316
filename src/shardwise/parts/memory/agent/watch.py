"""Ask all agents what the ranks of a run do now, for `shardwise agent status --watch`.

Asking thousands of nodes takes longer than a refresh. So each refresh asks for a limited time, and
begins with the nodes that were not asked for the longest time.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

from shardwise.kernel.deadline import Deadline
from shardwise.kernel.errors import StoreError
from shardwise.parts.memory.home import Home, Run
from shardwise.parts.memory.options import Tls
from shardwise.parts.memory.progress import RankProgress, RunProgress, read_progress, summarize
from shardwise.parts.memory.rank_liveness import has_trainers
from shardwise.parts.memory.records import AgentInfo
from shardwise.parts.memory.remote.client import AgentClient
from shardwise.parts.memory.spawn import running_agent
from shardwise.parts.memory.times import LONGEST_ATTEMPT, OBSERVE_PERIOD, UPKEEP_PERIOD

NODES_AT_ONCE = 32


class ProgressWatch:
    """Watches the runs on a node.

    Args:
        home: the directory of the node.
        tls: the certificates of the agents.
        clock: a monotonic clock, in seconds.
    """

    def __init__(
        self, home: Home, tls: Tls | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._home, self._clock = home, clock
        self._tls: ssl.SSLContext | None = None if tls is None else tls.for_client()
        self._asked_at: dict[tuple[str, str], float] = {}
        self._answers: dict[tuple[str, str], tuple[float, list[RankProgress]]] = {}
        self._nodes: dict[str, tuple[str, list[AgentInfo]]] = {}
        self._lock = threading.Lock()

    def read(self) -> list[RunProgress]:
        """Return what the ranks of each run with a trainer on this node do now."""
        own = running_agent(self._home)
        return [
            self._read_run(run, own.node if own else "this node")
            for run in self._home.runs()
            if has_trainers(run)
        ]

    def _read_run(self, run: Run, own: str) -> RunProgress:
        others = {each.node: each for each in self._nodes_of(run) if each.node != own}
        self._ask(run, list(others.values()))
        oldest = self._clock() - UPKEEP_PERIOD
        answered = [(own, read_progress(run))]
        with self._lock:
            for node in others:
                at, ranks = self._answers.get((run.name, node), (-float("inf"), []))
                if at >= oldest:
                    answered.append((node, ranks))
        return summarize(run.name, answered, unanswered=len(others) + 1 - len(answered))

    def _ask(self, run: Run, nodes: list[AgentInfo]) -> None:
        """Ask nodes until the time of a refresh is over."""
        if not nodes:
            return
        deadline = Deadline(OBSERVE_PERIOD)
        never = -float("inf")
        nodes.sort(key=lambda info: self._asked_at.get((run.name, info.node), never))

        def ask(info: AgentInfo) -> None:
            if deadline.has_passed():
                return
            key = run.name, info.node
            self._asked_at[key] = self._clock()
            with suppress(StoreError):
                client = AgentClient(
                    info,
                    connect_timeout=LONGEST_ATTEMPT,
                    read_timeout=LONGEST_ATTEMPT,
                    tls=self._tls,
                )
                with closing(client):
                    answer = client.list_progress(run.name)
                with self._lock:
                    self._answers[key] = self._clock(), answer

        with ThreadPoolExecutor(NODES_AT_ONCE, "shardwise-watch") as pool:
            list(pool.map(ask, nodes))

    def _nodes_of(self, run: Run) -> list[AgentInfo]:
        """Return the nodes of a run: those of the newest save, or else those that are known."""
        places = run.snapshots()
        name, nodes = self._nodes.get(run.name, ("", []))
        if places and places[-1].name != name:  # a pending manifest is large, so it is read once
            pending = places[-1].read_pending()
            nodes = nodes if pending is None else pending.nodes
            self._nodes[run.name] = places[-1].name, nodes
        return nodes or run.known_nodes()
