"""Finds the newest snapshot that the nodes of a run can provide together."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, suppress

import msgspec

from shardwise.kernel.deadline import Deadline
from shardwise.kernel.decoding import prepare_decoding
from shardwise.kernel.errors import FormatError, StoreError
from shardwise.kernel.manifest.manifest import MANIFEST, FileEntry, Manifest, decode_manifest
from shardwise.parts.lineage import Lineage
from shardwise.parts.memory import records
from shardwise.parts.memory.files import LARGEST_RECORD, decode_record
from shardwise.parts.memory.home import Run, SnapshotDirectory, list_snapshots
from shardwise.parts.memory.options import Tls
from shardwise.parts.memory.records import AgentInfo, PendingManifest
from shardwise.parts.memory.redundancy.placement import Protection, plan_protection
from shardwise.parts.memory.redundancy.rebuild import find_unreadable_files
from shardwise.parts.memory.remote.assembled import SnapshotLocations
from shardwise.parts.memory.remote.client import AgentClient
from shardwise.parts.memory.times import (
    CONNECT_TIMEOUT,
    FIRST_CONNECT_TIMEOUT,
    LONGEST_WAIT,
    READ_TIMEOUT,
)

MOST_REQUESTS = 64
MOST_READERS = 3
"""How many nodes are asked at most for the nodes of a snapshot."""
MOST_FILES_SHOWN = 3
NOT_COMMITTED = "not committed"


@prepare_decoding
class NodeFiles(msgspec.Struct, array_like=True):
    """The files of a run that a node stores.

    Attributes:
        node: the name of the node.
        snapshots: for each snapshot, by the name of its directory, the name and size in bytes of
            each file.
        known_nodes: the agents of the nodes of the snapshots that this node has.
    """

    node: str
    snapshots: dict[str, dict[str, int]]
    known_nodes: list[AgentInfo] = []


def list_own_files(run: Run, node: str) -> NodeFiles:
    """Return the files of a run on this node, whose name is `node`."""
    known = {info.node: info for pending in run.pending_manifests() for info in pending.nodes}
    snapshots = {
        snapshot: {name: size for name, size in files.items() if records.is_restored(name)}
        for snapshot, files in list_snapshots(run.path.parents[1], run.name).items()
    }
    return NodeFiles(node, snapshots, list(known.values()))


class Search:
    """A search for snapshots among nodes.

    Args:
        run: the run on this node.
        here: the name of this node.
        nodes: the files of nodes that need not be asked.
        infos: the agents of these nodes and of others.
        tls: certificates for the connections; None if they are unencrypted.
        lineage: the lineage of the run. Superseded snapshots are skipped.
        only: the names of the files that are searched; None for all files of a snapshot.
        deadline: when all requests end. By default, `LONGEST_WAIT` seconds from now.

    Attributes:
        nodes: the files of each node that answered, or did not need to be asked.
        infos: the agents, with those of the nodes that answered added.
    """

    def __init__(
        self,
        run: Run,
        here: str,
        nodes: Sequence[NodeFiles],
        infos: Mapping[str, AgentInfo],
        tls: Tls | None = None,
        lineage: Lineage | None = None,
        deadline: Deadline | None = None,
        only: Collection[str] | None = None,
    ) -> None:
        self.nodes = list(nodes)
        self.infos = dict(infos)
        self._run = run
        self._here = here
        self._tls = tls
        self._lineage = lineage
        self._only = only
        self._deadline = deadline or Deadline(LONGEST_WAIT)
        self._silent: dict[str, StoreError] = {}  # nodes that did not answer in time
        self._asked: dict[tuple[str, str], AgentInfo] = {}
        self._manifests: dict[tuple[str, SnapshotDirectory], Manifest] = {}
        self._lock = threading.Lock()
        self._readers: Counter[str] = Counter()  # by save: the nodes that were asked for its nodes
        self._nodes_of_save: dict[str, list[AgentInfo]] = {}

    @property
    def unanswered(self) -> list[AgentInfo]:
        """The agents that were asked and did not answer."""
        answered = {each.node for each in self.nodes}
        return [info for info in self._asked.values() if info.node not in answered]

    def ask(
        self,
        is_enough: Callable[[], bool] = lambda: False,
        agents: Callable[[], Iterable[AgentInfo]] | None = None,
        *,
        follows: bool = True,
    ) -> None:
        """Ask nodes for their files, then the nodes that these nodes know, and so on.

        Perhaps only one node knows the nodes of an earlier training, or knows another address of
        such a node than this node does. No address is asked twice.

        Args:
            is_enough: returns whether the answers so far suffice. If so, no others are awaited, and
                if it is true at first, none is asked.
            agents: returns the agents to ask; by default, all in `infos`.
            follows: whether to ask the nodes that nodes know.
        """
        if is_enough():
            return
        names = {each.node for each in self.nodes}
        checked = len(names)
        to_ask = [
            *(self.infos.values() if agents is None else agents()),
            *(info for each in self.nodes for info in each.known_nodes),
        ]
        pending: dict[Future[NodeFiles], AgentInfo] = {}
        with (
            ThreadPoolExecutor(MOST_REQUESTS, "shardwise-ask") as pool,
            ExitStack() as abort_unanswered,
        ):
            while True:
                for info in to_ask:
                    if info.node not in names and (info.node, info.url) not in self._asked:
                        self._asked[info.node, info.url] = info
                        with suppress(StoreError):  # the URL or the token is invalid
                            client = self._make_client(info, FIRST_CONNECT_TIMEOUT)
                            abort_unanswered.callback(client.abort)
                            pending[pool.submit(self._list_files, client, info, follows)] = info
                if not pending:
                    return
                # To check takes the longer, the more nodes have answered.
                if len(names) > checked + checked // 8:
                    checked = len(names)
                    if is_enough():
                        return
                to_ask = []
                for future in wait(pending, return_when=FIRST_COMPLETED).done:
                    info = pending.pop(future)
                    with suppress(OSError):
                        files = future.result()
                        to_ask += files.known_nodes
                        if info.node not in names:
                            names.add(info.node)
                            self.nodes.append(files)
                            self.infos[info.node] = info

    def _list_files(self, client: AgentClient, info: AgentInfo, follows: bool) -> NodeFiles:
        """Return the files of the run on a node, as its agent lists them."""
        with closing(client):  # so few of the nodes have a connection at the same time
            snapshots = client.list_files(self._run.name)
            known = self._nodes_of_newest(client, snapshots) if follows else []
        return NodeFiles(info.node, snapshots, known)

    def _nodes_of_newest(
        self, client: AgentClient, snapshots: Mapping[str, Mapping[str, int]]
    ) -> list[AgentInfo]:
        """Return the nodes of the newest snapshot whose pending manifest a node can provide.

        All nodes of a snapshot have the same list, which is long. So only a few of them are asked.
        """
        deadline = Deadline(READ_TIMEOUT)
        places = [each for name in snapshots if (each := self._run.snapshot(name))]
        for place in sorted(places, key=lambda each: each.step, reverse=True):
            if records.PENDING not in snapshots[place.name]:
                continue
            if deadline.has_passed():  # the node answers too slowly
                return []
            save_id = place.save_id
            with self._lock:
                if self._readers[save_id] >= MOST_READERS:
                    return self._nodes_of_save.get(save_id, [])
                self._readers[save_id] += 1
            try:
                nodes = self._read_pending_of(client, place).nodes
            except OSError:
                with self._lock:
                    self._readers[save_id] -= 1
                continue
            self._nodes_of_save[save_id] = nodes
            return nodes
        return []

    def _read_pending_of(self, client: AgentClient, place: SnapshotDirectory) -> PendingManifest:
        data = client.read(self._run.name, place.name, records.PENDING, limit=LARGEST_RECORD)
        return decode_record(data, PendingManifest, records.PENDING)

    def read(self, node: str, place: SnapshotDirectory, name: str) -> bytes:
        """Return the contents of a small file of a node. A node that was silent is not asked again.

        Raises:
            OSError: the node does not answer, or does not have the file.
        """
        if node == self._here:
            return place.read_file(name)
        if node in self._silent:
            raise self._silent[node]
        client = self._make_client(self.infos[node], CONNECT_TIMEOUT)
        try:
            with closing(client):
                return client.read(self._run.name, place.name, name, limit=LARGEST_RECORD)
        except StoreError as error:
            if isinstance(error.__cause__, TimeoutError):
                self._silent[node] = error
            raise

    def _make_client(self, info: AgentInfo, connect_timeout: float) -> AgentClient:
        return AgentClient(
            info,
            connect_timeout=connect_timeout,
            read_timeout=READ_TIMEOUT,
            tls=None if self._tls is None else self._tls.for_client(),
            deadline=self._deadline,
        )

    def choose_snapshot(
        self, step: int | None, *, damaged: int | None = None, nodes_read: Collection[str] = ()
    ) -> SnapshotLocations:
        """Return the newest snapshot that has a manifest and can be read completely.

        Args:
            step: the only step to consider; None for all steps.
            damaged: a step whose files were found to be damaged; None in the first search. Newer
                steps are not considered. The damaged step is considered again if a node outside
                `nodes_read` stores some of its files.
            nodes_read: the nodes that the damaged step was read from.
        """
        skipped: list[tuple[int, str]] = []
        for candidate in self._candidate_steps(step, damaged, nodes_read):
            found = self._assemble_step(candidate)
            if not isinstance(found, str):
                return msgspec.structs.replace(found, skipped=skipped)
            skipped.append((candidate, f"memory: {found}"))
        return SnapshotLocations(skipped=skipped)

    def is_complete(self, step: int | None) -> bool:
        """Return whether no other node can hold a newer snapshot than these nodes do.

        The newest step that these nodes know must be complete on these nodes, and saved after the
        run was last resumed. Then the nodes of this step also know every later step of the same
        training, because no step is committed without them.

        Args:
            step: consider only this step.
        """
        if self._lineage is None:
            return False
        newest = next(iter(self._candidate_steps(step)), None)
        if newest is None:
            return False
        return not isinstance(self._assemble_step(newest, epoch=self._lineage.epoch), str)

    def _candidate_steps(
        self, step: int | None, damaged: int | None = None, nodes_read: Collection[str] = ()
    ) -> list[int]:
        """Return the steps to consider, newest first."""
        nodes_of: dict[int, set[str]] = {}
        for each in self.nodes:
            for place in self._places_of(each):
                nodes_of.setdefault(place.step, set()).add(each.node)
        retries_damaged = not nodes_of.get(damaged or 0, set()) <= set(nodes_read)
        return [
            number
            for number in sorted(nodes_of, reverse=True)
            if step in (None, number)
            and (damaged is None or number < damaged or (number == damaged and retries_damaged))
        ]

    def _places_of(self, files: NodeFiles) -> list[SnapshotDirectory]:
        return [each for name in files.snapshots if (each := self._run.snapshot(name))]

    def _assemble_step(self, step: int, epoch: int | None = None) -> SnapshotLocations | str:
        """Return where the files of a step are, or why the step cannot be read.

        Args:
            step: the step.
            epoch: consider only saves of this epoch.
        """
        places = [place for each in self.nodes for place in self._places_of(each)]
        found = {place: self._read_pending(place) for place in places if place.step == step}
        latest = sorted(found, key=lambda place: _age_of(found[place]), reverse=True)
        reasons: list[str] = []
        for place in latest:
            pending = found[place]
            if not any(MANIFEST in each.snapshots.get(place.name, {}) for each in self.nodes):
                continue
            if epoch is not None and (pending is None or pending.epoch != epoch):
                continue
            locations = self._why_superseded(step, pending) or self._assemble(place, pending)
            if not isinstance(locations, str):
                return locations
            reasons.append(locations)
        return "; ".join(filter(None, dict.fromkeys(reasons))) or NOT_COMMITTED

    def _read_manifest(self, node: str, place: SnapshotDirectory) -> Manifest:
        """Return a manifest, which is read from a node only once.

        Raises:
            OSError: the node does not answer, or does not have the manifest.
            FormatError: the manifest is damaged, or of another save.
        """
        if (node, place) not in self._manifests:
            manifest = decode_manifest(self.read(node, place, MANIFEST))
            if manifest.save_id != place.save_id:
                raise FormatError(f"the manifest in {place.name} is of save {manifest.save_id}")
            self._manifests[node, place] = manifest
        return self._manifests[node, place]

    def _why_superseded(self, step: int, pending: PendingManifest | None) -> str:
        """Return why a save is superseded, or "" if it is not.

        A save whose epoch is unknown counts as superseded.
        """
        resumption = None if self._lineage is None else self._lineage.last_resumption_before(step)
        if resumption is None:
            return ""
        if pending is None:
            return "no pending manifest says whether the run has resumed from an older step since"
        if pending.epoch >= resumption.epoch:
            return ""
        if resumption.step < 0:
            return "superseded: the run started anew"
        return f"superseded: the run resumed from step {resumption.step}"

    def _read_pending(self, place: SnapshotDirectory) -> PendingManifest | None:
        """Return the pending manifest of a save, from the first node where it is readable."""
        for each in self.nodes:
            if records.PENDING in each.snapshots.get(place.name, {}):
                with suppress(OSError):
                    data = self.read(each.node, place, records.PENDING)
                    return decode_record(data, PendingManifest, records.PENDING)
        return None

    def _assemble(
        self, place: SnapshotDirectory, pending: PendingManifest | None
    ) -> SnapshotLocations | str:
        """Return where the files of a save are, or why it cannot be read.

        All nodes have the same manifest, unless a manifest is damaged. So each one is tried.

        Args:
            pending: the pending manifest, from which the protection is computed; None if no node
                has it.
        """
        reasons: list[str] = []
        for each in self.nodes:
            if MANIFEST in each.snapshots.get(place.name, {}):
                try:
                    files = self._read_manifest(each.node, place).files
                except (FormatError, OSError) as error:
                    reasons.append(f"node {each.node}: {error}")
                    continue
                return self._find_files(place, files, pending, each.node)
        return "; ".join(reasons)

    def _find_files(
        self,
        place: SnapshotDirectory,
        files: Sequence[FileEntry],
        pending: PendingManifest | None,
        source: str,
    ) -> SnapshotLocations | str:
        """Return where the files of a manifest are, or which of them cannot be read.

        Args:
            files: the files in the manifest of the save.
            pending: as for `_assemble`.
            source: the node that provided the manifest.
        """
        size_of = {file.name: file.size for file in files}
        files_of = {each.node: each.snapshots.get(place.name, {}) for each in self.nodes}
        nodes_by_file: dict[str, list[str]] = {name: [] for name in size_of}
        for node, names in files_of.items():
            for name, size in names.items():
                if size_of.get(name) == size:
                    nodes_by_file[name].append(node)
        if self._only is not None:
            nodes_by_file = {name: nodes_by_file[name] for name in self._only}
        lost = {name for name, nodes in nodes_by_file.items() if not nodes}
        protection: Protection | None = None
        if pending is not None and pending.parity:
            try:
                protection = plan_protection(pending, files)
            except (StoreError, ValueError) as error:
                return str(error)
            lost &= find_unreadable_files(protection, files_of)
        if lost:
            shown = ", ".join(sorted(lost)[:MOST_FILES_SHOWN])
            more = len(lost) - MOST_FILES_SHOWN
            return f"no reachable node has {shown}" + (f" and {more} more" if more > 0 else "")
        nodes_by_file[MANIFEST] = [source]
        infos = {node: self.infos[node] for node, names in files_of.items() if names}
        epoch = None if pending is None else pending.epoch
        return SnapshotLocations(
            place.step, place.save_id, nodes_by_file, size_of, infos, protection, epoch=epoch
        )


def _age_of(pending: PendingManifest | None) -> tuple[int, float]:
    """Return a key that sorts older saves of a step first."""
    return (-1, 0.0) if pending is None else (pending.epoch, pending.saved_at)
