"""The actions of an agent, except those of the node that leads a save (`lead.py`)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace

import msgspec

from shardwise.kernel.deadline import Deadline
from shardwise.kernel.engine.root import Root
from shardwise.kernel.errors import FormatError, ShardwiseError, StoreError, StoreUnavailableError
from shardwise.kernel.manifest.manifest import MANIFEST, FileEntry, decode_manifest
from shardwise.kernel.store import Store, open_store
from shardwise.parts.lineage import read_lineage
from shardwise.parts.memory import records
from shardwise.parts.memory.agent.incoming import IncomingFile, rank_record_of
from shardwise.parts.memory.agent.protect import protect_others
from shardwise.parts.memory.agent.root_tasks import OpenedStores
from shardwise.parts.memory.decide import (
    Action,
    RunAction,
    agents_above,
    follows,
)
from shardwise.parts.memory.files import LARGEST_RECORD, decode_record, read_record, write_record
from shardwise.parts.memory.home import Run, SnapshotDirectory
from shardwise.parts.memory.observe import Observer, read_snapshots
from shardwise.parts.memory.options import Tls
from shardwise.parts.memory.rank_liveness import has_trainers
from shardwise.parts.memory.records import (
    PENDING,
    RESCUE,
    AgentInfo,
    PendingManifest,
    RankPart,
    StageOutcome,
)
from shardwise.parts.memory.remote.calls import Caller, ReceivedCalls, StageCall
from shardwise.parts.memory.remote.client import AgentClient
from shardwise.parts.memory.remote.snapshot_nodes import Nodes
from shardwise.parts.memory.replies import Replies, combine_replies
from shardwise.parts.memory.seal import MappedFiles, seal
from shardwise.parts.memory.states import RecordCache, SaveStates, read_state, request_rescue
from shardwise.parts.memory.times import (
    ANSWER_TIMEOUT,
    DAY,
    FIRST_CONNECT_TIMEOUT,
    OUTCOMES_WAIT,
    RETRY_PAUSE,
    SHORT_PATIENCE,
    UNTIL_UNFOLLOWED,
)
from shardwise.parts.memory.view import RootView, SnapshotView, on_this_node
from shardwise.parts.tiers.copying import FileCopier

log = logging.getLogger("shardwise.agent")
FILES_AT_ONCE = 2
MOST_RESCUERS = 32


@dataclass(frozen=True, slots=True)
class Follower:
    """Performs the actions that every node does for its own files.

    Attributes:
        node: the name of this node.
        mapped_files: the mappings of its files.
        tls: certificates for connections to other nodes.
        stores: the stores that the agent has opened.
        states: the states of the saves on this node.
        calls: the calls of other nodes to this one.
        stopping: set when the agent stops.
        clients: clients of the agents of nodes above this one.
    """

    node: str
    mapped_files: MappedFiles
    tls: Tls | None = None
    stores: OpenedStores = field(default_factory=OpenedStores)
    states: SaveStates = field(default_factory=SaveStates)
    calls: ReceivedCalls = field(default_factory=ReceivedCalls)
    stopping: threading.Event = field(default_factory=threading.Event)
    clients: dict[AgentInfo, AgentClient] = field(default_factory=dict)

    def seal(self, action: Action) -> None:
        """Compute the checksums of the files that this node's ranks staged."""
        place = action.place
        for name in action.names:
            part = read_record(rank_record_of(place, name), RankPart)
            if part is not None and part.file is not None:
                entry = seal(self.mapped_files.map(place.path / name, part.file.size), part.file)
                self.states.change(
                    place,
                    lambda state, entry=entry: msgspec.structs.replace(  # type: ignore[misc]
                        state, entries={**state.entries, entry.name: entry}
                    ),
                )

    def answer(self, action: Action) -> None:
        """Do what another node has called this node to do, and reply."""
        place = action.place
        stage = next(each for each in records.STAGES if on_this_node(each) == action.kind)
        if (call := self.calls.call_of(place, stage)) is None:
            return
        top, wait = call
        try:
            pending = self._wait_for_pending(place, wait)
        except StoreError as error:
            log.error("%s: %s", stage, error)
            replies = Replies(failures={self.node: str(error)})
        else:
            replies = self.fulfil(place, StageCall(pending, stage, top, wait))
        self.calls.reply(place, stage, call, replies.encode(place.save_id))

    def _wait_for_pending(self, place: SnapshotDirectory, wait: float) -> PendingManifest:
        """Return the pending manifest, or copy it from a node above, which has sent the call.

        Raises:
            StoreError: it did not come in time, or a record of a rank is damaged.
        """
        for _ in Deadline(wait).attempts(pause=RETRY_PAUSE):
            for name in filter(records.is_rank_record, place.list_names()):
                part = read_record(place.path / name, RankPart)
                if part is not None and part.above and not place.has(PENDING):
                    with suppress(StoreError):
                        self._copy_pending(place, part.above)
            if (pending := place.read_pending()) is not None:
                return pending
            place.refuse_abandoned()
        raise StoreError(
            f"timed out waiting for {PENDING} in {place.path}: the ranks of this node have ended, "
            "or are too slow, or no node above this one has it; see their logs"
        )

    def fulfil(self, place: SnapshotDirectory, call: StageCall) -> Replies:
        """Call the nodes below this node, do this node's part, and return all replies.

        Raises:
            StoreUnavailableError: the storage does not answer, so the agent must try again.
        """
        with self._calling_others(place, call) as others:
            own = self._do_part(place, call)
            return combine_replies([own, others()], call.pending)

    def _do_part(self, place: SnapshotDirectory, call: StageCall) -> Replies:
        """Do this node's part of a stage, unless it is done."""
        pending, stage = call.pending, call.stage
        works: dict[str, Callable[[SnapshotDirectory, PendingManifest, float], int]] = {
            "commit": self._wait_for_entries,
            "protect": self._protect_others,
            "persist": self._copy_files,
        }
        nodes = [info.node for info in pending.nodes]
        if self.node not in nodes:
            return Replies(failures={self.node: "this node does not take part in the save"})
        done = read_state(place).parts.get(stage)
        if done is None:
            done = try_stage(
                self.states,
                place,
                stage,
                self.node,
                lambda: works[stage](place, pending, call.wait),
            )
            self.states.end_part(place, stage, done)
        if done.failure:
            return Replies(failures={self.node: done.failure})
        entries = {}
        if stage == "commit":
            sealed = read_state(place).entries
            names = [name for name, _ in pending.files]
            entries = {names.index(name): entry for name, entry in sealed.items() if name in names}
        return Replies.of_node(nodes.index(self.node), done.bytes, entries)

    def _wait_for_entries(
        self, place: SnapshotDirectory, pending: PendingManifest, wait: float
    ) -> int:
        """Wait until this node's files are sealed, and return their bytes."""
        deadline, total, cache = Deadline(wait), 0, RecordCache()
        for name, node in pending.files:
            if node == self.node:
                total += place.wait_until(
                    lambda name=name: _find_entry(place, name, cache),  # type: ignore[misc]
                    f"the checksums of {name}",
                    deadline,
                ).size
        return total

    def _protect_others(
        self, place: SnapshotDirectory, pending: PendingManifest, wait: float
    ) -> int:
        """Make the copies or parity that this node stores for others."""
        place.wait_for_manifest(Deadline(wait))  # it travels at the same time
        infos = agents_of(pending, place.run)
        with closing(Nodes(place, infos, self.node, pending.wait, self.tls)) as nodes:
            return nodes.retry(
                lambda: protect_others(place, pending, nodes, self.node, self.mapped_files)
            )

    def _copy_files(self, place: SnapshotDirectory, pending: PendingManifest, wait: float) -> int:
        """Copy several files at a time to storage, each while its rank copies it into memory."""
        copier = FileCopier(pending.budget)

        def copy(name: str, store: Store) -> int:
            incoming = IncomingFile(place, name, wait, self.mapped_files)
            copier.copy_from_memory(incoming.data, incoming.entry, store, incoming.wait_for)
            return incoming.entry.size

        with (
            self.stores.open(pending.storage.root) as root,
            ThreadPoolExecutor(FILES_AT_ONCE, "shardwise-files") as pool,
        ):
            store = Root(root).at(place.step).store
            names = [name for name, node in pending.files if node == self.node]
            return sum(pool.map(lambda name: copy(name, store), names))

    @contextmanager
    def _calling_others(
        self, place: SnapshotDirectory, call: StageCall
    ) -> Iterator[Callable[[], Replies]]:
        """Call the nodes below this node while the block runs.

        Yields:
            A function that waits for the replies and returns them.
        """
        children = call.tree.children(self.node)
        if not children:
            yield Replies
            return
        infos = agents_of(call.pending, place.run)
        with (
            closing(
                Nodes(place, infos, self.node, call.wait, self.tls, timeout=call.timeout)
            ) as nodes,
            ThreadPoolExecutor(1, "shardwise-calls") as pool,
        ):
            caller = Caller(nodes, call)
            replies = pool.submit(caller.call, children)
            try:
                yield replies.result
            except BaseException:
                caller.stop()
                raise

    def rescue(self, action: Action) -> None:
        """Request to persist a snapshot that was for memory only.

        Ask the leader first, then the first other nodes and this node, until a node accepts.
        """
        place = action.place
        log.warning("%s: persisting step %d", action.why, place.step)
        pending = require_pending(place)
        infos = agents_of(pending, place.run)
        with closing(Nodes(place, infos, self.node, FIRST_CONNECT_TIMEOUT, self.tls)) as nodes:
            others = [info.node for info in pending.nodes[:MOST_RESCUERS]]
            for node in dict.fromkeys([pending.leader, *others, self.node]):
                try:
                    if node == self.node:
                        request_rescue(self.states, place, node)
                    else:
                        nodes.call(node, RESCUE, self.node, patience=0.0, wait=0.0)
                except OSError as error:
                    log.warning("node %s: %s", node, error)
                    continue
                self.states.change(
                    place, lambda state: msgspec.structs.replace(state, rescue_sent=True)
                )
                return

    def follow(self, action: RunAction) -> None:
        """Ask a node above this one for the pending manifest and the outcomes of stages.

        Return when nothing is waited for, or the trainers have ended long ago.
        """
        run, cache, versions = action.run, RecordCache(), dict[str, int]()
        known: set[SnapshotDirectory] = set()
        heard_at, attended_at = self.states.heard_at, time.monotonic()
        heard_at[run.name] = attended_at
        pause = RETRY_PAUSE
        try:
            while not self.stopping.is_set():
                snapshots = read_snapshots(run.snapshots(), self.node, cache)
                followed = [each for each in snapshots if follows(each)]
                attended_at = time.monotonic() if has_trainers(run) else attended_at
                if not followed or time.monotonic() - attended_at > UNTIL_UNFOLLOWED:
                    return
                if not (new := {each.place for each in followed}) <= known:
                    versions.clear()  # what was told before is new for these snapshots
                known = new
                try:
                    silence = self._ask_above(run, agents_above(snapshots), followed, versions)
                    heard_at[run.name], pause = time.monotonic() - silence, RETRY_PAUSE
                except StoreError as error:
                    if pause == RETRY_PAUSE:
                        log.warning("run %s: no outcomes from other nodes: %s", run.name, error)
                    self.stopping.wait(pause)
                    pause = min(2 * pause, SHORT_PATIENCE)
        finally:
            heard_at.pop(run.name, None)

    def _ask_above(
        self,
        run: Run,
        above: Sequence[AgentInfo],
        followed: Sequence[SnapshotView],
        versions: dict[str, int],
    ) -> float:
        """Ask the nearest node above this one that answers for outcomes, and record them.

        Returns:
            For how many seconds that node has not heard of the leader.

        Raises:
            StoreError: no node answers.
        """
        failure = StoreError("no node is above this one")
        for info in above:
            try:
                version = versions.get(info.url, 0)
                found = self._client(info).read_outcomes(run.name, version, OUTCOMES_WAIT)
            except StoreError as error:
                failure = error
                continue
            for snapshot in followed:
                place = snapshot.place
                with suppress(StoreError):  # it is asked again
                    # Where nothing is above, the pending manifest comes from a rank.
                    if snapshot.pending is None and snapshot.above:
                        self._copy_pending(place, [info])
                self._record_outcomes(place, found.saves.get(place.save_id, {}), info)
            versions[info.url] = found.version
            return found.silence
        raise failure

    def _client(self, info: AgentInfo) -> AgentClient:
        if info not in self.clients:
            tls = None if self.tls is None else self.tls.for_client()
            self.clients[info] = AgentClient(info, read_timeout=ANSWER_TIMEOUT, tls=tls)
        return self.clients[info]

    def _read(self, info: AgentInfo, place: SnapshotDirectory, name: str) -> bytes:
        return self._client(info).read(place.run.name, place.name, name, limit=LARGEST_RECORD)

    def _copy_pending(self, place: SnapshotDirectory, above: Sequence[AgentInfo]) -> None:
        """Copy the pending manifest of a save from the nearest node above that has it by now."""
        for info in above:
            with suppress(FileNotFoundError):
                data = self._read(info, place, PENDING)
                pending = decode_record(data, PendingManifest, f"{PENDING} of node {info.node}")
                write_record(place.path / PENDING, pending)
                self.states.tell()
                return

    def _record_outcomes(
        self, place: SnapshotDirectory, told: Mapping[str, StageOutcome], info: AgentInfo
    ) -> None:
        """Record what a node above has told; the outcome of the commit after the manifest."""
        known, now = read_state(place).outcomes, time.time()
        new = {
            stage: msgspec.structs.replace(done, ended_at=now)
            for stage, done in told.items()
            if stage not in known
        }
        commit = new.get("commit")
        if commit is not None and not commit.failure and not place.is_committed():
            try:
                data = self._read(info, place, MANIFEST)
                if decode_manifest(data).save_id != place.save_id:
                    raise FormatError(f"the manifest of {place.name} on {info.node} is another")
                write_record(place.manifest_path, data)
            except FileNotFoundError:
                pass  # the snapshot was freed, here or there
            except StoreError:
                return  # it is asked again
            except FormatError as error:
                failure = f"the manifest on node {info.node} is damaged: {error}"
                new["commit"] = msgspec.structs.replace(commit, failure=failure)
        with suppress(FileNotFoundError):
            self.states.end(place, new)


