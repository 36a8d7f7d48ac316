"""The random order: each item once, at any length, and the same for ever."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.data.random_order import MOST_ITEMS, permute
from tests.breadth import examples


def whole(length: int, key: str) -> list[int]:
    return permute(np.arange(length), length, key).tolist()


@examples(40)
@given(st.integers(1, 600), st.text(max_size=5))
def test_each_item_comes_once(length: int, key: str) -> None:
    assert sorted(whole(length, key)) == list(range(length))


@examples(30)
@given(st.integers(1, MOST_ITEMS), st.data())
def test_positions_are_independent_of_each_other(length: int, data: st.DataObject) -> None:
    """At any length, single positions and blocks give the same distinct items in range."""
    first = data.draw(st.integers(0, length - 1))
    count = min(50, length - first)
    block = permute(np.arange(first, first + count), length, "key").tolist()
    single = [permute(np.array([first + i]), length, "key").tolist()[0] for i in range(count)]
    assert block == single
    assert len(set(block)) == count
    assert 0 <= min(block) <= max(block) < length


def test_the_order_never_changes() -> None:
    """Checkpoints contain positions in these orders."""
    assert whole(10, "0 0") == [7, 2, 3, 1, 0, 9, 8, 4, 5, 6]
    assert whole(257, "0 0")[:5] == [28, 208, 68, 7, 133]
    large = permute(np.arange(5) + 2**33, 2**40 + 15, "seed").tolist()
    assert large == [1071534634889, 525544229688, 723829678601, 842060243804, 75030746885]


def test_keys_give_different_orders() -> None:
    assert (
        len({tuple(whole(100, f"{seed} {epoch}")) for seed in range(5) for epoch in (0, 1)}) == 10
    )


@pytest.mark.parametrize("length", [2, 5, 7, 30, 257])
def test_each_item_is_as_likely_at_each_position(length: int) -> None:
    """Chi-squared over 1,500 keys: more than 5 standard deviations above the mean is a defect."""
    keys = 1500
    counts = np.zeros((length, length))
    for key in range(keys):
        counts[np.arange(length), whole(length, str(key))] += 1
    chi = ((counts - keys / length) ** 2 / (keys / length)).sum()
    freedom = (length - 1) ** 2
    assert chi < freedom + 5 * (2 * freedom) ** 0.5


def test_neighbours_are_unrelated() -> None:
    items = permute(np.arange(100_000), 1_000_003, "key")
    assert abs(np.corrcoef(items[:-1], items[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(np.arange(100_000), items)[0, 1]) < 0.02
