"""A back end for the checkpoints of torchtitan 0.3 or later: `ShardwiseCheckpointManager`."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from torchtitan.components.checkpointer import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    BaseCheckpointManager,
    ModelWrapper,
)
from torchtitan.config import TORCH_DTYPE_MAP

import shardwise as sw
from shardwise.integrations.torchtitan.folders import (
    find_newest_step,
    join_place,
    list_dcp_steps,
)

MODEL_DIRECTORY = "model-step-{step}"
"""The directory of a model that is saved alone at the last step, below the checkpoint folder."""
_LOADER_HINT = (
    "torchtitan's loader cannot continue with another number of data-parallel ranks; leave out its "
    "state with --checkpoint.exclude_from_loading dataloader"
)

log = logging.getLogger("shardwise")


class ShardwiseCheckpointManager(BaseCheckpointManager):  # type: ignore[misc]
    """Saves and loads torchtitan's training state with a `sw.Checkpointer`.

    A run continues on any mesh. If the folder has only checkpoints of torchtitan's own back end
    (DCP), the run continues from the newest of them.

    Set `config.checkpoint = ShardwiseCheckpointManager.Config(…)` in a function of the config
    registry. torchtitan then creates the manager. docs/howto/torchtitan.md describes what happens
    to each option.

    Args:
        config: the options.
        dataloader: the data loader, or None. Each data-parallel rank has a separate state.
        model_parts: the modules of this rank, one for each pipeline stage.
        optimizers, lr_schedulers: torchtitan's containers.
        states: further objects with `state_dict` and `load_state_dict`, for example the trainer.
        sd_adapter: converts between torchtitan's and Hugging Face's names; None if the model has no
            such adapter.
        base_folder: `config.folder` is relative to this directory or URL.

    Raises:
        ValueError: `last_save_in_hf` is set, but there is no `sd_adapter`; or an option of
            `exclude_from_loading` is not a key of the state.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """torchtitan's options, and those of `sw.Checkpointer`."""

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
        """disabled: `save` returns when the checkpoint is durable. async: `save` returns when the
        state is copied.
        async_with_pinned_mem: the copy runs during the next step, until the optimizer's step."""

        snapshot_every: int = 0
        """Steps between snapshots in host memory; 0 for none. Needs an asynchronous mode."""

        parity: int = 0
        """The number of nodes of a group that may be lost without losing snapshots."""

        copies: int = 0
        """The number of other nodes that keep a copy of each snapshot."""

        mirror: str = ""
        """A second place for every checkpoint: a path or URL."""

        def __post_init__(self) -> None:
            BaseCheckpointManager.Config.__post_init__(self)
            if self.export_dtype not in TORCH_DTYPE_MAP:
                raise ValueError(
                    f"export_dtype={self.export_dtype!r}: expected one of "
                    f"{', '.join(sorted(TORCH_DTYPE_MAP))}"
                )
            if self.load_step < -1:
                raise ValueError(
                    f"load_step={self.load_step}: expected a step, or -1 for the newest"
                )
            if self.mirror and not self.mirror.strip():
                raise ValueError(f"mirror={self.mirror!r}: expected a path or a URL")
            self.async_mode = self.async_mode.lower()  # type: ignore[assignment]
            if self.async_mode not in ("disabled", "async", "async_with_pinned_mem"):
                raise ValueError(
                    f"async_mode={self.async_mode!r}: expected 'disabled', 'async' or "
                    "'async_with_pinned_mem'"
                )
            in_memory = self.snapshot_every or self.parity or self.copies
            if self.async_mode == "disabled" and in_memory:
                raise ValueError(
                    "snapshot_every, parity and copies keep snapshots in memory, but "
                    "async_mode='disabled' uses none: choose async_mode='async'"
                )
            if self.load_only and (in_memory or self.mirror):
                log.warning(
                    "checkpoint.load_only is True: snapshot_every, parity, copies and mirror have "
                    "no effect"
                )

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any | None,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any | None,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        self.save_future: Future[Any] | None = None
        if not self.enable:
            return
        if config.last_save_in_hf and sd_adapter is None:
            raise ValueError(
                "checkpoint.last_save_in_hf is set, but the model has no adapter for Hugging "
                "Face's names: set it to False"
            )
        self.config = config
        self.folder = join_place(base_folder, config.folder)
        self.keep_latest_k = config.keep_latest_k
        self.sd_adapter = sd_adapter
        self._model = ModelWrapper(model_parts)
        self._dataloader = dataloader
        self._state: dict[str, Any] = {
            **states,
            MODEL: list(model_parts),
            OPTIMIZER: list(optimizers.optimizers),
            LR_SCHEDULER: lr_schedulers,
        }
        keys = {*self._state, DATALOADER}
        if unknown := [key for key in config.exclude_from_loading if key not in keys]:
            raise ValueError(
                f"checkpoint.exclude_from_loading={unknown}: the state has no such keys; it has "
                f"{', '.join(sorted(keys))}"
            )
        self._waiter = ThreadPoolExecutor(1, "shardwise-torchtitan")
        self._handle: sw.SaveHandle | None = None
        self._checkpointer = None if config.load_only else _make_checkpointer(self.folder, config)

    # Saving

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if self._checkpointer is None:
            return False
        config = self.config
        if last_step and curr_step == 0:  # a seed checkpoint
            seed = {MODEL: self._state[MODEL]}
            self._checkpointer.save(0, seed, force=True, overwrite=True)
            return True
        if last_step and config.last_save_model_only:
            self._save_model(curr_step)
            return True
        is_first = curr_step == 1 and config.enable_first_step_checkpoint
        handle = self._checkpointer.save(
            curr_step,
            self._state_to_save(),
            force=last_step or is_first,
            overwrite=True,  # a run that went back reaches steps again
        )
        if handle is None:
            return False
        self._handle = handle
        is_durable = last_step or is_first or curr_step % config.interval == 0
        if is_durable:
            self.save_future = self._waiter.submit(handle.result)
        return is_durable

    def _state_to_save(self) -> dict[str, Any]:
        loader = {} if self._dataloader is None else self._dataloader.state_dict()
        return {**self._state, **({DATALOADER: dict(loader)} if loader else {})}

    def _save_model(self, step: int) -> None:
        """Save only the model, in `export_dtype`, to a separate directory."""
        config = self.config
        place = join_place(self.folder, MODEL_DIRECTORY.format(step=step))
        if dist.get_rank() == 0:  # the others wait in the save
            shutil.rmtree(place.removeprefix("file://"), ignore_errors=True)
        dtype = TORCH_DTYPE_MAP[config.export_dtype]
        state = {
            name: _cast_floats(value, dtype) for name, value in self._model.state_dict().items()
        }
        if not config.last_save_in_hf or self.sd_adapter is None:
            sw.save(place, {MODEL: state}, overwrite=True)
            return
        native = join_place(self.folder, f"{MODEL_DIRECTORY.format(step=step)}.native")
        sw.save(native, {MODEL: self.sd_adapter.to_hf(state)}, overwrite=True)
        sw.export(native, place, to="hf")
        if dist.get_rank() == 0:
            sw.remove(native)

    def _maybe_wait_for_staging(self) -> None:
        if self._handle is not None:
            self._handle.staged()

    def _wait_for_saving(self) -> None:
        if self.save_future is not None:
            self.save_future.result()
            self.save_future = None

    def _close(self) -> None:
        if getattr(self, "_waiter", None) is None:
            return  # the constructor failed
        # torchtitan also closes the manager after an error, when other ranks may not answer.
        is_failing = sys.exc_info()[0] is not None
        try:
            if self._checkpointer is not None:
                self._checkpointer.close(wait=not is_failing)
        finally:
            self._waiter.shutdown(wait=False, cancel_futures=True)

    # Loading

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        dcp_steps = list_dcp_steps(self.folder)
        newest_of_dcp = max(dcp_steps, default=None)
        try:
            restored = self._restore(None if step == -1 else step)
        except sw.CheckpointNotFoundError as error:
            if step not in dcp_steps:
                raise sw.CheckpointNotFoundError(f"checkpoint.load_step={step}: {error}") from error
            self._load_dcp(step)
            return True
        except sw.CheckpointExistsError:  # the folder has checkpoints, but none of shardwise
            if newest_of_dcp is None:
                raise
            restored = None
        if restored is not None:
            if step == -1 and newest_of_dcp is not None and newest_of_dcp > restored:
                log.warning(
                    "continuing from step %d of shardwise, although torchtitan's DCP back end "
                    "saved step %d in the same folder: to continue from that checkpoint, pass "
                    "--checkpoint.load_step %d", restored, newest_of_dcp, newest_of_dcp,
                )  # fmt: skip
            return True
        if newest_of_dcp is not None:
            self._load_dcp(newest_of_dcp)
            return True
        return self._load_initial()

    def _restore(self, step: int | None) -> int | None:
        """Restore a checkpoint of this run, and return its step; None if there is none."""
        seed = {MODEL: self._state[MODEL]}
        if step == 0:
            return self._restore_state(seed, 0)
        state = self._state_to_load()
        try:
            restored = self._restore_state(state, step)
        except sw.MismatchError as error:
            if step is None and find_newest_step(self.folder) == 0:
                return self._restore_state(seed, 0)
            raise _add_loader_hint(error) from error
        if restored is not None:
            self._load_dataloader(state)
        return restored

    def _restore_state(self, state: dict[str, Any], step: int | None) -> int | None:
        if self._checkpointer is not None:
            return self._checkpointer.restore(state, step="newest" if step is None else step)
        try:
            return sw.load(self.folder, state, step="newest" if step is None else step).step
        except sw.CheckpointNotFoundError:
            if step is None:
                return None
            raise

    def _load_dcp(self, step: int) -> None:
        """Load a checkpoint of torchtitan's own back end. Step 0 is a seed: only the model."""
        place = join_place(self.folder, f"step-{step}")
        log.info("continuing from a checkpoint of torchtitan's DCP back end: %s", place)
        if step == 0:
            sw.load(place, {MODEL: self._state[MODEL]}, cast=True)
        else:
            self._load_everything(place)

    def _state_to_load(self) -> dict[str, Any]:
        excluded = self.config.exclude_from_loading
        return {key: each for key, each in self._state_to_save().items() if key not in excluded}

    def _load_dataloader(self, state: Mapping[str, Any]) -> None:
        if self._dataloader is None or DATALOADER not in state:
            return
        try:
            self._dataloader.load_state_dict(dict(state[DATALOADER]))
        except AssertionError as error:  # torchtitan's loader asserts an equal number of ranks
            raise sw.StateError(
                f"the data loader refused its state ({error}): {_LOADER_HINT}"
            ) from error

    def _load_everything(self, place: str) -> None:
        state = self._state_to_load()
        loader_state: dict[str, Any] = {}
        saved = sw.open(place)
        if len(state) > 1 and not any(key in saved for key in state if key != MODEL):
            raise sw.StateError(
                f"{place} has only a model: to continue a run, load an earlier step with "
                "--checkpoint.load_step; to start a run with this model, use "
                "--checkpoint.initial_load_path and --checkpoint.initial_load_model_only"
            )
        if DATALOADER in state and DATALOADER in saved:
            # In a checkpoint of DCP, the states of all data-parallel ranks are one value.
            loader_state = {DATALOADER: saved[DATALOADER]}
            del state[DATALOADER]
        try:
            sw.load(place, state)
        except sw.MismatchError as error:
            raise _add_loader_hint(error) from error
        self._load_dataloader(loader_state or state)

    def _load_initial(self) -> bool:
        """Load the weights or the state with which a new run starts; return False for none."""
        config = self.config
        place = config.initial_load_path or None
        if place is None and config.initial_load_in_hf:
            place = self.sd_adapter and self.sd_adapter.hf_assets_path
            if place is None:
                raise ValueError(
                    "checkpoint.initial_load_in_hf is set, but neither "
                    "checkpoint.initial_load_path nor hf_assets_path says from where"
                )
        if place is None:
            return False
        try:
            if config.initial_load_in_hf:
                self._load_hugging_face(place)
            elif config.initial_load_model_only:
                sw.load(place, {MODEL: self._state[MODEL]}, cast=True)
            else:
                self._load_everything(place)
        except sw.ShardwiseError:
            option = "initial_load_path" if config.initial_load_path else "initial_load_in_hf"
            log.error("checkpoint.%s: the run could not start from %s", option, place)
            raise
        return True

    def _load_hugging_face(self, place: str) -> None:
        if self.sd_adapter is None:
            raise ValueError(
                "checkpoint.initial_load_in_hf is set, but the model has no adapter for Hugging "
                "Face's names"
            )
        state = self.sd_adapter.to_hf(self._model.state_dict())
        if self.config.initial_load_in_hf_quantized:  # only the model's adapter can dequantize
            reader = self.sd_adapter.get_hf_storage_reader(place, True)
            state_dict_loader.load(state, storage_reader=reader)
        else:
            sw.load(place, {MODEL: state}, cast=True)
        self._model.load_state_dict(self.sd_adapter.from_hf(state))


def _make_checkpointer(folder: str, config: ShardwiseCheckpointManager.Config) -> sw.Checkpointer:
    memory = None
    if config.async_mode != "disabled":
        memory = sw.Memory(
            snapshot_every=config.snapshot_every,
            slots=2 if config.snapshot_every or config.parity or config.copies else 1,
            overlap=config.async_mode == "async_with_pinned_mem",
            parity=config.parity,
            copies=config.copies,
        )
    return sw.Checkpointer(
        folder,
        keep=sw.Keep(last=config.keep_latest_k) if config.keep_latest_k else None,
        mirror=config.mirror or None,
        save_every=config.interval,
        memory=memory,
        save_at_end=False,  # torchtitan saves the last step
    )


def _cast_floats(value: Any, dtype: torch.dtype) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if is_float else value


def _add_loader_hint(error: sw.MismatchError) -> sw.MismatchError:
    if not all(problem.startswith(DATALOADER) for problem in error.problems):
        return error
    summary = f"the data loader's state does not fit: {_LOADER_HINT}. {error.summary}"
    return sw.MismatchError(summary, error.problems)
