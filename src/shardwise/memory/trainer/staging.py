"""The memory of a rank on its node, and how its part of a snapshot gets there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from shardwise.engine.files import FileSource
from shardwise.engine.planning import PlannedSave
from shardwise.errors import ShardwiseError, StoreError
from shardwise.memory import records
from shardwise.memory.home import Home, Place, Run, write_record
from shardwise.memory.node.retire import give_up_failed
from shardwise.memory.node.room import needed_for_others, taken_for_others
from shardwise.memory.options import Memory
from shardwise.memory.records import Done, PendingManifest, Staged
from shardwise.memory.redundancy.placement import parity_file_size
from shardwise.memory.trainer.copying import Copying, Fill, Slack, stage
from shardwise.memory.trainer.device import Accelerator, Source, Streams, TorchAccelerator
from shardwise.memory.trainer.rings import Keeping, Ring, bytes_read
from shardwise.memory.trainer.slots import Slot, Slots

THREADS = 4
THREADS_BESIDE_TRAINING = 1
POLL = (0.002, 0.05)
log = logging.getLogger("shardwise")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A rank's part of a snapshot that is to be staged.

    Attributes:
        place: the snapshot, on this node.
        content: this rank's file, if it has one.
        ring: those whose files it protects out of its own replicas, if there are any.
        draft: on rank 0, for the agent that leads the snapshot.
        stages: what is to become of it.
        epoch: of the run.
    """

    place: Place
    planned: PlannedSave
    content: FileSource | None
    ring: Ring | None
    draft: PendingManifest | None
    stages: tuple[str, ...]
    epoch: int

    @property
    def nbytes(self) -> int:
        """How much is copied, at most."""
        own = 0 if self.content is None else self.content.layout.checksums_at
        return own + (0 if self.ring is None else bytes_read(self.ring))

    @property
    def devices(self) -> frozenset[torch.device]:
        """Those that are copied from."""
        found = frozenset() if self.content is None else self.content.devices
        if self.ring is None:
            return found
        held = {each.data.device for each in self.planned.fragments}
        return found | {each for each in held if each.type != "cpu"}


class _NoSlotError(StoreError):
    """The agent has freed none in time."""


