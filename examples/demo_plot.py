"""Plot the demo: the losses of all phases over the reference, and their differences from it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

if TYPE_CHECKING:
    from demo import Outcome

COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc3366")


def draw_plot(story: list[Outcome], reference: Outcome, path: Path) -> None:
    """Write the plot as a PNG file."""
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(10, 6.4), sharex=True, height_ratios=(5, 2), layout="constrained"
    )
    steps, losses = zip(*reference.losses.items(), strict=True)
    thick = {"color": "0.82", "linewidth": 7, "solid_capstyle": "round"}
    above.plot(steps, losses, label=reference.phase.title, **thick)
    for outcome, color in zip(story, COLORS, strict=True):
        steps, losses = zip(*outcome.losses.items(), strict=True)
        gaps, bounds = outcome.gaps(reference.losses).values(), outcome.bounds().values()
        above.plot(steps, losses, color=color, linewidth=1.8, label=outcome.phase.title)
        if outcome.phase.killed:
            above.plot(steps[-1], losses[-1], "X", color=color, markersize=11, mec="white")
        below.plot(steps, gaps, ".", color=color, markersize=6)
        below.fill_between(steps, bounds, 1, color=color, alpha=0.12, linewidth=0)
    above.set_ylabel("loss")
    below.set_ylabel("|difference|")
    below.set_xlabel("step")
    below.set_yscale("symlog", linthresh=1e-7)
    below.set_ylim(-2e-8, 1e-3)
    below.set_yticks([0, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3])
    below.text(0.995, 0.9, "above the limit", transform=below.transAxes, ha="right", va="center",
               color="0.4", fontsize=9)  # fmt: skip
    figure.suptitle("One run, four parallelisms: the loss continues as if uninterrupted")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.margins(x=0.01)
    figure.savefig(path, dpi=130)
