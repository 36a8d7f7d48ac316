"""Makes the copies or parity that a node stores for other nodes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from zlib import crc32

import numpy as np

from shardwise.kernel.deadline import Deadline
from shardwise.kernel.errors import CorruptionError
from shardwise.kernel.manifest.checksums import BLOCK, BlockTable
from shardwise.kernel.manifest.manifest import FileEntry
from shardwise.kernel.store.store import Buffer
from shardwise.parts.memory import records
from shardwise.parts.memory.files import read_record
from shardwise.parts.memory.home import SnapshotDirectory
from shardwise.parts.memory.pool import AGENT, Pool, allocate
from shardwise.parts.memory.rank_liveness import is_rank_alive
from shardwise.parts.memory.records import AgentInfo, PendingManifest, RankPart, RingFile
from shardwise.parts.memory.redundancy.parity import add_checksums, encode_parity, parity_stripe
from shardwise.parts.memory.redundancy.placement import (
    Member,
    ProtectionGroup,
    files_to_copy,
    form_groups,
    groups_of_node,
    parity_file_name,
    parity_file_size,
    plan_protection,
)
from shardwise.parts.memory.remote.snapshot_nodes import Nodes
from shardwise.parts.memory.seal import MappedFiles
from shardwise.parts.memory.times import POLL_PAUSE

CHUNK = 8 << 20
Range = tuple[int, int]
NOTHING: Range = (0, 0)
log = logging.getLogger("shardwise.agent")


def find_protection_gaps(
    nodes: list[AgentInfo], *, copies: int, parity: int, group: int
) -> tuple[str, ...]:
    """Return messages about nodes that cannot be protected as well as requested.

    Args:
        copies, parity, group: the options of `Memory`.
    """
    members = [Member(info.node, info.domain, ()) for info in nodes]
    return form_groups(members, "0" * 16, copies=copies, parity=parity, group_size=group).gaps


def protect_others(
    place: SnapshotDirectory,
    pending: PendingManifest,
    nodes: Nodes,
    node: str,
    mapped_files: MappedFiles,
) -> int:
    """Make the copies and parity that a node stores for others; return their bytes.

    Args:
        pending: the pending manifest of the committed save.
        node: the name of this node.
        mapped_files: the mappings of this node's files.

    Raises:
        StoreError: a node does not answer, and its data is needed.
        CorruptionError: the bytes of a node differ from the bytes that it sealed.
    """
    _, manifest = place.read_manifest()
    protection = plan_protection(pending, manifest.files)
    entries = {entry.name: entry for entry in manifest.files}
    rings = protection.groups[: len(pending.rings)]
    files = _ProtectionFiles(place, pending, rings, nodes, entries, mapped_files)
    return sum(files.make(*each) for each in groups_of_node(protection, node))


class _ProtectionFiles:
    """Makes the copies and parity of one snapshot that this node stores for others.

    The data comes from two sources. In a ring, a rank of this node has put most of the data into
    the file already, from its replica. The agent reads the rest from the other nodes. If the group
    is not a ring, or if the replica differs from what was sealed, the agent reads everything from
    the other nodes.
    """

    def __init__(
        self,
        place: SnapshotDirectory,
        pending: PendingManifest,
        rings: Sequence[ProtectionGroup],
        nodes: Nodes,
        entries: Mapping[str, FileEntry],
        mapped_files: MappedFiles,
    ) -> None:
        self._place = place
        self._save_id = pending.save_id
        self._rings = rings
        self._deadline = Deadline(pending.wait)
        self._nodes = nodes
        self._entries = entries
        self._mappings = mapped_files

    def make(self, group: ProtectionGroup, index: int) -> int:
        """Make the copies and parity of one group; return their bytes.

        Args:
            index: the index of this node in the group.
        """
        copies = files_to_copy(group, index)
        for owner, name, size in copies:
            with self._begin(group, index, name, size) as begun:
                if begun is not None:
                    self._fill_copy(*begun, self._entries[name], owner.node)
        nbytes = parity_file_size(group.chunk)
        for number in range(group.parity):
            name = parity_file_name(self._save_id, group, number)
            with self._begin(group, index, name, nbytes) as begun:
                if begun is not None:
                    self._fill_parity(*begun, group, index, number)
        return sum(size for _, _, size in copies) + group.parity * nbytes

    @contextmanager
    def _begin(
        self, group: ProtectionGroup, index: int, name: str, size: int
    ) -> Iterator[tuple[Buffer, RingFile | None] | None]:
        """Yield the memory of a file, and the record of the rank that began the file, if any.

        The file gets its name after the block. Yield None if the file exists already.
        """
        if self._place.has(name):
            yield None
            return
        temporary = self._place.temporary_path(name)
        ring_file = self._claim_ring_file(group, index, name)
        if ring_file is None:
            if not temporary.exists():
                Pool(self._place.run.free_directory).take(AGENT, size, temporary)
            allocate(temporary, size)
        yield self._mappings.map(temporary, size), ring_file
        temporary.rename(self._place.path / name)

    def _fill_copy(
        self, data: Buffer, ring_file: RingFile | None, entry: FileEntry, owner: str
    ) -> None:
        """Read the bytes of a copy that it lacks, and those that differ; verify all of them."""
        known = NOTHING if ring_file is None else ring_file.ranges[entry.name]
        encoded = self._read_table(entry, owner)
        data[entry.checksums_at :] = encoded
        table = BlockTable(encoded.view("<u4"))
        for low in range(0, entry.checksums_at, CHUNK):
            chunk = data[low : min(low + CHUNK, entry.checksums_at)]
            for first, last in _missing_ranges(known, low, low + len(chunk)):
                self._nodes.read_range(owner, entry.name, first, data[first:last])
            damaged = table.find_damaged(low // BLOCK, chunk)
            if damaged and known != NOTHING:
                self._log_difference(entry)
                known = NOTHING
                self._nodes.read_range(owner, entry.name, low, chunk)
                damaged = table.find_damaged(low // BLOCK, chunk)
            if damaged:
                raise CorruptionError(
                    f"step {self._place.step}: cannot copy {entry.name} from node {owner}: its "
                    "bytes have changed since the node sealed them; save a newer step"
                )

    def _fill_parity(
        self,
        data: Buffer,
        ring_file: RingFile | None,
        group: ProtectionGroup,
        index: int,
        number: int,
    ) -> None:
        """Add the data that a parity chunk lacks, and its checksums."""
        node_of = {file: each.node for each in group.members for file, _ in each.files}
        known: Mapping[str, Range] = {}
        if ring_file is not None and all(
            self._is_equal(ring_file, self._entries[file], node_of[file]) for file in node_of
        ):
            known = ring_file.ranges
        else:
            data[:] = 0

        def missing(file: str, low: int, high: int) -> Iterator[Range]:
            return _missing_ranges(known.get(file, NOTHING), low, high)

        def read(node: str, file: str, offset: int, out: Buffer) -> Buffer:
            if file in known:
                out[:] = 0
            for first, last in missing(file, offset, offset + len(out)):
                self._nodes.read_range(node, file, first, out[first - offset : last - offset])
            return out

        def is_incomplete(low: int, high: int) -> bool:
            extents = (
                extent
                for chunk, member in enumerate(parity_stripe(group, index, number).data)
                for extent in group.members[member].extents(
                    chunk * group.chunk + low, chunk * group.chunk + high
                )
            )
            return any(
                True
                for each in extents
                for _ in missing(
                    each.file,
                    each.file_offset,
                    each.file_offset + each.data_stop - each.data_start,
                )
            )

        def add(low: int, part: Buffer) -> None:
            data[low : low + len(part)] ^= part

        encode_parity(group, index, number, read, add, is_needed=is_incomplete)
        add_checksums(data, group.chunk)

    def _is_equal(self, ring_file: RingFile, entry: FileEntry, owner: str) -> bool:
        """Return whether the blocks that a rank read from its replica are those of a file."""
        if entry.name not in ring_file.ranges:  # a file of this node, or not of this stripe
            return True
        low, high = ring_file.ranges[entry.name]
        sealed = self._read_table(entry, owner).view("<u4")[low // BLOCK : high // BLOCK]
        is_equal = sealed.tobytes() == ring_file.checksums[entry.name]
        if not is_equal:
            self._log_difference(entry)
        return is_equal

    def _read_table(self, entry: FileEntry, owner: str) -> Buffer:
        """Read the checksums of a file from its owner."""
        table = np.empty(entry.size - entry.checksums_at, np.uint8)
        self._nodes.read_range(owner, entry.name, entry.checksums_at, table)
        if crc32(table.data) != entry.checksums_crc32:
            raise CorruptionError(
                f"{entry.name} on node {owner} is damaged: its table of checksums has changed "
                "since the node sealed it; save a newer step"
            )
        return table

    def _log_difference(self, entry: FileEntry) -> None:
        log.warning("%s differs from the replica on this node; reading it again", entry.name)

    def _claim_ring_file(self, group: ProtectionGroup, index: int, name: str) -> RingFile | None:
        """Wait for the copy or parity that a rank of this node makes, and claim it.

        Return None if the group is not a ring, the rank was lost, or the time is over.

        Args:
            index: the index of this node in the group.
            name: the final name of the file.
        """
        if group not in self._rings:
            return None
        ((data_file, _),) = group.members[index].files
        rank = self._entries[data_file].rank
        record = self._place.path / records.rank_record(rank)
        for _ in self._deadline.attempts(pause=POLL_PAUSE):
            # Look for the process first: if the rank then ends, it has already written the record.
            is_alive = is_rank_alive(self._place.run, rank)
            part = read_record(record, RankPart)
            made = [] if part is None else [each for each in part.made if each.name == name]
            if made and claim_ring_file(self._place, made[0]):
                return made[0]
            if not is_alive or self._place.has(f".{name}"):
                break  # it will never come, or an agent was killed while it completed it
            self._place.refuse_abandoned()
        return None


def claim_ring_file(place: SnapshotDirectory, made: RingFile) -> bool:
    """Rename the copy or parity that a rank has begun to its temporary name, if it is there.

    It can be claimed only once: an agent that was killed may have added some of the missing data.
    """
    try:
        (place.path / made.file).rename(place.temporary_path(made.name))
    except FileNotFoundError:
        return False
    return True


def _missing_ranges(known: Range, low: int, high: int) -> Iterator[Range]:
    """Yield the parts of the range `low:high` that are outside of the known range."""
    for first, last in ((low, min(high, known[0])), (max(low, known[1]), high)):
        if first < last:
            yield first, last
