"""Checks of a layout, before any number in it is used to read or allocate.

Example: a weight of shape `[6, 4]` has one entry: the box `[0:2,0:4]` in file 0, and a `repeat` of
count 3, each 2 rows and one file after the one before. The checks use the entry as it is: there are
files 0 to 2; rows 0 to 5 lie within the tensor; the boxes merge to `[0:6,0:4]`, which covers it;
and 32 bytes fill the data of each file. If the count were 2**24, no such list would be made.
"""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import replace
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from shardwise.kernel.boxes import find_uncovered_tensors
from shardwise.kernel.boxes.box import BoolArray, IntArray, check_table_size
from shardwise.kernel.boxes.coverage import find_unfilled_files
from shardwise.kernel.boxes.grids import advance, expand_grids, merge_axes
from shardwise.kernel.errors import CorruptionError, FormatError
from shardwise.kernel.events import format_count
from shardwise.kernel.manifest.checksums import block_count
from shardwise.kernel.manifest.data_files import FileTable
from shardwise.kernel.manifest.dtypes import DTYPES
from shardwise.kernel.manifest.layout import Layout, StoredFiles
from shardwise.kernel.manifest.manifest import (
    LARGEST_INTEGER,
    LONGEST_NAME,
    RESERVED,
    Manifest,
    check_save_id,
)
from shardwise.kernel.manifest.pieces import Pieces, Runs, decode_tensors
from shardwise.kernel.store import Store

MOST_UNCHECKED_INTEGERS = 2**22
PLAUSIBLE_INTEGERS_PER_FILE = 2**16
"""The largest tables of pieces, in rows times dimensions, that a load may allocate although the
sizes of the files were not compared with the store."""
ROUNDING = 1 + 1e-6
"""Tolerance of comparisons in floating point, which are used where integers could overflow."""


def layout_of_manifest(manifest: Manifest, store: Store | None = None) -> Layout:
    """Return the layout that a manifest describes, after all checks that do not read data files.

    Args:
        manifest: a decoded manifest.
        store: the files of the checkpoint. A few short entries can claim millions of pieces in a
            few files. Then the sizes of these files are compared with the store; not if it is None.

    Raises:
        FormatError: as for `validate_layout`; or a file has another size, or an unsafe name.
        CorruptionError: a file is missing whose size had to be compared.
    """
    check_save_id(manifest.save_id)
    tensors, runs = decode_tensors(manifest.tensors)
    files = FileTable.of(manifest.files, manifest.save_id)
    layout = Layout(
        format=manifest.format,
        files=StoredFiles(files),
        tensors=tensors,
        runs=runs,
        objects=manifest.objects,
        per_rank=manifest.per_rank,
        step=manifest.step,
        world_size=manifest.world_size,
        save_id=manifest.save_id,
        created=manifest.created,
        metrics=manifest.metrics,
        left_out=manifest.left_out,
    )
    _check_names(layout)
    _check_data_files(layout, files)
    _check_tensors(layout)
    _check_runs(layout)
    if store is not None:
        _check_suspicious_sizes(layout, store)
    _check_coverage(layout)
    _check_that_files_are_filled(layout)
    return layout


def validate_layout(layout: Layout) -> Layout:
    """Check the layout of a foreign checkpoint, and return it with padded columns.

    All columns then have as many dimensions as the tensor with the most dimensions.

    Raises:
        FormatError: a name is invalid or occurs twice; a number is out of range; a piece lies
            outside of its file or tensor; elements of a piece share bytes; pieces overlap or leave
            gaps; or a tied tensor is missing. The message names the tensors.
    """
    _check_names(layout)
    _check_files(layout)
    _check_tensors(layout)
    for index in layout.terms:
        if not 0 <= index < len(layout.tensors):
            raise FormatError(f"a term belongs to tensor {index}, which does not exist")
    layout = replace(
        layout,
        runs=Runs.of_pieces(layout.pieces.padded(layout.dims)),
        replicas=layout.replicas.padded(layout.dims),
    )
    for pieces in (layout.pieces, layout.replicas):
        _check_pieces(layout, pieces)
        # The strides in a manifest of shardwise are row-major, so they need no such check.
        shared = ~_have_disjoint_elements(pieces.shape, pieces.stride)
        _refuse_pieces(layout, pieces, shared, "has elements that share bytes")
    _check_coverage(layout)
    return layout


