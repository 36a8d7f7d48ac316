"""Save and load the state of an accelerate `Accelerator`, in place of its own methods.

    from shardwise.integrations.accelerate import load_state, save_state

    step = load_state(accelerator, checkpointer) or 0
    save_state(accelerator, checkpointer, step)

Works with a single process, DDP, FSDP1, FSDP2 and DeepSpeed, and loads on any number of ranks.
docs/howto/accelerate.md describes each option of accelerate.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

try:
    from accelerate import Accelerator
    from accelerate.data_loader import SeedableRandomSampler
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.utils import DistributedType
    from accelerate.utils.deepspeed import DummyOptim, DummyScheduler  # also without DeepSpeed
except ImportError as error:
    raise ImportError(
        f"shardwise.integrations.accelerate needs accelerate ({error}): pip install accelerate"
    ) from error
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

import shardwise as sw
import shardwise.data

__all__ = ["collect_state", "load_state", "save_state"]
_REFUSED_BACKENDS = {
    DistributedType.MEGATRON_LM: "put its model, optimizer and scheduler into a state (see "
    "docs/howto/megatron.md), and pass the state to Checkpointer.save",
    DistributedType.XLA: "use accelerator.save_state",
}
_OBJECTS = "objects"
_MOST_OBJECTS = 32
"""How many objects of each kind a load looks for before it changes anything.

It notices further objects only at its end.
"""
log = logging.getLogger("shardwise")
T = TypeVar("T")


class LoaderEpoch:
    """The epoch of a prepared loader, which selects the order of the samples.

    Args:
        loader: a loader that `Accelerator.prepare` returned.
    """

    def __init__(self, loader: DataLoader[object]) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, int]:
        """Return the number of epochs that the loader has completed.

        With the last batch of an epoch, the epoch is complete, but accelerate counts it later.
        """
        loader = self._loader
        progress = getattr(loader, "gradient_state", None)
        is_active = progress is not None and progress.active_dataloader is loader
        is_last = is_active and bool(getattr(loader, "end_of_dataloader", False))
        return {"epoch": int(getattr(loader, "iteration", 0)) + is_last}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Let the next iteration begin with the epoch that was saved."""
        epoch = state_dict["epoch"]
        if hasattr(self._loader, "set_epoch"):
            self._loader.set_epoch(epoch)
        # set_epoch of a loader from skip_first_batches does not reach the sampler on several ranks.
        sampler = _sampler_of(self._loader)
        if isinstance(sampler, SeedableRandomSampler):
            sampler.set_epoch(epoch)


class LoaderPosition(shardwise.data.PerRankLoader):
    """The position of a prepared loader within an epoch, under `use_stateful_dataloader=True`."""

    def restore(self, value: Mapping[str, Any]) -> None:
        """Set the position. After a completed epoch, let the loader create its next iterator.

        When this position was saved, the epoch of the iterator was complete. Given this position,
        torchdata would create two iterators instead of one, and so draw more random numbers than a
        run that was not interrupted.
        """
        sampler = _sampler_of(self.loader)
        repeats_order = isinstance(sampler, (SeedableRandomSampler, SequentialSampler))
        has_state = hasattr(getattr(self.loader, "dataset", None), "state_dict")
        if value["state"].get("_iterator_finished") and repeats_order and not has_state:
            self.loader.load_state_dict({})
        else:
            super().restore(value)


def collect_state(accelerator: Accelerator) -> dict[str, object]:
    """Return all objects that the accelerator prepared or registered, as a state to save or load.

    The keys are those of the files of `Accelerator.save_state`: `model`, `optimizer`, `scheduler`,
    `loader`, then `model_1` and so on; `scaler`; `custom_checkpoint_0` and so on for objects of
    `register_for_checkpointing`. In addition, `rng` has the random generators of each rank, and
    `accelerator` the counter of gradient accumulation, the number of ranks, whether a prepared
    loader is in the middle of an epoch, and the keys of all objects.

    Raises:
        StateError: the accelerator uses Megatron-LM or XLA.
    """
    if advice := _REFUSED_BACKENDS.get(accelerator.distributed_type):
        raise sw.StateError(
            f"the Accelerator uses {accelerator.distributed_type.value}, which shardwise does not "
            f"save through accelerate: {advice}"
        )
    state: dict[str, object] = {}
    state.update(_name_objects("model", accelerator._models))
    state.update(
        _name_objects("optimizer", [unwrap_optimizer(each) for each in accelerator._optimizers])
    )
    state.update(_name_objects("scheduler", accelerator._schedulers))
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler
    for key, loader in _name_objects("loader", accelerator._dataloaders):
        state[key] = LoaderEpoch(loader)
        if getattr(loader, "use_stateful_dataloader", False):
            state[f"{key}_position"] = LoaderPosition(
                loader, rank=accelerator.process_index, world_size=accelerator.num_processes
            )
    for index, custom in enumerate(accelerator._custom_objects):
        state[f"custom_checkpoint_{index}"] = custom
    # A load may leave the scaler out: only some parallelisms have one, and its value adapts.
    objects = [key for key in state if key != "scaler"]
    state["rng"] = sw.RngState()
    state["accelerator"] = {**_read_counters(accelerator), _OBJECTS: ",".join(objects)}
    return state


