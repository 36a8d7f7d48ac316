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

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from shardwise.kernel.engine.root import CheckpointInfo
from shardwise.parts.retention import Keep

SavedSteps = tuple[int | None, Collection[int]]
"""What a trainer knows about its root: `newest` and `damaged`, as for `decide_tiers`."""


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


def decide_tiers(
    root: Mapping[int, CheckpointInfo],
    mirror: Mapping[int, CheckpointInfo],
    keep: Keep,
    mirror_keep: Keep,
    newest: int | None,
    damaged: Collection[int] = (),
) -> TierPlan:
    """Return what to copy and what to remove.

    Args:
        root, mirror: the checkpoints of each tier, by step. Checkpoints with a damaged manifest are
            left out.
        keep: the rules of the root.
        mirror_keep: the rules of the mirror.
        newest: the step that was saved last; None if this run has not saved yet. If None, nothing
            is removed.
        damaged: steps of the root that are known to be damaged in both tiers. They are neither
            copied nor removed, and do not count for the rules of the root.
    """
    root = {step: each for step, each in root.items() if step not in damaged}
    all_checkpoints = {**mirror, **root}
    last_step = newest if newest is not None else max(all_checkpoints, default=0)
    newer_than_last = {step for step in all_checkpoints if step > last_step}

    wanted = _steps_to_keep(all_checkpoints, mirror_keep, last_step) | newer_than_last
    missing = {
        step
        for step, each in root.items()
        if step not in mirror or mirror[step].save_id != each.save_id
    }
    waiting = missing & wanted
    if newest is None:
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
    checkpoints: Mapping[int, CheckpointInfo], keep: Keep, last_step: int
) -> set[int]:
    """Return the steps up to `last_step` that the rules keep."""
    return keep.steps_to_keep({s: each for s, each in checkpoints.items() if s <= last_step})
