"""What one call of `train` resumes from: the newest checkpoint, a step, or a path."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass, field
from typing import Any

from accelerate.utils import broadcast_object_list

from shardwise import api
from shardwise.checkpointer.checkpointer import Checkpointer
from shardwise.errors import CheckpointNotFoundError
from shardwise.manifest.names import step_of_directory
from shardwise.memory.trainer.save_handle import SaveHandle
from shardwise.retention import Choice

SUBDIRECTORY = "shardwise"
TRAINER_STATE_FILE = "trainer_state.json"
TRAINER_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
log = logging.getLogger("shardwise")


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
        is_resuming: whether the first epoch after a resume has not begun yet.
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
class HeldValue:
    """A value that is saved as a whole, and replaced by a load."""

    value: Any

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        self.value = value


@dataclass
class RestoreStep:
    """Loads a checkpoint of this run: first the counters, then the rest of the same step.

    Attributes:
        choice: which step; after the first load, the step.
        may_be_earlier: whether to load an earlier step if the save of this step is incomplete.
    """

    checkpointer: Checkpointer
    choice: Choice
    may_be_earlier: bool = False

    def __call__(self, state: Any) -> None:
        try:
            step = self.checkpointer.restore(state, step=self.choice)
        except CheckpointNotFoundError:
            if not isinstance(self.choice, int) or not self.may_be_earlier:
                raise
            earlier = [each for each in shared_steps(self.checkpointer) if each < self.choice]
            if not earlier:
                raise
            log.warning(
                "step %d was not saved completely: resuming from step %d", self.choice, earlier[-1]
            )
            step = self.checkpointer.restore(state, step=earlier[-1])
        if step is None:
            raise CheckpointNotFoundError(
                "there is no checkpoint to resume from: call train without resume_from_checkpoint"
            )
        self.choice = step


def shared_steps(checkpointer: Checkpointer) -> list[int]:
    """Return the committed steps as rank 0 sees them, because others may just be written."""
    steps = [checkpointer.steps()]
    broadcast_object_list(steps)
    return steps[0]


def is_directory(path: str) -> bool:
    """Return whether rank 0 sees a directory."""
    found = [os.path.isdir(path)]
    broadcast_object_list(found)
    return found[0]


@dataclass
class LoadPath:
    """Loads a checkpoint of another run: first the counters, then the rest of the same step.

    Attributes:
        path: a checkpoint, or the root of a run.
        step: which step of the root; after the first load, its number. The other run may go on.
    """

    path: str
    step: Choice = "newest"

    def __call__(self, state: Any) -> None:
        report = api.load(self.path, state, step=self.step)
        name, own_name = (os.path.basename(os.path.abspath(p)) for p in (report.path, self.path))
        step = step_of_directory(name)
        if step is not None and name != own_name:  # the path is a root
            self.step = step


def step_of_path(path: object) -> int | None:
    """Return the step of a `checkpoint-…` directory; None if the path is something else."""
    if not isinstance(path, str):
        return None
    match = TRAINER_CHECKPOINT.fullmatch(os.path.basename(os.path.normpath(path)))
    return int(match[1]) if match else None


def is_written_by_trainer(folder: str) -> bool:
    """Return whether the original Trainer wrote this directory."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return any(name not in (TRAINER_STATE_FILE, SUBDIRECTORY) for name in names)
