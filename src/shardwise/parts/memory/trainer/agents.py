"""Finds, starts and restarts the agents of a run's nodes, from the side of the trainers."""

from __future__ import annotations

import logging
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwise.kernel.engine.group import Group
from shardwise.kernel.engine.rounds import Round
from shardwise.kernel.errors import StoreError
from shardwise.kernel.store import Store
from shardwise.parts.lineage import Lineage, read_or_create_lineage
from shardwise.parts.memory.home import Home
from shardwise.parts.memory.identity import refuse_unreachable_agents
from shardwise.parts.memory.options import Memory
from shardwise.parts.memory.records import AgentInfo
from shardwise.parts.memory.remote.lost_agents import why_no_answer
from shardwise.parts.memory.spawn import ensure_agent, log_tail, running_agent
from shardwise.parts.memory.times import ANSWER_TIMEOUT, MOST_STARTS, OBSERVE_PERIOD, START_PERIOD
from shardwise.parts.ranks.connections import own_address

log = logging.getLogger("shardwise")


@dataclass(slots=True)
class Membership:
    """The nodes of a run.

    Attributes:
        lineage: the run and its resumptions.
        nodes: the agent of each node.
        node_of: the name of each rank's node.
    """

    lineage: Lineage
    nodes: list[AgentInfo]
    node_of: list[str]


def choose_interface(options: Memory, group: Group) -> Memory:
    """Return the options. If the run has several hosts, set an `interface` that they can reach.

    All ranks call this together.
    """
    with Round(group, "finding hosts") as all_ranks:
        hosts = all_ranks.all_reduce({socket.gethostname()}, set[str], _two_of)
    if len(hosts) > 1 and not options.interface:
        return replace(options, interface=own_address())
    return options


def join_run(root: Store, options: Memory, group: Group) -> tuple[Home, Membership]:
    """Return this node's home, and the nodes of the run that saves to a root.

    All ranks call this together. The node's agent is started if none runs.

    Raises:
        StoreError: the root cannot be read, an agent does not start, or other nodes cannot reach
            an agent.
    """
    with Round(group, "finding the agents of the nodes") as all_ranks:
        home = Home(options.dir)
        info = ensure_agent(home, options)
        found = all_ranks.all_reduce(
            {info.node: (info, [group.rank])}, dict[str, tuple[AgentInfo, list[int]]], _unite_nodes
        )
    # In the order of their first ranks.
    in_order = sorted(found.values(), key=lambda each: min(each[1]))
    nodes = [info for info, _ in in_order]
    node_of = [""] * group.size
    for info, ranks in in_order:
        for rank in ranks:
            node_of[rank] = info.node
    refuse_unreachable_agents(nodes)
    with Round(group, "reading the lineage of the run", rank0_only=True) as all_ranks:
        lineage = read_or_create_lineage(root) if group.rank == 0 else Lineage("")
        lineage = all_ranks.broadcast(lineage, Lineage)
    return home, Membership(lineage, nodes, node_of)


def _two_of(messages: Sequence[set[str]]) -> set[str]:
    """Return the first two different names."""
    return set(sorted(set().union(*messages))[:2])


def _unite_nodes(
    messages: Sequence[dict[str, tuple[AgentInfo, list[int]]]],
) -> dict[str, tuple[AgentInfo, list[int]]]:
    """Return the agents of all nodes, each with the ranks of the node.

    If ranks know different agents of a node, because it was restarted meanwhile, the agent that the
    last rank knows counts.
    """
    found: dict[str, tuple[AgentInfo, list[int]]] = {}
    for message in messages:
        for node, (info, ranks) in message.items():
            own, own_ranks = found.get(node, (info, []))
            last = max(ranks) > max(own_ranks, default=-1)
            found[node] = info if last else own, [*own_ranks, *ranks]
    return found


class AgentSupervisor:
    """A thread in one rank of each node that restarts the node's agent if it ends.

    The thread logs warnings and never raises; `check` raises. The thread stops when this object is
    deleted.

    Args:
        home: the node's home.
        options: the options for a new agent.
    """

    def __init__(self, home: Home, options: Memory) -> None:
        self._home = home
        self._options = options
        self._failure = ""  # why the agent is no longer restarted
        self._starts: deque[float] = deque(maxlen=MOST_STARTS)
        self._last_request = time.monotonic()
        self._is_silent = False
        self._last_error = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=_check_repeatedly,
            args=(weakref.ref(self), self._stopping),
            name="shardwise-supervisor",
            daemon=True,
        )
        self._thread.start()

    def check(self) -> None:
        """Raise if no agent runs and the supervisor no longer restarts it.

        Raises:
            StoreError: the agent is not restarted. The message includes the end of its log.
        """
        failure = self._failure
        if failure and not self._home.has_agent():
            raise StoreError(failure)

    def stop(self) -> None:
        """Stop the thread. Further calls do nothing."""
        self._stopping.set()
        self._thread.join(OBSERVE_PERIOD + ANSWER_TIMEOUT)

    def look_after_agent(self) -> None:
        """Check the agent once. Failures are logged, never raised: the training must continue."""
        try:
            if not self._home.has_agent():
                self._restart()
                return
            self._failure = ""
            if time.monotonic() - self._last_request > ANSWER_TIMEOUT:
                self._send_request()
                self._last_request = time.monotonic()
        except Exception as error:  # any error: an agent that fails must not end the training
            if str(error) != self._last_error:
                log.exception("checking the agent of %s failed", self._home)
            self._last_error = str(error)

    def _restart(self) -> None:
        if self._failure:
            return
        now = time.monotonic()
        if len(self._starts) == MOST_STARTS and now - self._starts[0] < START_PERIOD:
            self._failure = (
                f"the agent of {self._home} ended {MOST_STARTS} times within {START_PERIOD:.0f} s, "
                "and is no longer restarted. Correct the cause that its log shows. Then restart "
                "the training, or start an agent with `shardwise agent run`. The end of the log "
                f"{self._home.log_path}:\n"
                f"{log_tail(self._home.log_path)}"
            )
            log.error("%s", self._failure)
            return
        self._starts.append(now)
        home, starts = self._home, self._options.start_agent
        action = "starting another" if starts else "waiting for another"
        log.warning("the agent of %s ended; %s (its log: %s)", home, action, home.log_path)
        try:
            info = ensure_agent(self._home, self._options)
        except StoreError as error:
            log.warning("%s", error)
        else:
            log.warning("the agent of %s runs again (process %d)", self._home, info.process)

    def _send_request(self) -> None:
        """Log whether the agent answers. A suspended or overloaded agent is not replaced."""
        info = running_agent(self._home)
        if info is None:
            return
        failure = why_no_answer(info, self._options.tls, ANSWER_TIMEOUT)
        if failure and not self._is_silent and self._home.has_agent():
            log.warning(
                "the agent of %s (process %d) runs, but does not answer: %s; snapshots wait until "
                "it answers or is killed",
                self._home,
                info.process,
                failure,
            )
        if self._is_silent and not failure:
            log.warning("the agent of %s answers again", self._home)
        self._is_silent = bool(failure)


def _check_repeatedly(reference: weakref.ref[AgentSupervisor], stopping: threading.Event) -> None:
    while not stopping.wait(OBSERVE_PERIOD) and (supervisor := reference()) is not None:
        supervisor.look_after_agent()
        del supervisor  # while this thread waits, nothing else may keep the object
