"""Makes the copies or parity that a node stores for other nodes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from shardwise.deadline import Deadline
from shardwise.engine.buffers import allocate_pages
from shardwise.errors import CorruptionError, StoreError
from shardwise.manifest.checksums import BLOCK, BlockTable, crc32
from shardwise.manifest.manifest import FileEntry, decode_manifest
from shardwise.manifest.names import MANIFEST
from shardwise.memory import records
from shardwise.memory.agent.ring_files import (
    ReplicaDifferences,
    claim_ring_file,
    complete_copy,
    complete_parity,
    is_ring_file_made,
)
from shardwise.memory.free_files import reuse_spare
from shardwise.memory.home import SnapshotDirectory
from shardwise.memory.rank_locks import is_rank_alive
from shardwise.memory.records import (
    AgentInfo,
    PendingManifest,
    ProtectRequest,
    ReplicaDifference,
    RingFile,
)
from shardwise.memory.redundancy.parity import write_parity
from shardwise.memory.redundancy.placement import (
    Member,
    Protection,
    ProtectionGroup,
    combine_groups,
    files_to_copy,
    form_groups,
    groups_of_node,
    make_ring_group,
    parity_file_name,
    parity_file_size,
)
from shardwise.memory.remote.nodes import Nodes
from shardwise.memory.seal import MappedFiles
from shardwise.store.local_files import open_regular
from shardwise.store.store import Buffer

CHUNK = 8 << 20
POLL_PAUSE = 0.002


def plan_protection(pending: PendingManifest, files: list[FileEntry]) -> Protection:
    """Return which nodes protect which files of a save: rings first, then groups by domain.

    Args:
        files: the entries of all files of the save.
    """
    size_of = {entry.name: entry.size for entry in files}
    domain_of = {info.node: info.domain for info in pending.nodes}
    node_of = dict(pending.files)
    groups = [
        make_ring_group(
            [(node_of[name], domain_of[node_of[name]], name, size_of[name]) for name in ring],
            copies=pending.copies,
            parity=pending.parity,
        )
        for ring in pending.rings
    ]
    in_rings = {name for ring in pending.rings for name in ring}
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
    request: ProtectRequest,
    nodes: Nodes,
    node: str,
    mapped_files: MappedFiles,
) -> tuple[int, list[ReplicaDifference]]:
    """Make the copies and parity that a node stores for others.

    Args:
        node: the name of this node.
        mapped_files: the mappings of this node's files.

    Returns:
        Their bytes, and the replicas of this node that differ from what they should protect.

    Raises:
        StoreError: a node does not answer, and its data is needed.
        CorruptionError: the bytes of a node differ from the bytes that it sealed.
    """
    manifest = decode_manifest(place.read_file(MANIFEST))
    entries = {entry.name: entry for entry in manifest.files}
    differences = ReplicaDifferences(manifest)
    files = _ProtectionFiles(place, request, nodes, entries, mapped_files, differences)
    groups = groups_of_node(request.protection, node)
    return sum(files.make_files(group, index) for group, index in groups), differences.found


class _ProtectionFiles:
    """Makes the copies and parity of one snapshot that this node stores for others.

    A group is protected in one of two ways. In a ring, a rank of this node has made the copy or
    parity from its replicas, and the agent adds the missing bytes. In other groups, or if the file
    of the rank is missing or wrong, the agent reads the data from the other nodes.
    """

    def __init__(
        self,
        place: SnapshotDirectory,
        request: ProtectRequest,
        nodes: Nodes,
        entries: Mapping[str, FileEntry],
        mapped_files: MappedFiles,
        differences: ReplicaDifferences,
    ) -> None:
        self._place = place
        self._save_id = request.save_id
        self._rings = request.protection.groups[: request.rings]
        self._deadline = Deadline(request.wait)
        self._nodes = nodes
        self._entries = entries
        self._mappings = mapped_files
        self._differences = differences

    def make_files(self, group: ProtectionGroup, index: int) -> int:
        """Make the copies and parity of one group; return their bytes.

        Args:
            index: the index of this node in the group.
        """
        total = 0
        for number, (owner, name, size) in enumerate(files_to_copy(group, index)):
            if not self._place.has(name):
                ring_file = self._claim_ring_file(group, index, number, name)
                self._make_copy(owner.node, name, ring_file, index)
            total += size
        names = [parity_file_name(self._save_id, group, block) for block in range(group.parity)]
        if not all(map(self._place.has, names)):
            self._make_parity(group, index, names)
        return total + len(names) * parity_file_size(group.chunk)

    def _make_copy(self, owner: str, name: str, ring_file: RingFile | None, index: int) -> None:
        entry, is_equal = self._entries[name], False
        if ring_file is not None:
            data = self._map(name, entry.size)
            differing = complete_copy(data, ring_file, entry, owner, self._nodes)
            is_equal = differing == []
            if differing:
                self._differences.add(entry, self._rank_of(ring_file, index), differing)
        if not is_equal:
            self._fetch_file(owner, entry)
        self._rename_to_final(name)

    def _fetch_file(self, owner: str, entry: FileEntry) -> None:
        """Copy a file over the network: the checksums first, then the data, which is verified."""
        os.close(self._create_temporary(entry.name, entry.size))
        data = self._map(entry.name, entry.size)
        encoded = data[entry.checksums_at :]
        self._nodes.read_range(owner, entry.name, entry.checksums_at, encoded)
        intact = crc32(encoded) == entry.checksums_crc32
        table = BlockTable(np.frombuffer(encoded.tobytes(), "<u4"))
        for low in range(0, entry.checksums_at, CHUNK):
            chunk = data[low : min(low + CHUNK, entry.checksums_at)]
            self._nodes.read_range(owner, entry.name, low, chunk)
            intact = intact and not table.find_damaged(low // BLOCK, chunk)
        if not intact:
            raise CorruptionError(
                f"step {self._place.step}: cannot copy {entry.name} from node {owner}: its bytes "
                "have changed since the node sealed them; save a newer step"
            )

    def _make_parity(self, group: ProtectionGroup, index: int, names: list[str]) -> None:
        ring_files = [
            self._claim_ring_file(group, index, block, name) for block, name in enumerate(names)
        ]
        size = parity_file_size(group.chunk)
        is_complete = True
        for ring_file, name in zip(ring_files, names, strict=True):
            if ring_file is None:
                is_complete = False
                continue
            data = self._map(name, size)
            differing = complete_parity(data, ring_file, index, self._entries, self._nodes)
            for file, blocks in differing.items():
                self._differences.add(self._entries[file], self._rank_of(ring_file, index), blocks)
            is_complete &= not differing
        if not is_complete:
            self._encode_parity(group, index, names)
        for name in names:
            self._rename_to_final(name)

    def _encode_parity(self, group: ProtectionGroup, index: int, names: list[str]) -> None:
        """Compute parity from data that is read over the network."""
        size = parity_file_size(group.chunk)
        fds = {name: self._create_temporary(name, size) for name in names}

        def write(name: str, offset: int, data: Buffer) -> None:
            _write_all(fds[name], offset, data, self._place.temporary_path(name))

        try:
            write_parity(self._save_id, group, index, self._nodes.read_range, write)
        finally:
            for fd in fds.values():
                os.close(fd)

    def _claim_ring_file(
        self, group: ProtectionGroup, index: int, number: int, name: str
    ) -> RingFile | None:
        """Wait for the copy or parity that a rank of this node makes, and claim it.

        Return None if the group is not a ring, the rank was lost, or the time is over.

        Args:
            index: the index of this node in the group.
            number: the index of the file among the copies or parity chunks of the rank.
            name: the final name of the file.
        """
        if group not in self._rings:
            return None
        ((data_file, _),) = group.members[index].files
        record = records.ring_record(data_file, number)
        for _ in self._deadline.attempts(pause=POLL_PAUSE):
            # Look for the process first: if the rank then ends, it has already written the record.
            is_alive = is_rank_alive(self._place.run, self._entries[data_file].rank)
            if is_ring_file_made(self._place, record):
                return claim_ring_file(self._place, record, name, group)
            if not is_alive:
                break
            self._place.refuse_abandoned()
        return None

    def _rank_of(self, ring_file: RingFile, index: int) -> int:
        """Return the rank of this node that made a file of a ring."""
        ((file, _),) = ring_file.ring.members[index].files
        return self._entries[file].rank

    def _create_temporary(self, name: str, size: int) -> int:
        """Open a temporary file with all pages allocated; reuse a spare file if there is one."""
        temporary = self._place.temporary_path(name)
        reuse_spare(self._place.run, size, temporary)
        fd = open_regular(temporary, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(fd, size)
            allocate_pages(fd, size)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _map(self, name: str, size: int) -> Buffer:
        return self._mappings.map(self._place.temporary_path(name), size)

    def _rename_to_final(self, name: str) -> None:
        self._place.temporary_path(name).rename(self._place.path / name)


def _write_all(fd: int, offset: int, data: Buffer, path: Path) -> None:
    view = data.data
    while view:
        written = os.pwrite(fd, view, offset)
        if not written:
            raise StoreError(f"{path}: cannot write at byte {offset}: free some memory")
        offset += written
        view = view[written:]
