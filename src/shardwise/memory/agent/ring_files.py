"""Copies and parity that ranks of a node made from their replicas, and differences found in them.

Such a file may be incomplete, and the replicas may differ from the files that they should protect.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import msgspec
import numpy as np

from shardwise.errors import CorruptionError
from shardwise.manifest.checksums import BLOCK, block_checksums, crc32
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import FileEntry, Manifest
from shardwise.manifest.pieces import Pieces
from shardwise.manifest.validate import validated_pieces
from shardwise.memory import records
from shardwise.memory.files import read_record, write_record
from shardwise.memory.home import SnapshotDirectory
from shardwise.memory.records import ReplicaDifference, RingFile
from shardwise.memory.redundancy.parity import SECTION, encode_parity, parity_stripes
from shardwise.memory.redundancy.placement import ProtectionGroup
from shardwise.memory.remote.nodes import Nodes
from shardwise.memory.seal import find_damaged_blocks, has_valid_table
from shardwise.store.store import Buffer

MOST_BLOCKS = 16
"""The most differing blocks of a file whose tensors are recorded; further blocks are left out."""
log = logging.getLogger("shardwise.agent")


class ReplicaDifferences:
    """The differences that a node finds while it makes copies and parity of one snapshot.

    Args:
        manifest: the manifest of the snapshot.

    Attributes:
        found: the differences so far.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.found: list[ReplicaDifference] = []
        self._manifest = manifest

    def add(self, file: FileEntry, rank: int, blocks: Sequence[int]) -> None:
        """Log and keep a difference.

        Args:
            file: the file of another rank.
            rank: the rank of this node whose replica differs.
            blocks: the indices of the blocks of the file that differ.
        """
        log.warning(
            "%s differs from the replica of rank %d on this node; reading it again", file.name, rank
        )
        tensors = [self._tensors_in(file, block) for block in blocks[:MOST_BLOCKS]]
        self.found.append(ReplicaDifference(ranks=(file.rank, rank), blocks=tensors))

    @cached_property
    def _pieces(self) -> Pieces:
        return validated_pieces(self._manifest)

    def _tensors_in(self, file: FileEntry, block: int) -> list[str]:
        """Return the names of the tensors that have bytes in a block of a file."""
        pieces, entries = self._pieces, self._manifest.tensors
        itemsize = np.array([DTYPES[entry.dtype].itemsize for entry in entries], np.int64)
        start = file.data_at + pieces.start
        stop = start + pieces.shape.prod(axis=1) * itemsize[pieces.tensor]
        is_there = pieces.file == self._manifest.files.index(file)
        is_there &= (start < (block + 1) * BLOCK) & (stop > block * BLOCK)
        return sorted({entries[tensor].name for tensor in pieces.tensor[is_there].tolist()})


def claim_ring_file(
    place: SnapshotDirectory, record: str, name: str, group: ProtectionGroup
) -> RingFile | None:
    """Claim the copy or parity that a rank has made, and return its record.

    The file is renamed to the temporary name of `name`, and its record is updated. Return None if
    the file is missing, or the rank made it for another group.

    Args:
        record: the name of the rank's record.
        name: the final name of the file.
        group: the group that the file protects, according to the request.
    """
    ring_file = read_record(place.path / record, RingFile)
    if ring_file is None:
        return None
    is_same_group = msgspec.structs.replace(ring_file.ring, name=group.name) == group
    unclaimed = records.ring_file_name(record)
    if not is_same_group or not place.has(unclaimed):
        return None
    temporary = place.temporary_path(name)
    write_record(place.path / record, msgspec.structs.replace(ring_file, file=temporary.name))
    (place.path / unclaimed).rename(temporary)
    return ring_file


def is_ring_file_made(place: SnapshotDirectory, record: str) -> bool:
    """Return whether a rank has made the copy or parity of a record, claimed or not."""
    ring_file = read_record(place.path / record, RingFile)
    return ring_file is not None and (ring_file.file.startswith(".") or place.has(ring_file.file))


