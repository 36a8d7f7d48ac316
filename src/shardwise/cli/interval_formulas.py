"""Optimal checkpoint intervals: how often to take snapshots, and how often to persist them.

All times are in seconds and all rates per second, unless a name says otherwise.

Each snapshot delays training. After a failure, training resumes from the last snapshot, and repeats
half an interval on average. Young's interval (1974), refined by Daly (2006), minimizes the sum of
the two costs. Each of the two tiers has an interval. Snapshots in memory serve most failures.
Checkpoints in storage serve the failures that memory does not survive, for example the loss of more
nodes of a group than its redundancy allows. The rate of these failures follows the rate of data
loss in disk arrays: Patterson, Gibson and Katz (1988) for single redundancy; Chen, Lee, Gibson,
Katz and Patterson (1994) for double redundancy.

    Young: A first order approximation to the optimum checkpoint interval. CACM 17(9).
    Daly: A higher order estimate of the optimum checkpoint interval for restart dumps. FGCS 22(3).
    Patterson et al.: A case for redundant arrays of inexpensive disks (RAID). SIGMOD 1988.
    Chen et al.: RAID: high-performance, reliable secondary storage. ACM Computing Surveys 26(2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

DAY = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Measured costs of a training.

    Args:
        step: seconds of a step.
        snapshot: seconds by which a snapshot in memory lengthens training. This is more than the
            time it blocks, because copies in the background slow training down too.
        redundancy: seconds until a snapshot is protected, during which training continues.
        persist: seconds by which persisting a snapshot to storage lengthens training.
        memory_restore: seconds from a failure until training resumes from memory.
        storage_restore: seconds from a failure until training resumes from storage.

    Raises:
        ValueError: a time is negative or not finite, or the step time is 0.
    """

    step: float
    snapshot: float
    persist: float
    redundancy: float = 0.0
    memory_restore: float = 0.0
    storage_restore: float = 0.0

    def __post_init__(self) -> None:
        _more_than_zero("the time of a step", self.step)
        _not_negative("the cost of a snapshot", self.snapshot)
        _not_negative("the time of redundancy", self.redundancy)
        _not_negative("the cost of persisting", self.persist)
        _not_negative("the time to restore from memory", self.memory_restore)
        _not_negative("the time to restore from storage", self.storage_restore)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Failures of a cluster, and what its memory survives.

    Args:
        nodes: the number of nodes that train.
        rate: failures of single nodes per second, in the whole cluster.
        lost: the fraction of these failures that lose the node's memory. The others only end
            processes.
        correlated: further failures per second, which memory never survives because several nodes
            fail at once, for example a rack.
        group: how many nodes protect each other.
        survives: how many nodes of a group may be lost at once; 0 without redundancy.
        rebuild: seconds from the loss of a node until its data is protected again.

    Raises:
        ValueError: a value is out of range, or values contradict each other.
    """

    nodes: int
    rate: float
    lost: float = 1.0
    correlated: float = 0.0
    group: int = 2
    survives: int = 1
    rebuild: float = 600.0

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise ValueError(f"the number of nodes is {self.nodes}: must be at least 1")
        _more_than_zero("the rate of failures", self.rate)
        _not_negative("the rate of correlated failures", self.correlated)
        _more_than_zero("the time to rebuild", self.rebuild)
        if not 0 < self.lost <= 1:
            raise ValueError(
                f"the fraction of failures that lose a node's memory is {self.lost}: must be more "
                "than 0 and at most 1"
            )
        if not 1 <= self.group <= self.nodes:
            raise ValueError(f"a group of {self.group} nodes: must be from 1 to {self.nodes}")
        if not 0 <= self.survives < self.group:
            raise ValueError(
                f"a group of {self.group} cannot survive the loss of {self.survives} of its nodes"
            )

    @property
    def all(self) -> float:
        """All failures per second that interrupt training."""
        return self.rate + self.correlated

    @property
    def beyond_memory(self) -> float:
        """Failures per second that memory does not survive, λ_p."""
        node = self.rate * self.lost / self.nodes
        independent = group_loss_rate(
            self.nodes, self.group, node, self.rebuild, survives=self.survives
        )
        return min(independent, self.rate) + self.correlated


@dataclass(frozen=True, slots=True)
class Waste:
    """Fractions of the time that are not spent on training.

    Attributes:
        snapshots: the fraction for taking snapshots, C/T.
        lost: the fraction for repeating work after failures, λT/2.
        restores: the fraction from failures until training resumes, λR.
    """

    snapshots: float
    lost: float
    restores: float

    @property
    def total(self) -> float:
        """The sum: an approximation that is good if it is well below 1."""
        return self.snapshots + self.lost + self.restores


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval in steps and in seconds, and the time that is wasted with it."""

    steps: int
    seconds: float
    waste: Waste


