"""Whether the training data continue after a resume in the middle of an epoch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import CombinedLoader

_MESSAGE = "You're resuming from a checkpoint that ended before the epoch ended"


@contextmanager
def without_warning_of_lost_position(trainer: Trainer, data: object) -> Iterator[None]:
    """Suppress Lightning's warning of a resume within an epoch, if the loaders restored a position.

    Lightning looks for `state_dict` in loaders only, not in their samplers.

    Args:
        trainer: the trainer with the loaders.
        data: the loader or sampler whose position was restored.
    """
    with warnings.catch_warnings():
        if all(
            _is_resumable(each, data) for each in CombinedLoader(trainer.train_dataloader).flattened
        ):
            warnings.filterwarnings("ignore", _MESSAGE)
        yield


def _is_resumable(loader: Any, data: object) -> bool:
    has_state = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    parts = (loader, getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None))
    return has_state or any(each is data for each in parts)
