"""Name the hosts and coordinates that a set of ranks has in common.

Example: ranks 8 … 15 are slow. They are all ranks of `node-1`, so the report names that host. If
the slow ranks are those with `pp=3`, on many hosts, it names the coordinate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.boxes.box import IntArray
from shardwise.reporting.words import format_ranks
from shardwise.telemetry.records import NOT_RUN, Telemetry

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


def group_ranks(telemetry: Telemetry, chosen: Mask) -> list[tuple[RankGroup, IntArray]]:
    """Return the chosen ranks in groups, each with the rows of its ranks.

    A host or a coordinate is a group if at least two ranks, and at least three of four ranks there,
    are chosen. The largest group is taken first, and then the largest of the others. Ranks that are
    left form groups of one.

    Args:
        chosen: for each row of the telemetry, whether it is chosen.

    Returns:
        At most 100 groups.
    """
    left = chosen.copy()
    groups: list[tuple[str, IntArray]] = []
    while left.any() and len(groups) < MOST_GROUPS:
        best = max(_candidates(telemetry, left), key=lambda each: len(each[1]), default=None)
        if best is None:
            break
        groups.append(best)
        left[best[1]] = False
    alone = np.flatnonzero(left)[: MOST_GROUPS - len(groups)]
    groups += [("", np.array([row])) for row in alone]
    return [(_describe(telemetry, name, rows), rows) for name, rows in groups]


def _candidates(telemetry: Telemetry, left: Mask) -> Iterator[tuple[str, IntArray]]:
    """Yield the largest host, and the largest coordinate of each axis. Hosts come first."""
    columns = [("", telemetry.host), *zip(telemetry.axes, telemetry.coordinates, strict=True)]
    for axis, column in columns:
        known = column != NOT_RUN
        values, index = np.unique(column, return_inverse=True)
        if axis and len(values) < 2:
            continue  # all ranks have the same coordinate
        here = np.bincount(index[left & known], minlength=len(values))
        total = np.bincount(index[known], minlength=len(values))
        here[(here < 2) | (here < LEAST_SHARE * total)] = 0
        at = int(here.argmax())
        if here[at]:
            name = f"{axis}={values[at]}" if axis else telemetry.hosts[int(values[at])]
            yield name, np.flatnonzero(left & known & (index == at))


def _describe(telemetry: Telemetry, name: str, rows: IntArray) -> RankGroup:
    hosts = dict.fromkeys(telemetry.host[rows].tolist())
    names = tuple(telemetry.hosts[at] for at, _ in zip(hosts, range(MOST_GROUPS), strict=False))
    return RankGroup(name, names, tuple(telemetry.ranks[rows].tolist()))
