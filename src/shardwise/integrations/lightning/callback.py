"""`ShardwiseCheckpoint`, a callback that saves and resumes whole runs."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from inspect import signature
from math import isnan
from pathlib import Path
from typing import Any, Literal, Protocol

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

import shardwise as sw
from shardwise.integrations.lightning.plugin import has_only_weights
from shardwise.integrations.lightning.trainer_values import TrainerValues, validation_follows

log = logging.getLogger("shardwise")
_LOST_POSITION = "You're resuming from a checkpoint that ended before the epoch ended"
"""How Lightning's warning of a resume within an epoch begins."""


class CountsBatches(Protocol):
    """A sampler or loader of `shardwise.data`, which counts what the model was trained on."""

    def advance(self) -> None:
        """Count the next batch as trained on."""
        ...


class ShardwiseCheckpoint(Checkpoint):
    """Saves the training with a `Checkpointer`, and resumes it when `fit` begins.

    Each rank saves its part, and any number of ranks can resume. A checkpoint has the weights, the
    optimizers, the schedulers, the loops, the states of the other callbacks and of the data module,
    and the random states.

    Example:

        checkpoint = ShardwiseCheckpoint("runs/a", every_n_train_steps=100, monitor="val_loss")
        trainer = Trainer(callbacks=[checkpoint])
        trainer.fit(model, data)  # resumes the run in runs/a, if there is one

    Args:
        root: the directory of the run, or its URL, as for `shardwise.Checkpointer`.
        every_n_train_steps: save after each optimizer step that is a multiple of this.
        every_n_epochs: save at the end of each epoch that is a multiple of this. Default: 1, unless
            `every_n_train_steps` is given.
        monitor: the name of a logged metric. `save_top_k` then keeps the best checkpoints.
        mode: `"min"` if a smaller metric is better, else `"max"`.
        save_top_k: how many of the best checkpoints to keep, besides the newest. Without `monitor`,
            how many of the newest. -1 keeps all.
        resume: what `fit` restores: `"newest"`; `"best"`, by `monitor`; a step; None for nothing.
        data: the `ElasticBatchSampler` or `ElasticStreamLoader` of the training data. The callback
            calls its `advance()` after each batch, and saves its position.
        trainable_only: save only the parameters that require gradients, and buffers, as
            `shardwise.trainable` does; for example of a model with adapters.
        extra: further objects and values to save, by name, as in the state of `shardwise.save`.
        options: further options of `shardwise.Checkpointer`, such as `memory=` and `mirror=`.

    Attributes:
        checkpointer: the `Checkpointer` while `fit` runs, else None.
        last_handle: the handle of the last save; None before it.

    Raises:
        ValueError: an option is out of range, or two options contradict each other.
        TypeError: an option is unknown.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        every_n_train_steps: int | None = None,
        every_n_epochs: int | None = None,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        save_top_k: int = 1,
        resume: int | sw.Best | Literal["newest", "best"] | None = "newest",
        data: CountsBatches | None = None,
        trainable_only: bool = False,
        extra: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        counts = {"every_n_train_steps": every_n_train_steps, "every_n_epochs": every_n_epochs}
        for name, number in counts.items():
            if number is not None and (type(number) is not int or number < 1):
                raise ValueError(
                    f"ShardwiseCheckpoint({name}={number!r}): expected a whole number, at least 1"
                )
        _check_options(monitor, save_top_k, resume, options)
        if data is not None and not hasattr(data, "advance"):
            raise TypeError(
                f"ShardwiseCheckpoint(data=): a {type(data).__name__} has no method advance(): "
                "pass the ElasticBatchSampler, or the ElasticStreamLoader"
            )
        if every_n_train_steps is None and every_n_epochs is None:
            every_n_epochs = 1
        self._root = str(root)
        self._every_n_train_steps, self._every_n_epochs = every_n_train_steps, every_n_epochs
        self._monitor, self._mode = monitor, mode
        self._resume, self._trainable_only = resume, trainable_only
        self._data, self._extra = data, dict(extra or {})
        self._options = {
            "keep": _rules_of_retention(save_top_k, self._best() if monitor else None),
            **options,
        }
        self._saved_step = self._last_step = 0
        self._has_stepped = False
        self._has_saved_metric = self._warned_of_monitor = False
        self._validated: tuple[int, Tensor | None] | None = None
        self._rng_state: dict[str, Any] | None = None
        self._until_first_batch = ExitStack()
        self.checkpointer: sw.Checkpointer | None = None
        self.last_handle: sw.SaveHandle | None = None

    @property
    def best_model_path(self) -> str:
        """The path or URL of the best checkpoint in storage; empty without one.

        Lightning reads it for `ckpt_path="best"`, which needs the plugin `ShardwiseCheckpointIO`.
        """
        return self._path_of(None if self._monitor is None else self._best())

    @property
    def last_model_path(self) -> str:
        """The path or URL of the newest checkpoint in storage; empty without one."""
        return self._path_of(None)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the training, unless `fit` was called with the path of another checkpoint."""
        if getattr(trainer, "fast_dev_run", False):
            return
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            raise sw.StateError(
                "ShardwiseCheckpoint does not support Lightning's DeepSpeedStrategy: use DDP, FSDP "
                "or ModelParallelStrategy, or let Lightning save, and load its files with sw.load"
            )
        path = str(trainer.ckpt_path or "")
        if os.path.basename(path).startswith("hpc_ckpt"):
            raise sw.StateError(
                f"Lightning resumes from {path}, which it saved when it requeued the Slurm job. "
                "This file lacks the position of the data: remove it, and let ShardwiseCheckpoint("
                'save_on_signals=[signal.SIGUSR1], after_signal="requeue") save and requeue instead'
            )
        if path and has_only_weights(path):
            raise sw.StateError(
                f"fit(ckpt_path={path!r}): Lightning can load only the weights of this checkpoint, "
                "because the plugin ShardwiseCheckpointIO did not save it: leave ckpt_path out; to "
                "resume a run of ShardwiseCheckpoint, pass ShardwiseCheckpoint(root, resume=STEP)"
            )
        self._refuse_second_callback(trainer)
        self._validated = None
        self.checkpointer = sw.Checkpointer(self._root, **self._options)
        if trainer.ckpt_path is not None:
            return
        if self._resume is None:
            self._refuse_later_steps(trainer, self.checkpointer)
            return
        choice = self._best() if self._resume == "best" else self._resume
        try:
            restored = self.checkpointer.restore(self._state(trainer), step=choice)
        except sw.CheckpointExistsError as error:
            raise sw.CheckpointExistsError(
                f"{error}; with Lightning, pass that path as fit(…, ckpt_path=…) instead"
            ) from error
        if restored is not None and not trainer.is_last_batch:
            self._rng_state = sw.RngState().capture()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the random states again, if the training resumes in the middle of an epoch.

        Since the restore, Lightning has begun to iterate over the data, which drew a random number.
        A training without interruption drew this number before the step of the checkpoint.
        """
        self._saved_step = self._last_step = trainer.global_step  # save only after a further step
        self._has_stepped = False
        if self._rng_state is not None:
            sw.RngState().restore(self._rng_state)
            self._rng_state = None
            if self._data is not None:
                self._until_first_batch.enter_context(
                    _without_warning_of_lost_position(trainer, self._data)
                )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Stop suppressing the warning of a lost position."""
        self._until_first_batch.close()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch, and save after every `every_n_train_steps` steps."""
        if self._data is not None:
            self._data.advance()
        self._has_stepped = trainer.global_step != self._last_step
        self._last_step = trainer.global_step
        if self._has_signal():  # Lightning may end the training within the validation
            self._save(trainer)
        if trainer.is_last_batch or validation_follows(trainer):
            return  # on_train_epoch_end or on_validation_end saves, with the metrics
        if self._is_step_due(trainer):
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember the metric, and save if the step is due and the epoch continues."""
        if trainer.sanity_checking or self.checkpointer is None:
            return
        found = trainer.callback_metrics.get(self._monitor or "")
        if self._validated is None or not _is_same(found, self._validated[1]):
            self._validated = trainer.global_step, found
        if trainer.is_last_batch:
            return
        if self._is_step_due(trainer) or self._has_signal():
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save after every `every_n_epochs` epochs, and if the last step is due."""
        # While `_restarting` is True, Lightning does not step ReduceLROnPlateau at the end of the
        # epoch. The public setter is of no use: with max_steps, it sets True.
        trainer.fit_loop._restarting = False
        is_due = self._is_epoch_due(trainer) or self._is_step_due(trainer)
        if is_due or self._has_signal():
            self._save(trainer)
        self._warn_of_missing_metric(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave pending saves to the agents."""
        self._until_first_batch.close()
        if self.checkpointer is not None:
            self.checkpointer.__exit__(type(exception), exception, exception.__traceback__)
            self.checkpointer = None

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait until all saves are durable."""
        self._until_first_batch.close()
        if self.checkpointer is not None:
            self.checkpointer.close()
            self.checkpointer = None

    def _save(self, trainer: Trainer) -> None:
        step = trainer.global_step
        if self.checkpointer is None or step == self._saved_step:
            return
        self._saved_step = step
        metrics = None
        if self._monitor is not None:
            measured = self._measured(trainer, self._monitor)
            self._has_saved_metric |= not isnan(measured)
            metrics = {self._monitor: measured}
        # A training that went back to an earlier step replaces later checkpoints.
        went_back = self._resume != "newest" or trainer.ckpt_path is not None
        self.last_handle = self.checkpointer.save(
            step, self._state(trainer), metrics=metrics, overwrite=went_back
        )

    def _measured(self, trainer: Trainer, metric: str) -> float:
        """Return the value of a metric; NaN if it is missing, or of an earlier step's validation.

        Lightning keeps the metrics of a validation until the next one.
        """
        found = trainer.callback_metrics.get(metric)
        step, validated = self._validated or (0, None)
        is_old = _is_same(found, validated) and step != trainer.global_step
        return float("nan") if found is None or is_old else float(found)

    def _has_signal(self) -> bool:
        """Return whether any rank has received a signal of `save_on_signals`.

        Within an accumulation of gradients, which are not saved, the answer is no.
        """
        if self.checkpointer is None or not self._has_stepped:
            return False
        return self.checkpointer.has_received_signal()

    def _is_step_due(self, trainer: Trainer) -> bool:
        every = self._every_n_train_steps
        return every is not None and trainer.global_step % every == 0

    def _is_epoch_due(self, trainer: Trainer) -> bool:
        every = self._every_n_epochs
        return every is not None and (trainer.current_epoch + 1) % every == 0

    def _warn_of_missing_metric(self, trainer: Trainer) -> None:
        if self._monitor is None or self._warned_of_monitor:
            return
        if self._monitor in trainer.callback_metrics:
            if self.last_handle is None or self._has_saved_metric:
                return
            reason = (
                "no step was saved right after a validation until the end of epoch "
                f"{trainer.current_epoch}, so no checkpoint counts as the best: pass "
                "every_n_epochs=1, or validate at steps that are saved"
            )
        elif trainer.enable_validation and self._validated is None:
            return
        else:
            reason = (
                f"no such metric was logged until the end of epoch {trainer.current_epoch}, so no "
                "checkpoint counts as the best; logged so far: "
                f"{sorted(trainer.callback_metrics)}. Call "
                f"self.log({self._monitor!r}, …) in the LightningModule, or correct the name"
            )
        self._warned_of_monitor = True
        if trainer.is_global_zero:
            log.warning("ShardwiseCheckpoint(monitor=%r): %s", self._monitor, reason)

    def _refuse_second_callback(self, trainer: Trainer) -> None:
        callbacks = [c for c in trainer.checkpoint_callbacks if isinstance(c, ShardwiseCheckpoint)]
        if self._root in [each._root for each in callbacks if each is not self]:
            raise sw.StateError(
                f"the Trainer has two ShardwiseCheckpoint callbacks for {self._root}: pass one "
                "with the options of both, or choose another root for one of them"
            )

    def _refuse_later_steps(self, trainer: Trainer, checkpointer: sw.Checkpointer) -> None:
        newest = trainer.strategy.broadcast(checkpointer.latest())
        if newest is not None and newest > trainer.global_step:
            raise sw.StateError(
                f"{self._root} has checkpoints of an earlier training, up to step {newest}, and "
                "ShardwiseCheckpoint(resume=None) would begin another one at step "
                f"{trainer.global_step}: choose another root; or, to continue the training, leave "
                "resume= out"
            )

    def _state(self, trainer: Trainer) -> dict[str, Any]:
        is_fsdp1 = isinstance(trainer.strategy, FSDPStrategy)
        model: Any = trainer.model if is_fsdp1 else trainer.lightning_module
        state: dict[str, Any] = {
            "model": sw.trainable(model) if self._trainable_only else model,
            "optimizers": {str(i): each for i, each in enumerate(trainer.optimizers)},
            "trainer": TrainerValues(trainer),
            "random": sw.RngState(),
        }
        if self._data is not None:
            state["data"] = self._data
        if clash := state.keys() & self._extra.keys():
            raise sw.StateError(
                f"ShardwiseCheckpoint(extra): the names {sorted(clash)} are taken: choose others"
            )
        return {**state, **self._extra}

    def _best(self) -> sw.Best:
        if self._monitor is None:
            raise sw.StateError(
                "ShardwiseCheckpoint has no monitor=, so no checkpoint is the best: pass monitor=, "
                "or resume the newest checkpoint or a step"
            )
        return sw.Best(self._monitor, mode=self._mode)

    def _path_of(self, best: sw.Best | None) -> str:
        """Return the path of the best, or of the newest checkpoint in storage; "" without one."""
        try:
            listed = sw.list_checkpoints(self._root).checkpoints
        except sw.CheckpointNotFoundError:
            return ""
        found = {
            each.step: each
            for each in listed
            if each.state == "committed" and each.step is not None
        }
        metrics = {step: each.metrics or {} for step, each in found.items()}
        ranking = sorted(found, reverse=True) if best is None else best.rank_steps(metrics)
        return found[ranking[0]].path if ranking else ""


@contextmanager
def _without_warning_of_lost_position(trainer: Trainer, data: object) -> Iterator[None]:
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
            warnings.filterwarnings("ignore", _LOST_POSITION)
        yield


def _is_resumable(loader: Any, data: object) -> bool:
    has_state = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    parts = (loader, getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None))
    return has_state or any(each is data for each in parts)


def _rules_of_retention(save_top_k: int, best: sw.Best | None) -> sw.Keep:
    if save_top_k == -1:
        return sw.Keep()
    if best is None:
        return sw.Keep(last=save_top_k)
    return sw.Keep(last=1, best=replace(best, n=save_top_k))


def _is_same(value: Tensor | None, earlier: Tensor | None) -> bool:
    """Return whether two metrics are the same object of Lightning, not only equal numbers."""
    if value is None or earlier is None:
        return False
    return value.data_ptr() == earlier.data_ptr() != 0


def _check_options(
    monitor: str | None, save_top_k: int, resume: object, options: Mapping[str, Any]
) -> None:
    if type(save_top_k) is not int or save_top_k < -1 or save_top_k == 0:
        raise ValueError(
            f"ShardwiseCheckpoint(save_top_k={save_top_k!r}): expected -1 to keep all "
            "checkpoints, or at least 1"
        )
    if unknown := sorted(options.keys() - signature(sw.Checkpointer).parameters.keys()):
        raise TypeError(
            f"ShardwiseCheckpoint({unknown[0]}=): unknown option. Its options are its own and "
            "those of shardwise.Checkpointer; not all options of ModelCheckpoint have a "
            "counterpart"
        )
    if "keep" in options and save_top_k != 1:
        raise ValueError("ShardwiseCheckpoint: pass either keep= or save_top_k=, not both")
    ranked = options["keep"].best if isinstance(options.get("keep"), sw.Keep) else None
    if ranked is not None and ranked.metric != monitor:
        raise ValueError(
            f"ShardwiseCheckpoint(monitor={monitor!r}, keep=): the rule best= of keep ranks "
            f"checkpoints by {ranked.metric!r}: pass monitor={ranked.metric!r}"
        )
    if resume == "best" and monitor is None:
        raise ValueError('ShardwiseCheckpoint(resume="best"): pass monitor=, too')
    if isinstance(resume, bool) or (isinstance(resume, str) and resume not in ("newest", "best")):
        raise ValueError(
            f'ShardwiseCheckpoint(resume={resume!r}): expected "newest", "best", a step or None'
        )
