"""Checkpoints of PyTorch Lightning: a callback for whole runs, and a plugin for single files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

try:
    import lightning
    from lightning.fabric.plugins import TorchCheckpointIO
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Checkpoint
    from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
except ImportError as error:
    raise ImportError(
        "shardwise.integrations.lightning needs Lightning: pip install 'lightning>=2.5'"
    ) from error

from shardwise import api
from shardwise.checkpointer.checkpointer import Checkpointer
from shardwise.engine.group import SoloGroup
from shardwise.errors import CheckpointNotFoundError, StateError
from shardwise.manifest.names import step_directory
from shardwise.memory.trainer.save_handle import SaveHandle
from shardwise.retention import Best, Choice, Keep, choose_step, remove_checkpoint
from shardwise.state.rng import RngState
from shardwise.store import open_store

_OPTIMIZERS, _REST = "optimizer_states", "lightning"
_TENSORS = ("state_dict", _OPTIMIZERS)


class TrainedData(Protocol):
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
        save_top_k: how many checkpoints to keep besides the newest. -1 keeps all. Without
            `monitor`, the newest are kept.
        resume: what `fit` restores: `"last"`; `"best"`, by `monitor`; a step; or None for nothing.
        data: the `ElasticBatchSampler` or `ElasticStreamLoader` of the training data. The callback
            calls its `advance()` after each batch, and saves its position.
        extra: further objects and values to save, by name, as in the state of `shardwise.save`.
        options: further options of `shardwise.Checkpointer`, such as `memory=` and `mirror=`.

    Attributes:
        checkpointer: the `Checkpointer` while `fit` runs, else None.
        last_handle: the handle of the last save; None before it.

    Raises:
        ValueError: an option is out of range, or `options` has one that this callback sets.
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
        resume: Literal["last", "best"] | int | None = "last",
        data: TrainedData | None = None,
        extra: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        for name, number in (
            ("every_n_train_steps", every_n_train_steps),
            ("every_n_epochs", every_n_epochs),
        ):
            if number is not None and number < 1:
                raise ValueError(f"ShardwiseCheckpoint({name}={number}): expected at least 1")
        if save_top_k < -1 or save_top_k == 0:
            raise ValueError(
                f"ShardwiseCheckpoint(save_top_k={save_top_k}): expected -1 to keep all "
                "checkpoints, or at least 1"
            )
        if "keep" in options and save_top_k != 1:
            raise ValueError("ShardwiseCheckpoint: pass either keep= or save_top_k=, not both")
        if resume == "best" and monitor is None:
            raise ValueError('ShardwiseCheckpoint(resume="best"): pass monitor=, too')
        if every_n_train_steps is None and every_n_epochs is None:
            every_n_epochs = 1
        self._root = str(root)
        self._every_n_train_steps, self._every_n_epochs = every_n_train_steps, every_n_epochs
        self._monitor, self._mode = monitor, mode
        self._resume = resume
        self._data, self._extra = data, dict(extra or {})
        best = None if monitor is None else Best(monitor, mode=mode, n=max(save_top_k, 1))
        keep = Keep(last=1, best=best) if best else Keep(last=save_top_k)
        self._options = {"keep": Keep() if save_top_k == -1 else keep, **options}
        self._saved_step: int | None = None
        self._random: dict[str, Any] | None = None
        self.checkpointer: Checkpointer | None = None
        self.last_handle: SaveHandle | None = None

    @property
    def best_model_path(self) -> str:
        """The path or URL of the best checkpoint in storage; empty without one.

        Lightning reads it for `ckpt_path="best"`, which needs the plugin `ShardwiseCheckpointIO`.
        """
        return self._path_of("newest" if self._monitor is None else self._best())

    @property
    def last_model_path(self) -> str:
        """The path or URL of the newest checkpoint in storage; empty without one."""
        return self._path_of("newest")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the training, unless `fit` was called with the path of another checkpoint."""
        if getattr(trainer, "fast_dev_run", False):
            return
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            raise StateError(
                "ShardwiseCheckpoint does not support Lightning's DeepSpeedStrategy: use DDP, FSDP "
                "or ModelParallelStrategy, or let Lightning save, and load its files with sw.load"
            )
        self.checkpointer = Checkpointer(self._root, **self._options)
        if self._resume is None or trainer.ckpt_path is not None:
            return
        choice: Choice | Literal["best"] = "newest" if self._resume == "last" else self._resume
        self._saved_step = self.checkpointer.restore(self._state(trainer), step=choice)
        if self._saved_step is not None and not trainer.is_last_batch:
            self._random = RngState().capture()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the random states again, if the training resumes in the middle of an epoch.

        Lightning has begun an iteration over the data since, which draws a random number. Without
        the interruption, it has drawn this number before the checkpoint.
        """
        if self._random is not None:
            RngState().restore(self._random)
            self._random = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch, and save after every `every_n_train_steps` steps."""
        if self._data is not None:
            self._data.advance()
        if self._every_n_train_steps and trainer.global_step % self._every_n_train_steps == 0:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save after every `every_n_epochs` epochs."""
        if self._every_n_epochs and (trainer.current_epoch + 1) % self._every_n_epochs == 0:
            self._save(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave pending saves to the agents."""
        if self.checkpointer is not None:
            self.checkpointer.__exit__(type(exception), exception, exception.__traceback__)
            self.checkpointer = None

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait until all saves are durable."""
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
            found = trainer.callback_metrics.get(self._monitor)
            metrics = {self._monitor: float("nan") if found is None else float(found)}
        self.last_handle = self.checkpointer.save(step, self._state(trainer), metrics=metrics)

    def _state(self, trainer: Trainer) -> dict[str, Any]:
        is_fsdp1 = isinstance(trainer.strategy, FSDPStrategy)
        state: dict[str, Any] = {
            "model": trainer.model if is_fsdp1 else trainer.lightning_module,
            "optimizers": {str(i): each for i, each in enumerate(trainer.optimizers)},
            "trainer": _TrainerValues(trainer),
            "random": RngState(),
        }
        if self._data is not None:
            state["data"] = self._data
        if clash := state.keys() & self._extra.keys():
            raise StateError(
                f"ShardwiseCheckpoint(extra): the names {sorted(clash)} are taken: choose others"
            )
        return {**state, **self._extra}

    def _best(self) -> Best:
        if self._monitor is None:
            raise StateError("ShardwiseCheckpoint has no monitor=, so no checkpoint is the best")
        return Best(self._monitor, mode=self._mode)

    def _path_of(self, choice: Choice) -> str:
        root = open_store(self._root)
        try:
            return str(root.at(step_directory(choose_step(root, choice))))
        except CheckpointNotFoundError:
            return ""


class _TrainerValues:
    """The state of a Trainer without weights and optimizers. A per-rank value of the state."""

    def __init__(self, trainer: Any) -> None:  # mypy misses attributes that connectors set
        self._trainer = trainer

    def capture(self) -> dict[str, Any]:
        """Return the values, as Lightning has them in its own checkpoints."""
        trainer, module = self._trainer, self._trainer.lightning_module
        values: dict[str, Any] = {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": lightning.__version__,
            "loops": {"fit_loop": trainer.fit_loop.state_dict()},
            "callbacks": {each.state_key: each.state_dict() for each in trainer.callbacks},
            "lr_schedulers": [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs],
        }
        for part in self._parts():
            if state := part.state_dict():
                values[type(part).__qualname__] = state
        for each in trainer.callbacks:
            each.on_save_checkpoint(trainer, module, values)
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
        for part in self._parts():
            if (state := values.get(type(part).__qualname__)) is not None:
                part.load_state_dict(state)
        trainer.fit_loop.load_state_dict(values["loops"]["fit_loop"])
        for config, state in zip(schedulers, values["lr_schedulers"], strict=True):
            config.scheduler.load_state_dict(state)

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
                "of its own data loader, which cannot be divided anew: load with the same number "
                "of ranks, or use a loader of shardwise.data, and pass it as "
                "ShardwiseCheckpoint(data=…)"
            )
        return values[0]

    def _parts(self) -> Iterator[Any]:
        yield self._trainer.precision_plugin
        if self._trainer.datamodule is not None:
            yield self._trainer.datamodule


class ShardwiseCheckpointIO(TorchCheckpointIO):
    """Writes Lightning's checkpoints as checkpoints of shardwise, with checksums.

    Lightning's `ModelCheckpoint` decides what to save and to keep. It saves the whole state from
    rank 0, so this plugin is for a single device and for DDP. Paths of files that Lightning wrote
    without this plugin, and of checkpoints of `ShardwiseCheckpoint`, can be loaded too; the latter
    only for their weights, as `validate`, `test` and `predict` need.

    Example:

        trainer = Trainer(plugins=[ShardwiseCheckpointIO()], callbacks=[ModelCheckpoint(...)])
        trainer.fit(model, data, ckpt_path="last")
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save a checkpoint. It is durable on return.

        Args:
            checkpoint: Lightning's dict of weights, optimizers and other states.
            path: the directory to create, or its URL.
            storage_options: not supported.

        Raises:
            TypeError: `storage_options` is given.
            StateError: a value has no plain form, for example in `hparams`. The error names it.
        """
        if storage_options is not None:
            raise TypeError(
                "ShardwiseCheckpointIO takes no storage_options: write options into the path, as "
                "in s3://bucket/run?region=eu-central-1"
            )
        rest = {key: value for key, value in checkpoint.items() if key not in _TENSORS}
        state = {key: checkpoint[key] for key in _TENSORS if key in checkpoint}
        # Values in a list keep their keys. Names of a dict's items are joined by dots.
        api.save(str(path), {**state, _REST: [rest]}, overwrite=True, group=SoloGroup())

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint of this plugin, of `ShardwiseCheckpoint`, or of Lightning.

        Args:
            path: its path or URL.
            map_location: as for `torch.load`; only used for files that Lightning wrote. Other
                tensors are loaded to the CPU.
            weights_only: as for `torch.load`; only used for files that Lightning wrote.

        Raises:
            CorruptionError: bytes differ from the saved bytes.
        """
        if Path(path).is_file():
            return super().load_checkpoint(path, map_location, weights_only)
        opened = api.open(str(path))
        if _REST not in opened:
            version = {"pytorch-lightning_version": lightning.__version__}
            return {"state_dict": opened.state_dict("model"), **version}
        rest: dict[str, Any] = opened[_REST][0]
        if _OPTIMIZERS in opened:
            rest[_OPTIMIZERS] = opened[_OPTIMIZERS]
        return {**rest, "state_dict": opened.state_dict("state_dict")}

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint. Do nothing if there is none."""
        if Path(path).is_file():
            super().remove_checkpoint(path)
        else:
            remove_checkpoint(open_store(str(path)))