def try_stage(
    states: SaveStates, place: SnapshotDirectory, stage: str, node: str, work: Callable[[], int]
) -> StageOutcome:
    """Do the work of a stage on a node, and return its outcome. If the work fails, log why.

    Args:
        work: does the work, and returns the number of bytes processed.

    Raises:
        StoreUnavailableError: the storage does not answer, so the agent must try again. After
            `DAY` seconds, this counts as a failure.
    """
    start = time.monotonic()
    nbytes, failure = 0, ""
    try:
        nbytes = work()
    except Exception as error:  # any error: the outcome must say it, or the save is never completed
        is_outage = isinstance(error, StoreUnavailableError)
        if is_outage and states.retry(place, stage, str(error), DAY):
            raise
        level = logging.INFO if place.is_abandoned() else logging.ERROR
        is_expected = isinstance(error, (ShardwiseError, OSError))
        failure = f"{type(error).__name__}: {error}"
        log.log(level, "%s", failure, exc_info=not is_expected)
    seconds = time.monotonic() - start
    return StageOutcome(
        seconds=seconds, bytes=nbytes, failure=failure, node=node, ended_at=time.time()
    )


def require_pending(place: SnapshotDirectory) -> PendingManifest:
    """Return the pending manifest of a save, or the copy of it.

    Raises:
        StoreError: this node has neither, because the snapshot is being removed, or it is damaged.
    """
    pending = place.read_pending()
    if pending is None:
        raise StoreError(
            f"{place.path}: the pending manifest of save {place.save_id} was removed or is "
            "damaged, so the save cannot be completed: save again"
        )
    return pending


