"""The names of a checkpoint as a tree, in which siblings that are alike stand for each other."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from shardwise.cli import wording
from shardwise.cli.values import spelled
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import Manifest, TensorEntry

DEEPEST = 64


@dataclass(frozen=True, slots=True)
class Leaf:
    """What one name holds: a tensor, or a plain value, whose `dtype` is empty.

    `text` is the value, or what else there is to say of a tensor; `nbytes` are those that are
    stored under this name.
    """

    name: str
    text: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    nbytes: int = 0

    @property
    def look(self) -> Hashable:
        """Equal for leaves that are alike."""
        return self.text, self.dtype, self.shape


@dataclass(frozen=True, slots=True)
class Node:
    """A part of a name, what it holds, and what is below; it stands for `count` that are alike."""

    label: str
    leaf: Leaf | None = None
    children: tuple[Node, ...] = ()
    count: int = 1

    @property
    def nbytes(self) -> int:
        """Of all that this is, and all that it stands for."""
        own = self.leaf.nbytes if self.leaf else 0
        return self.count * (own + sum(child.nbytes for child in self.children))

    @property
    def look(self) -> Hashable:
        """Equal for nodes that are alike but for their own label."""
        leaf = self.leaf.look if self.leaf else None
        return leaf, tuple((child.label, child.count, child.look) for child in self.children)


@dataclass(frozen=True, slots=True)
class Row:
    """A node as a line of the picture of a tree: the branches that lead to it, and itself."""

    branches: str
    node: Node


@dataclass(slots=True)
class _Draft:
    leaf: Leaf | None = None
    children: dict[str, _Draft] = field(default_factory=dict)


def leaves(manifest: Manifest) -> list[Leaf]:
    """All that a manifest names: tensors, shared values, and values that each rank has."""
    shared = [Leaf(entry.name, spelled(entry.value)) for entry in manifest.objects]
    each = [Leaf(name, "one value for each rank") for name in manifest.per_rank]
    return [*map(_tensor_leaf, manifest.tensors), *shared, *each]


def tree(named: Iterable[Leaf], *, collapse: bool) -> tuple[Node, ...]:
    """The tree of some names, in their order, single branches joined.

    Args:
        collapse: let siblings that are numbered and alike, such as `layers.0` to `layers.31`,
            become one.
    """
    root = _Draft()
    for leaf in named:
        draft = root
        for part in leaf.name.split(".", DEEPEST):
            draft = draft.children.setdefault(part, _Draft())
        draft.leaf = leaf
    return _finished("", root, collapse=collapse).children


def rows(nodes: tuple[Node, ...], branches: str = "", *, top: bool = True) -> Iterator[Row]:
    """The lines of a tree, from top to bottom; those at the top have no branches."""
    for node in nodes:
        last = node is nodes[-1]
        yield Row("" if top else branches + ("└── " if last else "├── "), node)
        below = "" if top else branches + ("    " if last else "│   ")
        yield from rows(node.children, below, top=False)


def tensor_bytes(entry: TensorEntry) -> int:
    """Of all of a tensor, whether stored under its own name or another."""
    return math.prod(entry.shape) * DTYPES[entry.dtype].itemsize


def _tensor_leaf(entry: TensorEntry) -> Leaf:
    if entry.same_as is not None:
        text = f"tied to {wording.printable(entry.same_as)}"
        return Leaf(entry.name, text, entry.dtype, entry.shape)
    return Leaf(entry.name, "", entry.dtype, entry.shape, tensor_bytes(entry))


def _finished(label: str, draft: _Draft, *, collapse: bool) -> Node:
    nodes = [_finished(part, each, collapse=collapse) for part, each in draft.children.items()]
    children = _collapsed(nodes) if collapse else nodes
    return Node(label, draft.leaf, tuple(map(_joined, children)))


def _joined(node: Node) -> Node:
    """A node that holds nothing itself, and its only child, as one."""
    if node.leaf is not None or len(node.children) != 1:
        return node
    (only,) = node.children
    if node.count > 1 and only.count > 1:
        return node
    return replace(only, label=f"{node.label}.{only.label}", count=node.count * only.count)


def _collapsed(nodes: list[Node]) -> Iterator[Node]:
    """The same nodes, each group of numbered ones that are alike as one, at its first's place."""
    groups: dict[Hashable, list[Node]] = {}
    for node in nodes:
        numbered = node.label.isdecimal() and node.label == str(int(node.label))
        key = (True, node.look) if numbered else (False, node.label)
        groups.setdefault(key, []).append(node)
    for alike in groups.values():
        if len(alike) == 1:
            yield alike[0]
        else:
            label = wording.indices(sorted(int(node.label) for node in alike))
            yield replace(alike[0], label=label, count=len(alike))
