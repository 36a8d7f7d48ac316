"""Files of ranks in memory: a catalogue of numpy arrays, like one that a reader makes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.errors import MismatchError
from shardwise.formats.foreign import Catalogue
from shardwise.formats.language import Spec, apply_spec, parse
from shardwise.manifest.layout import StoredFile
from shardwise.manifest.validate import validate_layout
from tests.formats.reference import read_tensors

Array = np.ndarray[Any, Any]
Ranks = Mapping[tuple[int, ...], Mapping[str, Array]]
NOWHERE = Path()


def numbered(*shape: int) -> Array:
    """Return an array whose elements all differ."""
    return np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)


def catalogue(axes: Mapping[str, int], ranks: Ranks) -> Catalogue:
    """Return a catalogue with one file for each rank. Arrays keep their strides."""
    files, rows = [], []
    for number, (coordinate, arrays) in enumerate(ranks.items()):
        content = b""
        for name, array in arrays.items():
            low, high = np.lib.array_utils.byte_bounds(array)
            start = len(content) + array.__array_interface__["data"][0] - low
            stride = [step // array.itemsize for step in array.strides]
            rows.append((name, array.dtype.name, number, start, array.shape, stride, coordinate))
            base = np.lib.stride_tricks.as_strided(array, array.shape, array.strides)
            content += _memory(base, high - low)
        files.append(StoredFile(f"rank{number}", len(content), content))
    names = sorted({row[0] for row in rows})
    dtypes = sorted({row[1] for row in rows})
    dims = max((len(row[4]) for row in rows), default=0)
    return Catalogue(
        tuple(files),
        axes,
        names,
        dtypes,
        np.array([names.index(row[0]) for row in rows], np.int64),
        np.array([dtypes.index(row[1]) for row in rows], np.int64),
        np.array([row[2] for row in rows], np.int64),
        np.array([row[3] for row in rows], np.int64),
        np.array([len(row[4]) for row in rows], np.int64),
        _padded([row[4] for row in rows], dims, 1),
        _padded([row[5] for row in rows], dims, 0),
        np.array([row[6] for row in rows], np.int64).reshape(len(rows), len(axes)),
    )


def _memory(array: Array, size: int) -> bytes:
    flat = array.ravel(order="K")
    assert flat.nbytes == size, "arrays of these tests have no gaps"
    return flat.tobytes()


def _padded(rows: list[Any], dims: int, by: int) -> Array:
    return np.array([(*row, *(by,) * (dims - len(row))) for row in rows], np.int64).reshape(
        len(rows), dims
    )


def read(
    text: str, axes: Mapping[str, int], ranks: Ranks, **options: Any
) -> dict[str, torch.Tensor]:
    """Read the tensors that a specification makes of files of ranks, element by element."""
    return read_tensors(
        NOWHERE, validate_layout(apply_spec(parse(text), catalogue(axes, ranks), **options))
    )


def problems(spec: Spec, ranks: Catalogue, **options: Any) -> list[str]:
    """Return all reasons why a specification does not fit."""
    with pytest.raises(MismatchError) as error:
        apply_spec(spec, ranks, **options)
    return list(error.value.problems)


def same(tensor: torch.Tensor, array: Array) -> None:
    """Check shape, dtype and every element."""
    assert tuple(tensor.shape) == array.shape
    assert str(tensor.dtype).removeprefix("torch.") == array.dtype.name
    assert tensor.numpy().tobytes() == np.ascontiguousarray(array).tobytes()
