"""Exchanging records and bytes with the agents of the other nodes of a snapshot."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from shardwise.errors import StoreError
from shardwise.memory.files import LARGEST_RECORD, read_record, write_record
from shardwise.memory.home import ABANDONED, Place
from shardwise.memory.options import Tls
from shardwise.memory.records import AgentInfo, Done
from shardwise.memory.remote.client import AgentClient
from shardwise.store.store import Buffer

POLL = 0.005
AT_ONCE = 5.0
AGAIN = 0.2
LOOK_ABANDONED = 0.05
AT_A_TIME = 32
CALLING, SILENT = 5.0, 30.0
T = TypeVar("T")


def of_each(nodes: Iterable[str], work: Callable[[str], T]) -> dict[str, T]:
    """Call `work` for many nodes at a time, and return the result for each.

    Raises:
        StoreError: a call failed. This is raised after the calls in progress have ended.
    """
    named = list(nodes)
    if len(named) < 2:
        return {node: work(node) for node in named}
    with ThreadPoolExecutor(min(len(named), AT_A_TIME), "shardwise-nodes") as pool:
        jobs = {node: pool.submit(work, node) for node in named}
        try:
            return {node: job.result() for node, job in jobs.items()}
        finally:
            for job in jobs.values():
                job.cancel()


class _NoRetryError(StoreError):
    """A retry is pointless: the run continued without a node, or a node without the snapshot."""


class Nodes:
    """The nodes that hold a snapshot, including this one.

    Args:
        place: the snapshot on this node.
        infos: the agents of all nodes.
        here: the name of this node.
        wait: seconds until a node that does not answer counts as lost.
        tls: certificates for the connections; None if they are unencrypted.

    Raises:
        StoreError: the files of `tls` cannot be read.
    """

    def __init__(
        self,
        place: Place,
        infos: Sequence[AgentInfo],
        here: str,
        wait: float,
        tls: Tls | None = None,
    ) -> None:
        self._place = place
        self._here = here
        self._wait = wait
        others = [info for info in infos if info.node != here]
        context = None if tls is None or not others else tls.for_client()
        calling, silent = min(CALLING, wait), min(SILENT, wait)
        self._clients = {
            info.node: AgentClient(info, connect_timeout=calling, read_timeout=silent, tls=context)
            for info in others
        }
        self._closed, self._abandoned = threading.Event(), threading.Event()
        if others:
            threading.Thread(target=self._watch, name="shardwise-abandoned", daemon=True).start()

    def _watch(self) -> None:
        """Abort all requests once the snapshot is abandoned, as a restore waits for their end."""
        while not self._closed.wait(LOOK_ABANDONED):
            if self._place.has(ABANDONED):
                self._abandoned.set()
                for client in self._clients.values():
                    client.abort()
                return

    def close(self) -> None:
        """Close the connections."""
        self._closed.set()
        for client in self._clients.values():
            client.close()

    def read(self, node: str, name: str, *, limit: int) -> bytes:
        """Return the contents of a small file of another node."""
        place = self._place
        return self._client(node).read(place.run.name, place.step, name, limit=limit)

    def expect(
        self, node: str, name: str, kind: type[T], *, asked: str = "", failed: str = ""
    ) -> T:
        """Wait for a record on a node, and return it.

        Args:
            asked: the record that requested it. As long as the node has that, the wait continues.
            failed: the record, a `Done`, that says that it will never appear, and why.

        Raises:
            StoreError: the node does not answer, the record does not appear, or the snapshot was
                abandoned, or discarded on the node.
        """
        last_news = time.monotonic()
        while True:
            self._place.refuse_abandoned()
            try:
                found = self._look(node, name, kind, last_news + self._wait - time.monotonic())
                if found is None and failed and (why := self._look(node, failed, Done, 0.0)):
                    raise _NoRetryError(f"node {node}: {why.failure}")
                if found is None and asked:
                    if not self._has(node, asked):
                        raise _NoRetryError(f"node {node} has discarded the snapshot")
                    last_news = time.monotonic()
            except _NoRetryError:
                raise
            except StoreError:
                self._refuse_gone([node])
                found = None
                self._abandoned.wait(AGAIN)
            if found is not None:
                return found
            if time.monotonic() - last_news > self._wait:
                raise StoreError(f"node {node} did not provide {name} within {self._wait:.0f} s")

    def tell(self, node: str, name: str, record: object) -> None:
        """Write a record on a node.

        Raises:
            StoreError: the node does not answer, or the snapshot was abandoned.
        """
        self.retrying(lambda: self._put(node, name, record))

    def tell_others(self, *named: tuple[str, object]) -> None:
        """Write records, given with their names, on all other nodes, on each in this order.

        Raises:
            StoreError: some nodes do not answer (the others have the records), or the snapshot was
                abandoned.
        """
        left = list(self._clients)

        def tell() -> None:
            said = of_each(left, lambda node: self._try_to_write(node, named))
            left[:] = [node for node in left if said[node]]
            self._refuse_gone(left)
            if left:
                raise StoreError("; ".join(said[node] for node in left))

        self.retrying(tell)

    def tell_all(self, name: str, record: object) -> None:
        """Write a record on all nodes, on this one last: then the others have it, or are lost.

        Raises:
            StoreError: some nodes do not answer (the others have the record), or the snapshot was
                abandoned.
        """
        try:
            self.tell_others((name, record))
        finally:
            self._put(self._here, name, record)

    def retrying(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, and retry while other nodes do not answer.

        An agent that has died is replaced within seconds.

        Raises:
            StoreError: a node did not answer for too long, or the snapshot was abandoned.
        """
        deadline = time.monotonic() + self._wait
        while True:
            self._place.refuse_abandoned()
            try:
                return work()
            except _NoRetryError:
                raise
            except StoreError:
                if time.monotonic() > deadline:
                    raise
            self._abandoned.wait(AGAIN)

    def read_range(self, node: str, name: str, offset: int, out: Buffer) -> Buffer:
        """Fill `out` with the bytes of a file of a node from `offset`, and return it.

        Raises:
            StoreError: the node does not answer, or the file ends earlier.
            FileNotFoundError: the node does not have the file.
        """
        if node != self._here:
            self._client(node).read_range_into(
                self._place.run.name, self._place.step, name, offset, out
            )
            return out
        fd = os.open(self._place.path / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            view = out.data
            while view:
                count = os.preadv(fd, [view], offset)
                if not count:
                    raise StoreError(f"{self._place.path / name} ends at byte {offset}")
                offset += count
                view = view[count:]
        finally:
            os.close(fd)
        return out

    def _refuse_gone(self, nodes: Sequence[str]) -> None:
        """Raise if newer snapshots are made without one of these nodes, which do not answer."""
        run = self._place.run
        for step in reversed([step for step in run.steps() if step > self._place.step]):
            newer = Place(run, step)
            pending = newer.pending_manifests() + newer.pending_copies()
            if pending:
                present = {info.node for each in pending for info in each.nodes}
                gone = sorted(set(nodes) - present)
                if gone:
                    raise _NoRetryError(f"the run continued without node {', '.join(gone)}")
                return

    def _client(self, node: str) -> AgentClient:
        try:
            return self._clients[node]
        except KeyError:
            raise StoreError(f"unknown node {node}") from None

    def _put(self, node: str, name: str, record: object) -> None:
        data = record if isinstance(record, bytes) else msgspec.json.encode(record)
        if node == self._here:
            write_record(self._place.path / name, data)
            self._place.run.wake_agent()  # the request may be for another worker of this agent
        else:
            self._client(node).put(self._place.run.name, self._place.step, name, data)

    def _try_to_write(self, node: str, named: Sequence[tuple[str, object]]) -> str:
        try:
            for name, record in named:
                self._put(node, name, record)
        except StoreError as error:
            return f"node {node}: {error}"
        return ""

    def _has(self, node: str, name: str) -> bool:
        """Return whether a node has a record."""
        if node == self._here:
            return self._place.has(name)
        try:
            self.read(node, name, limit=LARGEST_RECORD)
        except FileNotFoundError:
            return False
        return True

    def _look(self, node: str, name: str, kind: type[T], left: float) -> T | None:
        """Return a record; None if it does not appear within `left` seconds, or a few at most."""
        place = self._place
        if node == self._here:
            found = read_record(place.path / name, kind)
            if found is None and left > 0:
                time.sleep(POLL)
            return found
        try:
            wait = min(AT_ONCE, max(0.0, left))
            data = self._client(node).read(
                place.run.name, place.step, name, limit=LARGEST_RECORD, wait=wait
            )
        except FileNotFoundError:
            return None
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StoreError(f"node {node}: {name}: {error}") from error
