"""At which saves a Checkpointer compares replicas, and what it does if they differ."""

from __future__ import annotations

import logging
import time

from shardwise.checkpointer.settings import Settings
from shardwise.kernel.engine.group import Group
from shardwise.kernel.engine.planning import PlannedSave
from shardwise.kernel.errors import MismatchError
from shardwise.parts.checks.replica_check import (
    Divergence,
    find_divergences,
    refuse_divergences,
)

LARGEST_SHARE = 0.01
"""Without `check_replicas_every`, comparisons take at most this share of the time of saves."""
_ADVICE = (
    'load an earlier step, or pass on_divergence={"PATTERN": "ignore"} for tensors that may differ'
)
log = logging.getLogger("shardwise")


class ReplicaChecks:
    """The comparisons of replicas of one Checkpointer. Rank 0 decides when ranks compare.

    Args:
        settings: the options of the Checkpointer. Without `check_replicas_every`, replicas are
            compared as often as `LARGEST_SHARE` permits, and at the first save, which shows how
            long a comparison takes.
        world_size: the number of ranks. One rank compares only with `check_replicas_every`.

    Attributes:
        divergences: the differences that the last comparison found; the same on all ranks.
    """

    def __init__(self, settings: Settings, world_size: int) -> None:
        self.divergences: tuple[Divergence, ...] = ()
        self._every, self._policy = settings.check_replicas_every, settings.on_divergence
        self._never = self._policy.ignores_all or (self._every is None and world_size == 1)
        self._number = 1  # of the next save, counted from the one that was compared
        self._seconds = 0.0  # of the saves since the last comparison
        self._cost: float | None = None  # seconds of the last comparison
        self._equal_at: int | None = None
        self._logged: set[tuple[str, tuple[tuple[int, ...], ...]]] = set()

    def is_due(self) -> bool:
        """Return whether this save compares replicas."""
        if self._never:
            return False
        if self._every is not None:
            return self._number >= self._every
        return self._cost is None or self._cost <= LARGEST_SHARE * self._seconds

    def add_save(self, seconds: float) -> None:
        """Count a save, and its seconds without the comparison."""
        self._number += 1
        self._seconds += seconds

    def check(self, planned: PlannedSave, group: Group) -> None:
        """Compare all replicas as they are now. All ranks call this together.

        Raises:
            MismatchError: replicas differ, and the policy is to raise. Then the next save compares
                again.
        """
        began, policy, step = time.perf_counter(), self._policy, planned.request.step
        names = planned.plan.description.structure.names
        ignored = {name for name in names if policy.reaction_to(name) == "ignore"}
        self.divergences = found = find_divergences(planned, group, ignored)
        earlier = "" if self._equal_at is None else f"; they were equal at step {self._equal_at}"
        advice = _ADVICE + earlier
        refuse_divergences([e for e in found if policy.reaction_to(e.tensor) == "raise"], advice)
        new = [each for each in found if (each.tensor, each.groups) not in self._logged]
        self._logged = {(each.tensor, each.groups) for each in found}
        if group.rank == 0:
            try:
                refuse_divergences(new, advice)
            except MismatchError as error:
                log.warning("%s", error)
        if not found:
            self._equal_at = step
        self._number = 0
        self._seconds, self._cost = 0.0, time.perf_counter() - began
