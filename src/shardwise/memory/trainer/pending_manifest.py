"""The pending manifest, with which agents get what they need to complete a save."""

from __future__ import annotations

from shardwise.engine.options import SaveOptions
from shardwise.engine.planning import PlannedSave
from shardwise.manifest.names import data_file
from shardwise.memory.options import Memory
from shardwise.memory.records import PendingManifest, StorageTask
from shardwise.memory.trainer.agents import Membership


def make_pending_manifest(
    planned: PlannedSave,
    options: SaveOptions,
    storage: StorageTask,
    memory: Memory,
    membership: Membership,
    rings: list[list[str]],
    *,
    durable: bool,
) -> PendingManifest:
    """Return the pending manifest of a save; `rings` are the file names of each ring of ranks."""
    plan = planned.plan.plan
    node_of = membership.node_of
    return PendingManifest(
        save_id=planned.save_id,
        step=options.step or 0,
        manifest=planned.manifest(()).decode(),
        files=[(data_file(r, planned.save_id), node_of[r]) for r in plan.writers.tolist()],
        nodes=membership.nodes,
        leader=node_of[0],
        epoch=membership.lineage.epoch,
        rings=rings,
        storage=storage,
        durable=durable,
        rescue=memory.rescue,
        overwrite=options.overwrite,
        copies=memory.copies,
        parity=memory.parity,
        group=memory.group,
        wait=memory.wait,
        budget=memory.budget,
        bytes_held=plan.bytes_held,
        bytes_total=plan.bytes_stored,
    )
