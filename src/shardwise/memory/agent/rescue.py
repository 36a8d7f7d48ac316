"""Copies files of lost nodes to storage: from copies on other nodes, or decoded from parity."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import closing

from shardwise.engine.buffers import aligned_buffer
from shardwise.engine.datareader import DataReader
from shardwise.errors import StoreError
from shardwise.manifest.manifest import FileEntry, decode_manifest
from shardwise.manifest.names import MANIFEST
from shardwise.memory.agent.persist import Throttle, aligned, made_durable
from shardwise.memory.home import Place
from shardwise.memory.records import AgentInfo
from shardwise.memory.remote.assembled import AssembledStore
from shardwise.memory.remote.search import Search, ask_others, held_here, reader
from shardwise.memory.tls import Tls
from shardwise.store import Store

CHUNK = 8 << 20
THREADS = 2


def copy_lost(
    place: Place,
    names: Iterable[str],
    infos: list[AgentInfo],
    here: str,
    tls: Tls | None,
    to: Store,
    throttle: Throttle,
) -> int:
    """Copy files of a committed snapshot to storage; return the bytes copied.

    Args:
        infos: the known agents of the snapshot's nodes.
        here: the name of this node.

    Raises:
        StoreError: the files can no longer be read; says why.
        CorruptionError: the bytes differ from those that were committed.
    """
    manifest = decode_manifest((place.path / MANIFEST).read_bytes())
    entries = {entry.name: entry for entry in manifest.files}
    by_node = {info.node: info for info in infos}
    others = [info for info in infos if info.node != here]
    held = [held_here(place.run, here), *ask_others(others, place.run.name, tls)]
    read = reader(by_node, place.run, here, tls)
    assembly = Search(held, by_node, read).choose(place.step)
    if assembly.step is None:
        raise StoreError("; ".join(reason for _, reason in assembly.newer))
    total = 0
    with closing(AssembledStore(assembly, place.run, here, tls, threads=THREADS)) as source:
        for name in names:
            _copy(source, entries[name], to, throttle)
            total += entries[name].size
    return total


def _copy(source: Store, entry: FileEntry, to: Store, throttle: Throttle) -> None:
    """Copy a file, verify it, and write its checksums last."""
    buffer = aligned_buffer(CHUNK)
    with (
        closing(DataReader(source, entry)) as verified,
        closing(source.open(entry.name)) as plain,
        made_durable(to, entry) as target,
    ):
        for low in range(0, entry.size, CHUNK):
            part = buffer[: min(CHUNK, entry.size - low)]
            time.sleep(throttle.seconds_for(len(part)))
            plain.read_at(low, part)
            verified.verify(low, part[: max(0, entry.checksums_at - low)])
            target.write_at(low, aligned(part, to.alignment))
