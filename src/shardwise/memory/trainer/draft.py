"""What rank 0 tells the agent that leads a snapshot."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from shardwise.engine.options import SaveOptions
from shardwise.engine.planning import PlannedSave
from shardwise.manifest.names import data_file
from shardwise.memory.membership import Membership
from shardwise.memory.options import Memory
from shardwise.memory.records import PendingManifest
from shardwise.retention import Keep


@dataclass(frozen=True, slots=True)
class Storing:
    """What becomes of a snapshot in storage.

    Attributes:
        durable: it is persisted in any case; otherwise only if a trainer is lost.
        keep: what is kept there then.
        damaged: steps there that are known to be damaged, and do not count as kept.
    """

    durable: bool
    keep: Keep
    damaged: tuple[int, ...] = ()


def draft_of(
    planned: PlannedSave,
    options: SaveOptions,
    storing: Storing,
    memory: Memory,
    meeting: Membership,
    root: str,
    rings: list[list[str]],
) -> PendingManifest:
    """The draft of a snapshot, made on rank 0.

    Args:
        planned: the save, as rank 0 planned it.
        root: where the run persists its checkpoints.
        rings: names of files whose ranks hold the same.
    """
    node_of = meeting.node_of
    return PendingManifest(
        save_id=planned.save_id,
        step=options.step or 0,
        manifest=planned.manifest(()).decode(),
        files=[(data_file(r, planned.save_id), node_of[r]) for r in planned.manifest_plan.writers],
        nodes=meeting.nodes,
        leader=node_of[0],
        epoch=meeting.lineage.epoch,
        rings=rings,
        root=root,
        durable=storing.durable,
        rescue=memory.rescue,
        overwrite=options.overwrite,
        keep=asdict(storing.keep),
        damaged=list(storing.damaged),
        copies=memory.copies,
        parity=memory.parity,
        group=memory.group,
        wait=memory.wait,
        budget=memory.budget,
        bytes_held=planned.manifest_plan.bytes_held,
        bytes_total=planned.manifest_plan.bytes_stored,
    )
