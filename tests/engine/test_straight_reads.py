"""Bytes in the page cache are read straight into the tensors, and verified there."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

import shardwise as sw
from tests.tools.watched_stores import BLOCK, CachedStore

ROWS, COLUMNS = 3000, 1000
EXPECTED = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    sw.save(tmp_path / "c", {"before": torch.arange(3), "t": EXPECTED})
    return tmp_path / "c"


def data_of(saved: Path) -> bytes:
    (file,) = saved.glob("*.safetensors")
    return file.read_bytes()


def flipped(data: bytes, at: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 1
    return bytes(changed)


def bytes_read_into(store: CachedStore, tensor: torch.Tensor) -> int:
    """How many bytes were read straight into the memory of a tensor."""
    low = tensor.data_ptr()
    high = low + tensor.nbytes
    return sum(size for at, size in store.buffers if low <= at and at + size <= high)


def load(store: CachedStore, target: torch.Tensor) -> torch.Tensor:
    sw.load(store, {"before": torch.zeros(3, dtype=torch.int64), "t": target})
    return target


@pytest.mark.parametrize("is_cached", [True, False])
def test_whole_reads_of_a_tensor_skip_the_buffer_if_they_are_cached(
    saved: Path, is_cached: bool
) -> None:
    store = CachedStore(saved, is_cached=is_cached, copies=[data_of(saved)])
    target = load(store, torch.zeros_like(EXPECTED))
    assert torch.equal(target, EXPECTED)
    assert (bytes_read_into(store, target) >= EXPECTED.nbytes // 2) == is_cached


@pytest.mark.parametrize(
    "target",
    [
        torch.zeros(COLUMNS, ROWS).t(),
        torch.zeros(ROWS, 2 * COLUMNS)[:, ::2],
        torch.zeros(ROWS, COLUMNS, dtype=torch.float64),
    ],
    ids=["transposed", "with gaps", "of another dtype"],
)
def test_other_memory_is_filled_through_a_buffer(saved: Path, target: torch.Tensor) -> None:
    store = CachedStore(saved, is_cached=True, copies=[data_of(saved)])
    sw.load(store, {"t": target}, only=["t"], cast=True)
    assert torch.equal(target, EXPECTED.to(target.dtype))
    low = target.untyped_storage().data_ptr()
    assert not any(low <= at < low + target.untyped_storage().nbytes() for at, _ in store.buffers)


def test_columns_of_a_saved_tensor_are_no_range_of_the_file(saved: Path) -> None:
    store = CachedStore(saved, is_cached=True, copies=[data_of(saved)])
    assert torch.equal(sw.open(store)["t"][:, 100:700], EXPECTED[:, 100:700])


def test_a_transposed_tensor_in_a_file_has_its_bytes_in_another_order(tmp_path: Path) -> None:
    torch.save({"t": EXPECTED.t().contiguous().t()}, tmp_path / "c.pt")  # fills the page cache
    target = torch.zeros_like(EXPECTED)
    sw.load(tmp_path / "c.pt", {"model": {"t": target}})
    assert torch.equal(target, EXPECTED)


@pytest.mark.parametrize("skipped", range(8))
def test_elements_that_reads_cut_are_whole(skipped: int, tmp_path: Path) -> None:
    """Files of other libraries do not align elements to blocks."""
    header = json.dumps(
        {"t": {"dtype": "F32", "shape": list(EXPECTED.shape), "data_offsets": [0, EXPECTED.nbytes]}}
    )
    encoded = (header + " " * skipped).encode()
    data = EXPECTED.numpy().tobytes()
    (tmp_path / "c.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    target = torch.zeros_like(EXPECTED)
    sw.load(tmp_path / "c.safetensors", {"model": {"t": target}})
    assert torch.equal(target, EXPECTED)


@pytest.mark.parametrize("damaged_blocks", [[40], [40, 41, 90]])
def test_an_intact_copy_replaces_damaged_bytes_in_the_target(
    saved: Path, damaged_blocks: list[int]
) -> None:
    """Also if each copy is damaged elsewhere."""
    data = data_of(saved)
    copies = [data, flipped(data, 42 * BLOCK)]
    for block in damaged_blocks:
        copies[0] = flipped(copies[0], block * BLOCK + 5)
    store = CachedStore(saved, is_cached=True, copies=copies)
    target = load(store, torch.zeros_like(EXPECTED))
    assert torch.equal(target, EXPECTED)
    assert bytes_read_into(store, target)


def test_damage_without_an_intact_copy_is_an_error_that_names_the_tensor(saved: Path) -> None:
    store = CachedStore(saved, is_cached=True, copies=[flipped(data_of(saved), 40 * BLOCK + 5)])
    with pytest.raises(sw.CorruptionError, match="these bytes belong to t"):
        load(store, torch.zeros_like(EXPECTED))


def test_a_mirror_replaces_damaged_bytes_of_a_root_in_the_page_cache(tmp_path: Path) -> None:
    root, mirror = tmp_path / "root", tmp_path / "mirror"
    with sw.Checkpointer(root, mirror=mirror, memory=None) as checkpointer:
        checkpointer.save(1, {"t": EXPECTED})
    (file,) = root.glob("step-*/*.safetensors")
    file.write_bytes(flipped(file.read_bytes(), 40 * BLOCK))  # this fills the page cache, too
    state = {"t": torch.zeros_like(EXPECTED)}
    with sw.Checkpointer(root, mirror=mirror, memory=None) as checkpointer:
        assert checkpointer.restore(state) == 1
        report = checkpointer.last_restore
    assert torch.equal(state["t"], EXPECTED)
    assert report is not None
    assert report.origins["mirror"] >= BLOCK


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn]
)
def test_every_dtype_is_read_straight(dtype: torch.dtype, tmp_path: Path) -> None:
    bits = np.random.default_rng(0).integers(0, 2, 5 << 20, np.uint8)
    expected = torch.from_numpy(bits).to(dtype)
    sw.save(tmp_path / "c", {"t": expected})
    store = CachedStore(tmp_path / "c", is_cached=True, copies=[data_of(tmp_path / "c")])
    target = torch.zeros_like(expected)
    sw.load(store, {"t": target})
    assert torch.equal(target.view(torch.uint8), expected.view(torch.uint8))
    assert bytes_read_into(store, target)
