"""The formulas of `shardwise plan-interval`: optimal intervals of snapshots and of saves.

All times are in seconds and all rates per second, unless a name says otherwise.

Each snapshot delays training. After a failure, training resumes from the last snapshot, and repeats
half an interval on average. Young's interval (1974), refined by Daly (2006), minimizes the sum of
these two costs. There are two tiers, each with its own interval. After most failures, training
resumes from snapshots in memory. After failures that memory does not survive, it resumes from
checkpoints in storage, for example if a group loses more nodes than its redundancy allows. The rate
of these failures is the rate of data loss in disk arrays: see Patterson, Gibson and Katz (1988) for
single redundancy, and Chen, Lee, Gibson, Katz and Patterson (1994) for double redundancy.

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
    """Measured costs of a training. Errors name the options of `shardwise plan-interval`.

    Args:
        step: seconds of a step.
        snapshot: seconds by which a snapshot in memory lengthens training: the time that training
            waits, and its slow-down by copies in the background.
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
        _check_positive("--step-time: the time of a step", self.step)
        _check_not_negative("--snapshot-cost: the cost of a snapshot", self.snapshot)
        _check_not_negative("--protect-time: the time to protect a snapshot", self.redundancy)
        _check_not_negative("--persist-cost: the cost of persisting", self.persist)
        _check_not_negative("--memory-restore: the time to restore", self.memory_restore)
        _check_not_negative("--storage-restore: the time to restore", self.storage_restore)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Failures of a cluster, and the failures that its memory survives.

    Errors name the options of `shardwise plan-interval`.

    Args:
        nodes: the number of nodes that train.
        rate: failures of single nodes per second, in the whole cluster.
        lost: the fraction of these failures in which the node's memory is lost. In all other
            failures, only processes end.
        correlated: failures per second in which several nodes fail together, for example a rack.
            Memory never survives these failures.
        group: the number of nodes that protect each other.
        survives: the number of nodes of a group that may be lost together; 0 without redundancy.
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
            raise ValueError(f"--nodes: the number of nodes is {self.nodes}: must be at least 1")
        _check_positive("--failures-per-day: the rate of failures", self.rate)
        _check_not_negative("--correlated-per-day: the rate of failures", self.correlated)
        _check_positive("--rebuild-minutes: the time to rebuild", self.rebuild)
        if not 0 < self.lost <= 1:
            raise ValueError(
                f"--memory-lost: the fraction of failures that lose a node's memory is {self.lost}"
                ": must be more than 0 and at most 1"
            )
        if not 1 <= self.group <= self.nodes:
            raise ValueError(
                f"--group: the number of nodes in a group is {self.group}: must be from 1 to "
                f"{self.nodes}, the number of nodes"
            )
        if not 0 <= self.survives < self.group:
            raise ValueError(
                f"--parity: a group of {self.group} cannot survive the loss of {self.survives} of "
                f"its nodes: must be from 0 to {self.group - 1}"
            )

    @property
    def interruption_rate(self) -> float:
        """The failures per second that interrupt training."""
        return self.rate + self.correlated

    @property
    def memory_loss_rate(self) -> float:
        """The failures per second that memory does not survive, λ_p."""
        node_loss_rate = self.rate * self.lost / self.nodes
        independent = group_loss_rate(
            self.nodes, self.group, node_loss_rate, self.rebuild, survives=self.survives
        )
        return min(independent, self.rate) + self.correlated


@dataclass(frozen=True, slots=True)
class Waste:
    """The time that is not spent on training, as fractions of all time.

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
        """The sum of the three fractions. The formulas are accurate if it is well below 1."""
        return self.snapshots + self.lost + self.restores


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval in steps and in seconds, and the time that is wasted with it."""

    steps: int
    seconds: float
    waste: Waste


@dataclass(frozen=True, slots=True)
class IntervalPlan:
    """The best intervals of both tiers.

    Attributes:
        memory: the interval for `Memory(snapshot_every=…)`.
        storage: the interval for `Checkpointer(save_every=…)`, a multiple of `memory`.
        interruption_rate: failures per second that interrupt training.
        memory_loss_rate: failures per second that memory does not survive.
    """

    memory: Interval
    storage: Interval
    interruption_rate: float
    memory_loss_rate: float

    @property
    def waste(self) -> float:
        """The fraction of the time that is not spent on training."""
        return self.memory.waste.total + self.storage.waste.total