class Staging:
    """Copies a rank's parts of snapshots into memory that is kept for them, one after the other.

    Args:
        home, run: of this node.
        rank: this one.
        options: as the user gave them.
        wake: has the node's agent look at the records.
        accelerator: what tensors may lie on; if None, that of torch.
        nodes, ranks_here: how many the run has, and of its ranks, this node.
    """

    def __init__(
        self,
        home: Home,
        run: Run,
        rank: int,
        options: Memory,
        wake: Callable[[], None],
        accelerator: Accelerator | None = None,
        *,
        nodes: int = 1,
        ranks_here: int = 1,
    ) -> None:
        self._home = home
        self._run = run
        self._nodes = nodes
        self._ranks_here = ranks_here
        self._options = options
        self._wake = wake
        self._threads = THREADS_BESIDE_TRAINING if options.overlap else THREADS
        self._pool = ThreadPoolExecutor(self._threads, "shardwise-stage")
        self._background = ThreadPoolExecutor(1, "shardwise-background")
        self._streams = Streams(accelerator or TorchAccelerator())
        self._slack = Slack() if options.overlap else None
        self._under_way: Copying | None = None
        self._failure = ""
        count = options.slots + 1
        self._own = Slots(run, f"r{rank:05d}-", "staged", count, self._streams)
        more = max(options.copies, options.parity)
        self._others = Slots(run, f"k{rank:05d}-", "kept", count * more, self._streams)
        self.is_prepared = False

    def prepare(self, content: FileSource | None, ring: Ring | None) -> int:
        """Allocate memory for parts like this one; the bytes that were allocated.

        Raises:
            StoreError: there is not enough; says what is needed.
        """
        self._settle()
        self._streams.begin(frozenset() if content is None else content.devices)
        return self._prepare(content, ring)

    def _prepare(self, content: FileSource | None, ring: Ring | None) -> int:
        self.is_prepared = True
        allocated = 0
        if content is not None:
            size = content.layout.size
            for_others = 0 if ring is not None else self._to_leave(size)
            allocated += self._own.prepare(size, locked=_by_device(content), for_others=for_others)
        if ring is not None:
            sizes = [each.file.size for each in ring.copied()]
            sizes += [parity_file_size(ring.group.chunk)] if ring.parity else []
            most = max(sizes, default=0)
            allocated += self._others.prepare(most, locked=self._to_lock(most, ring))
        return allocated

    def _to_leave(self, share: int) -> int:
        """The memory that this node's agent will need to protect others over the network."""
        needed = needed_for_others(share, self._options, nodes=self._nodes) * self._ranks_here
        return max(0, needed - taken_for_others(self._run)) if needed else 0

    def has_free(self) -> bool:
        """Whether there is memory for another part."""
        if not self._own.has_free():
            give_up_failed(self._run, self._patience)
        return self._own.has_free()

    @property
    def _patience(self) -> float:
        """After how many seconds a commit has failed, though this node was not told."""
        return 2 * self._options.wait + 1

    def begin(self, part: Part) -> Copying:
        """Copy a part, as it is when the current streams of devices come to here.

        What fails is raised by `check`.
        """
        self._settle()
        self._streams.begin(part.devices)
        copying = self._under_way = Copying(part.nbytes, self._slack)
        try:
            self._background.submit(self._stage, part, copying)
        except RuntimeError:  # the process is ending, and gives threads no more work
            self._stage(part, copying)
        if not self._options.overlap:
            copying.wait()
        return copying

    def fence(self) -> None:
        """What this thread does from now on may change what is being copied.

        On the host, it waits until it is copied; on devices, their current streams do.
        """
        copying = self._under_way
        if copying is None or copying.is_elsewhere():
            return
        copying.hurry()
        copying.issued.wait()
        if self._streams.are_used():
            self._streams.fence()
        else:
            copying.wait()

    def check(self) -> None:
        """Raise what has failed since it was asked the last time.

        Raises:
            StoreError: says what.
        """
        self._settle()
        failure, self._failure = self._failure, ""
        if failure:
            raise StoreError(failure)

    def _settle(self) -> None:
        """Wait until nothing is under way."""
        if self._under_way is not None:
            self._under_way.wait()

    def remove(self) -> None:
        """Give free memory back."""
        self._own.remove()
        self._others.remove()

    def close(self) -> None:
        """Let go of the memory; what lies in it stays."""
        if self._under_way is not None:
            self._under_way.hurry()
        self._background.shutdown()
        self._pool.shutdown()
        self._own.close()
        self._others.close()

    def _stage(self, part: Part, copying: Copying) -> None:
        """If it fails, this rank raises that at its next save, and the agents fail the commit, so
        that whoever waits for the save on any rank hears of it."""
        failure = ""
        try:
            failure = self._attempt(part, lambda: self._stage_own(part, copying))
            if failure:
                self._leave_failure(part, failure)
            elif part.ring is not None:
                ring = part.ring
                self._attempt(part, lambda: self._keep(part, ring, copying))
            self._wake()
        finally:
            self._attempt(part, self._streams.wait)  # until no device copies from it any more
            copying.end(failure)

    def _stage_own(self, part: Part, copying: Copying) -> None:
        part.place.path.mkdir(parents=True, exist_ok=True)
        if not self.is_prepared:
            self._prepare(part.content, part.ring)
        if part.content is not None:
            self._fill(part, part.content, copying)
        if part.draft is not None:
            write_record(part.place.path / records.draft(part.planned.save_id), part.draft)
        self._wake()

    def _attempt(self, part: Part, work: Callable[[], object]) -> str:
        """Do a part of the work; why it failed, or ""."""
        step = part.place.step
        try:
            work()
        except Exception as error:
            is_usual = isinstance(error, (ShardwiseError, OSError))
            failure = f"staging step {step}: {error if is_usual else repr(error)}"
            if isinstance(error, _NoSlotError) and "persist" not in part.stages:
                # no reason to end a training: the next takes its place
                log.warning("the snapshot of step %d is left out: %s", step, error)
            else:
                self._failure = self._failure or failure
            return failure
        return ""

    def _leave_failure(self, part: Part, failure: str) -> None:
        """Have the agent that leads fail the commit now; it would wait for this rank's file."""
        place, planned = part.place, part.planned
        if part.content is None:
            return
        done = Done(save_id=planned.save_id, stage="stage", failure=failure)
        try:
            write_record(place.path / records.failed(planned.key), done)
            if part.draft is not None:
                write_record(place.path / records.draft(planned.save_id), part.draft)
        except OSError as error:  # then the commit fails when its time is up
            log.warning("the agents cannot be told that %s: %s", failure, error)

    def _fill(self, part: Part, content: FileSource, copying: Copying) -> None:
        planned, place = part.planned, part.place
        slot = self._slot(self._own, content.layout.size, locked=_by_device(content))
        fill = copying.paced(self._streams.fill(content, wait=False))
        mark = place.path / records.copying(planned.key)
        mark.touch()
        try:
            try:
                stage(fill, 0, content.layout.checksums_at, slot.buffer, self._pool)
            finally:
                self._streams.mark()
            if part.ring is None:
                copying.issued.set()
            self._streams.wait()
        finally:
            mark.unlink(missing_ok=True)  # before it is staged: whoever is killed then leaves none
        entry = planned.entry(content)
        staged = Staged(entry, slot.name, self._options.slots, part.stages, part.epoch)
        # The record comes first. If this process is killed in between, or the record cannot be
        # written, the slot is still free, and a record without its file has no effect.
        write_record(place.path / records.staged(planned.key), staged)
        slot.path.rename(place.path / planned.key)

    def _keep(self, part: Part, ring: Ring, copying: Copying) -> None:
        """Make what this rank keeps for those of its ring."""

        def reading(source: Source) -> Fill:
            return copying.paced(self._streams.fill(source, wait=True))

        def take(nbytes: int, besides: Collection[str]) -> Slot:
            return self._slot(self._others, nbytes, besides, self._to_lock(nbytes, ring))

        sources = part.planned.peer_sources()
        data = {rank: reading(source) for rank, source in sources.items()}
        Keeping(ring, data, take, part.place, self._pool, self._threads).keep()

    def _slot(
        self, slots: Slots, nbytes: int, besides: Collection[str] = (), locked: int = 0
    ) -> Slot:
        deadline, pause = time.monotonic() + self._options.wait, POLL[0]
        while (slot := slots.take(nbytes, besides=besides, locked=locked)) is None:
            if time.monotonic() > deadline:
                raise _NoSlotError(
                    f"no slot was free for {self._options.wait:.0f} s: the agent of {self._home} "
                    f"is behind, or stuck (its log: {self._home.log})"
                )
            give_up_failed(self._run, self._patience)
            self._wake()
            time.sleep(pause)
            pause = min(2 * pause, POLL[1])
        return slot

    def _to_lock(self, nbytes: int, ring: Ring) -> int:
        """How much of what is kept for others devices copy to: copies; parity is made here."""
        return nbytes if ring.copies and self._streams.are_used() else 0


def _by_device(content: FileSource) -> int:
    """How many of the first bytes of a file devices copy to."""
    return content.layout.objects_at if content.devices else 0
