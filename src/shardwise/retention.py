"""Retention: choose which checkpoints of a root to keep, and remove the others."""

from __future__ import annotations

import errno
import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from itertools import takewhile
from typing import Any, Literal, SupportsIndex

import msgspec

from shardwise.engine.check_numbers import check_integer, check_step
from shardwise.engine.commit import (
    map_in_threads,
    mark_as_removed,
    remove_leftovers,
    remove_leftovers_below,
)
from shardwise.errors import (
    CheckpointNotFoundError,
    FormatError,
    StateError,
    StoreError,
    StoreUnavailableError,
)
from shardwise.manifest.manifest import (
    LARGEST_MANIFEST,
    MANIFEST,
    Manifest,
    decode_manifest,
    step_directory,
    step_of_directory,
)
from shardwise.store import Store
from shardwise.store.local_files import NotRegularFileError

Metrics = Mapping[str, float | None]
Duration = str | timedelta

log = logging.getLogger("shardwise")
_DURATION = re.compile(r"(\d+(?:\.\d+)?) ?([smhd])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True)
class Best:
    """Selects the checkpoints with the best values of a metric of `Checkpointer.save`.

    Args:
        metric: the name of the metric.
        mode: whether smaller (`"min"`) or larger (`"max"`) values are better.
        n: the number of checkpoints to select.

    Raises:
        ValueError: `n` is less than 1, or `mode` is unknown.
        TypeError: the metric is not a name, or `n` is not an integer.
    """

    metric: str
    mode: Literal["min", "max"] = "min"
    n: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str):
            raise TypeError(f"Best({self.metric!r}): expected the name of a metric, a string")
        if self.mode not in ("min", "max"):
            raise ValueError(f"Best(mode={self.mode!r}): expected 'min' or 'max'")
        object.__setattr__(self, "n", check_integer("Best(n", self.n))

    def rank_steps(self, metrics: Mapping[int, Metrics]) -> list[int]:
        """Return the steps that have this metric, best first; for equal values, newer steps first.

        Args:
            metrics: the metrics of each step. A value of None counts as not measured.
        """
        sign = 1 if self.mode == "min" else -1
        values = ((each.get(self.metric), step) for step, each in metrics.items())
        ranking = sorted((sign * value, -step) for value, step in values if value is not None)
        return [-negative_step for _, negative_step in ranking]


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


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """The data of a checkpoint by which it is kept, removed or copied to a mirror.

    Attributes:
        saved_at: time of the save, in seconds since 1970; None if the manifest has no readable
            time.
        metrics: the metrics that were saved with the checkpoint.
        save_id: the id of its save. Two saves of the same step have different ids.
    """

    saved_at: float | None = None
    metrics: Metrics = field(default_factory=dict)
    save_id: str = ""

    @classmethod
    def of(cls, manifest: Manifest) -> CheckpointInfo:
        """Return the data in a manifest."""
        try:
            moment = datetime.fromisoformat(manifest.created)
        except ValueError:
            return cls(None, manifest.metrics, manifest.save_id)
        moment = moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
        return cls(moment.timestamp(), manifest.metrics, manifest.save_id)


Choice = Literal["newest"] | SupportsIndex | Best
"""Selects a checkpoint of a root: the newest one, a step number, or the best by a metric."""


def parse_choice(step: object, best: Best | None = None) -> Choice:
    """Return a user's `step=` as a choice.

    Args:
        step: the user's `step=`.
        best: the rule that `step="best"` stands for; None if there is none.

    Raises:
        StateError: `step` is not a step number, "newest" or a `Best`; or it is "best" and there is
            no rule.
    """
    if step == "best":
        if best is None:
            raise StateError(
                'step="best" needs a rule: pass keep=sw.Keep(best=sw.Best("loss")) to the '
                'Checkpointer, or step=sw.Best("loss")'
            )
        return best
    if step == "newest":
        return "newest"
    if isinstance(step, Best):
        return step
    if isinstance(step, str) or step is None:
        raise StateError(
            f"step={step!r}: expected a step number, 'newest' or a rule such as sw.Best(\"loss\")"
        )
    return check_step(step)


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


