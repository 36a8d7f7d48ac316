"""Which nodes protect which: groups across failure domains, and what remains unprotected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Annotated

import msgspec

from shardwise.errors import FormatError
from shardwise.manifest.checksums import block_count
from shardwise.manifest.manifest import LARGEST
from shardwise.manifest.names import checked_file, checked_save_id
from shardwise.memory.redundancy.stripes import MOST_NODES, Stripe, chunk_size, stripes

TABLE_PAGE = 4096
"""A table of checksums takes a multiple of so many bytes."""

Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
GroupName = Annotated[str, msgspec.Meta(pattern=r"\A[0-9]{1,9}\Z")]
NodeName = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node, and what it holds of a snapshot.

    Attributes:
        node: its name.
        domain: what fails together with it, such as its rack; "" if that is nobody else.
        files: name and bytes of its data files, in the order of their names.

    Raises:
        ValueError: the files are out of order, twice the same, or have unsafe names.
    """

    node: NodeName
    domain: str
    files: tuple[tuple[str, Count], ...]

    def __post_init__(self) -> None:
        names = [checked_file(name) for name, _ in self.files]
        if any(one >= other for one, other in pairwise(names)):
            raise ValueError(f"the files of node {self.node} are not in the order of their names")

    @property
    def size(self) -> int:
        """Bytes of all files: the length of the node's string."""
        return sum(size for _, size in self.files)


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Nodes that protect each other, in the order of their ring.

    Attributes:
        members: the nodes; positions in this order are those of `parity.stripes`.
        name: tells it from the other groups of a protection.
        copies: each node's files are also kept by so many next ones of the ring.
        parity: so many members may be lost, by parity; 0 if copies protect them, or nothing.
        chunk: bytes of a chunk; 0 without parity.

    Raises:
        ValueError: the numbers do not go together.
    """

    members: Annotated[tuple[Member, ...], msgspec.Meta(min_length=1)]
    copies: Count = 0
    parity: Count = 0
    chunk: Count = 0
    name: GroupName = "0"

    def __post_init__(self) -> None:
        n = len(self.members)
        twice = _repeated(member.node for member in self.members)
        if twice:
            raise ValueError(f"twice in one group: {', '.join(twice)}")
        if self.copies >= n or self.parity >= n:
            raise ValueError(
                f"{n} nodes cannot have {self.copies} copies or {self.parity} blocks of parity"
            )
        needed = self.parity and chunk_size([each.size for each in self.members], n, self.parity)
        if self.chunk != needed:
            raise ValueError(f"chunks of {self.chunk} bytes where these files need {needed}")

    def stripes(self) -> tuple[Stripe, ...]:
        """The stripes, if there is parity."""
        return stripes(len(self.members), self.parity)


class Protection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the nodes of a snapshot protect each other; its JSON is the record `protection.json`.

    Attributes:
        save_id: of the snapshot.
        groups: all files, each in one group. A node may be in several, with other files in each.
        gaps: what is less protected than was asked for, and why; one sentence each.

    Raises:
        ValueError: a group or a file is there twice, or `save_id` is none.
    """

    save_id: str
    groups: tuple[Group, ...]
    gaps: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        checked_save_id(self.save_id)
        members = [member for group in self.groups for member in group.members]
        twice = _repeated(group.name for group in self.groups)
        twice += _repeated(name for member in members for name, _ in member.files)
        if twice:
            raise ValueError(f"named twice: {', '.join(twice)}")


def place(
    members: Sequence[Member],
    save_id: str,
    *,
    copies: int = 0,
    parity: int = 0,
    group_size: int = 8,
) -> Protection:
    """Form groups of nodes that protect each other.

    Groups differ by one node at most. Nodes of one domain are dealt out evenly over the groups.
    With parity, there are as many more groups as it takes for the loss of a whole domain to be
    survived, if groups of more than `parity` nodes can do that. The same nodes, in any order, have
    the same place.

    Args:
        members: all nodes of the snapshot.
        save_id: of the snapshot.
        copies: how many other nodes keep a copy of each node's files.
        parity: how many nodes of a group may be lost.
        group_size: at most so many nodes are in a group, unless fewer would be too few.

    Raises:
        ValueError: copies and parity are both asked for, a number is out of range, or a node or
            file is there twice.
    """
    if copies < 0 or parity < 0 or (copies and parity) or group_size < 2:
        raise ValueError(
            f"copies={copies}, parity={parity}, group_size={group_size}: copies or parity, not "
            "both, from 0 on; and groups of 2 nodes or more"
        )
    if parity > 1 and group_size > MOST_NODES:
        raise ValueError(f"group_size={group_size}: at most {MOST_NODES} with parity={parity}")
    if not members:
        return Protection(save_id, ())
    twice = _repeated(member.node for member in members)
    if twice:
        raise ValueError(f"named twice: {', '.join(twice)}")
    ordered = sorted(members, key=lambda each: (_domain(each), each.node))
    count = _group_count(ordered, max(copies, parity) + 1, parity, group_size)
    groups = [
        group_of(_ring(ordered[index::count]), copies=copies, parity=parity)
        for index in range(count)
    ]
    return unite(save_id, groups, copies=copies, parity=parity)


def group_of(ring: Sequence[Member], *, copies: int, parity: int) -> Group:
    """The group of these nodes, in this order, with as many copies or parity as it has nodes for.

    Raises:
        ValueError: a node is there twice.
    """
    n = len(ring)
    m = min(parity, n - 1)
    chunk = chunk_size([member.size for member in ring], n, m) if m else 0
    return Group(tuple(ring), min(copies, n - 1), m, chunk)


