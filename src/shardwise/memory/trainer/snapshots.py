"""The snapshots of a run, as its ranks make them: staged here, and left to the agent by records."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace

import msgspec

from shardwise.engine.compare import compare_ranks
from shardwise.engine.exchange import exchange
from shardwise.engine.group import Group
from shardwise.engine.planning import PlannedSave, Save, plan_together
from shardwise.engine.save import SaveReport, refuse_existing, refuse_if_full
from shardwise.errors import StoreError
from shardwise.events import Recorder
from shardwise.manifest.names import new_save_id
from shardwise.memory.agent.guard import gaps
from shardwise.memory.agent.keeper import Keeper
from shardwise.memory.home import Place, Run
from shardwise.memory.lineage import Lineage, go_on_from
from shardwise.memory.membership import meet, reaching
from shardwise.memory.node.branches import leave_behind, refuse_to_go_back
from shardwise.memory.node.predecessors import remove_predecessors
from shardwise.memory.node.tenants import evict
from shardwise.memory.options import Memory
from shardwise.memory.ranks import RankLock, forget_lost
from shardwise.memory.records import AgentInfo
from shardwise.memory.registry import Enrolment, Registry, remember_nodes
from shardwise.memory.remote.watch import Agents
from shardwise.memory.spawn import ensure_agent
from shardwise.memory.tls import Tls
from shardwise.memory.trainer.draft import Storing, draft_of
from shardwise.memory.trainer.handle import Begun, SaveHandle, Stages
from shardwise.memory.trainer.rings import Rings
from shardwise.memory.trainer.staging import Part, Staging
from shardwise.plan.cache import PlanCache
from shardwise.store import Store


class Snapshots:
    """What the ranks of a run do with the memory of its nodes. Made by all ranks together.

    Args:
        root: where the run persists its checkpoints; tells the run from others.
        options: as the user gave them.
        group: the ranks.

    Attributes:
        skipped: saves that were left out as no slot was free.
        registry: the nodes of the run, as its root knows them.
    """

    def __init__(self, root: Store, options: Memory, group: Group) -> None:
        self._root = root
        self._options = options = reaching(options, group)
        self._group = group
        self._begun = Begun()
        self.skipped = 0
        self.home, self.meeting = meet(root, options, group)
        self.run: Run = self.home.run(self.meeting.lineage.run)
        self.registry = Registry(root, self.run.name)
        self._enrolment = Enrolment(self.registry)
        self._presence = self._take_its_place()
        self._evict_movers()
        self._rings = Rings(options, self.meeting, group)
        self._staging = Staging(
            self.home,
            self.run,
            group.rank,
            options,
            self.home.wake,
            nodes=len(set(self.meeting.node_of)),
            ranks_here=self.meeting.node_of.count(self.node),
        )
        self._keeper = Keeper(self.home, options) if self.is_first_of_node else None
        if group.rank == 0:
            self._warn_of_gaps()

    def _take_its_place(self) -> RankLock:
        """On each node. All ranks together."""
        taken: list[RankLock] = []

        def speak() -> bytes:
            taken.append(RankLock(self.run, self._group.rank))
            return b""

        exchange(self._group, "taking their places", speak, lambda _: b"")
        return taken[0]

    def _warn_of_gaps(self) -> None:
        options = self._options
        kept = {"copies": options.copies, "parity": options.parity, "group": options.group}
        for gap in gaps(self.meeting.nodes, **kept):
            warnings.warn(f"snapshots in memory: {gap}", RuntimeWarning, stacklevel=4)

    def _evict_movers(self) -> None:
        """Give memory back: of runs and ranks that were on this node before, and are no more."""

        def speak() -> bytes:
            if self.is_first_of_node:
                forget_lost(self.run)
                remove_predecessors(self.home, self.run, str(self._root))
                remember_nodes(self.run, self.meeting.nodes)
                node_of = self.meeting.node_of
                evict(self.run, lambda rank: node_of[rank : rank + 1] == [self.node])
            return b""

        exchange(self._group, "giving memory back", speak, lambda _: b"")

    @property
    def tls(self) -> Tls | None:
        """By what the nodes of the run know each other."""
        return self._options.tls

    @property
    def node(self) -> str:
        """The name of this rank's node."""
        return self.meeting.node_of[self._group.rank]

    @property
    def is_first_of_node(self) -> bool:
        """Whether this rank is the first of its node."""
        return self.meeting.node_of.index(self.node) == self._group.rank

    def save(
        self,
        prepare: Callable[[], Save],
        storing: Storing,
        plans: PlanCache,
        recorder: Recorder,
    ) -> SaveHandle | None:
        """Stage a snapshot, and leave it to the agents; None if it was skipped.

        Args:
            prepare: says what this rank brings; its store is where the step belongs in storage.
            storing: what is to become of it there.

        Raises:
            ShardwiseError: on all ranks: this save cannot be, or an earlier one failed meanwhile.
        """
        self.fence()
        sent = self._group.bytes_sent

        def request() -> Save:
            self._presence.refuse_followed()
            self._raise_failures()
            if self._keeper is not None:
                self._keeper.check()
            info = ensure_agent(self.home, self._options)
            if self.is_first_of_node:
                epoch = self.meeting.lineage.epoch
                self._enrolment.keep(info, epoch, prunes=self._group.rank == 0)
            job = prepare()
            refuse_to_go_back(self.run, job.options.step or 0, self.meeting.lineage)
            self._begun.settle(step=job.options.step or 0)  # of several, the last one is to stay
            staging = self._staging
            free = not staging.is_prepared or storing.durable or staging.has_free()
            record = msgspec.msgpack.encode((free, info))
            place = str(job.store) if storing.durable else f"memory, for {job.store}"
            return replace(job, place=place, message=record)

        def admit(job: Save, said: list[bytes]) -> str:
            if storing.durable:
                refuse_existing(job)
            heard = [msgspec.msgpack.decode(each, type=tuple[bool, AgentInfo]) for each in said]
            self.meeting.nodes = list({info.node: info for _, info in heard}.values())
            if self._options.when_full == "skip" and not all(free for free, _ in heard):
                return ""
            return new_save_id()

        def check_room(_: Save, nbytes: int) -> None:
            if storing.durable:
                refuse_if_full(self._root, nbytes)

        form = self._rings.form
        planned = plan_together(
            request, admit, self._group, plans, recorder, rings=form, check_room=check_room
        )
        if planned is None:
            self.skipped += 1
            return None
        if planned.save.options.check_replicas:
            compare_ranks(planned.description, planned.fragments, self._group)
        return self._begin(planned, storing, recorder, sent)

    def prepare(self, prepare: Callable[[], Save], plans: PlanCache, recorder: Recorder) -> int:
        """Allocate and touch the slots of all ranks; the bytes that were allocated for this one.

        Raises:
            ShardwiseError: on all ranks: the memory of a node is too small; says what it needs.
        """

        form = self._rings.form
        planned = plan_together(
            prepare, lambda *_: new_save_id(), self._group, plans, recorder, rings=form
        )
        if planned is None:
            raise RuntimeError("a plan was neither admitted nor refused")
        content, its_ring = self._rings.join(planned)
        allocated: list[int] = []

        def speak() -> bytes:
            allocated.append(self._staging.prepare(content, its_ring))
            return b""

        with recorder.stage("allocate"):
            exchange(self._group, "allocating slots", speak, lambda _: b"")
        return allocated[0]

    def fence(self) -> None:
        """Wait until what is being copied is copied."""
        self._staging.fence()

    def go_on_from(self, step: int | None) -> None:
        """Forget what is newer than what the run goes on from. All ranks together.

        Nodes out of reach, or without trainers, may keep some: the root says what is abandoned.
        """

        def answer(_: list[bytes]) -> bytes:
            lineage = go_on_from(self._root, self.meeting.lineage.run, step)
            return msgspec.msgpack.encode(lineage)

        reply = exchange(
            self._group, "discarding newer snapshots", lambda: self._discard(step), answer
        )
        self.meeting.lineage = msgspec.msgpack.decode(reply, type=Lineage)

    def _discard(self, step: int | None) -> bytes:
        if self.is_first_of_node:
            meeting, slots = self.meeting, self._options.slots
            leave_behind(self.run, step, meeting.lineage, meeting.node_of, slots)
        return b""

    def close(self, *, wait: bool, failed: bool) -> None:
        """Let go of the slots.

        Args:
            wait: until all that was begun is over. If the newest snapshot is in storage then, the
                memory is given back. Otherwise the agents go on alone.
            failed: this trainer counts as lost.

        Raises:
            StoreError: something failed.
        """
        try:
            if wait:
                self._finish()
            self.fence()
            if not failed:
                self._presence.end()
        finally:
            self._presence.leave()
            self._staging.close()
            if self._keeper is not None:
                self._keeper.stop()

    def _finish(self) -> None:
        """Wait until all that was begun is over. All ranks together."""

        def speak() -> bytes:
            self.fence()
            self._raise_failures()
            self._begun.settle()
            self._begun.await_removal()
            return msgspec.msgpack.encode(
                (self._presence.is_followed(), bool(self.run.steps()), self._begun.ends_durable())
            )

        def answer(said: list[bytes]) -> bytes:
            heard = [msgspec.msgpack.decode(each, type=tuple[bool, bool, bool]) for each in said]
            followed, held, durable = zip(*heard, strict=True)
            return b"1" if not any(followed) and (all(durable) or not any(held)) else b""

        if exchange(self._group, "finishing what was begun", speak, answer):
            self._give_back()

        def tell() -> bytes:
            self._raise_failures()  # of what comes after the last stage
            return b""

        exchange(self._group, "removing old checkpoints", tell, lambda _: b"")

    @property
    def _agents(self) -> Agents:
        first = self.meeting.node_of[0]
        leader = next(each for each in self.meeting.nodes if each.node == first)
        elsewhere = None if first == self.node else leader
        return Agents(self.home, elsewhere, self._options.tls, self._options.wait)

    def settle(self) -> None:
        """Wait until what is to be persisted is, or has failed. A rank may do so alone.

        Raises:
            StoreError: something failed, or the agent is gone.
        """
        self._staging.check()
        self._begun.settle(durable=True)

    def persist(self, step: int, *, removes: bool) -> bool:
        """Have the last snapshot persisted, if it is of this step, and say whether it is.

        All ranks together. `close` waits for it. Then older checkpoints are removed, if `removes`.
        """
        leads = self._group.rank == 0

        def speak() -> bytes:
            self.fence()
            return b"1" if self._begun.has_last(step) else b""

        def request() -> bytes:
            self._begun.persist_last(retains=leads and removes, leads=leads)
            self.home.wake()
            return b""

        if not exchange(self._group, "looking for the last snapshot", speak, min):
            return False
        exchange(self._group, "persisting the last snapshot", request, lambda _: b"")
        return True

    def take_failure(self) -> StoreError | None:
        """A failure in the background since the last save, which the caller reports instead."""
        try:
            self._raise_failures()
        except StoreError as error:
            return error
        return None

    def _give_back(self) -> None:
        """Leave nothing of the run in memory. All ranks together."""

        def remove_free() -> bytes:
            self._staging.remove()
            return b""

        def remove() -> bytes:
            if self.is_first_of_node:
                shutil.rmtree(self.run.path, ignore_errors=True)
                self._enrolment.end(self.node)
            return b""

        exchange(self._group, "giving memory back", lambda: self._discard(None), lambda _: b"")
        exchange(self._group, "giving memory back", remove_free, lambda _: b"")
        exchange(self._group, "giving memory back", remove, lambda _: b"")

    def _raise_failures(self) -> None:
        self._staging.check()
        self._begun.raise_failure()

    def _begin(
        self, planned: PlannedSave, storing: Storing, recorder: Recorder, sent: int
    ) -> SaveHandle:
        """Stage what was planned; what fails here the other ranks hear of when they next meet."""
        options = planned.save.options
        place = Place(self.run, options.step or 0)
        wanted = ("commit", "protect", "persist") if storing.durable else ("commit", "protect")
        first = self._group.rank == 0
        retains = first and storing.durable and storing.keep.removes
        content, its_ring = self._rings.join(planned)
        draft = None
        if planned.rank == 0:
            rings = self._rings.files
            draft = draft_of(
                planned, options, storing, self._options, self.meeting, str(self._root), rings
            )
        part = Part(
            place=place,
            planned=planned,
            content=content,
            ring=its_ring,
            draft=draft,
            stages=wanted,
            epoch=self.meeting.lineage.epoch,
        )
        with recorder.stage("stage"):
            staging = self._staging.begin(part)
        stages = Stages(self._agents, place, planned.save_id, wanted, first, retains, staging)
        self._begun.add(stages)
        report = SaveReport(
            path=str(planned.save.store if storing.durable else place.path),
            step=options.step,
            bytes_total=0,
            bytes_written=0 if content is None else content.layout.size,
            bytes_deduplicated=0,
            files=0,
            plan_cached=planned.cached,
            bytes_communicated=self._group.bytes_sent - sent,
            seconds=recorder.seconds(),
        )
        return SaveHandle(report, stages, staging)
