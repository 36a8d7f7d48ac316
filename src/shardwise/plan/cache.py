"""Plans kept for the next save of a state of the same structure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from shardwise.plan.save import Share


@dataclass(frozen=True, slots=True)
class Published:
    """What the planning rank keeps, so as to write the next manifest: see `SavePlan`."""

    tensors: bytes
    files: tuple[int, ...]
    per_rank: tuple[str, ...]
    bytes_held: int
    bytes_stored: int


@dataclass(slots=True)
class PlanCache:
    """Shares by the fingerprint of the description they were planned for.

    The fingerprint covers names, dtypes, shapes, boxes and ties, so that a changed structure
    misses; where the tensors lie in memory is no part of a plan. A plan is used again only if
    every rank has it. `hits` and `misses` count the saves.
    """

    capacity: int = 4
    hits: int = 0
    misses: int = 0
    _plans: OrderedDict[bytes, tuple[Share, Published | None]] = field(default_factory=OrderedDict)

    def get(self, fingerprint: bytes) -> tuple[Share, Published | None] | None:
        """The plan for this fingerprint, if it is kept."""
        plan = self._plans.get(fingerprint)
        if plan is not None:
            self._plans.move_to_end(fingerprint)
        return plan

    def put(self, fingerprint: bytes, share: Share, published: Published | None) -> None:
        """Keep a plan; the one that was used least recently makes room for it."""
        self._plans[fingerprint] = share, published
        while len(self._plans) > self.capacity:
            self._plans.popitem(last=False)
