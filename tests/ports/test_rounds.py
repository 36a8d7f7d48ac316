"""A round either succeeds on all ranks or fails on all ranks."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import pytest

from shardwise import LostRankError, MismatchError, RankError, ShardwiseError, StateError
from shardwise.ports.read_strategy import Group, Round
from shardwise.testing.thread_group import ThreadGroup, run_ranks, run_ranks_and_catch

WORLD = 3


def test_each_rank_gets_the_messages_of_all() -> None:
    def run(group: ThreadGroup) -> list[tuple[int, str]]:
        with Round(group, "meeting") as all_ranks:
            return all_ranks.all_gather((group.rank, "x" * 3000), tuple[int, str])

    expected = [(rank, "x" * 3000) for rank in range(WORLD)]
    assert run_ranks(WORLD, run) == [expected] * WORLD
    assert run_ranks(1, run) == [expected[:1]]


def test_what_all_messages_are_together_is_the_result_on_all() -> None:
    def run(group: ThreadGroup) -> int:
        with Round(group, "adding") as all_ranks:
            return all_ranks.all_reduce(group.rank + 1, int, sum)

    assert run_ranks(WORLD, run) == [6] * WORLD
    assert run_ranks(1, run) == [1]


def test_what_rank_0_concludes_is_the_result_on_all() -> None:
    def run(group: ThreadGroup) -> str:
        with Round(group, "adding") as all_ranks:
            return all_ranks.all_reduce(
                group.rank + 1, int, sum, lambda all_: f"{all_} apples", str
            )

    assert run_ranks(WORLD, run) == ["6 apples"] * WORLD
    assert run_ranks(1, run) == ["1 apples"]


def test_the_value_of_rank_0_is_shared() -> None:
    def run(group: ThreadGroup) -> str:
        with Round(group, "choosing", rank0_only=True) as all_ranks:
            return all_ranks.broadcast(f"by {group.rank}", str)

    assert run_ranks(WORLD, run) == ["by 0"] * WORLD


def fail(group: Group) -> None:
    raise StateError(f"bad on rank {group.rank}")


class WithoutTextError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("rank0_only", [False, True])
@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (RuntimeError("file \udcff"), "file \\udcff"),
        (WithoutTextError(), "its __str__ raised ValueError"),
        (MismatchError("differs \udcff:", ["rank 0: \udcfe"]), "differs \\udcff:"),
    ],
)
def test_a_failure_whose_text_cannot_be_sent_reaches_all_ranks(
    failure: Exception, text: str, failing: int, rank0_only: bool
) -> None:
    failing = 0 if rank0_only else failing

    def run(group: ThreadGroup) -> None:
        with Round(group, "meeting", rank0_only=rank0_only) as all_ranks:
            if group.rank == failing:
                raise failure
            if rank0_only:
                all_ranks.broadcast(0, int)

    for rank, error in enumerate(run_ranks_and_catch(WORLD, run)):
        if rank == failing:
            assert error is failure
        else:
            assert isinstance(error, ShardwiseError)
            assert text in str(error)


@pytest.mark.parametrize("failing", [{0}, {1}, {0, 2}, {0, 1, 2}])
@pytest.mark.parametrize("ends_with_message", [False, True])
def test_a_failure_reaches_all_ranks(failing: set[int], ends_with_message: bool) -> None:
    def run(group: ThreadGroup) -> None:
        with Round(group, "meeting") as all_ranks:
            if group.rank in failing:
                fail(group)
            if ends_with_message:
                all_ranks.all_gather(group.rank, int)

    for rank, error in enumerate(run_ranks_and_catch(WORLD, run)):
        if rank in failing:
            assert isinstance(error, StateError)
            assert str(error) == f"bad on rank {rank}"
        else:
            assert type(error) is RankError
            assert sorted(error.failures) == sorted(failing)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_because_of_another_one_says_why_that_one_failed(failing: int) -> None:
    def run(group: ThreadGroup) -> None:
        with Round(group, "meeting"):
            if group.rank == failing:
                raise StateError("the disk is gone")
            raise RankError("waiting", {failing: "it does not answer"})

    for rank, error in enumerate(run_ranks_and_catch(WORLD, run)):
        assert "the disk is gone" in str(error)
        assert "does not answer" not in str(error)
        assert isinstance(error, StateError if rank == failing else RankError)


def test_a_failure_of_rank_0_alone_is_the_same_error_on_all() -> None:
    def run(group: ThreadGroup) -> None:
        with Round(group, "locking", rank0_only=True):
            if group.rank == 0:
                fail(group)

    errors = run_ranks_and_catch(WORLD, run)
    assert [(type(each), str(each)) for each in errors] == [(StateError, "bad on rank 0")] * WORLD


@pytest.mark.parametrize("fails", ["combine", "conclude"])
def test_a_failure_of_a_function_that_reduces_is_the_same_error_on_all(fails: str) -> None:
    def refuse(ranks: Sequence[int] | int) -> int:
        raise MismatchError("ranks differ:", ["rank 0", "rank 1"])

    def run(group: ThreadGroup) -> int:
        with Round(group, "comparing") as all_ranks:
            if fails == "combine":
                return all_ranks.all_reduce(group.rank, int, refuse)
            return all_ranks.all_reduce(group.rank, int, max, refuse, int)

    for error in run_ranks_and_catch(WORLD, run):
        assert isinstance(error, MismatchError)
        assert error.problems == ["rank 0", "rank 1"]


def test_the_errors_of_very_many_ranks_are_counted() -> None:
    def run(group: ThreadGroup) -> None:
        with Round(group, "meeting"):
            if group.rank % 2:
                fail(group)

    first, *_ = run_ranks_and_catch(50, run)
    assert type(first) is RankError
    assert sorted(first.failures) == list(range(1, 33, 2))
    assert first.count == 25
    assert "failed on 25 ranks" in str(first)
    assert "and 9 more ranks" in str(first)
    assert pickle.loads(pickle.dumps(first)).count == 25


def test_ranks_with_different_values_are_named() -> None:
    def run(group: ThreadGroup) -> None:
        with Round(group, "comparing") as all_ranks:
            all_ranks.require_equal({"": "a" if group.rank in {3, 5} else "b"}, "values differ:")

    run_ranks(3, run)
    for error in run_ranks_and_catch(7, run):
        assert isinstance(error, MismatchError)
        assert error.problems == ["ranks 0-2, 4, 6: b", "ranks 3, 5: a"]


def test_only_the_first_different_values_are_named() -> None:
    def run(group: ThreadGroup) -> None:
        with Round(group, "comparing") as all_ranks:
            all_ranks.require_equal({"": f"value {group.rank}"}, "values differ:")

    for error in run_ranks_and_catch(40, run):
        assert isinstance(error, MismatchError)
        assert error.problems == [f"rank {rank}: value {rank}" for rank in range(16)]


def test_ranks_that_take_different_steps_are_told() -> None:
    def run(group: ThreadGroup) -> None:
        with Round(group, "saving" if group.rank else "loading"):
            pass

    for error in run_ranks_and_catch(WORLD, run):
        assert isinstance(error, MismatchError)
        assert error.problems == ["rank 0: loading", "rank 1: saving"]


def test_a_rank_that_is_gone_does_not_hide_why_this_one_failed() -> None:
    def run(group: ThreadGroup) -> None:
        if group.rank == 1:
            return  # it never takes the step
        with Round(group, "meeting"):
            if group.rank == 2:
                fail(group)

    first, _, third = run_ranks_and_catch(WORLD, run, timeout=5.0)
    assert isinstance(first, LostRankError)
    assert isinstance(third, StateError)
    assert isinstance(third.__cause__, LostRankError)


@pytest.mark.parametrize("world", [1, WORLD])
def test_code_after_the_message_fails_on_its_own(world: int) -> None:
    def run(group: ThreadGroup) -> None:
        with Round(group, "meeting") as all_ranks:
            all_ranks.all_gather(group.rank, int)
            if group.rank == 0:
                fail(group)

    first, *others = run_ranks_and_catch(world, run)
    assert isinstance(first, StateError)
    assert others == [None] * (world - 1)
