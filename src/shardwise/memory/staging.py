"""The memory of a rank on its node, and how its part of a snapshot gets there."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from shardwise.engine.content import Content, data_of
from shardwise.engine.planning import Planned
from shardwise.errors import ShardwiseError, StoreError
from shardwise.memory import notes
from shardwise.memory.home import Home, Run, write_note
from shardwise.memory.notes import Draft, Staged
from shardwise.memory.options import Memory
from shardwise.memory.place import Place
from shardwise.memory.placement import parity_file_size
from shardwise.memory.replicas import Keeping
from shardwise.memory.rings import Ring
from shardwise.memory.slots import Slot, Slots
from shardwise.memory.stage import stage

THREADS = 4
THREADS_BESIDE_TRAINING = 1
POLL = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A rank's part of a snapshot that is to be staged.

    Attributes:
        place: the snapshot, on this node.
        content: this rank's file, if it has one.
        ring: those whose files it protects out of its own replicas, if there are any.
        draft: on rank 0, for the agent that leads the snapshot.
        stages: what is to become of it.
    """

    place: Place
    planned: Planned
    content: Content | None
    ring: Ring | None
    draft: Draft | None
    stages: tuple[str, ...]


class Staging:
    """Copies a rank's parts of snapshots into memory that is kept for them, one after the other.

    Args:
        home, run: of this node.
        rank: this one.
        options: as the user gave them.
        wake: has the node's agent look at the notes.
    """

    def __init__(
        self, home: Home, run: Run, rank: int, options: Memory, wake: Callable[[], None]
    ) -> None:
        self._home = home
        self._options = options
        self._wake = wake
        self._threads = THREADS_BESIDE_TRAINING if options.overlap else THREADS
        self._pool = ThreadPoolExecutor(self._threads, "shardwise-stage")
        self._background = ThreadPoolExecutor(1, "shardwise-background")
        self._under_way: Future[None] | None = None
        self._failure = ""
        count = options.slots + 1
        self._own = Slots(run, f"r{rank:05d}-", "staged", count)
        more = max(options.copies, options.parity)
        self._others = Slots(run, f"k{rank:05d}-", "kept", count * more)
        self.is_prepared = False

    def prepare(self, content: Content | None, ring: Ring | None) -> int:
        """Allocate memory for parts like this one; the bytes that were allocated.

        Raises:
            StoreError: there is not enough; says what is needed.
        """
        self.is_prepared = True
        allocated = 0 if content is None else self._own.prepare(content.layout.size)
        if ring is not None:
            sizes = [each.file.size for each in ring.copied()]
            sizes += [parity_file_size(ring.group.chunk)] if ring.parity else []
            allocated += self._others.prepare(max(sizes, default=0))
        return allocated

    def has_free(self) -> bool:
        """Whether there is memory for another part."""
        return self._own.has_free()

    def begin(self, part: Part) -> Future[None]:
        """Copy a part; what fails is raised by `check`."""
        self._under_way = self._background.submit(self._stage, part)
        if not self._options.overlap:
            self.fence()
        return self._under_way

    def fence(self) -> None:
        """Wait until what is being copied is copied."""
        if self._under_way is not None:
            self._under_way.result()

    def check(self) -> None:
        """Raise what has failed since it was asked the last time.

        Raises:
            StoreError: says what.
        """
        failure, self._failure = self._failure, ""
        if failure:
            raise StoreError(failure)

    def remove(self) -> None:
        """Give free memory back."""
        self._own.remove()
        self._others.remove()

    def close(self) -> None:
        """Let go of the memory; what lies in it stays."""
        self._background.shutdown()
        self._pool.shutdown()
        self._own.close()
        self._others.close()

    def _stage(self, part: Part) -> None:
        """If it fails, the other ranks hear of it when they next meet."""
        place, planned = part.place, part.planned
        try:
            place.path.mkdir(parents=True, exist_ok=True)
            if not self.is_prepared:
                self.prepare(part.content, part.ring)
            if part.content is not None:
                self._fill(part, part.content)
            if part.draft is not None:
                write_note(place.path / notes.draft(planned.save_id), part.draft)
            self._wake()
            if part.ring is not None:
                self._keep(part, part.ring)
                self._wake()
        except (ShardwiseError, OSError) as error:
            self._failure = f"staging step {place.step}: {error}"

    def _fill(self, part: Part, content: Content) -> None:
        planned, place = part.planned, part.place
        slot = self._slot(self._own, content.layout.size)
        stage(content.fill, 0, content.layout.checksums_at, slot.buffer, self._pool)
        slot.path.rename(place.path / planned.key)
        entry = planned.entry(content)
        staged = Staged(entry, slot.name, self._options.slots, part.stages)
        write_note(place.path / notes.staged(planned.key), staged)

    def _keep(self, part: Part, ring: Ring) -> None:
        """Make what this rank keeps for those of its ring."""
        described = part.planned.described
        data = {rank: data_of(share, described) for rank, share in part.planned.peers.items()}
        take = partial(self._slot, self._others)
        Keeping(ring, data, take, part.place, self._pool, self._threads).keep()

    def _slot(self, slots: Slots, nbytes: int, besides: Collection[str] = ()) -> Slot:
        deadline = time.monotonic() + self._options.wait
        while (slot := slots.take(nbytes, besides=besides)) is None:
            if time.monotonic() > deadline:
                raise StoreError(
                    f"no slot was free for {self._options.wait:.0f} s: the agent of {self._home} "
                    f"is behind, or stuck (its log: {self._home.log})"
                )
            self._wake()
            time.sleep(POLL)
        return slot
