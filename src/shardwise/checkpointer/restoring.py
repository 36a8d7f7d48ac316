"""Restoring: load the newest intact step from memory or storage."""

from __future__ import annotations

import heapq
import logging
import operator
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from shardwise.checkpointer.saver import Saver
from shardwise.checkpointer.settings import Settings
from shardwise.kernel.decoding import prepare_decoding
from shardwise.kernel.engine.group import Group
from shardwise.kernel.engine.load import LoadReport
from shardwise.kernel.engine.root import Best, Choice, Root, parse_choice
from shardwise.kernel.engine.rounds import MOST_FAILURES, Round, unite
from shardwise.kernel.errors import (
    CheckpointNotFoundError,
    CorruptionError,
    RankError,
    describe_error,
)
from shardwise.kernel.events import Recorder
from shardwise.kernel.store import Store
from shardwise.parts.lineage import RootClaim
from shardwise.parts.tiers.store import TieredStore
from shardwise.ports.hooks import ORIGINS, RestoreReport

MOST_NODES_SHOWN = 3
ROOT, MIRROR = TieredStore.names
START = "start"
"""`RestoreReport.source`, and the key in its `origins`, for what `start_from` names."""
LoadFromStore = Callable[[Store], LoadReport]
"""Loads the state from a store."""

log = logging.getLogger("shardwise")
_DAMAGE_ERRORS = (CorruptionError, CheckpointNotFoundError)


