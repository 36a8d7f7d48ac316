"""Restoring: load the newest intact step from memory or storage."""

from __future__ import annotations

import logging
import operator
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice

import msgspec

from shardwise.engine.exchange import exchange, exchange_with_local_value, require_equal
from shardwise.engine.group import Group
from shardwise.engine.load import LoadReport
from shardwise.errors import (
    CheckpointNotFoundError,
    CorruptionError,
    RankError,
    StateError,
    describe_error,
)
from shardwise.events import Recorder
from shardwise.manifest.names import MANIFEST, step_directory
from shardwise.memory.prefetched import prefetched_files
from shardwise.memory.remote.assembled import MEMORY_ORIGINS, AssembledStore
from shardwise.memory.trainer.recovery import FoundSnapshot, find_snapshot
from shardwise.memory.trainer.snapshots import Snapshots
from shardwise.retention import Best, Choice, choose_step, committed_steps, parse_choice
from shardwise.store import Store
from shardwise.tiers.store import MIRROR, ROOT, TIERS, TieredStore

MOST_NODES_SHOWN = 3
START = "start"
Load = Callable[[Store], LoadReport]
"""Loads the state from a store."""

log = logging.getLogger("shardwise")
_DAMAGE_ERRORS = (CorruptionError, CheckpointNotFoundError)


