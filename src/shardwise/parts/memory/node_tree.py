"""The tree along which nodes call each other, and learn how stages have ended.

With 3,000 nodes and a fan-out of 32, the leader asks 32 nodes, each of which asks 32 others, and so
on. The order of the nodes follows from the pending manifest alone, so every node knows its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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

    def children(self, node: str) -> Sequence[str]:
        """Return the nodes that a node asks; none for a node outside of the tree."""
        try:
            index = self.nodes.index(node)
        except ValueError:
            return ()
        low = index * self.fan_out + 1
        return self.nodes[low : low + self.fan_out]

    def above(self, node: str) -> list[str]:
        """Return the nodes above a node, the nearest first."""
        found, index = [], self.nodes.index(node)
        while index > 0:
            index = (index - 1) // self.fan_out
            found.append(self.nodes[index])
        return found


def tree_of_nodes(top: str, nodes: Iterable[str], fan_out: int) -> NodeTree:
    """Return the tree of nodes in this order, below the node at the top."""
    return NodeTree(tuple(dict.fromkeys((top, *nodes))), fan_out)


def tree_of_stage(pending: PendingManifest, stage: str, top: str) -> NodeTree:
    """Return the tree of the nodes that take part in a stage, below the node that leads it.

    Only nodes with data files take part in committing and persisting, so that a save does not wait
    for another node, which may be lost.
    """
    nodes = [info.node for info in pending.nodes]
    if stage != "protect":
        with_files = {node for _, node in pending.files}
        nodes = [node for node in nodes if node in with_files]
    return tree_of_nodes(top, nodes, pending.fan_out)
