"""The snapshots of a run, as its ranks make them: staged here, and left to the agent by notes."""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import partial

import msgspec

from shardwise.engine.content import Content
from shardwise.engine.doorbell import ring
from shardwise.engine.exchange import exchange
from shardwise.engine.group import Group
from shardwise.engine.options import SaveOptions
from shardwise.engine.planning import Planned, Wish, plan_together
from shardwise.engine.replicas import check_replicas
from shardwise.engine.save import Save, SaveReport, refuse_existing
from shardwise.errors import ShardwiseError, StoreError
from shardwise.events import Recorder
from shardwise.manifest.names import data_file, new_save_id
from shardwise.memory import notes
from shardwise.memory.guard import gaps
from shardwise.memory.handle import SaveHandle, Stages
from shardwise.memory.home import Home, Run, new_run, write_note
from shardwise.memory.interface import refuse_unreachable
from shardwise.memory.keeper import Keeper
from shardwise.memory.notes import Card, Draft, Staged
from shardwise.memory.options import Memory
from shardwise.memory.place import Place
from shardwise.memory.retire import discard_newer
from shardwise.memory.slots import Slot, Slots
from shardwise.memory.spawn import agent_of
from shardwise.memory.stage import stage
from shardwise.memory.tls import Tls
from shardwise.plan.cache import PlanCache
from shardwise.retention import Keep
from shardwise.store import Store

RUN = "run.json"
LARGEST_RUN = 4096
THREADS = 4
THREADS_BESIDE_TRAINING = 1
POLL = 0.002


class Meeting(msgspec.Struct, array_like=True):
    """Which run this is, its nodes, and the node of each rank."""

    run: str
    nodes: list[Card]
    node_of: list[str]


