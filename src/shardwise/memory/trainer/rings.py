"""Ranks on different nodes that hold the same, and so can protect each other without the network.

REFT's sharding groups (arXiv 2310.12670): under data parallelism, every node holds already what
the others of its group are about to stage, and makes copies or parity of it from its own replica.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from shardwise.engine.content import Content
from shardwise.engine.exchange import exchange
from shardwise.engine.group import Group as RankGroup
from shardwise.engine.planning import Planned
from shardwise.manifest.checksums import BLOCK
from shardwise.manifest.manifest import FileEntry
from shardwise.memory.node.meeting import Membership
from shardwise.memory.options import Memory
from shardwise.memory.redundancy.placement import Group, Member, copied_files, group_of_files, place

_ANY_SAVE = "0" * 16


class Holder(msgspec.Struct, array_like=True, frozen=True):
    """A rank of a ring: its node, what fails together with that, and its file."""

    rank: int
    node: str
    domain: str
    file: FileEntry


@dataclass(frozen=True, slots=True)
class Ring:
    """Ranks that hold the same, in the order in which they protect each other; `at` is this one."""

    holders: tuple[Holder, ...]
    at: int
    copies: int
    parity: int

    @property
    def group(self) -> Group:
        """The same, as a group of nodes with one file each."""
        files = [(each.node, each.domain, each.file.name, each.file.size) for each in self.holders]
        return group_of_files(files, copies=self.copies, parity=self.parity)

    def copied(self) -> list[Holder]:
        """Those whose files this rank copies, in the order in which its agent numbers them."""
        by_name = {each.file.name: each for each in self.holders}
        return [by_name[name] for _, name, _ in copied_files(self.group, self.at)]


def rings_of(
    alike: Sequence[bytes],
    node_of: Sequence[str],
    domain_of: Mapping[str, str],
    *,
    copies: int,
    parity: int,
    group_size: int,
) -> list[list[int]]:
    """Form rings of ranks.

    Args:
        alike: for each rank, what is equal where ranks hold the same.
        node_of: the node of each rank.
        domain_of: what fails together with a node.
        copies, parity, group_size: as for `placement.place`.
    """
    classes: dict[bytes, dict[str, list[int]]] = {}
    for rank, (key, node) in enumerate(zip(alike, node_of, strict=True)):
        classes.setdefault(key, {}).setdefault(node, []).append(rank)
    rings = []
    for by_node in classes.values():
        for column in range(max(map(len, by_node.values()))):
            rank_of = {node: own[column] for node, own in by_node.items() if len(own) > column}
            members = [Member(node, domain_of[node], ()) for node in rank_of]
            placed = place(members, _ANY_SAVE, copies=copies, parity=parity, group_size=group_size)
            found = [[rank_of[each.node] for each in group.members] for group in placed.groups]
            rings += [ring for ring in found if len(ring) > 1]
    return rings


def peers_of(rings: Sequence[Sequence[int]], world: int, *, copies: int) -> list[list[int]]:
    """For each rank, those of its ring whose files it copies, or makes parity of."""
    peers: list[list[int]] = [[] for _ in range(world)]
    for ring in rings:
        n = len(ring)
        for at, rank in enumerate(ring):
            distance = range(1, min(copies, n - 1) + 1 if copies else n)
            peers[rank] = [ring[(at - i) % n] for i in distance]
    return peers


def known_range(file: FileEntry) -> tuple[int, int]:
    """The bytes of a file that are known from a replica: those of tensors, in whole blocks."""
    low = -(-file.data_at // BLOCK) * BLOCK
    high = file.objects_at // BLOCK * BLOCK
    return low, max(low, high)


class Rings:
    """The rings of a run, formed anew for each snapshot: what ranks hold may change.

    Attributes:
        files: on rank 0, the names of the files of each ring of the newest snapshot.
    """

    def __init__(self, options: Memory, meeting: Membership, group: RankGroup) -> None:
        self._options = options
        self._meeting = meeting
        self._group = group
        self._formed: list[list[int]] = []
        self.files: list[list[str]] = []

    def form(self, alike: Sequence[bytes]) -> list[list[int]]:
        """On rank 0, form rings of ranks that hold the same; whose shares each rank needs."""
        options = self._options
        if not self._are_wanted():
            return [[] for _ in alike]
        self._formed = rings_of(
            alike,
            self._meeting.node_of,
            {info.node: info.domain for info in self._meeting.nodes},
            copies=options.copies,
            parity=options.parity,
            group_size=options.group,
        )
        return peers_of(self._formed, self._group.size, copies=options.copies)

    def join(self, planned: Planned) -> tuple[Content | None, Ring | None]:
        """What this rank stages of a plan, and its ring, if it is in one. All ranks together."""
        if not self._are_wanted():
            return planned.content(), None
        contents: list[Content | None] = []

        def speak() -> bytes:
            contents.append(content := planned.content())
            return b"" if content is None else msgspec.msgpack.encode(planned.entry(content))

        reply = exchange(self._group, "forming rings", speak, self._introduce)
        if not reply:
            return contents[0], None
        holders = msgspec.msgpack.decode(reply, type=tuple[Holder, ...])
        at = next(i for i, each in enumerate(holders) if each.rank == self._group.rank)
        return contents[0], Ring(holders, at, self._options.copies, self._options.parity)

    def _introduce(self, said: list[bytes]) -> list[bytes]:
        """Tell the ranks of each ring of each other's files; a ring needs a file of each."""
        domain_of = {info.node: info.domain for info in self._meeting.nodes}
        told = [b""] * len(said)
        self.files = []
        for ranks in self._formed:
            if not all(said[rank] for rank in ranks):
                continue
            holders = []
            for rank in ranks:
                node = self._meeting.node_of[rank]
                file = msgspec.msgpack.decode(said[rank], type=FileEntry)
                holders.append(Holder(rank, node, domain_of[node], file))
            self.files.append([each.file.name for each in holders])
            encoded = msgspec.msgpack.encode(holders)
            for rank in ranks:
                told[rank] = encoded
        return told

    def _are_wanted(self) -> bool:
        asked = self._options.copies or self._options.parity
        return bool(asked) and len(set(self._meeting.node_of)) > 1
