"""Kept by those who wait for agents: one that is gone, or falls silent, ends the wait."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass

from shardwise.errors import StoreError
from shardwise.memory.network.client import AgentClient
from shardwise.memory.node.home import Home
from shardwise.memory.node.notes import Card
from shardwise.memory.node.spawn import card_of
from shardwise.memory.tls import Tls

LOOK_AROUND = 0.5
GONE = 10.0
BETWEEN_QUESTIONS = 5.0
NO_ANSWER = 5.0


@dataclass(frozen=True, slots=True)
class Agents:
    """Those without whom nothing comes of a save.

    Attributes:
        home: of this node; its agent may be followed by another.
        leader: the agent of the node that leads the save, if that is another.
        tls: by what nodes know each other.
        patience: seconds until one that does not answer counts as lost.
    """

    home: Home
    leader: Card | None
    tls: Tls | None
    patience: float


class Vigil:
    """One wait for agents."""

    def __init__(self, agents: Agents) -> None:
        self._agents = agents
        self._looked = self._seen = self._asked = time.monotonic()
        self._answered: dict[str, float] = {}
        self._pause = min(BETWEEN_QUESTIONS, agents.patience / 4)

    def look(self, left: float | None) -> None:
        """See now and then whether there is anything to wait for; that takes `left` seconds at
        most.

        Raises:
            StoreError: this node's agent is gone, and nobody has started another; or an agent
                does not answer.
        """
        now = time.monotonic()
        if now - self._looked < min(LOOK_AROUND, self._pause):
            return
        self._looked = now
        home = self._agents.home
        if home.has_agent():
            self._seen = now
        elif now - self._seen > GONE:
            raise StoreError(
                f"the agent of {home} is gone; the next save starts another, which goes on "
                f"(its log: {home.log})"
            )
        if now - self._asked > self._pause:
            self._ask_all(left)
            self._asked = time.monotonic()

    def _ask_all(self, left: float | None) -> None:
        agents = self._agents
        within = min(NO_ANSWER, agents.patience)
        if left is not None:
            within = max(0.1, min(within, left / 2))
        for card in (card_of(agents.home), agents.leader):
            if card is None:
                continue
            since = self._answered.setdefault(card.node, self._asked)
            failure = silence(card, agents.tls, within)
            now = time.monotonic()
            if not failure:
                self._answered[card.node] = now
            elif now - since > agents.patience:
                raise StoreError(
                    f"the agent of node {card.node} (process {card.process} of {card.host}) has "
                    f"not answered for {now - since:.0f} s: {failure}. If it is stopped, have it "
                    "go on, or end it: the next one does what is left"
                )


def silence(card: Card, tls: Tls | None, within: float) -> str:
    """Why an agent does not answer within so many seconds; "" if it does."""
    try:
        context = None if tls is None else tls.for_client()
        client = AgentClient(card, connect_timeout=within, read_timeout=within, tls=context)
        with closing(client):
            client.health()
    except StoreError as error:
        return str(error)
    return ""
