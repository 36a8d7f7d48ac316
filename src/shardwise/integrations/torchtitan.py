"""A back end for the checkpoints of torchtitan 0.3 or later: `ShardwiseCheckpointManager`."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader

import shardwise as sw
from shardwise.retention import Choice, remove_checkpoint
from shardwise.store import open_store

try:
    from torchtitan.components.checkpointer import (
        DATALOADER,
        LR_SCHEDULER,
        MODEL,
        OPTIMIZER,
        BaseCheckpointManager,
        ModelWrapper,
    )
    from torchtitan.config import TORCH_DTYPE_MAP
except ImportError as error:
    raise ImportError(
        "shardwise.integrations.torchtitan needs torchtitan 0.3 or later: pip install torchtitan"
    ) from error

MODEL_DIRECTORY = "model-step-{step}"
"""The directory of a model that is saved alone at the last step, below the checkpoint folder."""
_DCP_DIRECTORY = re.compile(r"step-(\d{1,15})")
_HINT = (
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
        """disabled: `save` returns when the checkpoint is durable. async: when the state is copied.
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
        self.folder = os.path.join(base_folder, config.folder)
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
            self._checkpointer.save(0, {MODEL: self._state[MODEL]}, force=True)
            return True
        if last_step and config.last_save_model_only:
            self._save_model(curr_step)
            return True
        is_first = curr_step == 1 and config.enable_first_step_checkpoint
        handle = self._checkpointer.save(
            curr_step,
            self._state_to_save(),
            force=last_step or is_first,
            overwrite=config.load_step != -1,  # the run went back, and reaches steps again
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
        place = os.path.join(self.folder, MODEL_DIRECTORY.format(step=step))
        dtype = TORCH_DTYPE_MAP[config.export_dtype]
        state = {name: _converted(value, dtype) for name, value in self._model.state_dict().items()}
        if not config.last_save_in_hf or self.sd_adapter is None:
            sw.save(place, {MODEL: state}, overwrite=True)
            return
        native = f"{place}.native"
        sw.save(native, {MODEL: self.sd_adapter.to_hf(state)}, overwrite=True)
        sw.export(native, place, to="hf")
        if dist.get_rank() == 0:
            remove_checkpoint(open_store(native))

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
        if self._restore(None if step == -1 else step):
            return True
        if step == -1 and (newest := _newest_dcp_step(self.folder)) is not None:
            place = os.path.join(self.folder, f"step-{newest}")
            log.info("continuing from a checkpoint of torchtitan's DCP back end: %s", place)
            self._load_everything(place)
            return True
        return self._load_initial()

    def _restore(self, step: int | None) -> bool:
        """Restore a checkpoint of this run; return False if it has none."""
        seed = {MODEL: self._state[MODEL]}
        if step == 0:
            return self._restore_state(seed, 0)
        state = self._state_to_load()
        try:
            is_restored = self._restore_state(state, step)
        except sw.MismatchError as error:
            if step is None and _newest_step(self.folder) == 0:
                return self._restore_state(seed, 0)
            raise _with_hint(error) from error
        if is_restored:
            self._set_dataloader(state)
        return is_restored

    def _restore_state(self, state: dict[str, Any], step: int | None) -> bool:
        choice: Choice = "newest" if step is None else step
        if self._checkpointer is not None:
            return self._checkpointer.restore(state, step=choice) is not None
        if step is None and _newest_step(self.folder) is None:
            return False
        sw.load(self.folder, state, step=choice)
        return True

    def _state_to_load(self) -> dict[str, Any]:
        excluded = self.config.exclude_from_loading
        return {key: each for key, each in self._state_to_save().items() if key not in excluded}

    def _set_dataloader(self, state: Mapping[str, Any]) -> None:
        if self._dataloader is None or DATALOADER not in state:
            return
        try:
            self._dataloader.load_state_dict(dict(state[DATALOADER]))
        except AssertionError as error:  # torchtitan's loader compares the number of ranks so
            raise sw.StateError(f"the data loader refused its state ({error}): {_HINT}") from error

    def _load_everything(self, place: str) -> None:
        state = self._state_to_load()
        loader_state: dict[str, Any] = {}
        if DATALOADER in state and DATALOADER in (saved := sw.open(place)):
            # In a checkpoint of DCP, the states of all data-parallel ranks are one value.
            loader_state = {DATALOADER: saved[DATALOADER]}
            del state[DATALOADER]
        try:
            sw.load(place, state)
        except sw.MismatchError as error:
            raise _with_hint(error) from error
        self._set_dataloader(loader_state or state)

    def _load_initial(self) -> bool:
        """Load the weights or the state with which a new run starts; return False for none."""
        config = self.config
        place = config.initial_load_path
        if place is None and config.initial_load_in_hf:
            place = self.sd_adapter and self.sd_adapter.hf_assets_path
            if place is None:
                raise ValueError(
                    "checkpoint.initial_load_in_hf is set, but neither "
                    "checkpoint.initial_load_path nor hf_assets_path says from where"
                )
        if place is None:
            return False
        if config.initial_load_in_hf:
            self._load_hugging_face(place)
        elif config.initial_load_model_only:
            sw.load(place, {MODEL: self._state[MODEL]}, cast=True)
        else:
            self._load_everything(place)
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


def _converted(value: Any, dtype: torch.dtype) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if is_float else value


def _newest_step(folder: str) -> int | None:
    """Return the newest step of this run in storage, or None."""
    try:
        return sw.open(folder).step
    except sw.CheckpointNotFoundError:
        return None


def _newest_dcp_step(folder: str) -> int | None:
    """Return the newest step that torchtitan's own back end saved in a folder, or None."""
    store = open_store(folder)
    directories = store.stores_with(".metadata") if store.exists() else set()
    matches = map(_DCP_DIRECTORY.fullmatch, directories)
    return max((int(match[1]) for match in matches if match is not None), default=None)


def _with_hint(error: sw.MismatchError) -> sw.MismatchError:
    if not any(DATALOADER in problem for problem in error.problems):
        return error
    summary = f"the data loader's state does not fit: {_HINT}. {error.summary}"
    return sw.MismatchError(summary, error.problems)
