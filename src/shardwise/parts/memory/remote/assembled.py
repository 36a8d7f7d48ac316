"""A snapshot as a store: each file is read from this node, from other nodes, or decoded."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import msgspec

from shardwise.kernel.decoding import prepare_decoding
from shardwise.kernel.errors import CorruptionError, StoreError
from shardwise.kernel.store import FileStatus, LocalStore, ReadableFile, ReadOnlyStore, Store
from shardwise.kernel.store.store import Buffer
from shardwise.parts.memory.home import Run, SnapshotDirectory
from shardwise.parts.memory.options import Tls
from shardwise.parts.memory.records import AgentInfo
from shardwise.parts.memory.redundancy.placement import Protection
from shardwise.parts.memory.redundancy.rebuild import Rebuilder
from shardwise.parts.memory.remote.snapshot_nodes import Nodes
from shardwise.parts.memory.seal import map_file
from shardwise.parts.memory.times import READ_TIMEOUT

LOCAL, OTHERS, DECODED = "local memory", "other nodes", "decoded"
CountBytes = Callable[[str, int], None]
"""`count_bytes(origin, nbytes)` adds to the statistics of an origin."""
ReadSource = tuple[str, Callable[[int, Buffer], None]]
"""An origin, and a function `read(offset, out)` that reads a range of a file from there."""


@prepare_decoding
class SnapshotLocations(msgspec.Struct, array_like=True, frozen=True):
    """Where the files of a snapshot are.

    Attributes:
        step: the step; None if no snapshot was found.
        save_id: the id of the save.
        epoch: the epoch of the save; None if it is unknown.
        nodes_by_file: the nodes that have each file; empty for files that must be decoded. For the
            manifest, the node that provided it.
        sizes: size of each data file in bytes.
        nodes: the agents of the nodes that hold any of the files.
        protection: how nodes protect each other; None if nothing can be decoded.
        skipped: the newer steps that cannot be read, each with the reason.
        choosing_seconds: the seconds that rank 0 took to choose the snapshot.
        unanswered: the nodes that did not answer and may hold a newer snapshot, each with the
            reason.
    """

    step: int | None = None
    save_id: str = ""
    nodes_by_file: dict[str, list[str]] = {}
    sizes: dict[str, int] = {}
    nodes: dict[str, AgentInfo] = {}
    protection: Protection | None = None
    skipped: list[tuple[int, str]] = []
    choosing_seconds: float = 0.0
    unanswered: dict[str, str] = {}
    epoch: int | None = None


class AssembledStore(ReadOnlyStore):
    """A read-only store of the files at the locations of a snapshot.

    Args:
        locations: the nodes that have each file. Files of this node are read locally.
        run: the directories of the run on this node.
        node: the name of this node.
        tls: certificates for connections to other nodes.
        threads: the number of threads that decode the data of one read.

    Raises:
        StoreError: the locations have no step.
    """

    advice_to_writers = "save to storage instead"

    def __init__(
        self,
        locations: SnapshotLocations,
        run: Run,
        node: str,
        tls: Tls | None = None,
        *,
        threads: int = 1,
    ) -> None:
        if locations.step is None:
            raise StoreError(
                f"no snapshot of run {run.name} was found in memory on any node: load a checkpoint "
                "from the root"
            )
        self._assembly = locations
        self._name = f"memory of run {run.name}, step {locations.step}"
        self._node = node
        mapped = frozenset(name for name, nodes in locations.nodes_by_file.items() if node in nodes)
        self._place = SnapshotDirectory(run, locations.step, locations.save_id)
        self._local = LocalStore(self._place.path)
        # Parts of the files may be in the memory of other nodes.
        self.traits = replace(self._local.traits, is_node_local=False, mapped=mapped)
        infos = list(locations.nodes.values())
        self._nodes = Nodes(self._place, infos, node, READ_TIMEOUT, tls)
        self._failures: dict[str, str] = {}  # by node: its first read that failed, and why
        self._bytes_by_origin = dict.fromkeys((LOCAL, OTHERS, DECODED), 0)
        self._count_lock = threading.Lock()
        path = self._local.path
        self._map = functools.cache(lambda key, size: map_file(path / key, size))
        self._rebuilder: Rebuilder | None = None
        self._owner_of: dict[str, str] = {}
        if (protection := locations.protection) is not None:
            self._owner_of = {
                name: member.node
                for group in protection.groups
                for member in group.members
                for name, _ in member.files
            }
            self._rebuilder = Rebuilder(
                protection,
                self._read_part,
                lost=set(self._owner_of.values()) - locations.nodes.keys(),
                threads=threads,
            )

    def __str__(self) -> str:
        return self._name

    def origins(self) -> dict[str, int]:
        """Return how many bytes of data files were read so far, by origin."""
        with self._count_lock:
            return dict(self._bytes_by_origin)

    def close(self) -> None:
        """Close the connections to other nodes."""
        if self._rebuilder is not None:
            self._rebuilder.close()
        self._nodes.close()

    def open(self, path: str, size: int | None = None) -> ReadableFile:
        """Open a file: on this node if it has the file, otherwise on other nodes or by decoding."""
        nodes = self._assembly.nodes_by_file.get(path)
        if nodes is None:
            raise FileNotFoundError(f"{self} has no {path}")
        size, name = self._assembly.sizes[path], f"{path} of {self}"
        sources = self._list_sources(path, nodes)
        if self._node not in nodes:
            return _SnapshotFile(size, name, sources, self._count_bytes)
        return _MappedFile(size, name, sources, self._count_bytes, self._map(path, size))

    def read(self, key: str, *, limit: int) -> bytes:
        """Return the contents of a small file."""
        nodes = self._assembly.nodes_by_file.get(key)
        if not nodes:
            raise FileNotFoundError(f"{self} has no {key}")
        if self._node in nodes:
            return self._local.read(key, limit=limit)
        return self._nodes.read(nodes[0], key, limit=limit)

    def stat(self, path: str) -> FileStatus | None:
        """Return the size of a data file; "" is the snapshot itself."""
        if not path:
            return FileStatus(0, "", is_directory=True)
        size = self._assembly.sizes.get(path)
        return None if size is None else FileStatus(size, "")

    def list(self) -> list[str]:
        """Return the names of the files."""
        return sorted(self._assembly.nodes_by_file)

    def walk(self, limit: int) -> dict[str, FileStatus]:
        """Return the data files. Their content never changes."""
        return {name: FileStatus(size, "") for name, size in sorted(self._assembly.sizes.items())}

    @contextmanager
    def lock(self, key: str, *, shared: bool = False) -> Iterator[bool]:
        """Prevent this node's files from being reclaimed while the block runs."""
        with self._place.hold(shared=True) as locked:
            yield locked or not self._place.path.exists()

    def at(self, name: str) -> Store:
        """Refuse: a snapshot has no subdirectories."""
        raise self.refusal()

    def _list_sources(self, key: str, nodes: Sequence[str]) -> Sequence[ReadSource]:
        """Return the sources of a file: each other node that has the file, and decoding."""

        def node_source(node: str) -> ReadSource:
            return OTHERS, lambda offset, out: self._read_range(node, key, offset, out)

        sources = [node_source(node) for node in nodes if node != self._node]
        rebuilder = self._rebuilder
        if rebuilder is not None and key in self._owner_of:
            sources.append((DECODED, lambda offset, out: rebuilder.read(key, offset, out)))
        return sources

    def _count_bytes(self, origin: str, nbytes: int) -> None:
        with self._count_lock:
            self._bytes_by_origin[origin] += nbytes

    def _read_range(self, node: str, key: str, offset: int, out: Buffer) -> None:
        """Read from a node, unless an earlier read from it has failed."""
        if node in self._failures:
            raise StoreError(f"{key}: node {node} was skipped, because {self._failures[node]}")
        try:
            self._nodes.read_range(node, key, offset, out)
        except StoreError as error:
            self._failures[node] = f"an earlier read of {key} from it failed: {error}"
            raise

    def _read_part(self, node: str, key: str, offset: int, out: Buffer) -> Buffer:
        """Return part of a file: a view if it is in this node's memory, otherwise in `out`."""
        if node != self._node:
            self._read_range(node, key, offset, out)
            return out
        mapped = self._map(key, (self._local.path / key).stat().st_size)
        part = mapped[offset : offset + len(out)]
        if len(part) < len(out):
            raise StoreError(
                f"{self._local.path / key} was cut off: it ends at byte {offset + len(part)}; "
                f"expected at least {offset + len(out)} bytes"
            )
        return part


