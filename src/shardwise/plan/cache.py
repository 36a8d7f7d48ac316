"""A cache of plans, for later saves of a state with the same structure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from shardwise.plan.save import SavePlan


@dataclass(slots=True)
class PlanCache:
    """Plans of earlier saves. The key is the fingerprint of all structures, and the rank.

    The fingerprint covers names, dtypes, shapes, boxes and ties on every rank, so that a changed
    structure is planned again. A plan does not depend on addresses of tensors in memory. A save
    uses the cache only if every rank has the plan. The key includes the rank, because one process
    can have different ranks in different groups.

    Attributes:
        capacity: the largest number of plans in the cache.
        hits: the number of saves that used the cache.
        misses: the number of saves that were planned again.
    """

    capacity: int = 4
    hits: int = 0
    misses: int = 0
    _plans: OrderedDict[tuple[bytes, int], SavePlan] = field(default_factory=OrderedDict)

    def fingerprints(self, rank: int) -> list[bytes]:
        """Return the fingerprints of all plans of a rank in the cache."""
        return [fingerprint for fingerprint, owner in self._plans if owner == rank]

    def count(self, *, is_hit: bool) -> None:
        """Count a save that used the cache, or that was planned again."""
        self.hits += is_hit
        self.misses += not is_hit

    def get(self, fingerprint: bytes, rank: int) -> SavePlan | None:
        """Return a rank's part of the plan of a fingerprint; None if it is not in the cache."""
        plan = self._plans.get((fingerprint, rank))
        if plan is not None:
            self._plans.move_to_end((fingerprint, rank))
        return plan

    def put(self, fingerprint: bytes, rank: int, plan: SavePlan) -> None:
        """Add a rank's part of a plan. If the cache is full, remove the least recently used."""
        self._plans[fingerprint, rank] = plan
        while len(self._plans) > self.capacity:
            self._plans.popitem(last=False)
