"""The code of a stripe, and who holds its pieces."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.kernel.errors import StoreError
from shardwise.kernel.store.store import Buffer
from shardwise.parts.memory.redundancy.stripes import (
    CHUNK_MULTIPLE,
    chunk_size,
    index_of_data_stripe,
    index_of_parity_stripe,
    make_erasure_code,
    stripes_of_group,
)
from tests.breadth import examples

sizes_of_groups = st.integers(2, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n - 1)))


def blocks_of(count: int, size: int, seed: int = 0) -> list[np.ndarray[Any, Any]]:
    return list(np.random.default_rng(seed).integers(0, 256, (count, size), np.uint8))


def encode(blocks: Sequence[Buffer], m: int) -> list[Buffer]:
    """The `m` parity blocks of data blocks."""
    k = len(blocks)
    return decode(dict(enumerate(blocks)), range(k, k + m), k, m)


def decode(present: Mapping[int, Buffer], missing: Sequence[int], k: int, m: int) -> list[Buffer]:
    """The missing blocks, from those present."""
    size = len(next(iter(present.values()), b""))
    found = {number: np.empty(size, np.uint8) for number in missing}
    with closing(make_erasure_code(k, m)) as code:
        usable = {number: block for number, block in present.items() if number not in found}
        code.recover(usable.items(), found)
    return list(found.values())


@given(sizes_of_groups)
def test_no_node_holds_two_pieces_of_a_stripe(sizes: tuple[int, int]) -> None:
    n, m = sizes
    for stripe in stripes_of_group(n, m):
        assert len(stripe.parity) == m
        assert sorted(stripe.data + stripe.parity) == list(range(n))


@given(sizes_of_groups)
def test_every_node_has_each_chunk_and_each_block_of_parity_in_one_stripe(
    sizes: tuple[int, int],
) -> None:
    n, m = sizes
    found = stripes_of_group(n, m)
    for node in range(n):
        for chunk in range(n - m):
            assert found[index_of_data_stripe(node, chunk, n, m)].data[chunk] == node
            assert sum(stripe.data[chunk] == node for stripe in found) == 1
        for block in range(m):
            assert found[index_of_parity_stripe(node, block, n)].parity[block] == node
            assert sum(stripe.parity[block] == node for stripe in found) == 1


@pytest.mark.parametrize(("n", "m"), [(3, 3), (1, 1), (4, 5), (4, -1)])
def test_fewer_blocks_of_parity_than_nodes(n: int, m: int) -> None:
    with pytest.raises(ValueError, match=f"{m} parity chunks in a group of {n} nodes"):
        stripes_of_group(n, m)


@given(st.lists(st.integers(0, 10**13), min_size=2, max_size=9), st.integers(1, 8))
def test_chunks_are_the_least_that_hold_the_longest(lengths: list[int], m: int) -> None:
    n = len(lengths)
    m = min(m, n - 1)
    size = chunk_size(lengths, n, m)
    assert size >= CHUNK_MULTIPLE
    assert size % CHUNK_MULTIPLE == 0
    assert size * (n - m) >= max(lengths)
    assert size == CHUNK_MULTIPLE or (size - CHUNK_MULTIPLE) * (n - m) < max(lengths)


@given(st.integers(1, 9), st.integers(0, 300_000), st.integers(0, 2**32))
@examples(30)
def test_xor_recovers_any_one_block(k: int, size: int, seed: int) -> None:
    data = blocks_of(k, size, seed)
    pieces = dict(enumerate(data + encode(data, 1)))
    lost = seed % (k + 1)
    present = {number: block for number, block in pieces.items() if number != lost}
    assert np.array_equal(decode(present, [lost], k, 1)[0], pieces[lost])


def test_parity_of_one_is_the_exclusive_or() -> None:
    data = blocks_of(3, 1000)
    assert np.array_equal(encode(data, 1)[0], data[0] ^ data[1] ^ data[2])


def test_blocks_are_not_changed() -> None:
    data = blocks_of(3, 200_000)
    before = [block.copy() for block in data]
    encode(data, 1)
    assert all(np.array_equal(*pair) for pair in zip(data, before, strict=True))


@pytest.mark.parametrize("m", [2, 3])
@pytest.mark.parametrize("k", range(1, 9))
def test_reed_solomon_recovers_every_loss(k: int, m: int) -> None:
    pytest.importorskip("pyeclib")
    data = blocks_of(k, 50, seed=k)
    pieces = dict(enumerate(data + encode(data, m)))
    for count in range(1, m + 1):
        for lost in combinations(pieces, count):
            present = {number: block for number, block in pieces.items() if number not in lost}
            found = decode(present, lost, k, m)
            assert all(np.array_equal(found[i], pieces[each]) for i, each in enumerate(lost))


def product(a: int, b: int) -> int:
    """In GF(2⁸) modulo x⁸ + x⁴ + x³ + x² + 1."""
    total = 0
    while b:
        total ^= a * (b & 1)
        a = (a << 1) ^ (0x11D if a & 0x80 else 0)
        b >>= 1
    return total


def test_reed_solomon_is_that_of_the_cauchy_matrix() -> None:
    pytest.importorskip("pyeclib")
    k, m = 5, 3
    data = blocks_of(k, 20)
    for q, found in enumerate(encode(data, m)):
        row = [next(x for x in range(256) if product(x, (k + q) ^ j) == 1) for j in range(k)]
        for at in range(20):
            total = 0
            for factor, block in zip(row, data, strict=True):
                total ^= product(factor, int(block[at]))
            assert found[at] == total


@pytest.mark.parametrize("m", [1, 2])
def test_a_block_that_is_asked_for_is_not_used(m: int) -> None:
    if m > 1:
        pytest.importorskip("pyeclib")
    data = blocks_of(3, 100)
    pieces = dict(enumerate(data + encode(data, m)))
    pieces[1] = np.zeros(100, np.uint8)
    assert np.array_equal(decode(pieces, [1], 3, m)[0], data[1])


@pytest.mark.parametrize("size", [0, 1, 15, 4096, 65536, 65537, 200_001])
def test_reed_solomon_of_any_length(size: int) -> None:
    pytest.importorskip("pyeclib")
    data = blocks_of(4, size, seed=size)
    pieces = dict(enumerate(data + encode(data, 2)))
    found = decode({number: pieces[number] for number in (1, 3, 4, 5)}, [2, 0], 4, 2)
    assert np.array_equal(found[0], data[2])
    assert np.array_equal(found[1], data[0])


def test_parity_does_not_depend_on_how_it_is_cut() -> None:
    pytest.importorskip("pyeclib")
    data = blocks_of(3, 150_000)
    whole = encode(data, 2)
    parts = [
        encode([block[low : low + 4096] for block in data], 2) for low in range(0, 150_000, 4096)
    ]
    for block in range(2):
        assert np.array_equal(whole[block], np.concatenate([part[block] for part in parts]))


@pytest.mark.parametrize("m", [1, 2])
def test_too_few_pieces_are_refused(m: int) -> None:
    if m > 1:
        pytest.importorskip("pyeclib")
    present = dict(enumerate(blocks_of(3, 64)))
    with pytest.raises(StoreError, match="needs 4 of its chunks, and only 3 are left"):
        decode(present, [3], 4, m)


def test_large_groups_are_refused() -> None:
    with pytest.raises(StoreError, match="use smaller groups"):
        make_erasure_code(31, 2)


def test_without_pyeclib_two_blocks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyeclib.ec_iface", None)
    with pytest.raises(StoreError, match=r"pip install 'shardwise\[parity\]'"):
        make_erasure_code(4, 2)
    make_erasure_code(4, 1).close()
