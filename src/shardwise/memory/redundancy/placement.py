"""Which nodes protect which: groups across failure domains, and the gaps in their protection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Annotated

import msgspec

from shardwise.errors import FormatError
from shardwise.manifest.checksums import block_count
from shardwise.manifest.manifest import LARGEST
from shardwise.manifest.names import check_file_name, check_save_id
from shardwise.memory.redundancy.stripes import MOST_NODES, Stripe, chunk_size, stripes

TABLE_PAGE = 4096
"""The size of a checksum table is a multiple of this many bytes."""

Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
GroupName = Annotated[str, msgspec.Meta(pattern=r"\A[0-9]{1,9}\Z")]
NodeName = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node and its data files of a snapshot.

    Attributes:
        node: the node's name.
        domain: the failure domain, for example the rack; "" if the node fails alone.
        files: name and size of each data file, sorted by name.

    Raises:
        ValueError: the files are not sorted, repeat, or have unsafe names.
    """

    node: NodeName
    domain: str
    files: tuple[tuple[str, Count], ...]

    def __post_init__(self) -> None:
        names = [check_file_name(name) for name, _ in self.files]
        if any(one >= other for one, other in pairwise(names)):
            raise ValueError(f"the files of node {self.node} are not sorted by name")

    @property
    def size(self) -> int:
        """Bytes of all files, which is the length of the node's string."""
        return sum(size for _, size in self.files)


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Nodes that protect each other, in ring order.

    Attributes:
        members: the nodes. `stripes.stripes` refers to them by their index here.
        name: the name of the group, unique within a protection.
        copies: how many of the next nodes in the ring store a copy of each node's files.
        parity: how many members may be lost thanks to parity; 0 without parity.
        chunk: bytes of a chunk; 0 without parity.

    Raises:
        ValueError: the numbers contradict each other.
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
            raise ValueError(f"nodes repeated in one group: {', '.join(twice)}")
        if self.copies >= n or self.parity >= n:
            raise ValueError(
                f"a group of {n} nodes cannot have {self.copies} copies or {self.parity} parity "
                "blocks"
            )
        needed = self.parity and chunk_size([each.size for each in self.members], n, self.parity)
        if self.chunk != needed:
            raise ValueError(f"chunks of {self.chunk} bytes: these files need {needed}")

    def stripes(self) -> tuple[Stripe, ...]:
        """Return the stripes of the group."""
        return stripes(len(self.members), self.parity)