def _check_names(layout: Layout) -> None:
    seen: set[str] = set()
    entries = (*layout.tensors, *layout.objects)
    for name in (*map(attrgetter("name"), entries), *layout.per_rank):
        if name in seen:
            raise FormatError(
                f"the name {name[:200]!r} occurs twice when keys are joined by dots, so it is "
                "ambiguous which value to load: save one of the two under another name"
            )
        if not name or len(name) > LONGEST_NAME or name.startswith(RESERVED):
            raise FormatError(
                f"{name[:60]!r} is not a valid name of a tensor or value: names have 1 to "
                f"{LONGEST_NAME} characters and do not start with {RESERVED!r}, which is reserved; "
                "save it under another name"
            )
        seen.add(name)


def _check_files(layout: Layout) -> None:
    """Check the files of a foreign checkpoint."""
    names: set[str] = set()
    for file in layout.files:
        name, parts = file.name, file.name.split("/")
        if name in names:
            raise FormatError(f"the file {name[:200]!r} is listed twice")
        names.add(name)
        if file.content is not None and len(file.content) != file.size:
            raise FormatError(
                f"{name[:200]!r}: the content has {len(file.content)} bytes instead of {file.size}"
            )
        if file.content is None and (not all(parts) or {".", ".."} & set(parts)):
            raise FormatError(f"{name[:200]!r} is not a path below the directory of the checkpoint")


def _check_data_files(layout: Layout, files: FileTable) -> None:
    """Check the parts and the ranks of our data files. Their names follow from their ranks."""
    rank, size, data_at, objects_at, checksums_at, _ = files.numbers.T
    wrong = (data_at < 8) | (objects_at < data_at) | (checksums_at < objects_at)
    wrong |= size - checksums_at != 4 * block_count(checksums_at)
    if wrong.any():
        name = files[int(np.argmax(wrong))].name
        raise FormatError(
            f"the manifest lists the parts of file {name!r} at offsets that overlap or do not fit "
            "its size"
        )
    if len(rank) and rank[-1] >= layout.world_size:
        raise FormatError(
            f"the manifest lists the file {files[-1].name!r} of rank {int(rank[-1])}, but only "
            f"{layout.world_size} ranks saved"
        )


def _check_tensors(layout: Layout) -> None:
    by_name = {tensor.name: tensor for tensor in layout.tensors}
    for tensor in layout.tensors:
        dtype = DTYPES.get(tensor.dtype)
        if dtype is None:
            raise FormatError(
                f"{tensor.name}: unknown dtype {tensor.dtype[:40]!r}: install a newer version of "
                "shardwise, which may know it, or convert the tensor before saving it"
            )
        if math.prod(filter(None, tensor.shape)) * dtype.itemsize > LARGEST_INTEGER:
            raise FormatError(
                f"{tensor.name}: a {tensor.dtype} tensor of shape {list(tensor.shape)} has more "
                f"than {LARGEST_INTEGER} bytes, so the shape is wrong"
            )
        if tensor.same_as is None:
            continue
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


