"""The `Checkpointer`: saves, retains and restores the checkpoints of one run."""

from __future__ import annotations

import logging
import os
import signal
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from shardwise.checkpointer.handle import SaveHandle
from shardwise.checkpointer.hooks import RunHooks, make_hooks_of_others
from shardwise.checkpointer.mirroring import RunMirror, warn_of_unused_mirror
from shardwise.checkpointer.replica_checks import ReplicaChecks
from shardwise.checkpointer.restoring import Restoring
from shardwise.checkpointer.saver import Saver
from shardwise.checkpointer.saving import Saving
from shardwise.checkpointer.settings import (
    Settings,
    call_at_exit,
    check_options,
    install_signals,
    open_mirror,
    open_root_store,
    prepare_root_and_check_memory,
)
from shardwise.checkpointer.signals import AfterSignal, Signals
from shardwise.checkpointer.start_from import StartFrom, start
from shardwise.kernel import api
from shardwise.kernel.engine.check_numbers import check_integer
from shardwise.kernel.engine.compile_and_gc import skip_compile
from shardwise.kernel.engine.group import TIMEOUT, Group, SoloGroup, TimedGroup
from shardwise.kernel.engine.load import LoadReport
from shardwise.kernel.engine.root import Choice, Root, parse_choice
from shardwise.kernel.engine.rounds import Round
from shardwise.kernel.errors import CheckpointNotFoundError, ShardwiseError, StoreError
from shardwise.kernel.events import OperationRecord, Recorder, Sink
from shardwise.kernel.loading import LoadOptions, State
from shardwise.kernel.plan.save import PlanCache
from shardwise.kernel.state.name_lookup import Rename
from shardwise.parts.checks.replica_check import Divergence, DivergencePolicy, OnDivergence
from shardwise.parts.lineage import RootClaim
from shardwise.parts.memory.options import Memory
from shardwise.parts.ranks.process_groups import connect_default_group
from shardwise.parts.ranks.tree import TreeGroup
from shardwise.parts.retention import Keep
from shardwise.parts.telemetry.hook import TelemetryHook
from shardwise.parts.tiers.mirror_watch import MirrorWatch
from shardwise.parts.tiers.options import Mirror
from shardwise.ports.hooks import MakeHook, RestoreReport, Run

if TYPE_CHECKING:
    from shardwise.parts.formats.specification import Specification

STAGING_ONLY = Memory(snapshot_every=0, slots=1)
"""Saves in the background without snapshots: memory holds each save until it is persisted."""
MOST_RESTORES = 3
"""`restore` loads again if a newer checkpoint was committed meanwhile. This limits the attempts."""

log = logging.getLogger("shardwise")


