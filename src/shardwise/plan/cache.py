"""Plans kept for the next save of states of the same structure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from shardwise.manifest.datafile import Listed
from shardwise.plan.section import Section


@dataclass(frozen=True, slots=True)
class Published:
    """What the planning rank keeps, so as to write the next manifest: see `SavePlan`."""

    tensors: bytes
    files: tuple[int, ...]
    per_rank: tuple[str, ...]
    bytes_held: int
    bytes_stored: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What one rank keeps of a plan.

    Attributes:
        section: what it writes.
        listed: the same as the header of its file lists it.
        peers: what others write whose replicas it holds, by rank, where it asked for that.
        published: on the planning rank.
    """

    section: Section
    listed: Listed
    peers: dict[int, Section]
    published: Published | None


@dataclass(slots=True)
class PlanCache:
    """Plans by the fingerprint of all descriptions that they were made from.

    The fingerprint covers names, dtypes, shapes, boxes and ties on every rank, so that a changed
    structure misses; where the tensors lie in memory is no part of a plan. A plan is used again
    only if every rank has it. `hits` and `misses` count the saves.
    """

    capacity: int = 4
    hits: int = 0
    misses: int = 0
    _plans: OrderedDict[bytes, Plan] = field(default_factory=OrderedDict)

    def keys(self) -> list[bytes]:
        """The fingerprints of the plans that are kept."""
        return list(self._plans)

    def get(self, fingerprint: bytes) -> Plan | None:
        """The plan for this fingerprint, if it is kept."""
        plan = self._plans.get(fingerprint)
        if plan is not None:
            self._plans.move_to_end(fingerprint)
        return plan

    def put(self, fingerprint: bytes, plan: Plan) -> None:
        """Keep a plan; the one that was used least recently makes room for it."""
        self._plans[fingerprint] = plan
        while len(self._plans) > self.capacity:
            self._plans.popitem(last=False)
