"""Intervals of snapshots: the formulas, against published numbers and against brute force."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cli.interval_formulas import (
    DAY,
    Costs,
    Failures,
    estimate_waste,
    group_loss_rate,
    optimal_interval,
    plan_intervals,
)

YEAR = 365.25 * DAY
NODES = 2048
LLAMA = 419 / 54 / DAY
"""Interruptions per second of the pre-training of Llama 3 405B: arXiv 2407.21783, 3.3.4."""
HARDWARE = 0.78
"""The part of these that was of hardware."""

times = st.floats(1e-3, 1e4)
rates = st.floats(1e-9, 1e-4)


@pytest.mark.parametrize(
    ("cost", "seconds", "percent"),
    [(0.05, 33, 0.30), (0.5, 106, 0.95), (5, 334, 3.0), (120, 27.25 * 60, 14.7)],
)
def test_the_interval_of_llama(cost: float, seconds: float, percent: float) -> None:
    interval = optimal_interval(cost, LLAMA)
    assert interval == pytest.approx(seconds, rel=0.015)
    assert estimate_waste(interval, cost, LLAMA).total * 100 == pytest.approx(percent, rel=0.01)


@pytest.mark.parametrize(
    ("group", "minutes", "years"), [(2, 10, 22), (4, 10, 7.4), (8, 10, 3.2), (8, 60, 0.525)]
)
def test_groups_of_llama_that_lose_two_nodes(group: int, minutes: int, years: float) -> None:
    rate = group_loss_rate(NODES, group, HARDWARE * LLAMA / NODES, minutes * 60)
    assert 1 / rate / YEAR == pytest.approx(years, rel=0.02)


def test_waste_is_told_by_part() -> None:
    told = estimate_waste(100.0, 2.0, 1e-4, 50.0)
    assert (told.snapshots, told.lost, told.restores) == pytest.approx((0.02, 0.005, 0.005))
    assert told.total == pytest.approx(0.03)


@given(cost=times, rate=rates, factor=st.floats(0.01, 100))
def test_no_other_interval_wastes_less(cost: float, rate: float, factor: float) -> None:
    best = optimal_interval(cost, rate)
    least = estimate_waste(best, cost, rate).total
    assert least <= estimate_waste(best * factor, cost, rate).total * (1 + 1e-12)
    assert least == pytest.approx(math.sqrt(2 * cost * rate))
    assert optimal_interval(cost, rate, shortest=best * 2) == best * 2


@given(group=st.integers(2, 16), rate=rates, rebuild=times, survives=st.integers(0, 3))
def test_more_redundancy_loses_less(group: int, rate: float, rebuild: float, survives: int) -> None:
    """Each that is survived multiplies the rate by the chance of one more before it is rebuilt."""
    if survives + 1 >= group:
        return
    node = rate / NODES
    fewer = group_loss_rate(NODES, group, node, rebuild, survives=survives)
    more = group_loss_rate(NODES, group, node, rebuild, survives=survives + 1)
    assert more == pytest.approx(fewer * (group - survives - 1) * node * rebuild)


def test_without_redundancy_every_lost_node_is_a_loss() -> None:
    assert group_loss_rate(100, 4, 1e-6, 600, survives=0) == pytest.approx(100 * 1e-6)


@given(group=st.integers(2, 64), node=st.floats(1e-12, 1e-7), rebuild=times)
def test_the_rate_of_a_double_loss_is_that_of_a_loss_and_a_second(
    group: int, node: float, rebuild: float
) -> None:
    expected = 64 * node * -math.expm1(-(group - 1) * node * rebuild)
    rate = group_loss_rate(64, group, node, rebuild)
    chance = (group - 1) * node * rebuild
    assert expected <= rate * (1 + 1e-9)
    assert rate * (1 - chance / 2) <= expected * (1 + 1e-9)


def costs(**changed: float) -> Costs:
    return Costs(**{"step": 10.0, "snapshot": 0.5, "persist": 5.0} | changed)


def failures(**changed: float) -> Failures:
    values = {"nodes": NODES, "rate": LLAMA, "lost": HARDWARE, "group": 8} | changed
    return Failures(**values)  # type: ignore[arg-type]


def test_a_plan_of_both_tiers() -> None:
    plan = plan_intervals(costs(memory_restore=20, storage_restore=200), failures())
    assert (plan.memory.steps, plan.memory.seconds) in {(10, 100), (11, 110)}
    assert plan.memory.waste.restores == pytest.approx(LLAMA * 20, rel=1e-3)
    assert 1 / plan.memory_loss_rate / YEAR == pytest.approx(3.15, rel=0.01)
    assert plan.storage.steps % plan.memory.steps == 0
    assert plan.storage.seconds == plan.storage.steps * 10
    assert plan.storage.seconds == pytest.approx(math.sqrt(2 * 5 / plan.memory_loss_rate), rel=0.01)
    assert plan.waste == plan.memory.waste.total + plan.storage.waste.total


def test_correlated_failures_and_slow_rebuilds_need_storage_more_often() -> None:
    plain = plan_intervals(costs(), failures())
    slow = plan_intervals(costs(), failures(rebuild=3600))
    correlated = plan_intervals(costs(), failures(correlated=1 / (7 * DAY)))
    assert slow.memory_loss_rate == pytest.approx(6 * plain.memory_loss_rate)
    assert correlated.memory_loss_rate == pytest.approx(plain.memory_loss_rate + 1 / (7 * DAY))
    assert correlated.interruption_rate == pytest.approx(LLAMA + 1 / (7 * DAY))
    assert correlated.storage.steps < slow.storage.steps < plain.storage.steps
    assert correlated.memory.steps == plain.memory.steps


def test_no_more_is_lost_than_fails() -> None:
    assert failures(rebuild=1e12).memory_loss_rate == LLAMA


@given(
    step=times,
    snapshot=st.floats(0, 100),
    redundancy=st.floats(0, 100),
    persist=st.floats(0, 1000),
    lost=st.floats(0.01, 1),
)
def test_plans_are_the_best_of_those_that_can_be_carried_out(
    step: float, snapshot: float, redundancy: float, persist: float, lost: float
) -> None:
    told = Costs(step=step, snapshot=snapshot, redundancy=redundancy, persist=persist)
    plan = plan_intervals(told, failures(lost=lost))
    survived = plan.interruption_rate - plan.memory_loss_rate
    memory, storage = plan.memory, plan.storage
    for interval, unit, least, cost, rate in (
        (memory, 1, snapshot + redundancy, snapshot, survived),
        (storage, memory.steps, persist, persist, plan.memory_loss_rate),
    ):
        assert interval.steps >= 1
        assert interval.seconds == pytest.approx(interval.steps * step)
        assert interval.seconds >= least * (1 - 1e-9)
        for steps in (interval.steps - unit, interval.steps + unit):
            if steps > 0 and steps * step >= least:
                other = estimate_waste(steps * step, cost, rate).total
                assert interval.waste.total <= other * (1 + 1e-9)


def test_snapshots_that_cost_nothing_are_taken_as_often_as_they_can_be() -> None:
    assert plan_intervals(costs(snapshot=0.0), failures()).memory.steps == 1
    assert plan_intervals(costs(snapshot=0.0, redundancy=25.0), failures()).memory.steps == 3
    assert plan_intervals(costs(snapshot=0.0, redundancy=30.0), failures()).memory.steps == 3


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"step": 0.0}, "time of a step is 0: must be more than 0"),
        ({"step": math.nan}, "time of a step is nan"),
        ({"snapshot": -1.0}, "cost of a snapshot is -1: must be 0 or more"),
        ({"redundancy": -1.0}, "protect a snapshot is -1"),
        ({"persist": math.inf}, "cost of persisting is inf"),
        ({"memory_restore": -1.0}, "--memory-restore: the time to restore is -1"),
        ({"storage_restore": -1.0}, "--storage-restore: the time to restore is -1"),
    ],
)
def test_costs_that_make_no_sense_are_refused(changed: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        costs(**changed)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"nodes": 0}, "number of nodes is 0"),
        ({"rate": 0.0}, "rate of failures is 0: must be more than 0"),
        ({"rate": -1.0}, "rate of failures is -1"),
        ({"lost": 0.0}, r"memory is 0.0"),
        ({"lost": 1.1}, r"memory is 1.1"),
        ({"correlated": -1.0}, "--correlated-per-day: the rate of failures is -1"),
        ({"group": 4096}, "from 1 to 2048"),
        ({"survives": 8}, "cannot survive the loss of 8"),
        ({"survives": -1}, "cannot survive the loss of -1"),
        ({"rebuild": 0.0}, "time to rebuild is 0"),
    ],
)
def test_failures_that_make_no_sense_are_refused(changed: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        failures(**changed)


def test_a_memory_that_survives_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="memory survives none of these failures"):
        plan_intervals(costs(), failures(survives=0, lost=1.0))
    assert plan_intervals(costs(), failures(survives=0)).memory.steps > 1
