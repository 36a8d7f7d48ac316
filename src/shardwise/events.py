"""Events: the stages of an operation, with their times and bytes; and sizes as text."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Event:
    """A finished stage: its name, start (monotonic seconds), duration in seconds, and bytes."""

    stage: str
    start: float
    seconds: float
    bytes: int = 0


UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
Sink = Callable[[Event], None]


def _emit(sink: Sink, event: Event) -> None:
    """Call a sink. If it raises, warn: the operation itself may already be committed."""
    try:
        sink(event)
    except Exception as error:
        warnings.warn(f"on_event raised {error!r}", RuntimeWarning, stacklevel=3)


@dataclass(slots=True)
class Recorder:
    """Collects the events of one operation, and passes each to `sink`."""

    sink: Sink | None = None
    events: list[Event] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    @contextmanager
    def stage(self, name: str, nbytes: int = 0) -> Iterator[None]:
        """Record the block as a stage, also if it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            event = Event(name, start, time.perf_counter() - start, nbytes)
            self.events.append(event)
            if self.sink is not None:
                _emit(self.sink, event)

    def add(self, name: str, seconds: float) -> None:
        """Record a stage that ends now, whose duration was measured elsewhere."""
        event = Event(name, time.perf_counter() - seconds, seconds)
        self.events.append(event)
        if self.sink is not None:
            _emit(self.sink, event)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each stage, ordered by first end, and the `total`."""
        sums: dict[str, float] = {}
        for event in self.events:
            sums[event.stage] = sums.get(event.stage, 0.0) + event.seconds
        sums["total"] = time.perf_counter() - self.started
        return sums


def size(nbytes: int) -> str:
    """Return bytes in a fitting binary unit: `0 B`, `1.50 KiB`, `250 MiB`."""
    value = float(nbytes)
    for unit in UNITS:
        if value < 1000 or unit == UNITS[-1]:
            break
        value /= 1024
    if unit == "B":
        return f"{nbytes} B"
    decimals = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{decimals}f} {unit}"
