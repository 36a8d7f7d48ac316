"""What a node keeps for others: copies of their files, or parity over them."""

from __future__ import annotations

import os
from pathlib import Path

from shardwise.engine.arena import aligned_buffer
from shardwise.errors import CorruptionError, StoreError
from shardwise.manifest.manifest import FileEntry, decode_manifest
from shardwise.manifest.names import MANIFEST
from shardwise.memory.encoding import build_parity
from shardwise.memory.nodes import Nodes
from shardwise.memory.notes import Card, Draft
from shardwise.memory.place import Place
from shardwise.memory.placement import (
    Group,
    Member,
    Protection,
    copied_files,
    memberships,
    parity_files,
    place,
)
from shardwise.memory.seal import is_intact
from shardwise.store.store import Buffer

PIECE = 8 << 20


def protection_of(draft: Draft, files: list[FileEntry]) -> Protection:
    """Who protects whom: every node with its files, in its failure domain."""
    size_of = {entry.name: entry.size for entry in files}
    domain_of = {card.node: card.domain for card in draft.nodes}
    by_node: dict[str, list[tuple[str, int]]] = {node: [] for node in domain_of}
    for name, node in draft.files:
        by_node[node].append((name, size_of[name]))
    members = [Member(node, domain_of[node], tuple(sorted(held))) for node, held in by_node.items()]
    return place(
        members,
        draft.save_id,
        copies=draft.copies,
        parity=draft.parity,
        group_size=draft.group,
    )


def gaps(nodes: list[Card], *, copies: int, parity: int, group: int) -> tuple[str, ...]:
    """What of these nodes would be protected less than is asked for, and why."""
    members = [Member(card.node, card.domain, ()) for card in nodes]
    made = place(members, "0" * 16, copies=copies, parity=parity, group_size=group)
    return made.gaps


def guard(snapshot: Place, protection: Protection, nodes: Nodes, node: str) -> int:
    """Make what a node keeps for others; the bytes of it.

    Raises:
        StoreError: a node that has to be read from does not answer.
        CorruptionError: what it gave is not what it sealed.
    """
    manifest = decode_manifest((snapshot.path / MANIFEST).read_bytes())
    entries = {entry.name: entry for entry in manifest.files}
    total = 0
    for group, at in memberships(protection, node):
        for owner, name, size in copied_files(group, at):
            target = snapshot.path / name
            if not target.exists():
                _copy(nodes, owner.node, entries[name], target)
            total += size
        total += _parity(snapshot, protection.save_id, group, at, nodes)
    return total


def _copy(nodes: Nodes, owner: str, entry: FileEntry, target: Path) -> None:
    beside = target.with_name(f".{target.name}")
    buffer = aligned_buffer(min(PIECE, entry.size))
    fd = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        for low in range(0, entry.size, PIECE):
            part = buffer[: min(PIECE, entry.size - low)]
            nodes.read_range(owner, entry.name, low, part)
            _write(fd, low, part)
        if not is_intact(beside, entry):
            raise CorruptionError(f"{entry.name} of node {owner} is not what was sealed there")
        beside.rename(target)
    finally:
        os.close(fd)
        beside.unlink(missing_ok=True)


def _parity(snapshot: Place, save_id: str, group: Group, at: int, nodes: Nodes) -> int:
    wanted = parity_files(save_id, group)
    if not wanted or all(snapshot.has(name) for name, _ in wanted):
        return sum(size for _, size in wanted)
    files = {
        name: os.open(
            snapshot.path / f".{name}", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600
        )
        for name, _ in wanted
    }

    def write(name: str, offset: int, data: Buffer) -> None:
        _write(files[name], offset, data)

    try:
        build_parity(save_id, group, at, nodes.read_range, write)
        for name in files:
            (snapshot.path / f".{name}").rename(snapshot.path / name)
    finally:
        for name, fd in files.items():
            os.close(fd)
            (snapshot.path / f".{name}").unlink(missing_ok=True)
    return sum(size for _, size in wanted)


def _write(fd: int, offset: int, data: Buffer) -> None:
    view = data.data
    while view:
        written = os.pwrite(fd, view, offset)
        if not written:
            raise StoreError("memory takes no more bytes")
        offset += written
        view = view[written:]
