"""Rings of ranks that hold the same data, and the copies or parity that the ranks make.

Under data parallelism, each rank of a ring already holds the data that the others are about to
stage, as in the sharding groups of REFT (arXiv 2310.12670). So each rank makes copies or parity for
the others from its replica, without the network. The replica lacks the headers, objects and
checksums of the others' files. The agent fetches the blocks with these parts, and compares the
checksums of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.engine.group import Group
from shardwise.engine.planning import PlannedSave
from shardwise.engine.rounds import Round
from shardwise.engine.write_file import FileSource
from shardwise.manifest.checksums import BLOCK, block_checksums, block_count
from shardwise.manifest.manifest import FileEntry
from shardwise.memory import records
from shardwise.memory.files import write_record
from shardwise.memory.home import SnapshotDirectory
from shardwise.memory.options import Memory
from shardwise.memory.records import RingFile
from shardwise.memory.redundancy.parity import encode_parity, parity_stripe
from shardwise.memory.redundancy.placement import (
    Member,
    ProtectionGroup,
    files_to_copy,
    form_groups,
    make_ring_group,
    parity_file_size,
)
from shardwise.memory.trainer.agents import Membership
from shardwise.memory.trainer.copying import Fill, copy_range
from shardwise.memory.trainer.slots import Slot
from shardwise.store.store import Buffer

_PLACEHOLDER_SAVE_ID = "0" * 16


@dataclass(frozen=True, slots=True)
class RingMember:
    """A rank of a ring: its node, failure domain and file."""

    rank: int
    node: str
    domain: str
    file: FileEntry


@dataclass(frozen=True, slots=True)
class Ring:
    """Ranks that hold the same data, in ring order.

    Attributes:
        members: the ranks.
        index: the index of this rank in `members`.
        copies, parity: how the ranks protect each other, as in `Memory`.
    """

    members: tuple[RingMember, ...]
    index: int
    copies: int
    parity: int

    @property
    def own_member(self) -> RingMember:
        """This rank."""
        return self.members[self.index]

    @property
    def others(self) -> list[RingMember]:
        """The other ranks."""
        return [member for member in self.members if member != self.own_member]

    @property
    def group(self) -> ProtectionGroup:
        """The ring as a group of nodes with one file each."""
        files = [(each.node, each.domain, each.file.name, each.file.size) for each in self.members]
        return make_ring_group(files, copies=self.copies, parity=self.parity)

    def members_to_copy(self) -> list[RingMember]:
        """Return the ranks whose files this rank copies, in the order of the agent's requests."""
        by_name = {each.file.name: each for each in self.members}
        return [by_name[name] for _, name, _ in files_to_copy(self.group, self.index)]


def form_rings(
    fingerprints: Sequence[bytes],
    node_of: Sequence[str],
    domain_of: Mapping[str, str],
    *,
    copies: int,
    parity: int,
    group_size: int,
) -> list[list[int]]:
    """Return the ranks of each ring.

    Args:
        fingerprints: for each rank, a fingerprint that is equal if ranks hold the same data.
        node_of: the node of each rank.
        domain_of: the failure domain of each node.
        copies, parity, group_size: as for `placement.form_groups`.
    """
    classes: dict[bytes, dict[str, list[int]]] = {}
    for rank, (fingerprint, node) in enumerate(zip(fingerprints, node_of, strict=True)):
        classes.setdefault(fingerprint, {}).setdefault(node, []).append(rank)
    rings = []
    for by_node in classes.values():
        for column in range(max(map(len, by_node.values()))):
            rank_of = {
                node: ranks[column] for node, ranks in by_node.items() if len(ranks) > column
            }
            members = [Member(node, domain_of[node], ()) for node in rank_of]
            protection = form_groups(
                members, _PLACEHOLDER_SAVE_ID, copies=copies, parity=parity, group_size=group_size
            )
            for group in protection.groups:
                ring = [rank_of[member.node] for member in group.members]
                if len(ring) > 1:
                    rings.append(ring)
    return rings


