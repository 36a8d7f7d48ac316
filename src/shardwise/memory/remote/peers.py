"""The nodes of a run, as the agent that leads a snapshot talks to them: by records."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from shardwise.errors import StoreError
from shardwise.memory.home import ABANDONED, LARGEST_RECORD, Place, read_record, write_record
from shardwise.memory.records import AgentInfo, Done
from shardwise.memory.remote.client import AgentClient
from shardwise.memory.tls import Tls
from shardwise.store.store import Buffer

POLL = 0.005
AT_ONCE = 5.0
AGAIN = 0.2
LOOK_ABANDONED = 0.05
AT_A_TIME = 32
CALLING, SILENT = 5.0, 30.0
T = TypeVar("T")


def of_each(nodes: Iterable[str], work: Callable[[str], T]) -> dict[str, T]:
    """What some work gives for each of these nodes; it talks to many of them at a time.

    Raises:
        StoreError: it has failed for one; what is under way for others is waited for.
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


class _GoneError(StoreError):
    """Nothing comes of it: the run has gone on without a node, or that without the snapshot."""


class Nodes:
    """The nodes that hold a snapshot, this one among them.

    Args:
        place: the snapshot, here.
        infos: of all nodes.
        here: which of them this is.
        wait: seconds until one that does not answer counts as lost.
        tls: by what they know each other; in clear if None.

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
        """Interrupt all requests once the snapshot is abandoned: a restore waits for their end."""
        while not self._closed.wait(LOOK_ABANDONED):
            if self._place.has(ABANDONED):
                self._abandoned.set()
                for client in self._clients.values():
                    client.abort()
                return

    def close(self) -> None:
        """Let go of the connections."""
        self._closed.set()
        for client in self._clients.values():
            client.close()

    def read(self, node: str, name: str, *, limit: int) -> bytes:
        """All of a small file of another node."""
        place = self._place
        return self._client(node).read(place.run.name, place.step, name, limit=limit)

    def expect(
        self, node: str, name: str, kind: type[T], *, asked: str = "", failed: str = ""
    ) -> T:
        """A record of a node, once it is there.

        Args:
            asked: the record by which it was asked for it; waits for as long as the node has that.
            failed: the record, a `Done`, that says that it will never come, and why.

        Raises:
            StoreError: the node does not answer, the record does not come, or the snapshot is
                abandoned, or was discarded there.
        """
        last_sign = time.monotonic()
        while True:
            self._place.refuse_abandoned()
            try:
                found = self._look(node, name, kind, last_sign + self._wait - time.monotonic())
                if found is None and failed and (why := self._look(node, failed, Done, 0.0)):
                    raise _GoneError(f"node {node}: {why.failure}")
                if found is None and asked:
                    if not self._has(node, asked):
                        raise _GoneError(f"node {node} has discarded the snapshot")
                    last_sign = time.monotonic()
            except _GoneError:
                raise
            except StoreError:
                self._refuse_gone([node])
                found = None
                self._abandoned.wait(AGAIN)
            if found is not None:
                return found
            if time.monotonic() - last_sign > self._wait:
                raise StoreError(f"node {node} gave no {name} within {self._wait:.0f} s")

    def tell(self, node: str, name: str, record: object) -> None:
        """Leave a record at a node.

        Raises:
            StoreError: the node does not answer, or the snapshot is abandoned.
        """
        self.insist(lambda: self._put(node, name, record))

    def tell_others(self, *told: tuple[str, object]) -> None:
        """Leave records, by their names, at all nodes but this one: at each in this order.

        Raises:
            StoreError: some nodes do not answer, and the others have it; or the snapshot is
                abandoned.
        """
        left = list(self._clients)

        def tell() -> None:
            said = of_each(left, lambda node: self._try_to_tell(node, told))
            left[:] = [node for node in left if said[node]]
            self._refuse_gone(left)
            if left:
                raise StoreError("; ".join(said[node] for node in left))

        self.insist(tell)

    def tell_all(self, name: str, record: object) -> None:
        """Leave a record at all nodes, at this one last: then all others have it, or are lost.

        Raises:
            StoreError: some nodes do not answer, and the others have it; or the snapshot is
                abandoned.
        """
        try:
            self.tell_others((name, record))
        finally:
            self._put(self._here, name, record)

    def insist(self, work: Callable[[], T]) -> T:
        """What some work with other nodes gives; again and again, where one does not answer.

        An agent that has died is followed by another within seconds.

        Raises:
            StoreError: one did not answer for too long, or the snapshot is abandoned.
        """
        deadline = time.monotonic() + self._wait
        while True:
            self._place.refuse_abandoned()
            try:
                return work()
            except _GoneError:
                raise
            except StoreError:
                if time.monotonic() > deadline:
                    raise
            self._abandoned.wait(AGAIN)

    def read_range(self, node: str, name: str, offset: int, out: Buffer) -> Buffer:
        """Fill `out` from a file of a node, and give it.

        Raises:
            StoreError: the node does not answer, or the file ends before.
            FileNotFoundError: it has no such file.
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
        """Raise if one of these, which do not answer, is no longer needed for newer snapshots."""
        run = self._place.run
        for step in reversed([step for step in run.steps() if step > self._place.step]):
            newer = Place(run, step)
            drafts = newer.drafts() + newer.terms()
            if drafts:
                present = {info.node for draft in drafts for info in draft.nodes}
                gone = sorted(set(nodes) - present)
                if gone:
                    raise _GoneError(f"the run has gone on without node {', '.join(gone)}")
                return

    def _client(self, node: str) -> AgentClient:
        try:
            return self._clients[node]
        except KeyError:
            raise StoreError(f"nothing is known of node {node}") from None

    def _put(self, node: str, name: str, record: object) -> None:
        data = record if isinstance(record, bytes) else msgspec.json.encode(record)
        if node == self._here:
            write_record(self._place.path / name, data)
        else:
            self._client(node).put(self._place.run.name, self._place.step, name, data)

    def _try_to_tell(self, node: str, told: Sequence[tuple[str, object]]) -> str:
        try:
            for name, record in told:
                self._put(node, name, record)
        except StoreError as error:
            return f"node {node}: {error}"
        return ""

    def _has(self, node: str, name: str) -> bool:
        """Whether a node has a record."""
        if node == self._here:
            return self._place.has(name)
        try:
            self.read(node, name, limit=LARGEST_RECORD)
        except FileNotFoundError:
            return False
        return True

    def _look(self, node: str, name: str, kind: type[T], left: float) -> T | None:
        """A record, once it is there; None if it is not within `left` seconds, or in due time."""
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
