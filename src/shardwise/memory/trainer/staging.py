"""Staging: copying a rank's part of a snapshot into the memory of its node."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import torch

from shardwise.engine.files import FileSource
from shardwise.engine.options import SaveOptions
from shardwise.engine.planning import PlannedSave
from shardwise.errors import ShardwiseError, StoreError
from shardwise.manifest.names import data_file
from shardwise.memory import records
from shardwise.memory.files import Deadline, write_record
from shardwise.memory.home import Home, Place, Run
from shardwise.memory.observe import RecordCache
from shardwise.memory.options import Memory
from shardwise.memory.reclaim import bytes_needed_for_others, bytes_stored_for_others, free_hopeless
from shardwise.memory.records import Done, PendingManifest, Staged
from shardwise.memory.redundancy.placement import parity_file_size
from shardwise.memory.trainer.agents import Membership
from shardwise.memory.trainer.copying import Copying, Fill, Slack, stage
from shardwise.memory.trainer.device import Accelerator, Source, Streams, TorchAccelerator
from shardwise.memory.trainer.rings import Protecting, Ring, bytes_read
from shardwise.memory.trainer.slots import Slot, Slots
from shardwise.retention import Keep

THREADS = 4
THREADS_BESIDE_TRAINING = 1
POLL = (0.002, 0.05)
log = logging.getLogger("shardwise")


@dataclass(frozen=True, slots=True)
class Storing:
    """What happens to a snapshot in storage.

    Attributes:
        durable: whether to persist it in any case. Otherwise it is persisted if a trainer is lost.
        keep: which checkpoints to keep in storage then.
        damaged: steps in storage that are known to be damaged, and do not count as kept.
    """

    durable: bool
    keep: Keep
    damaged: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A rank's part of a snapshot.

    Attributes:
        place: the snapshot on this node.
        planned: the plan of the save.
        content: this rank's file, if it writes one.
        ring: the ring of ranks whose files this rank protects, if any.
        pending: on rank 0, the pending manifest for the leader's agent.
        stages: the stages that the snapshot will go through.
        epoch: the epoch of the run.
    """

    place: Place
    planned: PlannedSave
    content: FileSource | None
    ring: Ring | None
    pending: PendingManifest | None
    stages: tuple[str, ...]
    epoch: int

    @property
    def nbytes(self) -> int:
        """The largest number of bytes to copy."""
        own = 0 if self.content is None else self.content.layout.checksums_at
        return own + (0 if self.ring is None else bytes_read(self.ring))

    @property
    def devices(self) -> frozenset[torch.device]:
        """The devices that hold data of the part."""
        found = frozenset() if self.content is None else self.content.devices
        if self.ring is None:
            return found
        held = {each.data.device for each in self.planned.fragments}
        return found | {each for each in held if each.type != "cpu"}


class _NoSlotError(StoreError):
    """No slot became free in time."""


