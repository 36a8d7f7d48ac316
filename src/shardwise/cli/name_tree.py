"""The names of a checkpoint as a tree, with numbered siblings of equal contents shown once."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from shardwise.cli import formatting as fmt
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import Manifest, TensorEntry

DEEPEST = 64


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor, or a plain value, whose `dtype` is empty.

    Attributes:
        text: the value as text, or a remark on the tensor.
        nbytes: bytes that are stored under this name.
    """

    name: str
    text: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Node:
    """A part of a name with its leaf and children; it stands for `count` equal siblings."""

    label: str
    leaf: Leaf | None = None
    children: tuple[Node, ...] = ()
    count: int = 1

    @property
    def nbytes(self) -> int:
        """The bytes of all leaves that this node stands for."""
        own = self.leaf.nbytes if self.leaf else 0
        return self.count * (own + sum(child.nbytes for child in self.children))

    @property
    def contents(self) -> Hashable:
        """A key that is equal for nodes that differ only in their labels."""
        leaf = (self.leaf.text, self.leaf.dtype, self.leaf.shape) if self.leaf else None
        return leaf, tuple((each.label, each.count, each.contents) for each in self.children)


@dataclass(frozen=True, slots=True)
class Row:
    """A node as a line of the printed tree, with the branches before its label."""

    branches: str
    node: Node

    @property
    def label(self) -> str:
        """The branches and the label."""
        return self.branches + fmt.printable(self.node.label)

    @property
    def size(self) -> str:
        """The size as text; empty if nothing is stored."""
        node = self.node
        if not node.nbytes or (node.leaf is not None and not node.leaf.nbytes):
            return ""
        each = fmt.size(node.nbytes // node.count)
        return f"{node.count} × {each}" if node.count > 1 else each


@dataclass(slots=True)
class _Branch:
    leaf: Leaf | None = None
    children: dict[str, _Branch] = field(default_factory=dict)


def leaves(manifest: Manifest) -> list[Leaf]:
    """Return a leaf for each tensor, each shared value and each value per rank of a manifest."""
    shared = [Leaf(entry.name, fmt.value(entry.value)) for entry in manifest.objects]
    each = [Leaf(name, "one value for each rank") for name in manifest.per_rank]
    return [*map(_tensor_leaf, manifest.tensors), *shared, *each]


def tree(named: Iterable[Leaf], *, collapse: bool) -> tuple[Node, ...]:
    """Return the tree of some names, in their order. Nodes with a single child are joined to it.

    Args:
        collapse: whether numbered siblings of equal contents (`layers.0` to `layers.31`) become
            one node.
    """
    root = _Branch()
    for leaf in named:
        branch = root
        for part in leaf.name.split(".", DEEPEST):
            branch = branch.children.setdefault(part, _Branch())
        branch.leaf = leaf
    return _node("", root, collapse=collapse).children


def rows(nodes: tuple[Node, ...], branches: str = "", *, top: bool = True) -> Iterator[Row]:
    """Yield the lines of a tree from top to bottom. Lines of the top level have no branches."""
    for node in nodes:
        last = node is nodes[-1]
        yield Row("" if top else branches + ("└── " if last else "├── "), node)
        below = "" if top else branches + ("    " if last else "│   ")
        yield from rows(node.children, below, top=False)


def print_tree(nodes: tuple[Node, ...], console: Console) -> None:
    """Print a tree with aligned columns: dtypes, shapes and sizes of tensors, or values."""
    lines = list(rows(nodes))
    tensors = [leaf for row in lines if (leaf := row.node.leaf) is not None and leaf.dtype]
    label = max((cell_len(row.label) for row in lines), default=0) + 3
    dtype = max((len(leaf.dtype) for leaf in tensors), default=0) + 2
    shape = max((len(fmt.shape(leaf.shape)) for leaf in tensors), default=0) + 2
    size = max((len(row.size) for row in lines), default=0)
    for row in lines:
        node, leaf = row.node, row.node.leaf
        style = "bold" if node.children and not row.branches else ""
        line = Text.assemble((row.branches, "dim"), (fmt.printable(node.label), style))
        line.append(" " * (label - cell_len(row.label)))
        if leaf is not None and not leaf.dtype:
            line.append(leaf.text, "green")
        elif leaf is not None:
            line.append(leaf.dtype.ljust(dtype), "magenta")
            line.append(fmt.shape(leaf.shape).ljust(shape), "cyan")
            line.append(row.size.rjust(size)).append(f"   {leaf.text}" if leaf.text else "", "dim")
        elif row.size:
            line.append(" " * (dtype + shape) + row.size.rjust(size), "dim")
        console.print(line, no_wrap=True, overflow="ellipsis", crop=True)


def tensor_bytes(entry: TensorEntry) -> int:
    """Return the size of a tensor, also if it is stored under another name."""
    return math.prod(entry.shape) * DTYPES[entry.dtype].itemsize


def _tensor_leaf(entry: TensorEntry) -> Leaf:
    if entry.same_as is not None:
        text = f"tied to {fmt.printable(entry.same_as)}"
        return Leaf(entry.name, text, entry.dtype, entry.shape)
    return Leaf(entry.name, "", entry.dtype, entry.shape, tensor_bytes(entry))


def _node(label: str, branch: _Branch, *, collapse: bool) -> Node:
    nodes = [_node(part, each, collapse=collapse) for part, each in branch.children.items()]
    children = _collapsed(nodes) if collapse else nodes
    return Node(label, branch.leaf, tuple(map(_joined, children)))


def _joined(node: Node) -> Node:
    """Return a node joined with its only child, if it has no leaf itself."""
    if node.leaf is not None or len(node.children) != 1:
        return node
    (only,) = node.children
    if node.count > 1 and only.count > 1:
        return node
    return replace(only, label=f"{node.label}.{only.label}", count=node.count * only.count)


def _collapsed(nodes: list[Node]) -> Iterator[Node]:
    """Yield nodes, with each group of numbered nodes of equal contents as one."""
    groups: dict[Hashable, list[Node]] = {}
    for node in nodes:
        numbered = node.label.isdecimal() and node.label == str(int(node.label))
        key = (True, node.contents) if numbered else (False, node.label)
        groups.setdefault(key, []).append(node)
    for equal in groups.values():
        if len(equal) == 1:
            yield equal[0]
        else:
            label = fmt.indices(sorted(int(node.label) for node in equal))
            yield replace(equal[0], label=label, count=len(equal))
