"""The golden checkpoints of format versions 1 and 2: their contents, and how to make one.

`python -m tests.compat.golden` makes the checkpoint if it does not exist. Never make a committed
one again: every version must stay readable as it was written.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

import shardwise as sw
from shardwise.kernel.boxes import boxes_of_range
from shardwise.testing.thread_group import ThreadGroup, run_ranks

VERSION_1 = Path(__file__).with_name("v1")
VERSION_2 = Path(__file__).with_name("v2")
GOLDEN = {1: VERSION_1, 2: VERSION_2}
# Saved when the tensors in lists of an optimizer's state were part of the manifest.
VERSION_1_LBFGS = Path(__file__).with_name("v1_lbfgs")
WORLD = 2
STEP = 1200
METRICS = {"loss": 0.25}
DTYPES = {
    "bfloat16": 2,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "int64": 8,
    "uint16": 2,
}
SHARDED = {1: ("rows", "flat", "strided", "runs"), 2: ("rows", "flat", "strided", "runs", "grid")}
OBJECTS: dict[str, Any] = {
    "step": STEP,
    "name": 'Größe \u2028 "quoted"',
    "rate": 3e-4,
    "nothing": None,
    "flags": [True, False],
    "shape": (2, 3),
    "blob": b"\x00\xff",
    "nested": {"list": [1, [2.5, "x"]]},
}


def raw_bytes(size: int, seed: int) -> bytes:
    """Return bytes of an arithmetic progression, which programs in other languages can make too."""
    return bytes((7 * i + 13 * seed) % 251 for i in range(size))


def expected(version: int = 2) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return the dtype, shape and row-major bytes of every tensor."""
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for seed, (dtype, itemsize) in enumerate(DTYPES.items()):
        raw = b"\1\0\0\1\1\0" if dtype == "bool" else raw_bytes(6 * itemsize, seed)
        tensors[f"dtypes.{dtype}"] = (dtype, (2, 3), raw)
    tensors["rows"] = ("float32", (4, 3), raw_bytes(48, 20))
    tensors["flat"] = ("int32", (3, 5), raw_bytes(60, 21))
    tensors["strided"] = ("int16", (8,), raw_bytes(16, 22))
    tensors["runs"] = ("int64", (6, 2), raw_bytes(96, 25))
    if version > 1:
        tensors["grid"] = ("float32", (8, 6), raw_bytes(192, 26))
    tensors["scalar"] = ("float64", (), raw_bytes(8, 23))
    tensors["empty"] = ("float32", (0, 4), b"")
    tensors["tied.first"] = tensors["tied.second"] = ("float32", (4,), raw_bytes(16, 24))
    return tensors


def tensor(name: str) -> torch.Tensor:
    """Return a tensor of the checkpoint."""
    dtype, shape, raw = expected()[name]
    if not raw:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype)).reshape(shape)


def boxes(name: str, rank: int) -> list[sw.Box]:
    """Return a rank's boxes of a sharded tensor."""
    shape = expected()[name][1]
    if name == "rows":
        return [sw.Box((3 * rank, 0), ((3, 3) if rank == 0 else (1, 3)))]
    if name == "flat":
        return boxes_of_range(shape, *((0, 7) if rank == 0 else (7, math.prod(shape))))
    if name == "runs":
        return [sw.Box((row, 0), (1, 2)) for row in (range(4) if rank == 0 else (4, 5))]
    if name == "grid":
        return [sw.Box((4 * rank + i, 2 * j), (1, 2)) for i in range(4) for j in range(3)]
    return [sw.Box((2 * rank,), (2,)), sw.Box((4 + 2 * rank,), (2,))]


def state_of(rank: int) -> dict[str, object]:
    """Return the state that a rank saves."""
    tied = tensor("tied.first")
    sharded = {
        name: sw.Shards(
            tensor(name).shape,
            tensor(name).dtype,
            [(box, tensor(name)[box.slices()].clone()) for box in boxes(name, rank)],
        )
        for name in SHARDED[2]
    }
    return {
        "dtypes": {dtype: tensor(f"dtypes.{dtype}") for dtype in DTYPES},
        "tied": {"first": tied, "second": tied},
        "scalar": tensor("scalar"),
        "empty": tensor("empty"),
        "objects": dict(OBJECTS),
        "own": sw.PerRank({"rank": rank}),
        **sharded,
    }


def make(place: Path) -> None:
    """Save the checkpoint.

    Raises:
        CheckpointExistsError: the place already has a checkpoint.
    """

    def save(group: ThreadGroup) -> None:
        sw.save(place, state_of(group.rank), step=STEP, metrics=METRICS, group=group)

    run_ranks(WORLD, save)


if __name__ == "__main__":
    make(VERSION_2)
