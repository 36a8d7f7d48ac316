"""The comparison of replicas: digests, messages, errors, and at which saves a run compares."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise.checkpointer import replica_checks
from shardwise.checkpointer.replica_checks import LARGEST_SHARE, ReplicaChecks
from shardwise.parts.checks import replica_check
from shardwise.parts.checks.bit_sums import BLOCK_WORDS, BitSums
from shardwise.parts.checks.replica_check import DivergencePolicy
from tests.tools.divisions import DTYPES_HERE

RANKS, TENSORS = 8, 100


def state_of(rank: int, value: float = 1.0) -> dict[str, Any]:
    """Tensors of four shards, each of which two ranks hold."""
    box = sw.Box((rank // 2,), (1,))
    return {
        f"w{i}": sw.Shards((4,), torch.float32, [(box, torch.full((1,), i + value))])
        for i in range(TENSORS)
    }


def save_all(path: Path, states: list[dict[str, Any]], *, check: bool = True) -> list[Any]:
    """For each rank, its error, or the bytes that it received."""
    store = dist.HashStore()

    def run(rank: int) -> Any:
        try:
            with sw.TreeGroup(store, rank, len(states)) as group:
                sw.save(path, states[rank], group=group, check_replicas=check)
                return group.bytes_received
        except sw.ShardwiseError as error:
            return error

    with ThreadPoolExecutor(len(states)) as pool:
        return list(pool.map(run, range(len(states))))


def test_messages_do_not_grow_with_the_number_of_boxes(tmp_path: Path) -> None:
    states = [state_of(rank) for rank in range(RANKS)]
    without = save_all(tmp_path / "a", states, check=False)
    checked = save_all(tmp_path / "b", states)
    assert checked[0] - without[0] < 200 * RANKS


def test_boxes_of_a_bounded_number_of_sets_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_check, "MOST_DIFFERING", 1)
    states = [state_of(rank) for rank in range(RANKS)]
    for rank in (3, 5, 7):
        states[rank]["w7"] = state_of(rank, 2.0)["w7"]
    for error in save_all(tmp_path, states):
        assert isinstance(error, sw.MismatchError)
        assert len(error.problems) == 1
        assert error.problems[0] == "w7[1:2]: rank 2 and rank 3 differ"


def test_two_copies_on_one_rank_are_compared(tmp_path: Path) -> None:
    box = sw.Box((0,), (2,))
    copies = [(box, torch.zeros(2)), (box, torch.ones(2))]
    state = {"w": sw.Shards((2,), torch.float32, copies)}
    with pytest.raises(sw.MismatchError, match=r"w\[0:2\]: rank 0 holds two copies"):
        sw.save(tmp_path, state, check_replicas=True)


# Digests.

BLOCK = 4 * BLOCK_WORDS  # bytes
SIZES = [0, 1, 2, 3, 4, 5, 4096, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 6, 3 * BLOCK, 66 * BLOCK + 9]


def sum_of(tensor: torch.Tensor) -> int:
    return int(BitSums().of_all([tensor])[0])


def random_bytes(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def reference(data: bytes) -> int:
    """The same sum, word by word."""
    mask = (1 << 64) - 1

    def weight(seed: int, position: int) -> int:
        x = ((position + 1) * 0x9E3779B97F4A7C15 + seed * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return (x ^ (x >> 31)) | 1

    words = np.frombuffer(data + bytes(-len(data) % 4), "<i4").tolist()
    total = 0
    for i, word in enumerate(words):
        total += word * weight(0, i % BLOCK_WORDS) * weight(1, i // BLOCK_WORDS)
    return total & mask


@pytest.mark.parametrize("size", [0, 1, 3, 4, 7, 1000, BLOCK + 6])
def test_it_is_the_sum_that_the_module_describes(size: int) -> None:
    data = random_bytes(size)
    assert sum_of(data) == reference(data.numpy().tobytes())


@pytest.mark.parametrize("size", SIZES[1:])
def test_every_flipped_bit_is_found(size: int) -> None:
    data = random_bytes(size)
    before = sum_of(data)
    picked = np.random.default_rng(size).integers(0, 8 * size, 40).tolist()
    for bit in [*range(min(32, 8 * size)), *picked, 8 * size - 1]:
        data[bit // 8] ^= 1 << bit % 8
        assert sum_of(data) != before, bit
        data[bit // 8] ^= 1 << bit % 8
    assert sum_of(data) == before


@given(st.data())
def test_two_changed_words_do_not_cancel_out(data: st.DataObject) -> None:
    """Also the highest bits of two words, and words that are swapped."""
    words = random_bytes(4 * 5000).view(torch.int32)
    first, second = data.draw(st.lists(st.integers(0, 4999), min_size=2, max_size=2, unique=True))
    changed = words.clone()
    bit = torch.tensor([1 << data.draw(st.integers(0, 31))]).to(torch.int32)
    changed[[first, second]] ^= bit
    swapped = words.clone()
    swapped[[first, second]] = words[[second, first]]
    sums = {sum_of(each) for each in (words, changed, swapped)}
    assert len(sums) == 3


@pytest.mark.parametrize("name", DTYPES_HERE)
def test_all_dtypes(name: str) -> None:
    dtype = getattr(torch, name)
    raw = random_bytes(96 * torch.empty(0, dtype=dtype).element_size())
    assert sum_of(raw.view(dtype).reshape(4, 24)) == sum_of(raw)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.t().contiguous().t(),
        lambda t: torch.cat([t, t], dim=1)[:, : t.shape[1]],
        lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
        lambda t: t.expand(2, *t.shape)[1],
        lambda t: torch.nn.Parameter(t),
    ],
    ids=["transposed", "rows apart", "not aligned", "expanded", "parameter"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_strides_and_alignment_do_not_matter(
    change: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    tensor = torch.randn(200, 301).to(dtype)
    assert sum_of(change(tensor)) == sum_of(tensor)


def test_of_several_tensors_each_has_its_own_sum() -> None:
    tensors = [random_bytes(size, seed) for seed, size in enumerate(SIZES)]
    found = BitSums().of_all(tensors)
    assert found.tolist() == [sum_of(each) for each in tensors]
    assert BitSums().of_all([]).shape == (0,)


# At which saves a Checkpointer compares.


def checks_of(every: int | None, reaction: str = "warn", world: int = 2) -> ReplicaChecks:
    policy = DivergencePolicy.from_option(reaction)
    settings = SimpleNamespace(check_replicas_every=every, on_divergence=policy)
    return ReplicaChecks(cast("Any", settings), world)


PLANNED: Any = SimpleNamespace(
    request=SimpleNamespace(step=1),
    plan=SimpleNamespace(description=SimpleNamespace(structure=SimpleNamespace(names=()))),
)


@pytest.mark.parametrize(
    ("checks", "due"),
    [
        (checks_of(1), [True] * 6),
        (checks_of(3), [False, False, True] * 2),
        (checks_of(3, world=1), [False, False, True] * 2),
        (checks_of(None, world=1), [False] * 6),
        (checks_of(2, "ignore"), [False] * 6),
    ],
)
def test_every_so_many_saves(
    checks: ReplicaChecks, due: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_checks, "find_divergences", lambda *_: ())
    found = []
    for _ in due:
        found.append(checks.is_due())
        if found[-1]:
            checks.check(PLANNED, sw.SoloGroup())
        checks.add_save(1.0)
    assert found == due


@pytest.mark.parametrize("cost", [0.001, 0.02, 0.5])
def test_comparisons_take_a_hundredth_of_the_time_of_saves(
    cost: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]

    def compare(*_: object) -> tuple[()]:
        clock[0] += cost
        return ()

    monkeypatch.setattr(replica_checks, "find_divergences", compare)
    monkeypatch.setattr(replica_checks.time, "perf_counter", lambda: clock[0])
    checks, saves, compared = checks_of(None), 5000, 0
    for _ in range(saves):
        if checks.is_due():
            compared += 1
            checks.check(PLANNED, sw.SoloGroup())
        checks.add_save(0.05)
    share = compared * cost / (saves * 0.05)
    assert math.isclose(share, LARGEST_SHARE, rel_tol=0.25) or compared == math.ceil(saves / 2)
