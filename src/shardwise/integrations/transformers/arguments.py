"""The options of `TrainingArguments` that concern checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardwise import Best, Keep, StateError

BEST_STEP = "best_model_step"
"""A metric of shardwise itself. A save has it only if its step was the best so far.

Its value is the number of the step, so the maximum is the best step.
"""


def best_checkpoint(args: Any) -> Best | None:
    """Return how to find the best checkpoint; None without `metric_for_best_model`.

    The Trainer decides which step is the best: of steps with equal values, the first; and never a
    step that was not saved. A ranking by the metric could select another step.
    """
    return None if args.metric_for_best_model is None else Best(BEST_STEP, mode="max")


def retention_rules(args: Any) -> Keep:
    """Return the rules of `save_total_limit`. They always keep the newest checkpoint."""
    limit, best = args.save_total_limit, best_checkpoint(args)
    if limit is None or limit <= 0:
        return Keep()
    return Keep(last=limit) if best is None else Keep(last=max(1, limit - 1), best=best)


@contextmanager
def suppress_trainer_files(args: Any) -> Iterator[bool]:
    """Keep the Trainer from writing optimizers and random states; yield the user's choice."""
    chosen = args.save_only_model
    args.save_only_model = True
    try:
        yield chosen
    finally:
        args.save_only_model = chosen


def refuse_options(args: Any, trial: object) -> None:
    """Raise a StateError for options that `ShardwiseTrainer` does not support."""
    if trial is not None:
        raise StateError(
            "ShardwiseTrainer does not support hyperparameter_search: use Trainer for the search"
        )
    if getattr(args, "enable_jit_checkpoint", False):
        raise StateError(
            "enable_jit_checkpoint saves in the middle of a step, in the Trainer's own format, "
            "which ShardwiseTrainer does not write: leave it out, and choose a smaller save_steps"
        )
    if args.push_to_hub and args.hub_strategy != "end":
        raise StateError(
            f"hub_strategy={str(args.hub_strategy)!r} uploads the Trainer's own checkpoints, which "
            'ShardwiseTrainer does not write: pass hub_strategy="end"'
        )
