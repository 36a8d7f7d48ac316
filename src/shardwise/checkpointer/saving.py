"""Saving: save a step through memory or directly to storage, then apply retention."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shardwise import api
from shardwise.adapters import torch_optimizers_in
from shardwise.checkpointer.settings import Settings
from shardwise.engine.buffers import Arena
from shardwise.engine.compile_and_gc import pause_gc
from shardwise.engine.exchange import exchange
from shardwise.engine.group import Group
from shardwise.engine.options import SaveOptions, check_step
from shardwise.engine.planning import SaveRequest
from shardwise.engine.save import save_all
from shardwise.errors import LostRankError, RankError, ShardwiseError, StateError, StoreError
from shardwise.events import Recorder
from shardwise.loading import State
from shardwise.manifest.names import step_directory
from shardwise.memory.trainer.handle import SaveHandle
from shardwise.memory.trainer.snapshots import Snapshots
from shardwise.memory.trainer.staging import Storing
from shardwise.plan.cache import PlanCache
from shardwise.retention import apply_retention
from shardwise.store import Store

LONGEST_LAST_SAVE = 600.0  # seconds

log = logging.getLogger("shardwise")


@dataclass(frozen=True, slots=True)
class _Last:
    """The last call of `save`, if its step is not saved to the root."""

    step: int
    state: State
    metrics: Mapping[str, float] | None
    overwrite: bool


class Saving:
    """Saves the steps of a run. All ranks call its methods together.

    Args:
        settings: options of the Checkpointer.
        group: the ranks.
        snapshots: snapshots of the run in memory; None if saves go directly to storage.
        damaged: steps that `restore` found to be damaged; a save replaces them.
    """

    def __init__(
        self, settings: Settings, group: Group, snapshots: Snapshots | None, damaged: set[int]
    ) -> None:
        self._settings = settings
        self._group = group
        self._snapshots = snapshots
        self._damaged = damaged
        self._fenced: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()
        self._watched: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()
        self._last: _Last | None = None
        self._has_stepped = False
        self.plans = PlanCache()

    def save(
        self,
        step: int,
        state: State,
        metrics: Mapping[str, float] | None,
        *,
        durable: bool,
        overwrite: bool,
    ) -> SaveHandle | None:
        """Save a step, then remove checkpoints that are no longer kept.

        Args:
            step, state, metrics, overwrite: as for `Checkpointer.save`.
            durable: save to the root; otherwise only to memory, if a snapshot is due.

        Returns:
            A handle; None if the step was not due, no slot was free for its snapshot, or the save
            failed with `on_failure="warn"`.
        """
        before, self._last = self._last, None
        this = _Last(step, state, metrics, overwrite)
        handle = self._tried(this, durable=True) if durable else None
        is_saved = handle is not None
        in_memory = self._snapshots is not None and self._settings.is_snapshot(step)
        if in_memory and not is_saved:
            handle = self._tried(this, durable=False)
        if self._settings.at_end and not is_saved:
            self._last = this
            if before is None or before.state is not state:
                self._watch(state)
            self._has_stepped = False
        return handle

    def settle(self, handle: SaveHandle | None) -> None:
        """Wait until a save is durable, at most `LONGEST_LAST_SAVE` seconds.

        The agents continue the save after that. A failure is raised, or logged if `on_failure` is
        "warn".
        """
        try:
            if handle is not None:
                handle.result(LONGEST_LAST_SAVE)
        except TimeoutError as error:
            log.error(
                "the save after a signal is not durable yet; the agents continue it: %s", error
            )
        except StoreError as error:
            if self._settings.on_failure == "raise":
                raise
            log.error("a save failed: %s", error)

    def report_failures(self) -> None:
        """Wait until all saves are durable or have failed, and log the failures."""
        snapshots = self._snapshots
        while snapshots is not None and (error := _unsettled(snapshots)) is not None:
            log.error("a save failed: %s", error)
            if snapshots.take_failure() is None:  # no further failure: the agent is gone
                return

    def forget_last(self) -> None:
        """Forget the last call of `save`, so that `save_last` does not save its step."""
        self._last = None

    def save_last(self) -> None:
        """Save the last step that `save` was called with to the root, if the root does not have it.

        Its snapshot is persisted, if there is one. Otherwise the state is saved as it is now,
        unless an optimizer has stepped since that call.
        """
        last, self._last = self._last, None
        if last is None:
            return
        removes = self._settings.keep.removes
        if self._snapshots is not None and self._snapshots.persist(last.step, removes=removes):
            return
        stepped = b"1" if self._has_stepped else b""
        if exchange(self._group, "saving the last step", lambda: stepped, max):
            if self._group.rank == 0:
                log.warning(
                    "step %d is not saved at the end: an optimizer has stepped since save(%d, …); "
                    "call save after the last step, or pass at_end=False",
                    *(last.step, last.step),
                )
            return
        best = self._settings.keep.best
        if best is not None and best.metric not in (last.metrics or {}):
            metrics = {**(last.metrics or {}), best.metric: math.nan}
            last = replace(last, metrics=metrics)
        self._tried(last, durable=True)

    def _tried(self, last: _Last, *, durable: bool) -> SaveHandle | None:
        """Save a step. With `on_failure="warn"`, log failures of storage and return None."""
        if self._settings.on_failure == "raise":
            return self._save(last, durable=durable)
        while self._snapshots is not None and (earlier := self._snapshots.take_failure()):
            log.error("an earlier save failed; the training continues: %s", earlier)
        handle: SaveHandle | None = None
        failure: Exception | None = None
        try:
            handle = self._save(last, durable=durable)
        except LostRankError:
            raise
        except (ShardwiseError, OSError) as error:  # raised or logged after the exchange
            failure = error

        def speak() -> bytes:
            if failure is None or isinstance(failure, RankError):
                return b""
            if not is_of_storage(failure):
                raise failure
            return f"{type(failure).__name__}: {failure}".encode()

        reason = exchange(self._group, "judging a save", speak, max).decode()
        if failure is not None and not reason:
            raise failure
        if reason:
            if self._group.rank == 0:
                log.error("step %s is not saved; the training continues: %s", last.step, reason)
            return None
        return handle

    def _save(self, last: _Last, *, durable: bool) -> SaveHandle | None:
        step, state, metrics, overwrite = last.step, last.state, last.metrics, last.overwrite
        settings = self._settings
        recorder = Recorder(settings.on_event)
        overwrite = overwrite or step in self._damaged

        def prepare() -> SaveRequest:
            number = check_step(step)
            options = SaveOptions.from_arguments(
                number, overwrite, settings.check_replicas, metrics
            )
            if durable:
                self._refuse_unranked(options)
            return self._job(state, settings.root.at(step_directory(number)), options)

        with pause_gc():
            if self._snapshots is not None:
                self._fence_steps(state)
                damaged = tuple(sorted(self._damaged - {step}))
                storing = Storing(durable, settings.keep, damaged)
                handle = self._snapshots.save(prepare, storing, self.plans, recorder)
            else:
                handle = SaveHandle(save_all(prepare, self._group, self.plans, recorder))
        if handle is not None:
            self._damaged.discard(step)
            if self._snapshots is None:
                self._retain(step)
        return handle

    def prepare(self, state: State) -> int:
        """Allocate memory for snapshots of this state, and return the bytes for this rank."""
        snapshots = self._snapshots
        if snapshots is None:
            return 0

        def job() -> SaveRequest:
            return self._job(state, self._settings.root, SaveOptions())

        with pause_gc():
            return snapshots.prepare(job, self.plans, Recorder(self._settings.on_event))

    def close(self) -> None:
        """Remove the hooks from optimizers."""
        for hook in [*self._fenced.values(), *self._watched.values()]:
            hook.remove()

    def _watch(self, state: State) -> None:
        """Record from now on when an optimizer in the state steps."""
        for optimizer in torch_optimizers_in(state):
            if optimizer not in self._watched:
                note = weakref.WeakMethod(self._note_step)
                hook = optimizer.register_step_post_hook(lambda *_, note=note: _call(note))
                self._watched[optimizer] = hook

    def _note_step(self) -> None:
        self._has_stepped = True

    def _job(self, state: State, store: Store, options: SaveOptions) -> SaveRequest:
        arena = Arena(self._settings.staging_bytes)
        local = api.local_state_of(state, allow_pickle=self._settings.allow_pickle)
        return SaveRequest(state=local, store=store, arena=arena, options=options)

    def _refuse_unranked(self, options: SaveOptions) -> None:
        best = self._settings.keep.best
        if best is not None and best.metric not in options.metrics:
            raise StateError(
                f"metrics= lacks {best.metric!r}, which Keep(best=...) needs: "
                'pass float("nan") if it was not measured'
            )

    def _fence_steps(self, state: Mapping[str, object]) -> None:
        """Make the steps of all optimizers in the state wait for copies in progress."""
        memory = self._settings.memory
        if self._snapshots is None or memory is None or not memory.overlap:
            return
        fence = self._snapshots.fence
        for optimizer in torch_optimizers_in(state):
            if optimizer not in self._fenced:
                self._fenced[optimizer] = optimizer.register_step_pre_hook(lambda *_: fence())

    def _retain(self, newest: int) -> None:
        settings = self._settings

        def answer(_: list[bytes]) -> bytes:
            damaged = frozenset(self._damaged)
            apply_retention(settings.root, settings.keep, newest=newest, damaged=damaged)
            return b""

        exchange(self._group, "removing old checkpoints", lambda: b"", answer)


def is_of_storage(error: Exception) -> bool:
    """Return whether an error is a failure of storage, rather than an invalid save."""
    return isinstance(error, StoreError) or (
        isinstance(error, OSError) and not isinstance(error, ShardwiseError)
    )


def _unsettled(snapshots: Snapshots) -> StoreError | None:
    try:
        snapshots.wait_until_durable()
    except StoreError as error:
        return error
    return None


def _call(note: weakref.WeakMethod[Callable[[], None]]) -> None:
    method = note()
    if method is not None:
        method()
