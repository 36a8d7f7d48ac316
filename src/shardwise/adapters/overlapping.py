"""Memory that overlaps itself, or that of other targets: filled through copies, and compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from shardwise.errors import StateError
from shardwise.state.leaves import Fragment, TensorLeaf, reach, same_bytes


def fillable_leaves(leaves: Sequence[TensorLeaf]) -> list[TensorLeaf]:
    """Leaves that can be filled in any order: copies where memory overlaps, moved when filled."""
    tangled = _tangled(leaves)
    moved: list[tuple[TensorLeaf, TensorLeaf]] = []
    return [
        _copied(leaf, moved) if i in tangled else fillable(leaf) for i, leaf in enumerate(leaves)
    ]


def _tangled(leaves: Sequence[TensorLeaf]) -> set[int]:
    """Leaves whose memory lies between that of others; not those of one and the same memory."""
    ranges: dict[torch.device, list[tuple[int, int, int]]] = {}
    seen: set[object] = set()
    for i, leaf in enumerate(leaves):
        if leaf.identity is not None and leaf.identity in seen:
            continue
        seen.add(leaf.identity)
        for data in (fragment.data for fragment in leaf.fragments):
            if data.numel() and not data.is_meta:
                start = data.data_ptr()
                stop = start + reach(data) * data.element_size()
                ranges.setdefault(data.device, []).append((start, stop, i))
    found: set[int] = set()
    for lying in ranges.values():
        furthest, owner = 0, -1
        for start, stop, i in sorted(lying):
            if start < furthest and i != owner:
                found |= {i, owner}
            if stop > furthest:
                furthest, owner = stop, i
    return found


def _copied(leaf: TensorLeaf, moved: list[tuple[TensorLeaf, TensorLeaf]]) -> TensorLeaf:
    """A leaf of memory of its own, moved to where `leaf` lies when filled, after those `moved`."""
    copies = tuple(Fragment(f.box, f.data.clone()) for f in leaf.fragments)
    copy = TensorLeaf(leaf.name, leaf.dtype, leaf.shape, copies)

    def finish() -> None:
        moved.append((leaf, copy))
        for here, there in zip(leaf.fragments, copies, strict=True):
            here.data.copy_(there.data)
        for earlier, filled in moved:
            for here, there in zip(earlier.fragments, filled.fragments, strict=True):
                if not same_bytes(here.data, there.data):
                    raise StateError(
                        f"{earlier.name} and {leaf.name} share memory in the target, and differ "
                        "there in the checkpoint; load into clones instead"
                    )
        if leaf.finish is not None:
            leaf.finish()

    return replace(leaf, fragments=copies, identity=None, finish=finish)


def fillable(leaf: TensorLeaf) -> TensorLeaf:
    """The leaf itself, or a copy that is moved to it when filled: of memory that overlaps itself.

    An expanded tensor holds one element in many places. It is filled from a copy, and only if the
    saved values allow it.
    """
    if len(leaf.fragments) != 1:
        return leaf
    box, data = leaf.fragments[0].box, leaf.fragments[0].data
    if not _overlaps_itself(data):
        return leaf
    copy = torch.empty(data.shape, dtype=data.dtype, device=data.device).copy_(data)

    def finish() -> None:
        _move_overlapping(leaf.name, copy, data)

    return replace(leaf, fragments=(Fragment(box, copy),), identity=None, finish=finish)


def _overlaps_itself(data: torch.Tensor) -> bool:
    if data.is_contiguous():
        return False
    covered = 0
    for stride, n in sorted(zip(data.stride(), data.shape, strict=True)):
        if n > 1 and stride <= covered:
            return True
        covered += stride * (n - 1)
    return False


def _move_overlapping(name: str, copy: torch.Tensor, data: torch.Tensor) -> None:
    first = tuple(slice(0, 1) if s == 0 else slice(None) for s in data.stride())
    base = data[first]
    every = [torch.arange(n, device="cpu") for n in base.shape]
    for index in torch.cartesian_prod(*every).reshape(-1, base.dim()):
        base[tuple(index)] = copy[first][tuple(index)]
    if not same_bytes(data, copy):
        raise StateError(
            f"{name}: the tensor overlaps itself in memory, and the saved values differ where one "
            "element lies in several places; load into a clone() instead"
        )
