"""Restoring: load the newest intact step from memory or storage."""

from __future__ import annotations

import logging
import operator
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from shardwise import api
from shardwise.adapters import torch_optimizers_in
from shardwise.engine.exchange import exchange
from shardwise.engine.group import Group
from shardwise.engine.load import LoadReport
from shardwise.errors import (
    CheckpointNotFoundError,
    CorruptionError,
    MismatchError,
    RankError,
    ShardwiseError,
    StateError,
    add_note,
    describe_error,
)
from shardwise.events import Recorder
from shardwise.loading import State
from shardwise.manifest.names import step_directory
from shardwise.memory.remote.assembled import IN_MEMORY, AssembledStore
from shardwise.memory.trainer.recovery import Found, find_snapshot
from shardwise.memory.trainer.snapshots import Snapshots
from shardwise.retention import Best, Choice, checked_choice, choose_step, committed_steps
from shardwise.store import Store

log = logging.getLogger("shardwise")
_DAMAGE = (CorruptionError, CheckpointNotFoundError)
Load = Callable[[Store], LoadReport]
Skipped = tuple[int, str, bool]
"""A step, why it was skipped, and whether a load of it failed."""


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """The result of `Checkpointer.restore`.

    Attributes:
        step: the step of the checkpoint that was loaded, if it has one.
        source: "memory", "storage", or "start" (from `Checkpointer(start_from=…)`).
        load: the report of the load.
        skipped: newer steps, each with the reason why it was not loaded.
        unasked: nodes of the run that could not be asked, each with the reason, if they may hold
            a newer step.
        origins: bytes that this rank read from "local memory", from the memory of "other nodes",
            "decoded" from the parity of a lost node, and from "storage". For memory, checksums
            and per-rank values are included.
        seconds: the time of each phase on this rank, and `total`. The phases: "asking" the nodes
            and the root which steps they hold; "choosing" the newest complete step; "reading" it;
            "decoding" data of lost nodes (not part of reading); "rebuilding": discarding newer
            steps and allocating memory for the next snapshots.
    """

    step: int | None
    source: str
    load: LoadReport
    skipped: tuple[tuple[int, str], ...]
    origins: dict[str, int]
    seconds: dict[str, float] = field(default_factory=dict)
    unasked: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        step = "no step" if self.step is None else f"step {self.step}"
        skipped = [f"skipped step {number}: {why}" for number, why in self.skipped]
        unasked = [f"could not ask node {node}: {why}" for node, why in self.unasked.items()]
        source = f"restored {step} from {self.source}"
        return "; ".join([source, str(self.load), *skipped, *unasked])


Start = api.Place | Callable[[State], LoadReport]


def chosen(step: object, best: Best | None) -> Choice:
    """Return the choice that `step=` of `restore` stands for; "best" stands for the rule `best`.

    Raises:
        StateError: `step` is invalid, or it is "best" and there is no rule.
    """
    if step == "best" and best is None:
        raise StateError(
            'step="best" needs a rule: pass keep=sw.Keep(best=sw.Best("loss")) to the '
            'Checkpointer, or step=sw.Best("loss")'
        )
    return checked_choice(best if step == "best" else step)


def load_start(
    start: Start, state: State, load: Callable[[api.Place], LoadReport], group: Group
) -> tuple[RestoreReport, int | None]:
    """Load `start_from`. All ranks call this together.

    Returns:
        The report, and the step to continue from. The step is None if the state has optimizers and
        none of them was loaded: then the training starts anew.

    Raises:
        StateError: the function `start` did not return the report of `shardwise.load`.
    """
    loaded = _call(start, state) if callable(start) else load(start)

    def speak() -> bytes:
        if not isinstance(loaded, LoadReport):
            raise StateError(f"start_from returned {loaded!r}: expected the report of sw.load")
        optimizers = any(True for _ in torch_optimizers_in(state))
        return b"1" if loaded.optimizers or not optimizers else b""

    carries_on = exchange(group, "starting from another run", speak, max)
    report = RestoreReport(loaded.step, "start", loaded, (), origins_of(loaded))
    return report, loaded.step if carries_on else None


def _call(start: Callable[[State], LoadReport], state: State) -> LoadReport:
    try:
        return start(state)
    except Exception as error:
        add_note(error, "start_from: raised by this function, which was called with the state")
        raise


def origins_of(load: LoadReport, memory: AssembledStore | None = None) -> dict[str, int]:
    """Return the bytes of a load by origin; `memory` is the snapshot that was loaded, if any."""
    if memory is None:
        return {**dict.fromkeys(IN_MEMORY, 0), "storage": load.bytes_read}
    return {**memory.origins(), "storage": 0}


