"""Report the demo of reshaped runs: a table, and the checks that failed."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table

import shardwise as sw

if TYPE_CHECKING:
    from reshape import Story
    from reshape_run import Outcome

BOUND = 1e-5
"""Largest allowed difference of the first loss of a phase; each further step adds as much.

The restored state and the batches are identical, but under another parallelism sums are computed
in a different order.
"""


def largest_differences(story: Story, outcome: Outcome) -> dict[int, float]:
    """Return the largest allowed difference of each loss of a phase, by step."""
    per_step = 0.0 if outcome is story.outcomes[0] else BOUND
    return {step: per_step * n for n, step in enumerate(outcome.losses, start=1)}


def names_that_differ(before: Path, after: Path) -> list[str]:
    """Return the names of model and optimizer values that differ between two checkpoints."""
    one, other = sw.open(before), sw.open(after)
    names = {name for name in {*one, *other} if name.startswith(("model.", "optimizer."))}
    return sorted(name for name in names if not _is_same(one, other, name))


def _is_same(one: sw.Checkpoint, other: sw.Checkpoint, name: str) -> bool:
    if name not in one or name not in other:
        return False
    a, b = one[name], other[name]
    if name.endswith(".param_groups"):
        return _by_parameter(a) == _by_parameter(b)
    if not isinstance(a, sw.SavedTensor) or not isinstance(b, sw.SavedTensor):
        return a == b
    return a.dtype == b.dtype and torch.equal(a[...], b[...])


def _by_parameter(groups: Any) -> dict[str, Any]:
    """Return the settings of each parameter, whatever the order of the parameters."""
    return {name: group["value"] for group in groups for name in group["members"]}


def phases_table(story: Story) -> Table:
    """Return a table of each phase: its restore, and its losses compared with the reference."""
    phases_table = Table(title="losses compared with the uninterrupted run", title_justify="left")
    phases_table.add_column("phase")
    for column in ("steps", "restored, MB", "seconds", "first difference", "largest later"):
        phases_table.add_column(column, justify="right")
    for outcome in story.outcomes:
        first, *later = outcome.gaps(story.reference.losses).values()
        found = outcome.restored
        phases_table.add_row(
            outcome.phase.name,
            f"{min(outcome.losses)} – {max(outcome.losses)}",
            f"{found['bytes'] / 1e6:.1f}" if found else "",
            f"{found['seconds']:.2f}" if found else "",
            f"{first:.1e}" if first else "none",
            f"{max(later):.1e}" if any(later) else "none",
        )
    return phases_table


def summarize_losses(story: Story) -> str:
    """Return a sentence on the differences of the losses."""
    first, *others = (
        max(outcome.gaps(story.reference.losses).values()) for outcome in story.outcomes
    )
    same = f"differ by up to {first:.1e}" if first else "are bit-identical"
    return (
        f"The losses under the first parallelism {same}; the others differ by up to "
        f"{max(others, default=0):.1e}, as they sum in a different order."
    )


def failed_checks(story: Story) -> list[str]:
    """Return a line for each check that failed."""
    wrong = []
    for before, after in pairwise(story.outcomes):
        newest = before.newest
        if after.begun != newest or min(after.losses) != newest:
            wrong.append(
                f"{after.phase.name}: restored step {after.begun}, resumed at step "
                f"{min(after.losses)}, but the newest save is step {newest}"
            )
    for outcome in story.outcomes:
        if names := story.differing.get(outcome.phase.name):
            wrong.append(f"{outcome.phase.name}: restored values differ: {', '.join(names)}")
        wrong += _losses_off(story, outcome)
    if max(story.outcomes[-1].losses) != max(story.reference.losses):
        wrong.append(f"{story.outcomes[-1].phase.name}: did not train to the end")
    return wrong


def _losses_off(story: Story, outcome: Outcome) -> list[str]:
    allowed = largest_differences(story, outcome)
    for step, gap in outcome.gaps(story.reference.losses).items():
        if not gap <= allowed[step]:
            off = f"the loss of step {step} differs by {gap:.1e} (limit: {allowed[step]:.0e})"
            return [f"{outcome.phase.name}: {off}"]
    return []
