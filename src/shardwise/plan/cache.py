"""Plans of earlier saves, kept for the next save of a state with the same structure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from shardwise.manifest.datafile import Listed
from shardwise.plan.save import ManifestPlan
from shardwise.plan.tables import PieceTable


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank's part of a plan.

    Attributes:
        pieces: the pieces that the rank writes.
        header: the same pieces, as the header of its file lists them.
        peers: the pieces that other ranks write of replicas that this rank has too, by rank; empty
            except for a snapshot whose ranks protect each other.
        manifest: on rank 0, the part of the manifest that depends on the plan alone.
    """

    pieces: PieceTable
    header: Listed
    peers: dict[int, PieceTable]
    manifest: ManifestPlan | None


@dataclass(slots=True)
class PlanCache:
    """Plans by the fingerprint of the descriptions of all ranks.

    The fingerprint covers names, dtypes, shapes, boxes and ties on every rank, so that a changed
    structure is planned again. Addresses of tensors in memory are not part of a plan. A plan is
    reused only if every rank has it. `hits` and `misses` count the saves.
    """

    capacity: int = 4
    hits: int = 0
    misses: int = 0
    _plans: OrderedDict[bytes, RankPlan] = field(default_factory=OrderedDict)

    def keys(self) -> list[bytes]:
        """Return the fingerprints of all plans in the cache."""
        return list(self._plans)

    def get(self, fingerprint: bytes) -> RankPlan | None:
        """Return the plan for a fingerprint, if the cache has it."""
        plan = self._plans.get(fingerprint)
        if plan is not None:
            self._plans.move_to_end(fingerprint)
        return plan

    def put(self, fingerprint: bytes, plan: RankPlan) -> None:
        """Add a plan; remove the least recently used one if the cache is full."""
        self._plans[fingerprint] = plan
        while len(self._plans) > self.capacity:
            self._plans.popitem(last=False)
