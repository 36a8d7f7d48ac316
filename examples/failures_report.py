"""Report the demo of failures: tables, and the checks that failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from failures import Story
    from failures_hosts import Launch

BOUND = 1e-5
"""Largest allowed relative difference of the first loss under another sharding, where sums are
computed in a different order; each further step adds as much. Under the same sharding the losses
must be identical.
"""
CHECKSUMS = 2 << 20
"""Most bytes that are read in addition to the state: checksums and per-rank values."""
PLACES = ("local memory", "other nodes", "decoded", "root")


def times_table(story: Story) -> Table:
    """Return a table of the duration and the cost of each recovery."""
    table = Table(
        title="recoveries: seconds, the restored step, and steps lost", title_justify="left"
    )
    table.add_column("failure")
    table.add_column("resumed as")
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


def sources_table(story: Story) -> Table:
    """Return a table of the bytes that all ranks read by source, and of the network traffic."""
    title = "MB read by all ranks, by source, and MB received over the network meanwhile"
    table = Table(title=title, title_justify="left")
    table.add_column("failure")
    for column in (*PLACES, "network"):
        table.add_column(column, justify="right")
    for recovery in story.recoveries:
        found = [recovery.origin.get(each, 0) for each in PLACES]
        table.add_row(
            recovery.failure.title,
            *(f"{nbytes / 1e6:.1f}" for nbytes in (*found, recovery.received_bytes)),
        )
    return table


def comparison_table(story: Story, reference: Launch) -> Table:
    """Return a table that compares the losses of each launch with the reference."""
    table = Table(title="losses compared with the uninterrupted run", title_justify="left")
    table.add_column("launch")
    for column in ("steps", "first loss", "reference", "difference", "largest later"):
        table.add_column(column, justify="right")
    for launch in story.launches:
        losses, expected = launch.losses, reference.losses
        first, *later = loss_differences(launch, reference).values()
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


def loss_differences(launch: Launch, reference: Launch) -> dict[int, float]:
    """Return the relative difference of each loss from the reference, by step."""
    expected = reference.losses
    return {step: abs(loss / expected[step] - 1) for step, loss in launch.losses.items()}


def failed_checks(story: Story, reference: Launch) -> list[str]:
    """Return a line for each check that failed."""
    wrong = []
    for recovery, launch in zip(story.recoveries, story.launches[1:], strict=True):
        failure, first = recovery.failure, min(launch.losses)
        if recovery.source != failure.source:
            wrong.append(f"{failure.title}: resumed from {recovery.source}, not {failure.source}")
        if not 0 <= recovery.reached - recovery.step <= failure.cost:
            wrong.append(
                f"{failure.title}: resumed from step {recovery.step}, but step {recovery.reached} "
                f"had been saved; at most {failure.cost} may be lost"
            )
        if first != recovery.step:
            wrong.append(f"{launch.title}: restored step {recovery.step}, resumed at {first}")
        accounted = sum(recovery.origin.values())
        if not recovery.read <= accounted <= recovery.read + CHECKSUMS:
            wrong.append(
                f"{failure.title}: {recovery.read} bytes of state were read, but the sources add "
                f"up to {accounted}"
            )
    for launch in story.launches:
        wrong += _losses_off(launch, reference)
    if max(story.launches[-1].losses) != max(reference.losses):
        wrong.append(f"{story.launches[-1].title}: did not train to the end")
    return wrong


def _losses_off(launch: Launch, reference: Launch) -> list[str]:
    same = launch.parallel == reference.parallel
    for number, (step, gap) in enumerate(loss_differences(launch, reference).items(), start=1):
        allowed = 0.0 if same else BOUND * number
        if not gap <= allowed:
            off = f"the loss of step {step} differs by {gap:.1e} (limit: {allowed:.0e})"
            return [f"{launch.title}: {off}"]
    return []
