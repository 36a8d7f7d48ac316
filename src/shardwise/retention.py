"""Retention: choose which checkpoints of a root to keep, and remove the others."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from itertools import takewhile
from typing import Literal, SupportsIndex

import msgspec

from shardwise.engine.leftovers import remove_leftovers
from shardwise.engine.options import check_integer, check_step
from shardwise.errors import CheckpointNotFoundError, FormatError, StateError
from shardwise.manifest.manifest import LARGEST_MANIFEST, Manifest, decode_manifest
from shardwise.manifest.names import MANIFEST, step_directory, step_of_directory
from shardwise.store import Store

Metrics = Mapping[str, float | None]
Duration = str | timedelta
PlainKeep = dict[str, int | str | dict[str, int | str] | None]
"""`Keep` as plain values, for the records of agents."""

_DURATION = re.compile(r"(\d+(?:\.\d+)?) ?([smhd])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True)
class Best:
    """Selects the checkpoints with the best values of a metric of `Checkpointer.save`.

    Args:
        metric: the name of the metric.
        mode: whether smaller (`"min"`) or larger (`"max"`) values are better.
        n: how many checkpoints.

    Raises:
        ValueError: `n` is less than 1, or `mode` is unknown.
        TypeError: the metric is not a name, or `n` is not an integer.
    """

    metric: str
    mode: Literal["min", "max"] = "min"
    n: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str):
            raise TypeError(f"Best({self.metric!r}): expected the name of a metric")
        if self.mode not in ("min", "max"):
            raise ValueError(f"Best(mode={self.mode!r}): expected 'min' or 'max'")
        object.__setattr__(self, "n", check_integer("Best(n", self.n))

    def ranked(self, metrics: Mapping[int, Metrics]) -> list[int]:
        """Return the steps that have this metric, best first; for equal values, newer steps first.

        Values that are not finite count as not measured.
        """
        sign = 1 if self.mode == "min" else -1
        values = ((each.get(self.metric), step) for step, each in metrics.items())
        ranked = sorted((sign * v, -step) for v, step in values if v is not None)
        return [-negative for _, negative in ranked]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Which checkpoints to keep. A checkpoint stays if any rule keeps it; the newest always stays.

    Without any rule, all checkpoints stay. The time of a checkpoint is the one in its manifest. A
    checkpoint whose manifest has no readable time stays under `latest_for` and `every_time`.

    Write durations as `"90s"`, `"30m"`, `"2h"` or `"7d"`, or pass a `timedelta`.

    Args:
        last: keep this many of the newest checkpoints.
        multiple_of: keep checkpoints whose step is a multiple of this.
        best: keep the checkpoints with the best values of a metric.
        latest_for: keep checkpoints that are at most this much older than the newest.
        every_time: keep one checkpoint per interval: the oldest, then the first one that was saved
            at least this long after it, and so on.

    Raises:
        ValueError: a number or a duration is not positive.
        TypeError: an argument has the wrong type.
    """

    last: int | None = None
    multiple_of: int | None = None
    best: Best | None = None
    latest_for: Duration | None = None
    every_time: Duration | None = None

    def __post_init__(self) -> None:
        for name in ("last", "multiple_of"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, check_integer(f"Keep({name}", value))
        if self.best is not None and not isinstance(self.best, Best):
            raise TypeError(
                f"Keep(best={self.best!r}): expected sw.Best, such as "
                'sw.Best("loss", mode="min", n=1)'
            )
        for name in ("latest_for", "every_time"):
            value = getattr(self, name)
            if value is not None:
                seconds = _seconds(f"Keep({name}", value)
                object.__setattr__(self, name, f"{seconds!r}s")

    @property
    def removes(self) -> bool:
        """Whether there is any rule; without one, no checkpoint is removed."""
        return self != Keep()

    def kept(self, steps: Mapping[int, Saved]) -> set[int]:
        """Return which steps are kept, given the time and the metrics of each."""
        ordered = sorted(steps)
        if not self.removes or not ordered:
            return set(ordered)
        kept = set(ordered[-(self.last or 1) :])
        if self.multiple_of is not None:
            kept |= {step for step in ordered if step % self.multiple_of == 0}
        if self.best is not None:
            kept |= set(self.best.ranked({s: steps[s].metrics for s in ordered})[: self.best.n])
        return kept | self._kept_by_time(ordered, steps)

    def _kept_by_time(self, ordered: Sequence[int], steps: Mapping[int, Saved]) -> set[int]:
        if self.latest_for is None and self.every_time is None:
            return set()
        times = {step: at for step in ordered if (at := steps[step].at) is not None}
        kept = set(ordered) - times.keys()
        if self.latest_for is not None and times:
            oldest = times[max(times)] - _seconds("latest_for", self.latest_for)
            kept |= {step for step, at in times.items() if at >= oldest}
        if self.every_time is not None:
            due = -math.inf
            for step, at in sorted(times.items(), key=lambda each: (each[1], each[0])):
                if at >= due:
                    kept.add(step)
                    due = at + _seconds("every_time", self.every_time)
        return kept

    @property
    def needs_manifests(self) -> bool:
        """Whether a rule needs data from the manifests."""
        return any(rule is not None for rule in (self.best, self.latest_for, self.every_time))


