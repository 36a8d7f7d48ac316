"""Print the names of a checkpoint as a tree, with equal layers on one line."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from shardwise.cli import formatting as fmt

MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class NameLeaf:
    """A tensor or plain value.

    Attributes:
        name: full name.
        text: the value as text, or a remark on the tensor, for example `tied to model.w`.
        dtype: dtype of the tensor; empty for a plain value.
        nbytes: bytes that are stored under this name; 0 for a tied tensor.
    """

    name: str
    text: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class NameNode:
    """A node of the tree: one part of a name.

    Attributes:
        label: the part of the name; a range of numbers if the node represents several siblings.
        count: the number of siblings with equal contents that the node represents.
    """

    label: str
    leaf: NameLeaf | None = None
    children: tuple[NameNode, ...] = ()
    count: int = 1

    @property
    def nbytes(self) -> int:
        """The bytes of all leaves that this node represents."""
        own = self.leaf.nbytes if self.leaf else 0
        return self.count * (own + sum(child.nbytes for child in self.children))

    @property
    def contents_key(self) -> Hashable:
        """A key that is equal for nodes that differ only in their labels."""
        leaf = (self.leaf.text, self.leaf.dtype, self.leaf.shape) if self.leaf else None
        return leaf, tuple((each.label, each.count, each.contents_key) for each in self.children)


@dataclass(frozen=True, slots=True)
class TreeRow:
    """A line of the printed tree: a node, and the lines drawn before its label."""

    line_prefix: str
    node: NameNode

    @property
    def label(self) -> str:
        """The line prefix and the label."""
        return self.line_prefix + fmt.printable(self.node.label)

    @property
    def size(self) -> str:
        """The size as text; empty if nothing is stored."""
        node = self.node
        if not node.nbytes or (node.leaf is not None and not node.leaf.nbytes):
            return ""
        each = fmt.size(node.nbytes // node.count)
        return f"{node.count} × {each}" if node.count > 1 else each


@dataclass(slots=True)
class _NodeBuilder:
    leaf: NameLeaf | None = None
    children: dict[str, _NodeBuilder] = field(default_factory=dict)


def list_leaves(
    tensors: Iterable[Mapping[str, Any]], values: Iterable[Any], per_rank: Iterable[str]
) -> list[NameLeaf]:
    """Return leaves for the contents of a checkpoint, as `inspect --json` prints them."""
    leaves = []
    for tensor in tensors:
        tied = tensor["same_as"]
        text = "" if tied is None else f"tied to {fmt.printable(tied)}"
        nbytes = tensor["bytes"] if tied is None else 0
        leaves.append(NameLeaf(tensor["name"], text, tensor["dtype"], tensor["shape"], nbytes))
    leaves += [NameLeaf(entry.name, fmt.value(entry.value)) for entry in values]
    return [*leaves, *(NameLeaf(name, "one value for each rank") for name in per_rank)]


def build_tree(leaves: Iterable[NameLeaf], *, collapse: bool) -> tuple[NameNode, ...]:
    """Build the tree of names. A node with a single child is joined with it.

    Siblings stay in the order of the leaves.

    Args:
        collapse: whether numbered siblings with equal contents, such as `layers.0` to `layers.31`,
            become one node.
    """
    root = _NodeBuilder()
    for leaf in leaves:
        builder = root
        for part in leaf.name.split(".", MAX_DEPTH):
            builder = builder.children.setdefault(part, _NodeBuilder())
        builder.leaf = leaf
    return _make_node("", root, collapse=collapse).children


def list_rows(
    nodes: tuple[NameNode, ...], line_prefix: str = "", *, is_top_level: bool = True
) -> Iterator[TreeRow]:
    """Yield the lines of a tree from top to bottom. Lines of the top level have no prefix."""
    for node in nodes:
        last = node is nodes[-1]
        yield TreeRow("" if is_top_level else line_prefix + ("└── " if last else "├── "), node)
        prefix_below = "" if is_top_level else line_prefix + ("    " if last else "│   ")
        yield from list_rows(node.children, prefix_below, is_top_level=False)


def print_tree(nodes: tuple[NameNode, ...], console: Console) -> None:
    """Print a tree with aligned columns: dtypes, shapes and sizes of tensors, or values."""
    rows = list(list_rows(nodes))
    tensors = [leaf for row in rows if (leaf := row.node.leaf) is not None and leaf.dtype]
    label_width = max((cell_len(row.label) for row in rows), default=0) + 3
    dtype_width = max((len(leaf.dtype) for leaf in tensors), default=0) + 2
    shape_width = max((len(fmt.shape(leaf.shape)) for leaf in tensors), default=0) + 2
    size_width = max((len(row.size) for row in rows), default=0)
    for row in rows:
        node, leaf = row.node, row.node.leaf
        style = "bold" if node.children and not row.line_prefix else ""
        line = Text.assemble((row.line_prefix, "dim"), (fmt.printable(node.label), style))
        line.append(" " * (label_width - cell_len(row.label)))
        if leaf is not None and not leaf.dtype:
            line.append(leaf.text, "green")
        elif leaf is not None:
            line.append(leaf.dtype.ljust(dtype_width), "magenta")
            line.append(fmt.shape(leaf.shape).ljust(shape_width), "cyan")
            line.append(row.size.rjust(size_width))
            line.append(f"   {leaf.text}" if leaf.text else "", "dim")
        elif row.size:
            line.append(" " * (dtype_width + shape_width) + row.size.rjust(size_width), "dim")
        console.print(line, no_wrap=True, overflow="ellipsis", crop=True)


def _make_node(label: str, builder: _NodeBuilder, *, collapse: bool) -> NameNode:
    nodes = [_make_node(part, each, collapse=collapse) for part, each in builder.children.items()]
    children = _collapse_equal(nodes) if collapse else nodes
    return NameNode(label, builder.leaf, tuple(map(_join_only_child, children)))


def _join_only_child(node: NameNode) -> NameNode:
    """Join a node with its only child, if the node itself is not a tensor or value."""
    if node.leaf is not None or len(node.children) != 1:
        return node
    (only,) = node.children
    if node.count > 1 and only.count > 1:
        return node
    return replace(only, label=f"{node.label}.{only.label}", count=node.count * only.count)


def _collapse_equal(nodes: list[NameNode]) -> Iterator[NameNode]:
    """Yield nodes. Numbered nodes with equal contents become one node."""
    groups: dict[Hashable, list[NameNode]] = {}
    for node in nodes:
        numbered = node.label.isdecimal() and node.label == str(int(node.label))
        key = (True, node.contents_key) if numbered else (False, node.label)
        groups.setdefault(key, []).append(node)
    for group in groups.values():
        if len(group) == 1:
            yield group[0]
        else:
            label = fmt.indices(sorted(int(node.label) for node in group))
            yield replace(group[0], label=label, count=len(group))
