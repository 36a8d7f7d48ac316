"""Where the pieces of stripes lie: which bytes of which files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.errors import FormatError
from shardwise.memory.redundancy.parity import Stripe, stripe_of_chunk
from shardwise.memory.redundancy.placement import Group, Member, parity_name


@dataclass(frozen=True, slots=True)
class Extent:
    """Part of a node's string: bytes `low:high` of it are those of `file` from `offset` on."""

    file: str
    offset: int
    low: int
    high: int


def extents(member: Member, low: int, high: int) -> Iterator[Extent]:
    """Where bytes `low:high` of a node's string lie; those past its files are zeros, and left out.

    Extents count from the start of the string.
    """
    start = 0
    for name, size in member.files:
        first, last = max(low, start), min(high, start + size)
        if first < last:
            yield Extent(name, first - start, first, last)
        start += size


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes `low:high` of the blocks of a stripe, in which the block of number `wanted` is lost."""

    stripe: Stripe
    wanted: int
    low: int
    high: int


def parts(group: Group, at: int, low: int, high: int, *, grid: int) -> Iterator[Part]:
    """Cut bytes `low:high` of a member's string, in their order.

    Cuts are at multiples of `grid` in a chunk, and where a file of any other piece of the stripe
    begins or ends: so each piece lies in one file, and is there or is not.
    """
    chunk, n = group.chunk, len(group.members)
    all_stripes = group.stripes()
    for f in range(low // chunk, -(-high // chunk)):
        first, last = max(low - f * chunk, 0), min(high - f * chunk, chunk)
        stripe = all_stripes[stripe_of_chunk(at, f, n, group.parity)]
        cuts = {last}
        for g, position in enumerate(stripe.data):
            start = g * chunk
            for each in extents(group.members[position], start + first, start + last):
                cuts |= {each.low - start, each.high - start}
        for cut in sorted(cuts):
            while first < cut:
                stop = min(cut, (first // grid + 1) * grid)
                yield Part(stripe, f, first, stop)
                first = stop


def needed_files(save_id: str, group: Group, part: Part, number: int) -> list[tuple[str, str]]:
    """Node and name of each file that a part of a stripe's block lies in; none if it is zeros."""
    k = len(part.stripe.data)
    if number >= k:
        node = group.members[part.stripe.parity[number - k]].node
        return [(node, parity_name(save_id, group, number - k))]
    member = group.members[part.stripe.data[number]]
    start = number * group.chunk
    found = extents(member, start + part.low, start + part.high)
    return [(member.node, each.file) for each in found]


def position_of(member: Member, file: str, offset: int, nbytes: int) -> int:
    """Where a range of a file begins in the string of its node.

    Raises:
        FormatError: there is no such file, or it ends before.
    """
    start = 0
    for name, size in member.files:
        if name == file:
            if not 0 <= offset <= offset + nbytes <= size:
                raise FormatError(
                    f"{file} of node {member.node} has {size} bytes, not {offset + nbytes}"
                )
            return start + offset
        start += size
    raise FormatError(f"node {member.node} had no file {file}")
