"""The options of `TrainingArguments` that concern checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardwise.errors import StateError
from shardwise.retention import Best, Keep


def best_checkpoint(args: Any) -> Best | None:
    """Return how `TrainingArguments` rank checkpoints; None without `metric_for_best_model`."""
    metric = args.metric_for_best_model
    if metric is None:
        return None
    name = metric if metric.startswith("eval_") else f"eval_{metric}"
    return Best(name, mode="max" if args.greater_is_better else "min")


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
    if args.push_to_hub and args.hub_strategy != "end":
        raise StateError(
            f"hub_strategy={str(args.hub_strategy)!r} uploads the Trainer's own checkpoints, which "
            'ShardwiseTrainer does not write: pass hub_strategy="end"'
        )
