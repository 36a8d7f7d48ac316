"""What happened, when, and how many bytes it moved."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Event:
    """One finished stage: its name, its start (seconds, monotonic), its duration, its bytes."""

    stage: str
    start: float
    seconds: float
    bytes: int = 0


Sink = Callable[[Event], None]


@dataclass(slots=True)
class Recorder:
    """Collects the events of one operation, and passes each on to `sink`."""

    sink: Sink | None = None
    events: list[Event] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    @contextmanager
    def stage(self, name: str, nbytes: int = 0) -> Iterator[None]:
        """Record the block as a stage; it is recorded also if it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            event = Event(name, start, time.perf_counter() - start, nbytes)
            self.events.append(event)
            if self.sink is not None:
                self.sink(event)

    def seconds(self) -> dict[str, float]:
        """Seconds by stage, in the order in which they first ended, and their `total`."""
        sums: dict[str, float] = {}
        for event in self.events:
            sums[event.stage] = sums.get(event.stage, 0.0) + event.seconds
        sums["total"] = time.perf_counter() - self.started
        return sums