def range_in_replica(file: FileEntry) -> tuple[int, int]:
    """Return the byte range of a file that a replica provides: whole blocks of tensor data."""
    low = -(-file.data_at // BLOCK) * BLOCK
    high = file.objects_at // BLOCK * BLOCK
    return low, max(low, high)


class Rings:
    """The rings of a run, formed anew for each snapshot, because the data of ranks may change.

    Args:
        options: the user's options.
        membership: the nodes of the run.
        group: the ranks.

    Attributes:
        files: the names of the files of each ring of the newest snapshot.
    """

    def __init__(self, options: Memory, membership: Membership, group: Group) -> None:
        self._options = options
        self._membership = membership
        self._group = group
        self.files: list[list[str]] = []

    def join(self, planned: PlannedSave) -> tuple[FileSource | None, Ring | None]:
        """Return the source of this rank's file and the ring of this rank, or None for each.

        All ranks call this together.
        """
        if not self._are_needed():
            return planned.source(), None

        with Round(self._group, "forming rings") as all_ranks:
            source = planned.source()
            entry = None if source is None else source.entry
            held = all_ranks.gather((planned.holding_key, entry), tuple[bytes, FileEntry | None])
        options, node_of = self._options, self._membership.node_of
        domain_of = {info.node: info.domain for info in self._membership.nodes}
        rings = form_rings(
            [fingerprint for fingerprint, _ in held],
            node_of,
            domain_of,
            copies=options.copies,
            parity=options.parity,
            group_size=options.group,
        )
        own: Ring | None = None
        self.files = []
        for ranks in rings:
            members = [
                RingMember(rank, node_of[rank], domain_of[node_of[rank]], file)
                for rank in ranks
                if (file := held[rank][1]) is not None
            ]
            if len(members) < len(ranks):  # a rank writes no file
                continue
            self.files.append([member.file.name for member in members])
            if self._group.rank in ranks:
                index = ranks.index(self._group.rank)
                own = Ring(tuple(members), index, options.copies, options.parity)
        return source, own

    def _are_needed(self) -> bool:
        is_protected = self._options.copies or self._options.parity
        return bool(is_protected) and len(set(self._membership.node_of)) > 1


def bytes_to_read(ring: Ring) -> int:
    """Return the largest number of bytes read from replicas to protect the others of a ring."""
    group = ring.group
    ranges = [range_in_replica(member.file) for member in ring.members_to_copy()]
    for_parity = group.parity * (len(group.members) - group.parity) * group.chunk
    return sum(high - low for low, high in ranges) + for_parity


@dataclass(frozen=True, slots=True)
class RingProtection:
    """Makes the copies or parity that a rank's node stores for the others of a ring.

    Attributes:
        ring: the ring.
        data: for each other rank, a function that copies byte ranges of the data section of its
            file. Offsets count from the start of this section.
        take_slot: returns a free slot of the given size, but none of the given names.
        place: the snapshot on this node.
        pool: the thread pool that copies.
        threads: the number of its threads.
    """

    ring: Ring
    data: Mapping[int, Fill]
    take_slot: Callable[[int, Collection[str]], Slot]
    place: SnapshotDirectory
    pool: ThreadPoolExecutor
    threads: int

    def make(self) -> None:
        """Make the files, and write a record of each.

        Raises:
            StoreError: there is not enough memory.
        """
        group = self.ring.group
        if group.parity:
            self._make_parity(group)
        for number, owner in enumerate(self.ring.members_to_copy()):
            slot = self.take_slot(owner.file.size, ())
            low, high = range_in_replica(owner.file)
            copy_range(self._fill_of(owner), low, high, slot.buffer, self.pool)
            self._add_file(number, slot, {owner.file.name: (low, high)}, {})

    def _fill_of(self, owner: RingMember) -> Fill:
        """Return a function that copies ranges of a rank's file, by offsets in the file."""
        fill, start = self.data[owner.rank], owner.file.data_at
        return lambda low, high, out: fill(low - start, high - start, out)

    def _make_parity(self, group: ProtectionGroup) -> None:
        index = self.ring.index
        readers = {
            each.file.name: _ReplicaReader(each, self._fill_of(each)) for each in self.ring.others
        }

        def read_range(_: str, file: str, offset: int, out: Buffer) -> Buffer:
            readers[file].read(offset, out)
            return out

        taken: list[str] = []
        for number in range(group.parity):
            slot = self.take_slot(parity_file_size(group.chunk), taken)
            taken.append(slot.name)

            def write(low: int, section: Buffer, out: Buffer = slot.buffer) -> None:
                out[low : low + len(section)] = section

            encode_parity(group, index, number, read_range, write, threads=self.threads)
            ranges = {}
            checksums = {}
            for f, member in enumerate(parity_stripe(group, index, number).data):
                reader = readers[self.ring.members[member].file.name]
                low, high = reader.available_part(f * group.chunk, (f + 1) * group.chunk)
                ranges[reader.name] = low, high
                checksums[reader.name] = reader.checksums[low // BLOCK : high // BLOCK].tobytes()
            self._add_file(number, slot, ranges, checksums)

    def _add_file(
        self,
        number: int,
        slot: Slot,
        ranges: dict[str, tuple[int, int]],
        checksums: dict[str, bytes],
    ) -> None:
        """Write the record of a file, and move the file from its slot to the snapshot.

        Args:
            number: the number of the file among the files that this rank makes.
            slot: the filled slot.
            ranges: the byte range of each data file that is included.
            checksums: for parity, the checksums of the included blocks of each data file.
        """
        record = records.file_record(self.ring.own_member.file.name, f"kept-{number}")
        file = records.ring_file_name(record)
        ring_file = RingFile(file, slot.name, ranges, checksums)
        write_record(self.place.path / record, ring_file)  # the record comes first, as in `Staging`
        slot.path.rename(self.place.path / file)


class _ReplicaReader:
    """Reads another rank's file from this rank's replica. Bytes without tensor data are zeros.

    Attributes:
        name: the name of the file.
        checksums: the checksum of each block that was read.
    """

    def __init__(self, member: RingMember, fill: Fill) -> None:
        self.name = member.file.name
        self._available = range_in_replica(member.file)
        self._fill = fill
        self.checksums: npt.NDArray[np.uint32] = np.zeros(block_count(self._available[1]), "<u4")

    def available_part(self, low: int, high: int) -> tuple[int, int]:
        """Return the part of a byte range that the replica provides."""
        first = max(low, self._available[0])
        return first, max(first, min(high, self._available[1]))

    def read(self, offset: int, out: Buffer) -> None:
        """Fill `out` from an offset of the file, and record the checksums of the blocks read."""
        low, high = self.available_part(offset, offset + len(out))
        out[: max(0, low - offset)] = 0
        out[max(0, high - offset) :] = 0
        if low < high:
            part = out[low - offset : high - offset]
            self._fill(low, high, part)
            self.checksums[low // BLOCK : high // BLOCK] = block_checksums(part)
