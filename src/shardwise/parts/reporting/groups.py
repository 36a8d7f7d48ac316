"""Find what slow ranks have in common, such as a host or a pipeline stage, and name it.

Example: ranks 8 … 15 are slow. They are all ranks of `node-1`, so the report names that host. If
the slow ranks are those with `pp=3`, on many hosts, it names the coordinate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.kernel.boxes.box import IntArray
from shardwise.parts.telemetry.records import NOT_RUN, Telemetry
from shardwise.parts.words import format_ranks

LEAST_SHARE = 0.75
"""The share of a host's ranks that must be in the set, so that the host is named."""
MOST_GROUPS = 100

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks with something in common.

    Attributes:
        name: the name of a host, such as `node-1`, or a coordinate, such as `pp=3`; empty for one
            rank alone.
        hosts: the hosts of these ranks; the first ones, if they are many.
        ranks: the ranks, ascending.
    """

    name: str
    hosts: tuple[str, ...]
    ranks: tuple[int, ...]

    @property
    def label(self) -> str:
        """The ranks and what they have in common: `node-1 (ranks 8…15)`, `rank 3 on node-0`."""
        ranks = format_ranks(self.ranks)
        if self.name:
            return f"{self.name} ({ranks})"
        return f"{ranks} on {self.hosts[0]}" if self.hosts else ranks


def group_ranks(
    telemetry: Telemetry, chosen: Mask, excess: npt.NDArray[np.float64]
) -> list[tuple[RankGroup, IntArray]]:
    """Return the chosen ranks in groups, each with the rows of its ranks.

    A host or a coordinate is a group if at least two ranks, and at least three of four ranks there,
    are chosen. The group that explains most is taken first: that with the largest sum of `excess`,
    times the share of its ranks that are chosen. Then the same among the ranks that are left. Those
    that remain form groups of one.

    Args:
        chosen: for each row of the telemetry, whether it is chosen.
        excess: for each row, how much there is to explain; only that of chosen rows counts.

    Returns:
        At most 100 groups.
    """
    left = chosen.copy()
    groups: list[tuple[str, IntArray]] = []
    while left.any() and len(groups) < MOST_GROUPS:
        candidates = _candidates(telemetry, chosen, np.where(left, excess, 0.0))
        best = max(candidates, key=lambda each: each[0], default=None)
        if best is None:
            break
        _, name, here = best
        groups.append((name, np.flatnonzero(left & here)))
        left &= ~here
    alone = np.flatnonzero(left)[: MOST_GROUPS - len(groups)]
    groups += [("", np.array([row])) for row in alone]
    return [(_describe(telemetry, name, rows), rows) for name, rows in groups]


def _candidates(
    telemetry: Telemetry, chosen: Mask, excess: npt.NDArray[np.float64]
) -> Iterator[tuple[float, str, Mask]]:
    """Yield the host that explains most, and so the coordinate of each axis. Hosts come first.

    Each comes with what it explains, its name, and its rows.
    """
    columns = [("", telemetry.host), *zip(telemetry.axes, telemetry.coordinates, strict=True)]
    for axis, column in columns:
        known = column != NOT_RUN
        values, index = np.unique(column, return_inverse=True)
        if axis and len(values) < 2:
            continue  # all ranks have the same coordinate
        here = np.bincount(index[chosen & known], minlength=len(values))
        share = here / np.maximum(np.bincount(index[known], minlength=len(values)), 1)
        explained = np.bincount(index[known], excess[known], minlength=len(values)) * share
        explained[(here < 2) | (share < LEAST_SHARE)] = 0.0
        at = int(explained.argmax())
        if explained[at] > 0.0:
            name = f"{axis}={values[at]}" if axis else telemetry.hosts[int(values[at])]
            yield float(explained[at]), name, known & (index == at)


def _describe(telemetry: Telemetry, name: str, rows: IntArray) -> RankGroup:
    hosts = dict.fromkeys(telemetry.host[rows].tolist())
    names = tuple(telemetry.hosts[at] for at, _ in zip(hosts, range(MOST_GROUPS), strict=False))
    return RankGroup(name, names, tuple(telemetry.ranks[rows].tolist()))
