"""Nodes that a run was on together with this one: asked what they hold, though no rank is there.

The notes of snapshots name the nodes of each; but ranks that come back to this node after others
went on elsewhere have only snapshots of before, whose nodes may be none of those.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from shardwise.errors import StoreError
from shardwise.memory.node.home import Run, read_note, write_note
from shardwise.memory.node.notes import Card

NODES = "nodes.json"
MOST = 64


def remember(run: Run, nodes: Iterable[Card]) -> None:
    """Write down which nodes the run is on; of those before, the last that were met are kept."""
    known = {card.node: card for card in acquaintances(run)}
    for card in nodes:
        known.pop(card.node, None)
        known[card.node] = card
    write_note(run.path / NODES, list(known.values())[-MOST:])


def acquaintances(run: Run) -> list[Card]:
    """Those that are remembered; none, if the note is damaged."""
    with suppress(StoreError):
        return read_note(run.path / NODES, list[Card]) or []
    return []
