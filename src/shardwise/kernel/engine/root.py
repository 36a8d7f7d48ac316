"""`Root`: the directory of a run, with a checkpoint of each step; and the choice of a step."""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Literal, SupportsIndex

from shardwise.kernel.engine.check_numbers import check_integer, check_step
from shardwise.kernel.engine.checkpoint_directory import (
    CheckpointDirectory,
    Directory,
    map_in_threads,
)
from shardwise.kernel.errors import (
    CheckpointNotFoundError,
    FormatError,
    StateError,
    StoreError,
    StoreUnavailableError,
)
from shardwise.kernel.manifest.manifest import Manifest, step_directory, step_of_directory
from shardwise.kernel.store import abort_uploads

Metrics = Mapping[str, float | None]


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


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """The data of a checkpoint by which it is chosen, kept, removed or copied to a mirror.

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


def steps_in(names: Iterable[str]) -> list[int]:
    """Return the steps that have a directory, given the names in a root, in this order."""
    return [step for name in names if (step := step_of_directory(name)) is not None]


class Root(Directory):
    """The directory of a run, which has a directory for the checkpoint of each step."""

    def at(self, step: int) -> CheckpointDirectory:
        """Return the directory of a step, which need not exist. This makes no request."""
        return CheckpointDirectory(self.store.at(step_directory(step)))

    def listed_steps(self) -> list[int]:
        """Return the steps that have a directory, committed or not."""
        return steps_in(self.store.list())

    def steps(self, besides: Collection[int] = ()) -> list[int]:
        """Return the committed steps, ascending.

        Args:
            besides: steps to leave out.
        """
        steps = [step for step in self.listed_steps() if step not in besides]
        committed = map_in_threads(lambda step: self.at(step).is_committed(), steps)
        return sorted(step for step, found in zip(steps, committed, strict=True) if found)

    def infos(self, steps: Sequence[int]) -> dict[int, CheckpointInfo]:
        """Read the times and metrics of many checkpoints in parallel.

        Raises:
            OSError: a manifest cannot be read now, so its checkpoint may be the best one.
        """
        infos = map_in_threads(lambda step: _read_info(self.at(step)), steps)
        return dict(zip(steps, infos, strict=True))

    def choose(self, choice: Choice) -> int:
        """Return the committed step that a choice selects.

        Raises:
            CheckpointNotFoundError: there is no such checkpoint.
            OSError: the metrics of a checkpoint cannot be read.
        """
        steps = self.steps()
        if choice == "newest":
            candidates = steps[::-1]
            missing = "checkpoint: no save below it has completed: check the path, or save first"
        elif isinstance(choice, Best):
            metrics = {step: info.metrics for step, info in self.infos(steps).items()}
            candidates = choice.rank_steps(metrics)
            missing = (
                f"checkpoint with the metric {choice.metric!r} (metrics there: "
                f"{', '.join(sorted(set().union(*metrics.values()))) or 'none'}): choose a step "
                "number, or no step for the newest, or pass metrics= to save"
            )
        else:
            number = check_step(choice)
            candidates = [number] if number in steps else []
            missing = (
                f"checkpoint of step {number} (newest steps: "
                f"{', '.join(map(str, steps[-5:])) or 'none'}): "
                f"{'choose one of these, or no step for the newest' if steps else 'check the path'}"
            )
        if not candidates:
            raise CheckpointNotFoundError(f"{self} has no {missing}")
        return candidates[0]

    def remove_leftovers(self, steps: Collection[int]) -> None:
        """Remove the leftovers in the directories of steps, and then the empty directories.

        Where that is not permitted, they stay.
        """

        def clean(step: int) -> None:
            directory = self.at(step)
            with suppress(OSError):
                names = directory.store.list()
                directory.remove_leftovers(names=names)
                if directory.state(names) != "committed":
                    directory.try_to_delete()

        map_in_threads(clean, steps)
        abort_uploads(self.store)


def _read_info(directory: CheckpointDirectory) -> CheckpointInfo:
    """Return the time and metrics of a checkpoint; neither if its manifest is damaged."""
    try:
        return CheckpointInfo.of(directory.manifest())
    except (FormatError, OSError) as error:
        is_damaged = (
            not isinstance(error, OSError)
            or isinstance(error, (StoreError, FileNotFoundError))
            or error.errno == errno.EIO
        )
        if isinstance(error, StoreUnavailableError) or not is_damaged:
            raise
        return CheckpointInfo()
