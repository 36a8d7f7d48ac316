"""End the wait for a save if the agents that would complete it are gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import dataclass

from shardwise.kernel.errors import StoreError
from shardwise.kernel.manifest.manifest import data_file
from shardwise.parts.memory import records
from shardwise.parts.memory.home import Home, SnapshotDirectory
from shardwise.parts.memory.options import Tls
from shardwise.parts.memory.records import AgentInfo
from shardwise.parts.memory.remote.client import AgentClient
from shardwise.parts.memory.spawn import running_agent
from shardwise.parts.memory.view import Failing

# All in seconds.
CHECK_PERIOD = 0.5
GONE_TIMEOUT = 10.0
REQUEST_PERIOD = 5.0
REQUEST_TIMEOUT = 5.0
SHORTEST_TIMEOUT = 0.1
LEADER_REQUESTS = 64.0  # how many ranks together ask the leader in a second, at most
# An agent that is silent for a shorter time is not lost: on a busy machine, answers take seconds.
SHORTEST_SILENCE = 5.0
LONGEST_COPY = 600.0


@dataclass(frozen=True, slots=True)
class SaveAgents:
    """The agents that complete a save.

    Attributes:
        home: the directories of this node. The node's agent may be replaced by another.
        leader: the agent of the node that leads the save; None if this node leads.
        tls: certificates for connections to other nodes.
        patience: the wait ends if an agent does not answer, or fails to work on the save, for this
            many seconds. A silence shorter than `SHORTEST_SILENCE` never ends the wait.
        rank, ranks: this rank, and the number of ranks. The more ranks there are, the more rarely
            each of them asks the leader.
    """

    home: Home
    leader: AgentInfo | None
    tls: Tls | None
    patience: float
    rank: int = 0
    ranks: int = 1


class AgentWatch:
    """Watches the agents of a save during one wait, so that the wait ends if they are gone.

    Args:
        agents: the agents.
        place: the snapshot on this node.
        clock: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        agents: SaveAgents,
        place: SnapshotDirectory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._agents = agents
        self._place = place
        self._clock = clock
        now = clock()
        self._start = now
        self._last_check = now
        self._last_request = now
        self._agent_seen_at = now  # when this node had an agent
        self._save_seen_at = now  # when the leader had a record of the save
        self._last_answers: dict[str, float] = {}
        self._times_missing = 0  # how often the leader had none, one after the other
        self._request_period = min(REQUEST_PERIOD, agents.patience / 4)
        self._leader_period = max(self._request_period, agents.ranks / LEADER_REQUESTS)
        # Ranks begin to wait at the same time, and must not all ask the leader at the same time.
        delay = self._leader_period * agents.rank / agents.ranks
        self._next_leader_request = now + min(delay, self._leader_period - self._request_period)

    def check(self, seconds_left: float | None) -> None:
        """Check the agents if the last check was long enough ago.

        Args:
            seconds_left: the longest time that the check may take; None if it is not limited.

        Raises:
            StoreError: this node's agent is gone and no other was started; an agent does not
                answer; or the leader's agent never received the save.
        """
        now = self._clock()
        if now - self._last_check < min(CHECK_PERIOD, self._request_period):
            return
        self._last_check = now
        home = self._agents.home
        if home.has_agent():
            self._agent_seen_at = now
        elif now - self._agent_seen_at > GONE_TIMEOUT:
            raise StoreError(
                f"the agent of {home} is gone; the next save starts another, which resumes its "
                f"work (its log: {home.log_path})"
            )
        if now - self._last_request > self._request_period:
            timeout = REQUEST_TIMEOUT
            if seconds_left is not None:
                timeout = max(SHORTEST_TIMEOUT, min(timeout, seconds_left / 2))
            asks_leader = self._agents.leader is None or now > self._next_leader_request
            self._check_answers(timeout, asks_leader=asks_leader)
            if asks_leader:
                self._check_leader(timeout)
                self._next_leader_request = now + self._leader_period - self._request_period
            self._last_request = self._clock()

    def _check_answers(self, timeout: float, *, asks_leader: bool) -> None:
        """Fail if an agent has not answered for too long."""
        agents = self._agents
        for info in (running_agent(agents.home), agents.leader if asks_leader else None):
            if info is None:
                continue
            last_answer = self._last_answers.setdefault(info.node, self._last_request)
            answer = _list_failing(info, agents.tls, timeout)
            now = self._clock()
            if not isinstance(answer, str):
                self._last_answers[info.node] = now
                self._check_progress(info, answer)
            elif now - last_answer > max(agents.patience, SHORTEST_SILENCE):
                raise StoreError(
                    f"the agent of node {info.node} (process {info.process} of {info.host}) has "
                    f"not answered for {now - last_answer:.0f} s: {answer}. If it is stopped, "
                    "resume or end it: the next agent completes its work"
                )

    def _check_progress(self, info: AgentInfo, failing: list[Failing]) -> None:
        """Fail if an agent has failed for too long to work on the save."""
        place = self._place
        for each in failing:
            is_here = each.run == place.run.name and each.step in (None, place.step)
            if is_here and each.seconds > self._agents.patience:
                raise StoreError(
                    f"the agent of node {info.node} has failed for {each.seconds:.0f} s to work on "
                    f"this save: {each.failure}; see its log on {info.host}. It tries again, so "
                    "the save may still succeed"
                )

    def _check_leader(self, timeout: float) -> None:
        """Fail if the leader has no pending manifest of the save.

        An agent that has the pending manifest ends the save, successfully or not. Without the
        pending manifest, no agent ends the save: rank 0 has ended, or could not even record its
        failure.
        """
        names = self._names_at_leader(timeout)
        if names is None:
            return
        now = self._clock()
        is_staged = data_file(0, self._place.save_id) in names
        is_copying = records.rank_record(0) in names and not is_staged
        if records.PENDING in names or (is_copying and now - self._start < LONGEST_COPY):
            self._save_seen_at = now
            self._times_missing = 0
            return
        self._times_missing += 1
        if self._times_missing > 1 and now - self._save_seen_at > 2 * self._agents.patience + 1:
            raise StoreError(
                f"rank 0 has not passed this save to its agent for "
                f"{now - self._save_seen_at:.0f} s: it could not copy its data, or has ended, "
                "or the snapshot was removed; see the log of rank 0, and save again"
            )

    def _names_at_leader(self, timeout: float) -> Collection[str] | None:
        """Return the snapshot's files on the leader's node; None if its agent does not answer."""
        place, leader = self._place, self._agents.leader
        if leader is None:
            return place.list_names()
        try:
            with closing(_make_client(leader, self._agents.tls, timeout)) as client:
                return client.list_files(place.run.name).get(place.name, {})
        except StoreError:
            return None


def why_no_answer(info: AgentInfo, tls: Tls | None, timeout: float) -> str:
    """Return why an agent does not answer within `timeout` seconds, or "" if it does."""
    answer = _list_failing(info, tls, timeout)
    return answer if isinstance(answer, str) else ""


def _list_failing(info: AgentInfo, tls: Tls | None, timeout: float) -> list[Failing] | str:
    """Return what an agent fails to work on, or why the agent does not answer."""
    try:
        with closing(_make_client(info, tls, timeout)) as client:
            return client.list_failing()
    except StoreError as error:
        return str(error)


def _make_client(info: AgentInfo, tls: Tls | None, timeout: float) -> AgentClient:
    context = None if tls is None else tls.for_client()
    return AgentClient(info, connect_timeout=timeout, read_timeout=timeout, tls=context)