class Checkpointer:
    """Saves, retains and restores the checkpoints of one run.

    All ranks create it together, and call `save`, `prepare`, `restore` and `close` together.

    Args:
        root: the directory of the run, or a store. Each step gets a subdirectory.
        keep: the rules for checkpoints to keep. The default keeps all.
        mirror: a second place that gets a copy of every checkpoint in the background: a path, URL,
            store or `sw.Mirror`. `restore` reads from it what the root lacks.
        save_every: save steps that are a multiple of this to the root.
        memory: options for saving in the background and for snapshots in memory. By default,
            `save` returns when the state is copied to shared memory, and the node's agent writes
            the copy to storage. None: `save` returns when the checkpoint is durable.
        start_from: the source that `restore` loads while the run has no checkpoint: the path of a
            checkpoint (also a foreign one), the root of another run, or a function. All ranks call
            the function with the state. It calls `sw.load` and returns the report.
        save_at_end: at the end of the `with` block or in `close()`, save the last step that `save`
            was called with, if the root does not have that step. Nothing is saved if an optimizer
            has stepped since the call.
        save_on_signals: signals. After one of them arrives on any rank, the next `save` saves its
            step, due or not, waits until the checkpoint is durable, and sets `preempted`.
        after_signal: the action after the save that a signal caused. `"deliver"`: the signal has
            its usual effect on every rank. `"requeue"`: `scontrol requeue` runs for this Slurm job,
            and `save` returns. `"return"`: `save` returns.
        on_failure: the reaction if storage fails during a save. `"raise"`: raise on all ranks.
            `"warn"`: log the error; `save` returns None, or the handle of a snapshot.
        check_replicas_every: at every so many saves, compare all bytes that several ranks hold.
            None: as often as comparisons take at most 1 % of the time of saves.
        on_divergence: the reaction if such bytes differ: `"warn"`; `"raise"` instead of saving; or
            `"ignore"`. Or a dict from patterns of names to reactions: the first match decides.
        allow_pickle, staging_bytes, on_event: as for `shardwise.save`.
        timeout: the longest time that ranks wait for each other before they raise.
        telemetry: store what each rank did in each save and restore, for `shardwise report`.
        hooks: functions that make additional hooks for this run, as entry points do.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: `save_every` is not positive, an option has an unknown value, `save_on_signals`
            is used outside the main thread, or there is no Slurm job to requeue.
        StateError: the root is a file.
        CheckpointExistsError: the root itself is a checkpoint, and `start_from` is not given.
        MismatchError: the options differ between ranks.
        StoreError: the root is a custom store, and `memory` is not None.
    """

    _signals: Signals | None = None
    _own_group: TreeGroup | None = None

    def __init__(
        self,
        root: api.Place,
        *,
        keep: Keep | None = None,
        mirror: Mirror | api.Place | None = None,
        save_every: int = 1,
        memory: Memory | None = STAGING_ONLY,
        start_from: StartFrom | None = None,
        save_at_end: bool = True,
        save_on_signals: Iterable[signal.Signals] = (),
        after_signal: AfterSignal = "deliver",
        on_failure: Literal["raise", "warn"] = "raise",
        check_replicas_every: int | None = None,
        on_divergence: OnDivergence = "warn",
        allow_pickle: bool = False,
        staging_bytes: int | None = None,
        timeout: timedelta = TIMEOUT,
        on_event: Sink | None = None,
        telemetry: bool = True,
        hooks: Sequence[MakeHook] = (),
    ) -> None:
        self._closed, self._process = False, os.getpid()
        self._damaged, self._hooks = set[int](), RunHooks()
        self.last_restore: RestoreReport | None = None
        self._start_from = start_from
        api.warn_without_group()
        try:
            self._own_group = connect_default_group("checkpointer", timeout)
            self._group: Group = self._own_group or SoloGroup()
            with Round(self._group, "checking options"):
                check_options(keep, memory, start_from, save_on_signals, after_signal, on_failure)
                self._root = open_root_store(root, opened_by_agents=memory is not None)
                self._settings = settings = Settings(
                    root=self._root,
                    keep=keep or Keep(),
                    mirror=open_mirror(mirror, self._root, opened_by_agents=memory is not None),
                    save_every=check_integer("Checkpointer(save_every", save_every),
                    memory=memory,
                    check_replicas_every=check_replicas_every,
                    allow_pickle=allow_pickle,
                    staging_bytes=staging_bytes,
                    on_event=on_event,
                    save_at_end=save_at_end,
                    on_failure=on_failure,
                    on_divergence=DivergencePolicy.from_option(on_divergence),
                    telemetry=telemetry,
                )
                self._signals = install_signals(save_on_signals, after_signal)
            self._claim = RootClaim(self._root)
            self._checks = ReplicaChecks(settings, self._group.size)
            self._saver, steps = self._open_saver(hooks)
        except BaseException:
            self._release()
            raise
        self._saving = Saving(self._settings, self._group, self._saver, self._hooks, self._damaged,
            steps, self._claim, self._checks)  # fmt: skip
        call_at_exit(weakref.WeakMethod(self._wait_at_exit))

    def _open_saver(self, make_hooks: Sequence[MakeHook]) -> tuple[Saver, list[int]]:
        """Check the root, and return what saves to it; and the steps that it has. Add the hooks."""
        settings, group, hooks = self._settings, self._group, self._hooks
        can_use_memory, steps = prepare_root_and_check_memory(
            settings, self._signals, group, self._claim, has_start=self._start_from is not None
        )
        run = Run(settings.root, group.rank, group.size)
        with Round(group, "making hooks"):
            others = make_hooks_of_others(run, make_hooks)
        watch = None if settings.mirror is None else MirrorWatch(settings.root)
        saver: Saver = Saver(settings.root, group, watch)
        if settings.memory is None or not can_use_memory:
            self._settings = settings = replace(settings, memory=None)
        else:
            from shardwise.checkpointer.memory_saver import SnapshotSaver

            saver = SnapshotSaver(settings.root, settings.memory, group, watch, steps)
        if watch is not None:
            request = saver.request_mirroring if saver.has_agents else None
            hooks.add(RunMirror(settings, group, watch, request, self._damaged))
        elif group.rank == 0:
            warn_of_unused_mirror(settings.root)
        if settings.telemetry:
            take_ended = saver.take_ended if saver.has_agents else None
            hooks.add(TelemetryHook(run, group, take_ended))
        for hook in others:
            hooks.add(hook)
        return saver, steps

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if os.getpid() == self._process:  # in a forked child, the parent closes everything
            self._close(wait=error_type is None, failed=error_type is not None)

    def close(self, *, wait: bool = True) -> None:
        """Finish pending saves, then release the process group and the signal handlers.

        A signal that arrived after the last `save` takes its usual effect.

        Args:
            wait: wait until all pending saves are durable. Otherwise the agents finish them alone.

        Raises:
            StoreError: a pending save has failed.
            ShardwiseError: this is a forked child of the process that created the Checkpointer.
        """
        self._refuse_forked()
        self._close(wait=wait, failed=False)

    def _close(self, *, wait: bool, failed: bool) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if wait:
                self._saving.save_last()
        except BaseException:
            wait, failed = False, True
            raise
        finally:
            self._close_saver(wait=wait, failed=failed)

    def _close_saver(self, *, wait: bool, failed: bool) -> None:
        """Close the saver and the hooks, then release the group and the signal handlers."""
        completed = False
        if not wait and self._own_group is not None:
            self._own_group.close()  # first, because other ranks may be waiting for this one
        try:
            if wait and self._settings.on_failure == "warn":
                self._saving.log_failures()
            self._saver.close(wait=wait, failed=failed)
            self._saving.tell_saved()
            completed = wait
        except StoreError as error:
            self._hooks.call("failed", error)
            if self._settings.on_failure == "raise":
                raise
            log.error("a save to %s is not durable: %s", self._root, error)
        finally:
            try:
                self._hooks.call("closed", completed=completed)
            finally:
                self._saving.close()
                self._release()

    def _wait_at_exit(self) -> None:
        """Wait until this rank's saves are durable, and log failures; runs at process exit."""
        if self._closed:
            return
        try:
            self._saver.wait_until_durable()
        except StoreError as error:
            log.error("a save to %s is not durable: %s", self._root, error)

    def _release(self) -> None:
        if self._own_group is not None:
            self._own_group.close()
        if self._signals is not None:
            self._signals.stop()

    @property
    def preempted(self) -> bool:
        """Whether a signal has caused a save. The value is the same on all ranks."""
        return self._signals is not None and self._signals.has_acted

    def has_received_signal(self) -> bool:
        """Return whether any rank has received a signal of `save_on_signals` since the last save.

        The next `save` will save its step. All ranks call this together.
        """
        return self._find_signal() > 0

    def _find_signal(self) -> int:
        return 0 if self._signals is None else self._signals.find_received_signal(self._group)

    @property
    def divergences(self) -> tuple[Divergence, ...]:
        """The differences that the last comparison of replicas found; the same on all ranks."""
        return self._checks.divergences

    @property
    def plan_cache(self) -> PlanCache:
        """The cached plans of earlier saves, and how often they were reused."""
        return self._saving.plan_cache

    @skip_compile
    def save(
        self,
        step: int,
        state: State,
        *,
        metrics: Mapping[str, float] | None = None,
        overwrite: bool = False,
        force: bool = False,
    ) -> SaveHandle | None:
        """Save the state if this step is due, then remove checkpoints that `keep` drops.

        Args:
            step: the training step, a non-negative integer.
            state: as for `shardwise.save`.
            metrics: numbers to store with the checkpoint. `Keep(best=…)` ranks checkpoints by
                them. Pass `float("nan")` for a metric that you did not measure.
            overwrite: replace an existing checkpoint of this step. If False, an existing
                checkpoint is an error, unless `restore` found it to be damaged.
            force: save the step to the root even if it is not due.

        Returns:
            A handle; or None if the step was not due, no slot was free for its snapshot, or
            storage failed with `on_failure="warn"`. If a snapshot was due too, the handle is that
            of the snapshot, and its `result` raises.

        Raises:
            TypeError: `step` and `state` are swapped.
            StateError: `step` is not a non-negative integer or differs between ranks, or
                `metrics` lacks the metric of `Keep(best=…)`.
            CheckpointExistsError: the root has this step; or other steps, and this is the first
                save, without a `restore` before it; or another job has begun to save to it.
            ShardwiseError: as for `shardwise.save`; or an earlier background save has failed.
        """
        self._refuse_closed()
        began = time.perf_counter()  # before ranks wait for each other
        signal_number = self._find_signal()
        durable = force or signal_number > 0 or self._settings.is_durable_step(step)
        handle = self._saving.save(
            step, state, metrics, durable=durable, overwrite=overwrite, began=began
        )
        if signal_number and self._signals is not None:
            self._saving.wait_until_durable(handle)
            self._signals.act_on_signal(signal_number, self._group)
        return handle

    def prepare(self, state: State) -> int:
        """Allocate the memory for snapshots before the first `save`. `restore` calls this too.

        Returns:
            The number of bytes allocated for this rank.

        Raises:
            StoreError: there is too little memory; the message says how much is needed.
        """
        self._refuse_closed()
        return self._saving.prepare(state)

    @skip_compile
    def restore(
        self,
        state: State,
        *,
        step: Choice | Literal["best"] = "newest",
        strict: bool = True,
        only: Sequence[str] = (),
        skip: Sequence[str] = (),
        rename: Rename | None = None,
        cast: bool = False,
        spec: Specification | None = None,
        read_once: bool | None = None,
    ) -> int | None:
        """Load the newest intact checkpoint or snapshot, or the one that `step` selects.

        With `step="newest"`, damaged checkpoints are skipped; `last_restore.skipped` says why. A
        checkpoint that is intact but does not fit the state is an error.

        If the run has no checkpoint yet, this loads `start_from` and returns its step; or None, if
        `state` has optimizers, but `start_from` has no optimizer state: training starts at step 0.

        Args:
            state: as for `shardwise.load`.
            step: `"newest"`; `"best"`, by `Keep(best=…)`; a step number; or `sw.Best("loss")`.
            strict, only, skip, rename, cast, spec, read_once: as for `shardwise.load`. They also
                apply to a path in `start_from`.

        Returns:
            The step to continue from, or None to start at the beginning.

        Raises:
            CheckpointNotFoundError: the selected checkpoint does not exist.
            CheckpointExistsError: the root has checkpoints, but only of other libraries.
            CorruptionError: all checkpoints are damaged, or the selected one is. The state may be
                partly written.
            MismatchError: checkpoint and state do not fit.
            StateError: `step` is invalid; or `start_from` has an optimizer, but not its step.
        """
        self._refuse_closed()
        options = self._settings
        recorder = Recorder(options.on_event, self._saver.make_watcher("restore", None))
        group = TimedGroup(self._group, recorder)
        how = LoadOptions(strict=strict, only=only, skip=skip, rename=rename, cast=cast, spec=spec,
            read_once=read_once, allow_pickle=options.allow_pickle,
            staging_bytes=options.staging_bytes)  # fmt: skip
        load = partial(api.load_place, state=state, options=how, group=group,
            on_event=options.on_event)  # fmt: skip
        self._saving.begin_restore()
        report, start_step = self._load_and_resume(step, state, load, recorder)
        with recorder.stage("rebuilding"):
            self.prepare(state)
        self.last_restore = report and replace(
            report, seconds=recorder.seconds(), record=_join(recorder.record(), report.load.record)
        )
        if self.last_restore is not None:
            self._hooks.call("restored", self.last_restore)
        return start_step

    def best(self) -> int | None:
        """The best committed step by `Keep(best=…)`; None if no checkpoint has that metric.

        A single rank may call this.

        Raises:
            StateError: this Checkpointer has no `Keep(best=…)`.
        """
        choice = parse_choice("best", self._settings.keep.best)
        try:
            return Root(self._settings.store_to_read()).choose(choice)
        except CheckpointNotFoundError:
            return None

    def steps(self) -> list[int]:
        """The committed steps in the root and the mirror, ascending. One rank may call this."""
        return Root(self._settings.store_to_read()).steps()

    def latest(self) -> int | None:
        """The newest of `steps()`, or None."""
        return max(self.steps(), default=None)

    def __repr__(self) -> str:
        return f"<Checkpointer of {self._root}>"

    def _load_and_resume(
        self,
        step: Choice | Literal["best"],
        state: State,
        load: partial[LoadReport],
        recorder: Recorder,
    ) -> tuple[RestoreReport | None, int | None]:
        """Load a checkpoint, and record that the run is resumed from its step.

        Returns:
            The report, or None; and the step to continue from, or None.
        """
        group, claim = TimedGroup(self._group, recorder), self._claim
        restoring = Restoring(self._settings, group, self._saver, self._damaged, recorder, claim)
        for _ in range(MOST_RESTORES):
            report = restoring.restore(step, self._settings.keep.best, load)
            restored_step = start_step = report.step if report else None
            if report is None:
                place = self._start_from
                how = replace(load.keywords["options"], needs_step=True)
                start_load = partial(load, options=how)
                report, start_step = start(place, self._root, state, start_load, self._group)
            self._saving.end_restore(restored_step)
            look = None
            if step == "newest":  # an agent may have persisted a newer step during the load
                look = partial(restoring.finds_later_step, restored_step)
            with recorder.stage("rebuilding"):
                if not self._saver.resume_from(restored_step, claim.seen, look):
                    break
        return report, start_step

    def _refuse_forked(self) -> None:
        if os.getpid() != self._process:
            raise ShardwiseError(
                f"the Checkpointer of {self._root} belongs to process {self._process}, and this "
                f"is a forked child (process {os.getpid()}), which lacks its threads: save and "
                "restore in the parent, or create a Checkpointer with another root here"
            )

    def _refuse_closed(self) -> None:
        self._refuse_forked()
        if self._closed:
            raise ShardwiseError(f"{self} is closed: create another one to save or restore")


def _join(restore: OperationRecord, load: OperationRecord) -> OperationRecord:
    """Return the record of a restore, with the stages of the load in it."""
    agreed, clock = (restore.agreed, restore.clock) if restore.agreed else (load.agreed, load.clock)
    events = (*restore.events, *load.events)
    return replace(restore, agreed=agreed, clock=clock, events=events, axes=load.axes)
