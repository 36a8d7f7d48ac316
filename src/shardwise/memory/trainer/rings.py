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
from shardwise.manifest.checksums import BLOCK, block_checksums
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
class Ring:
    """Ranks that hold the same data, in ring order.

    Attributes:
        files: the file of each rank.
        group: the ring as a group of nodes, with one of these files each.
        index: the index of this rank in `files` and in `group`.
    """

    files: tuple[FileEntry, ...]
    group: ProtectionGroup
    index: int

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


def join_ring(
    planned: PlannedSave, options: Memory, membership: Membership, group: Group
) -> tuple[FileSource | None, Ring | None, list[list[str]]]:
    """Form the rings of a snapshot. All ranks call this together.

    Rings are formed anew for each snapshot, because the data of ranks may change.

    Returns:
        Three values: the source of this rank's file, or None; the ring of this rank, or None; and
        the names of the files of each ring.
    """
    is_protected = options.copies or options.parity
    if not is_protected or len(set(membership.node_of)) == 1:
        return planned.source(), None, []

    with Round(group, "forming rings") as all_ranks:
        source = planned.source()
        entry = None if source is None else source.entry
        held = all_ranks.all_gather((planned.holding_key, entry), tuple[bytes, FileEntry | None])
    node_of = membership.node_of
    domain_of = {info.node: info.domain for info in membership.nodes}
    own: Ring | None = None
    files_of_rings = []
    for ranks in form_rings(
        [fingerprint for fingerprint, _ in held],
        node_of,
        domain_of,
        copies=options.copies,
        parity=options.parity,
        group_size=options.group,
    ):
        files = [file for rank in ranks if (file := held[rank][1]) is not None]
        if len(files) < len(ranks):  # a rank writes no file
            continue
        files_of_rings.append([file.name for file in files])
        if group.rank in ranks:
            members = [
                (node_of[rank], domain_of[node_of[rank]], file.name, file.size)
                for rank, file in zip(ranks, files, strict=True)
            ]
            nodes = make_ring_group(members, copies=options.copies, parity=options.parity)
            own = Ring(tuple(files), nodes, ranks.index(group.rank))
    return source, own, files_of_rings


def bytes_to_read(ring: Ring) -> int:
    """Return the largest number of bytes read from replicas to protect the others of a ring."""
    group = ring.group
    ranges = [range_in_replica(file) for file in ring.files_to_copy]
    for_parity = group.parity * (len(group.members) - group.parity) * group.chunk
    return sum(high - low for low, high in ranges) + for_parity


def protect_ring(
    ring: Ring,
    fill_of: Callable[[FileEntry], Fill],
    take_slot: Callable[[int, Collection[str]], Slot],
    place: SnapshotDirectory,
    pool: ThreadPoolExecutor,
    threads: int,
) -> None:
    """Make the copies or parity that a rank's node stores for the others of a ring.

    Args:
        ring: the ring.
        fill_of: returns a function that copies ranges of another rank's file from this rank's
            replica, by offsets in the file.
        take_slot: returns a free slot of the given size, but none of the given names.
        place: the snapshot on this node.
        pool: the thread pool that copies.
        threads: the number of its threads.

    Raises:
        StoreError: there is not enough memory.
    """
    if ring.group.parity:
        _make_parity(ring, fill_of, take_slot, place, threads)
    for number, file in enumerate(ring.files_to_copy):
        slot = take_slot(file.size, ())
        low, high = range_in_replica(file)
        copy_range(fill_of(file), low, high, slot.buffer, pool)
        _add_file(ring, place, number, slot, {file.name: (low, high)}, {})


def _make_parity(
    ring: Ring,
    fill_of: Callable[[FileEntry], Fill],
    take_slot: Callable[[int, Collection[str]], Slot],
    place: SnapshotDirectory,
    threads: int,
) -> None:
    group, index = ring.group, ring.index
    own = ring.files[index]
    readers = {file.name: _ReplicaReader(file, fill_of(file)) for file in ring.files if file != own}

    def read_range(_: str, file: str, offset: int, out: Buffer) -> Buffer:
        readers[file].read(offset, out)
        return out

    taken: list[str] = []
    for number in range(group.parity):
        slot = take_slot(parity_file_size(group.chunk), taken)
        taken.append(slot.name)

        def write(low: int, section: Buffer, out: Buffer = slot.buffer) -> None:
            out[low : low + len(section)] = section

        encode_parity(group, index, number, read_range, write, threads=threads)
        ranges = {}
        checksums = {}
        for f, member in enumerate(parity_stripe(group, index, number).data):
            name = ring.files[member].name
            reader = readers[name]
            low, high = reader.available_part(f * group.chunk, (f + 1) * group.chunk)
            ranges[name] = low, high
            checksums[name] = reader.checksums[low // BLOCK : high // BLOCK].tobytes()
        _add_file(ring, place, number, slot, ranges, checksums)


def _add_file(
    ring: Ring,
    place: SnapshotDirectory,
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
    record = records.file_record(ring.files[ring.index].name, f"kept-{number}")
    file = records.ring_file_name(record)
    ring_file = RingFile(file, slot.name, ranges, checksums)
    write_record(place.path / record, ring_file)  # the record comes first, as in `Staging`
    slot.path.rename(place.path / file)


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
