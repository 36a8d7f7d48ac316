"""Watching agents while waiting for a save, so that the wait ends if they are gone."""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass

from shardwise.errors import StoreError
from shardwise.memory import records
from shardwise.memory.home import Home, Place
from shardwise.memory.options import Tls
from shardwise.memory.records import AgentInfo
from shardwise.memory.remote.client import AgentClient
from shardwise.memory.spawn import running_agent

WATCH_PERIOD = 0.5
AGENT_GONE = 10.0
BETWEEN_QUESTIONS = 5.0
ANSWER_TIMEOUT = 5.0
LONGEST_COPY = 600.0


@dataclass(frozen=True, slots=True)
class Agents:
    """The agents that complete a save.

    Attributes:
        home: the directories of this node. Its agent may be replaced by another.
        leader: the agent of the node that leads the save, if that is another node.
        tls: certificates for connections to other nodes.
        patience: seconds until an agent that does not answer counts as lost.
    """

    home: Home
    leader: AgentInfo | None
    tls: Tls | None
    patience: float


class AgentWatch:
    """Watches the agents during one wait for a save, so that the wait ends if they are gone."""

    def __init__(self, agents: Agents, place: Place, save_id: str) -> None:
        self._agents = agents
        self._place = place
        self._save_id = save_id
        self._begun = self._led = time.monotonic()
        self._looked = self._seen = self._asked = self._begun
        self._answered: dict[str, float] = {}
        self._pause = min(BETWEEN_QUESTIONS, agents.patience / 4)

    def look(self, left: float | None) -> None:
        """Check the agents if the last check was long enough ago; takes at most `left` seconds.

        Raises:
            StoreError: this node's agent is gone and no other was started; an agent does not
                answer; or the leader's agent never received the save.
        """
        now = time.monotonic()
        if now - self._looked < min(WATCH_PERIOD, self._pause):
            return
        self._looked = now
        home = self._agents.home
        if home.has_agent():
            self._seen = now
        elif now - self._seen > AGENT_GONE:
            raise StoreError(
                f"the agent of {home} is gone; the next save starts another, which resumes its "
                f"work (its log: {home.log})"
            )
        if now - self._asked > self._pause:
            within = min(ANSWER_TIMEOUT, self._agents.patience)
            if left is not None:
                within = max(0.1, min(within, left / 2))
            self._check_agents(within)
            self._check_leader(within)
            self._asked = time.monotonic()

    def _check_agents(self, within: float) -> None:
        agents = self._agents
        for info in (running_agent(agents.home), agents.leader):
            if info is None:
                continue
            since = self._answered.setdefault(info.node, self._asked)
            failure = silence(info, agents.tls, within)
            now = time.monotonic()
            if not failure:
                self._answered[info.node] = now
            elif now - since > agents.patience:
                raise StoreError(
                    f"the agent of node {info.node} (process {info.process} of {info.host}) has "
                    f"not answered for {now - since:.0f} s: {failure}. If it is stopped, resume "
                    "or end it: the next agent completes its work"
                )

    def _check_leader(self, within: float) -> None:
        """Fail if the leader has no pending manifest of the save.

        An agent that has it ends the save, successfully or not. Without it nobody does: rank 0 has
        ended, or failed and could not even write a record of that.
        """
        names = self._names_at_leader(within)
        if names is None:
            return
        now = time.monotonic()
        copied = records.copying_marker(f"-{self._save_id}.safetensors")
        is_copied = any(name.endswith(copied) for name in names)
        asked = (
            records.pending_record(self._save_id),
            records.request_record(records.RETAIN, self._save_id),
        )
        if any(record in names for record in asked) or (
            is_copied and now - self._begun < LONGEST_COPY
        ):
            self._led = now
        elif now - self._led > 2 * self._agents.patience + 1:
            raise StoreError(
                f"rank 0 has not passed this save to its agent for {now - self._led:.0f} s: it "
                "could not copy its data, or has ended, or the snapshot was removed; see the log "
                "of rank 0, and save again"
            )

    def _names_at_leader(self, within: float) -> Collection[str] | None:
        """Return the snapshot's files on the leader's node; None if its agent does not answer."""
        place, leader = self._place, self._agents.leader
        if leader is None:
            return place.list_names("")
        try:
            with closing(_client(leader, self._agents.tls, within)) as client:
                listed = client.list(place.run.name)
        except StoreError:
            return None
        return [file.name for each in listed if each.step == place.step for file in each.files]


def silence(info: AgentInfo, tls: Tls | None, within: float) -> str:
    """Return why an agent does not answer within this many seconds, or "" if it does."""
    try:
        with closing(_client(info, tls, within)) as client:
            client.health()
    except StoreError as error:
        return str(error)
    return ""


def _client(info: AgentInfo, tls: Tls | None, within: float) -> AgentClient:
    context = None if tls is None else tls.for_client()
    return AgentClient(info, connect_timeout=within, read_timeout=within, tls=context)
