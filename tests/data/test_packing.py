"""Packers: no token is lost, and a restored buffer continues in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.data import BestFitPacker, ConcatPacker, Packer
from shardwise.data.packing import Tokens

PACKERS: list[Callable[[], Packer]] = [
    lambda: ConcatPacker(7),
    lambda: ConcatPacker(1),
    lambda: BestFitPacker(7, sequences=3, pad=-1),
    lambda: BestFitPacker(1, sequences=1, pad=-1),
    lambda: BestFitPacker(10, sequences=1, pad=-1),
]


def documents(lengths: list[int]) -> list[Tokens]:
    """Return documents in which every token is different."""
    ends = np.cumsum(lengths)
    return list(np.split(np.arange(sum(lengths), dtype=np.int64), ends)[:-1])


def pack(packer: Packer, documents: list[Tokens]) -> Iterator[list[int]]:
    for document in documents:
        used = 0
        while used < len(document):
            used += packer.add(document[used:])
            while (sequence := packer.finished()) is not None:
                yield sequence.tolist()


@pytest.mark.parametrize("make", PACKERS)
@given(st.lists(st.integers(1, 25), max_size=40))
def test_each_token_comes_once(make: Callable[[], Packer], lengths: list[int]) -> None:
    packer = make()
    packed = [token for each in pack(packer, documents(lengths)) for token in each if token != -1]
    assert len(set(packed)) == len(packed)
    remaining = set(range(sum(lengths))) - set(packed)
    if isinstance(packer, BestFitPacker):
        assert set(packer.buffered()[packer.sequences :].tolist()) == remaining
        assert len(packer.buffered()) <= packer.capacity
    else:
        assert len(remaining) < 7
        assert packed == sorted(packed)


@pytest.mark.parametrize("make", PACKERS[2:])
@given(st.lists(st.integers(1, 25), min_size=1, max_size=40), st.data())
def test_a_restored_buffer_continues(
    make: Callable[[], Packer], lengths: list[int], data: st.DataObject
) -> None:
    whole = documents(lengths)
    cut = data.draw(st.integers(0, len(whole)))
    first, second = make(), make()
    list(pack(first, whole[:cut]))
    second.restore(first.buffered())
    assert list(pack(first, whole[cut:])) == list(pack(second, whole[cut:]))
    assert first.buffered().tolist() == second.buffered().tolist()


def test_best_fit_chooses_the_fullest_sequence() -> None:
    packer = BestFitPacker(10, sequences=2, pad=-1)
    found = list(pack(packer, documents([6, 8, 2, 3, 7, 5])))
    assert found == [[*range(6, 16)], [*range(6), *range(16, 19), -1]]


def test_only_documents_longer_than_a_sequence_are_cut() -> None:
    packer = BestFitPacker(10, sequences=2)
    found = list(pack(packer, documents([4, 13, 9])))
    assert found == [[*range(4, 14)]]
    assert packer.buffered().tolist() == [7, 9, *range(4), *range(14, 17), *range(17, 26)]


@pytest.mark.parametrize("buffered", [[1, 0, 0], [9, 0, 0], [1, 0, 0, 5, 6], [-1, 1, 0], [1]])
def test_an_invalid_buffer_is_refused(buffered: list[int]) -> None:
    packer = BestFitPacker(7, sequences=3)
    with pytest.raises(ValueError, match=r"open sequences of \[.* tokens should have"):
        packer.restore(np.array(buffered, np.int32))


@pytest.mark.parametrize("make", [ConcatPacker, BestFitPacker])
def test_a_length_of_0_is_refused(make: type) -> None:
    with pytest.raises(ValueError, match="expected at least 1"):
        make(0)
