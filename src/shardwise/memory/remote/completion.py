"""What a rank has made from its replicas for others, completed by what only the others have."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

import msgspec
import numpy as np

from shardwise.errors import CorruptionError
from shardwise.manifest.checksums import BLOCK, block_checksums, crc32
from shardwise.manifest.manifest import FileEntry
from shardwise.memory import records
from shardwise.memory.node.home import read_record, write_record
from shardwise.memory.node.place import Place
from shardwise.memory.node.seal import is_sealed
from shardwise.memory.records import Kept
from shardwise.memory.redundancy.encoding import PIECE, encode_pieces, owned
from shardwise.memory.redundancy.placement import Group
from shardwise.memory.remote.nodes import Nodes
from shardwise.store.store import Buffer

log = logging.getLogger("shardwise.agent")


def claim(place: Place, record: str, name: str, group: Group) -> Kept | None:
    """What a rank has made of a file, if it can be completed: nobody has begun to before.

    From then on it lies beside where the file will be, under which name its memory is known.

    Args:
        record: the name of the rank's record.
        name: of the file.
        group: those who protect each other, as the snapshot has them.
    """
    kept = read_record(place.path / record, Kept)
    same = kept is not None and msgspec.structs.replace(kept.ring, name=group.name) == group
    made = records.kept_file(record)
    if kept is None or not same or not place.has(made):
        return None
    beside = place.beside(name)
    write_record(place.path / record, msgspec.structs.replace(kept, file=beside.name))
    (place.path / made).rename(beside)
    return kept


def is_made(place: Place, record: str) -> bool:
    """Whether a rank has made what a record is about: the file is there, or was claimed."""
    kept = read_record(place.path / record, Kept)
    return kept is not None and (kept.file.startswith(".") or place.has(kept.file))


def complete_copy(data: Buffer, kept: Kept, entry: FileEntry, owner: str, nodes: Nodes) -> bool:
    """Add what is missing of a copy, which is mapped; whether it is what its owner has sealed.

    Raises:
        StoreError: the owner's node does not answer.
    """
    low, high = kept.of[entry.name]
    for first, last in ((0, low), (high, entry.size)):
        nodes.read_range(owner, entry.name, first, data[first:last])
    if not is_sealed(data, entry):
        log.warning("%s on node %s is no copy of what this node holds", entry.name, owner)
        return False
    return True


def complete_parity(
    data: Buffer, kept: Kept, at: int, entries: Mapping[str, FileEntry], nodes: Nodes
) -> bool:
    """Add what is missing of a block of parity, which is mapped; whether its data was as sealed.

    Raises:
        StoreError: another node does not answer.
    """
    group, q = kept.ring, kept.block or 0
    owner_of = {file: member.node for member in group.members for file, _ in member.files}
    for file in kept.of:
        if not _was_sealed(kept, entries[file], owner_of[file], nodes):
            log.warning("%s on node %s is not what this node holds", file, owner_of[file])
            return False

    def read(node: str, file: str, offset: int, out: Buffer) -> Buffer:
        out[:] = 0
        for first, last in _unknown(kept, entries[file], offset, offset + len(out)):
            nodes.read_range(node, file, first, out[first - offset : last - offset])
        return out

    def add(_: int, low: int, block: Buffer) -> None:
        data[low : low + len(block)] ^= block

    pieces = [(q, low) for low in _incomplete(kept, group, at, entries)]
    encode_pieces(group, at, pieces, read, add)
    table = data[group.chunk :]
    table[:] = 0
    sums = block_checksums(data[: group.chunk]).astype("<u4").view(np.uint8)
    table[: len(sums)] = sums
    return True


def _was_sealed(kept: Kept, entry: FileEntry, owner: str, nodes: Nodes) -> bool:
    """Whether what was read of a file here has the checksums that it has where it belongs."""
    table = np.empty(entry.size - entry.checksums_at, np.uint8)
    nodes.read_range(owner, entry.name, entry.checksums_at, table)
    if crc32(table) != entry.checksums_crc32:
        raise CorruptionError(f"{entry.name} of node {owner}: its checksums were altered")
    low, high = kept.of[entry.name]
    here = np.frombuffer(kept.sums[entry.name], "<u4")
    return np.array_equal(here, table.view("<u4")[low // BLOCK : high // BLOCK])


def _unknown(kept: Kept, entry: FileEntry, low: int, high: int) -> Iterator[tuple[int, int]]:
    """The parts of a range of a file that the rank did not have."""
    known = kept.of[entry.name]
    for first, last in ((0, known[0]), (known[1], entry.size)):
        if max(low, first) < min(high, last):
            yield max(low, first), min(high, last)


def _incomplete(
    kept: Kept, group: Group, at: int, entries: Mapping[str, FileEntry]
) -> Iterator[int]:
    """Where the pieces of the block begin into which something unknown goes."""
    stripe = owned(group, at)[kept.block or 0]
    for low in range(0, group.chunk, PIECE):
        high = min(low + PIECE, group.chunk)
        for f, position in enumerate(stripe.data):
            ((file, _),) = group.members[position].files
            start = f * group.chunk
            if any(_unknown(kept, entries[file], start + low, start + high)):
                yield low
                break
