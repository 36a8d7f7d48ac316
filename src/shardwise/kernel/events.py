"""Events: the finished stages of an operation, with their durations and bytes."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, replace
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
        waited: the seconds of the duration in which this rank waited for other ranks.
        retries: how many requests to the storage were repeated.
        file: the name of the file that the stage wrote; "" if it wrote none.
    """

    stage: str
    start: float
    seconds: float
    bytes: int = 0
    waited: float = 0.0
    retries: int = 0
    file: str = ""


@dataclass(slots=True)
class RunningStage:
    """A stage in progress. Its block sets what it learns, and the event has these values.

    Attributes:
        bytes, file, retries, waited: as in `Event`.
    """

    name: str
    bytes: int = 0
    file: str = ""
    retries: int = 0
    waited: float = 0.0


@dataclass(frozen=True, slots=True)
class OperationRecord:
    """What one rank did in an operation. Times without a date are seconds of `time.perf_counter`.

    Attributes:
        began: when the operation began on this rank.
        ended: when this record was made.
        agreed: when the ranks first had the same result, at almost the same time; None if they
            exchanged nothing.
        clock: the wall clock at that time, or else at the beginning, in seconds since 1970.
        events: the stages. A wait for other ranks after a stage is part of the stage.
        axes: the coordinate of this rank in each named axis of the meshes of its tensors.
        save_id: the id of the save; "" for other operations.
    """

    began: float = 0.0
    ended: float = 0.0
    agreed: float | None = None
    clock: float = 0.0
    events: tuple[Event, ...] = ()
    axes: dict[str, int] = field(default_factory=dict)
    save_id: str = ""


UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


Sink = Callable[[Event], None]
"""The type of `on_event`: called with each event."""
Watcher = Callable[[str, bool], None]
"""Called when a stage begins or ends, and when this rank begins or ends to wait for others: with
the name of the present stage, "" for none, and whether this rank waits."""


class Recorder:
    """Measures the stages of one operation from its start on, and passes their events to a sink.

    Args:
        sink: called with each event, if it is not None.
        watcher: called whenever the present stage changes, if it is not None.
        began: when the operation began, in seconds of `time.perf_counter`; by default, now.

    Attributes:
        axes, save_id: as in `OperationRecord`.
    """

    def __init__(
        self,
        sink: Sink | None = None,
        watcher: Watcher | None = None,
        began: float | None = None,
    ) -> None:
        self._sink, self._watcher = sink, watcher
        now = time.perf_counter()
        self._started = now if began is None else began
        self._clock = time.time() - (now - self._started)
        self._agreed: float | None = None
        self._seconds: dict[str, float] = {}
        self._running: list[RunningStage] = []
        self._events: list[Event] = []
        self.axes: dict[str, int] = {}
        self.save_id = ""

    @contextmanager
    def stage(self, name: str, nbytes: int = 0) -> Iterator[RunningStage]:
        """Record the block as a stage, even if the block raises an error."""
        running = RunningStage(name, nbytes)
        start = time.perf_counter()
        self._running.append(running)
        self._tell_watcher()
        try:
            yield running
        finally:
            self._running.remove(running)
            seconds = time.perf_counter() - start
            waited, retries = running.waited, running.retries
            event = Event(name, start, seconds, running.bytes, waited, retries, running.file)
            self._record(event)
            self._tell_watcher()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block as a wait for other ranks: in the present stage, or else in the last."""
        start = time.perf_counter()
        self._tell_watcher(is_waiting=True)
        try:
            yield
        finally:
            end = time.perf_counter()
            for running in self._running:
                running.waited += end - start
            if self._events and not self._running:
                last = self._events[-1]
                waited = last.waited + end - start
                self._events[-1] = replace(last, seconds=end - last.start, waited=waited)
            self._tell_watcher()

    def note_agreement(self) -> None:
        """Note that all ranks have the same result now. Only the first call counts."""
        if self._agreed is None:
            self._agreed, self._clock = time.perf_counter(), time.time()

    def add(self, name: str, seconds: float) -> None:
        """Record a stage that ends now, with a duration in seconds that the caller measured."""
        self._record(Event(name, time.perf_counter() - seconds, seconds))

    def _record(self, event: Event) -> None:
        self._seconds[event.stage] = self._seconds.get(event.stage, 0.0) + event.seconds
        self._events.append(event)
        try:
            if self._sink is not None:
                self._sink(event)
        except Exception as error:  # the operation may be committed already
            warnings.warn(f"on_event raised {error!r}", RuntimeWarning, stacklevel=3)

    def _tell_watcher(self, *, is_waiting: bool = False) -> None:
        if self._watcher is not None:
            stage = self._running[-1].name if self._running else ""
            if is_waiting and not stage and self._events:
                stage = self._events[-1].stage
            self._watcher(stage, is_waiting)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each stage, and the `total` since the start."""
        return {**self._seconds, "total": time.perf_counter() - self._started}

    def record(self) -> OperationRecord:
        """Return what this rank has done so far."""
        return OperationRecord(
            began=self._started,
            ended=time.perf_counter(),
            agreed=self._agreed,
            clock=self._clock,
            events=tuple(self._events),
            axes=dict(self.axes),
            save_id=self.save_id,
        )


def format_count(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number and its noun: `1 file`, `2,000 files`, `2 boxes`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def format_bytes(nbytes: int) -> str:
    """Return a number of bytes in a binary unit: `0 B`, `1.50 KiB`, `250 MiB`."""
    value = float(nbytes)
    for unit in UNITS:
        if value < 999.5 or unit == UNITS[-1]:
            break
        value /= 1024
    if unit == "B":
        return f"{nbytes} B"
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
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