def _check_runs(layout: Layout) -> None:
    """Check that tensors and files have room for all pieces of all runs.

    Floats cannot overflow. After that, no sum of integers can.
    """
    runs, tensors, files = layout.runs, layout.tensors, layout.files
    claimed = runs.shape.prod(axis=1, dtype=np.float64) * runs.count.prod(axis=1, dtype=np.float64)
    elements = layout.shapes.prod(axis=1, dtype=np.float64)
    has_excess = np.bincount(runs.tensor, claimed, len(tensors)) > elements * ROUNDING
    if has_excess.any():
        name = tensors[int(np.argmax(has_excess))].name
        raise FormatError(f"{name}: the pieces have more elements than the tensor, so they overlap")
    claimed_bytes = float((claimed * layout.itemsizes[runs.tensor]).sum())
    data_start, data_end, _ = layout.file_bounds.T
    file_bytes = float((data_end - data_start).sum(dtype=np.float64))
    if claimed_bytes > file_bytes * ROUNDING:
        raise FormatError(
            f"the pieces have {claimed_bytes:.0f} bytes, but the files only {file_bytes:.0f}: "
            "pieces share bytes, or lie outside of their files"
        )
    nbytes = runs.shape.prod(axis=1, dtype=np.float64) * layout.itemsizes[runs.tensor]
    times = (runs.count - 1).astype(np.float64)
    for start, step, steps, size, largest in (
        (runs.file, runs.file_step, times, 1, len(files)),
        (runs.start, runs.start_step, times, nbytes, LARGEST_INTEGER),
        (runs.offset, runs.offset_step, times[:, :, None], runs.shape, layout.shapes[runs.tensor]),
    ):
        moves = steps * step
        low = start + np.minimum(moves, 0).sum(axis=1)
        high = start + np.maximum(moves, 0).sum(axis=1) + size
        wrong = (low < 0) | (high > largest)
        if wrong.any():
            name = tensors[int(runs.tensor[np.argwhere(wrong)[0, 0]])].name
            raise FormatError(
                f"{name}: a piece lies outside of its tensor, or in none of the "
                f"{format_count(len(files), 'file')} that are listed"
            )
    low, high = layout.run_bounds
    outside = (runs.shape <= 0) | (low < 0) | (high > layout.shapes[runs.tensor])
    if outside.any():
        name = tensors[int(runs.tensor[np.argwhere(outside)[0, 0]])].name
        raise FormatError(f"{name}: a piece is empty, or lies outside of the tensor")


def _check_suspicious_sizes(layout: Layout, store: Store) -> None:
    """Compare the sizes of files with the store if they are said to have very many pieces each."""
    claimed = float(layout.runs.count.prod(axis=1, dtype=np.float64).sum()) * max(1, layout.dims)
    plausible = PLAUSIBLE_INTEGERS_PER_FILE * len(layout.files)
    if claimed <= max(plausible, MOST_UNCHECKED_INTEGERS):
        return
    for file in layout.files:
        try:
            with closing(store.open(file.name)) as opened:
                size = opened.size
        except FileNotFoundError:
            raise CorruptionError(
                f"{store}: the file {file.name} is missing, but the manifest lists it: copy it "
                "from an intact source, or load another checkpoint"
            ) from None
        if size != file.size:
            raise FormatError(
                f"the file {file.name!r} has {size} bytes, but the manifest says {file.size}: copy "
                "the file again"
            )


def _check_that_files_are_filled(layout: Layout) -> None:
    """Check that the pieces of each data file fill its data section, and share no bytes.

    In foreign checkpoints, tensors may share bytes.
    """
    runs, (start, end, _) = layout.runs, layout.file_bounds.T
    nbytes = runs.shape.prod(axis=1) * layout.itemsizes[runs.tensor]
    wrong = find_unfilled_files(
        end - start,
        np.column_stack([runs.file, runs.start]),
        np.column_stack([np.ones_like(nbytes), nbytes]),
        runs.count,
        np.stack([runs.file_step, runs.start_step], axis=-1),
    )
    if not len(wrong):
        return
    file = int(wrong[0])
    pieces = layout.pieces_in(file)
    low, high = layout.byte_ranges(pieces)
    _refuse_pieces(layout, pieces, high > end[file], "lies outside of its file's data")
    order = np.argsort(low, kind="stable")
    overlaps = low[order][1:] < high[order][:-1]
    name = layout.files[file].name
    if overlaps.any():
        rows = order[int(np.argmax(overlaps)) :][:2].tolist()
        first, second = (_tensor_name(layout, pieces, row) for row in rows)
        raise FormatError(f"pieces of {first} and {second} share bytes of {name}")
    raise FormatError(
        f"the pieces in {name} have {int((high - low).sum())} bytes, but its data section has "
        f"{int(end[file] - start[file])}: bytes are left over that belong to no piece"
    )