def save_state(
    accelerator: Accelerator,
    checkpointer: sw.Checkpointer,
    step: int,
    *,
    metrics: Mapping[str, float] | None = None,
    overwrite: bool = False,
    force: bool = False,
) -> sw.SaveHandle | None:
    """Save all objects that the accelerator prepared or registered. All ranks call this together.

    Args:
        accelerator: the accelerator.
        checkpointer: saves the step if it is due, and applies its rules of retention.
        step: the number of training steps so far.
        metrics, overwrite, force: as for `Checkpointer.save`.

    Returns:
        As `Checkpointer.save`.

    Raises:
        StateError: the accelerator uses Megatron-LM or XLA, or has no objects.
        ShardwiseError: as for `Checkpointer.save`.
    """
    state = collect_state(accelerator)
    if state.keys() <= {"rng", "accelerator", "scaler"}:
        raise sw.StateError(
            "the Accelerator has no objects to save: call save_state after prepare or "
            "register_for_checkpointing"
        )
    handle = checkpointer.save(step, state, metrics=metrics, overwrite=overwrite, force=force)
    if handle is not None and not accelerator.sync_gradients and accelerator.is_main_process:
        log.warning(
            "step %d is saved in the middle of an accumulation of gradients, which are not saved: "
            "a run that resumes from this step lacks the gradients of the batches so far. Call "
            "save_state only if accelerator.sync_gradients is True",
            step,
        )
    return handle


def load_state(
    accelerator: Accelerator,
    checkpointer: sw.Checkpointer,
    *,
    step: int | sw.Best | Literal["newest", "best"] = "newest",
    strict: bool = True,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
) -> int | None:
    """Load all objects that the accelerator prepared or registered. All ranks call this together.

    Call it after `Accelerator.prepare` and `register_for_checkpointing`.

    Args:
        accelerator: the accelerator. Its number of ranks and its parallelism may have changed.
        checkpointer: selects and loads the checkpoint.
        step, strict, only, skip: as for `Checkpointer.restore`.

    Returns:
        The step to continue from, or None if the run has no checkpoint yet.

    Raises:
        StateError: the accelerator uses Megatron-LM or XLA; or lacks objects that were saved, and
            neither `strict=False` nor `only` is given; or a `StatefulDataLoader` was saved on
            another number of ranks.
        ShardwiseError: as for `Checkpointer.restore`.
    """
    state = collect_state(accelerator)
    counters: dict[str, Any] = {**_read_counters(accelerator), _OBJECTS: ""}
    state["accelerator"] = counters
    starts = checkpointer._start_from is not None and checkpointer.latest() is None
    further = {} if only or starts or not strict else _further_keys(state)
    try:
        restored = checkpointer.restore(
            {**state, **further}, step=step, strict=strict, only=only, skip=skip
        )
    except sw.MismatchError as error:
        names = [problem.partition(":")[0] for problem in error.problems]
        _refuse_lacking(
            [key for key in further if any(f"{n}.".startswith(f"{key}.") for n in names)], error
        )
        raise
    if checkpointer.last_restore is None:
        return restored
    if strict and not only:  # with start_from=, a snapshot in memory may have been restored
        saved = counters[_OBJECTS].split(",") if counters[_OBJECTS] else []
        _refuse_lacking([key for key in saved if key not in state])
    accelerator.step = counters["step"]
    if counters["in_epoch"] and accelerator._models:
        _restore_rng_before_training(accelerator._models[0])
    if accelerator.is_main_process:
        _warn_of_inexact_parts(accelerator, counters["world_size"], bool(counters["in_epoch"]))
    return restored


