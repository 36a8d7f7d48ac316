"""Makes what a node stores for others: copies of their files, or parity over them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping

import msgspec
import numpy as np

from shardwise.engine.buffers import allocate_pages
from shardwise.errors import CorruptionError, StoreError
from shardwise.manifest.checksums import BLOCK, BlockTable, block_checksums, crc32
from shardwise.manifest.manifest import FileEntry, decode_manifest
from shardwise.manifest.names import MANIFEST
from shardwise.memory import records
from shardwise.memory.home import Place, read_record, write_record
from shardwise.memory.ranks import is_present
from shardwise.memory.reclaim import take_spare
from shardwise.memory.records import AgentInfo, Kept, PendingManifest, Protect
from shardwise.memory.redundancy.parity import PIECE, build_parity, encode_pieces, owned
from shardwise.memory.redundancy.placement import (
    Group,
    Member,
    Protection,
    combine_groups,
    copied_files,
    form_groups,
    group_of_files,
    memberships,
    parity_file_size,
    parity_name,
)
from shardwise.memory.remote.peers import Nodes
from shardwise.memory.seal import Mappings, is_sealed
from shardwise.store.store import Buffer

COPIED_AT_ONCE = 8 << 20
POLL = 0.002
log = logging.getLogger("shardwise.agent")


def protection_of(pending: PendingManifest, files: list[FileEntry]) -> Protection:
    """Return who protects whom: first the rings, then all other files, by failure domain."""
    size_of = {entry.name: entry.size for entry in files}
    domain_of = {info.node: info.domain for info in pending.nodes}
    node_of = dict(pending.files)
    groups = [
        group_of_files(
            [(node_of[name], domain_of[node_of[name]], name, size_of[name]) for name in ring],
            copies=pending.copies,
            parity=pending.parity,
        )
        for ring in pending.rings
    ]
    in_rings = {name for ring in pending.rings for name in ring}
    by_node: dict[str, list[tuple[str, int]]] = {node: [] for node in domain_of}
    for name, node in pending.files:
        if name not in in_rings:
            by_node[node].append((name, size_of[name]))
    if any(by_node.values()) or not groups:
        members = [Member(node, domain_of[node], tuple(sorted(f))) for node, f in by_node.items()]
        wanted = {"copies": pending.copies, "parity": pending.parity, "group_size": pending.group}
        groups += form_groups(members, pending.save_id, **wanted).groups
    return combine_groups(pending.save_id, groups, copies=pending.copies, parity=pending.parity)


def gaps(nodes: list[AgentInfo], *, copies: int, parity: int, group: int) -> tuple[str, ...]:
    """Return what of these nodes would be protected less than requested, and why."""
    members = [Member(info.node, info.domain, ()) for info in nodes]
    made = form_groups(members, "0" * 16, copies=copies, parity=parity, group_size=group)
    return made.gaps


def guard(snapshot: Place, request: Protect, nodes: Nodes, node: str, mappings: Mappings) -> int:
    """Make what a node stores for others; return its bytes.

    Args:
        mappings: the mappings of this node's files.

    Raises:
        StoreError: a node that must be read from does not answer.
        CorruptionError: the bytes of a node differ from those that it sealed.
    """
    manifest = decode_manifest((snapshot.path / MANIFEST).read_bytes())
    entries = {entry.name: entry for entry in manifest.files}
    guarding = _Guarding(snapshot, request, nodes, entries, mappings)
    return sum(guarding.keep(group, at) for group, at in memberships(request.protection, node))


class _Guarding:
    """Making what a node stores of one snapshot."""

    def __init__(
        self,
        snapshot: Place,
        request: Protect,
        nodes: Nodes,
        entries: Mapping[str, FileEntry],
        mappings: Mappings,
    ) -> None:
        self._place = snapshot
        self._save_id = request.save_id
        self._rings = request.protection.groups[: request.rings]
        self._deadline = time.monotonic() + request.wait
        self._nodes = nodes
        self._entries = entries
        self._mappings = mappings

    def keep(self, group: Group, at: int) -> int:
        """Make the copies and parity of one group; `at` is this node's position in it."""
        total = 0
        for number, (owner, name, size) in enumerate(copied_files(group, at)):
            if not self._place.has(name):
                self._copy(owner.node, name, self._made(group, at, number, name))
            total += size
        names = [parity_name(self._save_id, group, q) for q in range(group.parity)]
        if not all(map(self._place.has, names)):
            self._parity(group, at, names)
        return total + len(names) * parity_file_size(group.chunk)

    def _copy(self, owner: str, name: str, kept: Kept | None) -> None:
        entry = self._entries[name]
        if kept is None or not self._complete(kept, entry, owner):
            self._fetch(owner, entry)
        self._finish(name)

    def _complete(self, kept: Kept, entry: FileEntry, owner: str) -> bool:
        data = self._mapped(entry.name, entry.size)
        return complete_copy(data, kept, entry, owner, self._nodes)

    def _fetch(self, owner: str, entry: FileEntry) -> None:
        """Copy a file over the network: its checksums first, then each piece, verified as it
        arrives."""
        os.close(self._open(entry.name, entry.size))
        data = self._mapped(entry.name, entry.size)
        encoded = data[entry.checksums_at :]
        self._nodes.read_range(owner, entry.name, entry.checksums_at, encoded)
        intact = crc32(encoded) == entry.checksums_crc32
        table = BlockTable(np.frombuffer(encoded.tobytes(), "<u4"))
        for low in range(0, entry.checksums_at, COPIED_AT_ONCE):
            part = data[low : min(low + COPIED_AT_ONCE, entry.checksums_at)]
            self._nodes.read_range(owner, entry.name, low, part)
            intact = intact and not table.damaged(low // BLOCK, part)
        if not intact:
            raise CorruptionError(
                f"{entry.name} of node {owner} differs from what that node sealed"
            )

    def _parity(self, group: Group, at: int, names: list[str]) -> None:
        made = [self._made(group, at, q, name) for q, name in enumerate(names)]
        complete = [
            kept is not None
            and complete_parity(
                self._mapped(name, parity_file_size(group.chunk)),
                kept,
                at,
                self._entries,
                self._nodes,
            )
            for kept, name in zip(made, names, strict=True)
        ]
        if not all(complete):
            self._encode(group, at, names)
        for name in names:
            self._finish(name)

    def _encode(self, group: Group, at: int, names: list[str]) -> None:
        """Compute parity from data that is read over the network."""
        size = parity_file_size(group.chunk)
        files = {name: self._open(name, size) for name in names}

        def write(name: str, offset: int, data: Buffer) -> None:
            _write(files[name], offset, data)

        try:
            build_parity(self._save_id, group, at, self._nodes.read_range, write)
        finally:
            for fd in files.values():
                os.close(fd)

    def _made(self, group: Group, at: int, number: int, name: str) -> Kept | None:
        """Return what the ring's rank has made of the file, once it has."""
        if group not in self._rings:
            return None
        ((mine, _),) = group.members[at].files
        record = records.kept(mine, number)
        while not is_made(self._place, record):
            lives = is_present(self._place.run, self._entries[mine].rank)
            late = not lives or time.monotonic() > self._deadline
            if late and not is_made(self._place, record):
                return None
            self._place.refuse_abandoned()
            time.sleep(POLL)
        return claim(self._place, record, name, group)

    def _open(self, name: str, size: int) -> int:
        """Open a temporary file with all its pages allocated, from a spare file if there is one."""
        temporary = self._place.temporary(name)
        take_spare(self._place.run, size, temporary)
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(fd, size)
            allocate_pages(fd, size)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _mapped(self, name: str, size: int) -> Buffer:
        return self._mappings.find(self._place.temporary(name), size)

    def _finish(self, name: str) -> None:
        self._place.temporary(name).rename(self._place.path / name)


def _write(fd: int, offset: int, data: Buffer) -> None:
    view = data.data
    while view:
        written = os.pwrite(fd, view, offset)
        if not written:
            raise StoreError("cannot write to memory: no bytes were accepted")
        offset += written
        view = view[written:]


def claim(place: Place, record: str, name: str, group: Group) -> Kept | None:
    """Claim the file that a rank has made, and return its record; None if no such file can be
    claimed.

    The file is renamed to the temporary name of `name`, and its record is updated.

    Args:
        record: the name of the rank's record.
        name: the final name of the file.
        group: the nodes that protect each other, according to the snapshot.
    """
    kept = read_record(place.path / record, Kept)
    same = kept is not None and msgspec.structs.replace(kept.ring, name=group.name) == group
    made = records.kept_file(record)
    if kept is None or not same or not place.has(made):
        return None
    temporary = place.temporary(name)
    write_record(place.path / record, msgspec.structs.replace(kept, file=temporary.name))
    (place.path / made).rename(temporary)
    return kept


def is_made(place: Place, record: str) -> bool:
    """Return whether a rank has made the file of a record, claimed or not."""
    kept = read_record(place.path / record, Kept)
    return kept is not None and (kept.file.startswith(".") or place.has(kept.file))


def complete_copy(data: Buffer, kept: Kept, entry: FileEntry, owner: str, nodes: Nodes) -> bool:
    """Add the missing bytes of a mapped copy; return whether it equals what its owner sealed.

    Raises:
        StoreError: the owner's node does not answer.
    """
    low, high = kept.of[entry.name]
    for first, last in ((0, low), (high, entry.size)):
        nodes.read_range(owner, entry.name, first, data[first:last])
    if not is_sealed(data, entry):
        log.warning(
            "%s on node %s differs from the replica here; reading it over the network",
            entry.name,
            owner,
        )
        return False
    return True


def complete_parity(
    data: Buffer, kept: Kept, at: int, entries: Mapping[str, FileEntry], nodes: Nodes
) -> bool:
    """Add the missing data to a mapped parity block; return whether its data was as sealed.

    Raises:
        StoreError: another node does not answer.
    """
    group, q = kept.ring, kept.block or 0
    owner_of = {file: member.node for member in group.members for file, _ in member.files}
    for file in kept.of:
        if not _was_sealed(kept, entries[file], owner_of[file], nodes):
            log.warning(
                "%s on node %s differs from the replica here; reading it over the network",
                file,
                owner_of[file],
            )
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
    """Return whether the bytes of a file that were read here have the owner's checksums."""
    table = np.empty(entry.size - entry.checksums_at, np.uint8)
    nodes.read_range(owner, entry.name, entry.checksums_at, table)
    if crc32(table) != entry.checksums_crc32:
        raise CorruptionError(f"{entry.name} of node {owner}: its table of checksums was altered")
    low, high = kept.of[entry.name]
    here = np.frombuffer(kept.sums[entry.name], "<u4")
    return np.array_equal(here, table.view("<u4")[low // BLOCK : high // BLOCK])


def _unknown(kept: Kept, entry: FileEntry, low: int, high: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a range of a file that the rank did not have."""
    known = kept.of[entry.name]
    for first, last in ((0, known[0]), (known[1], entry.size)):
        if max(low, first) < min(high, last):
            yield max(low, first), min(high, last)


def _incomplete(
    kept: Kept, group: Group, at: int, entries: Mapping[str, FileEntry]
) -> Iterator[int]:
    """Yield the offsets of the pieces of the block that include unknown data."""
    stripe = owned(group, at)[kept.block or 0]
    for low in range(0, group.chunk, PIECE):
        high = min(low + PIECE, group.chunk)
        for f, position in enumerate(stripe.data):
            ((file, _),) = group.members[position].files
            start = f * group.chunk
            if any(_unknown(kept, entries[file], start + low, start + high)):
                yield low
                break
