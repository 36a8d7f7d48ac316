"""Files of nodes that are lost, to storage: from copies, or decoded from what is left."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing, suppress

import numpy as np

from shardwise.engine.arena import aligned_buffer
from shardwise.errors import CorruptionError, StoreError
from shardwise.manifest.checksums import BLOCK, BlockTable, crc32
from shardwise.manifest.manifest import FileEntry, decode_manifest
from shardwise.manifest.names import MANIFEST
from shardwise.memory.assembled import AssembledStore
from shardwise.memory.assembling import ask_others, choose, reader, what_is_held
from shardwise.memory.notes import Card
from shardwise.memory.place import Place
from shardwise.memory.tls import Tls
from shardwise.store import ReadableFile, Store

CHUNK = 8 << 20


def copy_lost(
    place: Place, names: Iterable[str], cards: list[Card], here: str, tls: Tls | None, to: Store
) -> int:
    """Copy these files of a committed snapshot; the bytes of them.

    Args:
        cards: the agents of the snapshot's nodes, as far as they are known.
        here: the name of this node.

    Raises:
        StoreError: they cannot be had any more; says why.
        CorruptionError: what is left of them is not what was committed.
    """
    manifest = decode_manifest((place.path / MANIFEST).read_bytes())
    entries = {entry.name: entry for entry in manifest.files}
    by_node = {card.node: card for card in cards}
    others = [card for card in cards if card.node != here]
    held = [what_is_held(place.run, here), *ask_others(others, place.run.name, tls)]
    read = reader(by_node, place.run, here, tls)
    assembly = choose(held, by_node, read, step=place.step, below=None)
    if assembly.step is None:
        raise StoreError("; ".join(reason for _, reason in assembly.newer))
    total = 0
    with closing(AssembledStore(assembly, place.run, here, tls)) as source:
        for name in names:
            with closing(source.open(name)) as file:
                _copy(file, entries[name], to)
            total += entries[name].size
    return total


def _copy(source: ReadableFile, entry: FileEntry, to: Store) -> None:
    table = np.empty(entry.size - entry.checksums_at, np.uint8)
    source.read_at(entry.checksums_at, table)
    if crc32(table) != entry.checksums_crc32:
        raise CorruptionError(f"{entry.name}: its checksums were altered")
    sums = BlockTable(table.view("<u4"))
    buffer = aligned_buffer(CHUNK)
    to.delete(entry.name)
    target = to.create(entry.name, entry.size)
    try:
        for low in range(0, entry.size, CHUNK):
            part = buffer[: min(CHUNK, entry.size - low)]
            source.read_at(low, part)
            covered = part[: max(0, entry.checksums_at - low)]
            if sums.damaged(low // BLOCK, covered):
                raise CorruptionError(f"{entry.name}: bytes from {low} on fail their checksum")
            whole = -(-len(part) // to.alignment) * to.alignment
            buffer[len(part) : whole] = 0
            target.write_at(low, buffer[:whole])
        target.commit()
    except BaseException:
        with suppress(OSError):
            to.delete(entry.name)
        raise
    finally:
        target.close()
