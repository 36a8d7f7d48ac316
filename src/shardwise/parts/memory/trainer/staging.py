"""Staging: copies a rank's part of a snapshot into the memory of its node."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from shardwise.kernel.deadline import Deadline
from shardwise.kernel.engine.planning import PlannedSave
from shardwise.kernel.engine.write_file import FileSource
from shardwise.kernel.errors import ShardwiseError, StoreError
from shardwise.kernel.manifest.manifest import FileEntry
from shardwise.kernel.store.store import Buffer
from shardwise.parts.memory import records
from shardwise.parts.memory.files import write_record
from shardwise.parts.memory.home import Home, Run, SnapshotDirectory
from shardwise.parts.memory.options import Memory
from shardwise.parts.memory.pool import rank_owner, ring_owner
from shardwise.parts.memory.reclaim import (
    bytes_needed_for_others,
    bytes_stored_for_others,
)
from shardwise.parts.memory.records import AgentInfo, PendingManifest, RankPart, RingFile
from shardwise.parts.memory.redundancy.placement import parity_file_size
from shardwise.parts.memory.times import LONGEST_POLL_PAUSE, POLL_PAUSE
from shardwise.parts.memory.trainer.copying import CopyProgress, Fill, Slack, copy_range
from shardwise.parts.memory.trainer.device import CopyStreams, TorchAccelerator
from shardwise.parts.memory.trainer.node_watch import NodeWatch
from shardwise.parts.memory.trainer.rings import Ring, bytes_to_read, protect_ring
from shardwise.parts.memory.trainer.slots import Slots

THREADS = 4
THREADS_WITH_OVERLAP = 1
BYTES_BETWEEN_RECORDS = 32 << 20
"""How much of a durable save is copied until its record says so again, for the agent."""
log = logging.getLogger("shardwise")


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPart:
    """A rank's part of a snapshot.

    Attributes:
        place: the snapshot on this node.
        planned: the plan of the save.
        source: the content of this rank's file; None if it writes none.
        ring: the ring of ranks whose files this rank protects, if any.
        pending: on rank 0, returns the pending manifest for the leader's agent. The thread that
            stages calls it, because it takes a while for many tensors.
        stages: the stages that the snapshot will go through.
        epoch: the epoch of the run.
        above: the agents of the nodes above this one in the tree of the run.
    """

    place: SnapshotDirectory
    planned: PlannedSave
    source: FileSource | None
    ring: Ring | None
    pending: Callable[[], PendingManifest] | None
    stages: tuple[str, ...]
    epoch: int
    above: list[AgentInfo]

    @property
    def nbytes(self) -> int:
        """The largest number of bytes to copy."""
        own = 0 if self.source is None else self.source.entry.checksums_at
        return own + (0 if self.ring is None else bytes_to_read(self.ring))

    @property
    def is_durable(self) -> bool:
        """Whether agents write the snapshot to storage."""
        return "persist" in self.stages

    @property
    def devices(self) -> frozenset[torch.device]:
        """The devices that hold data of the part."""
        devices = frozenset() if self.source is None else self.source.devices
        if self.ring is None:
            return devices
        return devices | self.planned.devices


class _NoSlotError(StoreError):
    """No slot became free in time."""


class Staging:
    """Copies a rank's parts of snapshots into its slots, one at a time.

    Args:
        home, run: the directories of this node and of the run on it.
        rank: this rank.
        options: the user's options.
        accelerator: provides streams of devices; None for torch's accelerator.
        nodes: the number of nodes of the run.
        ranks_here: the number of ranks of the run on this node.
        watch: notices that other nodes are lost; None if there are none.
    """

    def __init__(
        self,
        home: Home,
        run: Run,
        rank: int,
        options: Memory,
        accelerator: TorchAccelerator | None = None,
        *,
        nodes: int = 1,
        ranks_here: int = 1,
        watch: NodeWatch | None = None,
    ) -> None:
        self._home = home
        self._run = run
        self._record_name = records.rank_record(rank)
        self._nodes = nodes
        self._ranks_here = ranks_here
        self.watch = watch
        self._options = options
        self._threads = THREADS_WITH_OVERLAP if options.overlap else THREADS
        self._pool = ThreadPoolExecutor(self._threads, "shardwise-stage")
        self._background_thread = ThreadPoolExecutor(1, "shardwise-background")
        self._streams = CopyStreams(accelerator or TorchAccelerator())
        self._slack = Slack() if options.overlap else None
        self._copying: CopyProgress | None = None
        self._failure = ""
        slots = options.slots + 1
        self._own_slots = Slots(run, rank_owner(rank), slots, self._streams)
        ring_slots = slots * max(options.copies, options.parity)
        self._ring_slots = Slots(run, ring_owner(rank), ring_slots, self._streams)
        self.is_prepared = False  # whether slots were allocated

    def prepare(self, source: FileSource | None, ring: Ring | None) -> int:
        """Allocate slots for parts like this one, and return the bytes allocated.

        Args:
            source, ring: as in `SnapshotPart`.

        Raises:
            StoreError: there is not enough memory; says how much is needed.
        """
        self.wait_for_copy()
        devices = frozenset() if source is None else source.devices
        self._streams.begin(devices)
        return self._allocate(source, ring)

    def _allocate(self, source: FileSource | None, ring: Ring | None) -> int:
        self.is_prepared = True
        allocated = 0
        if source is not None:
            size = source.entry.size
            leave_free = 0 if ring is not None else self._bytes_for_agent(size)
            device_bytes = _bytes_from_devices(source)
            allocated += self._own_slots.prepare(
                size, device_bytes=device_bytes, leave_free=leave_free
            )
        if ring is not None:
            parity = parity_file_size(ring.group.chunk) if ring.group.parity else 0
            largest = max([parity, *(file.size for file in ring.files_to_copy)])
            device_bytes = self._bytes_to_lock(largest, ring)
            allocated += self._ring_slots.prepare(largest, device_bytes=device_bytes)
        return allocated

    def _bytes_for_agent(self, bytes_of_rank: int) -> int:
        """Return the memory that the agent still needs to protect other nodes over the network."""
        needed = (
            bytes_needed_for_others(bytes_of_rank, self._options, nodes=self._nodes)
            * self._ranks_here
        )
        return max(0, needed - bytes_stored_for_others(self._run)) if needed else 0

    def has_free(self) -> bool:
        """Return whether a slot is free for another part."""
        return self._own_slots.has_free()

    def begin(self, part: SnapshotPart) -> CopyProgress:
        """Begin to copy a part. The values are copied as they are when the streams reach this call.

        Failures are raised by `raise_failure`.
        """
        self.wait_for_copy()
        self._streams.begin(part.devices)
        copying = self._copying = CopyProgress(part.nbytes, self._slack)
        try:
            self._background_thread.submit(self._stage, part, copying)
        except RuntimeError:  # the interpreter is shutting down and starts no more threads
            self._stage(part, copying)
        if not self._options.overlap:
            copying.wait()
        return copying

    def fence(self) -> None:
        """Let this thread change the state from now on.

        If all data is on the host, wait until the data is copied. Otherwise the devices' current
        streams wait.
        """
        copying = self._copying
        if copying is None or copying.belongs_to_parent_process():
            return
        copying.hurry()
        copying.all_queued.wait()
        if self._streams.has_devices():
            self._streams.fence()
        else:
            copying.wait()

    def raise_failure(self) -> None:
        """Wait for the current part, and raise the failure since the last call, if any.

        Raises:
            StoreError: staging failed; says why.
        """
        self.wait_for_copy()
        failure, self._failure = self._failure, ""
        if failure:
            raise StoreError(failure)

    def wait_for_copy(self, timeout: float | None = None) -> None:
        """Wait until no copy is in progress, or for `timeout` seconds."""
        if self._copying is not None:
            self._copying.wait(timeout)

    def close(self) -> None:
        """Stop copying and unmap the slots. The files stay."""
        if self._copying is not None:
            self._copying.hurry()
        self._background_thread.shutdown()
        self._pool.shutdown()
        if self.watch is not None:
            self.watch.close()
        self._own_slots.close()
        self._ring_slots.close()

    def _stage(self, part: SnapshotPart, copying: CopyProgress) -> None:
        """Stage a part in the background.

        After a failure, this rank raises the error at its next save. The agents make the commit
        fail, so that every rank that waits for the save gets the error.
        """
        failure = ""
        try:
            failure = self._run_and_keep_failure(part, lambda: self._stage_own_file(part, copying))
            if failure:
                self._record_failure(part, failure)
            elif part.ring is not None:
                ring = part.ring
                self._run_and_keep_failure(part, lambda: self._protect_ring(part, ring, copying))
            self._home.wake()
        finally:
            # Afterwards, no device reads the state.
            self._run_and_keep_failure(part, self._streams.wait_for_copies)
            copying.finish(failure)

    def _stage_own_file(self, part: SnapshotPart, copying: CopyProgress) -> None:
        part.place.path.mkdir(parents=True, exist_ok=True)
        if not self.is_prepared:
            self._allocate(part.source, part.ring)
        if part.source is not None:
            self._copy_to_slot(part, part.source, copying)
        else:
            self._streams.record_copies()
            if part.ring is None:
                copying.all_queued.set()
            write_record(part.place.path / self._record_name, self._make_record(part))
            self._write_pending(part)

    def _make_record(self, part: SnapshotPart, failure: str = "") -> RankPart:
        return RankPart(
            file=None if part.source is None else part.source.entry,
            snapshots_to_keep=self._options.slots,
            stages=part.stages,
            epoch=part.epoch,
            wait=self._options.wait,
            failure=failure,
            above=part.above,
        )

    def _write_pending(self, part: SnapshotPart) -> None:
        """Pass the save to the agent, on rank 0, and wake the agent."""
        if part.pending is not None:
            write_record(part.place.path / records.PENDING, part.pending())
        self._home.wake()

    def _run_and_keep_failure(self, part: SnapshotPart, work: Callable[[], object]) -> str:
        """Run `work`, and return why it failed, or "". `raise_failure` raises the failure."""
        step = part.place.step
        try:
            work()
        except Exception as error:  # any error: the next call of the training thread raises it
            is_expected = isinstance(error, (ShardwiseError, OSError))
            failure = f"staging step {step}: {error if is_expected else repr(error)}"
            if isinstance(error, _NoSlotError) and not part.is_durable:
                # The training continues: the next snapshot replaces this one.
                log.warning("the snapshot of step %d is skipped: %s", step, error)
            else:
                self._failure = self._failure or failure
            return failure
        return ""

    def _record_failure(self, part: SnapshotPart, failure: str) -> None:
        """Make the leader's agent fail the commit now, instead of waiting for this rank's file."""
        path = part.place.path / self._record_name
        try:
            write_record(path, self._make_record(part, failure))
            self._write_pending(part)
        except OSError as error:  # then the commit times out
            log.warning("cannot record for the agents that %s: %s", failure, error)
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def _copy_to_slot(self, part: SnapshotPart, source: FileSource, copying: CopyProgress) -> None:
        """Copy this rank's file into a slot, which then gets the name of the file.

        Agents write a durable save to storage while it is copied, so they get it at once.
        """
        place, name, size = part.place, source.entry.name, source.entry.size
        record, path = self._make_record(part), place.path / self._record_name
        write_record(path, record)  # first: it says whose slot the file is
        # A copy that the training waits for would share the processors with the agent's writes. And
        # what devices copy is complete only after the last wait.
        is_followed = part.is_durable and self._options.overlap and not source.devices
        on_progress = _progress_recorder(path, record) if is_followed else lambda copied: None
        slots, temporary = self._own_slots, place.temporary_path(name)
        try:
            slot = self._wait_for_slot(slots, temporary, size, _bytes_from_devices(source))
            passing = self._begin_to_write_pending(part) if part.is_durable else None
            self._copy(part, source, slot, copying, on_progress)
            if passing is not None:
                passing.result()
            os.utime(temporary)  # the time of the snapshot
            temporary.rename(place.path / name)
        except BaseException:
            if is_followed:  # an agent may still read it
                temporary.unlink(missing_ok=True)
            slots.give(temporary)
            raise
        if part.is_durable:
            self._home.wake()
        else:
            self._write_pending(part)

    def _begin_to_write_pending(self, part: SnapshotPart) -> Future[None] | None:
        """Pass the save to the agent in a thread, because it takes a while for many tensors."""
        try:
            return self._pool.submit(self._write_pending, part)
        except RuntimeError:  # the interpreter is shutting down and starts no more threads
            self._write_pending(part)
            return None

    def _copy(
        self,
        part: SnapshotPart,
        source: FileSource,
        slot: Buffer,
        copying: CopyProgress,
        on_progress: Callable[[int], None],
    ) -> None:
        """Copy this rank's file into a slot, all but the checksums, which the agent computes."""
        try:
            copy_range(
                copying.pace_fill(self._streams.make_fill(source, wait=False)),
                0,
                source.entry.checksums_at,
                slot,
                self._pool,
                from_devices=bool(source.devices),
                on_progress=on_progress,
            )
        finally:
            self._streams.record_copies()
        if part.ring is None:
            copying.all_queued.set()
        self._streams.wait_for_copies()

    def _protect_ring(self, part: SnapshotPart, ring: Ring, copying: CopyProgress) -> None:
        """Make the copies or parity that this node stores for the others of the ring."""

        def fill_of(file: FileEntry) -> Fill:
            source = part.planned.source_of_peer(file.rank)
            fill, start = (
                copying.pace_fill(self._streams.make_fill(source, wait=True)),
                file.data_at,
            )
            return lambda low, high, out: fill(low - start, high - start, out)

        place = part.place
        record, path = self._make_record(part), place.path / self._record_name

        def take_slot(name: str, nbytes: int) -> Buffer:
            temporary, device_bytes = place.temporary_path(name), self._bytes_to_lock(nbytes, ring)
            return self._wait_for_slot(self._ring_slots, temporary, nbytes, device_bytes)

        def add(made: RingFile) -> None:
            nonlocal record
            record = msgspec.structs.replace(record, made=(*record.made, made))
            write_record(path, record)
            place.temporary_path(made.file).rename(place.path / made.file)

        protect_ring(ring, fill_of, take_slot, add, self._pool, self._threads)

    def _wait_for_slot(self, slots: Slots, path: Path, nbytes: int, device_bytes: int) -> Buffer:
        deadline = Deadline(self._options.wait)
        check_nodes = None if self.watch is None else self.watch.make_throttled_check()
        for _ in deadline.attempts(pause=POLL_PAUSE, longest_pause=LONGEST_POLL_PAUSE):
            slot = slots.take(path, nbytes, device_bytes=device_bytes)
            if slot is not None:
                return slot
            if check_nodes is not None:
                check_nodes()
            self._home.wake()
        raise _NoSlotError(
            f"no slot became free within {self._options.wait:.0f} s: the agent of {self._home} is "
            f"behind or stuck (its log: {self._home.log_path}); pass more Memory(slots=…), or a "
            "larger Memory(wait=…)"
        )

    def _bytes_to_lock(self, nbytes: int, ring: Ring) -> int:
        """Return how many bytes of a copy for another node devices write; 0 for parity."""
        return nbytes if ring.group.copies and self._streams.has_devices() else 0


def _bytes_from_devices(source: FileSource) -> int:
    """Return how many of the first bytes of a file devices write."""
    return source.entry.objects_at if source.devices else 0


def _progress_recorder(path: Path, part: RankPart) -> Callable[[int], None]:
    """Return what records, now and then, how much is copied."""
    recorded = 0

    def record(copied: int) -> None:
        nonlocal recorded
        if copied - recorded >= BYTES_BETWEEN_RECORDS:
            recorded = copied
            with suppress(OSError):  # then the agent waits for the whole file
                write_record(path, msgspec.structs.replace(part, copied=copied))

    return record