@prepare_decoding
class _Failures(msgspec.Struct, array_like=True):
    """Why some ranks could not restore a checkpoint.

    Attributes:
        damage: what is damaged, on the first rank that noticed.
        others: the other errors of the first ranks, by rank.
        count: the number of ranks with other errors.
    """

    damage: dict[int, str] = {}
    others: dict[int, str] = {}
    count: int = 0


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A checkpoint to load.

    Attributes:
        step: the step.
        source: "memory" or "storage".
        store: the files.
        bytes_by_origin: returns the number of bytes that were read, by origin. None: all bytes come
            from `only_origin`.
        only_origin: the origin of all bytes; "" if `bytes_by_origin` says it.
    """

    step: int
    source: str
    store: Store
    bytes_by_origin: Callable[[], Mapping[str, int]] | None = None
    only_origin: str = ""

    def origins_of(self, report: LoadReport) -> dict[str, int]:
        """Return how many bytes a load has read, by origin."""
        if self.bytes_by_origin is None:
            return with_all_origins({self.only_origin: report.bytes_read})
        return with_all_origins(self.bytes_by_origin())


@dataclass(slots=True)
class _Findings:
    """What a restore has found so far.

    Attributes:
        skipped: steps that were not restored, each with the reason.
        has_failed_load: whether a load was tried and found damage.
        unanswered: as in `RestoreReport`.
    """

    skipped: list[tuple[int, str]] = field(default_factory=list)
    has_failed_load: bool = False
    unanswered: dict[str, str] = field(default_factory=dict)


def with_all_origins(nbytes: Mapping[str, int]) -> dict[str, int]:
    """Return bytes by origin, with 0 bytes for each origin that `nbytes` lacks."""
    return {**dict.fromkeys(ORIGINS, 0), **nbytes}


class Restoring:
    """Restores checkpoints of a root and snapshots of a run. All ranks call its methods together.

    Args:
        settings: the options of the Checkpointer.
        group: the ranks.
        saver: finds the snapshots of the run in memory.
        damaged_steps: set to which the steps of damaged checkpoints are added.
        recorder: records the time of each phase.
        claim: looks who saves to the root, when this lists its steps.
    """

    def __init__(
        self,
        settings: Settings,
        group: Group,
        saver: Saver,
        damaged_steps: set[int],
        recorder: Recorder,
        claim: RootClaim,
    ) -> None:
        self._claim = claim
        self._root, self._mirror = settings.root, settings.mirror_store
        self._tiers = settings.store_to_read()
        self._group = group
        self._saver = saver
        self._damaged_steps = damaged_steps
        self._recorder = recorder
        self._listed_steps = list[int]()

    def restore(self, step: object, best: Best | None, load: LoadFromStore) -> RestoreReport | None:
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

        with self._recorder.stage("asking"), Round(self._group, "listing steps") as all_ranks:
            choice = parse_choice(step, best)
            stored_steps = all_ranks.require_equal(
                {"": f"step={choice!r}"},
                "ranks asked to restore different steps; pass the same step= on all ranks:",
                lambda: self._list_steps(choice),
                list[int],
            )
        self._listed_steps = stored_steps
        if choice == "newest":
            return self._restore_newest(stored_steps, load)
        selected = stored_steps[0] if isinstance(choice, Best) else operator.index(choice)
        return self._restore_step(selected, stored_steps, load)

    def _list_steps(self, choice: Choice) -> list[int]:
        """Return the steps in storage, ascending, or only the best one. Rank 0 calls this."""
        self._claim.look()
        if isinstance(choice, Best):
            return [Root(self._tiers).choose(choice)]
        return Root(self._tiers).steps()

    def finds_later_step(self, step: int | None) -> bool:
        """Return whether a newer checkpoint was committed while `restore` loaded the newest.

        An agent may have persisted a snapshot of the lost training meanwhile. Rank 0 calls this.

        Args:
            step: the restored step; None if there was none.
        """
        later = set(Root(self._tiers).steps()).difference(self._listed_steps)
        return max(later, default=-1) > (-1 if step is None else step)

    def _restore_newest(self, stored_steps: list[int], load: LoadFromStore) -> RestoreReport | None:
        report, found = self._load_first_intact(stored_steps, None, load)
        if report is None and found.has_failed_load:
            raise self._none_is_intact(found.skipped)
        if report is None and found.skipped:
            reasons = "; ".join(f"step {step}: {reason}" for step, reason in found.skipped)
            warnings.warn(f"nothing can be restored: {reasons}", RuntimeWarning, stacklevel=4)
        return report

    def _restore_step(
        self, step: int, stored_steps: list[int], load: LoadFromStore
    ) -> RestoreReport:
        matching_steps = [each for each in stored_steps if each == step]
        report, found = self._load_first_intact(matching_steps, step, load)
        if report is None and not matching_steps:
            reasons = "".join(f"; {reason}" for _, reason in found.skipped)
            newest = ", ".join(map(str, stored_steps[-5:])) or "none"
            steps = f"step {step} (newest steps: {newest}){reasons}"
            advice = "pass one of these steps, or step='newest'"
            raise CheckpointNotFoundError(
                f"{self._tiers} has no checkpoint of {steps}: "
                f"{advice if stored_steps else 'check the path'}"
            )
        if report is None:
            raise self._none_is_intact(found.skipped, f"of step {step} ")
        return report

    def _load_first_intact(
        self, stored_steps: Sequence[int], step: int | None, load: LoadFromStore
    ) -> tuple[RestoreReport | None, _Findings]:
        """Load the newest intact step. If memory and storage both have it, load it from memory.

        Args:
            stored_steps: the steps in storage that may be loaded, ascending.
            step: load only this step.
            load: loads a checkpoint from a store.

        Returns:
            The report, None if no step is intact; and what was found.
        """
        found = _Findings()
        with ExitStack() as cleanup:
            sources = self._in_memory(step, found), self._in_storage(stored_steps)
            for source in sources:
                cleanup.enter_context(closing(source))
            # A source continues after `yield` only if its last candidate was damaged on some rank.
            for each in heapq.merge(*sources, key=lambda candidate: -candidate.step):
                with self._recorder.stage("reading"):
                    report, damage = self._load_on_all(load, each.store)
                if report is not None:
                    newer = tuple(pair for pair in found.skipped if pair[0] >= each.step)
                    origins = each.origins_of(report)
                    restored = RestoreReport(
                        each.step, each.source, report, newer, origins, unanswered=found.unanswered
                    )
                    return restored, found
                found.skipped.append((each.step, f"{each.source}: {damage}"))
                found.has_failed_load = True
        return None, found

    def _in_memory(
        self, step: int | None, findings: _Findings
    ) -> Generator[_Candidate, None, None]:
        """Yield the snapshots in memory, newest first."""
        start = time.perf_counter()
        with closing(self._saver.find_snapshots(step)) as snapshots:
            for locations, store in snapshots:
                findings.skipped += locations.skipped
                findings.unanswered = dict(locations.unanswered)
                if locations.unanswered and step is None and self._group.rank == 0:
                    log.warning(
                        "%d nodes of this run did not say which snapshots they hold (%s). Steps "
                        "there that are newer than the step restored now will be discarded",
                        len(locations.unanswered),
                        _describe_first_nodes(locations.unanswered),
                    )
                self._recorder.add("choosing", locations.choosing_seconds)
                seconds = time.perf_counter() - start - locations.choosing_seconds
                self._recorder.add("asking", seconds)
                if locations.step is not None and store is not None:
                    yield _Candidate(locations.step, "memory", store, store.origins)
                start = time.perf_counter()

    def _in_storage(self, steps: Sequence[int]) -> Generator[_Candidate, None, None]:
        """Yield the checkpoints in storage, newest first.

        If root and mirror have different saves of a step, yield the save of the root first. If the
        caller asks for the next checkpoint, the last one is marked as damaged.
        """
        for step in reversed(steps):
            root = Root(self._root).at(step).store
            if self._mirror is None:
                yield _Candidate(step, "storage", root, only_origin="root")
                self._damaged_steps.add(step)
                continue
            mirror = Root(self._mirror).at(step).store
            tiered = TieredStore(root, mirror)
            yield _Candidate(step, "storage", tiered, tiered.origins)
            self._damaged_steps.add(step)
            if self._has_two_saves(tiered):
                if self._group.rank == 0:
                    log.warning(
                        "step %d was saved again; trying its earlier save in %s", step, mirror
                    )
                yield _Candidate(step, "storage", mirror, only_origin="mirror")

    def _has_two_saves(self, tiered: TieredStore) -> bool:
        """Return whether root and mirror have different saves of a step. All ranks call this."""
        with Round(self._group, "looking for an earlier save", rank0_only=True) as all_ranks:
            return all_ranks.broadcast(self._group.rank == 0 and tiered.has_two_saves(), bool)

    def _load_on_all(self, load: LoadFromStore, store: Store) -> tuple[LoadReport | None, str]:
        """Load a checkpoint on all ranks.

        Returns:
            The report, and ""; or None and the damage, if the checkpoint is damaged on any rank.
        """
        report: LoadReport | None = None
        failure: Exception | None = None
        try:
            report = load(store)
        except Exception as error:  # raised again after the round
            failure = error

        with Round(self._group, "restoring") as all_ranks:
            own = _Failures()
            if isinstance(failure, _DAMAGE_ERRORS):
                own.damage[self._group.rank] = str(failure)
            elif failure is not None and not isinstance(failure, RankError):
                own.others[self._group.rank] = describe_error(failure)
                own.count = 1
            failures = all_ranks.all_reduce(own, _Failures, _combine_failures)
        damage = "" if failures.others else next(iter(failures.damage.values()), "")
        if failure is not None and not damage:
            raise failure
        if failures.others:
            raise RankError("restoring", failures.others, count=failures.count)
        return (None if damage else report), damage

    def _none_is_intact(
        self, skipped: Sequence[tuple[int, str]], of_step: str = ""
    ) -> CorruptionError:
        reasons = "\n".join(f"  - step {step}: {reason}" for step, reason in skipped)
        advice = "restore another step" if of_step else "restore from a mirror or another copy"
        return CorruptionError(
            f"no checkpoint {of_step}below {self._tiers} is intact; {advice}:\n{reasons}"
        )


def _describe_first_nodes(reasons: Mapping[str, str]) -> str:
    """Return the first few nodes with their reasons, and the number of the others."""
    shown = [f"{node}: {reason}" for node, reason in islice(reasons.items(), MOST_NODES_SHOWN)]
    if len(reasons) > len(shown):
        shown.append(f"and {len(reasons) - len(shown)} more")
    return "; ".join(shown)


def _combine_failures(messages: Sequence[_Failures]) -> _Failures:
    damage = unite([each.damage for each in messages])
    others = unite([each.others for each in messages])
    return _Failures(
        dict(sorted(damage.items())[:1]),
        dict(sorted(others.items())[:MOST_FAILURES]),
        sum(each.count for each in messages),
    )
