"""Plot the demo of failures: losses, and the time and data sources of each recovery."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")
from failures_report import PLACES
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

if TYPE_CHECKING:
    from failures import Story
    from failures_hosts import Launch

LAUNCHES = ("#0072b2", "#e69f00", "#009e73", "#cc3366")
SECONDS = {"start": "#c3cad2", "restore": "#0072b2", "first step": "#7f8b97"}
ORIGINS = dict(zip(PLACES, ("#009e73", "#56b4e9", "#e69f00", "#7f8b97"), strict=True))


def draw_plot(story: Story, reference: Launch, path: Path) -> None:
    """Write the plot as a PNG file."""
    figure = plt.figure(figsize=(11, 8.4), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(5, 3))
    _plot_losses(*above.subplots(2, 1, sharex=True, height_ratios=(5, 2)), story, reference)
    left, right = below.subplots(1, 2, sharey=True)
    names = [recovery.failure.title.replace(" and ", " and\n") for recovery in story.recoveries]
    _plot_bars(left, names, [each.seconds for each in story.recoveries], SECONDS)
    left.set_title("seconds from noticing the failure to training again", fontsize=10)
    millions = [
        {kind: nbytes / 1e6 for kind, nbytes in each.origin.items()} for each in story.recoveries
    ]
    _plot_bars(right, names, millions, ORIGINS)
    right.set_title("MB of state restored, by source", fontsize=10)
    left.invert_yaxis()
    figure.suptitle("One run that loses a process, a host, and two hosts at once")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _plot_losses(above: Axes, below: Axes, story: Story, reference: Launch) -> None:
    """Plot the losses of each launch over the reference, and the steps that each trained."""
    steps, losses = zip(*reference.losses.items(), strict=True)
    thick = {"color": "0.84", "linewidth": 9, "solid_capstyle": "round"}
    above.plot(steps, losses, label=reference.title, **thick)
    labels = []
    for row, (launch, color) in enumerate(zip(story.launches, LAUNCHES, strict=False)):
        steps, losses = zip(*launch.losses.items(), strict=True)
        above.plot(steps, losses, color=color, linewidth=2, zorder=5 - row)
        below.hlines(row, steps[0], steps[-1], color=color, linewidth=6)
        labels.append(
            f"{launch.title}, from {story.recoveries[row - 1].source}" if row else launch.title
        )
        if row < len(story.recoveries):
            cross = {"color": color, "markersize": 12, "mec": "white", "zorder": 10}
            above.plot(steps[-1], losses[-1], "X", **cross)
            below.plot(steps[-1], row, "X", **cross)
            title = story.recoveries[row].failure.title
            below.text(steps[-1] + 0.5, row, title, color=color, va="center", fontsize=9)
    above.set_ylabel("loss")
    above.legend(frameon=False, fontsize=9, loc="upper right")
    above.margins(x=0.02)
    below.set_xlabel("step")
    below.set_yticks(range(len(labels)), labels, fontsize=9)
    below.set_ylim(len(labels) - 0.4, -0.6)
    _remove_frame(above)
    _remove_frame(below)


def _plot_bars(
    axes: Axes, names: Sequence[str], amounts: Sequence[dict[str, float]], colors: dict[str, str]
) -> None:
    """Plot a stacked bar for each recovery."""
    ends = [0.0] * len(names)
    for kind, color in colors.items():
        widths = [each.get(kind, 0.0) for each in amounts]
        axes.barh(range(len(names)), widths, left=ends, color=color, height=0.6, label=kind)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for row, end in enumerate(ends):
        axes.text(end, row, f" {end:.1f}", va="center", fontsize=9)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set_xlim(0, 1.12 * max(ends))
    axes.legend(frameon=False, fontsize=9, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.1))
    _remove_frame(axes)


def _remove_frame(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