def group_of_files(
    files: Iterable[tuple[str, str, str, int]], *, copies: int, parity: int
) -> Group:
    """The group that a ring is: node, domain, file name and bytes of each of its ranks."""
    members = [Member(node, domain, ((name, size),)) for node, domain, name, size in files]
    return group_of(members, copies=copies, parity=parity)


def unite(save_id: str, groups: Sequence[Group], *, copies: int, parity: int) -> Protection:
    """These groups together, numbered, and what they protect less than was asked for."""
    named = [msgspec.structs.replace(group, name=str(i)) for i, group in enumerate(groups)]
    gaps = dict.fromkeys(_gaps(groups, copies, parity))
    return Protection(save_id, tuple(named), tuple(gaps))


def decode_protection(data: bytes) -> Protection:
    """The record's bytes to what they say.

    Raises:
        FormatError: they are no such record, or it contradicts itself.
    """
    try:
        return msgspec.json.decode(data, type=Protection)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"protection.json is malformed: {error}") from error


def memberships(protection: Protection, node: str) -> list[tuple[Group, int]]:
    """The groups of a node, and its position in each."""
    return [
        (group, position)
        for group in protection.groups
        for position, member in enumerate(group.members)
        if member.node == node
    ]


def locate(protection: Protection, file: str) -> tuple[Group, int]:
    """The group that protects a data file, and the position there of the node that wrote it.

    Raises:
        FormatError: there is none.
    """
    for group in protection.groups:
        for position, member in enumerate(group.members):
            if any(name == file for name, _ in member.files):
                return group, position
    raise FormatError(f"{file} is no file of save {protection.save_id}")


def copied_files(group: Group, at: int) -> tuple[tuple[Member, str, int], ...]:
    """The copies that a member keeps: whose file, its name, its bytes."""
    n = len(group.members)
    owners = [group.members[(at - i) % n] for i in range(1, group.copies + 1)]
    return tuple((owner, name, size) for owner in owners for name, size in owner.files)


def parity_name(save_id: str, group: Group, block: int) -> str:
    """The name of the file in which a member keeps its block of parity of this number."""
    return f"parity-{save_id}-{group.name}-{block}.bin"


def parity_files(save_id: str, group: Group) -> tuple[tuple[str, int], ...]:
    """The files of parity that each member of a group keeps: name and bytes."""
    size = parity_file_size(group.chunk)
    return tuple((parity_name(save_id, group, q), size) for q in range(group.parity))


def parity_file_size(chunk: int) -> int:
    """Bytes of a file of parity: the chunk, the CRC-32 of each 64 KiB of it (u4, little), zeros."""
    return chunk + -(-4 * block_count(chunk) // TABLE_PAGE) * TABLE_PAGE


def _domain(member: Member) -> tuple[str, str]:
    # A node without a domain fails alone, whatever the domains of others are called.
    return (member.domain, "") if member.domain else ("", member.node)


def _group_count(members: Sequence[Member], least: int, parity: int, group_size: int) -> int:
    """How many groups; members are dealt out, so a domain of c nodes puts ⌈c / count⌉ in each."""
    most = max(1, len(members) // max(least, 2))
    wanted = min(-(-len(members) // group_size), most)
    if parity:
        largest = max(Counter(_domain(each) for each in members).values())
        to_lose_one = -(-largest // parity)
        if to_lose_one <= most:  # else smaller groups would cost memory, and save nothing
            wanted = max(wanted, to_lose_one)
    return max(1, wanted)


def _ring(members: Sequence[Member]) -> list[Member]:
    """Nodes of one domain spread over the ring."""
    most = max(Counter(_domain(each) for each in members).values(), default=1)
    return [member for row in range(most) for member in members[row::most]]


def _gaps(groups: Sequence[Group], copies: int, parity: int) -> Iterator[str]:
    asked = max(copies, parity)
    for group in groups if asked else ():
        n = len(group.members)
        names = ", ".join(member.node for member in group.members)
        if n == 1:
            yield f"node {names} is the only one: nobody else can keep what it holds"
        elif asked > max(group.copies, group.parity):
            yield (
                f"{n} nodes ({names}) survive the loss of {n - 1}, not of {asked}: "
                f"that takes {asked + 1} nodes"
            )
        if n > 1:
            yield from _gaps_of_domains(group)


def _gaps_of_domains(group: Group) -> Iterator[str]:
    n = len(group.members)
    domains = [_domain(member) for member in group.members]
    for domain, count in sorted(Counter(domains).items()):
        if count == 1:
            continue
        if group.parity:
            exposed = count if count > group.parity else 0
        else:
            windows = [{domains[(at + i) % n] for i in range(group.copies + 1)} for at in range(n)]
            exposed = windows.count({domain})
        if exposed:
            nodes = [each.node for each in group.members if _domain(each) == domain]
            yield (
                f"the loss of domain {domain[0]} ({', '.join(nodes)}) would cost the data of "
                f"{exposed} node(s): {_why(group, count)}"
            )


def _why(group: Group, count: int) -> str:
    n = len(group.members)
    if group.parity:
        return f"{count} of a group of {n} are in it, and {group.parity} may be lost"
    return f"{count} of a group of {n} are in it, so that copies lie beside what they copy"


def _repeated(names: Iterator[str] | Collection[str]) -> list[str]:
    return sorted(name for name, count in Counter(names).items() if count > 1)
