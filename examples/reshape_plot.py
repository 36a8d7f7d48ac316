"""Plot the reshaped runs: losses, the workers of each phase, and differences of losses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from reshape_report import largest_differences

if TYPE_CHECKING:
    from reshape import Story

COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc3366")
CROSS: dict[str, Any] = {"marker": "X", "markersize": 11, "mec": "white", "zorder": 10}
SMALL: dict[str, Any] = {"fontsize": 9, "va": "center"}
GAP = 1.5  # between the workers of one phase and those of the next, in workers


def draw_plot(stories: Sequence[Story], path: Path) -> None:
    """Write the plot as a PNG file."""
    figure, grid = plt.subplots(
        3,
        len(stories),
        figsize=(1 + 7 * len(stories), 8.8),
        sharex="col",
        height_ratios=(5, 3, 2),
        squeeze=False,
        layout="constrained",
    )
    for (losses, workers, gaps), story in zip(grid.T, stories, strict=True):
        losses.set_title(story.title, fontsize=12, fontweight="bold")
        _plot_losses(losses, story)
        _plot_workers(workers, story)
        _plot_differences(gaps, story)
        for axes in (losses, workers, gaps):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25)
            axes.set_axisbelow(True)
            axes.margins(x=0.02)
    title = "A worker is lost, the others resume with another parallelism, and the loss continues"
    figure.suptitle(title, fontsize=14)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _plot_losses(axes: Axes, story: Story) -> None:
    """Plot the losses of each phase over the reference, and where the phase was killed."""
    steps, losses = zip(*story.reference.losses.items(), strict=True)
    thick: dict[str, Any] = {"color": "0.84", "linewidth": 9, "solid_capstyle": "round"}
    axes.plot(steps, losses, label=f"{story.reference.phase.name}, uninterrupted", **thick)
    for row, (outcome, color) in enumerate(zip(story.outcomes, COLORS, strict=False)):
        steps, losses = zip(*outcome.losses.items(), strict=True)
        axes.plot(steps, losses, color=color, linewidth=2, zorder=9 - row)
        if outcome.killed:
            axes.plot(steps[-1], losses[-1], color=color, **CROSS)
    axes.set_ylabel("loss")
    axes.legend(frameon=False, loc="upper right")


def _plot_workers(axes: Axes, story: Story) -> None:
    """Plot a line for each worker. When one is killed, fewer resume from the last save."""
    middles: list[float] = []
    top = 0.0
    for outcome, color in zip(story.outcomes, COLORS, strict=False):
        first, last = min(outcome.losses), max(outcome.losses)
        rows = [top + worker for worker in range(outcome.phase.workers)]
        axes.hlines(rows, first, last, color=color, linewidth=4)
        middles.append((rows[0] + rows[-1]) / 2)
        top = rows[-1] + GAP
        if outcome.killed:
            axes.plot(last, rows[1], color=color, **CROSS)
            axes.vlines(outcome.newest, rows[0], top, color="0.3", linewidth=1, linestyle=":")
            axes.text(outcome.newest - 0.3, top, "last save", color="0.4", ha="right", **SMALL)
            axes.text(last + 0.5, rows[1], "killed", color=color, **SMALL)
    axes.set_yticks(middles, [outcome.phase.name for outcome in story.outcomes])
    for label, color in zip(axes.get_yticklabels(), COLORS, strict=False):
        label.set_color(color)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(top - GAP + 0.8, -0.8)


def _plot_differences(axes: Axes, story: Story) -> None:
    """Plot the differences from the reference; the tinted area is above the limit."""
    for outcome, color in zip(story.outcomes, COLORS, strict=False):
        gaps, allowed = outcome.gaps(story.reference.losses), largest_differences(story, outcome)
        axes.plot(gaps.keys(), gaps.values(), ".", color=color, markersize=6)
        axes.fill_between(allowed.keys(), allowed.values(), 1, color=color, alpha=0.12, linewidth=0)
    axes.set_ylabel("|difference|")
    axes.set_xlabel("step")
    axes.set_yscale("symlog", linthresh=1e-7)
    axes.set_ylim(-2e-8, 1e-3)
    axes.set_yticks([0, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3])
    axes.text(0.995, 0.9, "above the limit", transform=axes.transAxes, ha="right",
              color="0.4", **SMALL)  # fmt: skip
