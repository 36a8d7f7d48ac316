"""Two jobs that save to one place, and jobs that are told to go."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

import shardwise as sw
from tests.faults.scenario import (
    assert_values,
    leftovers,
    restored,
    state_of,
    step_directory,
)
from tests.tools.faulty_store import Fault, FaultyStore
from tests.tools.gang import Gang


def save_as_two_jobs(place: Path, rounds: int) -> list[str]:
    """On a rank: ranks 0 and 1 are one job, 2 and 3 another; both save the same, at once."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    job = rank // 2
    results = []
    for number in range(rounds):
        dist.barrier()
        try:
            target = step_directory(place, number)
            sw.save(target, state_of(job + 1, rank % 2, 2), step=number, group=groups[job])
            results.append("saved")
        except sw.ShardwiseError as error:
            results.append(type(error).__name__)
    return results


def test_of_two_jobs_that_save_the_same_step_one_does(gang: Gang, place: Path) -> None:
    rounds = 12
    outcomes = gang.run(save_as_two_jobs, place, rounds, world=4)
    for number in range(rounds):
        ended = [results[number] for results in outcomes]
        assert ended[0] == ended[1]
        assert ended[2] == ended[3]
        assert sorted(ended) == ["CheckpointExistsError"] * 2 + ["saved"] * 2
        winner = ended.index("saved") // 2 + 1
        state = state_of(0)
        sw.load(step_directory(place, number), state)
        assert_values(state, winner)
        sw.open(step_directory(place, number)).verify()
    assert leftovers(place) == []


def meet_in_the_middle(place: Path) -> str:
    """On a rank of two jobs of one rank each: neither publishes before both have written."""
    rank = dist.get_rank()
    groups = [dist.new_group([0]), dist.new_group([1])]
    fault = Fault(0, lambda operation: dist.barrier(), verbs=("publish",))
    try:
        store = FaultyStore(place, fault)
        sw.save(store, state_of(rank + 1), group=groups[rank])
    except sw.ShardwiseError as error:
        return type(error).__name__
    return "saved"


def test_a_job_that_publishes_second_is_refused_and_tidies_up(gang: Gang, place: Path) -> None:
    ended = gang.run(meet_in_the_middle, place / "it", world=2)
    assert sorted(ended) == ["CheckpointExistsError", "saved"]
    state = state_of(0)
    sw.load(place / "it", state)
    assert_values(state, ended.index("saved") + 1)
    assert leftovers(place) == []


def test_where_a_checkpoint_is_nothing_is_written(place: Path) -> None:
    sw.save(place / "it", state_of(1))
    fault = Fault(verbs=("create", "publish", "delete"))
    with pytest.raises(sw.CheckpointExistsError):
        sw.save(FaultyStore(place / "it", fault), state_of(2))
    assert fault.operations == []


def train_until_told_to_go(root: Path, told: int, when: str) -> None:
    """On a rank: steps of which none is due; one rank is told, between saves or within one."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def tell(operation: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    within = rank == told and when == "within"
    fault = Fault(0 if within else None, tell, verbs=("write_at",))
    store = FaultyStore(root, fault)
    with sw.Checkpointer(
        store, save_every=100, save_on_signals=[signal.SIGTERM], memory=None
    ) as checkpointer:
        for step in range(100, 200):
            if rank == told and when == "between" and step == 103:
                os.kill(os.getpid(), signal.SIGTERM)
            checkpointer.save(step, state_of(step, rank, world))


@pytest.mark.parametrize("told", [0, 1])
@pytest.mark.parametrize(("when", "last"), [("between", 103), ("within", 101)])
def test_told_to_go_all_ranks_save_and_go(
    gang: Gang, place: Path, told: int, when: str, last: int
) -> None:
    outcomes = gang.run_outcomes(train_until_told_to_go, place, told, when, world=2)
    assert [outcome.signal for outcome in outcomes] == [signal.SIGTERM] * 2
    found, state = restored(place)
    assert found == last
    assert_values(state, last)
    assert leftovers(place) == []


def handler_after(root: Path) -> bool:
    """Whether the handler of before is there again when the checkpointer is closed."""
    before = signal.getsignal(signal.SIGTERM)
    with sw.Checkpointer(root, save_on_signals=[signal.SIGTERM], memory=None):
        during = signal.getsignal(signal.SIGTERM)
    return during != before and signal.getsignal(signal.SIGTERM) == before


def test_without_a_signal_nothing_stays(gang: Gang, place: Path) -> None:
    assert gang.run(handler_after, place, world=1) == [True]


def too_late(root: Path) -> None:
    """On a rank: told to go after the last save."""
    with sw.Checkpointer(root, save_on_signals=[signal.SIGTERM], memory=None) as checkpointer:
        checkpointer.save(1, {"x": 1})
        os.kill(os.getpid(), signal.SIGTERM)
    raise AssertionError("the signal was swallowed")


def test_a_signal_after_the_last_save_is_not_swallowed(gang: Gang, place: Path) -> None:
    outcomes = gang.run_outcomes(too_late, place, world=2)
    assert [outcome.signal for outcome in outcomes] == [signal.SIGTERM] * 2


def two_at_once(root: Path) -> None:
    """On a rank: two that are closed in the order in which they were made; then told to go."""
    first = sw.Checkpointer(root / "a", save_on_signals=[signal.SIGTERM], memory=None)
    second = sw.Checkpointer(root / "b", save_on_signals=[signal.SIGTERM], memory=None)
    first.close()
    second.close()
    os.kill(os.getpid(), signal.SIGTERM)
    raise AssertionError("the signal was swallowed")


def test_two_checkpointers_leave_no_handler_behind(gang: Gang, place: Path) -> None:
    (outcome,) = gang.run_outcomes(two_at_once, place, world=1)
    assert outcome.signal == signal.SIGTERM
