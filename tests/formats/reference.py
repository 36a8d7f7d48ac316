"""A slow, simple reader of foreign tensors, to compare all readers with."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.kernel.manifest.dtypes import DTYPES
from shardwise.kernel.manifest.layout import Layout, StoredFile
from shardwise.parts.formats.foreign import StoredArray

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def read_tensors(place: Path, foreign: Layout) -> dict[str, torch.Tensor]:
    """Return all tensors of the foreign checkpoint at `place` by name. Tied tensors are equal."""
    with opened_files(place, foreign.files) as files:
        read = {
            entry.name: _mean(read_terms(place, foreign, index))
            if index in foreign.terms
            else _tensor(foreign, index, files)
            for index, entry in enumerate(foreign.tensors)
            if entry.same_as is None
        }
    tied = {entry.name: read[entry.same_as] for entry in foreign.tensors if entry.same_as}
    return read | tied


def read_terms(place: Path, foreign: Layout, index: int) -> list[torch.Tensor]:
    """Return the terms of a tensor that is a mean."""
    with opened_files(place, foreign.files) as files:
        return [_tensor(foreign, term, files) for term in foreign.terms_of[index]]


def _mean(terms: list[torch.Tensor]) -> torch.Tensor:
    total = torch.stack(terms).sum(0, dtype=terms[0].dtype)
    return total / len(terms) if total.is_floating_point() else total // len(terms)


def read_array(data: Bytes, array: StoredArray) -> torch.Tensor:
    """Return an array from the bytes of its file."""
    kind = np.dtype(f"V{DTYPES[array.dtype].itemsize}")
    return _as_tensor(_strided(data, array.start, kind, array.shape, array.stride), array.dtype)


@contextmanager
def opened_files(place: Path, files: tuple[StoredFile, ...]) -> Iterator[list[Bytes]]:
    """Map the files, and yield their bytes."""
    yield [_bytes(place, file) for file in files]


def _bytes(place: Path, file: StoredFile) -> Bytes:
    if file.content is not None:
        assert file.size == len(file.content)
        return np.frombuffer(file.content, np.uint8)
    path = place if place.is_file() else place / file.name
    assert path.stat().st_size == file.size
    if not file.size:
        return np.zeros(0, np.uint8)
    with open(path, "rb") as opened:
        return np.frombuffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


def _tensor(foreign: Layout, index: int, files: list[Bytes]) -> torch.Tensor:
    entry, pieces = foreign.tensors[int(foreign.tensor_of[index])], foreign.pieces
    ndim = len(entry.shape)
    whole = np.zeros(entry.shape, f"V{DTYPES[entry.dtype].itemsize}")
    times = np.zeros(entry.shape, int)
    for row in np.flatnonzero(pieces.tensor == index):
        offset, shape = pieces.offset[row][:ndim], pieces.shape[row][:ndim]
        box = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
        data, start = files[pieces.file[row]], int(pieces.start[row])
        whole[box] = _strided(data, start, whole.dtype, tuple(shape), pieces.stride[row][:ndim])
        times[box] += 1
    assert (times == 1).all(), f"{entry.name}: not each element once"
    return _as_tensor(whole, entry.dtype)


def _strided(data: Bytes, start: int, kind: Any, shape: Any, stride: Any) -> Any:
    size = kind.itemsize
    reach = 1 + sum((int(n) - 1) * int(s) for n, s in zip(shape, stride, strict=True))
    if 0 in shape:
        return np.zeros(shape, kind)
    flat = np.frombuffer(data[start : start + reach * size], kind)
    assert len(flat) == reach
    steps = tuple(int(s) * size for s in stride)
    return np.lib.stride_tricks.as_strided(flat, tuple(shape), steps)


def _as_tensor(array: Any, dtype: str) -> torch.Tensor:
    if not array.size:
        return torch.empty(array.shape, dtype=getattr(torch, dtype))
    data = np.frombuffer(bytearray(np.ascontiguousarray(array).tobytes()), np.uint8)
    return torch.from_numpy(data).view(getattr(torch, dtype)).reshape(array.shape)
