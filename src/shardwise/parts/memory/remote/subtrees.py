"""Sends requests to nodes, and through them to the nodes below them in the tree.

    leader → 32 nodes → 32 nodes each → …          requests
    leader ← 32 nodes ← 32 nodes each ← …          replies, combined by each node

A request and its reply are records. A node that is asked asks the nodes below it, does its own
part, and writes one reply for all of them (`agent/actions.py`). So if an agent is killed, the next
agent of the node continues.

If a node does not answer for a while, whoever asked it asks the nodes below it directly. So one
lost node costs only its own part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from enum import Enum
from functools import cache

import msgspec

from shardwise.kernel.errors import StoreError
from shardwise.kernel.manifest.manifest import MANIFEST
from shardwise.parts.memory import records
from shardwise.parts.memory.files import encode_record
from shardwise.parts.memory.home import SnapshotDirectory
from shardwise.parts.memory.node_tree import NodeTree, tree_of_run, tree_of_stage
from shardwise.parts.memory.options import Tls
from shardwise.parts.memory.records import (
    AgentInfo,
    PendingManifest,
    StageOutcome,
    StageRequest,
    SubtreeReply,
)
from shardwise.parts.memory.remote.snapshot_nodes import FinalError, Nodes
from shardwise.parts.memory.replies import Replies, combine_replies

SHORTEST_RECORD_WAIT, LONGEST_RECORD_WAIT = 0.2, 5.0
"""Seconds. An agent waits so long for a record before it answers that it has none."""
LONGEST_SILENCE = 5.0
"""Seconds of silence after which the nodes below a node are asked too; less if `wait` is short."""
SHORTEST_TIMEOUT = 1.0  # seconds, for a single request
MOST_THREADS = 32


@dataclass(frozen=True, slots=True)
class SubtreeRequest:
    """A request to nodes and the nodes below them in the tree, and where they write the reply.

    Attributes:
        pending: the pending manifest of the save.
        stage: the stage.
        tree: the nodes that take part.
        records_for: returns the names and contents of the records to write on a node, in order.
        request_name: the name of the last of these records. While a node has it, the node is
            waited for.
        reply_name: the name of the reply.
        wait: seconds to wait for a node that does not answer.
        needs_no_reply: whether a node without nodes below it has nothing to do but to take the
            records, so that it writes no reply.
    """

    pending: PendingManifest
    stage: str
    tree: NodeTree
    records_for: Callable[[str], Sequence[tuple[str, bytes]]]
    request_name: str
    reply_name: str
    wait: float
    needs_no_reply: bool = False

    @property
    def silence(self) -> float:
        """Seconds of silence after which the nodes below a node are asked too."""
        return min(LONGEST_SILENCE, self.wait / 4)


def request_for_stage(pending: PendingManifest, stage: str, wait: float) -> SubtreeRequest:
    """Return the request to nodes to do their part of a stage.

    The nodes need the pending manifest for this, so the requests that can be the first of a save,
    to commit and to persist it, bring a copy.
    """
    save_id = pending.save_id
    request_name = records.save_record(stage, save_id)
    copy = _copy_of_pending(pending)
    content = encode_record(StageRequest(save_id=save_id, stage=stage, wait=wait))

    def records_for(node: str) -> list[tuple[str, bytes]]:
        needs_copy = stage in ("commit", "persist") and node != pending.leader
        return [*([copy()] if needs_copy else []), (request_name, content)]

    return SubtreeRequest(
        pending,
        stage,
        tree_of_stage(pending, stage),
        records_for,
        request_name,
        records.save_record(stage, save_id, "done"),
        wait,
    )


def request_for_outcome(
    place: SnapshotDirectory,
    pending: PendingManifest,
    stage: str,
    done: StageOutcome,
    wait: float,
) -> SubtreeRequest:
    """Return the request that announces to nodes how a stage has ended.

    With the outcome of the commit, the nodes get the manifest; and nodes without data files, which
    had no part in the commit, get the copy of the pending manifest.
    """
    save_id = pending.save_id
    outcome = records.save_record(stage, save_id, "all")
    content = encode_record(done)
    copy = _copy_of_pending(pending)
    brought: list[tuple[str, bytes]] = []
    if stage == "commit" and not done.failure:
        brought.append((MANIFEST, place.read_manifest(save_id)[0]))
    nodes_with_files = {node for _, node in pending.files}

    def records_for(node: str) -> list[tuple[str, bytes]]:
        needs_copy = stage == "commit" and node not in {*nodes_with_files, pending.leader}
        return [*([copy()] if needs_copy else []), *brought, (outcome, content)]

    return SubtreeRequest(
        pending,
        stage,
        tree_of_run(pending),
        records_for,
        outcome,
        records.save_record(stage, save_id, "told"),
        wait,
        needs_no_reply=True,
    )


def connect(
    place: SnapshotDirectory,
    infos: Sequence[AgentInfo],
    node: str,
    request: SubtreeRequest,
    tls: Tls | None,
) -> Nodes:
    """Return the connections over which a node sends a request."""
    timeout = max(request.silence, SHORTEST_TIMEOUT)
    return Nodes(place, infos, node, request.wait, tls, timeout=timeout)


def _copy_of_pending(pending: PendingManifest) -> Callable[[], tuple[str, bytes]]:
    """Return a function that returns name and content of the copy of a pending manifest."""

    @cache
    def encode() -> tuple[str, bytes]:
        name = records.save_record("pending", pending.save_id, "copy")
        return name, encode_record(msgspec.structs.replace(pending, manifest=""))

    return encode


class NextStep(Enum):
    """What to do about a node that did not answer."""

    ASK_AGAIN = "ask it again"
    ASK_CHILDREN = "ask the nodes below it too"
    GIVE_UP = "count it as lost"


def decide_next(silence: float, request: SubtreeRequest, *, asked_children: bool) -> NextStep:
    """Return what to do about a node that did not answer.

    Args:
        silence: the seconds since its last answer.
        asked_children: whether the nodes below it were asked.
    """
    if silence >= request.wait and asked_children:
        return NextStep.GIVE_UP
    if silence >= request.silence and not asked_children:
        return NextStep.ASK_CHILDREN
    return NextStep.ASK_AGAIN


@dataclass(slots=True)
class _Recipient:
    """A node that gets the request.

    Attributes:
        answered_at: when it last answered, or when it was first asked.
    """

    node: str
    answered_at: float
    has_request: bool = False
    asked_children: bool = False


class RequestSender:
    """Sends a request to nodes, and combines the replies. One thread calls `send`.

    Args:
        nodes: the connections.
        request: the request.
        clock: a monotonic clock, in seconds.
    """

    def __init__(
        self, nodes: Nodes, request: SubtreeRequest, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._nodes = nodes
        self._request = request
        self._clock = clock
        self._is_stopped = False
        self._answered: set[str] = set()

    def stop(self) -> None:
        """Make `send` return soon. Another thread may call this."""
        self._is_stopped = True
        self._nodes.abort()

    def send(self, nodes: Sequence[str]) -> Replies:
        """Send the request to nodes; return the combined replies of them and the nodes below.

        Raises:
            StoreError: the snapshot was abandoned.
        """
        now = self._clock()
        to_ask = [_Recipient(node, now) for node in nodes]
        replies: list[Replies] = []
        jobs: dict[Future[Replies | None], _Recipient] = {}
        with ThreadPoolExecutor(MOST_THREADS, "shardwise-nodes") as pool:
            try:
                while (to_ask or jobs) and not self._is_stopped:
                    self._nodes.refuse_abandoned()
                    # With more nodes than threads, none of them may occupy a thread for long.
                    is_crowded = len(jobs) + len(to_ask) > MOST_THREADS
                    seconds = SHORTEST_RECORD_WAIT if is_crowded else LONGEST_RECORD_WAIT
                    for each in to_ask:
                        jobs[pool.submit(self._ask_once, each, seconds)] = each
                    to_ask = []
                    for job in wait(jobs, return_when=FIRST_COMPLETED).done:
                        reply, more = self._handle(jobs.pop(job), job)
                        replies += [] if reply is None else [reply]
                        to_ask += more
            finally:
                for job in jobs:
                    job.cancel()
        return combine_replies(replies, self._request.pending, self._answered)

    def _handle(
        self, asked: _Recipient, job: Future[Replies | None]
    ) -> tuple[Replies | None, list[_Recipient]]:
        """Return the reply of a node if it is final, and the nodes to ask next."""
        now = self._clock()
        try:
            reply = job.result()
        except FinalError as error:
            return Replies(lost={asked.node: str(error)}), self._children(asked, now)
        except StoreError as error:
            step = decide_next(
                now - asked.answered_at, self._request, asked_children=asked.asked_children
            )
            if step is NextStep.GIVE_UP:
                return Replies(lost={asked.node: self._describe_silence(asked.node, error)}), []
            children = self._children(asked, now) if step is NextStep.ASK_CHILDREN else []
            return None, [asked, *children]
        asked.answered_at = now
        if reply is None:
            return None, [asked]
        self._answered.add(asked.node)
        return reply, []

    def _children(self, asked: _Recipient, now: float) -> list[_Recipient]:
        """Return the nodes below a node that fails to ask them."""
        if asked.asked_children:
            return []
        asked.asked_children = True
        return [_Recipient(node, now) for node in self._request.tree.children(asked.node)]

    def _ask_once(self, asked: _Recipient, seconds: float) -> Replies | None:
        """Send a node the request unless it has it, and wait so many seconds for the reply.

        Raises:
            FinalError: the node will never reply.
            StoreError: the node does not answer.
        """
        nodes, request, node = self._nodes, self._request, asked.node
        try:
            if not asked.has_request:
                for name, record in request.records_for(node):
                    nodes.write_once(node, name, record)
                asked.has_request = True
            if request.needs_no_reply and not request.tree.children(node):
                return Replies()
            data = nodes.poll(node, request.reply_name, min(seconds, request.wait))
            if data is None and nodes.poll(node, request.request_name) is None:
                raise FinalError(
                    f"node {node} has discarded step {request.pending.step}, so it will not "
                    f"provide {request.reply_name}; use a newer snapshot"
                )
        except FinalError:
            raise
        except StoreError:
            nodes.raise_if_run_continued_without([node])
            nodes.pause()
            raise
        if data is None:
            return None
        return self._decode(node, data)

    def _decode(self, node: str, data: bytes) -> Replies:
        request = self._request
        record = self._nodes.decode(node, request.reply_name, data, SubtreeReply)
        try:
            return Replies.decode(record, request.pending)
        except StoreError as error:
            raise FinalError(f"node {node}: {error}") from error

    def _describe_silence(self, node: str, error: StoreError) -> str:
        request = self._request
        return (
            f"node {node} did not provide {request.reply_name} of step {request.pending.step} "
            f"within {request.wait:.0f} s: its agent is lost, stopped or "
            f"overloaded; see its log. {error}"
        )