def _further_keys(state: Mapping[str, object]) -> dict[str, nn.Module]:
    """Return the keys of objects that a checkpoint may have, but not the Accelerator.

    Each has an empty module. If the checkpoint has one of these objects, a strict load fails before
    it changes anything.
    """
    keys: list[str] = []
    for kind in ("model", "optimizer", "scheduler", "loader"):
        numbered = [kind, *(f"{kind}_{index}" for index in range(1, _MOST_OBJECTS))]
        keys += numbered if kind != "loader" else [*numbered, *(f"{k}_position" for k in numbered)]
    keys += [f"custom_checkpoint_{index}" for index in range(_MOST_OBJECTS)]
    return {key: nn.Module() for key in keys if key not in state}


def _refuse_lacking(lacking: Sequence[str], cause: Exception | None = None) -> None:
    if lacking:
        raise sw.StateError(
            f"the checkpoint has {', '.join(lacking)}, and the Accelerator has no such objects: "
            "call load_state after prepare and register_for_checkpointing; or, to leave them out, "
            "pass strict=False or only="
        ) from cause


def _name_objects(key: str, objects: Sequence[T]) -> Iterator[tuple[str, T]]:
    """Yield the objects with their keys: the first has no number. Placeholders are left out."""
    real = [each for each in objects if not isinstance(each, (DummyOptim, DummyScheduler))]
    for index, value in enumerate(real):
        yield (key if index == 0 else f"{key}_{index}"), value


def unwrap_optimizer(optimizer: object) -> object:
    """Return the optimizer that accelerate's wrapper contains, of torch or DeepSpeed."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def _read_counters(accelerator: Accelerator) -> dict[str, int]:
    progress = accelerator.gradient_state
    return {
        "step": accelerator.step,
        "world_size": accelerator.num_processes,
        "in_epoch": int(progress.in_dataloader and not progress.end_of_dataloader),
    }


def _restore_rng_before_training(model: nn.Module) -> None:
    """Set the present state of the random generators again before the model's next training step.

    The start of an iteration over a loader draws a seed. If a run resumes within an epoch, it draws
    a seed that an uninterrupted run drew before the save.
    """
    rng = sw.RngState()
    restored = rng.state_dict()

    def restore(module: nn.Module, arguments: object) -> None:
        if module.training:
            handle.remove()
            rng.load_state_dict(restored)

    handle = model.register_forward_pre_hook(restore)


def _sampler_of(loader: object) -> object:
    get_sampler = getattr(loader, "get_sampler", None)
    return None if get_sampler is None else get_sampler()


def _warn_of_inexact_parts(
    accelerator: Accelerator, saved_world_size: int, is_in_epoch: bool
) -> None:
    for key, loader in _name_objects("loader", accelerator._dataloaders):
        is_in_first_epoch = is_in_epoch and LoaderEpoch(loader).state_dict()["epoch"] == 0
        has_position = getattr(loader, "use_stateful_dataloader", False)
        if (
            is_in_first_epoch
            and has_position
            and loader.num_workers > 0
            and isinstance(_sampler_of(loader), SeedableRandomSampler)
        ):
            log.warning(
                "%s: if a loader has num_workers and use_stateful_dataloader=True, accelerate "
                "orders the first epoch of a new run differently, so samples of this epoch are "
                "repeated or left out. Pass num_workers=0, or skip the batches (see "
                "docs/howto/accelerate.md)",
                key,
            )
        if type(_sampler_of(loader)) is RandomSampler:
            log.warning(
                "%s: a RandomSampler does not repeat its order, so the samples after a restart "
                "differ from those of an uninterrupted run: pass "
                "DataLoaderConfiguration(use_seedable_sampler=True) to the Accelerator",
                key,
            )
    if saved_world_size == accelerator.num_processes:
        return
    for key, scheduler in _name_objects("scheduler", accelerator._schedulers):
        if (
            isinstance(scheduler, AcceleratedScheduler)
            and scheduler.step_with_optimizer
            and not scheduler.split_batches
        ):
            log.warning(
                "%s: accelerate steps it once for each rank, and the number of ranks has changed "
                "from %d to %d, so its learning rates now change %s times as fast: pass "
                "step_scheduler_with_optimizer=False or DataLoaderConfiguration(split_batches=True)"
                " to the Accelerator",
                key, saved_world_size, accelerator.num_processes,
                f"{accelerator.num_processes / saved_world_size:g}",
            )  # fmt: skip
