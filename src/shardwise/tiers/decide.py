"""Decides which checkpoints to copy to a mirror, and which to remove from which tier.

The decision is a pure function of what the tiers have. These rules hold for every decision:

- A checkpoint is removed from the root only if the mirror has it, or the rules of the mirror drop
  it.
- A checkpoint is removed from the mirror only if, by the rules of the mirror, newer checkpoints *in
  the mirror* replace it.
- The newest checkpoint is copied first, because a restore after a loss of the root needs it.
- Steps that are newer than the step that was saved last are superseded. They are copied last, and
  no rule counts or removes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwise.retention import CheckpointInfo, Keep


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A committed checkpoint in a tier.

    Attributes:
        save_id: the id of its save. Two saves of the same step have different ids.
        info: its time and metrics, for retention rules.
    """

    save_id: str
    info: CheckpointInfo = field(default_factory=CheckpointInfo)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """What the tiers have. Checkpoints with a damaged manifest are left out.

    Attributes:
        root, mirror: the checkpoints of each tier, by step.
        newest: the step that was saved last; None if it is unknown. If None, nothing is removed.
        damaged: steps in the root that are known to be damaged in both tiers. They are neither
            copied nor removed, and do not count for the rules of the root.
    """

    root: Mapping[int, StoredCheckpoint]
    mirror: Mapping[int, StoredCheckpoint]
    newest: int | None
    damaged: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPlan:
    """What to do next. All fields are steps.

    Attributes:
        copy: the steps to copy from the root to the mirror, in this order.
        remove_from_root, remove_from_mirror: the steps to remove, ascending.
        pinned: the steps that the rules of the root drop, but that stay until the mirror has them.
    """

    copy: tuple[int, ...]
    remove_from_root: tuple[int, ...]
    remove_from_mirror: tuple[int, ...]
    pinned: tuple[int, ...]


def decide_tiers(tiers: Tiers, keep: Keep, mirror_keep: Keep) -> TierPlan:
    """Return what to copy and what to remove.

    Args:
        tiers: what the tiers have.
        keep: the rules of the root.
        mirror_keep: the rules of the mirror.
    """
    root = {step: each for step, each in tiers.root.items() if step not in tiers.damaged}
    mirror = tiers.mirror
    all_checkpoints = {**mirror, **root}
    last_step = tiers.newest if tiers.newest is not None else max(all_checkpoints, default=0)
    newer_than_last = {step for step in all_checkpoints if step > last_step}

    wanted = _steps_to_keep(all_checkpoints, mirror_keep, last_step) | newer_than_last
    missing = {step for step in root if _save_id_of_step(mirror, step) != root[step].save_id}
    waiting = missing & wanted
    if tiers.newest is None:
        dropped_by_root, dropped_by_mirror = set[int](), set[int]()
    else:
        dropped_by_root = (
            root.keys() - _steps_to_keep(root, keep, last_step) - newer_than_last - {last_step}
        )
        dropped_by_mirror = (
            mirror.keys() - _steps_to_keep(mirror, mirror_keep, last_step) - newer_than_last
        )
    return TierPlan(
        copy=tuple(sorted(waiting, key=lambda step: (step > last_step, -step))),
        remove_from_root=tuple(sorted(dropped_by_root - waiting)),
        remove_from_mirror=tuple(sorted(dropped_by_mirror)),
        pinned=tuple(sorted(dropped_by_root & waiting)),
    )


def _steps_to_keep(
    checkpoints: Mapping[int, StoredCheckpoint], keep: Keep, last_step: int
) -> set[int]:
    """Return the steps up to `last_step` that the rules keep."""
    return keep.steps_to_keep({s: each.info for s, each in checkpoints.items() if s <= last_step})


def _save_id_of_step(checkpoints: Mapping[int, StoredCheckpoint], step: int) -> str | None:
    return checkpoints[step].save_id if step in checkpoints else None
