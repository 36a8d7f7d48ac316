"""What reshaping a run has found: tables, and what did not go as it should have."""

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
"""How far the first loss of a phase may be off, and how much more with each further step.

What was restored is the same to the byte, and so are the batches; but in another shape sums over a
batch, and over what is divided among workers, are taken in another order.
"""


def bounds(story: Story, outcome: Outcome) -> dict[int, float]:
    """How far each loss of a phase may be off."""
    per_step = 0.0 if outcome is story.outcomes[0] else BOUND
    return {step: per_step * n for n, step in enumerate(outcome.losses, start=1)}


def differing(before: Path, after: Path) -> list[str]:
    """Names of weights, of what the optimizer keeps and of its settings that are not the same."""
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
    """Settings of each parameter: in what order stages name theirs makes no difference."""
    return {name: group["value"] for group in groups for name in group["members"]}


def table(story: Story) -> Table:
    """Each phase: what it went on from, and its losses against the reference."""
    table = Table(title="losses against the run that was never interrupted", title_justify="left")
    table.add_column("phase")
    for column in ("steps", "restored, MB", "seconds", "first difference", "largest later"):
        table.add_column(column, justify="right")
    for outcome in story.outcomes:
        first, *later = outcome.gaps(story.reference.losses).values()
        found = outcome.restored
        table.add_row(
            outcome.phase.name,
            f"{min(outcome.losses)} – {max(outcome.losses)}",
            f"{found['bytes'] / 1e6:.1f}" if found else "",
            f"{found['seconds']:.2f}" if found else "",
            f"{first:.1e}" if first else "none",
            f"{max(later):.1e}" if any(later) else "none",
        )
    return table


def summary(story: Story) -> str:
    """How far the losses are off, and why."""
    first, *others = (
        max(outcome.gaps(story.reference.losses).values()) for outcome in story.outcomes
    )
    alike = f"up to {first:.1e} off" if first else "the same to the bit"
    return (
        f"The losses of the first shape are {alike}; those of the others are up to "
        f"{max(others, default=0):.1e} off, as they add up in another order."
    )


def faults(story: Story) -> list[str]:
    """What did not go as it should have."""
    wrong = []
    for before, after in pairwise(story.outcomes):
        newest = before.newest
        if after.begun != newest or min(after.losses) != newest:
            wrong.append(
                f"{after.phase.name}: restored step {after.begun}, went on at "
                f"{min(after.losses)}; the newest save was {newest}"
            )
    for outcome in story.outcomes:
        if names := story.differing.get(outcome.phase.name):
            wrong.append(f"{outcome.phase.name}: restored other bytes in {', '.join(names)}")
        wrong += _losses_off(story, outcome)
    if max(story.outcomes[-1].losses) != max(story.reference.losses):
        wrong.append(f"{story.outcomes[-1].phase.name}: did not train to the end")
    return wrong


def _losses_off(story: Story, outcome: Outcome) -> list[str]:
    allowed = bounds(story, outcome)
    for step, gap in outcome.gaps(story.reference.losses).items():
        if not gap <= allowed[step]:
            off = f"the loss of step {step} is {gap:.1e} off, and {allowed[step]:.0e} is allowed"
            return [f"{outcome.phase.name}: {off}"]
    return []
