"""Rings of ranks that hold the same data, and the copies or parity that the ranks make.

Under data parallelism, each rank of a ring already holds the data that the others are about to
stage, as in the sharding groups of REFT (arXiv 2310.12670). So each rank makes copies or parity for
the others from its replica, without the network. The replica lacks the headers, objects and
checksums of the others' files. The agent fetches the blocks with these parts, and compares the
checksums of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt

from shardwise.kernel.decoding import prepare_decoding
from shardwise.kernel.engine.group import Group
from shardwise.kernel.engine.planning import PlannedSave
from shardwise.kernel.engine.rounds import Round, unite
from shardwise.kernel.engine.write_file import FileSource
from shardwise.kernel.manifest.checksums import BLOCK, block_checksums
from shardwise.kernel.manifest.manifest import FileEntry, data_file
from shardwise.kernel.store.store import Buffer
from shardwise.parts.memory.options import Memory
from shardwise.parts.memory.pool import rank_owner
from shardwise.parts.memory.records import RingFile
from shardwise.parts.memory.redundancy.parity import encode_parity, parity_stripe
from shardwise.parts.memory.redundancy.placement import (
    Member,
    ProtectionGroup,
    files_to_copy,
    form_groups,
    make_ring_group,
    parity_file_name,
    parity_file_size,
)
from shardwise.parts.memory.trainer.agents import Membership
from shardwise.parts.memory.trainer.copying import Fill, copy_range

_PLACEHOLDER_SAVE_ID = "0" * 16
_Held = tuple[bytes, tuple[int, int, int, int] | None]
"""The holding key of a rank; and the sizes in the entry of its file, or None if it writes none."""


TakeSlot = Callable[[str, int], Buffer]
"""Returns the memory of a free slot for the file of a snapshot with this name and size."""
AddFile = Callable[[RingFile], None]
"""Records a copy or parity that a rank has made, and completes its file."""


@dataclass(frozen=True, slots=True)
class Ring:
    """Ranks that hold the same data, in ring order.

    Attributes:
        files: the file of each rank.
        group: the ring as a group of nodes, with one of these files each.
        index: the index of this rank in `files` and in `group`.
        save_id: the id of the save.
    """

    files: tuple[FileEntry, ...]
    group: ProtectionGroup
    index: int
    save_id: str

    @property
    def files_to_copy(self) -> list[FileEntry]:
        """The files that this rank copies, in the order of the agent's requests."""
        by_name = {each.name: each for each in self.files}
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


@prepare_decoding
class _Changes(msgspec.Struct, array_like=True):
    """What some ranks tell the others before a snapshot.

    Attributes:
        versions: how often the tables of these ranks were changed.
        held: by rank, what ranks hold now, if their tables say otherwise.
    """

    versions: set[int]
    held: dict[int, _Held]


def _combine_changes(messages: Sequence[_Changes]) -> _Changes:
    versions = set().union(*(each.versions for each in messages))
    return _Changes(versions, unite([each.held for each in messages]))


class HeldTable:
    """What each rank holds, as all ranks knew it at the last snapshot; and the rings.

    The ranks of a long training hold the same from snapshot to snapshot, and then tell each other
    nothing.
    """

    def __init__(self) -> None:
        self._version = 0
        self._held: dict[int, _Held] = {}
        self._rings: list[list[int]] = []
        self._ring_of: dict[int, list[int]] = {}
        self._domain_of: dict[str, str] = {}
        self._number_of: dict[int, int] = {}  # by the first rank of a ring with files

    def update(self, find_own: Callable[[], _Held], group: Group) -> bool:
        """Learn what other ranks hold now. All ranks call this together.

        Args:
            find_own: returns what this rank holds.

        Returns:
            Whether ranks hold something else than at the last snapshot.
        """
        with Round(group, "forming rings") as all_ranks:
            own = find_own()
            changed = {} if self._held.get(group.rank) == own else {group.rank: own}
            message = _Changes({self._version}, changed)
            found = all_ranks.all_reduce(message, _Changes, _combine_changes)
        if len(found.versions) > 1:  # a rank has missed a change, because a round failed there
            self._held = {}
            with Round(group, "forming rings anew") as all_ranks:
                message = _Changes(found.versions, {group.rank: own})
                found = all_ranks.all_reduce(message, _Changes, _combine_changes)
        self._version = max(found.versions) + 1
        keys = {rank: key for rank, (key, _) in found.held.items()}
        is_changed = any(self._held.get(rank, (b"", None))[0] != key for rank, key in keys.items())
        self._held |= found.held
        if found.held:
            self._number_of = {}
        return is_changed

    def form(self, options: Memory, membership: Membership, *, is_changed: bool) -> None:
        """Form the rings again if ranks hold something else, or nodes are in other domains."""
        domain_of = {info.node: info.domain for info in membership.nodes}
        if not is_changed and domain_of == self._domain_of:
            return
        self._domain_of = domain_of
        self._rings = form_rings(
            [self._held[rank][0] for rank in range(len(self._held))],
            membership.node_of,
            domain_of,
            copies=options.copies,
            parity=options.parity,
            group_size=options.group,
        )
        self._ring_of = {rank: ring for ring in self._rings for rank in ring}
        self._number_of = {}

    def rings_with_files(self) -> list[list[int]]:
        """Return the rings in which each rank writes a file."""
        return [ring for ring in self._rings if self._write_files(ring)]

    def ring_of(
        self, rank: int, save_id: str, node_of: Sequence[str], options: Memory
    ) -> Ring | None:
        """Return the ring of a rank, if each of its ranks writes a file."""
        ranks = self._ring_of.get(rank, [])
        if not ranks or not self._write_files(ranks):
            return None
        files = tuple(
            FileEntry(data_file(each, save_id), each, *sizes, 0)
            for each in ranks
            if (sizes := self._held[each][1]) is not None
        )
        nodes = [node_of[each] for each in ranks]
        members = [
            (node, self._domain_of[node], file.name, file.size)
            for node, file in zip(nodes, files, strict=True)
        ]
        group = make_ring_group(members, copies=options.copies, parity=options.parity)
        if group.parity:  # the names of its files contain that of the group
            self._number_of = self._number_of or {
                ring[0]: number for number, ring in enumerate(self.rings_with_files())
            }
            group = replace(group, name=str(self._number_of[ranks[0]]))
        return Ring(files, group, ranks.index(rank), save_id)

    def _write_files(self, ranks: Sequence[int]) -> bool:
        return all(self._held[rank][1] is not None for rank in ranks)


