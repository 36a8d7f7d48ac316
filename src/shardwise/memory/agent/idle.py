"""A node that no rank runs on any more gives back the memory of what its run has abandoned."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from shardwise.errors import ShardwiseError
from shardwise.memory.node.branches import is_abandoned
from shardwise.memory.node.home import Run, read_note
from shardwise.memory.node.lineage import Lineage, known_lineage
from shardwise.memory.node.place import Place
from shardwise.memory.node.predecessors import ROOT
from shardwise.memory.node.retire import PATIENCE, retire
from shardwise.memory.node.tenants import evict
from shardwise.memory.node.trainers import has_trainers
from shardwise.store import open_store

BETWEEN_LOOKS = 10.0
log = logging.getLogger("shardwise.agent")


class Idle:
    """Looks up, now and then, what the roots of runs without trainers say of their branches.

    Args:
        pause: seconds until a run counts as idle here, and between two looks at its root.
    """

    def __init__(self, pause: float = BETWEEN_LOOKS) -> None:
        self._pause = pause
        self._known: dict[Path, tuple[float, Lineage | None]] = {}

    def discard(self, place: Place) -> bool:
        """Discard a snapshot that is abandoned, and the memory that waits to be staged into."""
        if has_trainers(place.run):
            self._known.pop(place.run.path, None)
            return False
        lineage = self._lineage(place.run)
        if lineage is None or not is_abandoned(place, lineage):
            return False
        place.abandon()
        if not retire(place, PATIENCE):
            return False
        evict(place.run, lambda _: False)
        log.info("step %d is given up: the run went on from an older one", place.step)
        return True

    def _lineage(self, run: Run) -> Lineage | None:
        """Of a run, as it was a little while ago; what is abandoned stays so."""
        now = time.monotonic()
        looked, lineage = self._known.setdefault(run.path, (now, None))
        if now - looked >= self._pause:
            lineage = _look_up(run)
            self._known[run.path] = now, lineage
        return lineage


def _look_up(run: Run) -> Lineage | None:
    """What its root says of a run; None if that is out of reach, or another run's by now."""
    try:
        root = read_note(run.path / ROOT, str)
        lineage = None if root is None else known_lineage(open_store(root))
    except (ShardwiseError, OSError, ValueError) as error:
        log.info("run %s: its root cannot be read: %s", run.name, error)
        return None
    return lineage if lineage is not None and lineage.run == run.name else None
