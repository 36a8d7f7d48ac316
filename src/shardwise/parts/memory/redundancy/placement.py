"""Decides which nodes store copies or parity of which files.

Nodes form groups that spread over failure domains. The nodes of a group protect each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from shardwise.kernel.errors import StoreError
from shardwise.kernel.manifest.checksums import BLOCK
from shardwise.kernel.manifest.manifest import FileEntry
from shardwise.parts.memory.records import PendingManifest
from shardwise.parts.memory.redundancy.stripes import (
    MOST_NODES,
    Stripe,
    chunk_size,
    stripes_of_group,
)

TABLE_ALIGNMENT = 4096
"""The size of a checksum table is a multiple of this many bytes."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A byte range of a file, and the same range in the data of a node.

    Attributes:
        file: the name of the file.
        file_offset: offset of the range in the file, in bytes.
        data_start, data_stop: the range in the data of the node, in bytes.
    """

    file: str
    file_offset: int
    data_start: int
    data_stop: int


@dataclass(frozen=True, slots=True)
class Member:
    """A node of a group, and its data files of a snapshot.

    The data of a node consists of its files, joined in order, and padded with zeros to the size
    that parity needs.

    Attributes:
        node: the node's name.
        domain: the failure domain, for example the rack; "" if the node fails alone.
        files: name and size in bytes of each data file, sorted by name.
    """

    node: str
    domain: str
    files: tuple[tuple[str, int], ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(size for _, size in self.files)

    def extents(self, low: int, high: int) -> Iterator[Extent]:
        """Yield the ranges of files that make up bytes `low:high` of the node's data.

        Bytes past the end of the last file are zeros and have no extent.
        """
        start = 0
        for file, size in self.files:
            first, last = max(low, start), min(high, start + size)
            if first < last:
                yield Extent(file, first - start, first, last)
            start += size

    def offset_of(self, file: str) -> int:
        """Return the offset of a file in the node's data."""
        names = [name for name, _ in self.files]
        return sum(size for _, size in self.files[: names.index(file)])


@dataclass(frozen=True, slots=True)
class ProtectionGroup:
    """Nodes that protect each other, in ring order.

    Attributes:
        members: the nodes. Stripes refer to them by their index here.
        copies: the number of next nodes in the ring that store a copy of each node's files.
        parity: the number of members that may be lost thanks to parity; 0 without parity.
        chunk: size of a chunk in bytes; 0 without parity.
        name: the name of the group, unique within a protection.
    """

    members: tuple[Member, ...]
    copies: int = 0
    parity: int = 0
    chunk: int = 0
    name: str = "0"

    def stripes(self) -> tuple[Stripe, ...]:
        """Return the stripes of the group."""
        return stripes_of_group(len(self.members), self.parity)


@dataclass(frozen=True, slots=True)
class Protection:
    """How the nodes of a snapshot protect each other.

    Attributes:
        save_id: the id of the protected save.
        groups: the groups. Each file is in one group. A node may be in several groups, with
            different files in each.
        gaps: for each set of nodes with less protection than requested, a sentence with the reason.
    """

    save_id: str
    groups: tuple[ProtectionGroup, ...]
    gaps: tuple[str, ...] = ()


