"""Calls nodes to do their part of a stage, and through them the nodes below them in the tree.

    leader → 32 nodes → 32 nodes each → …          calls
    leader ← 32 nodes ← 32 nodes each ← …          replies, combined by each node

A node that is called calls the nodes below it, does its own part, and replies for all of them
(`agent/actions.py`). A call does not change anything if it is repeated. So if an agent is killed,
whoever called it calls the next agent of the node, which knows which parts are done.

If a node does not answer for a while, whoever called it calls the nodes below it directly. So one
lost node costs only its own part.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from shardwise.kernel.errors import StoreError
from shardwise.parts.memory.files import decode_record
from shardwise.parts.memory.home import SnapshotDirectory
from shardwise.parts.memory.node_tree import NodeTree, tree_of_stage
from shardwise.parts.memory.records import PendingManifest, SubtreeReply
from shardwise.parts.memory.remote.client import Discarded
from shardwise.parts.memory.remote.snapshot_nodes import FinalError, Nodes
from shardwise.parts.memory.replies import Replies, combine_replies
from shardwise.parts.memory.times import (
    LONGEST_ATTEMPT,
    LONGEST_REPLY_WAIT,
    SHORT_PATIENCE,
    SHORTEST_ATTEMPT,
)

MOST_THREADS = 32


@dataclass(frozen=True)
class StageCall:
    """What nodes are called to do.

    Attributes:
        pending: the pending manifest of the save.
        stage: the stage.
        top: the node that leads the stage.
        wait: seconds to wait for a node that does not answer.
    """

    pending: PendingManifest
    stage: str
    top: str
    wait: float

    @cached_property
    def tree(self) -> NodeTree:
        """The nodes that take part."""
        return tree_of_stage(self.pending, self.stage, self.top)

    @property
    def silence(self) -> float:
        """Seconds of silence after which the nodes below a node are called too."""
        return min(SHORT_PATIENCE, self.wait / 4)

    @property
    def timeout(self) -> float:
        """Seconds until a single request fails, besides the time that it asks the node to wait."""
        return max(self.silence, LONGEST_ATTEMPT)


ReceivedCall = tuple[str, float]
"""A call of another node to this node: `top` and `wait` of the `StageCall`."""


class ReceivedCalls:
    """The calls of other nodes to this node, and the replies. Threads may share this object.

    The calls need not survive this process, because they are repeated until there is a reply.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[tuple[SnapshotDirectory, str], ReceivedCall] = {}
        self._replies: dict[tuple[SnapshotDirectory, str], SubtreeReply] = {}

    def receive(
        self, place: SnapshotDirectory, stage: str, call: ReceivedCall
    ) -> SubtreeReply | None:
        """Return the reply to a call, or None if the work has not ended yet."""
        key = place, stage
        with self._lock:
            earlier = self._calls.get(key)
            if earlier is None or earlier[0] != call[0]:  # another node leads the stage now
                self._replies.pop(key, None)
            self._calls[key] = call
            return self._replies.get(key)

    def stages_of(self, place: SnapshotDirectory) -> Collection[str]:
        """Return the stages of a save that this node still has to reply to."""
        with self._lock:
            keys = self._calls.keys() - self._replies.keys()
            return {stage for each, stage in keys if each == place}

    def call_of(self, place: SnapshotDirectory, stage: str) -> ReceivedCall | None:
        """Return a call, if it was received."""
        with self._lock:
            return self._calls.get((place, stage))

    def reply(
        self, place: SnapshotDirectory, stage: str, call: ReceivedCall, reply: SubtreeReply
    ) -> None:
        """Keep the reply to a call, unless another node leads the stage by now."""
        with self._lock:
            if self._calls.get((place, stage)) == call:  # it may have been forgotten
                self._replies[place, stage] = reply

    def forget_freed(self) -> None:
        """Forget the calls for snapshots that are no longer on this node."""
        with self._lock:
            for key in [key for key in self._calls if not key[0].path.exists()]:
                del self._calls[key]
                self._replies.pop(key, None)


class NextStep(Enum):
    """What to do about a node that did not answer."""

    ASK_AGAIN = "call it again"
    ASK_CHILDREN = "call the nodes below it too"
    GIVE_UP = "count it as lost"


def decide_next(silence: float, call: StageCall, *, asked_children: bool) -> NextStep:
    """Return what to do about a node that did not answer.

    Args:
        silence: the seconds since its last answer.
        asked_children: whether the nodes below it were asked.
    """
    if silence >= call.wait and asked_children:
        return NextStep.GIVE_UP
    if silence >= call.silence and not asked_children:
        return NextStep.ASK_CHILDREN
    return NextStep.ASK_AGAIN


@dataclass(slots=True)
class _Recipient:
    """A node that is called.

    Attributes:
        answered_at: when it last answered, or when it was first called.
        has_snapshot: whether it has said that it has the snapshot.
        asked_children: whether the nodes below it were called.
    """

    node: str
    answered_at: float
    has_snapshot: bool = False
    asked_children: bool = False


class Caller:
    """Calls nodes, and combines the replies. One thread calls `call`.

    Args:
        nodes: the connections.
        call: what they are called to do.
        clock: a monotonic clock, in seconds.
    """

    def __init__(
        self, nodes: Nodes, call: StageCall, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._nodes = nodes
        self._call = call
        self._clock = clock
        self._is_stopped = False
        self._answered: set[str] = set()

    def stop(self) -> None:
        """Make `call` return soon. Another thread may call this."""
        self._is_stopped = True
        self._nodes.abort()

    def call(self, nodes: Sequence[str]) -> Replies:
        """Call nodes; return the combined replies of them and the nodes below.

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
                    seconds = SHORTEST_ATTEMPT if is_crowded else LONGEST_REPLY_WAIT
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
        return combine_replies(replies, self._call.pending, self._answered)

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
                now - asked.answered_at, self._call, asked_children=asked.asked_children
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
        return [_Recipient(node, now) for node in self._call.tree.children(asked.node)]

    def _ask_once(self, asked: _Recipient, seconds: float) -> Replies | None:
        """Call a node, and wait so many seconds for the reply.

        Raises:
            FinalError: the node will never reply.
            StoreError: the node does not answer.
        """
        nodes, call, node = self._nodes, self._call, asked.node
        try:
            data = nodes.call(
                node, call.stage, call.top, patience=call.wait, wait=min(seconds, call.wait)
            )
            asked.has_snapshot = True
        except Discarded:
            raise FinalError(self._describe_discarded(node)) from None
        except FileNotFoundError as error:
            if asked.has_snapshot:
                raise FinalError(self._describe_discarded(node)) from None
            nodes.pause()  # its ranks have not begun yet
            raise StoreError(str(error)) from error
        except FinalError:
            raise
        except StoreError:
            nodes.raise_if_run_continued_without([node])
            nodes.pause()
            raise
        if data is None:
            return None
        label = f"the reply of node {node} to {call.stage} of step {call.pending.step}"
        try:
            return Replies.decode(decode_record(data, SubtreeReply, label), call.pending)
        except StoreError as error:
            raise FinalError(str(error)) from error

    def _describe_discarded(self, node: str) -> str:
        return (
            f"node {node} has discarded step {self._call.pending.step}, so it will not do its part "
            f"of {self._call.stage}; use a newer snapshot"
        )

    def _describe_silence(self, node: str, error: StoreError) -> str:
        call = self._call
        return (
            f"node {node} did not do its part of {call.stage} of step {call.pending.step} within "
            f"{call.wait:.0f} s: its agent is lost, stopped or overloaded; see its log. {error}"
        )