class Staging:
    """Copies a rank's parts of snapshots into its slots, one at a time.

    Args:
        home, run: the directories of this node and of the run on it.
        rank: this rank.
        options: the user's options.
        wake: makes the node's agent look for work.
        accelerator: provides streams of devices; None: that of torch.
        nodes: the number of nodes of the run.
        ranks_here: the number of its ranks on this node.
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
        self._cache = RecordCache()
        self._nodes = nodes
        self._ranks_here = ranks_here
        self._options = options
        self._wake = wake
        self._threads = THREADS_BESIDE_TRAINING if options.overlap else THREADS
        self._pool = ThreadPoolExecutor(self._threads, "shardwise-stage")
        self._background = ThreadPoolExecutor(1, "shardwise-background")
        self._streams = Streams(accelerator or TorchAccelerator())
        self._slack = Slack() if options.overlap else None
        self._copying: Copying | None = None
        self._failure = ""
        count = options.slots + 1
        self._own = Slots(run, f"r{rank:05d}-", "staged", count, self._streams)
        more = max(options.copies, options.parity)
        self._others = Slots(run, f"k{rank:05d}-", "kept", count * more, self._streams)
        self.is_prepared = False

    def prepare(self, content: FileSource | None, ring: Ring | None) -> int:
        """Allocate slots for parts like this one, and return the bytes allocated.

        Raises:
            StoreError: there is not enough memory; says what is needed.
        """
        self._wait()
        self._streams.begin(frozenset() if content is None else content.devices)
        return self._prepare(content, ring)

    def _prepare(self, content: FileSource | None, ring: Ring | None) -> int:
        self.is_prepared = True
        allocated = 0
        if content is not None:
            size = content.layout.size
            for_others = 0 if ring is not None else self._to_leave(size)
            allocated += self._own.prepare(size, locked=_to_lock_of(content), for_others=for_others)
        if ring is not None:
            sizes = [each.file.size for each in ring.copied()]
            sizes += [parity_file_size(ring.group.chunk)] if ring.parity else []
            most = max(sizes, default=0)
            allocated += self._others.prepare(most, locked=self._to_lock(most, ring))
        return allocated

    def _to_leave(self, share: int) -> int:
        """Return the memory that the agent still needs to protect other nodes over the network."""
        needed = bytes_needed_for_others(share, self._options, nodes=self._nodes) * self._ranks_here
        return max(0, needed - bytes_stored_for_others(self._run)) if needed else 0

    def has_free(self) -> bool:
        """Whether a slot is free for another part."""
        if not self._own.has_free():
            free_hopeless(self._run, self._patience, self._cache)
        return self._own.has_free()

    @property
    def _patience(self) -> float:
        """Seconds after which a commit counts as failed even without a record of that."""
        return 2 * self._options.wait + 1

    def begin(self, part: Part) -> Copying:
        """Begin to copy a part, with the values it has once the current streams reach this point.

        Failures are raised by `check`.
        """
        self._wait()
        self._streams.begin(part.devices)
        copying = self._copying = Copying(part.nbytes, self._slack)
        try:
            self._background.submit(self._stage, part, copying)
        except RuntimeError:  # the interpreter is shutting down and starts no more threads
            self._stage(part, copying)
        if not self._options.overlap:
            copying.wait()
        return copying

    def fence(self) -> None:
        """Let this thread change the state from now on.

        If all data is on the host, wait until it is copied. Otherwise the devices' current streams
        wait.
        """
        copying = self._copying
        if copying is None or copying.is_elsewhere():
            return
        copying.hurry()
        copying.issued.wait()
        if self._streams.are_used():
            self._streams.fence()
        else:
            copying.wait()

    def check(self) -> None:
        """Wait for the current part, and raise the failure since the last call, if any.

        Raises:
            StoreError: staging failed; says why.
        """
        self._wait()
        failure, self._failure = self._failure, ""
        if failure:
            raise StoreError(failure)

    def _wait(self) -> None:
        """Wait until nothing is being copied."""
        if self._copying is not None:
            self._copying.wait()

    def remove(self) -> None:
        """Delete the free slots."""
        self._own.remove()
        self._others.remove()

    def close(self) -> None:
        """Stop copying and unmap the slots. The files stay."""
        if self._copying is not None:
            self._copying.hurry()
        self._background.shutdown()
        self._pool.shutdown()
        self._own.close()
        self._others.close()

    def _stage(self, part: Part, copying: Copying) -> None:
        """Stage a part in the background.

        If that fails, this rank raises the error at its next save, and the agents fail the commit,
        so that every rank that waits for the save gets the error.
        """
        failure = ""
        try:
            failure = self._attempt(part, lambda: self._stage_own(part, copying))
            if failure:
                self._leave_failure(part, failure)
            elif part.ring is not None:
                ring = part.ring
                self._attempt(part, lambda: self._protect(part, ring, copying))
            self._wake()
        finally:
            self._attempt(part, self._streams.wait)  # until no device reads the state any more
            copying.end(failure)

    def _stage_own(self, part: Part, copying: Copying) -> None:
        part.place.path.mkdir(parents=True, exist_ok=True)
        if not self.is_prepared:
            self._prepare(part.content, part.ring)
        if part.content is not None:
            self._fill(part, part.content, copying)
        if part.pending is not None:
            name = records.pending_record(part.planned.save_id)
            write_record(part.place.path / name, part.pending)
        self._wake()

    def _attempt(self, part: Part, work: Callable[[], object]) -> str:
        """Run a step of the work, and return why it failed, or ""."""
        step = part.place.step
        try:
            work()
        except Exception as error:
            is_expected = isinstance(error, (ShardwiseError, OSError))
            failure = f"staging step {step}: {error if is_expected else repr(error)}"
            if isinstance(error, _NoSlotError) and "persist" not in part.stages:
                # does not end the training: the next snapshot replaces it
                log.warning("the snapshot of step %d is skipped: %s", step, error)
            else:
                self._failure = self._failure or failure
            return failure
        return ""

    def _leave_failure(self, part: Part, failure: str) -> None:
        """Make the leader's agent fail the commit now, instead of waiting for this rank's file."""
        place, planned = part.place, part.planned
        if part.content is None:
            return
        done = Done(save_id=planned.save_id, stage="stage", failure=failure)
        try:
            write_record(place.path / records.failure_record(planned.key), done)
            if part.pending is not None:
                write_record(place.path / records.pending_record(planned.save_id), part.pending)
        except OSError as error:  # then the commit times out
            log.warning("cannot record for the agents that %s: %s", failure, error)

    def _fill(self, part: Part, content: FileSource, copying: Copying) -> None:
        planned, place = part.planned, part.place
        slot = self._slot(self._own, content.layout.size, locked=_to_lock_of(content))
        fill = copying.paced(self._streams.fill(content, wait=False))
        mark = place.path / records.copying_marker(planned.key)
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
            mark.unlink(missing_ok=True)  # before the file is staged, so that no mark outlives it
        entry = planned.entry(content)
        staged = Staged(entry, slot.name, self._options.slots, part.stages, part.epoch)
        # The record comes first. If this process is killed in between, or the record cannot be
        # written, the slot is still free, and a record without its file has no effect.
        write_record(place.path / records.staged_record(planned.key), staged)
        slot.path.rename(place.path / planned.key)

    def _protect(self, part: Part, ring: Ring, copying: Copying) -> None:
        """Make the copies or parity that this node stores for the others of the ring."""

        def reading(source: Source) -> Fill:
            return copying.paced(self._streams.fill(source, wait=True))

        def take(nbytes: int, excluding: Collection[str]) -> Slot:
            return self._slot(self._others, nbytes, excluding, self._to_lock(nbytes, ring))

        sources = part.planned.peer_sources()
        data = {rank: reading(source) for rank, source in sources.items()}
        Protecting(ring, data, take, part.place, self._pool, self._threads).run()

    def _slot(
        self, slots: Slots, nbytes: int, excluding: Collection[str] = (), locked: int = 0
    ) -> Slot:
        for _ in Deadline(self._options.wait).attempts(pause=POLL[0], longest_pause=POLL[1]):
            slot = slots.take(nbytes, excluding=excluding, locked=locked)
            if slot is not None:
                return slot
            free_hopeless(self._run, self._patience, self._cache)
            self._wake()
        raise _NoSlotError(
            f"no slot became free within {self._options.wait:.0f} s: the agent of "
            f"{self._home} is behind or stuck (its log: {self._home.log})"
        )

    def _to_lock(self, nbytes: int, ring: Ring) -> int:
        """Return how many bytes of a file for others devices copy to: copies, but not parity."""
        return nbytes if ring.copies and self._streams.are_used() else 0


def _to_lock_of(content: FileSource) -> int:
    """Return how many of the first bytes of a file devices copy to."""
    return content.layout.objects_at if content.devices else 0


def pending_manifest(
    planned: PlannedSave,
    options: SaveOptions,
    storing: Storing,
    memory: Memory,
    membership: Membership,
    root: str,
    rings: list[list[str]],
) -> PendingManifest:
    """Return the pending manifest, which rank 0 leaves for the leader's agent.

    `rings` are the names of the files of each ring of ranks.
    """
    manifest = planned.manifest_plan
    node_of = membership.node_of
    return PendingManifest(
        save_id=planned.save_id,
        step=options.step or 0,
        manifest=planned.manifest(()).decode(),
        files=[(data_file(r, planned.save_id), node_of[r]) for r in manifest.writers],
        nodes=membership.nodes,
        leader=node_of[0],
        epoch=membership.lineage.epoch,
        rings=rings,
        root=root,
        durable=storing.durable,
        rescue=memory.rescue,
        overwrite=options.overwrite,
        keep=asdict(storing.keep),
        damaged=list(storing.damaged),
        copies=memory.copies,
        parity=memory.parity,
        group=memory.group,
        wait=memory.wait,
        budget=memory.budget,
        bytes_held=manifest.bytes_held,
        bytes_total=manifest.bytes_stored,
    )
