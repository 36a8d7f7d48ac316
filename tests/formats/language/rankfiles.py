"""Files of ranks, opened with a specification."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

import shardwise as sw

Array = np.ndarray[Any, Any]
Ranks = Mapping[tuple[int, ...], Mapping[str, Array]]


def numbered(*shape: int) -> Array:
    """Return an array whose elements all differ."""
    return np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)


def write(folder: Path, axes: Mapping[str, int], ranks: Ranks) -> str:
    """Save the arrays of each rank, with their strides; return the pattern of the files' names."""
    for coordinate, arrays in ranks.items():
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        torch.save(tensors, folder / f"rank{'_'.join(map(str, coordinate))}.pt")
    return f"rank{'_'.join(f'{{{axis}}}' for axis in axes)}.pt"


@contextmanager
def opened(
    source: str, axes: Mapping[str, int], ranks: Ranks, **sizes: int
) -> Iterator[sw.Checkpoint]:
    """Open the checkpoint that a specification makes of files of ranks."""
    with TemporaryDirectory() as folder:
        files = write(Path(folder), axes, ranks)
        yield sw.open(folder, spec=sw.spec(source, files=files, **sizes))


def read(
    source: str, axes: Mapping[str, int], ranks: Ranks, **sizes: int
) -> dict[str, torch.Tensor]:
    """Read the tensors that a specification makes of files of ranks."""
    with opened(source, axes, ranks, **sizes) as checkpoint:
        return {name: tensor[...] for name, tensor in checkpoint.tensors().items()}


def problems(source: str, axes: Mapping[str, int], ranks: Ranks, **sizes: int) -> list[str]:
    """Return all reasons why a specification does not fit."""
    with pytest.raises(sw.MismatchError) as error, opened(source, axes, ranks, **sizes):
        pass
    return list(error.value.problems)


def same(tensor: torch.Tensor, array: Array) -> None:
    """Check shape, dtype and every element."""
    assert tuple(tensor.shape) == array.shape
    assert str(tensor.dtype).removeprefix("torch.") == array.dtype.name
    assert tensor.numpy().tobytes() == np.ascontiguousarray(array).tobytes()