class Protection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the nodes of a snapshot protect each other.

    Attributes:
        save_id: the save that this protects.
        groups: the groups. Each file is in one group; a node may be in several, with different
            files in each.
        gaps: one sentence for each thing that is protected less than requested, with the reason.

    Raises:
        ValueError: a group or a file is repeated, or `save_id` is invalid.
    """

    save_id: str
    groups: tuple[Group, ...]
    gaps: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_save_id(self.save_id)
        members = [member for group in self.groups for member in group.members]
        twice = _repeated(group.name for group in self.groups)
        twice += _repeated(name for member in members for name, _ in member.files)
        if twice:
            raise ValueError(f"repeated: {', '.join(twice)}")


def form_groups(
    members: Sequence[Member],
    save_id: str,
    *,
    copies: int = 0,
    parity: int = 0,
    group_size: int = 8,
) -> Protection:
    """Form groups of nodes that protect each other.

    Group sizes differ by at most one node. The nodes of a failure domain are spread evenly over the
    groups. With parity, there are more groups if that lets them survive the loss of a whole domain
    and each still has more than `parity` nodes. The result does not depend on the order of
    `members`.

    Args:
        members: all nodes of the snapshot.
        save_id: the save to protect.
        copies: how many other nodes store a copy of each node's files.
        parity: how many nodes of a group may be lost.
        group_size: the largest size of a group, unless that is too few nodes for the protection.

    Raises:
        ValueError: both copies and parity are requested, a number is out of range, or a node or
            file is repeated.
    """
    if copies < 0 or parity < 0 or (copies and parity) or group_size < 2:
        raise ValueError(
            f"copies={copies}, parity={parity}, group_size={group_size}: use copies or parity, not "
            "both, at least 0; and groups of at least 2 nodes"
        )
    if parity > 1 and group_size > MOST_NODES:
        raise ValueError(f"group_size={group_size}: at most {MOST_NODES} with parity={parity}")
    if not members:
        return Protection(save_id, ())
    twice = _repeated(member.node for member in members)
    if twice:
        raise ValueError(f"repeated: {', '.join(twice)}")
    ordered = sorted(members, key=lambda each: (_domain(each), each.node))
    count = _group_count(ordered, max(copies, parity) + 1, parity, group_size)
    groups = [
        group_of(_ring(ordered[index::count]), copies=copies, parity=parity)
        for index in range(count)
    ]
    return combine_groups(save_id, groups, copies=copies, parity=parity)


def group_of(ring: Sequence[Member], *, copies: int, parity: int) -> Group:
    """Return a group of these nodes, in this order.

    It has fewer copies or less parity than requested if there are too few nodes.

    Raises:
        ValueError: a node is repeated.
    """
    n = len(ring)
    m = min(parity, n - 1)
    chunk = chunk_size([member.size for member in ring], n, m) if m else 0
    return Group(tuple(ring), min(copies, n - 1), m, chunk)


def group_of_files(
    files: Iterable[tuple[str, str, str, int]], *, copies: int, parity: int
) -> Group:
    """Return the group of a ring, given the node, domain, file name and size of each rank."""
    members = [Member(node, domain, ((name, size),)) for node, domain, name, size in files]
    return group_of(members, copies=copies, parity=parity)


def combine_groups(
    save_id: str, groups: Sequence[Group], *, copies: int, parity: int
) -> Protection:
    """Return the protection by these groups: it numbers them, and lists the gaps."""
    named = [msgspec.structs.replace(group, name=str(i)) for i, group in enumerate(groups)]
    gaps = dict.fromkeys(_gaps(groups, copies, parity))
    return Protection(save_id, tuple(named), tuple(gaps))


def decode_protection(data: bytes) -> Protection:
    """Decode a protection from JSON.

    Raises:
        FormatError: the JSON is malformed, or contradicts itself.
    """
    try:
        return msgspec.json.decode(data, type=Protection)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"the protection of a snapshot is malformed: {error}") from error


def memberships(protection: Protection, node: str) -> list[tuple[Group, int]]:
    """Return the groups of a node, with its position in each."""
    return [
        (group, position)
        for group in protection.groups
        for position, member in enumerate(group.members)
        if member.node == node
    ]


def locate(protection: Protection, file: str) -> tuple[Group, int]:
    """Return the group that protects a data file, and the position of the file's node in it.

    Raises:
        FormatError: no group contains the file.
    """
    for group in protection.groups:
        for position, member in enumerate(group.members):
            if any(name == file for name, _ in member.files):
                return group, position
    raise FormatError(f"{file} is not a file of save {protection.save_id}")


def copied_files(group: Group, at: int) -> tuple[tuple[Member, str, int], ...]:
    """Return the copies that a member stores: the owner, name and size of each file."""
    n = len(group.members)
    owners = [group.members[(at - i) % n] for i in range(1, group.copies + 1)]
    return tuple((owner, name, size) for owner in owners for name, size in owner.files)


def parity_name(save_id: str, group: Group, block: int) -> str:
    """Return the name of the file that holds a member's parity block of this number."""
    return f"parity-{save_id}-{group.name}-{block}.bin"


def parity_file_size(chunk: int) -> int:
    """Return the size of a parity file: the chunk, then a CRC-32 of each 64 KiB, padded."""
    return chunk + -(-4 * block_count(chunk) // TABLE_PAGE) * TABLE_PAGE


def _domain(member: Member) -> tuple[str, str]:
    # A node without a domain fails alone, whatever the others' domains are called.
    return (member.domain, "") if member.domain else ("", member.node)


def _group_count(members: Sequence[Member], least: int, parity: int, group_size: int) -> int:
    """Return the number of groups. A domain of c nodes has at most ⌈c / count⌉ in each."""
    most = max(1, len(members) // max(least, 2))
    wanted = min(-(-len(members) // group_size), most)
    if parity:
        largest = max(Counter(_domain(each) for each in members).values())
        to_lose_one = -(-largest // parity)
        if to_lose_one <= most:  # otherwise smaller groups cost memory without surviving more
            wanted = max(wanted, to_lose_one)
    return max(1, wanted)


def _ring(members: Sequence[Member]) -> list[Member]:
    """Order nodes so that those of one domain are spread over the ring."""
    most = max(Counter(_domain(each) for each in members).values(), default=1)
    return [member for row in range(most) for member in members[row::most]]


def _gaps(groups: Sequence[Group], copies: int, parity: int) -> Iterator[str]:
    asked = max(copies, parity)
    for group in groups if asked else ():
        n = len(group.members)
        names = ", ".join(member.node for member in group.members)
        if n == 1:
            yield f"node {names} is alone: no other node can store copies or parity of its data"
        elif asked > max(group.copies, group.parity):
            yield (
                f"{n} nodes ({names}) survive the loss of {n - 1} nodes, not of {asked}, which "
                f"takes {asked + 1} nodes"
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
                f"losing domain {domain[0]} ({', '.join(nodes)}) would lose the data of "
                f"{exposed} node(s): {_why(group, count)}"
            )


def _why(group: Group, count: int) -> str:
    n = len(group.members)
    if group.parity:
        return f"{count} nodes of a group of {n} are in it, and only {group.parity} may be lost"
    return f"{count} nodes of a group of {n} are in it, so some copies share its domain"


def _repeated(names: Iterator[str] | Collection[str]) -> list[str]:
    return sorted(name for name, count in Counter(names).items() if count > 1)
