"""What is held, split into what is planned with (integers) and what is moved (memory)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.engine.memory import check_memory
from shardwise.errors import StateError
from shardwise.plan.description import Description, columns_of
from shardwise.state.leaves import Fragment, TensorLeaf


@dataclass(frozen=True, slots=True)
class Described:
    """A description, and the fragments that it counts, in its order."""

    description: Description
    fragments: tuple[Fragment, ...]


def describe(leaves: Sequence[TensorLeaf], per_rank: Sequence[str]) -> Described:
    """Describe leaves; of several with one identity only the first is listed, the rest is tied.

    Raises:
        StateError: two leaves have the same name, or one has no memory.
    """
    listed, ties = untied(leaves)
    fragments: list[Fragment] = []
    owner: list[int] = []
    seen: set[str] = {name for name, _ in ties}
    for i, leaf in enumerate(listed):
        if leaf.name in seen:
            raise StateError(f"{leaf.name!r}: two values of the state have this name")
        seen.add(leaf.name)
        for fragment in leaf.fragments:
            check_memory(leaf.name, fragment.data)
            fragments.append(fragment)
            owner.append(i)
    dims = max((len(leaf.shape) for leaf in listed), default=0)
    description = Description(
        tuple(leaf.name for leaf in listed),
        tuple(str(leaf.dtype).removeprefix("torch.") for leaf in listed),
        tuple(leaf.shape for leaf in listed),
        np.array(owner, np.int64),
        columns_of([fragment.box.offset for fragment in fragments], dims, 0),
        columns_of([fragment.box.shape for fragment in fragments], dims, 1),
        tuple(ties),
        tuple(per_rank),
    )
    return Described(description, tuple(fragments))


def untied(leaves: Sequence[TensorLeaf]) -> tuple[list[TensorLeaf], list[tuple[str, str]]]:
    """Leaves of different memory, and pairs of another name of one and its first name."""
    first: dict[object, str] = {}
    listed: list[TensorLeaf] = []
    ties: list[tuple[str, str]] = []
    for leaf in leaves:
        known = None if leaf.identity is None else first.setdefault(leaf.identity, leaf.name)
        if known is None or known == leaf.name:
            listed.append(leaf)
        else:
            ties.append((leaf.name, known))
    return listed, ties


def nbytes(fragments: Sequence[Fragment]) -> int:
    """Bytes of all fragments together."""
    return sum(math.prod(f.box.shape) * f.data.element_size() for f in fragments)
