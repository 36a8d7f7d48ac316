"""Every element type that a checkpoint may hold, in every shape of memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import shardwise as sw
from tests.tools.gang import Gang

ROWS, COLUMNS = 6, 5
# All types of torch under their own names, but those that need a quantizer.
DTYPES = {
    name: dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and str(dtype) == f"torch.{name}" and name[0] != "q"
}
NAMES = sorted(DTYPES)
OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def bytes_of(tensor: torch.Tensor) -> bytes:
    """All bytes, row by row."""
    view = tensor.view(OF_SIZE[tensor.element_size()]).contiguous().reshape(-1)
    return view.view(torch.uint8).numpy().tobytes() if view.numel() else b""


def made(name: str, *, zero: bool = False) -> torch.Tensor:
    """Any bits at all: infinities and values that are no numbers among them."""
    generator = torch.Generator().manual_seed(len(name))
    size = ROWS * COLUMNS * DTYPES[name].itemsize
    high = 2 if name == "bool" else 256
    raw = torch.randint(0, high, (size,), dtype=torch.uint8, generator=generator)
    raw = torch.zeros_like(raw) if zero else raw
    return raw.view(getattr(torch, name)).view(ROWS, COLUMNS)


def shapes_of(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "whole": tensor,
        "turned": tensor.t(),
        "strided": tensor[1::2, ::2],
        "scalar": tensor[3, 2],
        "empty": tensor[:0],
    }


def test_there_are_many_types() -> None:
    assert len(NAMES) >= 40


@pytest.mark.parametrize("name", NAMES)
def test_bits_come_back_as_they_were(tmp_path: Path, name: str) -> None:
    saved = shapes_of(made(name))
    sw.save(tmp_path, dict(saved))
    # Of memory of its own, each: those of one tensor would overlap.
    loaded = {key: shapes_of(made(name, zero=True))[key] for key in saved}
    sw.load(tmp_path, dict(loaded))
    read = sw.open(tmp_path).tensors()
    for key, value in saved.items():
        assert bytes_of(loaded[key]) == bytes_of(value), key
        assert read[key].dtype == getattr(torch, name)
        assert bytes_of(read[key][...]) == bytes_of(value), key


def save_rows(path: str) -> None:
    """Each as a DTensor that is divided by rows."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    parts = {name: made(name).chunk(world)[rank] for name in NAMES}
    sw.save(path, {n: DTensor.from_local(part, mesh, [Shard(0)]) for n, part in parts.items()})


def test_shards_of_every_type(gang: Gang, tmp_path: Path) -> None:
    gang.run(save_rows, str(tmp_path), world=2)
    loaded = {name: made(name, zero=True) for name in NAMES}
    sw.load(tmp_path, dict(loaded))
    for name, value in loaded.items():
        assert bytes_of(value) == bytes_of(made(name)), name
