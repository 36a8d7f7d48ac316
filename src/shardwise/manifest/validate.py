"""Checks of a manifest's contents, before any number in it is used to read or allocate."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing

import numpy as np

from shardwise.errors import CorruptionError, FormatError
from shardwise.events import format_count
from shardwise.layout import find_uncovered_tensors
from shardwise.manifest.checksums import block_count
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import LARGEST_INTEGER, Manifest
from shardwise.manifest.names import RESERVED, check_file_name, check_save_id
from shardwise.manifest.pieces import (
    Int,
    Pieces,
    Runs,
    check_table_size,
    expand_runs,
    padded_rows,
    runs_of_manifest,
)
from shardwise.store import Store

MOST_PIECES = 2**24
MOST_UNCHECKED_PIECES = 2**22
"""The largest table of pieces, in rows times dimensions, to allocate before checking file sizes."""
ROUNDING = 1 + 1e-6
"""Tolerance of comparisons in floating point, which are used where integers could overflow."""


def validated_pieces_of(store: Store, manifest: Manifest) -> Pieces:
    """Return the pieces of a checkpoint in a store, after the checks of `validated_pieces`.

    Raises:
        FormatError: the manifest is invalid.
        CorruptionError: the manifest claims so many pieces that file sizes are checked first, and
            a file is missing.
    """

    def size_of(name: str) -> int:
        try:
            with closing(store.open(name)) as file:
                return file.size
        except FileNotFoundError:
            raise CorruptionError(
                f"{store}: the file {name} is missing, but the manifest lists it: copy it from an "
                "intact source, or load another checkpoint"
            ) from None

    try:
        return validated_pieces(manifest, size_of)
    except FormatError as error:
        raise FormatError(f"{store}: {error}; load another checkpoint") from error


def validated_pieces(manifest: Manifest, size_of: Callable[[str], int] | None = None) -> Pieces:
    """Return the pieces of a manifest, after all checks that do not read data files.

    Args:
        manifest: a decoded manifest.
        size_of: returns the size of a file in bytes. A few short entries can claim millions of
            pieces. So before a large table of pieces is allocated, the sizes of files are checked.

    Raises:
        FormatError: a name is unsafe or duplicate; a number is out of range; pieces overlap, leave
            gaps, or lie outside their tensor or file; a tied tensor is missing; or a file has
            another size.
    """
    check_save_id(manifest.save_id)
    _check_names(manifest)
    _check_files(manifest)
    _check_tensors(manifest)
    runs = runs_of_manifest(manifest)
    _check_totals(manifest, runs)
    if (
        int(runs.count.sum()) * max(1, runs.first.offset.shape[1]) > MOST_UNCHECKED_PIECES
        and size_of
    ):
        _check_file_sizes(manifest, size_of)
    _check_run_ends(manifest, runs)
    pieces = expand_runs(runs)
    if len(pieces):
        _check_within_tensors(manifest, pieces)
        _check_within_files(manifest, pieces)
    _check_coverage(manifest, pieces)
    return pieces


def _check_names(manifest: Manifest) -> None:
    seen: set[str] = set()
    tensors, objects = (t.name for t in manifest.tensors), (o.name for o in manifest.objects)
    for name in [*tensors, *objects, *manifest.per_rank]:
        if name in seen:
            raise FormatError(
                f"the manifest has the name {name!r} twice, so it is ambiguous which value to "
                "load: a faulty program wrote it"
            )
        if name.startswith(RESERVED):
            raise FormatError(
                f"the manifest has the name {name!r}, but names that begin with {RESERVED} are "
                "reserved: a faulty program wrote it"
            )
        seen.add(name)


def _check_files(manifest: Manifest) -> None:
    names: set[str] = set()
    ranks: set[int] = set()
    for file in manifest.files:
        if check_file_name(file.name) in names:
            raise FormatError(f"the manifest lists the file {file.name!r} twice")
        if file.rank in ranks:
            raise FormatError(f"the manifest lists two files of rank {file.rank}")
        names.add(file.name)
        ranks.add(file.rank)
        ordered = 8 <= file.data_at <= file.objects_at <= file.checksums_at <= file.size
        table_size = 4 * block_count(file.checksums_at)
        if not ordered or file.size - file.checksums_at != table_size:
            raise FormatError(
                f"the manifest lists the parts of file {file.name!r} at offsets that overlap or do "
                "not fit its size"
            )
        if file.rank >= manifest.world_size:
            raise FormatError(
                f"the manifest lists the file {file.name!r} of rank {file.rank}, but only "
                f"{manifest.world_size} ranks saved"
            )


def _check_tensors(manifest: Manifest) -> None:
    by_name = {tensor.name: tensor for tensor in manifest.tensors}
    for tensor in manifest.tensors:
        dtype = DTYPES.get(tensor.dtype)
        if dtype is None:
            raise FormatError(
                f"{tensor.name}: unknown dtype {tensor.dtype[:40]!r}: install a newer version of "
                "shardwise, which may know it"
            )
        if math.prod(n for n in tensor.shape if n) * dtype.itemsize > LARGEST_INTEGER:
            raise FormatError(
                f"{tensor.name}: a {tensor.dtype} tensor of shape {list(tensor.shape)} has more "
                f"than {LARGEST_INTEGER} bytes, so the shape is wrong"
            )
        if tensor.same_as is None:
            continue
        if tensor.pieces:
            raise FormatError(
                f"{tensor.name}: the tensor is tied to {tensor.same_as!r}, but has its own pieces"
            )
        other = by_name.get(tensor.same_as)
        if other is None or other.same_as is not None:
            raise FormatError(
                f"{tensor.name}: the tensor is tied to {tensor.same_as!r}, which is not stored"
            )
        if (other.dtype, other.shape) != (tensor.dtype, tensor.shape):
            raise FormatError(
                f"{tensor.name}: the tensor has dtype {tensor.dtype} and shape "
                f"{list(tensor.shape)}, but is tied to {tensor.same_as!r}, which has "
                f"{other.dtype} and {list(other.shape)}"
            )


def _check_totals(manifest: Manifest, runs: Runs) -> None:
    """Check that tensors and files have room for all pieces that the runs claim.

    Floats cannot overflow. Exact checks follow when the runs are expanded.
    """
    total = sum(runs.count.tolist())
    if total > MOST_PIECES:
        raise FormatError(
            f"the manifest claims {total} pieces, but at most {MOST_PIECES} are supported"
        )
    check_table_size(total, runs.first.offset.shape[1])
    tensors = manifest.tensors
    claimed = runs.first.shape.prod(axis=1, dtype=np.float64) * runs.count
    elements = np.array([math.prod(t.shape) for t in tensors], np.float64)
    has_excess = np.bincount(runs.first.tensor, claimed, len(tensors)) > elements * ROUNDING
    if has_excess.any():
        name = tensors[int(np.argmax(has_excess))].name
        raise FormatError(f"{name}: the pieces have more elements than the tensor, so they overlap")
    itemsize = np.array([DTYPES[t.dtype].itemsize for t in tensors], np.float64)
    claimed_bytes = float((claimed * itemsize[runs.first.tensor]).sum())
    file_bytes = sum(f.objects_at - f.data_at for f in manifest.files)
    if claimed_bytes > file_bytes * ROUNDING:
        raise FormatError(
            f"the pieces have {claimed_bytes:.0f} bytes, but the files only {file_bytes}: pieces "
            "share bytes, or lie outside of their files"
        )


def _check_file_sizes(manifest: Manifest, size_of: Callable[[str], int]) -> None:
    for file in manifest.files:
        size = size_of(file.name)
        if size != file.size:
            raise FormatError(
                f"the file {file.name!r} has {size} bytes, but the manifest says {file.size}: copy "
                "the file again"
            )


def _check_run_ends(manifest: Manifest, runs: Runs) -> None:
    """Check the last piece of each run, so that no sum overflows when runs are expanded."""
    last = (runs.count - 1).astype(np.float64)
    columns = (
        (runs.first.file, runs.file_step, last),
        (runs.first.start, runs.start_step, last),
        (runs.first.offset, runs.offset_step, last[:, None]),
    )
    for start, step, steps in columns:
        end = start.astype(np.float64) + steps * step
        wrong = (end < 0) | (end > LARGEST_INTEGER)
        if wrong.any():
            row = int(np.argwhere(wrong)[0, 0])
            name = manifest.tensors[int(runs.first.tensor[row])].name
            raise FormatError(f"{name}: a repeated piece lies outside of its tensor or file")


def _check_within_tensors(manifest: Manifest, pieces: Pieces) -> None:
    shape = _tensor_shapes(manifest, pieces)[pieces.tensor]
    inside = (
        (pieces.shape > 0)
        & (pieces.offset >= 0)
        & (pieces.shape <= shape)
        & (pieces.offset <= shape - pieces.shape)
    ).all(axis=1)
    if not inside.all():
        row = int(np.argmin(inside))
        tensor = manifest.tensors[int(pieces.tensor[row])]
        ndim = len(tensor.shape)
        offset, extent = pieces.offset[row, :ndim].tolist(), pieces.shape[row, :ndim].tolist()
        raise FormatError(
            f"{tensor.name}: the piece at {offset} of shape {extent} is empty, or lies outside of "
            f"the tensor, which has shape {list(tensor.shape)}"
        )


def _check_within_files(manifest: Manifest, pieces: Pieces) -> None:
    in_list = (pieces.file >= 0) & (pieces.file < len(manifest.files))
    if not in_list.all():
        row = int(np.argmin(in_list))
        raise FormatError(
            f"{_tensor_name(manifest, pieces, row)}: a piece lies in file {int(pieces.file[row])}, "
            f"but the manifest lists {len(manifest.files)} files"
        )
    itemsize = np.array([DTYPES[t.dtype].itemsize for t in manifest.tensors], np.int64)
    nbytes = pieces.shape.prod(axis=1) * itemsize[pieces.tensor]
    data_size = np.array([f.objects_at - f.data_at for f in manifest.files], np.int64)[pieces.file]
    outside = (pieces.start < 0) | (nbytes > data_size) | (pieces.start > data_size - nbytes)
    if outside.any():
        row = int(np.argmax(outside))
        raise FormatError(
            f"{_tensor_name(manifest, pieces, row)}: a piece lies outside of the data section of "
            f"{manifest.files[int(pieces.file[row])].name}"
        )
    order = np.lexsort((pieces.start, pieces.file))
    same_file = np.diff(pieces.file[order]) == 0
    overlaps = same_file & (np.diff(pieces.start[order]) < nbytes[order][:-1])
    if overlaps.any():
        first = int(np.argmax(overlaps))
        names = [_tensor_name(manifest, pieces, int(order[i])) for i in (first, first + 1)]
        file = manifest.files[int(pieces.file[order[first]])].name
        raise FormatError(f"pieces of {names[0]} and {names[1]} share bytes of {file}")


def _check_coverage(manifest: Manifest, pieces: Pieces) -> None:
    shapes = _tensor_shapes(manifest, pieces)
    stored = np.array([t.same_as is None for t in manifest.tensors], bool)
    wrong = find_uncovered_tensors(shapes, pieces.tensor, pieces.offset, pieces.shape, stored)
    if len(wrong):
        names = ", ".join(manifest.tensors[i].name for i in wrong[:5].tolist())
        tensors = format_count(len(wrong), "tensor")
        raise FormatError(f"the pieces of {tensors} overlap or leave gaps: {names}")


def _tensor_shapes(manifest: Manifest, pieces: Pieces) -> Int:
    return padded_rows([t.shape for t in manifest.tensors], pieces.offset.shape[1], 1)


def _tensor_name(manifest: Manifest, pieces: Pieces, row: int) -> str:
    return manifest.tensors[int(pieces.tensor[row])].name