def _check_coverage(layout: Layout) -> None:
    """Check that the pieces cover each stored tensor exactly once, and that the others have none.

    Tied tensors, and the means of several terms, have no pieces of their own.
    """
    runs, tensor_of = layout.runs, layout.tensor_of
    is_tied = np.array([t.same_as is not None for t in layout.tensors], bool)[tensor_of]
    has_own = is_tied[runs.tensor]
    if has_own.any():
        tensor = layout.tensors[int(tensor_of[runs.tensor[np.argmax(has_own)]])]
        raise FormatError(
            f"{tensor.name}: the tensor is tied to {tensor.same_as!r}, but has its own pieces"
        )
    stored = ~is_tied
    stored[list(layout.terms)] = False
    # Most runs cover a box without gaps, which need not be expanded.
    shape, count = merge_axes(runs.shape, runs.count, runs.offset_step)
    check_table_size(int(count.prod(axis=1, dtype=np.float64).sum()), max(2, layout.dims))
    rows, k = expand_grids(count)
    offset = advance(runs.offset[rows], k, runs.offset_step[rows])
    wrong = find_uncovered_tensors(layout.shapes, runs.tensor[rows], offset, shape[rows], stored)
    if len(wrong):
        of_wrong = tensor_of[wrong[:5]].tolist()
        names = ", ".join(dict.fromkeys(layout.tensors[i].name for i in of_wrong))
        tensors = format_count(len(wrong), "tensor")
        raise FormatError(f"the pieces of {tensors} overlap or leave gaps: {names}")


def _check_pieces(layout: Layout, pieces: Pieces) -> None:
    """Check that each piece lies within its tensor and its file."""
    check_table_size(len(pieces), max(2, layout.dims))
    if pieces.offset.shape[1] > layout.dims:
        raise FormatError(
            f"a piece has {pieces.offset.shape[1]} dimensions, but no tensor has more than "
            f"{layout.dims}"
        )
    for indices, count, subject in (
        (pieces.tensor, len(layout.tensor_of), "tensor"),
        (pieces.file, len(layout.files), "file"),
    ):
        wrong = (indices < 0) | (indices >= count)
        if wrong.any():
            raise FormatError(
                f"a piece refers to {subject} {int(indices[np.argmax(wrong)])}, but the checkpoint "
                f"lists {format_count(count, subject)}"
            )
    shapes = layout.shapes[pieces.tensor]
    inside = (pieces.shape > 0) & (pieces.offset >= 0) & (pieces.shape <= shapes)
    inside &= pieces.offset <= shapes - pieces.shape
    _refuse_pieces(layout, pieces, ~inside.all(axis=1), "is empty, or lies outside of the tensor")
    _refuse_pieces(layout, pieces, (pieces.stride < 0).any(axis=1), "has negative strides")
    low, high, _ = layout.file_bounds[pieces.file].T
    # In floating point, because integers could overflow.
    itemsize = layout.itemsizes[pieces.tensor]
    last = ((pieces.shape - 1.0) * pieces.stride).sum(axis=1) * itemsize
    outside = (pieces.start < 0) | (last > high - low - itemsize - pieces.start)
    _refuse_pieces(layout, pieces, outside, "lies outside of its file's data")


def _have_disjoint_elements(shape: IntArray, stride: IntArray) -> BoolArray:
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


def _are_disjoint_in_order(shape: IntArray, stride: IntArray) -> BoolArray:
    """Return which arrays have disjoint elements. Dimensions must be sorted by stride."""
    disjoint, extent = np.ones(len(shape), bool), np.zeros(len(shape), np.int64)
    for sizes, steps in zip(shape.T, stride.T, strict=True):
        disjoint &= (sizes == 1) | (steps > extent)
        extent += np.where(sizes > 1, (sizes - 1) * steps, 0)
    return disjoint


def _refuse_pieces(layout: Layout, pieces: Pieces, wrong: npt.ArrayLike, problem: str) -> None:
    if not np.any(wrong):
        return
    row = int(np.argmax(wrong))
    tensor = layout.tensors[int(layout.tensor_of[pieces.tensor[row]])]
    file = layout.files[int(pieces.file[row])]
    offset, shape = (c[row, : len(tensor.shape)].tolist() for c in (pieces.offset, pieces.shape))
    raise FormatError(
        f"{tensor.name}, of shape {list(tensor.shape)}: the piece at {offset} of shape {shape} in "
        f"{file.name} {problem}"
    )


def _tensor_name(layout: Layout, pieces: Pieces, row: int) -> str:
    return layout.tensors[int(layout.tensor_of[pieces.tensor[row]])].name
