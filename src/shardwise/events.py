"""Events: the finished stages of an operation, with their durations and bytes."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    """A finished stage of an operation. Functions pass events to their `on_event`.

    Example:

        sw.save(path, state, on_event=lambda event: print(event.stage, event.seconds))

    Attributes:
        stage: the name of the stage, for example `"write"`.
        start: the start of the stage, in seconds of `time.perf_counter`.
        seconds: the duration of the stage.
        bytes: the number of bytes that the stage processed, if the stage counts them.
    """

    stage: str
    start: float
    seconds: float
    bytes: int = 0


UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
Sink = Callable[[Event], None]
"""The type of `on_event`: called with each event."""


class Recorder:
    """Measures the stages of one operation from its start on, and passes their events to a sink.

    Args:
        sink: called with each event, if it is not None.
    """

    def __init__(self, sink: Sink | None = None) -> None:
        self._sink = sink
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str, nbytes: int = 0) -> Iterator[None]:
        """Record the block as a stage, even if the block raises an error."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._record(Event(name, start, time.perf_counter() - start, nbytes))

    def add(self, name: str, seconds: float) -> None:
        """Record a stage that ends now, with a duration in seconds that the caller measured."""
        self._record(Event(name, time.perf_counter() - seconds, seconds))

    def _record(self, event: Event) -> None:
        self._seconds[event.stage] = self._seconds.get(event.stage, 0.0) + event.seconds
        try:
            if self._sink is not None:
                self._sink(event)
        except Exception as error:  # the operation may be committed already
            warnings.warn(f"on_event raised {error!r}", RuntimeWarning, stacklevel=3)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each stage, and the `total` since the start."""
        return {**self._seconds, "total": time.perf_counter() - self._started}


def format_count(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number and its noun: `1 file`, `2,000 files`, `2 boxes`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def format_bytes(nbytes: int) -> str:
    """Format a number of bytes in a binary unit, for example `0 B`, `1.50 KiB` or `250 MiB`."""
    value = float(nbytes)
    for unit in UNITS:
        if value < 1000 or unit == UNITS[-1]:
            break
        value /= 1024
    if unit == "B":
        return f"{nbytes} B"
    decimals = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{decimals}f} {unit}"


def repr_of_set_fields(value: Any) -> str:
    """Return the `repr` of a dataclass without the fields that have their default values."""
    defaults = {
        each.name: each.default if each.default_factory is MISSING else each.default_factory()
        for each in fields(value)
    }
    shown = [
        f"{name}={getattr(value, name)!r}"
        for name, default in defaults.items()
        if getattr(value, name) != default
    ]
    return f"{type(value).__name__}({', '.join(shown)})"
