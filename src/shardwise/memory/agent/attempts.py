"""What there is to do with a snapshot is done once; what fails is tried again, ever later, and told
of ever more rarely."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from shardwise.memory.home import ABANDONED, Held, Place

LATEST = 60.0
FORGOTTEN = 600.0
log = logging.getLogger("shardwise.agent")


@dataclass(frozen=True, slots=True)
class Seen:
    """A snapshot at one time.

    Attributes:
        run: the names of all files in the snapshots of its run, by step.
    """

    place: Place
    run: Mapping[int, frozenset[str]]

    @property
    def names(self) -> frozenset[str]:
        """Those of its own files."""
        return self.run[self.place.step]


@dataclass(frozen=True, slots=True)
class Duty:
    """One kind of work.

    Attributes:
        signs: by what names one sees that there may be something to do with a snapshot. While they
            are the same as when nothing was done, nothing is to be done.
        attend: does what there is to do; whether that was anything.
    """

    signs: Callable[[Seen], Collection[str]]
    attend: Callable[[Place], bool]


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

    def __init__(self, name: str, duty: Duty) -> None:
        self._name = name
        self._duty = duty
        self._idle: dict[Path, frozenset[str]] = {}
        self._places: dict[Path, _Trouble] = {}
        self._kinds: dict[tuple[str, int], _Trouble] = {}

    def is_due(self, seen: Seen) -> bool:
        """Whether there may be something to do; any thread may ask."""
        signs = self._duty.signs(seen)
        if not signs or self._idle.get(seen.place.path) == frozenset(signs):
            return False
        trouble = self._places.get(seen.place.path)
        return trouble is None or trouble.is_due()

    def attempt(self, seen: Seen) -> bool:
        """Whether the duty did anything."""
        place = seen.place
        try:
            busy = self._duty.attend(place)
        except Held:
            return False
        except Exception as error:
            trouble = self._places.setdefault(place.path, _Trouble())
            trouble.add()
            self._tell(place, error, trouble.times)
            return False
        self._places.pop(place.path, None)
        if not busy:
            self._idle[place.path] = frozenset(self._duty.signs(seen))
        return busy

    def forget_but(self, places: Collection[Path]) -> None:
        """Forget snapshots that are no more."""
        for known in (self._places, self._idle):
            for path in known.keys() - places:
                del known[path]

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
