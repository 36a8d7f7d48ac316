"""A node that no rank runs on any more gives the memory of its runs back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import ShardwiseError
from shardwise.memory.home import ROOT, Place, Run, read_record
from shardwise.memory.lineage import Lineage, known_lineage
from shardwise.memory.node.branches import is_abandoned
from shardwise.memory.node.retire import PATIENCE, retire
from shardwise.memory.node.tenants import evict
from shardwise.memory.ranks import has_trainers
from shardwise.retention import committed_steps
from shardwise.store import open_store

BETWEEN_LOOKS = 10.0
LINGER = 1800.0
LONGEST = 86400.0
log = logging.getLogger("shardwise.agent")


@dataclass(slots=True)
class _Known:
    """What is known of a run without trainers.

    Attributes:
        since: when it was first seen without trainers.
        looked: when its root was read for the last time, or is to be counted from.
        reached: whether its root could be read then.
        lineage: what the root said; None if it is gone, or another run's by now.
        stored: the newest step in the root; None if there is none, or it was not asked for.
    """

    since: float
    looked: float
    reached: bool = False
    lineage: Lineage | None = None
    stored: int | None = None


class Idle:
    """Discards snapshots of runs that have no trainers on this node.

    A snapshot goes soon if the run has gone on from an older step, as its root says. All of a run
    go half an hour after its last trainer has left, if the root has their newest step or a newer
    one, or was removed; otherwise the newest is persisted first. After a day they go in any case.

    Args:
        persist: has a snapshot persisted, unless that is under way; whether it did anything.
        pause: seconds between two looks at a root.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        persist: Callable[[Place], bool],
        pause: float = BETWEEN_LOOKS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._persist = persist
        self._pause = pause
        self._clock = clock
        self._known: dict[Path, _Known] = {}

    def discard(self, place: Place) -> bool:
        """Discard a snapshot that is no longer needed, and the memory that waits for others."""
        run = place.run
        if has_trainers(run):
            self._known.pop(run.path, None)
            return False
        known = self._look_up(run)
        if known.lineage is not None and is_abandoned(place, known.lineage):
            why = "the run went on from an older one"
        elif (idle := self._clock() - known.since) >= LONGEST or (
            idle >= LINGER and self._is_in_storage(run, known)
        ):
            why = f"no trainer of its run has been here for {idle / 60:.0f} minutes"
        else:
            return False
        place.abandon()
        if not retire(place, PATIENCE):
            return False
        evict(run, lambda _: False)
        log.info("run %s: step %d is discarded: %s", run.name, place.step, why)
        return True

    def _is_in_storage(self, run: Run, known: _Known) -> bool:
        """Whether storage has all that could be needed of a run; if not, that begins."""
        if not known.reached:
            return False
        newest = max((s for s in run.steps() if Place(run, s).is_committed()), default=None)
        if known.lineage is None or newest is None:
            return True
        if known.stored is not None and known.stored >= newest:
            return True
        self._persist(Place(run, newest))
        return False

    def _look_up(self, run: Run) -> _Known:
        """A run, and its root as it was a little while ago."""
        now = self._clock()
        known = self._known.setdefault(run.path, _Known(now, now))
        if now - known.looked >= self._pause:
            known.looked = now
            try:
                root = read_record(run.path / ROOT, str)
                store = None if root is None else open_store(root)
                lineage = None if store is None else known_lineage(store)
                known.lineage = lineage if lineage and lineage.run == run.name else None
                known.stored = None
                if store is not None and known.lineage is not None and now - known.since >= LINGER:
                    known.stored = max(committed_steps(store), default=None)
                known.reached = store is not None
            except (ShardwiseError, OSError, ValueError) as error:
                log.info("run %s: its root cannot be read: %s", run.name, error)
                known.reached = False
        return known
