"""Print the names of a checkpoint as a tree, with equal layers on one line."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from shardwise.kernel.events import format_bytes
from shardwise.parts.cli import formatting as fmt

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


@dataclass(slots=True)
class NameNode:
    """A node of the tree: one part of a name.

    Attributes:
        label: the part of the name; a range of numbers if the node represents several siblings.
        children: the nodes below, by their part of the name.
        count: the number of siblings with equal contents that the node represents.
    """

    label: str
    leaf: NameLeaf | None = None
    children: dict[str, NameNode] = field(default_factory=dict)
    count: int = 1

    @property
    def nbytes(self) -> int:
        """The bytes of all leaves that this node represents."""
        own = self.leaf.nbytes if self.leaf else 0
        return self.count * (own + sum(child.nbytes for child in self.children.values()))

    @property
    def size(self) -> str:
        """The bytes as text; empty if nothing is stored."""
        if not self.nbytes or (self.leaf is not None and not self.leaf.nbytes):
            return ""
        each = format_bytes(self.nbytes // self.count)
        return f"{self.count} × {each}" if self.count > 1 else each

    @property
    def contents_key(self) -> Hashable:
        """A key that is equal for nodes that differ only in their labels."""
        leaf = (self.leaf.text, self.leaf.dtype, self.leaf.shape) if self.leaf else None
        below = self.children.values()
        return leaf, tuple((each.label, each.count, each.contents_key) for each in below)


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


def build_tree(leaves: Iterable[NameLeaf], *, collapse: bool) -> list[NameNode]:
    """Build the tree of names. A node with a single child is joined with it.

    Siblings stay in the order of the leaves.

    Args:
        collapse: whether numbered siblings with equal contents, such as `layers.0` to `layers.31`,
            become one node.
    """
    root = NameNode("")
    for leaf in leaves:
        node = root
        for part in leaf.name.split(".", MAX_DEPTH):
            node = node.children.setdefault(part, NameNode(part))
        node.leaf = leaf
    _simplify(root, collapse=collapse)
    return list(root.children.values())


def list_rows(
    nodes: Sequence[NameNode], line_prefix: str = "", *, is_top_level: bool = True
) -> Iterator[tuple[str, NameNode]]:
    """Yield the branches to draw before a node's label, and the node, from top to bottom."""
    for node in nodes:
        last = node is nodes[-1]
        yield "" if is_top_level else line_prefix + ("└── " if last else "├── "), node
        prefix_below = "" if is_top_level else line_prefix + ("    " if last else "│   ")
        yield from list_rows(list(node.children.values()), prefix_below, is_top_level=False)


def print_tree(nodes: Sequence[NameNode], console: Console) -> None:
    """Print a tree with aligned columns: dtypes, shapes and sizes of tensors, or values."""
    rows = [
        (prefix, fmt.printable(node.label), node.size, node) for prefix, node in list_rows(nodes)
    ]
    tensors = [leaf for *_, node in rows if (leaf := node.leaf) is not None and leaf.dtype]
    label_width = max((cell_len(prefix + label) for prefix, label, *_ in rows), default=0) + 3
    dtype_width = max((len(leaf.dtype) for leaf in tensors), default=0) + 2
    shape_width = max((len(fmt.shape(leaf.shape)) for leaf in tensors), default=0) + 2
    size_width = max((len(size) for _, _, size, _ in rows), default=0)
    for prefix, label, size, node in rows:
        leaf = node.leaf
        line = Text.assemble(
            (prefix, "dim"), (label, "bold" if node.children and not prefix else "")
        )
        line.append(" " * (label_width - cell_len(prefix + label)))
        if leaf is not None and not leaf.dtype:
            line.append(leaf.text, "green")
        elif leaf is not None:
            line.append(leaf.dtype.ljust(dtype_width), "magenta")
            line.append(fmt.shape(leaf.shape).ljust(shape_width), "cyan")
            line.append(size.rjust(size_width))
            line.append(f"   {leaf.text}" if leaf.text else "", "dim")
        elif size:
            line.append(" " * (dtype_width + shape_width) + size.rjust(size_width), "dim")
        console.print(line, no_wrap=True, overflow="ellipsis", crop=True)


def _simplify(node: NameNode, *, collapse: bool) -> None:
    """Collapse the numbered nodes below a node, and join each only child with its parent."""
    for child in node.children.values():
        _simplify(child, collapse=collapse)
    if collapse:
        _collapse_equal(node)
    node.children = {part: _join_only_child(child) for part, child in node.children.items()}


def _join_only_child(node: NameNode) -> NameNode:
    """Join a node with its only child, if the node itself is not a tensor or value."""
    if node.leaf is not None or len(node.children) != 1:
        return node
    (only,) = node.children.values()
    if node.count > 1 and only.count > 1:
        return node
    only.label, only.count = f"{node.label}.{only.label}", node.count * only.count
    return only


def _collapse_equal(node: NameNode) -> None:
    """Replace the numbered nodes below a node that have equal contents with one of them."""
    groups: dict[Hashable, list[NameNode]] = {}
    for child in node.children.values():
        numbered = child.label.isdecimal() and child.label == str(int(child.label))
        key = (True, child.contents_key) if numbered else (False, child.label)
        groups.setdefault(key, []).append(child)
    node.children = {first.label: first for first, *_ in groups.values()}
    for first, *others in groups.values():
        if others:
            first.label = fmt.indices(sorted(int(each.label) for each in (first, *others)))
            first.count += len(others)
