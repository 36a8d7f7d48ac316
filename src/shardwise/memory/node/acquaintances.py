"""Nodes that a run was on together with this one: asked what they hold, though no rank is there.

The records of snapshots name the nodes of each; but ranks that come back to this node after others
went on elsewhere have only snapshots of before, whose nodes may be none of those.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from shardwise.errors import StoreError
from shardwise.memory.node.home import Run, read_record, write_record
from shardwise.memory.records import AgentInfo

NODES = "nodes.json"
MOST = 64


def remember(run: Run, nodes: Iterable[AgentInfo]) -> None:
    """Write down which nodes the run is on; of those before, the last that were met are kept."""
    known = {info.node: info for info in acquaintances(run)}
    for info in nodes:
        known.pop(info.node, None)
        known[info.node] = info
    write_record(run.path / NODES, list(known.values())[-MOST:])


def acquaintances(run: Run) -> list[AgentInfo]:
    """Those that are remembered; none, if the record is damaged."""
    with suppress(StoreError):
        return read_record(run.path / NODES, list[AgentInfo]) or []
    return []
