"""Stragglers: the ranks that made an operation slow, and the stage in which they did.

A rank's *self time* in a stage is the duration minus its waits for others. A rank is a
straggler of a stage if its self time is

- more than 1.5 times the median of all ranks that ran the stage, and
- longer than the median by 5 % of the operation's duration, and by 50 ms.

For example, 63 ranks write for 12 s, and one for 31 s. The save takes 38 s, so the last one is a
straggler of `write`: 31 s is more than 18 s, and 19 s longer than the median.

Arrival is a stage, too: the time by which a rank entered the operation later than the first one.
The others wait for it in their first round, and these waits do not count as their work.

With an even number of ranks, the median is the smaller one of the two in the middle. So one of two
ranks can be a straggler.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.parts.reporting.groups import RankGroup, group_ranks
from shardwise.parts.telemetry.records import Telemetry

LEAST_RATIO = 1.5
LEAST_SHARE = 0.05
LEAST_SECONDS = 0.05
MOST_STRAGGLERS = 100

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Straggler:
    """Ranks with something in common, which were slow in one stage.

    Attributes:
        stage: the name of the stage.
        group: the ranks, and the host or coordinate that they have in common.
        seconds: the self time of the slowest of these ranks.
        median: the self time of the median of all ranks.
        retries: how many requests to the storage these ranks repeated in the stage.
    """

    stage: str
    group: RankGroup
    seconds: float
    median: float
    retries: int

    @property
    def who(self) -> str:
        """The ranks, in words."""
        return self.group.label

    @property
    def excess(self) -> float:
        """By how many seconds the slowest of these ranks exceeds the median."""
        return self.seconds - self.median


def find_stragglers(telemetry: Telemetry) -> list[Straggler]:
    """Return the stragglers of an operation, the largest loss of time first; at most 100."""
    found = []
    for stage in telemetry.with_arrival().stages:
        own = stage.self_seconds
        if np.isnan(own).all():
            continue
        median = lower_median(own)
        slow = (own > LEAST_RATIO * median) & (own - median >= least_excess(telemetry.seconds))
        found += [
            Straggler(
                *(stage.name, group, float(own[rows].max()), median),
                retries=int(stage.retries[rows].sum()),
            )
            for group, rows in group_ranks(telemetry, slow, own - median)
        ]
    return sorted(found, key=lambda each: -each.excess)[:MOST_STRAGGLERS]


def least_excess(seconds: float) -> float:
    """Return the seconds that matter in an operation of this duration."""
    return max(LEAST_SHARE * seconds, LEAST_SECONDS)


def lower_median(values: Seconds) -> float:
    """Return the median of the values that are not NaN, the smaller one of two; NaN without any."""
    known = values[~np.isnan(values)]
    if not len(known):
        return float("nan")
    return float(np.partition(known, (len(known) - 1) // 2)[(len(known) - 1) // 2])


def upper_median(values: Seconds) -> float:
    """Return the median, the larger one of two.

    The rank with the smaller median of the times has the larger median of the rates, if all ranks
    moved as many bytes.
    """
    return -lower_median(-values)
