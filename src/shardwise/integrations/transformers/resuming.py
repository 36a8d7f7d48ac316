"""What one call of `train` resumes from: the newest checkpoint, a step, or a path."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from accelerate.utils import broadcast_object_list

import shardwise as sw
from shardwise import Best, Checkpointer, CheckpointNotFoundError, SaveHandle

SUBDIRECTORY = "shardwise"
TRAINER_STATE_FILE = "trainer_state.json"
TRAINER_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
log = logging.getLogger("shardwise")
T = TypeVar("T")


@dataclass
class TrainRun:
    """What one call of `train` needs.

    Attributes:
        checkpointer: saves and restores.
        folder: a directory with the state of the Trainer to resume from.
        saves_only_model: the user's option `save_only_model`.
        load: loads a state from the selected checkpoint; None if there is none.
        rng: the random states to set before the first step; None to set none.
        is_loading: whether the weights are being loaded.
        is_resuming: True from a resume until the first epoch begins.
        metrics: the newest metrics, with the step of their evaluation.
        handles: the newest saves, by step.
    """

    checkpointer: Checkpointer
    folder: str
    saves_only_model: bool
    load: RestoreStep | LoadPath | None = None
    rng: dict[str, Any] | None = None
    is_loading: bool = False
    is_resuming: bool = False
    metrics: tuple[int, dict[str, float]] = (-1, {})
    handles: dict[int, SaveHandle] = field(default_factory=dict)


@dataclass
class StatefulValue:
    """A value that is saved as a whole, and replaced by a load."""

    value: Any

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        self.value = value


@dataclass
class RestoreStep:
    """Loads a checkpoint of this run in two calls: one for the counters, and one for the rest.

    Attributes:
        choice: the step, or how to choose it. The first call replaces it by the number of the step
            that it loaded, so that the second call loads the same step.
        accept_earlier: whether to load an earlier step if the save of this step is incomplete.
    """

    checkpointer: Checkpointer
    choice: int | Best | Literal["newest"]
    accept_earlier: bool = False

    def __call__(self, state: Any) -> None:
        try:
            step = self.checkpointer.restore(state, step=self.choice)
        except CheckpointNotFoundError:
            if isinstance(self.choice, Best):
                raise CheckpointNotFoundError(
                    f"{self.checkpointer}: no checkpoint was the best by metric_for_best_model "
                    "when it was saved: pass resume_from_checkpoint=True for the newest one"
                ) from None
            if not isinstance(self.choice, int) or not self.accept_earlier:
                raise
            earlier = [each for each in steps_on_rank_0(self.checkpointer) if each < self.choice]
            if not earlier:
                raise
            log.warning(
                "step %d was not saved completely: resuming from step %d", self.choice, earlier[-1]
            )
            step = self.checkpointer.restore(state, step=earlier[-1])
        if step is None:
            raise CheckpointNotFoundError(
                f"{self.checkpointer} has no checkpoint to resume from: call train without "
                "resume_from_checkpoint"
            )
        self.choice = step


def repair_best_checkpoint_path(
    state: dict[str, Any], load: RestoreStep | LoadPath, output_dir: str
) -> None:
    """Correct the path of the best checkpoint in the state of the Trainer, if it is missing.

    The Trainer ignores a best checkpoint without a directory `checkpoint-…`. The directory is
    missing if the output directory was moved, or if only shardwise's checkpoints were kept, which
    are in another directory.
    """
    recorded = state.get("best_model_checkpoint")
    if recorded is not None and rank_0_sees_directory(recorded):
        return
    step = state.get("best_global_step") if recorded is None else step_of_path(recorded)
    if isinstance(load, RestoreStep):
        folder, is_own, steps = output_dir, True, steps_on_rank_0(load.checkpointer)
    elif os.path.basename(os.path.normpath(load.path)) == SUBDIRECTORY:
        folder, is_own = os.path.dirname(os.path.normpath(load.path)), False
        listed = sw.list_checkpoints(load.path).checkpoints
        committed = [each.step for each in listed if each.state == "committed"]
        steps = from_rank_0([step for step in committed if step is not None])
    else:
        return
    path = os.path.join(folder, f"checkpoint-{step}")
    if step in steps and (is_own or rank_0_sees_directory(path)):
        state["best_model_checkpoint"] = path
        if is_own:
            os.makedirs(path, exist_ok=True)


def steps_on_rank_0(checkpointer: Checkpointer) -> list[int]:
    """Return the committed steps as rank 0 sees them.

    While a save commits, ranks may see different steps.
    """
    return from_rank_0(checkpointer.steps())


def rank_0_sees_directory(path: str) -> bool:
    """Return whether rank 0 sees a directory. This is a collective."""
    return from_rank_0(os.path.isdir(path))


def from_rank_0(value: T) -> T:
    """Return the value of rank 0, on all ranks."""
    values = [value]
    broadcast_object_list(values)
    return values[0]


@dataclass
class LoadPath:
    """Loads a checkpoint of another run in two calls: one for the counters, and one for the rest.

    Attributes:
        path: a checkpoint, or the root of a run.
        step: which step of the root. The first call replaces "newest" by the number of the step, so
            that the second call reads the same step even if the other run saves meanwhile.
    """

    path: str
    step: int | Literal["newest"] = "newest"

    def __call__(self, state: Any) -> None:
        report = sw.load(self.path, state, step=self.step)
        is_root = os.path.basename(report.path) != os.path.basename(os.path.abspath(self.path))
        if is_root and report.step is not None:
            self.step = report.step


def step_of_path(path: object) -> int | None:
    """Return the step of a `checkpoint-…` directory; None if the path is something else."""
    if not isinstance(path, str):
        return None
    match = TRAINER_CHECKPOINT.fullmatch(os.path.basename(os.path.normpath(path)))
    return int(match[1]) if match else None


def is_written_by_trainer(folder: str) -> bool:
    """Return whether the original Trainer wrote this directory, as rank 0 sees it."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return from_rank_0(any(name not in (TRAINER_STATE_FILE, SUBDIRECTORY) for name in names))