def complete_copy(
    data: Buffer, ring_file: RingFile, entry: FileEntry, owner: str, nodes: Nodes
) -> list[int] | None:
    """Add the missing bytes of a copy, and compare it with the file that its owner sealed.

    Args:
        data: the copy, mapped.
        owner: the node of the file.

    Returns:
        The indices of the blocks that differ; None if the owner's table of checksums is damaged.

    Raises:
        StoreError: the owner's node does not answer.
    """
    low, high = ring_file.ranges[entry.name]
    for first, last in ((0, low), (high, entry.size)):
        nodes.read_range(owner, entry.name, first, data[first:last])
    return find_damaged_blocks(data, entry) if has_valid_table(data, entry) else None


def complete_parity(
    data: Buffer,
    ring_file: RingFile,
    index: int,
    entries: Mapping[str, FileEntry],
    nodes: Nodes,
) -> dict[str, list[int]]:
    """Compare the data of a parity chunk with the sealed files, and add the missing data.

    Args:
        data: the parity chunk with its checksums, mapped.
        index: the index of this node in the ring.
        entries: the entries of the data files, by name.

    Returns:
        The indices of the blocks that differ, by file. If there are any, nothing is added.

    Raises:
        StoreError: another node does not answer.
    """
    group, parity_index = ring_file.ring, ring_file.parity_index or 0
    owner_of = {file: member.node for member in group.members for file, _ in member.files}
    differing = {
        file: _differing_blocks(ring_file, entries[file], owner_of[file], nodes)
        for file in ring_file.ranges
    }
    if any(differing.values()):
        return {file: blocks for file, blocks in differing.items() if blocks}

    def read(node: str, file: str, offset: int, out: Buffer) -> Buffer:
        out[:] = 0
        for first, last in _missing_ranges(ring_file, entries[file], offset, offset + len(out)):
            nodes.read_range(node, file, first, out[first - offset : last - offset])
        return out

    def add(_: int, low: int, part: Buffer) -> None:
        data[low : low + len(part)] ^= part

    lows = _incomplete_sections(ring_file, group, index, entries)
    encode_parity(group, index, [(parity_index, low) for low in lows], read, add)
    table = data[group.chunk :]
    table[:] = 0
    sums = block_checksums(data[: group.chunk]).astype("<u4").view(np.uint8)
    table[: len(sums)] = sums
    return {}


def _differing_blocks(ring_file: RingFile, entry: FileEntry, owner: str, nodes: Nodes) -> list[int]:
    """Return the indices of the blocks of a file that the rank read with other checksums."""
    table = np.empty(entry.size - entry.checksums_at, np.uint8)
    nodes.read_range(owner, entry.name, entry.checksums_at, table)
    if crc32(table) != entry.checksums_crc32:
        raise CorruptionError(
            f"{entry.name} on node {owner} is damaged: its table of checksums has changed since "
            "the node sealed it; save a newer step"
        )
    low, high = ring_file.ranges[entry.name]
    checksums = np.frombuffer(ring_file.checksums[entry.name], "<u4")
    first = low // BLOCK
    sealed = table.view("<u4")[first : high // BLOCK]
    if len(checksums) != len(sealed):
        return list(range(first, high // BLOCK))
    return (first + np.flatnonzero(checksums != sealed)).tolist()


def _missing_ranges(
    ring_file: RingFile, entry: FileEntry, low: int, high: int
) -> Iterator[tuple[int, int]]:
    """Yield the parts of the range `low:high` of a file that the rank did not have."""
    known_low, known_high = ring_file.ranges[entry.name]
    for first, last in ((0, known_low), (known_high, entry.size)):
        if max(low, first) < min(high, last):
            yield max(low, first), min(high, last)


def _incomplete_sections(
    ring_file: RingFile, group: ProtectionGroup, index: int, entries: Mapping[str, FileEntry]
) -> Iterator[int]:
    """Yield the offset of each section of a parity chunk that lacks data of a file."""
    stripe = parity_stripes(group, index)[ring_file.parity_index or 0]
    for low in range(0, group.chunk, SECTION):
        high = min(low + SECTION, group.chunk)
        for chunk, position in enumerate(stripe.data):
            ((file, _),) = group.members[position].files
            start = chunk * group.chunk
            if any(_missing_ranges(ring_file, entries[file], start + low, start + high)):
                yield low
                break
