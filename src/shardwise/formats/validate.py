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
from shardwise.formats.piece_tables import pad_table
from shardwise.layout import find_uncovered_tensors
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import LARGEST_INTEGER, TensorEntry
from shardwise.manifest.names import LONGEST_NAME, RESERVED
from shardwise.manifest.pieces import Int, check_table_size, padded_rows
from shardwise.manifest.validate import MOST_PIECES

_COPY_AGAIN = "copy the checkpoint again from an intact source, or open another one"


def validate_foreign(foreign: Foreign) -> Foreign:
    """Check the description of a foreign checkpoint; return it with padded columns.

    All columns then have as many dimensions as the tensor with the most dimensions.

    Raises:
        FormatError: a name occurs twice, a piece is outside its file or tensor, elements of a piece
            share bytes, or pieces overlap or leave gaps. The message names the tensors.
    """
    _check_names(foreign)
    _check_tensors(foreign.tensors)
    dims = max((len(tensor.shape) for tensor in foreign.tensors), default=0)
    for rows in (len(foreign.tensors), len(foreign.table), len(foreign.replicas)):
        check_table_size(rows, dims)
    table, replicas = pad_table(foreign.table, dims), pad_table(foreign.replicas, dims)
    foreign = replace(foreign, table=table, replicas=replicas)
    for piece_table in (table, replicas):
        if len(piece_table) > MOST_PIECES:
            raise FormatError(
                f"the checkpoint has {len(piece_table)} pieces; at most {MOST_PIECES} are "
                "supported: save it again from fewer ranks"
            )
        _check_pieces(foreign, piece_table)
    if foreign.replica_names and len(foreign.replica_names) != len(replicas):
        raise FormatError(
            f"the index has {len(foreign.replica_names)} names for {len(replicas)} replicas: it is "
            "damaged: delete the index file, and open the checkpoint again"
        )
    pieces = foreign.table.pieces
    shapes = _padded_shapes(foreign, pieces.offset.shape[1])
    stored = np.array(
        [t.same_as is None and t.name not in foreign.averages for t in foreign.tensors], bool
    )
    wrong_tensors = find_uncovered_tensors(
        shapes, pieces.tensor, pieces.offset, pieces.shape, stored
    )
    if len(wrong_tensors):
        names = ", ".join(foreign.tensors[i].name for i in wrong_tensors[:5].tolist())
        raise FormatError(
            f"pieces overlap or leave gaps in {len(wrong_tensors)} tensor(s): {names}; "
            f"{_COPY_AGAIN}"
        )
    return foreign


def _padded_shapes(foreign: Foreign, dims: int) -> Int:
    return padded_rows([tensor.shape for tensor in foreign.tensors], dims, 1)


def _check_names(foreign: Foreign) -> None:
    seen_names: set[str] = set()
    for name in [*(t.name for t in foreign.tensors), *(o.name for o in foreign.objects)]:
        if name in seen_names:
            raise FormatError(
                f"the name {name[:200]!r} occurs twice when keys are joined by dots: save one of "
                "the two values under another name"
            )
        if not name or len(name) > LONGEST_NAME or name.startswith(RESERVED):
            raise FormatError(
                f"{name[:60]!r} is not a valid name of a tensor or value: names have 1 to "
                f"{LONGEST_NAME} characters and do not start with {RESERVED!r}; save it under "
                "another name"
            )
        seen_names.add(name)
    files = [file.name for file in foreign.files]
    if len(set(files)) != len(files):
        (duplicate_name, _), *_ = Counter(files).most_common(1)
        raise FormatError(f"the file {duplicate_name[:200]!r} is listed twice; {_COPY_AGAIN}")
    for file in foreign.files:
        parts = file.name.split("/")
        if file.content is None and (not all(parts) or {".", ".."} & set(parts)):
            raise FormatError(
                f"{file.name[:200]!r} is not a path below the directory of the checkpoint; "
                f"{_COPY_AGAIN}"
            )
        if file.content is not None and len(file.content) != file.size:
            raise FormatError(
                f"{file.name[:200]!r}: the content has {len(file.content)} bytes instead of "
                f"{file.size}; {_COPY_AGAIN}"
            )


