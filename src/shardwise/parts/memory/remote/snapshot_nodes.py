"""The nodes of a snapshot: calls them, and reads their files."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from shardwise.kernel.deadline import Deadline
from shardwise.kernel.errors import StoreError
from shardwise.kernel.store.store import Buffer
from shardwise.parts.memory.home import ABANDONED_MARKER, SnapshotDirectory
from shardwise.parts.memory.options import Tls
from shardwise.parts.memory.records import AgentInfo
from shardwise.parts.memory.remote.client import AgentClient
from shardwise.parts.memory.times import CONNECT_TIMEOUT, LOOK_PERIOD, RETRY_PAUSE, TRANSFER_TIMEOUT

MOST_NODES_SHOWN = 8
T = TypeVar("T")


class FinalError(StoreError):
    """A retry is pointless: the run continued without a node, a node discarded the snapshot, or its
    reply is damaged."""


class Nodes:
    """The nodes that hold a snapshot, including this one.

    Args:
        place: the snapshot on this node.
        infos: the agents of all nodes.
        this_node: the name of this node.
        wait: seconds until a node that does not answer counts as lost.
        tls: certificates for the connections; None if they are unencrypted.
        timeout: seconds until a single request fails.

    Attributes:
        this_node: as above.

    Raises:
        StoreError: the files of `tls` cannot be read.
    """

    def __init__(
        self,
        place: SnapshotDirectory,
        infos: Sequence[AgentInfo],
        this_node: str,
        wait: float,
        tls: Tls | None = None,
        *,
        timeout: float = TRANSFER_TIMEOUT,
    ) -> None:
        self._place = place
        self.this_node = this_node
        self._wait = wait
        self._infos = {info.node: info for info in infos if info.node != this_node}
        self._tls = None if tls is None or not self._infos else tls.for_client()
        self._lock = threading.Lock()
        self._clients: dict[str, AgentClient] = {}
        self._timeout = min(timeout, wait)
        self._closed, self._abandoned = threading.Event(), threading.Event()
        self._is_aborted = False

    def _abort_when_abandoned(self) -> None:
        """Abort all requests once the snapshot is abandoned, as a restore waits for their end."""
        while not self._closed.wait(LOOK_PERIOD):
            if self._place.has(ABANDONED_MARKER):
                self._abandoned.set()
                self.abort()
                return

    def abort(self) -> None:
        """Make requests in progress and all later requests fail. Any thread may call this."""
        with self._lock:
            self._is_aborted = True
            for client in self._clients.values():
                client.abort()

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            self._closed.set()
            for client in self._clients.values():
                client.close()

    def read(self, node: str, name: str, *, limit: int) -> bytes:
        """Return the contents of a small file of another node.

        Raises:
            StoreError: the node does not answer, or the file is larger than `limit` bytes.
            FileNotFoundError: the node does not have the file.
        """
        place = self._place
        return self._client(node).read(place.run.name, place.name, name, limit=limit)

    def call(
        self, node: str, stage: str, top: str, *, patience: float, wait: float
    ) -> bytes | None:
        """Call another node to do its part of a stage; see `AgentClient.call`.

        Returns:
            The reply; None if the node has not finished after `wait` seconds.

        Raises:
            StoreError: the node does not answer, or has discarded the snapshot.
            FileNotFoundError: the node does not have the snapshot.
        """
        place = self._place
        return self._client(node).call(
            place.run.name, place.name, stage, top, patience=patience, wait=wait
        )

    def retry(self, work: Callable[[], T]) -> T:
        """Return the result of `work`. Call it again while other nodes do not answer.

        An agent that has died is replaced within seconds. A node that answers, but lacks a file,
        has discarded the snapshot.

        Raises:
            StoreError: a node did not answer for too long, or the snapshot was abandoned, or
                discarded on a node.
        """
        deadline = Deadline(self._wait)
        while True:
            self._place.refuse_abandoned()
            try:
                return work()
            except FinalError:
                raise
            except StoreError as error:
                is_final = isinstance(error.__cause__, (FileNotFoundError, FinalError))
                if is_final or deadline.has_passed():
                    raise
            self.pause()

    def read_range(self, node: str, name: str, offset: int, out: Buffer) -> Buffer:
        """Fill `out` with the bytes of a file of another node from `offset`, and return `out`.

        Raises:
            StoreError: the node does not answer, or the file ends earlier.
            FileNotFoundError: the node does not have the file.
        """
        run, snapshot = self._place.run.name, self._place.name
        try:
            self._client(node).read_range_into(run, snapshot, name, offset, out)
        except StoreError as error:
            self.raise_if_run_continued_without([node], error)
            raise
        return out

    def raise_if_run_continued_without(
        self, nodes: Sequence[str], error: StoreError | None = None
    ) -> None:
        """Raise if newer snapshots are made without one of these nodes, which do not answer.

        Raises:
            FinalError: names these nodes.
        """
        step = self._place.step
        newer = [each for each in self._place.run.snapshots() if each.step > step]
        manifests = (each.read_pending() for each in reversed(newer))
        newest = next(filter(None, manifests), None)
        present = {info.node for info in newest.nodes} if newest is not None else set()
        absent = sorted(set(nodes) - present)
        if present and absent:
            raise FinalError(
                f"step {step} is not completed, because the run continued without node "
                f"{', '.join(absent)}; use a newer snapshot"
            ) from error

    def _client(self, node: str) -> AgentClient:
        with self._lock:
            if node not in self._clients:
                self._clients[node] = self._make_client(node)
                if self._is_aborted:
                    self._clients[node].abort()
            return self._clients[node]

    def _make_client(self, node: str) -> AgentClient:
        """Return a client of another node. The first call starts the thread that aborts requests.

        Few of thousands of nodes get a client.
        """
        if node not in self._infos:
            known = ", ".join(sorted([self.this_node, *self._infos])[:MOST_NODES_SHOWN])
            raise StoreError(
                f"step {self._place.step} of run {self._place.run.name} has no node {node}; its "
                f"nodes are {known}"
            )
        if not self._clients:
            threading.Thread(
                target=self._abort_when_abandoned, name="shardwise-abandoned", daemon=True
            ).start()
        return AgentClient(
            self._infos[node],
            connect_timeout=min(CONNECT_TIMEOUT, self._wait),
            read_timeout=self._timeout,
            tls=self._tls,
        )

    def refuse_abandoned(self) -> None:
        """Raise if the snapshot is abandoned.

        Raises:
            StoreError: the snapshot is abandoned.
        """
        self._place.refuse_abandoned()

    def pause(self) -> None:
        """Wait before the next attempt to reach a node; not if the snapshot was abandoned."""
        self._abandoned.wait(RETRY_PAUSE)