def plan_protection(pending: PendingManifest, files: Sequence[FileEntry]) -> Protection:
    """Return which nodes protect which files of a save: rings first, then groups by domain.

    Args:
        files: the entries of all files of the save.

    Raises:
        StoreError: the pending manifest is not of this save.
    """
    size_of = {entry.name: entry.size for entry in files}
    domain_of = {info.node: info.domain for info in pending.nodes}
    node_of = dict(pending.files)
    in_rings = {name for ring in pending.rings for name in ring}
    is_valid = node_of.keys() == size_of.keys() and in_rings <= node_of.keys()
    if not is_valid or not domain_of.keys() >= set(node_of.values()):
        raise StoreError(
            f"step {pending.step}: the files of save {pending.save_id} in its pending manifest are "
            "not those of its manifest, so they cannot be protected: save again"
        )
    groups = [
        make_ring_group(
            [(node_of[name], domain_of[node_of[name]], name, size_of[name]) for name in ring],
            copies=pending.copies,
            parity=pending.parity,
        )
        for ring in pending.rings
    ]
    files_of: dict[str, list[tuple[str, int]]] = {node: [] for node in domain_of}
    for name, node in pending.files:
        if name not in in_rings:
            files_of[node].append((name, size_of[name]))
    if any(files_of.values()) or not groups:
        members = [
            Member(node, domain_of[node], tuple(sorted(named))) for node, named in files_of.items()
        ]
        options = {"copies": pending.copies, "parity": pending.parity, "group_size": pending.group}
        groups += form_groups(members, pending.save_id, **options).groups
    return combine_groups(pending.save_id, groups, copies=pending.copies, parity=pending.parity)


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
    groups. With parity, there are more and smaller groups, if this makes every group survive the
    loss of a whole domain. Each group still has more than `parity` nodes. The order of `members`
    does not matter.

    Args:
        members: all nodes of the snapshot.
        save_id: the id of the save to protect.
        copies: the number of other nodes that store a copy of each node's files.
        parity: the number of nodes of a group that may be lost.
        group_size: the largest size of a group. If `copies` or `parity` needs larger groups, groups
            are larger.

    Raises:
        ValueError: both copies and parity are requested, a number is out of range, or a node is
            repeated.
    """
    if copies < 0 or parity < 0 or (copies and parity) or group_size < 2:
        raise ValueError(
            f"copies={copies}, parity={parity}, group={group_size}: copies and parity must not be "
            "negative, only one of them may be positive, and group must be at least 2"
        )
    if parity > 1 and group_size > MOST_NODES:
        raise ValueError(
            f"Memory(parity={parity}, group={group_size}): with parity=2 or more, a group has at "
            f"most {MOST_NODES} nodes: pass group={MOST_NODES} or less"
        )
    if not members:
        return Protection(save_id, ())
    ordered = sorted(members, key=lambda each: (_domain_key(each), each.node))
    count = _count_groups(ordered, max(copies, parity) + 1, parity, group_size)
    groups = [
        make_group(_spread_domains(ordered[index::count]), copies=copies, parity=parity)
        for index in range(count)
    ]
    return combine_groups(save_id, groups, copies=copies, parity=parity)


def make_group(members: Sequence[Member], *, copies: int, parity: int) -> ProtectionGroup:
    """Return a group of these nodes, in this order.

    The group has fewer copies or less parity than requested if there are too few nodes.

    Raises:
        ValueError: a node is repeated.
    """
    n = len(members)
    repeated = [node for node, count in Counter(each.node for each in members).items() if count > 1]
    if repeated:
        raise ValueError(f"nodes repeated in one group: {', '.join(sorted(repeated))}")
    m = min(parity, n - 1)
    chunk = chunk_size([member.size for member in members], n, m) if m else 0
    return ProtectionGroup(tuple(members), min(copies, n - 1), m, chunk)


def make_ring_group(
    ring: Iterable[tuple[str, str, str, int]], *, copies: int, parity: int
) -> ProtectionGroup:
    """Return the group of a ring, given the node, domain, file name and file size of each rank."""
    members = [Member(node, domain, ((name, size),)) for node, domain, name, size in ring]
    return make_group(members, copies=copies, parity=parity)


def combine_groups(
    save_id: str, groups: Sequence[ProtectionGroup], *, copies: int, parity: int
) -> Protection:
    """Number groups and combine them into a protection that lists the gaps.

    Args:
        save_id: the id of the protected save.
        groups: the groups.
        copies, parity: the requested protection.
    """
    named = [replace(group, name=str(i)) for i, group in enumerate(groups)]
    gaps = dict.fromkeys(_find_gaps(groups, copies, parity))
    return Protection(save_id, tuple(named), tuple(gaps))


def groups_of_node(protection: Protection, node: str) -> list[tuple[ProtectionGroup, int]]:
    """Return the groups of a node, and the node's index in each."""
    return [
        (group, index)
        for group in protection.groups
        for index, member in enumerate(group.members)
        if member.node == node
    ]


