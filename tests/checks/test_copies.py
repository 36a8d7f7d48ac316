"""Files of which there are several copies: any that is intact serves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardwise as sw
from tests.tools.watched_stores import BLOCK, CopiesStore

EXPECTED = torch.arange(100_000)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    sw.save(tmp_path / "c", {"t": EXPECTED})
    return tmp_path / "c"


def flipped(data: bytes, at: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 1
    return bytes(changed)


def load(saved: Path, copies: list[bytes | None]) -> torch.Tensor:
    """What a load reads if its only data file has these copies."""
    state = {"t": torch.zeros_like(EXPECTED)}
    sw.load(CopiesStore(saved, {data_file(saved).name: copies}), state)
    return state["t"]


def data_file(saved: Path) -> Path:
    (file,) = saved.glob("*.safetensors")
    return file


@pytest.mark.parametrize("at", [5000, -4])
def test_an_intact_copy_is_found_behind_those_that_are_gone_or_damaged(
    saved: Path, at: int
) -> None:
    """Whether bytes of a tensor are damaged, or the checksums."""
    data = data_file(saved).read_bytes()
    damaged = flipped(data, at)
    assert torch.equal(load(saved, [None, damaged, None, data]), EXPECTED)
    with pytest.raises(sw.CorruptionError):
        load(saved, [None, damaged])


def test_blocks_are_combined_from_copies_that_are_damaged_in_different_places(
    saved: Path,
) -> None:
    data = data_file(saved).read_bytes()
    copies = [
        flipped(flipped(data, 10), 3 * BLOCK + 10),  # has blocks 1, 2, 4, …
        None,
        flipped(flipped(data, BLOCK), 4 * BLOCK),  # has blocks 0, 2, 3, 5, …
    ]
    assert torch.equal(load(saved, copies), EXPECTED)
    copies[2] = flipped(copies[2] or b"", 3 * BLOCK + 20)
    with pytest.raises(sw.CorruptionError):
        load(saved, copies)
