"""Notices that another node of the run is lost, while this rank waits for agents.

The first rank of each node listens on a port. The operating system accepts connections there as
long as the process lives, even if it is suspended. This rank also restarts the agent of its node.
So a node is lost if neither its first rank nor its agent accepts a connection.

In a large run, each rank that waits watches only `MOST_WATCHED` other nodes, the same for all ranks
of its node. Each node is watched by as many. If a node does not accept a connection twice in a row,
it is lost. Whoever notices that a node is lost ends its wait, and with it the next step that all
ranks take together.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from errno import EINPROGRESS
from typing import TypeVar
from urllib.parse import urlsplit

from shardwise.kernel.deadline import Deadline
from shardwise.kernel.engine.group import Group
from shardwise.kernel.engine.rounds import Round, unite
from shardwise.kernel.errors import LostRankError
from shardwise.parts.memory.identity import served_address
from shardwise.parts.memory.times import CHECK_PERIOD, NODE_LOST_AFTER
from shardwise.parts.memory.trainer.agents import Membership
from shardwise.parts.ranks.connections import Address, close_in_forked_children, listen

CONNECTIONS_AT_ONCE = 128
MOST_WATCHED = 32
K = TypeVar("K")


def choose_watched(nodes: Sequence[str], own: str) -> list[str]:
    """Return the nodes that a node watches, spread evenly over the others.

    Each node is watched by as many nodes as it watches itself.
    """
    index, count = nodes.index(own), len(nodes) - 1
    most = min(count, MOST_WATCHED)
    return [nodes[(index + 1 + number * count // most) % len(nodes)] for number in range(most)]


class NodeWatch:
    """Checks the other nodes of a run. All ranks create it together.

    Args:
        membership: the nodes of the run.
        group: the ranks of the run.
    """

    def __init__(self, membership: Membership, group: Group) -> None:
        self._membership = membership
        self._cleanup = ExitStack()
        self._first_ranks: dict[str, Address] = {}
        own_node = membership.node_of[group.rank]
        if len(set(membership.node_of)) == 1:
            return
        is_first = membership.node_of.index(own_node) == group.rank

        with Round(group, "watching nodes") as all_ranks:
            address = self._listen(own_node) if is_first else None
            own = {} if address is None else {own_node: address}
            addresses = all_ranks.all_reduce(own, dict[str, Address], unite)
        watched = choose_watched([info.node for info in membership.nodes], own_node)
        others = {node: addresses[node] for node in watched if node in addresses}
        # A node that cannot be reached now, for example through a firewall, cannot be watched.
        unreachable = _why_unreachable(others, NODE_LOST_AFTER)
        self._first_ranks = {n: address for n, address in others.items() if n not in unreachable}

    def _listen(self, own_node: str) -> Address | None:
        """Listen at the host address of this node's agent, and accept connections from now on.

        Returns:
            The address; None if the agent's host address belongs to another container.
        """
        infos = self._membership.nodes
        host = next(served_address(info) for info in infos if info.node == own_node)
        try:
            listener = listen(host, self._cleanup)
        except OSError:
            return None
        self._cleanup.callback(_stop, listener)
        weakref.finalize(self, self._cleanup.close)
        close_in_forked_children(listener)
        threading.Thread(target=_accept, args=(listener,), daemon=True).start()
        return host, listener.getsockname()[1]

    def make_throttled_check(self) -> Callable[[], None]:
        """Return a function that a waiting loop calls in each pass.

        It calls `check` at most once every `CHECK_PERIOD` seconds, the first time after that time.
        """
        next_check = Deadline(CHECK_PERIOD)

        def check_sometimes() -> None:
            nonlocal next_check
            if next_check.has_passed():
                self.check()
                next_check = Deadline(CHECK_PERIOD)

        return check_sometimes

    def check(self) -> None:
        """Raise if a node is lost.

        Raises:
            LostRankError: names the lost nodes and their ranks.
        """
        silent = _why_unreachable(self._first_ranks, CHECK_PERIOD)
        if not silent:
            return
        urls = {info.node: urlsplit(info.url) for info in self._membership.nodes}
        asked = {(node, "first rank"): self._first_ranks[node] for node in silent}
        for node in silent:
            asked[node, "agent"] = urls[node].hostname or "", urls[node].port or 0
        reasons = _why_unreachable(asked, NODE_LOST_AFTER)
        lost = [node for node in silent if {(node, "first rank"), (node, "agent")} <= set(reasons)]
        if lost:
            raise LostRankError(
                "waiting for other nodes",
                {
                    rank: f"its node {node} is lost: its first rank does not answer "
                    f"({reasons[node, 'first rank']}), nor does its agent "
                    f"({reasons[node, 'agent']}); restart the training"
                    for rank, node in enumerate(self._membership.node_of)
                    if node in lost
                },
            )

    def close(self) -> None:
        """Stop listening."""
        self._cleanup.close()


def _accept(listener: socket.socket) -> None:
    """Accept and close connections, so that there is always room for more."""
    with suppress(OSError):
        while True:
            listener.accept()[0].close()


def _stop(listener: socket.socket) -> None:
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # ends `accept` in the other thread


def _why_unreachable(addresses: Mapping[K, Address], timeout: float) -> dict[K, str]:
    """Return the keys whose address accepts no connection in time, each with the reason."""
    found: dict[K, str] = {}
    keys = list(addresses)
    for low in range(0, len(keys), CONNECTIONS_AT_ONCE):
        found |= _connect_to_all(keys[low : low + CONNECTIONS_AT_ONCE], addresses, timeout)
    return found


def _connect_to_all(
    keys: Sequence[K], addresses: Mapping[K, Address], timeout: float
) -> dict[K, str]:
    failed: dict[K, str] = {}
    deadline = Deadline(timeout)
    with ExitStack() as cleanup, selectors.DefaultSelector() as pending:
        for key in keys:
            family = socket.AF_INET6 if ":" in addresses[key][0] else socket.AF_INET
            sock = cleanup.enter_context(socket.socket(family))
            sock.setblocking(False)
            code = sock.connect_ex(addresses[key])
            if code in (0, EINPROGRESS):
                pending.register(sock, selectors.EVENT_WRITE, (key, sock))
            else:
                failed[key] = os.strerror(code)
        # If this process was suspended, answers that came meanwhile count, though the time has
        # passed.
        while pending.get_map() and (events := pending.select(deadline.seconds_left())):
            for event, _ in events:
                key, sock = event.data
                pending.unregister(sock)
                if code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    failed[key] = os.strerror(code)
        for event in pending.get_map().values():
            failed[event.data[0]] = f"no connection within {timeout:g} s"
    return failed