def join_ring(
    planned: PlannedSave,
    options: Memory,
    membership: Membership,
    group: Group,
    table: HeldTable,
) -> tuple[FileSource | None, Ring | None, list[list[str]]]:
    """Form the rings of a snapshot. All ranks call this together.

    The data of ranks may change from snapshot to snapshot.

    Returns:
        Three values: the source of this rank's file, or None; the ring of this rank, or None; and,
        on rank 0, the names of the files of each ring.
    """
    is_protected = options.copies or options.parity
    if not is_protected or len(membership.nodes) == 1:
        return planned.source(), None, []

    source: FileSource | None = None

    def find_own() -> _Held:
        nonlocal source
        source = planned.source()
        if source is None:
            return planned.holding_key, None
        entry = source.entry
        sizes = entry.size, entry.data_at, entry.objects_at, entry.checksums_at
        return planned.holding_key, sizes

    is_changed = table.update(find_own, group)
    table.form(options, membership, is_changed=is_changed)
    own = table.ring_of(group.rank, planned.save_id, membership.node_of, options)
    if group.rank != 0:
        return source, own, []
    names = [
        [data_file(rank, planned.save_id) for rank in ranks] for ranks in table.rings_with_files()
    ]
    return source, own, names


def bytes_to_read(ring: Ring) -> int:
    """Return the largest number of bytes read from replicas to protect the others of a ring."""
    group = ring.group
    ranges = [range_in_replica(file) for file in ring.files_to_copy]
    for_parity = group.parity * (len(group.members) - group.parity) * group.chunk
    return sum(high - low for low, high in ranges) + for_parity


def protect_ring(
    ring: Ring,
    fill_of: Callable[[FileEntry], Fill],
    take_slot: TakeSlot,
    add: AddFile,
    pool: ThreadPoolExecutor,
    threads: int,
) -> None:
    """Make the copies or parity that a rank's node stores for the others of a ring.

    Args:
        ring: the ring.
        fill_of: returns a function that copies ranges of another rank's file from this rank's
            replica, by offsets in the file.
        take_slot, add: see `TakeSlot` and `AddFile`.
        pool: the thread pool that copies.
        threads: the number of its threads.

    Raises:
        StoreError: there is not enough memory.
    """
    if ring.group.parity:
        _make_parity(ring, fill_of, take_slot, add, threads)
    for number, file in enumerate(ring.files_to_copy):
        name = _file_name(ring, number)
        out = take_slot(name, file.size)
        low, high = range_in_replica(file)
        copy_range(fill_of(file), low, high, out, pool)
        add(RingFile(name, file.name, {file.name: (low, high)}))


def _make_parity(
    ring: Ring,
    fill_of: Callable[[FileEntry], Fill],
    take_slot: TakeSlot,
    add: AddFile,
    threads: int,
) -> None:
    group, index = ring.group, ring.index
    own = ring.files[index]
    readers = {file.name: _ReplicaReader(file, fill_of(file)) for file in ring.files if file != own}

    def read_range(_: str, file: str, offset: int, out: Buffer) -> Buffer:
        readers[file].read(offset, out)
        return out

    for number in range(group.parity):
        name = _file_name(ring, number)
        slot = take_slot(name, parity_file_size(group.chunk))

        def write(low: int, section: Buffer, out: Buffer = slot) -> None:
            out[low : low + len(section)] = section

        encode_parity(group, index, number, read_range, write, threads=threads)
        ranges = {}
        checksums = {}
        for f, member in enumerate(parity_stripe(group, index, number).data):
            file = ring.files[member].name
            reader = readers[file]
            low, high = reader.available_part(f * group.chunk, (f + 1) * group.chunk)
            ranges[file] = low, high
            checksums[file] = reader.checksums[low // BLOCK : high // BLOCK].tobytes()
        final = parity_file_name(ring.save_id, group, number)
        add(RingFile(name, final, ranges, checksums))


def _file_name(ring: Ring, number: int) -> str:
    """Return the name of a file of this rank until the agent renames it."""
    return f"{rank_owner(ring.files[ring.index].rank)}.made-{number}.bin"


class _ReplicaReader:
    """Reads another rank's file from this rank's replica. Bytes without tensor data are zeros.

    Attributes:
        checksums: the checksum of each block that was read.
    """

    def __init__(self, file: FileEntry, fill: Fill) -> None:
        self._available = range_in_replica(file)
        self._fill = fill
        self.checksums: npt.NDArray[np.uint32] = np.zeros(self._available[1] // BLOCK, "<u4")

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
