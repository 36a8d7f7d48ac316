"""The rules for a snapshot in storage, and the pending manifest with which agents get them."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from shardwise.engine.options import SaveOptions
from shardwise.engine.planning import PlannedSave
from shardwise.manifest.names import data_file
from shardwise.memory.options import Memory
from shardwise.memory.records import PendingManifest
from shardwise.memory.trainer.agents import Membership
from shardwise.retention import Keep
from shardwise.tiers.options import MirrorRequest


@dataclass(frozen=True, slots=True)
class StoragePolicy:
    """The rules for a snapshot, and for older checkpoints, in storage.

    Attributes:
        durable: whether to persist the snapshot in any case, not only if a trainer is lost.
        keep: the rules for the checkpoints in storage afterwards.
        damaged: steps in storage that are known to be damaged, and do not count as kept.
        mirror: the mirror of the root; None if there is none.
    """

    durable: bool
    keep: Keep
    damaged: tuple[int, ...] = ()
    mirror: MirrorRequest | None = None

    @property
    def removes_old(self) -> bool:
        """Whether older checkpoints may be removed, or mirrored, after the save."""
        return self.keep.has_rules or self.mirror is not None


def make_pending_manifest(
    planned: PlannedSave,
    options: SaveOptions,
    policy: StoragePolicy,
    memory: Memory,
    membership: Membership,
    root: str,
    rings: list[list[str]],
) -> PendingManifest:
    """Return the pending manifest of a save; `rings` are the file names of each ring of ranks."""
    manifest = planned.manifest_plan
    node_of = membership.node_of
    return PendingManifest(
        save_id=planned.save_id,
        step=options.step or 0,
        manifest=planned.manifest(()).decode(),
        files=[(data_file(r, planned.save_id), node_of[r]) for r in manifest.writers],
        nodes=membership.nodes,
        leader=node_of[0],
        epoch=membership.lineage.epoch,
        rings=rings,
        root=root,
        durable=policy.durable,
        rescue=memory.rescue,
        overwrite=options.overwrite,
        keep=asdict(policy.keep),
        mirror=policy.mirror,
        damaged=list(policy.damaged),
        copies=memory.copies,
        parity=memory.parity,
        group=memory.group,
        wait=memory.wait,
        budget=memory.budget,
        bytes_held=manifest.bytes_held,
        bytes_total=manifest.bytes_stored,
    )
