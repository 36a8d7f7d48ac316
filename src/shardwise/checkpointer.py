"""When to save, where, what to keep, and what to restore."""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Literal

import msgspec
import torch.distributed as dist

from shardwise import api
from shardwise.engine.arena import DEFAULT_MAX_BUFFER
from shardwise.engine.exchange import exchange
from shardwise.engine.group import Group, SoloGroup, TorchGroup, own_process_group
from shardwise.engine.leftovers import collect_leftovers
from shardwise.engine.load import LoadReport
from shardwise.engine.options import SaveOptions
from shardwise.engine.save import SaveReport
from shardwise.errors import (
    CheckpointNotFoundError,
    CorruptionError,
    MismatchError,
    RankError,
    ShardwiseError,
    StateError,
)
from shardwise.events import Sink
from shardwise.manifest.names import step_directory, step_of_directory
from shardwise.plan.cache import PlanCache
from shardwise.retention import Keep, apply_retention, committed_steps
from shardwise.store import open_store

_DAMAGE = (CorruptionError, CheckpointNotFoundError)


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What a restore did: the step, how it was loaded, and why nothing newer was (step, reason)."""

    step: int
    load: LoadReport
    skipped: tuple[tuple[int, str], ...]


class SaveHandle:
    """A save that was begun."""

    def __init__(self, report: SaveReport) -> None:
        self._report = report

    def done(self) -> bool:
        """Whether it is durable, or has failed."""
        return True

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait until it is durable, for at most `timeout` seconds."""
        return self._report


