"""When to save, where, what to keep, and what to restore."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Literal

from shardwise import api
from shardwise.checkpointer.restoring import RestoreReport, Restoring, Start, chosen, load_start
from shardwise.checkpointer.saving import Saving
from shardwise.checkpointer.settings import Settings, check_options, open_root, root_of, signals_of
from shardwise.checkpointer.signals import Then
from shardwise.engine.arena import DEFAULT_STAGING_BYTES
from shardwise.engine.group import TIMEOUT, Group, SoloGroup, TorchGroup, own_group
from shardwise.engine.load import LoadReport
from shardwise.engine.options import whole_number
from shardwise.engine.uncompiled import uncompiled
from shardwise.errors import (
    CheckpointNotFoundError,
    ShardwiseError,
    StoreError,
)
from shardwise.events import Recorder, Sink
from shardwise.formats.specification import Specification
from shardwise.memory.options import Memory
from shardwise.memory.snapshots.handle import SaveHandle
from shardwise.memory.snapshots.snapshots import Snapshots
from shardwise.plan.cache import PlanCache
from shardwise.plan.saved import Rename
from shardwise.retention import Choice, Keep, choose_step, committed_steps

IN_BACKGROUND = Memory(snapshot_every=0, slots=1)
"""One save is persisted while the next is staged, and that is all that memory is used for."""

log = logging.getLogger("shardwise")


class Checkpointer:
    """The checkpoints of one run, below one root: saved at intervals, kept by rule, restored.

    All ranks make one together, and call its methods together.

    Args:
        root: a directory, or a store; each step has a directory of its own below it.
        keep: which checkpoints to keep.
        save_every: steps that are a multiple of this are saved to the root.
        memory: how saves are staged into the memory of the nodes, whose agents do all else while
            the training goes on; and which snapshots stay there, which `restore` takes where they
            are newer. None: `save` returns when the checkpoint is durable.
        start_from: what `restore` loads where the run has nothing yet: a checkpoint, ours or of a
            foreign format, or the root of another run; or a function of the state, called on all
            ranks, that calls `sw.load` and returns its report.
        at_end: leaving the `with` block, or `close()`, saves the last step that `save` was called
            with, if it is not in the root yet. The state must be as it was at that call: nothing
            is saved if an optimizer has stepped since.
        save_on: after one of these signals on any rank, the next `save` saves whatever its step,
            and waits until that is durable. Then `preempted` is True.
        then: what follows. `"deliver"`: the signal has its usual effect, on every rank.
            `"requeue"`: `save` returns, after `scontrol requeue` for this Slurm job. `"return"`:
            `save` returns.
        on_failure: what follows if storage fails a save. `"raise"`: an error on all ranks.
            `"warn"`: it is logged, `save` returns None, and the training goes on.
        check_replicas, allow_pickle, staging_bytes, on_event: as for `shardwise.save`.
        timeout: how long ranks wait for each other, before they raise.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: `save_every` is not positive, an option is unknown, signals cannot be handled
            because this is not the main thread, or there is no Slurm job to requeue.
        StateError: the root is a file.
        CheckpointExistsError: the root is a checkpoint itself, and no `start_from` was given.
        MismatchError: ranks were given different options.
    """

    def __init__(
        self,
        root: api.Place,
        *,
        keep: Keep | None = None,
        save_every: int = 1,
        memory: Memory | None = IN_BACKGROUND,
        start_from: Start | None = None,
        at_end: bool = True,
        save_on: Iterable[signal.Signals] = (),
        then: Then = "deliver",
        on_failure: Literal["raise", "warn"] = "raise",
        check_replicas: bool = False,
        allow_pickle: bool = False,
        staging_bytes: int = DEFAULT_STAGING_BYTES,
        timeout: timedelta = TIMEOUT,
        on_event: Sink | None = None,
    ) -> None:
        check_options(keep, memory, start_from, save_on, then, on_failure)
        self._root = root_of(root, everywhere=memory is not None)
        settings = Settings(
            root=self._root,
            keep=keep or Keep(),
            save_every=whole_number("Checkpointer(save_every", save_every),
            memory=memory,
            check_replicas=check_replicas,
            allow_pickle=allow_pickle,
            staging_bytes=staging_bytes,
            on_event=on_event,
            at_end=at_end,
            on_failure=on_failure,
        )
        self._settings = settings
        self._damaged: set[int] = set()
        self._signals = signals_of(save_on, then)
        self._closed = False
        self._process = os.getpid()
        self.last_restore: RestoreReport | None = None
        self._start_from = start_from
        self._own: TorchGroup | None = None
        try:
            self._own = own_group(timeout)
            self._group: Group = self._own or SoloGroup()
            starts = start_from is not None
            if not open_root(settings, self._signals, self._group, starts=starts):
                memory = None
            self._snapshots = Snapshots(self._root, memory, self._group) if memory else None
        except BaseException:
            self._let_go()
            raise
        self._load = partial(
            api.load,
            allow_pickle=allow_pickle,
            staging_bytes=staging_bytes,
            group=self._group,
            on_event=on_event,
        )
        self._saving = Saving(settings, self._group, self._snapshots, self._damaged)
        _settle_at_exit(weakref.ref(self))

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if os.getpid() == self._process:  # a child that was forked leaves all to its parent
            self._close(wait=kind is None, failed=kind is not None)

    def close(self, *, wait: bool = True) -> None:
        """Let go of what the ranks talk over, and of signals: one that came too late for a save
        takes its course.

        Args:
            wait: until all that was begun is durable. Otherwise the agents go on with it alone.

        Raises:
            StoreError: something that was begun has failed.
            ShardwiseError: this process was forked from the one that made the Checkpointer, whose
                it stays.
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
            self._end(wait=wait, failed=failed)

    def _end(self, *, wait: bool, failed: bool) -> None:
        if not wait:
            self._leave()  # first, as others may be waiting for this rank
        try:
            if wait and self._settings.on_failure == "warn":
                self._saving.report_failures()
            if self._snapshots is not None:
                self._snapshots.close(wait=wait, failed=failed)
        except StoreError as error:
            if self._settings.on_failure == "raise":
                raise
            log.error("not everything is durable: %s", error)
        finally:
            self._saving.close()
            self._let_go()

    def _leave(self) -> None:
        if self._own is not None:
            self._own.close()

    def _settle(self) -> None:
        """Wait until what this rank has begun to save is durable, as the process ends; log what
        has failed."""
        if self._closed or self._snapshots is None:
            return
        try:
            self._snapshots.settle()
        except StoreError as error:
            log.error("not everything is durable: %s", error)

    def _let_go(self) -> None:
        self._leave()
        if self._signals is not None:
            self._signals.stop()

    @property
    def preempted(self) -> bool:
        """Whether a save was made because of a signal, the same on all ranks. The training should
        end then: leave the loop."""
        return self._signals is not None and self._signals.acted

    @property
    def plans(self) -> PlanCache:
        """The plans of its saves, and how often they were used again."""
        return self._saving.plans

    @uncompiled
    def save(
        self,
        step: int,
        state: api.State,
        *,
        metrics: Mapping[str, float] | None = None,
        overwrite: bool = False,
        force: bool = False,
    ) -> SaveHandle | None:
        """Save the state of a step, if it is due; then remove what is no longer kept.

        Args:
            step: the training step, an integer that is not negative.
            state: as for `shardwise.save`.
            metrics: numbers to keep beside it; `Keep(best=…)` chooses by them (give
            `float("nan")` where it was not measured).
            overwrite: replace a checkpoint of this step; without it, that is an error, unless
                `restore` found it to be damaged.
            force: save the step to the root whether it is due or not.

        Returns:
            A handle, or None if the step was not due, there was no slot for its snapshot, or
            storage failed and `on_failure` is "warn".

        Raises:
            StateError: the step is no whole number from 0 on, ranks do not agree on it, or
                `metrics` lacks what `Keep(best=…)` chooses by.
            ShardwiseError: as `shardwise.save` says; or a durable one has failed since.
        """
        self._refuse_closed()
        received = 0 if self._signals is None else self._signals.received(self._group)
        durable = force or received > 0 or self._settings.is_durable(step)
        handle = self._saving.save(step, state, metrics, durable=durable, overwrite=overwrite)
        if received and self._signals is not None:
            self._saving.settle(handle)
            self._signals.finish(received, self._group)
        return handle

    def prepare(self, state: api.State) -> int:
        """Allocate the memory that snapshots of this state take, so that the first finds it there.

        `restore` does so too.

        Returns:
            The bytes that were allocated for this rank.

        Raises:
            StoreError: there is not enough; says what is needed.
        """
        self._refuse_closed()
        return self._saving.prepare(state)

    @uncompiled
    def restore(
        self,
        state: api.State,
        *,
        step: Choice | Literal["best"] = "newest",
        strict: bool = True,
        only: Sequence[str] = (),
        skip: Sequence[str] = (),
        rename: Rename | None = None,
        cast: bool = False,
        spec: Specification | None = None,
    ) -> int | None:
        """Load the newest checkpoint that is intact, or the one that is asked for.

        With `step="newest"`, a damaged checkpoint is passed over for the one before it;
        `last_restore` says why. One that is intact but does not fit the state is an error.

        Where the run has no checkpoint yet, this loads what the run starts from (`start_from`),
        and returns the step of that; or None, to begin at the beginning with its weights, if the
        state has optimizers and none of them was loaded.

        Args:
            state: as for `shardwise.load`.
            step: `"newest"`; `"best"`, which is the best by `Keep(best=…)`; a step; or
                `sw.Best("loss")`.
            strict, only, skip, rename, cast, spec: as for `shardwise.load`. They also hold for a
                place in `start_from`.

        Returns:
            The step to go on from; None to begin at the beginning.

        Raises:
            CheckpointNotFoundError: the chosen checkpoint is not there.
            CorruptionError: all checkpoints are damaged, or the chosen one is. The state may be
                partly written.
            MismatchError: checkpoint and state do not fit.
            StateError: `step="best"` without `Keep(best=…)`.
        """
        self._refuse_closed()

        how = partial(self._load, strict=strict, only=only, skip=skip, rename=rename, cast=cast)

        def load(place: api.Place) -> LoadReport:
            return how(place, state, spec=spec)

        self._saving.forget_last()
        recorder = Recorder(self._settings.on_event)
        restoring = Restoring(self._root, self._group, self._snapshots, self._damaged, recorder)
        report = restoring.restore(step, self._settings.keep.best, load)
        own = begin = report.step if report else None
        if report is None and self._start_from is not None:
            report, begin = load_start(self._start_from, state, load, self._group)
        if self._snapshots is not None:
            with recorder.stage("rebuilding"):
                self._snapshots.go_on_from(own)
                self.prepare(state)
        self.last_restore = report and replace(report, seconds=recorder.seconds())
        return begin

    def best(self) -> int | None:
        """The committed step that is best by `Keep(best=…)`, if any has that metric.

        Any rank may ask alone.

        Raises:
            StateError: this Checkpointer has no `Keep(best=…)`.
        """
        rule = chosen("best", self._settings.keep.best)
        try:
            return choose_step(self._root, rule)
        except CheckpointNotFoundError:
            return None

    def steps(self) -> list[int]:
        """The steps that are committed, ascending. Any rank may ask alone."""
        return committed_steps(self._root)

    def latest(self) -> int | None:
        """The newest committed step, if there is any."""
        return max(self.steps(), default=None)

    def _refuse_forked(self) -> None:
        if os.getpid() != self._process:
            raise ShardwiseError(
                f"the Checkpointer of {self._root} was made by process {self._process}, and this "
                f"is a forked child, process {os.getpid()}, which has none of its threads: save "
                "and restore in the parent, or make a Checkpointer of another root here"
            )

    def _refuse_closed(self) -> None:
        self._refuse_forked()
        if self._closed:
            raise ShardwiseError(f"the Checkpointer of {self._root} is closed")


def _settle_at_exit(reference: weakref.ref[Checkpointer]) -> None:
    process = os.getpid()

    def settle() -> None:
        checkpointer = reference()
        if checkpointer is not None and os.getpid() == process:  # not a child that was forked
            checkpointer._settle()

    atexit.register(settle)
