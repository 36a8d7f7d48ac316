"""Retention: choose which checkpoints of a root to keep, and remove the others."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import takewhile
from typing import Any

import msgspec

from shardwise.kernel.engine.check_numbers import check_integer
from shardwise.kernel.engine.root import Best, CheckpointInfo, Root
from shardwise.kernel.store.local_files import NotRegularFileError

Duration = str | timedelta

log = logging.getLogger("shardwise")
_DURATION = re.compile(r"(\d+(?:\.\d+)?) ?([smhd])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Which checkpoints to keep. A checkpoint stays if any rule keeps it; the newest always stays.

    Without any rule, all checkpoints stay. `latest_for` and `every_time` use the time in the
    manifest of a checkpoint. They keep a checkpoint whose manifest has no readable time.

    Write durations as `"90s"`, `"30m"`, `"2h"` or `"7d"`, or pass a `timedelta`.

    Args:
        last: keep this many of the newest checkpoints.
        multiple_of: keep checkpoints whose step is a multiple of this.
        best: keep the checkpoints with the best values of a metric.
        latest_for: keep checkpoints that are at most this much older than the newest.
        every_time: keep one checkpoint for each interval of this length: the oldest checkpoint,
            then the first that was saved at least one interval after it, and so on.

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
                seconds = duration_in_seconds(value, f"Keep({name}={value!r})")
                object.__setattr__(self, name, f"{seconds!r}s")

    @classmethod
    def decode(cls, data: Mapping[str, Any]) -> Keep:
        """Decode rules from the plain values of `dataclasses.asdict`.

        Raises:
            msgspec.ValidationError: the values are not valid rules.
        """
        try:
            best = None if data.get("best") is None else Best(**data["best"])
            return cls(**{**data, "best": best})
        except (TypeError, ValueError) as error:
            raise msgspec.ValidationError(str(error)) from error

    @property
    def has_rules(self) -> bool:
        """Whether there is any rule; without one, no checkpoint is removed."""
        return self != Keep()

    def steps_to_keep(self, checkpoints: Mapping[int, CheckpointInfo]) -> set[int]:
        """Return the steps that the rules keep.

        Args:
            checkpoints: the time and the metrics of each step.
        """
        steps = sorted(checkpoints)
        if not self.has_rules or not steps:
            return set(steps)
        kept = set(steps[-(self.last or 1) :])
        if self.multiple_of is not None:
            kept |= {step for step in steps if step % self.multiple_of == 0}
        if self.best is not None:
            metrics = {step: checkpoints[step].metrics for step in steps}
            kept |= set(self.best.rank_steps(metrics)[: self.best.n])
        return kept | self._steps_kept_by_time(steps, checkpoints)

    def _steps_kept_by_time(
        self, steps: Sequence[int], checkpoints: Mapping[int, CheckpointInfo]
    ) -> set[int]:
        if self.latest_for is None and self.every_time is None:
            return set()
        times = {step: time for step in steps if (time := checkpoints[step].saved_at) is not None}
        kept = set(steps) - times.keys()
        if self.latest_for is not None and times:
            oldest = times[max(times)] - duration_in_seconds(self.latest_for)
            kept |= {step for step, time in times.items() if time >= oldest}
        if self.every_time is not None:
            next_time = -math.inf
            for step, time in sorted(times.items(), key=lambda item: (item[1], item[0])):
                if time >= next_time:
                    kept.add(step)
                    next_time = time + duration_in_seconds(self.every_time)
        return kept

    @property
    def needs_manifests(self) -> bool:
        """Whether a rule needs data from the manifests."""
        return any(rule is not None for rule in (self.best, self.latest_for, self.every_time))


def duration_in_seconds(duration: Duration, label: str = "") -> float:
    """Return a duration in seconds. Errors begin with `label`, by default with the duration.

    Raises:
        ValueError: the text is not a duration, or the duration is not positive.
        TypeError: it is neither a text nor a `timedelta`.
    """
    label = label or repr(duration)
    if isinstance(duration, timedelta):
        seconds = duration.total_seconds()
    elif isinstance(duration, str):
        match = _DURATION.fullmatch(duration)
        if match is None:
            raise ValueError(f"{label}: expected a duration, such as '90s', '2h' or a timedelta")
        seconds = float(match.group(1)) * _UNITS[match.group(2)]
    else:
        raise TypeError(f"{label}: expected a duration, such as '90s', '2h' or a timedelta")
    if not 0 < seconds < math.inf:
        raise ValueError(f"{label}: expected a duration longer than 0")
    return seconds


def apply_retention(
    root: Root,
    keep: Keep,
    *,
    newest: int,
    damaged: frozenset[int],
    should_continue: Callable[[], bool] = lambda: True,
) -> list[int]:
    """Remove the checkpoints of a root that the rules do not keep.

    Damaged checkpoints do not count for the rules, and are not removed. A checkpoint that is being
    read stays until the next call. In a store without shared locks, a call removes only the
    manifest. The next call after `StoreTraits.reading_grace` seconds removes the files.

    Args:
        root: the root of the checkpoints.
        keep: the rules.
        newest: the step that was just saved. It stays, and so do checkpoints of higher steps.
        damaged: steps that are known to be damaged.
        should_continue: called before each removal; if it returns False, the remaining steps stay.

    Returns:
        The steps that were removed, ascending.

    Raises:
        OSError: the root does not answer, or a manifest cannot be read. No checkpoint is removed
            on the ground of metrics that could not be read.
    """
    committed = root.steps()
    steps = [step for step in committed if step <= newest and step not in damaged]
    checkpoints = (
        root.infos(steps) if keep.needs_manifests else dict.fromkeys(steps, CheckpointInfo())
    )
    kept = keep.steps_to_keep(checkpoints) | {newest}
    to_remove = [step for step in steps if step not in kept]
    return remove_checkpoints(root, to_remove, newest, committed, should_continue)


def remove_checkpoints(
    root: Root,
    steps: Iterable[int],
    newest: int,
    committed: Collection[int],
    should_continue: Callable[[], bool] = lambda: True,
) -> list[int]:
    """Remove checkpoints, and delete the files of earlier removed ones after their grace period.

    Args:
        root: the root.
        steps: the checkpoints to remove, unless they are being read, or their manifest is not a
            regular file.
        newest: the step that was just saved. The files of newer steps stay.
        committed: all steps with a manifest.
        should_continue: as for `apply_retention`.

    Returns:
        The steps that were removed.
    """
    removed = []
    for step in takewhile(lambda _: should_continue(), steps):
        directory = root.at(step)
        try:
            if directory.remove():
                removed.append(step)
        except NotRegularFileError as error:
            log.warning("retention does not remove %s: %s", directory, error)
    if root.store.traits.reading_grace and should_continue():
        older = {step for step in root.listed_steps() if step < newest}
        root.remove_leftovers(sorted(older.difference(committed)))
    return removed