def group_of_file(protection: Protection, file: str) -> tuple[ProtectionGroup, int]:
    """Return the group that protects a data file, and the index of the file's node in the group.

    Raises:
        StoreError: no group contains the file.
    """
    for group in protection.groups:
        for index, member in enumerate(group.members):
            if any(name == file for name, _ in member.files):
                return group, index
    raise StoreError(f"{file} is not a file of save {protection.save_id}; restore another step")


def files_to_copy(group: ProtectionGroup, index: int) -> tuple[tuple[Member, str, int], ...]:
    """Return the copies that the member at `index` stores: owner, name and size of each file."""
    n = len(group.members)
    owners = [group.members[(index - i) % n] for i in range(1, group.copies + 1)]
    return tuple((owner, name, size) for owner in owners for name, size in owner.files)


def parity_file_name(save_id: str, group: ProtectionGroup, q: int) -> str:
    """Return the name of the file in which each member of a group stores its parity chunk `q`."""
    return f"parity-{save_id}-{group.name}-{q}.bin"


def parity_file_size(chunk: int) -> int:
    """Return the size of a parity file in bytes, given the size of a chunk.

    The file consists of the chunk and a table with a CRC-32 of each 64 KiB. The table is padded
    with zeros.
    """
    return chunk + -(-4 * (chunk // BLOCK) // TABLE_ALIGNMENT) * TABLE_ALIGNMENT


def _domain_key(member: Member) -> tuple[str, str]:
    # A node without a domain fails alone, so its name identifies its domain.
    return (member.domain, "") if member.domain else ("", member.node)


def _count_groups(
    members: Sequence[Member], smallest_group: int, parity: int, group_size: int
) -> int:
    """Return the number of groups to form.

    A domain of c nodes has at most ⌈c / number of groups⌉ nodes in each group.
    """
    most = max(1, len(members) // max(smallest_group, 2))
    count = min(-(-len(members) // group_size), most)
    if parity:
        largest_domain = max(Counter(_domain_key(each) for each in members).values())
        to_survive_domain = -(-largest_domain // parity)
        # Otherwise, even the smallest groups do not survive the loss of a domain.
        if to_survive_domain <= most:
            count = max(count, to_survive_domain)
    return max(1, count)


def _spread_domains(members: Sequence[Member]) -> list[Member]:
    """Order nodes so that the nodes of each domain are spread over the ring."""
    most = max(Counter(_domain_key(each) for each in members).values(), default=1)
    return [member for row in range(most) for member in members[row::most]]


def _find_gaps(groups: Sequence[ProtectionGroup], copies: int, parity: int) -> Iterator[str]:
    requested = max(copies, parity)
    for group in groups if requested else ():
        n = len(group.members)
        names = ", ".join(member.node for member in group.members)
        if n == 1:
            yield f"node {names} is alone: no other node can store copies or parity of its data"
        elif requested > max(group.copies, group.parity):
            yield (
                f"{n} nodes ({names}) survive the loss of {n - 1} of them, not of {requested}: "
                f"for this, at least {requested + 1} nodes are needed"
            )
        if n > 1:
            yield from _find_domain_gaps(group)


def _find_domain_gaps(group: ProtectionGroup) -> Iterator[str]:
    n = len(group.members)
    domains = [_domain_key(member) for member in group.members]
    for domain, count in sorted(Counter(domains).items()):
        if count == 1:
            continue
        if group.parity:
            exposed = count if count > group.parity else 0
            reason = f"and only {group.parity} may be lost"
        else:  # a node is exposed if its data and all its copies are in this domain
            holders = [{domains[(i + j) % n] for j in range(group.copies + 1)} for i in range(n)]
            exposed = holders.count({domain})
            reason = "so some copies share its domain"
        if exposed:
            nodes = [each.node for each in group.members if _domain_key(each) == domain]
            yield (
                f"losing domain {domain[0]} ({', '.join(nodes)}) would lose the data of "
                f"{exposed} node(s): {count} nodes of a group of {n} are in it, {reason}"
            )
