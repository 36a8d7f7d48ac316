"""Draws the picture of the README: `python docs/images/idea.py` (needs matplotlib)."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
INK = "#333333"


def tensor(axes: Axes, x: float, y: float, rows: int, columns: int, size: float = 1.6) -> None:
    """A global tensor at a place, divided among ranks by rows and columns."""
    high, wide = size / rows, size / columns
    for row in range(rows):
        for column in range(columns):
            rank = row * columns + column
            corner = x + column * wide, y + size - (row + 1) * high
            axes.add_patch(
                Rectangle(corner, wide, high, facecolor=COLOURS[rank], edgecolor="white", lw=2)
            )
            axes.text(corner[0] + wide / 2, corner[1] + high / 2, f"rank {rank}", ha="center",
                      va="center", color="white", fontsize=8)  # fmt: skip


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], text: str) -> None:
    """From one place to another, saying what happens on the way."""
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=16, color=INK, lw=1.4)
    )
    middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
    axes.text(middle[0], middle[1] + 0.12, text, ha="center", va="bottom", color=INK, fontsize=9)


def main() -> None:
    figure, axes = plt.subplots(figsize=(10, 3.6))
    axes.set_xlim(0, 10)
    axes.set_ylim(0, 3.6)
    axes.axis("off")
    tensor(axes, 0.3, 1.0, 4, 1)
    axes.text(1.1, 2.75, "saved: FSDP on 4", ha="center", color=INK)
    arrow(axes, (2.0, 1.8), (3.5, 1.8), "pieces")
    axes.add_patch(
        FancyBboxPatch((3.6, 0.45), 2.8, 2.7, boxstyle="round,pad=0.05", fc="#f4f4f4", ec="#999999")
    )
    axes.text(5, 2.85, "checkpoint", ha="center", color=INK, weight="bold")
    for rank in range(4):
        y = 2.2 - rank * 0.33
        axes.add_patch(Rectangle((3.85, y), 2.3, 0.26, facecolor=COLOURS[rank]))
        axes.text(5, y + 0.12, f"r0000{rank}-….safetensors", ha="center", va="center",
                  color="white", fontsize=8)  # fmt: skip
    axes.text(5, 0.78, "manifest.json: which box of which\ntensor lies in which bytes",
              ha="center", va="center", color=INK, fontsize=8)  # fmt: skip
    arrow(axes, (6.5, 1.8), (8.0, 1.8), "boxes wanted")
    tensor(axes, 8.15, 1.9, 1, 2, 1.3)
    axes.text(8.8, 3.3, "loaded: tensor-parallel on 2", ha="center", color=INK)
    tensor(axes, 8.15, 0.1, 2, 2, 1.3)
    axes.text(8.8, 1.5, "or both, on 4; or any other", ha="center", color=INK)
    figure.savefig(
        Path(__file__).with_suffix(".png"), dpi=130, bbox_inches="tight", facecolor="white"
    )


if __name__ == "__main__":
    main()
