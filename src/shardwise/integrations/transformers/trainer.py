"""`ShardwiseTrainer`, and the callback by which it saves."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

import shardwise as sw
from shardwise import Checkpointer, CorruptionError, Keep, MismatchError, RngState, StateError
from shardwise.integrations.accelerate import LoaderEpoch, unwrap_optimizer
from shardwise.integrations.transformers.arguments import (
    best_checkpoint,
    refuse_options,
    retention_rules,
    suppress_trainer_files,
)
from shardwise.integrations.transformers.peft_models import without_base
from shardwise.integrations.transformers.resuming import (
    SUBDIRECTORY,
    TRAINER_STATE_FILE,
    LoadPath,
    RestoreStep,
    StatefulValue,
    TrainRun,
    is_written_by_trainer,
    rank_0_sees_directory,
    repair_best_checkpoint_path,
    step_of_path,
    steps_on_rank_0,
)

log = logging.getLogger("shardwise")


class ShardwiseTrainer(Trainer):  # type: ignore[misc]  # mypy does not read transformers
    """A `Trainer` whose checkpoints shardwise saves in the background and loads anywhere.

    The checkpoints are in `output_dir/shardwise`. To combine it with another class of trainer,
    inherit from both, this one first: `class MyTrainer(ShardwiseTrainer, SFTTrainer): ...`.

    Override `open_checkpointer` to set options of the `Checkpointer`.

    Args:
        save_base_model: for a model with adapters of PEFT, save its frozen base, too. Otherwise,
            the checkpoints have only a fingerprint of the base, with which a resume compares it.
        args, kwargs: as for `Trainer`.
    """

    def __init__(self, *args: Any, save_base_model: bool = False, **kwargs: Any) -> None:
        self._run: TrainRun | None = None
        self._save_base_model = save_base_model
        super().__init__(*args, **kwargs)
        self.add_callback(_ShardwiseCallback(self))

    def open_checkpointer(self, root: str, keep: Keep) -> Checkpointer:
        """Return the `Checkpointer` of a call of `train`, which closes it at the end.

        Args:
            root: `output_dir/shardwise`. You may choose another directory or URL.
            keep: the rules that `save_total_limit` and `metric_for_best_model` stand for.
        """
        return Checkpointer(root, keep=keep)

    def train(
        self,
        resume_from_checkpoint: str | os.PathLike[str] | bool | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Train as `Trainer.train` does, with the checkpoints of shardwise.

        Args:
            resume_from_checkpoint: True for the newest intact checkpoint; "best" for the best one
                by `metric_for_best_model`; the path of a `checkpoint-…` directory, also of the
                original Trainer; or the path or URL of a checkpoint or root of shardwise.
            args, kwargs: as for `Trainer.train`.

        Raises:
            StateError: an option is not supported; the message says which.
            CheckpointNotFoundError: there is no checkpoint to resume from.
            ShardwiseError: as for `Checkpointer.restore` and `Checkpointer.save`.
        """
        refuse_options(self.args, kwargs.get("trial", args[0] if args else None))
        root = os.path.join(self.args.output_dir, SUBDIRECTORY)
        with (
            self.open_checkpointer(root, retention_rules(self.args)) as checkpointer,
            tempfile.TemporaryDirectory() as folder,
            suppress_trainer_files(self.args) as saves_only_model,
        ):
            wanted = resume_from_checkpoint
            if isinstance(wanted, os.PathLike):
                wanted = os.fspath(wanted)
            try:
                while True:
                    self._run = TrainRun(checkpointer, folder, saves_only_model)
                    try:
                        return super().train(self._find_checkpoint(wanted), *args, **kwargs)
                    except CorruptionError as error:
                        if resume_from_checkpoint is not True:
                            raise
                        wanted = self._checkpoint_before_damage(self._run, error)
            finally:
                self._run = None

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as `Trainer.save_model` does, except in the checkpoints of `train`."""
        if self._run is None or not _internal_call or output_dir is None:
            super().save_model(output_dir, _internal_call=_internal_call)
        else:
            # The Trainer writes its state into this directory. If the checkpoint becomes the best
            # one, every rank looks for the directory.
            os.makedirs(output_dir, exist_ok=True)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._run is None or self._run.folder != resume_from_checkpoint:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> Any:
        run = self._run
        if run is None or run.load is None or run.folder != resume_from_checkpoint:
            return super()._prepare_for_training(
                max_steps, train_dataloader, resume_from_checkpoint
            )
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        run.is_loading = True
        try:
            run.load(self._training_state(run, self._loaded_model()))
        except MismatchError as error:
            if run.saves_only_model or "scheduler: not in the checkpoint" not in error.problems:
                raise
            raise MismatchError(
                f"{run.load.path if isinstance(run.load, LoadPath) else run.checkpointer}, step "
                f"{run.load.step if isinstance(run.load, LoadPath) else run.load.choice}: the "
                "checkpoint has no optimizer and no scheduler. If it was saved "
                "with save_only_model=True, pass this option again, to continue with new ones. "
                "Otherwise call train without resume_from_checkpoint, and load only the model",
                error.problems,
            ) from error
        run.is_loading = False
        run.rng = None if run.saves_only_model else RngState().state_dict()
        run.is_resuming = True
        return prepared

    def _load_best_model(self) -> None:
        run, best = self._run, self.state.best_model_checkpoint
        step = step_of_path(best)
        if run is None or step is None or is_written_by_trainer(best):
            super()._load_best_model()
            return
        for handle in run.handles.values():
            handle.result()
        log.info("loading the best model, of step %d", step)
        state = {"model": self._loaded_model()}
        folder = self._folder_of_other_run(best)
        if folder is None:
            run.checkpointer.restore(state, step=step, only=["model.*"])
        else:
            sw.load(os.path.join(folder, SUBDIRECTORY), state, step=step, only=["model.*"])

    def _folder_of_other_run(self, checkpoint: str) -> str | None:
        """Return the output directory of a `checkpoint-…`; None for that of this training."""
        folder = os.path.dirname(os.path.normpath(checkpoint))
        is_own = os.path.realpath(folder) == os.path.realpath(self.args.output_dir)
        return None if is_own else folder

    def _trained_model(self) -> Any:
        return self.model_wrapped if self.is_deepspeed_enabled else self.model

    def _loaded_model(self) -> Any:
        """Return the model as a load fills it.

        If the model has adapters, its base is included only if the base was saved.
        """
        model = self.accelerator.unwrap_model(self.model)
        return without_base(self._trained_model(), model)

    def _training_state(self, run: TrainRun, model: object) -> dict[str, object]:
        """Return the objects to save or load, apart from the Trainer's counters."""
        state: dict[str, object] = {"model": model}
        if run.saves_only_model:
            return state
        state["optimizer"] = unwrap_optimizer(self.optimizer)
        state["scheduler"] = self.lr_scheduler
        if self.accelerator.scaler is not None:
            state["scaler"] = self.accelerator.scaler
        state["rng"] = RngState()
        return state

    def save_training_state(self, metrics: Mapping[str, float]) -> None:
        """Save the present step. All ranks call this; the Trainer calls it when a save is due.

        Args:
            metrics: the metrics of an evaluation at this step, if there was one.
        """
        run = self._run
        if run is None:
            return
        counters: list[Any] = [dataclasses.asdict(self.state), dict(metrics)]
        broadcast_object_list(counters)  # times in the log differ between ranks
        step, best = self.state.global_step, best_checkpoint(self.args)
        model = self._trained_model() if self._save_base_model else self._loaded_model()
        state = {
            **self._training_state(run, model),
            "trainer_state": StatefulValue(json.loads(json.dumps(counters[0]))),
            "samples_per_step": self.get_total_train_batch_size(self.args),
        }
        measured = dict(counters[1])
        if best is not None:
            measured[best.metric] = step if self.state.best_global_step == step else float("nan")
        handle = run.checkpointer.save(step, state, metrics=measured, overwrite=True, force=True)
        kept = {step, self.state.best_global_step}
        run.handles = {each: run.handles[each] for each in run.handles if each in kept}
        if handle is not None:
            run.handles[step] = handle

    def _find_checkpoint(self, wanted: str | bool | None) -> str | None:
        """Return the path to resume from, for the Trainer; prepare `self._run` to load from it."""
        run = self._run
        if run is None or wanted is None or wanted is False:
            if run is not None and self.is_world_process_zero() and run.checkpointer.steps():
                log.warning(
                    "%s has checkpoints of an earlier training: to continue it, pass "
                    "resume_from_checkpoint=True to train; otherwise choose another output_dir",
                    self.args.output_dir,
                )
            return None
        load = self._choose_loader(run, wanted)
        if load is None:
            path = get_last_checkpoint(self.args.output_dir) if wanted is True else str(wanted)
            return None if path is None else str(path)
        counters: dict[str, Any] = {"trainer_state": StatefulValue(None), "samples_per_step": 0}
        run.load, run.is_loading = load, True
        load(counters)
        run.is_loading = False
        repair_best_checkpoint_path(counters["trainer_state"].value, load, self.args.output_dir)
        now, saved = self.get_total_train_batch_size(self.args), counters["samples_per_step"]
        if now != saved and self.is_world_process_zero():
            log.warning(
                "a step now has %d samples and had %d, but the Trainer counts its position in the "
                "data in steps: some samples of this epoch are repeated or left out. Choose "
                "per_device_train_batch_size or gradient_accumulation_steps so that the number is "
                "the same", now, saved,
            )  # fmt: skip
        with open(os.path.join(run.folder, TRAINER_STATE_FILE), "w", encoding="utf-8") as file:
            json.dump(counters["trainer_state"].value, file)
        return run.folder

    def _checkpoint_before_damage(self, run: TrainRun, error: CorruptionError) -> str:
        """Return the path of the checkpoint before the damaged one.

        The counters of the Trainer are loaded first. They can be intact in a damaged checkpoint.

        Raises:
            CorruptionError: `error`, if the training has begun, or no earlier checkpoint exists.
        """
        damaged = run.load.choice if run.is_loading and isinstance(run.load, RestoreStep) else None
        if not isinstance(damaged, int):
            raise error
        earlier = [step for step in steps_on_rank_0(run.checkpointer) if step < damaged]
        if not earlier:
            raise error
        if self.is_world_process_zero():
            log.warning(
                "step %d is damaged: resuming from step %d (%s)", damaged, earlier[-1], error
            )
        return os.path.join(self.args.output_dir, f"checkpoint-{earlier[-1]}")

    def _choose_loader(self, run: TrainRun, wanted: str | bool) -> RestoreStep | LoadPath | None:
        """Return a function that loads a state from shardwise; None if the Trainer has to load."""
        step = step_of_path(wanted)
        if step is not None and is_written_by_trainer(str(wanted)):
            return None
        if wanted is True:
            output_dir = self.args.output_dir
            newest = get_last_checkpoint(output_dir) if os.path.isdir(output_dir) else None
            if is_written_by_trainer(newest or "") and not steps_on_rank_0(run.checkpointer):
                return None
            return RestoreStep(run.checkpointer, "newest")
        if wanted == "best":
            best = best_checkpoint(self.args)
            if best is None:
                raise StateError(
                    'resume_from_checkpoint="best" needs TrainingArguments(metric_for_best_model=…)'
                )
            return RestoreStep(run.checkpointer, best)
        if step is None:
            return LoadPath(str(wanted))
        folder = self._folder_of_other_run(str(wanted))
        if folder is not None:
            return LoadPath(os.path.join(folder, SUBDIRECTORY), step)
        return RestoreStep(
            run.checkpointer, step, accept_earlier=rank_0_sees_directory(str(wanted))
        )


