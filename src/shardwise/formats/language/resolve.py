"""Sizes of a rule's axes from the shapes of its tensors, for writing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from shardwise.errors import LayoutError
from shardwise.formats.language.axes import Dim, Ragged, Sizes, axes_of, render_node, size_of, solve
from shardwise.formats.language.numbers import Value
from shardwise.formats.language.structure import Structure
from shardwise.manifest.table import Int


def resolve(
    structures: Sequence[Structure],
    shapes: Sequence[tuple[int, ...]],
    declared: Mapping[str, Value],
) -> dict[str, int]:
    """Sizes of all axes; of ragged ones the sum of all shares, as `~name`.

    Padding is as small as it can be.

    Raises:
        LayoutError: tensors cannot have these shapes, or sizes are left open.
    """
    known = {name: size for name, size in declared.items() if isinstance(size, int)}
    dims = []
    for own, shape in zip(structures, shapes, strict=True):
        if len(own.whole) != len(shape):
            raise LayoutError(f"the rule is for {len(own.whole)} dimensions, not {list(shape)}")
        dims += list(zip(own.whole, shape, strict=True))
    known = solve([(dim.node, size) for dim, size in dims if dim.limit is None], known)
    for dim, size in dims:
        if dim.limit is not None:
            known = _padded(dim, size, known)
    return known


def _padded(dim: Dim, least: int, known: dict[str, int]) -> dict[str, int]:
    """With the smallest size of the one unknown axis that leaves room for `least` elements."""
    names = {axis.name for axis in axes_of(dim.node) if axis.size is None}
    unknown = sorted(names - set(known))
    if len(unknown) > 1:
        raise LayoutError(f"nothing says how many {' and '.join(unknown)} there are")
    if unknown:
        zero, one = (size_of(dim.node, {**known, unknown[0]: n}) or 0 for n in range(2))
        if one <= zero:
            raise LayoutError(f"`{render_node(dim.node)}` cannot be padded to {least}")
        known = {**known, unknown[0]: -(-(least - zero) // (one - zero))}
    size = size_of(dim.node, known) or 0
    if size < least:
        raise LayoutError(f"`{render_node(dim.node)}` has {size} elements, and should have {least}")
    return known


def local_shapes(
    own: Structure, sizes: Sizes, lists: Mapping[str, Value], positions: Mapping[str, Int]
) -> Int:
    """The shapes `(n, D)` of the arrays at positions along the axes of ranks, columns of n rows."""
    rows = len(next(iter(positions.values()))) if positions else 1
    shares = {found.axis: _share(found, sizes, lists, positions) for found in own.ragged}
    if not shares:
        shape = [size_of(node, sizes) or 0 for node in own.stored]
        return np.broadcast_to(np.array(shape, np.int64), (rows, len(shape)))
    table = np.column_stack(list(shares.values()))
    found = np.zeros((rows, len(own.stored)), np.int64)
    for values in np.unique(table, axis=0):
        here = {**sizes, **dict(zip(shares, values.tolist(), strict=True))}
        shape = [size_of(node, here) or 0 for node in own.stored]
        found[(table == values).all(axis=1)] = shape
    return found


def _share(
    found: Ragged, sizes: Sizes, lists: Mapping[str, Value], positions: Mapping[str, Int]
) -> Int:
    """Of a ragged axis, what is declared, or what `torch.chunk` would give each rank."""
    at, count = np.zeros_like(positions[found.axes[0]]), 1
    for axis in found.axes:
        at, count = at * sizes[axis] + positions[axis], count * sizes[axis]
    declared, total = lists.get(found.axis), sizes[found.start]
    if isinstance(declared, tuple):
        if len(declared) != count or sum(declared) != total:
            raise LayoutError(f"{found.axis} = {list(declared)} are not {total} in {count} shares")
        return np.array(declared, np.int64)[at]
    chunk = -(-total // count)
    return np.clip(total - at * chunk, 0, chunk)
