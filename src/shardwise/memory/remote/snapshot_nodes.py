"""The nodes of a snapshot: reads and writes records on them, waits for records, and reads files."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from shardwise.deadline import Deadline
from shardwise.errors import StoreError
from shardwise.memory.files import (
    LARGEST_RECORD,
    decode_record,
    encode_record,
    write_record,
)
from shardwise.memory.home import ABANDONED_MARKER, SnapshotDirectory
from shardwise.memory.options import Tls
from shardwise.memory.records import AgentInfo, StageOutcome
from shardwise.memory.remote.client import AgentClient
from shardwise.store.store import Buffer

LOCAL_PAUSE = 0.005
LONGEST_RECORD_WAIT = (
    5.0  # an agent waits this long for a record before it replies that it has none
)
RETRY_PAUSE = 0.2
ABANDONED_PERIOD = 0.05
MOST_THREADS = 32
CONNECT_TIMEOUT, READ_TIMEOUT = 5.0, 30.0
T = TypeVar("T")


def run_on_nodes(nodes: Iterable[str], work: Callable[[str], T]) -> dict[str, T]:
    """Call `work` for many nodes at a time, and return the result for each.

    Raises:
        StoreError: a call failed. It is raised after the calls in progress have ended.
    """
    names = list(nodes)
    if len(names) < 2:
        return {node: work(node) for node in names}
    with ThreadPoolExecutor(min(len(names), MOST_THREADS), "shardwise-nodes") as pool:
        jobs = {node: pool.submit(work, node) for node in names}
        try:
            return {node: job.result() for node, job in jobs.items()}
        finally:
            for job in jobs.values():
                job.cancel()


class _NoRetryError(StoreError):
    """A retry is pointless: the run continued without a node, a node discarded the snapshot, or a
    record is damaged."""


class Nodes:
    """The nodes that hold a snapshot, including this one.

    Args:
        place: the snapshot on this node.
        infos: the agents of all nodes.
        this_node: the name of this node.
        wait: seconds until a node that does not answer counts as lost.
        tls: certificates for the connections; None if they are unencrypted.

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
    ) -> None:
        self._place = place
        self._this_node = this_node
        self._wait = wait
        others = [info for info in infos if info.node != this_node]
        context = None if tls is None or not others else tls.for_client()
        self._clients = {
            info.node: AgentClient(
                info,
                connect_timeout=min(CONNECT_TIMEOUT, wait),
                read_timeout=min(READ_TIMEOUT, wait),
                tls=context,
            )
            for info in others
        }
        self._closed, self._abandoned = threading.Event(), threading.Event()
        if others:
            threading.Thread(
                target=self._abort_when_abandoned, name="shardwise-abandoned", daemon=True
            ).start()

    def _abort_when_abandoned(self) -> None:
        """Abort all requests once the snapshot is abandoned, as a restore waits for their end."""
        while not self._closed.wait(ABANDONED_PERIOD):
            if self._place.has(ABANDONED_MARKER):
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
        """Return the contents of a small file of another node.

        Raises:
            StoreError: the node does not answer, or the file is larger than `limit` bytes.
            FileNotFoundError: the node does not have the file.
        """
        place = self._place
        return self._client(node).read(place.run.name, place.step, name, limit=limit)

    def wait_for_record(
        self,
        node: str,
        name: str,
        record_type: type[T],
        *,
        request_name: str = "",
        failure_name: str = "",
    ) -> T:
        """Wait until a node has a record, and return the record.

        Args:
            node: the node.
            name: the name of the record.
            record_type: the type of the record.
            request_name: the name of the record that requested this one. While the node has the
                request, the wait continues.
            failure_name: the name of a `StageOutcome` record. If this record exists, the awaited
                record will never appear.

        Raises:
            StoreError: the node does not answer, the record does not appear, or the snapshot was
                abandoned, or discarded on the node.
        """
        deadline = Deadline(self._wait)
        while True:
            self._place.refuse_abandoned()
            try:
                if (data := self._poll(node, name, deadline.seconds_left())) is not None:
                    return self._decode(node, name, data, record_type)
                if failure_name and (data := self._poll(node, failure_name)) is not None:
                    failure = self._decode(node, failure_name, data, StageOutcome).failure
                    raise _NoRetryError(f"node {node}: {failure}")
                if request_name:
                    if self._poll(node, request_name) is None:
                        raise _NoRetryError(
                            f"node {node} has discarded step {self._place.step}, so it will not "
                            f"provide {name}; use a newer snapshot"
                        )
                    deadline = Deadline(self._wait)
            except _NoRetryError:
                raise
            except StoreError:
                self._raise_if_run_continued_without([node])
                self._abandoned.wait(RETRY_PAUSE)
            if deadline.has_passed():
                raise StoreError(
                    f"node {node} did not provide {name} of step {self._place.step} within "
                    f"{self._wait:.0f} s: its agent is lost, stopped or overloaded; see its log"
                )

    def write(self, node: str, name: str, record: object) -> None:
        """Write a record on a node.

        Raises:
            StoreError: the node does not answer, or the snapshot was abandoned.
        """
        self.retry(lambda: self._write_once(node, name, record))

    def write_to_others(self, *named_records: tuple[str, object]) -> None:
        """Write records on all other nodes.

        Args:
            named_records: names and records. Each node gets them in this order.

        Raises:
            StoreError: some nodes do not answer (the others have the records), or the snapshot was
                abandoned.
        """
        remaining = list(self._clients)

        def write_to_remaining() -> None:
            nonlocal remaining
            failures = run_on_nodes(remaining, lambda node: self._try_to_write(node, named_records))
            remaining = [node for node in remaining if failures[node]]
            self._raise_if_run_continued_without(remaining)
            if remaining:
                raise StoreError("; ".join(failures[node] for node in remaining))

        self.retry(write_to_remaining)

    def write_to_all(self, name: str, record: object) -> None:
        """Write a record on all nodes, and on this node last, after the others have it or are lost.

        Raises:
            StoreError: some nodes do not answer (the others have the record), or the snapshot was
                abandoned.
        """
        try:
            self.write_to_others((name, record))
        finally:
            self._write_once(self._this_node, name, record)

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
            except _NoRetryError:
                raise
            except StoreError as error:
                is_final = isinstance(error.__cause__, (FileNotFoundError, _NoRetryError))
                if is_final or deadline.has_passed():
                    raise
            self._abandoned.wait(RETRY_PAUSE)

    def read_range(self, node: str, name: str, offset: int, out: Buffer) -> Buffer:
        """Fill `out` with the bytes of a file of another node from `offset`, and return `out`.

        Raises:
            StoreError: the node does not answer, or the file ends earlier.
            FileNotFoundError: the node does not have the file.
        """
        run, step = self._place.run.name, self._place.step
        try:
            self._client(node).read_range_into(run, step, name, offset, out)
        except StoreError as error:
            self._raise_if_run_continued_without([node], error)
            raise
        return out

    def _raise_if_run_continued_without(
        self, nodes: Sequence[str], error: StoreError | None = None
    ) -> None:
        """Raise if newer snapshots are made without one of these nodes, which do not answer."""
        step = self._place.step
        newer = [each for each in self._place.run.snapshots() if each.step > step]
        manifests = (each.pending_manifests() for each in reversed(newer))
        newest = next(filter(None, manifests), [])
        present = {info.node for each in newest for info in each.nodes}
        absent = sorted(set(nodes) - present)
        if present and absent:
            raise _NoRetryError(
                f"step {step} is not completed, because the run continued without node "
                f"{', '.join(absent)}; use a newer snapshot"
            ) from error

    def _client(self, node: str) -> AgentClient:
        try:
            return self._clients[node]
        except KeyError:
            known = ", ".join(sorted([self._this_node, *self._clients]))
            raise StoreError(
                f"step {self._place.step} of run {self._place.run.name} has no node {node}; its "
                f"nodes are {known}"
            ) from None

    def _write_once(self, node: str, name: str, record: object) -> None:
        data = record if isinstance(record, bytes) else encode_record(record)
        if node == self._this_node:
            write_record(self._place.path / name, data)
            # The record may be a request to another thread of this agent.
            self._place.run.wake_agent()
        else:
            self._client(node).put(self._place.run.name, self._place.step, name, data)

    def _try_to_write(self, node: str, named_records: Sequence[tuple[str, object]]) -> str:
        """Write records on a node, and return why that failed, or ""."""
        try:
            for name, record in named_records:
                self._write_once(node, name, record)
        except StoreError as error:
            return f"node {node}: {error}"
        return ""

    def _poll(self, node: str, name: str, seconds: float = 0.0) -> bytes | None:
        """Wait at most `seconds` for a record. Return its bytes; None if it is missing."""
        place = self._place
        if node != self._this_node:
            wait = min(LONGEST_RECORD_WAIT, seconds)
            with suppress(FileNotFoundError):
                return self._client(node).read(
                    place.run.name, place.step, name, limit=LARGEST_RECORD, wait=wait
                )
            return None
        try:
            return place.read_file(name)
        except FileNotFoundError:
            if seconds > 0:
                time.sleep(LOCAL_PAUSE)
            return None
        except StoreError as error:
            raise _NoRetryError(f"node {node}: {error}") from error

    def _decode(self, node: str, name: str, data: bytes, record_type: type[T]) -> T:
        is_here = node == self._this_node
        label = self._place.path / name if is_here else f"{name} of step {self._place.step}"
        try:
            return decode_record(data, record_type, label)
        except StoreError as error:
            raise _NoRetryError(f"node {node}: {error}") from error
