"""What the demo of failures found: tables, and what did not go as it should have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from failures import Story
    from failures_hosts import Launch

BOUND = 1e-5
"""How far the first loss in another sharding may be off, relative to it, and how much more with
each further step: sums are taken in another order there. In the same sharding, losses are the same.
"""
CHECKSUMS = 2 << 20
"""Bytes of checksums, and of values of ranks, which are read besides the state, at the most."""
PLACES = ("local memory", "other nodes", "decoded", "storage")


def times(story: Story) -> Table:
    """How long each recovery took, and what it cost."""
    table = Table(
        title="recoveries: seconds, the step it went on from, steps lost", title_justify="left"
    )
    table.add_column("what failed")
    table.add_column("goes on as")
    for column in ("noticed", "start", "restore", "first step", "from", "lost"):
        table.add_column(column, justify="right")
    for recovery, launch in zip(story.recoveries, story.launches[1:], strict=True):
        table.add_row(
            recovery.failure.title,
            launch.title,
            f"{recovery.noticed:.2f}",
            *(f"{seconds:.2f}" for seconds in recovery.seconds.values()),
            str(recovery.step),
            str(recovery.reached - recovery.step),
        )
    return table


def origins(story: Story) -> Table:
    """Where the bytes came from that all ranks read; and what the cables have counted."""
    title = "where what all ranks read came from, in MB; and what came over cables meanwhile"
    table = Table(title=title, title_justify="left")
    table.add_column("what failed")
    for column in (*PLACES, "over cables"):
        table.add_column(column, justify="right")
    for recovery in story.recoveries:
        found = [recovery.origin.get(each, 0) for each in PLACES]
        table.add_row(
            recovery.failure.title,
            *(f"{nbytes / 1e6:.1f}" for nbytes in (*found, recovery.received)),
        )
    return table


def comparison(story: Story, reference: Launch) -> Table:
    """The losses of each launch against those of the reference."""
    table = Table(title="losses against the run that was never interrupted", title_justify="left")
    table.add_column("launch")
    for column in ("steps", "first loss", "reference", "difference", "largest later"):
        table.add_column(column, justify="right")
    for launch in story.launches:
        losses, expected = launch.losses, reference.losses
        first, *later = gaps(launch, reference).values()
        step = min(losses)
        table.add_row(
            launch.title,
            f"{step} – {max(losses)}",
            f"{losses[step]:.6f}",
            f"{expected[step]:.6f}",
            f"{first:.1e}" if first else "none",
            f"{max(later):.1e}" if any(later) else "none",
        )
    return table


def gaps(launch: Launch, reference: Launch) -> dict[int, float]:
    """How far each loss is from the reference's at that step, relative to that."""
    expected = reference.losses
    return {step: abs(loss / expected[step] - 1) for step, loss in launch.losses.items()}


def faults(story: Story, reference: Launch) -> list[str]:
    """What did not go as it should have."""
    wrong = []
    for recovery, launch in zip(story.recoveries, story.launches[1:], strict=True):
        failure, first = recovery.failure, min(launch.losses)
        if recovery.source != failure.source:
            wrong.append(f"{failure.title}: went on from {recovery.source}, not {failure.source}")
        if not 0 <= recovery.reached - recovery.step <= failure.cost:
            wrong.append(
                f"{failure.title}: went on from step {recovery.step}, though {recovery.reached} "
                f"had been saved: at most {failure.cost} may be lost"
            )
        if first != recovery.step:
            wrong.append(f"{launch.title}: restored step {recovery.step}, went on at {first}")
        accounted = sum(recovery.origin.values())
        if not recovery.read <= accounted <= recovery.read + CHECKSUMS:
            wrong.append(
                f"{failure.title}: {accounted} bytes are accounted for, and {recovery.read} of "
                "the state were read"
            )
    for launch in story.launches:
        wrong += _losses_off(launch, reference)
    if max(story.launches[-1].losses) != max(reference.losses):
        wrong.append(f"{story.launches[-1].title}: did not train to the end")
    return wrong


def _losses_off(launch: Launch, reference: Launch) -> list[str]:
    same = launch.parallel == reference.parallel
    for number, (step, gap) in enumerate(gaps(launch, reference).items(), start=1):
        allowed = 0.0 if same else BOUND * number
        if not gap <= allowed:
            off = f"the loss of step {step} is {gap:.1e} off, and {allowed:.0e} is allowed"
            return [f"{launch.title}: {off}"]
    return []
