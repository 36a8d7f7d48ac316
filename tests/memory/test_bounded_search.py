"""A restore asks few nodes, and finds what it would find if it asked all of them.

Sessions of a run on simulated nodes: each restores, commits some steps with copies, and may lose a
node.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from shardwise.kernel.errors import StoreError
from shardwise.kernel.manifest.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    data_file,
    encode_manifest,
)
from shardwise.kernel.store import LocalStore, publish_private
from shardwise.parts.lineage import Lineage
from shardwise.parts.memory import registry
from shardwise.parts.memory.files import encode_record
from shardwise.parts.memory.home import MOST_EARLIER_NODES, Run, SnapshotDirectory
from shardwise.parts.memory.records import PENDING, AgentInfo, PendingManifest
from shardwise.parts.memory.registry import NEWEST_FILE, NODES_DIRECTORY, NewestNodes, NodeEntry
from shardwise.parts.memory.remote.search import NodeFiles, Search
from shardwise.parts.memory.trainer import recovery
from shardwise.parts.tiers.options import StorageTask
from tests.breadth import examples, mostly_long
from tests.memory.test_server import RUN

SIZE = 100
KEPT = 2  # snapshots
HERE = Run(Path(RUN))


def place_of(snapshot: str) -> SnapshotDirectory:
    place = HERE.snapshot(snapshot)
    assert place is not None
    return place


def info_of(node: int) -> AgentInfo:
    return AgentInfo(f"n{node}", f"http://192.0.2.1:{node + 1}", "token", host="elsewhere")


@dataclass
class World:
    """The live nodes, what they hold, and what the root says.

    Attributes:
        disks: for each live node and snapshot, the files.
        recorded: the nodes that each node has recorded.
        asked: the nodes that the last restore has asked.
        unanswered: the nodes that the report of the last restore names as silent.
    """

    root: LocalStore
    disks: dict[int, dict[SnapshotDirectory, dict[str, bytes]]] = field(default_factory=dict)
    recorded: dict[int, list[AgentInfo]] = field(default_factory=dict)
    lineage: Lineage = field(default_factory=lambda: Lineage(RUN))
    asked: list[str] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)
    saves: int = 0
    pending_of: dict[SnapshotDirectory, PendingManifest] = field(default_factory=dict)

    def restore_from_all(self) -> int | None:
        """The step that a search among all live nodes finds."""
        nodes = [self._files(node) for node in self.disks]
        infos = {f"n{node}": info_of(node) for node in self.disks}
        search = Search(HERE, "", nodes, infos, lineage=self.lineage)
        search.read = self._read  # type: ignore[method-assign]
        return search.choose_snapshot(None).step

    def restore(self, nodes: list[int]) -> int | None:
        """The step that a restore on these nodes finds."""
        world = self
        self.asked = []

        class SimulatedSearch(Search):
            read = staticmethod(world._read)  # type: ignore[assignment]

            def _make_client(self, info: AgentInfo, connect_timeout: float) -> Any:
                world.asked.append(info.node)
                return SimpleNamespace(
                    list_files=lambda _: world._files(int(info.node[1:])).snapshots,
                    read=lambda _, snapshot, name, limit: world._read(
                        info.node, place_of(snapshot), name
                    ),
                    abort=lambda: None,
                    close=lambda: None,
                )

        listed = recovery._Listed()
        for rank, node in enumerate(nodes):
            listed.nodes[rank] = self._files(node)
            listed.earlier |= set(self.recorded.get(node, []))
            for place in self.disks[node]:
                listed.known |= set(self.pending_of[place].nodes)
        snapshots: Any = SimpleNamespace(
            membership=SimpleNamespace(nodes=[info_of(n) for n in nodes], lineage=self.lineage),
            run=HERE,
            node="",
            tls=None,
            root=self.root,
        )
        with mock.patch.object(recovery, "Search", SimulatedSearch):
            found = recovery._search_nodes(snapshots, listed, None, None, set())
        self.unanswered = list(found.unanswered)
        return found.step

    def train(self, nodes: list[int], step: int | None, commits: int, *, names: bool) -> None:
        """Resume from a step on these nodes, and commit steps.

        Args:
            names: whether the root gets the names of the nodes of the newest snapshot.
        """
        self.lineage = self.lineage.after_resuming(step)
        infos = [info_of(node) for node in nodes]
        for node in nodes:
            disk = self.disks[node]
            self.disks[node] = {
                place: files
                for place, files in disk.items()
                if step is not None and place.step <= step
            }
            earlier = [info for info in self.recorded.get(node, []) if info not in infos]
            self.recorded[node] = [*earlier[-MOST_EARLIER_NODES:], *infos]
        first = 1 if step is None else step + 1
        for number in range(first, first + commits):
            self._commit(nodes, number)
        if commits:
            for node in nodes:
                entry = NodeEntry(info_of(node), RUN, 1e12 + self.saves, self.lineage.epoch)
                self._publish(f"n{node}.json", entry)
            if names:
                self._publish(NEWEST_FILE, NewestNodes(RUN, self.lineage.epoch, infos[:1]))

    def _commit(self, nodes: list[int], step: int) -> None:
        self.saves += 1
        save_id = f"{self.saves:016x}"
        names = [data_file(rank, save_id) for rank in range(len(nodes))]
        entries = [FileEntry(name, rank, SIZE, 0, 0, 0, 0) for rank, name in enumerate(names)]
        manifest = Manifest(
            save_id=save_id,
            step=step,
            created="now",
            world_size=len(nodes),
            files=tuple(entries),
            objects=(),
            tensors=Raw(b"[]"),
        )
        pending = PendingManifest(
            save_id=save_id,
            step=step,
            manifest="",
            files=[(name, f"n{node}") for name, node in zip(names, nodes, strict=True)],
            nodes=[info_of(node) for node in nodes],
            leader=f"n{nodes[0]}",
            storage=StorageTask(root=""),
            epoch=self.lineage.epoch,
            copies=1,
        )
        place = SnapshotDirectory(HERE, step, save_id)
        self.pending_of[place] = pending
        for rank, node in enumerate(nodes):
            files = {MANIFEST: encode_manifest(manifest), PENDING: encode_record(pending)}
            files |= {name: bytes(SIZE) for name in (names[rank], names[rank - 1])}
            disk = self.disks[node]
            disk[place] = files
            for old in sorted(disk, key=lambda each: each.step)[:-KEPT]:
                del disk[old]

    def _publish(self, name: str, value: object) -> None:
        data = msgspec.json.encode(value)
        publish_private(self.root.at(NODES_DIRECTORY), name, data, b"")

    def _files(self, node: int) -> NodeFiles:
        if node not in self.disks:
            raise StoreError(f"n{node} is lost")
        disk = self.disks[node].items()
        sizes = {place.name: {n: len(d) for n, d in files.items()} for place, files in disk}
        return NodeFiles(f"n{node}", sizes)

    def _read(self, node: str, place: SnapshotDirectory, name: str) -> bytes:
        self._files(int(node[1:]))
        return self.disks[int(node[1:])][place][name]


@st.composite
def sessions(draw: st.DrawFn) -> list[tuple[list[int], int, bool, int | None]]:
    """Nodes, number of commits, whether the root names the nodes, and the node that is lost."""
    return draw(
        st.lists(
            st.tuples(
                st.lists(st.integers(0, 8), min_size=1, max_size=4, unique=True),
                st.integers(0, 3),
                st.booleans(),
                st.none() | st.integers(0, 3),
            ),
            max_size=7,
        )
    )


@examples(150)
@given(
    sessions(),
    st.lists(st.integers(0, 8), min_size=1, max_size=3, unique=True),
    st.sampled_from([0, 1, registry.MOST_EARLIER]),
)
@pytest.mark.long
def test_the_newest_step_is_found_among_few_nodes(
    history: list[tuple[list[int], int, bool, int | None]], last: list[int], most_earlier: int
) -> None:
    """If so many nodes were lost that the newest is incomplete, an older one may be forgotten."""
    newest: int | None = None
    with (
        TemporaryDirectory() as folder,
        mock.patch.object(registry, "MOST_EARLIER", most_earlier),
    ):
        world = World(LocalStore(folder), {node: {} for node in range(9)})
        for nodes, commits, names, lost in [*history, (last, 0, False, None)]:
            live = [node for node in nodes if node in world.disks] or [*world.disks][:1]
            if not live:
                return
            expected = world.restore_from_all()
            found = world.restore(live)
            if most_earlier == 16 or expected == newest:
                assert found == expected
            assert len(world.asked) == len(set(world.asked))
            world.train(live, found, commits, names=names)
            newest = commits + (found or 0) or found
            if lost is not None and len(live) > 1:
                del world.disks[live[lost % len(live)]]


def test_silent_nodes_are_named_although_their_entries_are_old(tmp_path: Path) -> None:
    """Their agents had not yet written that they took part in the newest epoch."""
    world = World(LocalStore(tmp_path), {node: {} for node in range(3)})
    world.train([0], None, 1, names=False)
    world.train([0, 1, 2], 1, 1, names=False)
    for node in (1, 2):
        world._publish(f"n{node}.json", NodeEntry(info_of(node), RUN, 1e12, 0))
        del world.disks[node]
    assert world.restore([0]) == 1
    assert sorted(world.unanswered) == ["n1", "n2"]


@pytest.mark.parametrize("commits", mostly_long([0, 3], [0]))
def test_lost_nodes_are_asked_no_more(tmp_path: Path, commits: int) -> None:
    """A run of four nodes loses one again and again, in some sessions before the first commit."""
    world = World(LocalStore(tmp_path), {node: {} for node in range(4)})
    nodes = [0, 1, 2, 3]
    most_files = 0
    for number in range(4, 104):
        step = world.restore(nodes)
        assert step == world.restore_from_all()
        # Lost nodes of the snapshot, those recorded, and those that left since its epoch.
        assert len(world.asked) <= 4 + MOST_EARLIER_NODES
        world.train(nodes, step, 3 if number % 3 else commits, names=True)
        lost = nodes.pop(number % 4)
        del world.disks[lost]
        world.disks[number] = {}
        nodes.append(number)
        most_files = max(most_files, len(world.root.at(NODES_DIRECTORY).list()))
    assert most_files <= registry.MOST_EARLIER + 4 * 4
