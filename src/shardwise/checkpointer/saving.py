"""Saving: save a step through memory or directly to storage, then apply retention."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from weakref import WeakKeyDictionary

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shardwise.checkpointer.handle import SaveHandle
from shardwise.checkpointer.hooks import RunHooks
from shardwise.checkpointer.prepared_state import StateBinder
from shardwise.checkpointer.replica_checks import ReplicaChecks
from shardwise.checkpointer.saver import Saver
from shardwise.checkpointer.settings import Settings
from shardwise.checkpointer.start_from import refuse_steps_of_another_run
from shardwise.kernel.adapters import torch_optimizers_in
from shardwise.kernel.engine.buffers import Arena
from shardwise.kernel.engine.check_numbers import check_step
from shardwise.kernel.engine.compile_and_gc import pause_gc
from shardwise.kernel.engine.describe import StateToSave
from shardwise.kernel.engine.group import Group, TimedGroup
from shardwise.kernel.engine.planning import SaveRequest, plan_together
from shardwise.kernel.engine.root import Root
from shardwise.kernel.engine.rounds import Round
from shardwise.kernel.engine.save import complete_save
from shardwise.kernel.errors import LostRankError, RankError, ShardwiseError, StateError, StoreError
from shardwise.kernel.events import Recorder
from shardwise.kernel.loading import State
from shardwise.kernel.plan.save import PlanCache
from shardwise.parts.lineage import RootClaim

LONGEST_LAST_SAVE = 600.0  # seconds

log = logging.getLogger("shardwise")


@dataclass(frozen=True, slots=True)
class _SaveCall:
    """The arguments of a call of `Checkpointer.save`, and when it began (`Recorder`)."""

    step: int
    state: State
    metrics: Mapping[str, float] | None
    overwrite: bool
    began: float | None


class Saving:
    """Saves the steps of a run. All ranks call its methods together.

    Args:
        settings: the options of the Checkpointer.
        group: the ranks.
        saver: saves to memory or directly to storage.
        hooks: the hooks of the run.
        damaged: steps that `restore` found to be damaged; a save replaces them.
        found_steps: the committed steps of the root. Unless a restore succeeds first, the first
            save refuses to add to them.
        claim: claims the root at the first save.
        checks: compares replicas.

    Attributes:
        plan_cache: the plans of earlier saves.
    """

    def __init__(
        self,
        settings: Settings,
        group: Group,
        saver: Saver,
        hooks: RunHooks,
        damaged: set[int],
        found_steps: list[int],
        claim: RootClaim,
        checks: ReplicaChecks,
    ) -> None:
        self._settings = settings
        self._group = group
        self._saver = saver
        self._hooks = hooks
        self._damaged = damaged
        self._fence_hooks: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()
        self._step_hooks: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()
        self._unsaved_call: _SaveCall | None = None  # the last call, if its step is not in the root
        self._has_stepped = False  # whether an optimizer has stepped since that call
        self._claim, self._checks = claim, checks
        self._found_steps = found_steps  # empty once this run has restored or saved
        self._binder = StateBinder(allow_pickle=settings.allow_pickle)
        self.plan_cache = PlanCache()

    def save(
        self,
        step: int,
        state: State,
        metrics: Mapping[str, float] | None,
        *,
        durable: bool,
        overwrite: bool,
        began: float,
    ) -> SaveHandle | None:
        """Save a step, then remove checkpoints that the rules of `keep` drop.

        Args:
            step, state, metrics, overwrite: as for `Checkpointer.save`.
            began: when that was called, in seconds of `time.perf_counter`.
            durable: whether to save to the root. If False, save to memory, if a snapshot is due.

        Returns:
            A handle; None if the step was not due, no slot was free for its snapshot, or the save
            failed with `on_failure="warn"`.
        """
        if not overwrite:
            intact = [each for each in self._found_steps if each not in self._damaged]
            refuse_steps_of_another_run(self._settings.root, intact)
        self._found_steps = []
        previous, self._unsaved_call = self._unsaved_call, None
        call = _SaveCall(step, state, metrics, overwrite, began)
        handle, failure = self._save_or_log(call, durable=True) if durable else (None, "")
        is_saved = handle is not None
        if not is_saved and self._settings.is_snapshot_step(step):
            handle, _ = self._save_or_log(call, durable=False)
            if handle is not None:
                handle.failure = failure
        if self._settings.save_at_end and not is_saved:
            self._unsaved_call = call
            if previous is None or previous.state is not state:
                # A save has just bound the state.
                self._watch(self._binder.optimizers if handle else torch_optimizers_in(state))
            self._has_stepped = False
        return handle

    def wait_until_durable(self, handle: SaveHandle | None) -> None:
        """Wait until a save is durable, at most `LONGEST_LAST_SAVE` seconds for each stage.

        The agents continue the save after that time. A failure is raised, or logged if
        `on_failure` is "warn".
        """
        try:
            if handle is not None:
                handle.result(LONGEST_LAST_SAVE)
            self.tell_saved()
        except TimeoutError as error:
            log.error(
                "the save after a signal is not durable yet; the agents continue it: %s", error
            )
        except StoreError as error:
            self._hooks.call("failed", error)
            if self._settings.on_failure == "raise":
                raise
            log.error("a save failed: %s", error)

    def tell_saved(self) -> None:
        """Tell the hooks which steps have become durable."""
        for step in self._saver.take_saved():
            self._hooks.call("saved", step)

    def log_failures(self) -> None:
        """Wait until all saves are durable or have failed, and log the failures."""
        while (error := _failure_of_saves(self._saver)) is not None:
            self._hooks.call("failed", error)
            log.error("a save failed: %s", error)
            if self._saver.take_failure() is None:  # no further failure: the agent is gone
                return

    def begin_restore(self) -> None:
        """Forget the last call of `save`, so that `save_last` does not save its step."""
        self._unsaved_call = None
        self.tell_saved()

    def end_restore(self, step: int | None) -> None:
        """Accept that saves add to the steps of the root, because the state continues from them.

        Args:
            step: the restored step; None if the root had none.
        """
        self._found_steps = []
        if step is not None:
            self._claim.known_steps = None

    def save_last(self) -> None:
        """Save the last step that `save` was called with to the root, if the root does not have it.

        If memory has a snapshot of the step, the snapshot is persisted. Otherwise the state is
        saved as it is now, unless an optimizer has stepped since that call.
        """
        call, self._unsaved_call = self._unsaved_call, None
        if call is None:
            return
        call = replace(call, began=None)
        removes_old = self._settings.keep.has_rules or self._settings.mirror is not None
        if self._saver.persist(call.step, removes_old=removes_old):
            return
        with Round(self._group, "saving the last step") as all_ranks:
            has_stepped = all_ranks.all_reduce(self._has_stepped, bool, any)
        if has_stepped:
            if self._group.rank == 0:
                log.warning(
                    "step %d is not saved at the end: an optimizer has stepped since save(%d, …); "
                    "call save after the last step, or pass save_at_end=False",
                    *(call.step, call.step),
                )
            return
        best = self._settings.keep.best
        if best is not None and best.metric not in (call.metrics or {}):
            metrics = {**(call.metrics or {}), best.metric: math.nan}
            call = replace(call, metrics=metrics)
        self._save_or_log(call, durable=True)

    def _save_or_log(self, call: _SaveCall, *, durable: bool) -> tuple[SaveHandle | None, str]:
        """Save a step. With `on_failure="warn"`, log failures of storage.

        Returns:
            The handle, if any; and why storage failed, the same on all ranks.
        """
        if self._settings.on_failure == "raise":
            return self._save(call, durable=durable), ""
        while earlier := self._saver.take_failure():
            self._hooks.call("failed", earlier)
            log.error("an earlier save failed; the training continues: %s", earlier)
        handle: SaveHandle | None = None
        failure: Exception | None = None
        try:
            handle = self._save(call, durable=durable)
        except LostRankError:
            raise
        except (ShardwiseError, OSError) as error:  # raised or logged after the round
            failure = error

        with Round(self._group, "judging a save") as all_ranks:
            own = ""
            if failure is not None and not isinstance(failure, RankError):
                if not _is_storage_failure(failure):
                    raise failure
                own = f"{type(failure).__name__}: {failure}"
            reason = all_ranks.all_reduce(own, str, max)
        if failure is not None and not reason:
            raise failure
        if reason:
            if self._group.rank == 0:
                log.error("step %s is not saved; the training continues: %s", call.step, reason)
            return None, reason
        return handle, ""

    def _save(self, call: _SaveCall, *, durable: bool) -> SaveHandle | None:
        settings = self._settings
        step = call.step if isinstance(call.step, int) else 0  # otherwise, `_make_request` raises
        self._hooks.call("begun", step)
        watcher = self._saver.make_watcher("save" if durable else "snapshot", max(0, step))
        recorder = Recorder(settings.on_event, watcher, call.began)
        is_damaged = isinstance(call.step, Hashable) and call.step in self._damaged
        overwrite = call.overwrite or is_damaged
        request = partial(self._make_request, call, durable=durable, overwrite=overwrite)
        damaged = self._damaged - ({call.step} if is_damaged else set())
        storage = settings.storage_task(step, damaged)
        group = TimedGroup(self._group, recorder)
        try:
            with pause_gc(), self._saver.destination(storage, durable=durable) as destination:
                planned = plan_together(request, destination, group, self.plan_cache, recorder)
                if not destination.accepts(planned.notes):
                    return None
                report = complete_save(planned, destination, group, recorder, self._checks.check)
        except OSError as error:
            self._hooks.call("failed", error)
            raise
        seconds = report.seconds
        self._checks.add_save(seconds["total"] - seconds.get("check_replicas", 0.0))
        self._damaged.discard(call.step)
        self._hooks.call("staged", report, durable=durable)
        self.tell_saved()
        handle: SaveHandle = destination.handle(report)
        return handle

    def prepare(self, state: State) -> int:
        """Allocate memory for snapshots of this state, and return the bytes for this rank."""

        def make_request() -> SaveRequest:
            store, arena = self._settings.root, Arena(self._settings.staging_bytes)
            return SaveRequest(state=self._bind(state), store=store, arena=arena, needs_room=False)

        with pause_gc():
            recorder = Recorder(self._settings.on_event)
            return self._saver.prepare(make_request, self.plan_cache, recorder)

    def close(self) -> None:
        """Remove the hooks from optimizers."""
        for hook in [*self._fence_hooks.values(), *self._step_hooks.values()]:
            hook.remove()

    def _watch(self, optimizers: Iterable[Optimizer]) -> None:
        """Record from now on when one of the optimizers steps."""
        reference = weakref.ref(self)  # the hook does not keep this object alive

        def record_step(*_: object) -> None:
            saving = reference()
            if saving is not None:
                saving._has_stepped = True

        for optimizer in optimizers:
            if optimizer not in self._step_hooks:
                self._step_hooks[optimizer] = optimizer.register_step_post_hook(record_step)

    def _make_request(self, call: _SaveCall, *, durable: bool, overwrite: bool) -> SaveRequest:
        """Return the request for a call of `save`. An error is raised on all ranks."""
        if isinstance(call.step, Mapping):
            raise TypeError(
                "Checkpointer.save(step, state): step is a dict. The arguments seem to be "
                "swapped: pass the step first"
            )
        step = check_step(call.step)
        if durable:
            self._require_ranked_metric(step, call.metrics or {})
        self._claim.epoch = self._saver.epoch
        return SaveRequest(
            state=self._bind(call.state),
            store=Root(self._settings.root).at(step).store,
            arena=Arena(self._settings.staging_bytes),
            step=step,
            overwrite=overwrite,
            check_replicas=self._group.rank == 0 and self._checks.is_due(),
            metrics=call.metrics or {},
            claim=self._claim,
            takes_root=call.overwrite,
        )

    def _bind(self, state: State) -> StateToSave:
        """Return what this rank saves of a state, and let its optimizers wait for copies."""
        bound = self._binder.bind(state)
        self._fence_optimizer_steps(self._binder.optimizers)
        return bound

    def _require_ranked_metric(self, step: int, metrics: Mapping[str, float]) -> None:
        best = self._settings.keep.best
        if best is not None and best.metric not in metrics:
            raise StateError(
                f"save of step {step}: metrics= lacks {best.metric!r}, which Keep(best=…) "
                'needs: pass float("nan") if it was not measured'
            )

    def _fence_optimizer_steps(self, optimizers: Iterable[Optimizer]) -> None:
        """Make the steps of optimizers wait for copies in progress."""
        memory = self._settings.memory
        if memory is None or not memory.overlap:
            return
        fence = self._saver.fence
        for optimizer in optimizers:
            if optimizer not in self._fence_hooks:
                self._fence_hooks[optimizer] = optimizer.register_step_pre_hook(lambda *_: fence())


def _is_storage_failure(error: Exception) -> bool:
    """Return whether an error is a failure of storage, rather than an invalid save."""
    return isinstance(error, StoreError) or (
        isinstance(error, OSError) and not isinstance(error, ShardwiseError)
    )


def _failure_of_saves(saver: Saver) -> StoreError | None:
    """Wait until all saves are durable or have failed, and return a failure, if any."""
    try:
        saver.wait_until_durable()
    except StoreError as error:
        return error
    return None