def committed_steps(root: Store) -> list[int]:
    """Return the steps of a root that have a manifest, ascending."""
    names = {step: name for name in root.list() if (step := step_of_directory(name)) is not None}
    manifests = map_in_threads(lambda step: root.at(names[step]).stat(MANIFEST), names)
    return sorted(step for step, found in zip(names, manifests, strict=True) if found is not None)


def apply_retention(
    root: Store,
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
    committed = committed_steps(root)
    steps = [step for step in committed if step <= newest and step not in damaged]
    if keep.needs_manifests:
        checkpoints = _read_infos(root, steps)
    else:
        checkpoints = {step: CheckpointInfo() for step in steps}
    kept = keep.steps_to_keep(checkpoints) | {newest}
    to_remove = [step for step in steps if step not in kept]
    return remove_checkpoints(root, to_remove, newest, committed, should_continue)


def remove_checkpoints(
    root: Store,
    steps: Iterable[int],
    newest: int,
    committed: Sequence[int],
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
        store = root.at(step_directory(step))
        try:
            if remove_checkpoint(store):
                removed.append(step)
        except NotRegularFileError as error:
            log.warning("retention does not remove %s: %s", store, error)
    if root.traits.reading_grace and should_continue():
        found = (step_of_directory(name) for name in root.list())
        older = [each for each in found if each is not None and each < newest]
        uncommitted = set(older) - set(committed)
        remove_leftovers_below(root, list(map(step_directory, sorted(uncommitted))))
    return removed


def remove_checkpoint(store: Store) -> bool:
    """Remove a checkpoint, manifest first, unless it is being read; return whether it is gone.

    In a store without shared locks, the files stay for processes that read them, until
    `remove_leftovers` is called after `StoreTraits.reading_grace` seconds.
    """
    at_once = not store.traits.reading_grace
    with store.lock(MANIFEST) as locked:
        if not locked:
            return False
        if not at_once:
            mark_as_removed(store, time.time())
        store.delete(MANIFEST)
    if not at_once:
        return True
    remove_leftovers(store)
    with suppress(OSError):  # the directory contains files that shardwise did not write
        store.delete("")
    return True


def choose_step(root: Store, choice: Choice) -> int:
    """Return the committed step of a root that a choice selects.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint.
        OSError: the metrics of a checkpoint cannot be read.
    """
    steps = committed_steps(root)
    if choice == "newest":
        candidates = steps[::-1]
        missing = "checkpoint: no save below it has completed: check the path, or save first"
    elif isinstance(choice, Best):
        metrics = {step: info.metrics for step, info in _read_infos(root, steps).items()}
        candidates = choice.rank_steps(metrics)
        missing = (
            f"checkpoint with the metric {choice.metric!r}: select a step number or 'newest', or "
            "pass metrics= to save"
        )
    else:
        number = check_step(choice)
        candidates = [number] if number in steps else []
        newest = ", ".join(map(str, steps[-5:])) or "none"
        advice = "select one of these steps, or 'newest'" if steps else "check the path"
        missing = f"checkpoint of step {number} (newest steps: {newest}): {advice}"
    if not candidates:
        raise CheckpointNotFoundError(f"{root} has no {missing}")
    return candidates[0]


def _read_infos(root: Store, steps: Sequence[int]) -> dict[int, CheckpointInfo]:
    """Read the times and metrics of many checkpoints in parallel."""
    infos = map_in_threads(lambda step: _read_info(root.at(step_directory(step))), steps)
    return dict(zip(steps, infos, strict=True))


def _read_info(store: Store) -> CheckpointInfo:
    """Read the time and metrics of a checkpoint. If the manifest is damaged, return neither.

    Raises:
        OSError: the manifest cannot be read now, so its checkpoint may be the best one.
    """
    try:
        manifest = decode_manifest(store.read(MANIFEST, limit=LARGEST_MANIFEST))
    except (FormatError, FileNotFoundError):
        return CheckpointInfo()
    except StoreUnavailableError:
        raise
    except OSError as error:
        if isinstance(error, StoreError) or error.errno == errno.EIO:  # the file is damaged
            return CheckpointInfo()
        raise
    return CheckpointInfo.of(manifest)