class Restoring:
    """Restores checkpoints of a root and snapshots of a run. All ranks call its methods together.

    Args:
        root: root of the checkpoints.
        group: the ranks.
        snapshots: snapshots of the run in memory, if it has any.
        damaged: set to which the steps of damaged checkpoints are added.
        recorder: records the time of each phase.
    """

    def __init__(
        self,
        root: Store,
        group: Group,
        snapshots: Snapshots | None,
        damaged: set[int],
        recorder: Recorder,
    ) -> None:
        self._root = root
        self._group = group
        self._snapshots = snapshots
        self._damaged = damaged
        self._recorder = recorder

    def restore(self, step: object, best: Best | None, load: Load) -> RestoreReport | None:
        """Load the newest intact checkpoint, or the selected one.

        Args:
            step: the user's `step=`.
            best: rule for `step="best"`.
            load: loads a checkpoint from a store.

        Returns:
            The report; None if `step` is "newest" and there is no checkpoint.

        Raises:
            StateError: `step` is invalid.
            CheckpointNotFoundError: the selected checkpoint does not exist.
            CorruptionError: all checkpoints are damaged, or the selected one is.
        """
        choices: list[Choice] = []

        def speak() -> bytes:
            choices.append(chosen(step, best))
            return repr(choices[0]).encode()

        def answer(said: list[bytes]) -> bytes:
            if len(set(said)) > 1:
                asked = [f"rank {rank}: step={each.decode()}" for rank, each in enumerate(said)]
                raise MismatchError("ranks asked to restore different steps:", asked)
            if isinstance(choices[0], Best):
                return msgspec.msgpack.encode([choose_step(self._root, choices[0])])
            return msgspec.msgpack.encode(committed_steps(self._root))

        with self._recorder.stage("asking"):
            reply = exchange(self._group, "listing steps", speak, answer)
        steps = msgspec.msgpack.decode(reply, type=list[int])
        choice = choices[0]
        if choice == "newest":
            return self._newest(steps, load)
        number = steps[0] if isinstance(choice, Best) else operator.index(choice)
        return self._of_step(number, [each for each in steps if each == number], load)

    def _newest(self, steps: list[int], load: Load) -> RestoreReport | None:
        report, skipped = self._first_intact(steps, None, load)
        if report is None and any(tried for _, _, tried in skipped):
            raise self._all_damaged(skipped)
        if report is None and skipped:
            reasons = "; ".join(f"step {number}: {reason}" for number, reason, _ in skipped)
            warnings.warn(f"nothing can be restored: {reasons}", RuntimeWarning, stacklevel=4)
        return report

    def _of_step(self, step: int, stored: list[int], load: Load) -> RestoreReport:
        is_stored = bool(stored)
        report, skipped = self._first_intact(stored, step, load)
        if report is None and not is_stored:
            why = "".join(f"; {reason}" for _, reason, _ in skipped)
            raise CheckpointNotFoundError(f"{self._root} has no checkpoint of step {step}{why}")
        if report is None:
            raise self._all_damaged(skipped)
        return report

    def _first_intact(
        self, stored: list[int], step: int | None, load: Load
    ) -> tuple[RestoreReport | None, list[Skipped]]:
        found = self._find(step)
        skipped: list[Skipped] = [(number, reason, False) for number, reason in found.newer]
        while stored or found.store is not None:
            store: Store
            if found.store is not None and (not stored or found.step >= stored[-1]):
                number, store, source = found.step, found.store, "memory"
            else:
                number = stored.pop()
                store, source = self._root.at(step_directory(number)), "storage"
            start = time.perf_counter()
            report, reason = self._try(load, store)
            took = time.perf_counter() - start
            decoding = store.seconds_decoding() if isinstance(store, AssembledStore) else 0.0
            self._recorder.add("decoding", decoding)
            self._recorder.add("reading", took - decoding)
            if report is not None:
                newer = tuple((each, why) for each, why, _ in skipped if each >= number)
                origins = origins_of(report, found.store if source == "memory" else None)
                restored = RestoreReport(number, source, report, newer, origins)
                return replace(restored, unasked=found.unasked), skipped
            skipped.append((number, f"{source}: {reason}", True))
            if source == "storage":
                self._damaged.add(number)
            else:
                found = self._find(step, found)
        return None, skipped

    def _try(self, load: Load, store: Store) -> tuple[LoadReport | None, str]:
        """Load a checkpoint on all ranks. Return no report, but the reason, if it is damaged."""
        report: LoadReport | None = None
        failure: Exception | None = None
        try:
            report = load(store)
        except Exception as error:  # raised again after the exchange
            failure = error

        def speak() -> bytes:
            damage = other = ""
            if isinstance(failure, _DAMAGE):
                damage = str(failure)
            elif failure is not None and not isinstance(failure, RankError):
                other = describe_error(failure)
            return msgspec.msgpack.encode((damage, other))

        def answer(said: list[bytes]) -> bytes:
            heard = [msgspec.msgpack.decode(each, type=tuple[str, str]) for each in said]
            failed = {rank: other for rank, (_, other) in enumerate(heard) if other}
            damage = next((text for text, _ in heard if text), "")
            return msgspec.msgpack.encode(("" if failed else damage, failed))

        reply = exchange(self._group, "restoring", speak, answer)
        reason, failed = msgspec.msgpack.decode(reply, type=tuple[str, dict[int, str]])
        if failure is not None and not reason:
            raise failure
        if failed:
            raise RankError("restoring", failed)
        return (None if reason else report), reason

    def _find(self, step: int | None, damaged: Found | None = None) -> Found:
        if self._snapshots is None:
            return Found(-1, None, [])
        start = time.perf_counter()
        found = find_snapshot(self._snapshots, self._group, step=step, damaged=damaged)
        if found.unasked and step is None and self._group.rank == 0:
            nodes = "; ".join(f"{node}: {why}" for node, why in found.unasked.items())
            log.warning(
                "some nodes of this run did not say which snapshots they hold (%s). Steps there "
                "that are newer than the step restored now will be discarded",
                nodes,
            )
        self._recorder.add("choosing", found.choosing)
        self._recorder.add("asking", time.perf_counter() - start - found.choosing)
        return found

    def _all_damaged(self, skipped: Sequence[Skipped]) -> ShardwiseError:
        reasons = "\n".join(f"  - step {number}: {reason}" for number, reason, _ in skipped)
        return CorruptionError(f"no checkpoint below {self._root} is intact:\n{reasons}")
