"""`ElasticBatchSampler`: sizes, the end of an epoch, what may change on resume, and misuse."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import shardwise as sw
from shardwise.data import ElasticBatchSampler


def samplers(world: int, length: int = 20, **options: Any) -> list[ElasticBatchSampler]:
    options = {"global_batch": 6, **options}
    return [
        ElasticBatchSampler(length, rank=rank, world_size=world, **options) for rank in range(world)
    ]


def train_epoch(ranks: list[ElasticBatchSampler]) -> list[list[int]]:
    """Return the global batches of one iteration."""
    batches = []
    for parts in zip(*ranks, strict=True):
        batches.append([index for part in parts for index in part])
        for rank in ranks:
            rank.advance()
    return batches


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6])
def test_batches_are_the_same_for_any_number_of_ranks(world: int) -> None:
    assert train_epoch(samplers(world)) == train_epoch(samplers(1))


def test_parts_are_in_order_of_the_ranks_and_differ_by_one() -> None:
    parts = [next(iter(rank)) for rank in samplers(4, shuffle=False)]
    assert parts == [[0], [1, 2], [3], [4, 5]]
    weights = [rank.loss_weight for rank in samplers(4)]
    assert weights == pytest.approx([4 / 6, 8 / 6, 4 / 6, 8 / 6])


@pytest.mark.parametrize("world", [2, 4, 5])
def test_weighted_losses_average_to_that_of_the_global_batch(world: int) -> None:
    parts = [next(iter(rank)) for rank in samplers(world)]
    losses = [sum(part) / len(part) for part in parts]
    weights = [rank.loss_weight for rank in samplers(world)]
    mean = sum(a * b for a, b in zip(losses, weights, strict=True)) / world
    assert mean == pytest.approx(sum(map(sum, parts)) / 6)


def test_carry_fills_the_batch_at_the_end_of_an_epoch_from_the_next() -> None:
    (one,) = samplers(1, length=10, shuffle=False)
    assert len(one) == 2
    assert train_epoch([one]) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 0, 1]]
    assert (one.epoch, one.samples_trained, len(one)) == (1, 12, 2)
    assert train_epoch([one]) == [[2, 3, 4, 5, 6, 7], [8, 9, 0, 1, 2, 3]]
    assert train_epoch([one]) == [[4, 5, 6, 7, 8, 9]]
    assert (one.epoch, len(one)) == (3, 2)


def test_short_ends_an_epoch_with_a_smaller_batch() -> None:
    ranks = samplers(4, length=10, shuffle=False, last_batch="short")
    iterators = [iter(rank) for rank in ranks]
    assert [next(each) for each in iterators] == [[0], [1, 2], [3], [4, 5]]
    for rank in ranks:
        rank.advance()
    assert [next(each) for each in iterators] == [[6], [7], [8], [9]]
    assert [rank.loss_weight for rank in ranks] == [1, 1, 1, 1]
    assert [list(each) for each in iterators] == [[], [], [], []]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("last_batch", ["carry", "short"])
@pytest.mark.parametrize(
    ("length", "global_batch"), [(1, 1), (1, 7), (2, 1), (7, 7), (13, 5), (3, 10), (97, 16)]
)
def test_each_sample_is_used_once_in_each_epoch(
    length: int, global_batch: int, last_batch: str, shuffle: bool
) -> None:
    options: dict[str, Any] = {"last_batch": last_batch, "shuffle": shuffle}
    ranks = samplers(1, length=length, global_batch=global_batch, **options)
    used = []
    while ranks[0].epoch < 4:
        expected = len(ranks[0])
        batches = train_epoch(ranks)
        assert len(batches) == expected
        used += [index for batch in batches for index in batch]
    for epoch in range(4):
        assert sorted(used[epoch * length : (epoch + 1) * length]) == list(range(length))


def test_epochs_and_seeds_have_different_orders() -> None:
    first, second = (samplers(1, length=60, seed=seed) for seed in (0, 1))
    assert len({str(train_epoch(each)) for each in (first, first, second)}) == 3


def test_lengths_beyond_32_bits() -> None:
    length = 2**40 + 15
    ranks = samplers(3, length=length, global_batch=1000)
    for rank in ranks:
        rank.load_state_dict({**rank.state_dict(), "samples": 5 * length - 400})
    (batch,) = train_epoch(ranks)
    assert max(batch) > 2**32
    assert len({*batch[:400]}) == 400
    assert ranks[0].samples_trained == 5 * length + 600


def test_what_was_read_ahead_is_not_counted() -> None:
    (one,) = samplers(1)
    iterator = iter(one)
    drawn = [next(iterator) for _ in range(3)]
    one.advance()
    assert one.state_dict()["samples"] == 6
    assert list(one)[:2] == drawn[1:]


def test_the_global_batch_may_change_on_resume() -> None:
    (before,) = samplers(1, length=20, shuffle=False)
    next(iter(before))
    before.advance()
    (after,) = samplers(1, length=20, shuffle=False, global_batch=8)
    after.load_state_dict(before.state_dict())
    assert train_epoch([after]) == [[6, 7, 8, 9, 10, 11, 12, 13], [14, 15, 16, 17, 18, 19, 0, 1]]


def test_a_short_batch_after_a_resume_must_have_a_sample_for_each_rank() -> None:
    """The global batch has changed, and so has the size of the last batch of this epoch."""
    (before,) = samplers(1, length=20, global_batch=5)
    next(iter(before))
    before.advance()
    options = {"length": 20, "global_batch": 7, "last_batch": "short"}
    one, *_ = samplers(2, **options)
    with pytest.raises(sw.StateError, match=r"15 samples .* remain: .* has 1, too few for 2"):
        one.load_state_dict(before.state_dict())
    (alone,) = samplers(1, **options)
    alone.load_state_dict(before.state_dict())
    assert [len(batch) for batch in alone] == [7, 7, 1]


@pytest.mark.parametrize("changed", [{"length": 21}, {"seed": 1}, {"shuffle": False}])
def test_another_order_is_refused_on_resume(changed: dict[str, Any]) -> None:
    (before,), (after,) = samplers(1), samplers(1, **changed)
    (name,) = changed
    with pytest.raises(sw.StateError, match=f"has {name}=.*, here .*another order of samples"):
        after.load_state_dict(before.state_dict())


@pytest.mark.parametrize("samples", [-1, 1.5, True, None, "6"])
def test_an_invalid_position_is_refused(samples: object) -> None:
    (one,) = samplers(1)
    with pytest.raises(sw.StateError, match="samples="):
        one.load_state_dict({**one.state_dict(), "samples": samples})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, r"ElasticBatchSampler\(length=0\): expected at least 1"),
        ({"length": 2**62 + 1}, "at most 2⁶² samples"),
        ({"global_batch": 0}, r"global_batch=0\): expected at least 1"),
        ({"global_batch": 2}, "global_batch=2.*less than one sample for each of 3 ranks"),
        ({"seed": -1}, r"seed=-1\)"),
        ({"last_batch": "drop"}, "expected 'carry' or 'short'"),
        ({"last_batch": "short"}, "20 samples: the last batch has 2, too few for 3 ranks"),
        ({"rank": 3}, "expected a rank from 0 to"),
        ({"rank": None}, "pass both"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    arguments = {"length": 20, "global_batch": 6, "rank": 0, "world_size": 3, **options}
    with pytest.raises(ValueError, match=message):
        ElasticBatchSampler(**arguments)


def test_advance_counts_only_what_was_read() -> None:
    (one,) = samplers(1)
    with pytest.raises(sw.StateError, match="samples 0 to 5, which was not read yet"):
        one.advance()
    next(iter(one))
    one.advance()
    with pytest.raises(sw.StateError, match="samples 6 to 11, which was not read yet"):
        one.advance()


def test_a_loop_without_advance_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    (one,) = samplers(1)
    list(one)
    with caplog.at_level(logging.WARNING, "shardwise"):
        list(one)
    assert "advance() was not called" in caplog.text
    (long,) = samplers(1, length=10**6, global_batch=1)
    with pytest.raises(sw.StateError, match="4096 batches were read, but advance"):
        list(long)


def test_an_iteration_ends_when_a_state_is_loaded() -> None:
    (one,) = samplers(1)
    iterator = iter(one)
    next(iterator)
    one.load_state_dict(one.state_dict())
    with pytest.raises(sw.StateError, match="a state was loaded after this iteration began"):
        next(iterator)
