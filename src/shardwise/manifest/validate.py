"""Checks of a manifest before anything is read or allocated on its authority."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing

import numpy as np
import numpy.typing as npt

from shardwise.errors import CorruptionError, FormatError
from shardwise.manifest.checksums import block_count
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import LARGEST, Manifest, piece_runs
from shardwise.manifest.names import RESERVED, checked_file, checked_save_id
from shardwise.manifest.table import Int, Pieces, Runs, check_width, expand_runs, padded_rows
from shardwise.store import Store

MOST_PIECES = 2**24
MOST_UNSEEN = 2**22
"""Pieces times dimensions that are expanded before the sizes of files are checked."""
MOST_SPLIT_DIMS = 12
MOST_CORNERS = 2**27


def trusted_pieces(store: Store, manifest: Manifest) -> Pieces:
    """Return the pieces of a checkpoint in a store; see `validated_pieces`.

    Raises:
        FormatError: the manifest is invalid.
        CorruptionError: a file is missing, and the manifest has more than `MOST_UNSEEN` pieces
            times dimensions.
    """

    def size_of(name: str) -> int:
        try:
            with closing(store.open(name)) as file:
                return file.size
        except FileNotFoundError:
            raise CorruptionError(f"{store}: file {name} is missing") from None

    try:
        return validated_pieces(manifest, size_of)
    except FormatError as error:
        raise FormatError(f"{store}: {error}") from error


def validated_pieces(manifest: Manifest, size_of: Callable[[str], int] | None = None) -> Pieces:
    """Return the pieces of a manifest, after all checks that do not read its files.

    Args:
        size_of: returns the size of a file in bytes. It is called before runs are expanded, and
            only for a manifest with more than `MOST_UNSEEN` pieces times dimensions, which a few
            `repeat`s can claim.

    Raises:
        FormatError: a name is unsafe or duplicate, a number is out of range, pieces overlap, leave
            a hole or lie outside their tensor or file, a tied tensor is missing, or a file has
            another size.
    """
    checked_save_id(manifest.save_id)
    _check_names(manifest)
    _check_files(manifest)
    _check_tensors(manifest)
    runs = piece_runs(manifest)
    _check_claims(manifest, runs, size_of)
    _check_run_ends(runs.first, runs.count, runs.file_step, runs.start_step, runs.offset_step)
    pieces = expand_runs(runs)
    _check_inside(manifest, pieces)
    _check_bytes(manifest, pieces)
    shapes = padded_rows([t.shape for t in manifest.tensors], pieces.offset.shape[1], 1)
    stored = np.array([t.same_as is None for t in manifest.tensors], bool)
    wrong = uncovered(shapes, pieces.tensor, pieces.offset, pieces.shape, stored)
    if len(wrong):
        names = ", ".join(manifest.tensors[i].name for i in wrong[:5].tolist())
        raise FormatError(f"pieces overlap or leave holes in {len(wrong)} tensor(s): {names}")
    return pieces


def _check_names(manifest: Manifest) -> None:
    seen: set[str] = set()
    groups = [t.name for t in manifest.tensors], [o.name for o in manifest.objects]
    for name in [*groups[0], *groups[1], *manifest.per_rank]:
        if name in seen:
            raise FormatError(f"manifest has the name {name!r} twice")
        if name.startswith(RESERVED):
            raise FormatError(f"manifest uses the reserved name {name!r}")
        seen.add(name)


def _check_files(manifest: Manifest) -> None:
    seen: set[str] = set()
    ranks: set[int] = set()
    for file in manifest.files:
        if checked_file(file.name) in seen or file.rank in ranks:
            raise FormatError(f"manifest has file {file.name!r} or its rank twice")
        seen.add(file.name)
        ranks.add(file.rank)
        ordered = 8 <= file.data_at <= file.objects_at <= file.checksums_at <= file.size
        table = 4 * block_count(file.checksums_at)
        if not ordered or file.size - file.checksums_at != table:
            raise FormatError(f"file {file.name!r}: its parts overlap or have the wrong size")
        if file.rank >= manifest.world_size:
            raise FormatError(f"file {file.name!r} is of rank {file.rank} of {manifest.world_size}")


def _check_tensors(manifest: Manifest) -> None:
    by_name = {tensor.name: tensor for tensor in manifest.tensors}
    for tensor in manifest.tensors:
        kind = DTYPES.get(tensor.dtype)
        if kind is None:
            raise FormatError(f"{tensor.name}: unknown dtype {tensor.dtype[:40]!r}")
        if math.prod(n for n in tensor.shape if n) * kind.itemsize > LARGEST:
            raise FormatError(f"{tensor.name}: shape {tensor.shape} is too large")
        if tensor.same_as is None:
            continue
        other = by_name.get(tensor.same_as)
        if other is None or other.same_as is not None or tensor.pieces:
            raise FormatError(f"{tensor.name}: is tied to {tensor.same_as!r}, which is not stored")
        if (other.dtype, other.shape) != (tensor.dtype, tensor.shape):
            raise FormatError(f"{tensor.name}: differs in dtype or shape from {tensor.same_as!r}")


def _check_claims(manifest: Manifest, runs: Runs, size_of: Callable[[str], int] | None) -> None:
    """Compare the number and size of pieces with tensors and files before runs are expanded."""
    total = sum(runs.count.tolist())
    if total > MOST_PIECES:
        raise FormatError(f"manifest claims {total} pieces; at most {MOST_PIECES} are read")
    dims = runs.first.offset.shape[1]
    check_width(total, dims)
    tensors = manifest.tensors
    # Floats cannot overflow; exact checks follow once runs are expanded.
    claimed = runs.first.shape.prod(axis=1, dtype=np.float64) * runs.count
    held = np.array([math.prod(t.shape) for t in tensors], np.float64)
    excess = np.bincount(runs.first.tensor, claimed, len(tensors)) > held * (1 + 1e-6)
    if excess.any():
        raise FormatError(f"{tensors[int(np.argmax(excess))].name}: its pieces overlap")
    itemsize = np.array([DTYPES[t.dtype].itemsize for t in tensors], np.float64)
    wanted = float((claimed * itemsize[runs.first.tensor]).sum())
    if wanted > sum(f.objects_at - f.data_at for f in manifest.files) * (1 + 1e-6):
        raise FormatError("pieces have more bytes than the files: they share bytes, or lie outside")
    if total * max(1, dims) > MOST_UNSEEN and size_of is not None:
        for file in manifest.files:
            if size_of(file.name) != file.size:
                raise FormatError(f"file {file.name!r} does not have {file.size} bytes")


def _check_run_ends(first: Pieces, count: Int, *steps: Int) -> None:
    # Before runs are expanded, so that no sum overflows. Floats cannot.
    last = (count - 1).astype(np.float64)
    for start, step in zip((first.file, first.start, first.offset), steps, strict=True):
        reach = last[:, None] if step.ndim == 2 else last
        end = start.astype(np.float64) + reach * step
        if (end < 0).any() or (end > LARGEST).any():
            raise FormatError("a run of pieces leads out of its tensor or file")


def _check_inside(manifest: Manifest, pieces: Pieces) -> None:
    shapes = padded_rows([t.shape for t in manifest.tensors], pieces.offset.shape[1], 1)
    if not len(pieces):
        return
    inside = (
        (pieces.shape > 0)
        & (pieces.offset >= 0)
        & (pieces.shape <= shapes[pieces.tensor])
        & (pieces.offset <= shapes[pieces.tensor] - pieces.shape)
    ).all(axis=1)
    if not inside.all():
        bad = manifest.tensors[int(pieces.tensor[np.argmin(inside)])]
        raise FormatError(f"{bad.name}: a piece is empty or lies outside its shape {bad.shape}")
    if (pieces.file < 0).any() or (pieces.file >= len(manifest.files)).any():
        raise FormatError(f"a piece lies in a file that is not one of {len(manifest.files)}")


def _check_bytes(manifest: Manifest, pieces: Pieces) -> None:
    if not len(pieces):
        return
    itemsize = np.array([DTYPES[t.dtype].itemsize for t in manifest.tensors], np.int64)
    nbytes = pieces.shape.prod(axis=1) * itemsize[pieces.tensor]
    room = np.array([f.objects_at - f.data_at for f in manifest.files], np.int64)[pieces.file]
    outside = (pieces.start < 0) | (nbytes > room) | (pieces.start > room - nbytes)
    if outside.any():
        bad = manifest.tensors[int(pieces.tensor[np.argmax(outside)])]
        raise FormatError(f"{bad.name}: a piece lies outside the data of its file")
    order = np.lexsort((pieces.start, pieces.file))
    same_file = np.diff(pieces.file[order]) == 0
    overlap = same_file & (np.diff(pieces.start[order]) < nbytes[order][:-1])
    if overlap.any():
        bad = manifest.tensors[int(pieces.tensor[order[np.argmax(overlap)]])]
        raise FormatError(f"{bad.name}: a piece shares bytes of its file with another")


def uncovered(
    shapes: Int, tensor: Int, offset: Int, shape: Int, stored: npt.NDArray[np.bool_]
) -> Int:
    """Return the tensors that their boxes do not cover exactly once.

    The boxes cover a tensor exactly once if the sum of their indicator functions is the tensor's
    own. Its mixed difference is a signed sum of corner points, so it is enough to compare signed
    sums of random hashes of corners: equal by chance with probability 2^-64.

    Args:
        shapes: shapes of the tensors, `(t, D)`.
        tensor, offset, shape: the boxes, one in each row.
        stored: which tensors have boxes at all.

    Raises:
        FormatError: boxes are split in too many dimensions.
    """
    seeds = np.random.default_rng().integers(2**64, size=shapes.shape[1] + 1, dtype=np.uint64)
    holds = (shapes > 0).all(axis=1) & stored
    everything = np.arange(len(shapes))[holds]
    sums = np.zeros(len(shapes), np.uint64)
    partial = (shape != shapes[tensor]).any(axis=0) if len(tensor) else np.zeros(shapes.shape[1])
    dims = np.flatnonzero(partial).tolist()
    if len(dims) > MOST_SPLIT_DIMS:
        raise FormatError(
            f"its pieces split tensors in {len(dims)} dimensions; at most {MOST_SPLIT_DIMS} are "
            "supported"
        )
    if len(tensor) << len(dims) > MOST_CORNERS:
        raise FormatError(f"{len(tensor)} pieces split in {len(dims)} dimensions are too many")
    _add_corners(sums, tensor, offset, shape, dims, seeds)
    expected = np.zeros(len(shapes), np.uint64)
    _add_corners(expected, everything, 0 * shapes[holds], shapes[holds], dims, seeds)
    return np.flatnonzero(sums != expected)


def _add_corners(
    sums: npt.NDArray[np.uint64],
    tensor: Int,
    offset: Int,
    shape: Int,
    dims: list[int],
    seeds: npt.NDArray[np.uint64],
) -> None:
    for corner in range(2 ** len(dims)):
        mixed = _mix(tensor.astype(np.uint64) + seeds[-1])
        negative = corner.bit_count() % 2 == 1
        for bit, dim in enumerate(dims):
            at = offset[:, dim] + (shape[:, dim] if corner >> bit & 1 else 0)
            mixed = _mix(mixed ^ (at.astype(np.uint64) + seeds[dim]))
        np.add.at(sums, tensor, np.negative(mixed) if negative else mixed)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
