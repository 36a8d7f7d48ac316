"""Duties that fail are tried again, ever later, and told of ever more rarely."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from shardwise.memory.node.place import ABANDONED, Place

LATEST = 60.0
FORGOTTEN = 600.0
log = logging.getLogger("shardwise.agent")


@dataclass(slots=True)
class _Trouble:
    """How often something has failed in a row, and when that was the last time."""

    times: int = 0
    at: float = 0.0

    def add(self) -> None:
        """Once more; from the beginning, if it is long ago."""
        now = time.monotonic()
        self.times = self.times + 1 if now - self.at < FORGOTTEN else 1
        self.at = now

    def is_due(self) -> bool:
        """Whether it is to be tried again: at once after the first time, then ever later."""
        pause = min(2.0 ** (self.times - 2), LATEST) if self.times > 1 else 0.0
        return time.monotonic() - self.at >= pause


class Attempts:
    """A duty, attempted on one snapshot after the other by one thread.

    Args:
        name: what it is called in the log.
    """

    def __init__(self, name: str, duty: Callable[[Place], bool]) -> None:
        self._name = name
        self._duty = duty
        self._places: dict[Path, _Trouble] = {}
        self._kinds: dict[tuple[str, int], _Trouble] = {}

    def attempt(self, place: Place) -> bool:
        """Whether the duty did anything; not if it failed, or did too short ago."""
        trouble = self._places.get(place.path)
        if trouble is not None and not trouble.is_due():
            return False
        try:
            busy = self._duty(place)
        except Exception as error:
            trouble = self._places.setdefault(place.path, _Trouble())
            trouble.add()
            self._tell(place, error, trouble.times)
            return False
        self._places.pop(place.path, None)
        return busy

    def forget_but(self, places: Collection[Path]) -> None:
        """Forget snapshots that are no more."""
        for path in self._places.keys() - places:
            del self._places[path]

    def _tell(self, place: Place, error: Exception, times: int) -> None:
        what = f"{self._name}: {place.path}: {type(error).__name__}: {error}"
        passing = isinstance(error, FileNotFoundError) and times == 1
        if passing or not place.path.exists() or place.has(ABANDONED):
            log.info("%s (it is retired, or another does so)", what)
            return
        kind = self._kinds.setdefault(_kind_of(error), _Trouble())
        kind.add()
        if kind.times == 1:
            log.error("%s", what, exc_info=error)
        elif kind.times & (kind.times - 1) == 0:  # 2, 4, 8, …
            log.error("%s (%d times by now)", what, kind.times)


def _kind_of(error: Exception) -> tuple[str, int]:
    """What is the same when the same fails again: its type, and the line that raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return type(error).__name__, 0 if trace is None else trace.tb_lineno
