"""End the wait for a save if the agent of this node, or the node that leads the save, is gone."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing

from shardwise.kernel.errors import StoreError
from shardwise.kernel.manifest.manifest import data_file
from shardwise.parts.memory import records
from shardwise.parts.memory.home import Home, SnapshotDirectory
from shardwise.parts.memory.options import Memory, Tls
from shardwise.parts.memory.records import AgentInfo, Failing
from shardwise.parts.memory.remote.client import AgentClient
from shardwise.parts.memory.spawn import running_agent
from shardwise.parts.memory.times import (
    ANSWER_TIMEOUT,
    CHECK_PERIOD,
    FORGET_AFTER,
    GONE_AFTER,
    SHORT_PATIENCE,
    SHORTEST_TIMEOUT,
)


class AgentWatch:
    """Watches the agent of this node during one wait for a save.

    The agent tells this rank what becomes of the other nodes, too. The wait ends if the agent does
    not answer, or fails to work on the save, for `Memory(wait=…)` seconds. A silence shorter than
    `SHORT_PATIENCE` never ends it.

    Args:
        home: the directories of this node. The agent may be replaced by another.
        options: the user's options.
        rank: this rank.
        place: the snapshot on this node.
        clock: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        home: Home,
        options: Memory,
        rank: int,
        place: SnapshotDirectory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._home, self._options, self._rank = home, options, rank
        self._place = place
        self._clock = clock
        now = clock()
        self._start = self._last_check = self._last_request = now
        self._agent_seen_at = now  # when this node had an agent
        self._answered_at = now
        self._save_seen_at = now  # when this node had a pending manifest
        self._request_period = min(ANSWER_TIMEOUT, options.wait / 4)

    def check(self, seconds_left: float | None) -> None:
        """Check the agent if the last check was long enough ago.

        Args:
            seconds_left: the longest time that the check may take; None if it is not limited.

        Raises:
            StoreError: the agent is gone and no other was started, does not answer, or fails to
                work on the save; or rank 0 never passed the save to its agent.
        """
        now = self._clock()
        if now - self._last_check < min(CHECK_PERIOD, self._request_period):
            return
        self._last_check = now
        home = self._home
        if home.has_agent():
            self._agent_seen_at = now
        elif now - self._agent_seen_at > GONE_AFTER:
            raise StoreError(
                f"the agent of {home} is gone; the next save starts another, which resumes its "
                f"work (its log: {home.log_path})"
            )
        self._check_pending(now)
        if now - self._last_request > self._request_period:
            timeout = ANSWER_TIMEOUT
            if seconds_left is not None:
                timeout = max(SHORTEST_TIMEOUT, min(timeout, seconds_left / 2))
            self._check_answer(timeout)
            self._last_request = self._clock()

    def _check_answer(self, timeout: float) -> None:
        """Fail if the agent has not answered, or failed to work on the save, for too long."""
        options, place = self._options, self._place
        if (info := running_agent(self._home)) is None:
            return
        answer = _list_failing(info, options.tls, timeout)
        now = self._clock()
        if isinstance(answer, str):
            if now - self._answered_at > max(options.wait, SHORT_PATIENCE):
                raise StoreError(
                    f"the agent of node {info.node} (process {info.process} of {info.host}) has "
                    f"not answered for {now - self._answered_at:.0f} s: {answer}. If it is "
                    "stopped, resume or end it: the next agent completes its work"
                )
            return
        self._answered_at = now
        for each in answer:
            is_here = each.run == place.run.name and each.step in (None, place.step)
            if is_here and each.seconds > options.wait:
                raise StoreError(
                    f"the agent of node {info.node} has failed for {each.seconds:.0f} s to work on "
                    f"this save: {each.failure}; see its log on {info.host}. It tries again, so "
                    "the save may still succeed"
                )

    def _check_pending(self, now: float) -> None:
        """Fail if the agent still lacks the pending manifest of the save.

        An agent that leads a save ends it, successfully or not, and passes the pending manifest to
        the others. Without it, no agent ends the save: rank 0 has ended, or could not even record
        its failure. If the agent that leads does not answer, the agent here says so earlier.
        """
        place, own = self._place, self._rank
        is_staged = place.has(data_file(own, place.save_id))
        is_copying = place.has(records.rank_record(own)) and not is_staged
        if place.has(records.PENDING) or (is_copying and now - self._start < FORGET_AFTER):
            self._save_seen_at = now
        elif now - self._save_seen_at > max(2 * self._options.wait + 1, GONE_AFTER):
            raise StoreError(
                f"rank 0 has not passed this save to its agent for {now - self._save_seen_at:.0f} "
                "s: it could not copy its data, or has ended, or the snapshot was removed; see the "
                "log of rank 0, and save again"
            )


def why_no_answer(info: AgentInfo, tls: Tls | None, timeout: float) -> str:
    """Return why an agent does not answer within `timeout` seconds, or "" if it does."""
    answer = _list_failing(info, tls, timeout)
    return answer if isinstance(answer, str) else ""


def _list_failing(info: AgentInfo, tls: Tls | None, timeout: float) -> list[Failing] | str:
    """Return what an agent fails to work on, or why the agent does not answer."""
    context = None if tls is None else tls.for_client()
    try:
        client = AgentClient(info, connect_timeout=timeout, read_timeout=timeout, tls=context)
        with closing(client):
            return client.list_failing()
    except StoreError as error:
        return str(error)