@dataclass(frozen=True, slots=True)
class _SkippedStep:
    """A step that was not restored.

    Attributes:
        step: the step.
        reason: the reason why the step was skipped.
        was_tried: whether a load of the step was tried and failed.
    """

    step: int
    reason: str
    was_tried: bool = False


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """The result of `Checkpointer.restore`.

    Attributes:
        step: the step of the checkpoint that was loaded; None if the checkpoint has no step.
        source: "memory", "storage", or "start" (from `Checkpointer(start_from=…)`).
        load: the report of the load.
        skipped: newer steps, each with the reason why it was not loaded.
        origins: bytes that this rank read from "local memory", from the memory of "other nodes",
            "decoded" from the parity of a lost node, from files that the agent has "prefetched",
            from the "root", from its "mirror", and from the "start" (`start_from`). Unless the root
            or the start gave all, checksums, per-rank values and damaged bytes are included.
        seconds: seconds of each phase on this rank, and `total`. The phases are "asking" the nodes
            and the root which steps they hold; "choosing" the newest complete step; "reading" the
            step; "decoding" data of lost nodes, which "reading" does not include; and
            "rebuilding": discarding newer steps and allocating memory for the next snapshots.
        unanswered: the nodes that did not answer and may hold a newer step, each with the reason.
    """

    step: int | None
    source: str
    load: LoadReport
    skipped: tuple[tuple[int, str], ...]
    origins: dict[str, int]
    seconds: dict[str, float] = field(default_factory=dict)
    unanswered: dict[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<RestoreReport of step {self.step} from {self.source}>"

    def __str__(self) -> str:
        step = "no step" if self.step is None else f"step {self.step}"
        skipped = [f"skipped step {number}: {why}" for number, why in self.skipped]
        unanswered = [f"could not ask node {node}: {why}" for node, why in self.unanswered.items()]
        source = f"restored {step} from {self.source}"
        return "; ".join([source, str(self.load), *skipped, *unanswered])


def resolve_choice(step: object, best: Best | None) -> Choice:
    """Return the choice that `step=` of `restore` stands for.

    Args:
        step: the user's `step=`.
        best: the rule that `step="best"` stands for; None if there is none.

    Raises:
        StateError: `step` is invalid, or it is "best" and there is no rule.
    """
    if step == "best" and best is None:
        raise StateError(
            'step="best" needs a rule: pass keep=sw.Keep(best=sw.Best("loss")) to the '
            'Checkpointer, or step=sw.Best("loss")'
        )
    return parse_choice(best if step == "best" else step)


def bytes_by_origin(load: LoadReport, store: Store | None) -> dict[str, int]:
    """Return the bytes of a load by origin; `store` is None if `start_from` was loaded."""
    origins = dict.fromkeys((*MEMORY_ORIGINS, *TIERS, START), 0)
    if isinstance(store, (AssembledStore, TieredStore)):
        return {**origins, **store.origins()}
    return {**origins, START if store is None else ROOT: load.bytes_read}


class Restoring:
    """Restores checkpoints of a root and snapshots of a run. All ranks call its methods together.

    Args:
        root: the root of the checkpoints.
        group: the ranks.
        snapshots: the snapshots of the run in memory, if there are any.
        damaged: set to which the steps of damaged checkpoints are added.
        recorder: records the time of each phase.
        suspect: called with a step of which parts were read from the mirror.
    """

    def __init__(
        self,
        root: Store,
        group: Group,
        snapshots: Snapshots | None,
        damaged: set[int],
        recorder: Recorder,
        suspect: Callable[[int], None] = lambda step: None,
    ) -> None:
        self._root = root
        self._group = group
        self._snapshots = snapshots
        self._damaged = damaged
        self._recorder = recorder
        self._suspect = suspect

    def restore(self, step: object, best: Best | None, load: Load) -> RestoreReport | None:
        """Load the newest intact checkpoint, or the selected one.

        Args:
            step: the user's `step=`.
            best: the rule that `step="best"` stands for.
            load: loads a checkpoint from a store.

        Returns:
            The report; None if `step` is "newest" and there is no checkpoint.

        Raises:
            StateError: `step` is invalid.
            MismatchError: ranks selected different steps.
            CheckpointNotFoundError: the selected checkpoint does not exist.
            CorruptionError: all checkpoints are damaged, or the selected one is.
        """

        def encode_choice() -> tuple[Choice, bytes]:
            choice = resolve_choice(step, best)
            return choice, repr(choice).encode()

        def list_steps(choice: Choice, choices: list[bytes]) -> bytes:
            require_equal(
                [f"step={each.decode()}" for each in choices],
                "ranks asked to restore different steps:",
            )
            if isinstance(choice, Best):
                return msgspec.msgpack.encode([choose_step(self._root, choice)])
            return msgspec.msgpack.encode(committed_steps(self._root))

        with self._recorder.stage("asking"):
            choice, reply = exchange_with_local_value(
                self._group, "listing steps", encode_choice, list_steps
            )
        stored_steps = msgspec.msgpack.decode(reply, type=list[int])
        if choice == "newest":
            return self._restore_newest(stored_steps, load)
        selected = stored_steps[0] if isinstance(choice, Best) else operator.index(choice)
        return self._restore_step(selected, stored_steps, load)

    def _restore_newest(self, stored_steps: list[int], load: Load) -> RestoreReport | None:
        report, skipped = self._load_first_intact(stored_steps, None, load)
        if report is None and any(each.was_tried for each in skipped):
            raise self._none_is_intact(skipped)
        if report is None and skipped:
            reasons = "; ".join(f"step {each.step}: {each.reason}" for each in skipped)
            warnings.warn(f"nothing can be restored: {reasons}", RuntimeWarning, stacklevel=4)
        return report

    def _restore_step(self, step: int, stored_steps: list[int], load: Load) -> RestoreReport:
        matching_steps = [each for each in stored_steps if each == step]
        report, skipped = self._load_first_intact(matching_steps, step, load)
        if report is None and step not in stored_steps:
            reasons = "".join(f"; {each.reason}" for each in skipped)
            newest = ", ".join(map(str, stored_steps[-5:])) or "none"
            raise CheckpointNotFoundError(
                f"{self._root} has no checkpoint of step {step} (newest steps: {newest}){reasons}"
            )
        if report is None:
            raise self._none_is_intact(skipped, f"of step {step} ")
        return report

    def _load_first_intact(
        self, stored_steps: list[int], step: int | None, load: Load
    ) -> tuple[RestoreReport | None, list[_SkippedStep]]:
        """Load the newest step that is intact, from memory or storage.

        Args:
            stored_steps: the steps in storage that may be loaded, ascending. Each step that is
                tried is removed from the list.
            step: load only this step.
            load: loads a checkpoint from a store.

        Returns:
            The report, None if no step is intact; and the steps that were skipped.
        """
        found = self._find_snapshot(step)
        skipped = [_SkippedStep(number, reason) for number, reason in found.skipped]
        while stored_steps or found.store is not None:
            store: Store
            if found.store is not None and (not stored_steps or found.step >= stored_steps[-1]):
                number, store, source = found.step, found.store, "memory"
            else:
                number = stored_steps.pop()
                store, source = self._in_storage(number), "storage"
            report, damage = self._try(load, store, number)
            earlier = None if report or source == "memory" else self._find_earlier_save(number)
            if earlier is not None:
                skipped.append(_SkippedStep(number, f"{source}: {damage}", was_tried=True))
                store = earlier
                report, damage = self._try(load, store, number)
            if report is not None:
                newer = tuple((each.step, each.reason) for each in skipped if each.step >= number)
                origins = bytes_by_origin(report, store)
                restored = RestoreReport(number, source, report, newer, origins)
                return replace(restored, unanswered=found.unanswered), skipped
            skipped.append(_SkippedStep(number, f"{source}: {damage}", was_tried=True))
            if source == "storage":
                self._damaged.add(number)
            else:
                found = self._find_snapshot(step, found)
        return None, skipped

    def _in_storage(self, step: int) -> Store:
        """Return a step in storage, with the files that the agent of this node has prefetched."""
        store = self._root.at(step_directory(step))
        files = None if self._snapshots is None else prefetched_files(self._snapshots.run)
        if files is None:
            return store
        tiers = store if isinstance(store, TieredStore) else TieredStore([store], [ROOT])
        return tiers.with_prefetched(files)

    def _try(self, load: Load, store: Store, step: int) -> tuple[LoadReport | None, str]:
        """Load a checkpoint on all ranks, and record the time. Return report and damage."""
        start = time.perf_counter()
        with ExitStack() as locks:
            if isinstance(store, AssembledStore):  # a load locks storage itself, on one rank
                locks.enter_context(store.hold(MANIFEST, shared=True))
            report, damage, is_mirrored = self._load_on_all(load, store)
        seconds = time.perf_counter() - start
        decoding = store.seconds_decoding() if isinstance(store, AssembledStore) else 0.0
        self._recorder.add("decoding", decoding)
        self._recorder.add("reading", seconds - decoding)
        if is_mirrored:
            self._suspect(step)
        return report, damage

    def _find_earlier_save(self, step: int) -> TieredStore | None:
        """Return the mirror's save of a step, if the root has another. All ranks call this."""
        if not isinstance(self._root, TieredStore):
            return None
        tiers = self._root.at(step_directory(step))

        def find(_: list[bytes]) -> bytes:
            return b"1" if tiers.has_other_save() else b""

        if not exchange(self._group, "looking for an earlier save", lambda: b"", find):
            return None
        self._damaged.add(step)
        earlier = tiers.mirror_alone()
        if self._group.rank == 0:
            log.warning("step %d was saved again; trying its earlier save in %s", step, earlier)
        return earlier

    def _load_on_all(self, load: Load, store: Store) -> tuple[LoadReport | None, str, bool]:
        """Load a checkpoint on all ranks.

        Returns:
            The report, and ""; or None and the damage, if the checkpoint is damaged on any rank.
            The third value is whether any rank read from the mirror.
        """
        report: LoadReport | None = None
        failure: Exception | None = None
        try:
            report = load(store)
        except Exception as error:  # raised again after the exchange
            failure = error

        def encode_failure() -> bytes:
            damage = other = ""
            if isinstance(failure, _DAMAGE_ERRORS):
                damage = str(failure)
            elif failure is not None and not isinstance(failure, RankError):
                other = describe_error(failure)
            mirrored = store.origins().get(MIRROR, 0) if isinstance(store, TieredStore) else 0
            return msgspec.msgpack.encode((damage, other, mirrored > 0))

        def combine_failures(encoded: list[bytes]) -> bytes:
            ranks = [msgspec.msgpack.decode(each, type=tuple[str, str, bool]) for each in encoded]
            others = {rank: other for rank, (_, other, _) in enumerate(ranks) if other}
            damage = next((damage for damage, _, _ in ranks if damage), "")
            is_mirrored = any(each for _, _, each in ranks)
            return msgspec.msgpack.encode(("" if others else damage, others, is_mirrored))

        reply = exchange(self._group, "restoring", encode_failure, combine_failures)
        reply_type = tuple[str, dict[int, str], bool]
        damage, others, is_mirrored = msgspec.msgpack.decode(reply, type=reply_type)
        if failure is not None and not damage:
            raise failure
        if others:
            raise RankError("restoring", others)
        return (None if damage else report), damage, is_mirrored

    def _find_snapshot(
        self, step: int | None, damaged: FoundSnapshot | None = None
    ) -> FoundSnapshot:
        if self._snapshots is None:
            return FoundSnapshot(-1, None, [])
        start = time.perf_counter()
        found = find_snapshot(self._snapshots, self._group, step=step, damaged=damaged)
        if found.unanswered and step is None and self._group.rank == 0:
            log.warning(
                "%d nodes of this run did not say which snapshots they hold (%s). Steps there "
                "that are newer than the step restored now will be discarded",
                len(found.unanswered),
                _describe_first_nodes(found.unanswered),
            )
        self._recorder.add("choosing", found.choosing_seconds)
        self._recorder.add("asking", time.perf_counter() - start - found.choosing_seconds)
        return found

    def _none_is_intact(
        self, skipped: Sequence[_SkippedStep], of_step: str = ""
    ) -> CorruptionError:
        reasons = "\n".join(f"  - step {each.step}: {each.reason}" for each in skipped)
        advice = "restore another step" if of_step else "restore from a mirror or another copy"
        return CorruptionError(
            f"no checkpoint {of_step}below {self._root} is intact; {advice}:\n{reasons}"
        )


def _describe_first_nodes(reasons: Mapping[str, str]) -> str:
    """Return the first few nodes with their reasons, and the number of the others."""
    shown = [f"{node}: {reason}" for node, reason in islice(reasons.items(), MOST_NODES_SHOWN)]
    if len(reasons) > len(shown):
        shown.append(f"and {len(reasons) - len(shown)} more")
    return "; ".join(shown)
