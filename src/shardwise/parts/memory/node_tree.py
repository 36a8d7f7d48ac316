"""The tree along which requests and outcomes travel between the nodes of a save.

With 3,000 nodes and a fan-out of 32, the leader asks 32 nodes, each of which asks 32 others, and so
on. The order of the nodes follows from the pending manifest alone, so every node knows its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.parts.memory.records import PendingManifest


@dataclass(frozen=True, slots=True)
class NodeTree:
    """Nodes in the order of a tree: the leader first, then the nodes that it asks, and so on.

    Attributes:
        nodes: the names of the nodes.
        fan_out: the largest number of nodes that a node asks.
    """

    nodes: Sequence[str]
    fan_out: int

    @property
    def top(self) -> str:
        """The node that all requests begin with."""
        return self.nodes[0]

    def children(self, node: str) -> Sequence[str]:
        """Return the nodes that a node asks; none for a node outside of the tree."""
        try:
            index = self.nodes.index(node)
        except ValueError:
            return ()
        low = index * self.fan_out + 1
        return self.nodes[low : low + self.fan_out]


def tree_of_run(pending: PendingManifest) -> NodeTree:
    """Return the tree of all nodes of a save."""
    names = dict.fromkeys((pending.leader, *(info.node for info in pending.nodes)))
    return NodeTree(tuple(names), pending.fan_out)


def tree_of_stage(pending: PendingManifest, stage: str) -> NodeTree:
    """Return the tree of the nodes that take part in a stage.

    Only nodes with data files take part in committing and persisting, so that a save does not wait
    for another node, which may be lost.
    """
    if stage == "protect":
        return tree_of_run(pending)
    with_files = {node for _, node in pending.files}
    infos = (info.node for info in pending.nodes if info.node in with_files)
    return NodeTree(tuple(dict.fromkeys((pending.leader, *infos))), pending.fan_out)