def optimal_interval(cost: float, rate: float, *, shortest: float = 0.0) -> float:
    """Return the seconds between snapshots that waste the least time: T* = √(2C/λ).

    Args:
        cost: C, seconds by which a snapshot lengthens training.
        rate: λ, failures per second.
        shortest: the shortest possible interval: the time of a step, or of a snapshot.

    Source: Young (1974). Daly (2006) shows that the result is accurate while C is well below 1/λ.

    Raises:
        ValueError: `cost` or `shortest` is negative, or `rate` is not positive.
    """
    _check_not_negative("cost: the cost of a snapshot", cost)
    _check_positive("rate: the rate of failures", rate)
    _check_not_negative("shortest: the shortest interval", shortest)
    return max(math.sqrt(2 * cost / rate), shortest)


def estimate_waste(interval: float, cost: float, rate: float, restore: float = 0.0) -> Waste:
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
    _check_positive("interval: the interval", interval)
    _check_not_negative("cost: the cost of a snapshot", cost)
    _check_not_negative("rate: the rate of failures", rate)
    _check_not_negative("restore: the time to restore", restore)
    return Waste(cost / interval, rate * interval / 2, rate * restore)


def group_loss_rate(
    nodes: int, group: int, node_loss_rate: float, rebuild: float, *, survives: int = 1
) -> float:
    """Return the rate, per second, at which a group loses more nodes than it survives.

    The rate is G·n(n−1)…(n−m)·μ^(m+1)·r^m, where G = nodes/n is the number of groups. If the last
    group is smaller, G is not an integer. The formula assumes that lost nodes are rebuilt one after
    another.

    Args:
        nodes: the number of nodes of the cluster.
        group: n, the number of nodes that protect each other.
        node_loss_rate: μ, the losses of one node per second.
        rebuild: r, seconds from a loss until all data is protected again.
        survives: m, the number of losses that a group survives.

    Source: the mean time to data loss of RAID (Patterson et al. 1988) for m = 1, and of P + Q
    redundancy (Chen et al. 1994) for m = 2. The rate is accurate while μnr is well below 1.

    Raises:
        ValueError: a group cannot survive so many losses, or a rate or a time is not positive.
    """
    if not 0 <= survives < group:
        raise ValueError(
            f"survives: a group of {group} cannot survive the loss of {survives} of its nodes: "
            f"must be from 0 to {group - 1}"
        )
    _check_positive("node_loss_rate: the rate at which a node is lost", node_loss_rate)
    _check_positive("rebuild: the time to rebuild", rebuild)
    # the number of orders in which the nodes can be lost
    orders: float = math.perm(group, survives + 1)
    return nodes / group * orders * node_loss_rate * (node_loss_rate * rebuild) ** survives


def plan_intervals(costs: Costs, failures: Failures) -> IntervalPlan:
    """Return the best intervals of both tiers in whole steps.

    Raises:
        ValueError: memory survives none of the failures.
    """
    not_survived_rate = failures.memory_loss_rate
    survived_rate = failures.interruption_rate - not_survived_rate
    if survived_rate <= failures.interruption_rate * 1e-9:
        raise ValueError(
            "memory survives none of these failures, so snapshots in memory are useless: protect "
            "them with --parity 1 or more, or set --memory-lost below 1 if some failures leave the "
            "memory of the node intact"
        )
    memory = _best_interval_in_steps(
        costs.step,
        max(costs.step, costs.snapshot + costs.redundancy),
        (costs.snapshot, survived_rate, costs.memory_restore),
    )
    storage = _best_interval_in_steps(
        memory.seconds,
        max(memory.seconds, costs.persist),
        (costs.persist, not_survived_rate, costs.storage_restore),
    )
    persisted = Interval(memory.steps * storage.steps, storage.seconds, storage.waste)
    return IntervalPlan(memory, persisted, failures.interruption_rate, not_survived_rate)


def _best_interval_in_steps(
    step: float, shortest: float, costs_of_tier: tuple[float, float, float]
) -> Interval:
    """Return the best interval that is a multiple of `step` and not less than `shortest`.

    Args:
        step: seconds of a step.
        shortest: the shortest possible interval, in seconds.
        costs_of_tier: the cost of a snapshot, the rate of failures, and the time to restore.
    """
    cost, rate, restore = costs_of_tier
    optimal_steps = optimal_interval(cost, rate, shortest=shortest) / step
    min_steps = max(1, math.ceil(shortest / step * (1 - 1e-12)))
    candidates = [
        Interval(steps, steps * step, estimate_waste(steps * step, cost, rate, restore))
        for steps in {
            max(min_steps, math.floor(optimal_steps)),
            max(min_steps, math.ceil(optimal_steps)),
        }
    ]
    return min(candidates, key=lambda interval: interval.waste.total)


def _check_not_negative(description: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{description} is {value:g}: must be 0 or more")


def _check_positive(description: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{description} is {value:g}: must be more than 0")