class Snapshots:
    """What the ranks of a run do with the memory of its nodes. Made by all ranks together.

    Args:
        root: where the run persists its checkpoints; tells the run from others.
        options: as the user gave them.
        group: the ranks.

    Attributes:
        skipped: saves that were left out as no slot was free.
    """

    def __init__(self, root: Store, options: Memory, group: Group) -> None:
        self._root = root
        self._options = options
        self._group = group
        threads = THREADS_BESIDE_TRAINING if options.overlap else THREADS
        self._pool = ThreadPoolExecutor(threads, "shardwise-stage")
        self._background = ThreadPoolExecutor(1, "shardwise-background")
        self._under_way: Future[None] | None = None
        self._open: list[Stages] = []
        self._failure = ""
        self._prepared = False
        self.skipped = 0
        found: list[tuple[Home, Card]] = []

        def speak() -> bytes:
            home = Home(options.dir)
            found.append((home, agent_of(home, options)))
            return msgspec.msgpack.encode(found[0][1])

        def answer(said: list[bytes]) -> bytes:
            cards = [msgspec.msgpack.decode(each, type=Card) for each in said]
            refuse_unreachable(cards)
            nodes = {card.node: card for card in cards}
            node_of = [card.node for card in cards]
            meeting = Meeting(run_of(root), list(nodes.values()), node_of)
            return msgspec.msgpack.encode(meeting)

        reply = exchange(group, "finding the agents of the nodes", speak, answer)
        self.meeting = msgspec.msgpack.decode(reply, type=Meeting)
        self.home, self._card = found[0]
        self.run: Run = self.home.run(self.meeting.run)
        self._slots = Slots(self.run, group.rank, options.slots + 1)
        self._keeper = Keeper(self.home, options) if self.is_first_of_node else None
        if group.rank == 0:
            self._warn_of_gaps()

    def _warn_of_gaps(self) -> None:
        options = self._options
        found = gaps(
            self.meeting.nodes,
            copies=options.copies,
            parity=options.parity,
            group=options.group,
        )
        for gap in found:
            warnings.warn(f"snapshots in memory: {gap}", RuntimeWarning, stacklevel=4)

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
        keep: Keep | None,
        plans: PlanCache,
        recorder: Recorder,
    ) -> SaveHandle | None:
        """Stage a snapshot, and leave it to the agents; None if it was skipped.

        Args:
            prepare: says what this rank brings; its store is where the step belongs in storage.
            keep: persist it there, and keep in the root what this says; None: in memory only.

        Raises:
            ShardwiseError: on all ranks: this save cannot be, or an earlier one failed meanwhile.
        """
        self.fence()
        sent = self._group.bytes_sent
        brought: list[Save] = []

        def wish() -> Wish:
            self._raise_failures()
            if self._keeper is not None:
                self._keeper.check()
            self._card = agent_of(self.home, self._options)
            free = not self._prepared or keep is not None or self._slots.has_free()
            note = msgspec.msgpack.encode((free, self._card))
            brought.append(prepare())
            job = brought[0]
            return Wish(held=job.held, options=job.options, place=str(job.store), note=note)

        def admit(said: list[bytes]) -> str:
            if keep is not None:
                refuse_existing(brought[0])
            heard = [msgspec.msgpack.decode(each, type=tuple[bool, Card]) for each in said]
            self.meeting.nodes = list({card.node: card for _, card in heard}.values())
            if self._options.when_full == "skip" and not all(free for free, _ in heard):
                return ""
            return new_save_id()

        planned = plan_together(wish, admit, self._group, plans, recorder)
        if planned is None:
            self.skipped += 1
            return None
        if brought[0].options.check_replicas:
            check_replicas(planned.described, self._group)
        return self._begin(planned, brought[0], keep, recorder, sent)

    def prepare(self, prepare: Callable[[], Save], plans: PlanCache, recorder: Recorder) -> int:
        """Allocate and touch the slots of all ranks; the bytes that were allocated for this one.

        Raises:
            ShardwiseError: on all ranks: the memory of a node is too small; says what it needs.
        """

        def wish() -> Wish:
            job = prepare()
            return Wish(held=job.held, options=job.options, place=str(job.store))

        planned = plan_together(wish, lambda _: new_save_id(), self._group, plans, recorder)
        allocated = 0

        def speak() -> bytes:
            nonlocal allocated
            content = planned.content() if planned is not None else None
            if content is not None:
                allocated = self._allocate(content.layout.size)
            return b""

        with recorder.stage("allocate"):
            exchange(self._group, "allocating slots", speak, lambda _: b"")
        return allocated

    def _allocate(self, nbytes: int) -> int:
        self._prepared = True
        return self._slots.prepare(nbytes)

    def fence(self) -> None:
        """Wait until what is being copied is copied."""
        if self._under_way is not None:
            self._under_way.result()
            self._under_way = None

    def go_on_from(self, step: int | None) -> None:
        """Forget snapshots that are newer than what the run goes on from. All ranks together."""

        def speak() -> bytes:
            if self.is_first_of_node:
                discard_newer(self.run, step)
            return b""

        exchange(self._group, "discarding newer snapshots", speak, lambda _: b"")

    def close(self, *, wait: bool) -> None:
        """Let go of the slots.

        Args:
            wait: until all that was begun is over. If the newest snapshot is in storage then, the
                memory is given back. Otherwise the agents go on alone.

        Raises:
            StoreError: something failed.
        """
        try:
            self.fence()
            if wait:
                self._raise_failures()
                for each in self._open:
                    each.wait_all(None)
                if self._open and self._open[-1].stages[-1] == "persist":
                    self.go_on_from(None)
                    self._give_back()
        finally:
            self._background.shutdown()
            self._pool.shutdown()
            self._slots.close()
            if self._keeper is not None:
                self._keeper.stop()

    def _give_back(self) -> None:
        """Leave nothing of the run in memory. All ranks together."""
        self._slots.remove()

        def remove() -> bytes:
            if self.is_first_of_node:
                shutil.rmtree(self.run.path, ignore_errors=True)
            return b""

        exchange(self._group, "giving memory back", lambda: b"", lambda _: b"")
        exchange(self._group, "giving memory back", remove, lambda _: b"")

    def wake(self) -> None:
        """Have this node's agent look at the notes."""
        with suppress(OSError):
            fd = os.open(self.home.bell, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                ring(fd)
            finally:
                os.close(fd)

    def _raise_failures(self) -> None:
        failure, self._failure = self._failure, ""
        if failure:
            raise StoreError(failure)
        begun, self._open = self._open, []
        for each in begun:
            each.check()
        self._open = begun

    def _begin(
        self, planned: Planned, job: Save, keep: Keep | None, recorder: Recorder, sent: int
    ) -> SaveHandle:
        """Stage what was planned; what fails here the other ranks hear of when they next meet."""
        options = job.options
        place = Place(self.run, options.step or 0)
        wanted = ("commit", "protect") if keep is None else ("commit", "protect", "persist")
        stages = Stages(self.home, place, planned.save_id, wanted)
        content = planned.content()
        work = partial(self._stage, planned, content, place, options, keep, wanted)
        with recorder.stage("stage"):
            self._under_way = self._background.submit(work)
            if not self._options.overlap:
                self.fence()
        self._open = [*(each for each in self._open if not each.is_over()), stages]
        report = SaveReport(
            path=str(place.path if keep is None else job.store),
            step=options.step,
            bytes_total=0,
            bytes_written=0 if content is None else content.layout.size,
            bytes_deduplicated=0,
            files=0,
            plan_cached=planned.cached,
            bytes_communicated=self._group.bytes_sent - sent,
            seconds=recorder.seconds(),
        )
        return SaveHandle(report, stages, self._under_way)

    def _stage(
        self,
        planned: Planned,
        content: Content | None,
        place: Place,
        options: SaveOptions,
        keep: Keep | None,
        stages: tuple[str, ...],
    ) -> None:
        """Copy this rank's share. If that fails, the other ranks hear of it when they next meet."""
        try:
            place.path.mkdir(parents=True, exist_ok=True)
            if content is not None:
                self._fill_slot(planned, content, place, stages)
            if planned.template is not None:
                draft = self._draft(planned, options, keep)
                write_note(place.path / notes.draft(planned.save_id), draft)
            self.wake()
        except (ShardwiseError, OSError) as error:
            self._failure = f"staging step {options.step}: {error}"

    def _fill_slot(
        self, planned: Planned, content: Content, place: Place, stages: tuple[str, ...]
    ) -> None:
        nbytes = content.layout.size
        if not self._prepared:
            self._allocate(nbytes)
        slot = self._slot(nbytes)
        stage(content, slot.buffer, self._pool)
        slot.path.rename(place.path / planned.key)
        staged = Staged(planned.entry(content), slot.name, self._options.slots, stages)
        write_note(place.path / notes.staged(planned.key), staged)

    def _slot(self, nbytes: int) -> Slot:
        deadline = time.monotonic() + self._options.wait
        while (slot := self._slots.take(nbytes)) is None:
            if time.monotonic() > deadline:
                raise StoreError(
                    f"no slot was free for {self._options.wait:.0f} s: the agent of {self.home} "
                    f"is behind, or stuck (its log: {self.home.log})"
                )
            self.wake()
            time.sleep(POLL)
        return slot

    def _draft(self, planned: Planned, options: SaveOptions, keep: Keep | None) -> Draft:
        template = planned.template
        if template is None:
            raise RuntimeError("only rank 0 has a draft")
        node_of = self.meeting.node_of
        return Draft(
            save_id=planned.save_id,
            step=options.step or 0,
            manifest=template.encode(()).decode(),
            files=[(data_file(r, planned.save_id), node_of[r]) for r in template.ranks],
            nodes=self.meeting.nodes,
            leader=self.node,
            root=str(self._root) if keep is not None else None,
            overwrite=options.overwrite,
            keep={} if keep is None else asdict(keep),
            copies=self._options.copies,
            parity=self._options.parity,
            group=self._options.group,
            wait=self._options.wait,
            budget=self._options.budget,
            bytes_held=template.published.bytes_held,
            bytes_total=template.published.bytes_stored,
        )


def run_of(root: Store) -> str:
    """The id of the run that persists to a root; a new one, if the root is new.

    It lies in the root, so that a run that is begun anew, in a root that was emptied, never takes
    snapshots of the one before for its own.
    """
    for _ in range(2):
        with suppress(FileNotFoundError):
            data = root.read(RUN, limit=LARGEST_RUN)
            try:
                return msgspec.json.decode(data, type=dict[str, str])["run"]
            except (msgspec.DecodeError, KeyError) as error:
                raise StoreError(f"{root}: {RUN} is damaged; remove it") from error
        with suppress(FileExistsError):
            root.publish(RUN, msgspec.json.encode({"run": new_run()}), replace=False)
    raise StoreError(f"{root}: {RUN} comes and goes")