def _check_tensors(tensors: Sequence[TensorEntry]) -> None:
    tensor_by_name = {tensor.name: tensor for tensor in tensors}
    for tensor in tensors:
        dtype_info = DTYPES.get(tensor.dtype)
        if dtype_info is None:
            raise FormatError(
                f"{tensor.name}: the dtype {tensor.dtype[:40]!r} is not supported: convert the "
                "tensor before saving it"
            )
        if math.prod(n for n in tensor.shape if n) * dtype_info.itemsize > LARGEST_INTEGER:
            raise FormatError(
                f"{tensor.name}: a tensor of shape {list(tensor.shape)} is larger than "
                f"{LARGEST_INTEGER} bytes; {_COPY_AGAIN}"
            )
        if tensor.pieces:
            raise FormatError(
                f"{tensor.name}: the entry contains pieces, which belong into the table; "
                f"{_COPY_AGAIN}"
            )
        owner = tensor_by_name.get(tensor.same_as) if tensor.same_as is not None else tensor
        if owner is None or (owner is not tensor and owner.same_as is not None):
            raise FormatError(
                f"{tensor.name}: the tensor is tied to {tensor.same_as!r}, which is not stored; "
                f"{_COPY_AGAIN}"
            )
        if (owner.dtype, owner.shape) != (tensor.dtype, tensor.shape):
            raise FormatError(
                f"{tensor.name}: the tensor is {tensor.dtype} {list(tensor.shape)}, but is tied to "
                f"{tensor.same_as!r}, which is {owner.dtype} {list(owner.shape)}; {_COPY_AGAIN}"
            )


def _check_pieces(foreign: Foreign, table: PieceTable) -> None:
    if not len(table):
        return
    pieces, stride = table.pieces, table.stride
    for indices, count, subject in (
        (pieces.tensor, len(foreign.tensors), "tensor"),
        (pieces.file, len(foreign.files), "file"),
    ):
        if (indices < 0).any() or (indices >= count).any():
            raise FormatError(
                f"a piece refers to a {subject} that does not exist: the index of the {subject} is "
                f"not in [0, {count}); {_COPY_AGAIN}"
            )
    shapes = _padded_shapes(foreign, pieces.offset.shape[1])[pieces.tensor]
    is_inside = (pieces.shape > 0) & (pieces.offset >= 0) & (pieces.shape <= shapes)
    is_inside &= pieces.offset <= shapes - pieces.shape
    _refuse_pieces(foreign, table, ~is_inside.all(axis=1), "is empty or outside the tensor")
    itemsize = np.array([DTYPES[t.dtype].itemsize for t in foreign.tensors], np.int64)
    sizes = np.array([file.size for file in foreign.files], np.int64)[pieces.file]
    # In floating point, because integers could overflow.
    last_element_offset = ((pieces.shape - 1.0) * stride).sum(axis=1) * itemsize[pieces.tensor]
    last_allowed_offset = sizes - pieces.start - itemsize[pieces.tensor]
    _refuse_pieces(foreign, table, (stride < 0).any(axis=1), "has negative strides")
    _refuse_pieces(
        foreign,
        table,
        (pieces.start < 0) | (last_element_offset > last_allowed_offset),
        "is outside its file",
    )
    _refuse_pieces(
        foreign,
        table,
        ~_have_disjoint_elements(pieces.shape, stride),
        "has elements that share bytes",
    )


def _have_disjoint_elements(shape: Int, stride: Int) -> npt.NDArray[np.bool_]:
    """Return which arrays have disjoint elements.

    Elements are disjoint if each stride exceeds the extent of the dimensions with smaller strides.
    """
    disjoint = _are_disjoint_in_order(shape[:, ::-1], stride[:, ::-1])  # True for nearly all arrays
    unordered = np.flatnonzero(~disjoint)
    shape, stride = shape[unordered], stride[unordered]
    order = np.argsort(np.where(shape > 1, stride, 0), axis=1)
    shape, stride = (np.take_along_axis(item, order, axis=1) for item in (shape, stride))
    disjoint[unordered] = _are_disjoint_in_order(shape, stride)
    return disjoint


def _are_disjoint_in_order(shape: Int, stride: Int) -> npt.NDArray[np.bool_]:
    """Return which arrays have disjoint elements. Dimensions must be sorted by stride."""
    disjoint, extent = np.ones(len(shape), bool), np.zeros(len(shape), np.int64)
    for sizes, steps in zip(shape.T, stride.T, strict=True):
        disjoint &= (sizes == 1) | (steps > extent)
        extent += np.where(sizes > 1, (sizes - 1) * steps, 0)
    return disjoint


def _refuse_pieces(
    foreign: Foreign, table: PieceTable, is_wrong: npt.ArrayLike, problem: str
) -> None:
    rows = np.flatnonzero(np.asarray(is_wrong))
    if len(rows):
        tensor = foreign.tensors[int(table.pieces.tensor[rows[0]])]
        file = foreign.files[int(table.pieces.file[rows[0]])]
        raise FormatError(
            f"{tensor.name}, of shape {list(tensor.shape)}: a piece in {file.name} {problem}; "
            f"{_COPY_AGAIN}"
        )
