"""Check the description of a foreign checkpoint before any tensor is read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from shardwise.errors import FormatError
from shardwise.formats.foreign import Foreign, PieceTable
from shardwise.formats.piece_tables import widened
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import LARGEST, TensorEntry
from shardwise.manifest.names import LONGEST_NAME, RESERVED
from shardwise.manifest.table import Int, check_width, padded_rows
from shardwise.manifest.validate import MOST_PIECES, uncovered


def checked(foreign: Foreign) -> Foreign:
    """Check a foreign checkpoint; return it with columns padded to its widest tensor.

    Raises:
        FormatError: a name occurs twice, a piece is outside its file or tensor, elements of a piece
            share bytes, or pieces overlap or leave holes. The message names the tensors.
    """
    _check_names(foreign)
    _check_tensors(foreign.tensors)
    dims = max((len(tensor.shape) for tensor in foreign.tensors), default=0)
    for rows in (len(foreign.tensors), len(foreign.table), len(foreign.replicas)):
        check_width(rows, dims)
    table, replicas = widened(foreign.table, dims), widened(foreign.replicas, dims)
    foreign = replace(foreign, table=table, replicas=replicas)
    for each in (table, replicas):
        if len(each) > MOST_PIECES:
            raise FormatError(
                f"the checkpoint has {len(each)} pieces, more than the supported {MOST_PIECES}"
            )
        _check_pieces(foreign, each)
    if foreign.replica_names and len(foreign.replica_names) != len(replicas):
        raise FormatError(
            f"the description has {len(foreign.replica_names)} names for {len(replicas)} replicas"
        )
    pieces = foreign.table.pieces
    shapes = _shapes(foreign, pieces.offset.shape[1])
    stored = np.array(
        [t.same_as is None and t.name not in foreign.averages for t in foreign.tensors], bool
    )
    wrong = uncovered(shapes, pieces.tensor, pieces.offset, pieces.shape, stored)
    if len(wrong):
        names = ", ".join(foreign.tensors[i].name for i in wrong[:5].tolist())
        raise FormatError(f"pieces overlap or leave holes in {len(wrong)} tensor(s): {names}")
    return foreign


def _shapes(foreign: Foreign, dims: int) -> Int:
    return padded_rows([tensor.shape for tensor in foreign.tensors], dims, 1)


def _check_names(foreign: Foreign) -> None:
    seen: set[str] = set()
    for name in [*(t.name for t in foreign.tensors), *(o.name for o in foreign.objects)]:
        if name in seen:
            raise FormatError(
                f"the name {name[:200]!r} occurs twice when keys are joined by dots: save one of "
                "the two values under another name"
            )
        if not name or len(name) > LONGEST_NAME or name.startswith(RESERVED):
            raise FormatError(f"{name[:60]!r} is not a valid name of a tensor or value")
        seen.add(name)
    files = [file.name for file in foreign.files]
    if len(set(files)) != len(files):
        (twice, _), *_ = Counter(files).most_common(1)
        raise FormatError(f"the file {twice[:200]!r} is listed twice")
    for file in foreign.files:
        parts = file.name.split("/")
        if file.content is None and (not all(parts) or {".", ".."} & set(parts)):
            raise FormatError(f"{file.name[:200]!r} is not a path below the checkpoint")
        if file.content is not None and len(file.content) != file.size:
            raise FormatError(
                f"{file.name[:200]!r}: the content has {len(file.content)} bytes, but the file is "
                f"described with {file.size}"
            )


def _check_tensors(tensors: Sequence[TensorEntry]) -> None:
    by_name = {tensor.name: tensor for tensor in tensors}
    for tensor in tensors:
        kind = DTYPES.get(tensor.dtype)
        if kind is None:
            raise FormatError(f"{tensor.name}: unknown dtype {tensor.dtype[:40]!r}")
        if math.prod(n for n in tensor.shape if n) * kind.itemsize > LARGEST:
            raise FormatError(f"{tensor.name}: invalid shape {tensor.shape}")
        if tensor.pieces:
            raise FormatError(f"{tensor.name}: the entry contains pieces; a table must list them")
        other = by_name.get(tensor.same_as) if tensor.same_as is not None else tensor
        if other is None or (other is not tensor and other.same_as is not None):
            raise FormatError(
                f"{tensor.name}: the tensor is tied to {tensor.same_as!r}, which is not stored"
            )
        if (other.dtype, other.shape) != (tensor.dtype, tensor.shape):
            raise FormatError(
                f"{tensor.name}: the tensor is tied to {tensor.same_as!r}, which has another dtype "
                "or shape"
            )


def _check_pieces(foreign: Foreign, table: PieceTable) -> None:
    if not len(table):
        return
    pieces, stride = table.pieces, table.stride
    for index, count, what in (
        (pieces.tensor, len(foreign.tensors), "tensor"),
        (pieces.file, len(foreign.files), "file"),
    ):
        if (index < 0).any() or (index >= count).any():
            raise FormatError(f"a piece refers to a {what} that does not exist; there are {count}")
    shapes = _shapes(foreign, pieces.offset.shape[1])[pieces.tensor]
    inside = (pieces.shape > 0) & (pieces.offset >= 0) & (pieces.shape <= shapes)
    inside &= pieces.offset <= shapes - pieces.shape
    _refuse(foreign, table, ~inside.all(axis=1), "is empty or outside the tensor")
    itemsize = np.array([DTYPES[t.dtype].itemsize for t in foreign.tensors], np.int64)
    sizes = np.array([file.size for file in foreign.files], np.int64)[pieces.file]
    # Computed in floating point, because integers could overflow.
    reach = ((pieces.shape - 1.0) * stride).sum(axis=1) * itemsize[pieces.tensor]
    room = sizes - pieces.start - itemsize[pieces.tensor]
    _refuse(foreign, table, (stride < 0).any(axis=1), "has negative strides")
    _refuse(foreign, table, (pieces.start < 0) | (reach > room), "is outside its file")
    _refuse(foreign, table, ~_disjoint(pieces.shape, stride), "has elements that share bytes")


def _disjoint(shape: Int, stride: Int) -> npt.NDArray[np.bool_]:
    """Return which arrays have disjoint elements: strides exceed the extents of smaller ones."""
    disjoint = _disjoint_in_order(shape[:, ::-1], stride[:, ::-1])  # True for nearly all arrays
    rest = np.flatnonzero(~disjoint)
    shape, stride = shape[rest], stride[rest]
    order = np.argsort(np.where(shape > 1, stride, 0), axis=1)
    shape, stride = (np.take_along_axis(each, order, axis=1) for each in (shape, stride))
    disjoint[rest] = _disjoint_in_order(shape, stride)
    return disjoint


def _disjoint_in_order(shape: Int, stride: Int) -> npt.NDArray[np.bool_]:
    """Return which arrays have disjoint elements, given dimensions in order of growing strides."""
    disjoint, before = np.ones(len(shape), bool), np.zeros(len(shape), np.int64)
    for counts, steps in zip(shape.T, stride.T, strict=True):
        disjoint &= (counts == 1) | (steps > before)
        before += np.where(counts > 1, (counts - 1) * steps, 0)
    return disjoint


def _refuse(foreign: Foreign, table: PieceTable, wrong: npt.ArrayLike, what: str) -> None:
    rows = np.flatnonzero(np.asarray(wrong))
    if len(rows):
        tensor = foreign.tensors[int(table.pieces.tensor[rows[0]])]
        file = foreign.files[int(table.pieces.file[rows[0]])]
        raise FormatError(
            f"{tensor.name}, of shape {list(tensor.shape)}: a piece in {file.name} {what}"
        )