@dataclass(frozen=True, slots=True)
class Saved:
    """The data of a checkpoint that retention rules use.

    Attributes:
        at: time of the save, in seconds since 1970; None if its manifest has no readable time.
        metrics: metrics that were saved with it.
    """

    at: float | None = None
    metrics: Metrics = field(default_factory=dict)


Choice = Literal["newest"] | SupportsIndex | Best
"""Selects a checkpoint of a root: the newest, that of a step, or the best by a metric."""


def checked_choice(step: object) -> Choice:
    """Check a user's choice and return it.

    Raises:
        StateError: `step` is not a step number, "newest" or a `Best`.
    """
    if step == "newest":
        return "newest"
    if isinstance(step, Best):
        return step
    if isinstance(step, str) or step is None:
        raise StateError(f"step={step!r}: expected a step, 'newest' or sw.Best(\"loss\")")
    return check_step(step)


def decode_keep(data: Mapping[str, object]) -> Keep:
    """Decode rules from the plain values of `dataclasses.asdict`.

    Raises:
        msgspec.ValidationError: the values are not valid rules.
    """
    return msgspec.convert(data, type=_PlainKeep).rules()


class _PlainKeep(msgspec.Struct, forbid_unknown_fields=True):
    last: int | None = None
    multiple_of: int | None = None
    best: Best | None = None
    latest_for: str | None = None
    every_time: str | None = None

    def rules(self) -> Keep:
        return Keep(
            last=self.last,
            multiple_of=self.multiple_of,
            best=self.best,
            latest_for=self.latest_for,
            every_time=self.every_time,
        )


def _seconds(what: str, duration: Duration) -> float:
    if isinstance(duration, timedelta):
        seconds = duration.total_seconds()
    elif isinstance(duration, str):
        match = _DURATION.fullmatch(duration)
        if match is None:
            raise ValueError(f"{what}={duration!r}): expected a duration, such as '90s' or '2h'")
        seconds = float(match.group(1)) * _UNITS[match.group(2)]
    else:
        raise TypeError(f"{what}={duration!r}): expected a duration, such as '90s' or '2h'")
    if not 0 < seconds < math.inf:
        raise ValueError(f"{what}={duration!r}): expected a duration longer than 0")
    return seconds


def committed_steps(root: Store) -> list[int]:
    """Return the steps of a root that have a manifest, ascending."""
    steps = [step for name in root.list() if (step := step_of_directory(name)) is not None]
    return sorted(s for s in steps if MANIFEST in root.at(step_directory(s)).list())


def apply_retention(
    root: Store,
    keep: Keep,
    *,
    newest: int,
    damaged: frozenset[int],
    is_wanted: Callable[[], bool] = lambda: True,
) -> list[int]:
    """Remove the steps up to `newest`, which was just saved, that `keep` does not keep.

    Damaged steps are not counted and not removed. A checkpoint that is being read is left for the
    next call.

    Args:
        root: root of the checkpoints.
        keep: the rules.
        newest: step that was just saved; always kept.
        damaged: steps that are known to be damaged.
        is_wanted: called before each removal; if it returns False, the remaining steps are kept.

    Returns:
        The steps that were removed.
    """
    steps = [s for s in committed_steps(root) if s <= newest and s not in damaged]
    needed = keep.needs_manifests
    known = {s: _saved(root.at(step_directory(s))) if needed else Saved() for s in steps}
    kept = keep.kept(known) | {newest}
    gone = takewhile(lambda _: is_wanted(), (s for s in steps if s not in kept))
    return [s for s in gone if remove_checkpoint(root.at(step_directory(s)))]


def remove_checkpoint(store: Store) -> bool:
    """Remove a checkpoint, manifest first, unless it is being read; return whether it is gone."""
    with store.hold(MANIFEST, shared=False) as held:
        if not held:
            return False
        store.delete(MANIFEST)
    remove_leftovers(store)
    with suppress(OSError):  # the directory stays if it has files of others
        store.remove()
    return True


def choose_step(root: Store, choice: Choice) -> int:
    """Return the committed step of a root that a choice selects.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint.
    """
    steps = committed_steps(root)
    found: int | None = None
    if choice == "newest":
        what, found = "checkpoint: no save below it has completed", next(reversed(steps), None)
    elif isinstance(choice, Best):
        known = {step: _saved(root.at(step_directory(step))).metrics for step in steps}
        what, found = f"checkpoint with the metric {choice.metric!r}", best_of(choice, known)
    else:
        number = check_step(choice)
        there = ", ".join(map(str, steps[-5:])) or "none"
        what, found = f"checkpoint of step {number} (newest steps: {there})", number
        found = number if number in steps else None
    if found is None:
        raise CheckpointNotFoundError(f"{root} has no {what}")
    return found


def best_of(best: Best, metrics: Mapping[int, Metrics]) -> int | None:
    """Return the step with the best value, or None if no step has the metric."""
    return next(iter(best.ranked(metrics)), None)


def _saved(store: Store) -> Saved:
    try:
        manifest = decode_manifest(store.read(MANIFEST, limit=LARGEST_MANIFEST))
    except (FormatError, OSError):
        return Saved()
    return Saved(_time_of(manifest), manifest.metrics)


def _time_of(manifest: Manifest) -> float | None:
    try:
        at = datetime.fromisoformat(manifest.created)
    except ValueError:
        return None
    return (at if at.tzinfo else at.replace(tzinfo=timezone.utc)).timestamp()
