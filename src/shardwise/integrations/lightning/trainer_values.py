"""The state of a Trainer of Lightning, without weights and optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning
import torch

from shardwise import StateError
from shardwise.integrations.lightning.plugin import TENSORS

_PLATEAUS = "shardwise_metrics_for_plateaus"
_METRICS = "shardwise_metrics"


class TrainerValues:
    """The state of a Trainer without weights and optimizers. Each rank saves a separate value."""

    def __init__(self, trainer: Any) -> None:  # mypy misses attributes that connectors set
        self._trainer = trainer

    def capture(self) -> dict[str, Any]:
        """Return the values, as Lightning has them in its own checkpoints."""
        trainer, module = self._trainer, self._trainer.lightning_module
        values: dict[str, Any] = {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": lightning.__version__,
            "loops": {"fit_loop": self._progress()},
            "callbacks": {each.state_key: each.state_dict() for each in trainer.callbacks},
            "lr_schedulers": [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs],
        }
        for part in self._parts_with_state():
            if state := part.state_dict():
                values[type(part).__qualname__] = state
        if plateaus := self._metrics_for_plateaus():
            monitors = {trainer.lr_scheduler_configs[int(i)].monitor: plateaus[i] for i in plateaus}
            # After a resume from a validation, Lightning itself steps the schedulers.
            values |= {_METRICS: monitors} if trainer.validating else {_PLATEAUS: plateaus}
        for each in trainer.callbacks:
            with _explain_missing_tensors(each):
                each.on_save_checkpoint(trainer, module, values)
        with _explain_missing_tensors(module):
            module.on_save_checkpoint(values)
        return values

    def restore(self, values: dict[str, Any]) -> None:
        """Set the values.

        Raises:
            StateError: the training has another number of schedulers.
        """
        trainer, module = self._trainer, self._trainer.lightning_module
        schedulers = trainer.lr_scheduler_configs
        if len(values["lr_schedulers"]) != len(schedulers):
            raise StateError(
                f"the checkpoint has {len(values['lr_schedulers'])} learning rate schedulers, and "
                f"the LightningModule has {len(schedulers)}: configure the same ones"
            )
        module.on_load_checkpoint(values)
        for each in trainer.callbacks:
            each.on_load_checkpoint(trainer, module, values)
            if (state := values["callbacks"].get(each.state_key)) is not None:
                each.load_state_dict(state)
        for part in self._parts_with_state():
            if (state := values.get(type(part).__qualname__)) is not None:
                part.load_state_dict(state)
        trainer.fit_loop.load_state_dict(values["loops"]["fit_loop"])
        epoch = trainer.fit_loop.epoch_progress.current
        if epoch.processed == epoch.ready:  # With max_steps, Lightning would repeat the epoch's end
            trainer.fit_loop._restarting = False
            trainer.fit_loop.epoch_loop.restarting = False
        for config, state in zip(schedulers, values["lr_schedulers"], strict=True):
            config.scheduler.load_state_dict(state)
        for index, metric in values.get(_PLATEAUS, {}).items():
            module.lr_scheduler_step(schedulers[int(index)].scheduler, metric)
        trainer.callback_metrics.update(
            {name: torch.tensor(metric) for name, metric in values.get(_METRICS, {}).items()}
        )

    def for_rank(self, values: Sequence[Any], rank: int, world: int) -> Any:
        """Return the values of this rank; those of rank 0 if the number of ranks has changed.

        Raises:
            StateError: the number of ranks has changed, and the data loaders have states.
        """
        if len(values) == world:
            return values[rank]
        if values[0]["loops"]["fit_loop"]["state_dict"].get("combined_loader"):
            raise StateError(
                f"{len(values)} ranks have saved, and {world} load, but each rank saved the state "
                "of a separate data loader. Such states cannot be divided: load with the same "
                "number of ranks, or use a loader of shardwise.data, and pass it as "
                "ShardwiseCheckpoint(data=…)"
            )
        return values[0]

    def _progress(self) -> dict[str, Any]:
        """Return the state of the loops.

        If the training ends in the middle of an epoch, this is the state at the end of the last
        batch. From the present state, Lightning would begin the next epoch.
        """
        loops: dict[str, Any] = self._trainer.fit_loop.state_dict()
        if self._trainer.is_last_batch or not self._epoch_has_ended():
            return loops
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
        for each in ("total", "current"):
            epoch, batch = loops["epoch_progress"][each], loops["epoch_loop.batch_progress"][each]
            epoch["processed"] = epoch["completed"]
            batch["completed"] = batch["processed"] - 1
        return loops

    def _epoch_has_ended(self) -> bool:
        """Return whether this hook is at the end of an epoch, even of one that was cut short."""
        epoch = self._trainer.fit_loop.epoch_progress.current
        return bool(epoch.processed > epoch.completed)

    def _metrics_for_plateaus(self) -> dict[str, float]:
        """Return the metrics for schedulers that Lightning will step after this save, by number.

        At the end of a batch, a validation and an epoch, Lightning steps schedulers such as
        ReduceLROnPlateau after the save. When it resumes, it repeats only the steps after a
        validation.
        """
        trainer, loop = self._trainer, self._trainer.fit_loop
        has_ended = self._epoch_has_ended()
        is_cut_short = has_ended and not trainer.is_last_batch
        if is_cut_short or not trainer.lightning_module.automatic_optimization:
            return {}
        interval = "epoch" if has_ended else "step"
        done = 1 + (trainer.current_epoch if has_ended else loop.batch_idx)
        return {
            str(index): float(trainer.callback_metrics[config.monitor])
            for index, config in enumerate(trainer.lr_scheduler_configs)
            if config.reduce_on_plateau
            and config.interval == interval
            and done % config.frequency == 0
            and config.monitor in trainer.callback_metrics
        }

    def _parts_with_state(self) -> Iterator[Any]:
        yield self._trainer.precision_plugin
        if self._trainer.datamodule is not None:
            yield self._trainer.datamodule


@contextmanager
def _explain_missing_tensors(owner: object) -> Iterator[None]:
    """Say what to do if a hook `on_save_checkpoint` needs the weights or the optimizers."""
    try:
        yield
    except KeyError as error:
        if error.args[:1] not in [(name,) for name in TENSORS]:
            raise
        raise StateError(
            f"{type(owner).__name__}.on_save_checkpoint reads {error.args[0]!r}, but the dict of "
            "ShardwiseCheckpoint has neither weights nor optimizers: change the hook, or use "
            "ModelCheckpoint with the plugin ShardwiseCheckpointIO"
        ) from error


def validation_follows(trainer: Any) -> bool:
    """Return whether Lightning will validate after this batch, before the next one."""
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        return False  # the clocks of ranks differ
    fit_loop = trainer.fit_loop
    return bool(fit_loop.epoch_loop._should_check_val_fx(fit_loop._data_fetcher))