@dataclass(slots=True)
class _SnapshotFile:
    """A file of a snapshot that is not on this node, with a copy in each source."""

    size: int
    name: str
    sources: Sequence[ReadSource]
    count_bytes: CountBytes

    @property
    def copies(self) -> int:
        return len(self.sources)

    def copy_size(self, number: int) -> int:
        return self.size

    def read_at(self, offset: int, out: Buffer) -> int:
        failures = []
        for number in range(self.copies):
            try:
                count = self.read_copy(number, offset, out)
            except (OSError, CorruptionError) as error:
                failures.append(str(error))
                continue
            return count
        raise CorruptionError(
            f"{self.name} cannot be read from any node: {'; '.join(failures)}; restore another step"
        )

    def read_copy(self, number: int, offset: int, out: Buffer) -> int:
        origin, read = self.sources[number]
        part = out[: max(0, min(len(out), self.size - offset))]
        read(offset, part)
        self.count_bytes(origin, len(part))
        return len(part)

    def close(self) -> None:
        pass


@dataclass(slots=True)
class _MappedFile(_SnapshotFile):
    """A file of a snapshot in this node's memory. The sources are read if it is damaged."""

    data: Buffer

    def view(self, offset: int, count: int) -> Buffer:
        part = self.data[offset : offset + count]
        self.count_bytes(LOCAL, len(part))
        return part

    def read_at(self, offset: int, out: Buffer) -> int:
        part = self.view(offset, len(out))
        out[: len(part)] = part
        return len(part)