@dataclass(frozen=True, slots=True)
class Plan:
    """The best intervals of both tiers.

    Attributes:
        memory: the interval for `Memory(snapshot_every=…)`.
        storage: the interval for `Checkpointer(save_every=…)`, a multiple of the former.
        failures: failures per second that interrupt training.
        beyond_memory: failures per second that memory does not survive.
    """

    memory: Interval
    storage: Interval
    failures: float
    beyond_memory: float

    @property
    def waste(self) -> float:
        """The fraction of the time that is not spent on training."""
        return self.memory.waste.total + self.storage.waste.total


def optimal_interval(cost: float, rate: float, *, least: float = 0.0) -> float:
    """Return the seconds between snapshots that waste the least time: T* = √(2C/λ).

    Args:
        cost: C, seconds by which a snapshot lengthens training.
        rate: λ, failures per second.
        least: the shortest possible interval: a step, or a snapshot with its redundancy.

    Source: Young (1974). Daly (2006) shows that the result is accurate while C is well below 1/λ.

    Raises:
        ValueError: a cost or a bound is negative, or the rate is not positive.
    """
    _not_negative("the cost of a snapshot", cost)
    _more_than_zero("the rate of failures", rate)
    _not_negative("the least interval", least)
    return max(math.sqrt(2 * cost / rate), least)


def waste(interval: float, cost: float, rate: float, restore: float = 0.0) -> Waste:
    """Return the waste with a snapshot every `interval` seconds: C/T + λ(T/2 + R).

    Args:
        interval: T, seconds from one snapshot to the next.
        cost: C, seconds by which a snapshot lengthens training.
        rate: λ, failures per second.
        restore: R, seconds from a failure until training resumes.

    Source: Young (1974), to first order in λ.

    Raises:
        ValueError: the interval is not positive, or another value is negative.
    """
    _more_than_zero("the interval", interval)
    _not_negative("the cost of a snapshot", cost)
    _not_negative("the rate of failures", rate)
    _not_negative("the time to restore", restore)
    return Waste(cost / interval, rate * interval / 2, rate * restore)


def group_loss_rate(
    nodes: int, group: int, node: float, rebuild: float, *, survives: int = 1
) -> float:
    """Return how often a group loses more nodes than it survives, per second.

    The rate is G·n(n−1)…(n−m)·μ^(m+1)·r^m. G = nodes/n is the number of groups, a fraction if the
    last one is smaller. Lost nodes are rebuilt one after another.

    Args:
        nodes: the number of nodes of the cluster.
        group: n, how many nodes protect each other.
        node: μ, losses of one node per second.
        rebuild: r, seconds from a loss until everything is protected again.
        survives: m, how many losses a group survives.

    Source: the mean time to data loss of RAID (Patterson et al. 1988) for m = 1, and of P + Q
    redundancy (Chen et al. 1994) for m = 2. The rate is accurate while μnr is well below 1.

    Raises:
        ValueError: a group cannot survive so many losses, or a rate or a time is not positive.
    """
    if not 0 <= survives < group:
        raise ValueError(f"a group of {group} cannot survive the loss of {survives} of its nodes")
    _more_than_zero("the rate at which a node is lost", node)
    _more_than_zero("the time to rebuild", rebuild)
    one_after_another: float = math.perm(group, survives + 1)
    return nodes / group * one_after_another * node * (node * rebuild) ** survives


def plan_intervals(costs: Costs, failures: Failures) -> Plan:
    """Return the best intervals of both tiers in whole steps.

    Raises:
        ValueError: memory survives none of the failures.
    """
    beyond = failures.beyond_memory
    survived = failures.all - beyond
    if survived <= failures.all * 1e-9:
        raise ValueError(
            "memory survives none of these failures, so snapshots in memory are useless: without "
            "redundancy, they survive only failures that do not lose a node's memory"
        )
    memory = _in_steps(
        costs.step,
        max(costs.step, costs.snapshot + costs.redundancy),
        (costs.snapshot, survived, costs.memory_restore),
    )
    storage = _in_steps(
        memory.seconds,
        max(memory.seconds, costs.persist),
        (costs.persist, beyond, costs.storage_restore),
    )
    persisted = Interval(memory.steps * storage.steps, storage.seconds, storage.waste)
    return Plan(memory, persisted, failures.all, beyond)


def _in_steps(unit: float, least: float, tier: tuple[float, float, float]) -> Interval:
    """Return the best interval that is a multiple of `unit` and not shorter than `least`."""
    cost, rate, restore = tier
    wanted = optimal_interval(cost, rate, least=least) / unit
    fewest = max(1, math.ceil(least / unit * (1 - 1e-12)))
    found = [
        Interval(steps, steps * unit, waste(steps * unit, cost, rate, restore))
        for steps in {max(fewest, math.floor(wanted)), max(fewest, math.ceil(wanted))}
    ]
    return min(found, key=lambda interval: interval.waste.total)


def _not_negative(what: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{what} is {value:g}: must be 0 or more")


def _more_than_zero(what: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{what} is {value:g}: must be more than 0")