class _ShardwiseCallback(TrainerCallback):  # type: ignore[misc]  # mypy does not read transformers
    """Saves when the Trainer saves. Restores random states after the Trainer has skipped data."""

    def __init__(self, trainer: ShardwiseTrainer) -> None:
        self.trainer = trainer

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Mapping[str, Any], **kwargs: Any
    ) -> None:
        """Remember the metrics of the present step."""
        if self.trainer._run is not None:
            numbers = {k: float(v) for k, v in metrics.items() if isinstance(v, (int, float))}
            step, earlier = self.trainer._run.metrics
            earlier = earlier if step == state.global_step else {}
            self.trainer._run.metrics = state.global_step, {**earlier, **numbers}

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the present step."""
        if self.trainer._run is not None:
            step, metrics = self.trainer._run.metrics
            self.trainer.save_training_state(metrics if step == state.global_step else {})

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Select the order of the data; set the random states before the loader draws a seed."""
        run = self.trainer._run
        if run is None or not run.is_resuming:
            return
        run.is_resuming = False
        loader = kwargs.get("train_dataloader")
        if loader is not None:
            LoaderEpoch(loader).load_state_dict({"epoch": int(state.epoch)})
        if run.rng is not None and (args.ignore_data_skip or state.epoch == int(state.epoch)):
            RngState().load_state_dict(run.rng)
            run.rng = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the random states after the data of this epoch were skipped."""
        run = self.trainer._run
        if run is not None and run.rng is not None:
            RngState().load_state_dict(run.rng)
            run.rng = None
