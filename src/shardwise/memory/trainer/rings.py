"""Rings of ranks that hold the same data, and the copies or parity that they make of it.

Under data parallelism, each rank of a ring already holds what the others are about to stage, as in
the sharding groups of REFT (arXiv 2310.12670). So it makes copies or parity for the others from its
own replica, without the network. The headers, objects and checksums of the others' files cannot be
read here. Their blocks are left to the agent, which also compares the checksums.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from shardwise.engine.exchange import exchange_keeping
from shardwise.engine.files import FileSource
from shardwise.engine.group import Group as RankGroup
from shardwise.engine.planning import PlannedSave
from shardwise.manifest.checksums import BLOCK, block_checksums, block_count
from shardwise.manifest.manifest import FileEntry
from shardwise.memory import records
from shardwise.memory.files import write_record
from shardwise.memory.home import Place
from shardwise.memory.options import Memory
from shardwise.memory.records import RingFile
from shardwise.memory.redundancy.parity import PIECE, encode_pieces, owned
from shardwise.memory.redundancy.placement import (
    Group,
    Member,
    copied_files,
    form_groups,
    group_of_files,
    parity_file_size,
)
from shardwise.memory.trainer.agents import Membership
from shardwise.memory.trainer.copying import Fill, stage
from shardwise.memory.trainer.slots import Slot
from shardwise.store.store import Buffer

_ANY_SAVE = "0" * 16


class Holder(msgspec.Struct, array_like=True, frozen=True):
    """A rank of a ring: its node, failure domain and file."""

    rank: int
    node: str
    domain: str
    file: FileEntry


@dataclass(frozen=True, slots=True)
class Ring:
    """Ranks that hold the same data, in ring order; `at` is the position of this rank."""

    holders: tuple[Holder, ...]
    at: int
    copies: int
    parity: int

    @property
    def group(self) -> Group:
        """The ring as a group of nodes with one file each."""
        files = [(each.node, each.domain, each.file.name, each.file.size) for each in self.holders]
        return group_of_files(files, copies=self.copies, parity=self.parity)

    def copied(self) -> list[Holder]:
        """Return the ranks whose files this rank copies, in the order of the agent's numbers."""
        by_name = {each.file.name: each for each in self.holders}
        return [by_name[name] for _, name, _ in copied_files(self.group, self.at)]


def rings_of(
    contents: Sequence[bytes],
    node_of: Sequence[str],
    domain_of: Mapping[str, str],
    *,
    copies: int,
    parity: int,
    group_size: int,
) -> list[list[int]]:
    """Form rings of ranks.

    Args:
        contents: for each rank, a fingerprint that is equal if ranks hold the same data.
        node_of: the node of each rank.
        domain_of: the failure domain of each node.
        copies, parity, group_size: as for `placement.form_groups`.
    """
    classes: dict[bytes, dict[str, list[int]]] = {}
    for rank, (key, node) in enumerate(zip(contents, node_of, strict=True)):
        classes.setdefault(key, {}).setdefault(node, []).append(rank)
    rings = []
    for by_node in classes.values():
        for column in range(max(map(len, by_node.values()))):
            rank_of = {node: own[column] for node, own in by_node.items() if len(own) > column}
            members = [Member(node, domain_of[node], ()) for node in rank_of]
            placed = form_groups(
                members, _ANY_SAVE, copies=copies, parity=parity, group_size=group_size
            )
            found = [[rank_of[each.node] for each in group.members] for group in placed.groups]
            rings += [ring for ring in found if len(ring) > 1]
    return rings


def peers_of(rings: Sequence[Sequence[int]], world: int, *, copies: int) -> list[list[int]]:
    """Return for each rank the ranks of its ring whose files it copies or makes parity of."""
    peers: list[list[int]] = [[] for _ in range(world)]
    for ring in rings:
        n = len(ring)
        for at, rank in enumerate(ring):
            distance = range(1, min(copies, n - 1) + 1 if copies else n)
            peers[rank] = [ring[(at - i) % n] for i in distance]
    return peers