class Checkpointer:
    """The checkpoints of one run, below one root: saved at intervals, kept by rule, restored.

    All ranks make one together, and call its methods together.

    Args:
        root: a directory, or a store; each step has a directory of its own below it.
        keep: which checkpoints to keep.
        every: `save` does nothing at steps that are not a multiple of this.
        on_sigterm: `"save"`: after SIGTERM on any rank, the next `save` saves whatever its step,
            and then lets the signal take its course.
        check_replicas, allow_pickle, max_buffer, on_event: as for `shardwise.save`.
        timeout: how long ranks wait for each other, before they raise.

    Raises:
        ValueError: `every` is not positive, `on_sigterm` is unknown, or cannot be had outside of
            the main thread.
    """

    def __init__(
        self,
        root: api.Place,
        *,
        keep: Keep | None = None,
        every: int = 1,
        on_sigterm: Literal["save"] | None = None,
        check_replicas: bool = False,
        allow_pickle: bool = False,
        max_buffer: int = DEFAULT_MAX_BUFFER,
        timeout: timedelta = api.TIMEOUT,
        on_event: Sink | None = None,
    ) -> None:
        if type(every) is not int or every < 1:
            raise ValueError(f"every={every!r}: a whole number from 1 on is needed")
        if on_sigterm not in (None, "save"):
            raise ValueError(f"on_sigterm={on_sigterm!r}: 'save' or None is needed")
        self._root = open_store(root)
        self._keep = keep or Keep()
        self._every = every
        self._check_replicas = check_replicas
        self._allow_pickle = allow_pickle
        self._max_buffer = max_buffer
        self._on_event = on_event
        self._plans = PlanCache()
        self._damaged: set[int] = set()
        self._own = own_process_group(timeout)
        self._group: Group = SoloGroup() if self._own is None else TorchGroup(self._own)
        self._preemption = _Preemption() if on_sigterm == "save" else None
        self._closed = False
        self.last_restore: RestoreReport | None = None
        exchange(self._group, "opening a root", lambda: b"", self._collect)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of what the ranks talk over, and of signals: one that came too late for a save
        takes its course."""
        self._closed = True
        preemption, self._preemption = self._preemption, None
        if self._own is not None and dist.is_initialized():
            dist.destroy_process_group(self._own)
        self._own = None
        if preemption is not None:
            preemption.stop()

    @property
    def plans(self) -> PlanCache:
        """The plans of its saves, and how often they were used again."""
        return self._plans

    def save(
        self,
        step: int,
        state: api.State,
        *,
        metrics: Mapping[str, float] | None = None,
        overwrite: bool = False,
    ) -> SaveHandle | None:
        """Save the state of a step, if it is due; then remove what is no longer kept.

        Args:
            step: the training step, not negative.
            state: as for `shardwise.save`.
            metrics: numbers to keep beside it; `Keep(best=…)` chooses by them (give
            `float("nan")` where it was not measured).
            overwrite: replace a checkpoint of this step; without it, that is an error, unless
                `restore` found it to be damaged.

        Returns:
            A handle, or None if the step was not due.

        Raises:
            StateError: the step is no whole number from 0 on, ranks do not agree on it, or
                `metrics` lacks what `Keep(best=…)` chooses by.
            ShardwiseError: as `shardwise.save` says.
        """
        preempted = self._agree_on_save(step, metrics)
        if step % self._every and not preempted:
            return None
        report = api.save(
            self._root.at(step_directory(step)),
            state,
            step=step,
            overwrite=overwrite or step in self._damaged,
            check_replicas=self._check_replicas,
            metrics=metrics,
            allow_pickle=self._allow_pickle,
            max_buffer=self._max_buffer,
            group=self._group,
            plans=self._plans,
            on_event=self._on_event,
        )
        self._damaged.discard(step)
        self._retain(step)
        if preempted and self._preemption is not None:
            self._preemption.deliver()
        return SaveHandle(report)

    def restore(
        self, state: api.State, *, step: int | None = None, strict: bool = True
    ) -> int | None:
        """Load the newest checkpoint that is intact, or that of one step.

        A checkpoint that is damaged is passed over for the one before it; `last_restore` says
        why. One that is intact but does not fit the state is an error.

        Args:
            state: as for `shardwise.load`.
            step: load this step, or fail.
            strict: as for `shardwise.load`.

        Returns:
            The step, or None if the root holds no checkpoint.

        Raises:
            CheckpointNotFoundError: `step` was given, and is not there.
            CorruptionError: there are checkpoints, and all are damaged. The state may be partly
                written.
            MismatchError: checkpoint and state do not fit.
        """
        self._refuse_closed()
        committed = self._agreed_steps(step)
        if step is not None and step not in committed:
            raise CheckpointNotFoundError(f"{self._root} has no checkpoint of step {step}")
        candidates = committed if step is None else [step]
        skipped: list[tuple[int, str]] = []
        for candidate in reversed(candidates):
            report, reason = self._try_load(candidate, state, strict=strict)
            if report is not None:
                self.last_restore = RestoreReport(candidate, report, tuple(skipped))
                return candidate
            self._damaged.add(candidate)
            skipped.append((candidate, reason))
        if not skipped:
            return None
        reasons = "\n".join(f"  - step {number}: {reason}" for number, reason in skipped)
        raise CorruptionError(f"no checkpoint below {self._root} is intact:\n{reasons}")

    def steps(self) -> list[int]:
        """The steps that are committed, ascending. Any rank may ask alone."""
        return committed_steps(self._root)

    def latest(self) -> int | None:
        """The newest of them, if there is any."""
        return next(reversed(self.steps()), None)

    def _try_load(
        self, step: int, state: api.State, *, strict: bool
    ) -> tuple[LoadReport | None, str]:
        """Load a step on all ranks; the reason if it is damaged on any."""
        report: LoadReport | None = None
        failure: Exception | None = None
        try:
            report = api.load(
                self._root.at(step_directory(step)),
                state,
                strict=strict,
                allow_pickle=self._allow_pickle,
                max_buffer=self._max_buffer,
                group=self._group,
                on_event=self._on_event,
            )
        except Exception as error:  # it is raised again once the other ranks know
            failure = error

        def speak() -> bytes:
            damage = str(failure) if isinstance(failure, _DAMAGE) else ""
            other = failure is not None and not isinstance(failure, (*_DAMAGE, RankError))
            return msgspec.msgpack.encode((damage, other))

        def answer(said: list[bytes]) -> bytes:
            heard = [msgspec.msgpack.decode(each, type=tuple[str, bool]) for each in said]
            damage = next((text for text, _ in heard if text), "")
            return b"" if any(other for _, other in heard) else damage.encode()

        reason = exchange(self._group, "restoring", speak, answer).decode()
        if failure is not None and not reason:
            raise failure
        return report, reason

    def _agreed_steps(self, wanted: int | None) -> list[int]:
        """The steps that are committed; all ranks want the same one of them, or none."""

        def answer(said: list[bytes]) -> bytes:
            _refuse_unlike([msgspec.msgpack.decode(each) for each in said])
            return msgspec.msgpack.encode(self.steps())

        reply = exchange(
            self._group, "listing steps", lambda: msgspec.msgpack.encode(wanted), answer
        )
        return msgspec.msgpack.decode(reply, type=list[int])

    def _agree_on_save(self, step: int, metrics: Mapping[str, float] | None) -> bool:
        """All save the same step; whether any rank was told to end."""
        self._refuse_closed()

        def speak() -> bytes:
            checked = SaveOptions.checked(step, False, False, metrics)
            if self._keep.best is not None and self._keep.best not in checked.metrics:
                raise StateError(
                    f"metrics= has no {self._keep.best!r}, which Keep chooses by; "
                    'give float("nan") if it was not measured'
                )
            pending = self._preemption is not None and self._preemption.pending
            return msgspec.msgpack.encode((checked.step, pending))

        def answer(said: list[bytes]) -> bytes:
            heard = [msgspec.msgpack.decode(each, type=tuple[int, bool]) for each in said]
            _refuse_unlike([number for number, _ in heard])
            return b"1" if any(pending for _, pending in heard) else b""

        return bool(exchange(self._group, "beginning a save", speak, answer))

    def _retain(self, newest: int) -> None:
        def answer(_: list[bytes]) -> bytes:
            damaged = frozenset(self._damaged)
            apply_retention(self._root, self._keep, newest=newest, damaged=damaged)
            return b""

        exchange(self._group, "removing old checkpoints", lambda: b"", answer)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ShardwiseError(f"the Checkpointer of {self._root} is closed")

    def _collect(self, _: list[bytes]) -> bytes:
        for name in self._root.list():
            if step_of_directory(name) is not None:
                store = self._root.at(name)
                with suppress(OSError):  # a root that is only read has leftovers too
                    collect_leftovers(store)
                    store.remove()  # if it is empty
        return b""


def _refuse_unlike(steps: Sequence[object]) -> None:
    if any(step != steps[0] for step in steps):
        asked = [f"rank {rank}: step {step}" for rank, step in enumerate(steps)]
        raise MismatchError("ranks do not mean the same step:", asked)


class _Preemption:
    """SIGTERM, put off until there was time to save."""

    def __init__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("on_sigterm: only the main thread can be told of signals")
        self.pending = False
        self._stopped = False
        self._handler = self._note  # one bound method, to be known again
        self._before = signal.signal(signal.SIGTERM, self._handler) or signal.SIG_DFL

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.pending = True
        if self._stopped:  # another handler, installed after this one, has given it back
            self._pass_on()

    def stop(self) -> None:
        """Handle the signal as before, and one that waits at once."""
        self._stopped = True
        if signal.getsignal(signal.SIGTERM) is self._handler:
            signal.signal(signal.SIGTERM, self._before)
        if self.pending:
            self._pass_on()

    def _pass_on(self) -> None:
        self.pending = False
        if signal.getsignal(signal.SIGTERM) is self._handler:
            signal.signal(signal.SIGTERM, self._before)
        signal.raise_signal(signal.SIGTERM)

    def deliver(self) -> None:
        """Let the signal take its course now, on every rank."""
        self.pending = True
        self.stop()