def agents_of(pending: PendingManifest, run: Run) -> list[AgentInfo]:
    """Return the agents of a snapshot's nodes, with the newest address that this node knows."""
    if len(pending.nodes) == 1:  # only this node
        return pending.nodes
    manifests = [pending, *run.pending_manifests()]
    newest = {info.node: info for each in manifests for info in each.nodes}
    return [newest[info.node] for info in pending.nodes]


def _find_entry(place: SnapshotDirectory, data_file: str, cache: RecordCache) -> FileEntry | None:
    """Return the entry of a file of this node, or None while it is not sealed.

    Raises:
        StoreError: its rank could not stage it, or its record is damaged.
    """
    if (entry := read_state(place, cache).entries.get(data_file)) is not None:
        return entry
    part = cache.read(rank_record_of(place, data_file), RankPart)
    if isinstance(part, StoreError):
        raise part
    if part is not None and part.failure:
        raise StoreError(part.failure)
    return None


def look_up_root(action: RunAction, observer: Observer) -> None:
    """Read the root of a run without trainers, and pass the result to the observer.

    If the root cannot be read, the observer keeps the earlier result, with `is_reachable=False`.
    """
    run, now = action.run, observer.clock()
    earlier = observer.run(run).root or RootView(read_at=now)
    try:
        path = run.root()
        store = None if path is None else open_store(path)
        lineage = None if store is None else read_lineage(store)
        if lineage is not None and lineage.run != run.name:
            lineage = None
        reads_steps = action.reads_steps and lineage is not None
        steps = Root(store).steps() if store is not None and reads_steps else []
        found = RootView(
            read_at=now,
            is_reachable=store is not None,
            lineage=lineage,
            newest_step=max(steps, default=None),
            has_read_steps=reads_steps,
        )
    except (ShardwiseError, OSError, ValueError) as error:
        log.info("run %s: cannot read its root: %s", run.name, error)
        found = replace(earlier, read_at=now, is_reachable=False)
    observer.set_root(run, found)