def known_range(file: FileEntry) -> tuple[int, int]:
    """Return the range of a file that a replica provides: whole blocks of tensor data."""
    low = -(-file.data_at // BLOCK) * BLOCK
    high = file.objects_at // BLOCK * BLOCK
    return low, max(low, high)


class Rings:
    """The rings of a run. They are formed for each snapshot, because what ranks hold may change.

    Attributes:
        files: on rank 0, the names of the files of each ring of the newest snapshot.
    """

    def __init__(self, options: Memory, membership: Membership, group: RankGroup) -> None:
        self._options = options
        self._membership = membership
        self._group = group
        self._formed: list[list[int]] = []
        self.files: list[list[str]] = []

    def form(self, contents: Sequence[bytes]) -> list[list[int]]:
        """Form the rings on rank 0, and return for each rank the ranks whose shares it needs."""
        options = self._options
        if not self._are_wanted():
            return [[] for _ in contents]
        self._formed = rings_of(
            contents,
            self._membership.node_of,
            {info.node: info.domain for info in self._membership.nodes},
            copies=options.copies,
            parity=options.parity,
            group_size=options.group,
        )
        return peers_of(self._formed, self._group.size, copies=options.copies)

    def join(self, planned: PlannedSave) -> tuple[FileSource | None, Ring | None]:
        """Return this rank's content and ring, if any. All ranks call this together."""
        if not self._are_wanted():
            return planned.source(), None

        def speak() -> tuple[FileSource | None, bytes]:
            source = planned.source()
            entry = b"" if source is None else msgspec.msgpack.encode(planned.entry(source))
            return source, entry

        source, reply = exchange_keeping(
            self._group, "forming rings", speak, lambda _, said: self._introduce(said)
        )
        if not reply:
            return source, None
        holders = msgspec.msgpack.decode(reply, type=tuple[Holder, ...])
        at = next(i for i, each in enumerate(holders) if each.rank == self._group.rank)
        return source, Ring(holders, at, self._options.copies, self._options.parity)

    def _introduce(self, said: list[bytes]) -> list[bytes]:
        """Return each rank's ring, encoded. Rings in which a rank writes no file are left out."""
        domain_of = {info.node: info.domain for info in self._membership.nodes}
        replies = [b""] * len(said)
        self.files = []
        for ranks in self._formed:
            if not all(said[rank] for rank in ranks):
                continue
            holders = []
            for rank in ranks:
                node = self._membership.node_of[rank]
                file = msgspec.msgpack.decode(said[rank], type=FileEntry)
                holders.append(Holder(rank, node, domain_of[node], file))
            self.files.append([each.file.name for each in holders])
            encoded = msgspec.msgpack.encode(holders)
            for rank in ranks:
                replies[rank] = encoded
        return replies

    def _are_wanted(self) -> bool:
        wanted = self._options.copies or self._options.parity
        return bool(wanted) and len(set(self._membership.node_of)) > 1


def bytes_read(ring: Ring) -> int:
    """Return the largest number of bytes read from replicas to protect the others of a ring."""
    group = ring.group
    ranges = [known_range(each.file) for each in ring.copied()]
    of_parity = group.parity * (len(group.members) - group.parity) * group.chunk
    return sum(high - low for low, high in ranges) + of_parity


@dataclass(frozen=True, slots=True)
class Protecting:
    """Makes the copies or parity that a rank's node stores for the others of a ring.

    Attributes:
        ring: the ring.
        data: for each other rank, copies from the data section of its file, which starts at 0.
        take: returns a free slot of a size, other than those with these names.
        place: the snapshot on this node.
        pool: the thread pool that copies.
        threads: the number of its threads.
    """

    ring: Ring
    data: Mapping[int, Fill]
    take: Callable[[int, Collection[str]], Slot]
    place: Place
    pool: ThreadPoolExecutor
    threads: int

    def run(self) -> None:
        """Make the files, and write a record of each.

        Raises:
            StoreError: there is not enough memory.
        """
        group = self.ring.group
        if group.parity:
            self._make_parity(group)
        for number, owner in enumerate(self.ring.copied()):
            slot = self.take(owner.file.size, ())
            low, high = known_range(owner.file)
            stage(self._fill(owner), low, high, slot.buffer, self.pool)
            self._finish(number, slot, None, {owner.file.name: (low, high)}, {})

    def _fill(self, owner: Holder) -> Fill:
        fill, base = self.data[owner.rank], owner.file.data_at
        return lambda low, high, out: fill(low - base, high - base, out)

    def _make_parity(self, group: Group) -> None:
        slots: list[Slot] = []
        for _ in range(group.parity):
            taken = [slot.name for slot in slots]
            slots.append(self.take(parity_file_size(group.chunk), taken))
        reading = {each.file.name: _Reading(each, self._fill(each)) for each in self._others()}

        def read(_: str, file: str, offset: int, out: Buffer) -> Buffer:
            reading[file].read(offset, out)
            return out

        def take(q: int, low: int, block: Buffer) -> None:
            slots[q].buffer[low : low + len(block)] = block

        pieces = ((q, low) for q in range(group.parity) for low in range(0, group.chunk, PIECE))
        encode_pieces(group, self.ring.at, pieces, read, take, threads=self.threads)
        for q, (slot, stripe) in enumerate(zip(slots, owned(group, self.ring.at), strict=True)):
            of = {}
            sums = {}
            for f, position in enumerate(stripe.data):
                each = reading[self.ring.holders[position].file.name]
                low, high = each.within(f * group.chunk, (f + 1) * group.chunk)
                of[each.name] = low, high
                sums[each.name] = each.sums[low // BLOCK : high // BLOCK].tobytes()
            self._finish(q, slot, q, of, sums)

    def _others(self) -> list[Holder]:
        mine = self.ring.holders[self.ring.at]
        return [each for each in self.ring.holders if each != mine]

    def _finish(
        self,
        number: int,
        slot: Slot,
        block: int | None,
        of: dict[str, tuple[int, int]],
        sums: dict[str, bytes],
    ) -> None:
        record = records.ring_record(self.ring.holders[self.ring.at].file.name, number)
        file = records.ring_file(record)
        kept = RingFile(self.ring.group, file, slot.name, block, of, sums)
        write_record(self.place.path / record, kept)  # the record comes first, as in `Staging`
        slot.path.rename(self.place.path / file)


class _Reading:
    """Reads a file of which only tensor data is available, and zeros elsewhere."""

    def __init__(self, holder: Holder, fill: Fill) -> None:
        self.name = holder.file.name
        self._known = known_range(holder.file)
        self._fill = fill
        self.sums: npt.NDArray[np.uint32] = np.zeros(block_count(self._known[1]), "<u4")

    def within(self, low: int, high: int) -> tuple[int, int]:
        """Return the part of a range that is available."""
        first = max(low, self._known[0])
        return first, max(first, min(high, self._known[1]))

    def read(self, offset: int, out: Buffer) -> None:
        """Fill `out`, and record the checksums of what is available."""
        low, high = self.within(offset, offset + len(out))
        out[: max(0, low - offset)] = 0
        out[max(0, high - offset) :] = 0
        if low < high:
            part = out[low - offset : high - offset]
            self._fill(low, high, part)
            self.sums[low // BLOCK : high // BLOCK] = block_checksums(part)
