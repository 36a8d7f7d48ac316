"""The property at the heart: saved in any sharding, loaded in any other, byte for byte."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import shardwise as sw
from shardwise.testing.thread_group import ThreadGroup, run_ranks
from tests.breadth import examples
from tests.tools.divisions import BoxesByRank, Tensor, boxes_of_ranks, tensors
from tests.tools.watched_stores import BLOCK, CountingStore


def raw_values(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """Random bytes, an element's in the last dimension: every element differs from its neighbours.

    They stand for the values, as torch cannot even copy tensors of some dtypes.
    """
    shape = *tensor.shape, getattr(torch, tensor.dtype).itemsize
    return np.random.default_rng(math.prod(shape)).integers(0, 256, shape, np.uint8)


def part_of(tensor: Tensor, box: sw.Box, *, empty: bool = False) -> torch.Tensor:
    """A box of a tensor's values, or memory for it."""
    raw = np.ascontiguousarray(raw_values(tensor)[box.slices()])
    raw = np.zeros_like(raw) if empty else raw
    return torch.from_numpy(raw).view(getattr(torch, tensor.dtype)).reshape(box.shape)


def content(data: torch.Tensor) -> bytes:
    """A tensor's bytes, row-major."""
    return data.reshape(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b""


def state_of(
    described: list[Tensor], held: list[BoxesByRank], rank: int, *, empty: bool
) -> dict[str, object]:
    """What a rank holds, with its values or with none."""
    return {
        tensor.name: sw.Shards(
            tensor.shape,
            getattr(torch, tensor.dtype),
            [(box, part_of(tensor, box, empty=empty)) for box in boxes[rank]],
        )
        for tensor, boxes in zip(described, held, strict=True)
    }


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Tensor], int, list[BoxesByRank], int, list[BoxesByRank]]:
    described = draw(tensors())
    source, target = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    return (
        described,
        source,
        [draw(boxes_of_ranks(tensor.shape, source)) for tensor in described],
        target,
        [draw(boxes_of_ranks(tensor.shape, target)) for tensor in described],
    )


@examples(60, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_any_sharding_loads_into_any_other(
    case: tuple[list[Tensor], int, list[BoxesByRank], int, list[BoxesByRank]],
) -> None:
    described, source, saved, target, wanted = case
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"

        def save(group: ThreadGroup) -> sw.SaveReport:
            state = state_of(described, saved, group.rank, empty=False)
            return sw.save(path, state, group=group, staging_bytes=1 << 20)

        reports = run_ranks(source, save)
        total = sum(math.prod(t.shape) * getattr(torch, t.dtype).itemsize for t in described)
        assert {report.bytes_total for report in reports} == {total}

        def load(group: ThreadGroup) -> None:
            state = state_of(described, wanted, group.rank, empty=True)
            report = sw.load(path, state, group=group, staging_bytes=1 << 20)
            for tensor, boxes in zip(described, wanted, strict=True):
                shards = state[tensor.name]
                assert isinstance(shards, sw.Shards)
                for box, fragment in zip(boxes[group.rank], shards.fragments, strict=True):
                    assert content(fragment.data) == content(part_of(tensor, box))
            assert report.bytes_needed == sum(
                box.size * getattr(torch, tensor.dtype).itemsize
                for tensor, boxes in zip(described, wanted, strict=True)
                for box in boxes[group.rank]
            )

        run_ranks(target, load)
        checkpoint = sw.open(path)
        checkpoint.verify()
        for tensor in described:
            read = checkpoint[tensor.name]
            assert isinstance(read, sw.SavedTensor)
            assert content(read[...]) == raw_values(tensor).tobytes()


@examples(30)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 1), st.integers(0, 1))
def test_no_block_is_read_twice_and_contiguous_targets_cost_little(
    source: int, target: int, split_saved: int, split_wanted: int
) -> None:
    tensor = Tensor("t", "float32", (512, 1024))

    def part(dim: int, world: int, rank: int) -> sw.Box:
        size = tensor.shape[dim] // 12 * (12 // world)
        last = rank == world - 1
        offset = [0, 0]
        shape = list(tensor.shape)
        offset[dim] = rank * size
        shape[dim] = tensor.shape[dim] - offset[dim] if last else size
        return sw.Box(tuple(offset), tuple(shape))

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"

        def save(group: ThreadGroup) -> None:
            boxes: BoxesByRank = tuple((part(split_saved, source, r),) for r in range(source))
            sw.save(path, state_of([tensor], [boxes], group.rank, empty=False), group=group)

        run_ranks(source, save)
        for rank in range(target):
            store = CountingStore(path)
            box = part(split_wanted, target, rank)
            data = torch.empty(box.shape)
            report = sw.load(store, {"t": sw.Shards(tensor.shape, torch.float32, [(box, data)])})
            assert content(data) == content(part_of(tensor, box))
            assert max(store.blocks.values()) <= 2  # a block of data, and the checksums beside it
            if split_saved == split_wanted == 0:
                assert report.bytes_read <= 1.05 * report.bytes_needed + 2 * BLOCK * source


def test_a_rank_may_hold_tensors_of_fewer_dimensions_than_others_or_none(tmp_path: Path) -> None:
    shapes = {0: (3, 4), 1: (), 2: None, 3: (5,)}

    def state(rank: int, fill: int) -> dict[str, object]:
        shape = shapes[rank]
        return {} if shape is None else {f"of{rank}": torch.full(shape, fill + rank)}

    def save(group: ThreadGroup) -> None:
        sw.save(tmp_path / "saved", {"model": state(group.rank, 7)}, group=group)

    def load(group: ThreadGroup) -> None:
        target = state(group.rank, 0)
        sw.load(tmp_path / "saved", {"model": target}, group=group)
        expected = state(group.rank, 7)
        assert all(torch.equal(target[name], expected[name]) for name in expected)

    run_ranks(4, save)
    run_ranks(4, load)
