"""Checks of a layout, before any number in it is used to read or allocate."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from shardwise.boxes import find_uncovered_tensors
from shardwise.boxes.table import BoolArray, IntArray, check_table_size
from shardwise.errors import CorruptionError, FormatError
from shardwise.events import format_count
from shardwise.manifest.checksums import block_count
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.layout import Layout, Pieces, StoredFile
from shardwise.manifest.manifest import LARGEST_INTEGER, Manifest, TensorEntry
from shardwise.manifest.names import LONGEST_NAME, RESERVED, check_file_name, check_save_id
from shardwise.manifest.pieces import Runs, decode_tensors, expand_runs
from shardwise.store import Store

MOST_PIECES = 2**24
MOST_UNCHECKED_PIECES = 2**22
"""The largest table of pieces, in rows times dimensions, to allocate before checking file sizes."""
ROUNDING = 1 + 1e-6
"""Tolerance of comparisons in floating point, which are used where integers could overflow."""


def layout_in(store: Store, manifest: Manifest, *, checks_sizes: bool = True) -> Layout:
    """Return the layout of a checkpoint in a store, after the checks of `layout_of_manifest`.

    Args:
        store: the files of the checkpoint.
        manifest: its manifest, decoded.
        checks_sizes: whether to compare the sizes of files with the store before a very large table
            of pieces is allocated. In a load, only one rank needs to.

    Raises:
        FormatError: the manifest is invalid.
        CorruptionError: a file is missing, and its size had to be checked.
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
        return layout_of_manifest(manifest, size_of if checks_sizes else None)
    except FormatError as error:
        raise FormatError(f"{store}: {error}; load another checkpoint") from error


def layout_of_manifest(manifest: Manifest, size_of: Callable[[str], int] | None = None) -> Layout:
    """Return the layout that a manifest describes, after all checks that do not read data files.

    Args:
        manifest: a decoded manifest.
        size_of: returns the size of a file in bytes. A few short entries can claim millions of
            pieces. So before a large table of pieces is allocated, the sizes of files are checked.

    Raises:
        FormatError: as for `validate_layout`; or a file has another size, or an unsafe name.
    """
    check_save_id(manifest.save_id)
    _check_data_files(manifest)
    tensors, runs = decode_tensors(manifest.tensors)
    layout = Layout(
        format=manifest.format,
        files=tuple(StoredFile.of_entry(entry) for entry in manifest.files),
        tensors=tensors,
        pieces=Pieces.empty(),
        objects=manifest.objects,
        per_rank=manifest.per_rank,
        step=manifest.step,
        world_size=manifest.world_size,
        save_id=manifest.save_id,
        created=manifest.created,
        metrics=manifest.metrics,
        left_out=manifest.left_out,
    )
    _check_entries(layout)
    _check_totals(manifest, tensors, runs)
    if int(runs.count.sum()) * max(1, layout.dims) > MOST_UNCHECKED_PIECES and size_of:
        _check_file_sizes(manifest, size_of)
    _check_run_ends(manifest, tensors, runs)
    data_at = np.array([file.data_at for file in manifest.files], np.int64)
    layout = _check_pieces(replace(layout, pieces=expand_runs(runs, data_at)))
    _refuse_shared_bytes(layout)
    return layout


def validate_layout(layout: Layout) -> Layout:
    """Check a layout, and return it with padded columns.

    All columns then have as many dimensions as the tensor with the most dimensions.

    Raises:
        FormatError: a name is invalid or occurs twice; a number is out of range; a piece lies
            outside of its file or tensor; elements of a piece share bytes; pieces overlap or leave
            gaps; or a tied tensor is missing. The message names the tensors.
    """
    _check_entries(layout)
    return _check_pieces(layout)


def _check_entries(layout: Layout) -> None:
    """Check the names of tensors and values, the files and the tensors."""
    seen: set[str] = set()
    tensors, objects = (t.name for t in layout.tensors), (o.name for o in layout.objects)
    for name in [*tensors, *objects, *layout.per_rank]:
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
    files = [file.name for file in layout.files]
    if len(set(files)) != len(files):
        (twice, _), *_ = Counter(files).most_common(1)
        raise FormatError(f"the file {twice[:200]!r} is listed twice")
    for file in layout.files:
        parts = file.name.split("/")
        if file.content is None and (not all(parts) or {".", ".."} & set(parts)):
            raise FormatError(
                f"{file.name[:200]!r} is not a path below the directory of the checkpoint"
            )
        if file.content is not None and len(file.content) != file.size:
            raise FormatError(
                f"{file.name[:200]!r}: the content has {len(file.content)} bytes instead of "
                f"{file.size}"
            )
    _check_tensors(layout)


def _check_data_files(manifest: Manifest) -> None:
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


def _check_tensors(layout: Layout) -> None:
    by_name = {tensor.name: tensor for tensor in layout.tensors}
    for tensor in layout.tensors:
        dtype = DTYPES.get(tensor.dtype)
        if dtype is None:
            raise FormatError(
                f"{tensor.name}: unknown dtype {tensor.dtype[:40]!r}: install a newer version of "
                "shardwise, which may know it, or convert the tensor before saving it"
            )
        if math.prod(n for n in tensor.shape if n) * dtype.itemsize > LARGEST_INTEGER:
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


def _check_totals(manifest: Manifest, tensors: Sequence[TensorEntry], runs: Runs) -> None:
    """Check that tensors and files have room for all pieces that the runs claim.

    Floats cannot overflow. Exact checks follow when the runs are expanded.
    """
    total = sum(runs.count.tolist())
    if total > MOST_PIECES:
        raise FormatError(
            f"the manifest claims {total} pieces, but at most {MOST_PIECES} are supported"
        )
    check_table_size(total, runs.offset.shape[1])
    claimed = runs.shape.prod(axis=1, dtype=np.float64) * runs.count
    elements = np.array([math.prod(t.shape) for t in tensors], np.float64)
    has_excess = np.bincount(runs.tensor, claimed, len(tensors)) > elements * ROUNDING
    if has_excess.any():
        name = tensors[int(np.argmax(has_excess))].name
        raise FormatError(f"{name}: the pieces have more elements than the tensor, so they overlap")
    itemsize = np.array([DTYPES[t.dtype].itemsize for t in tensors], np.float64)
    claimed_bytes = float((claimed * itemsize[runs.tensor]).sum())
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


def _check_run_ends(manifest: Manifest, tensors: Sequence[TensorEntry], runs: Runs) -> None:
    """Check the last piece of each run, so that no sum overflows when runs are expanded."""
    last = (runs.count - 1).astype(np.float64)
    columns = (
        (runs.file, runs.file_step, last, len(manifest.files) - 1),
        (runs.start, runs.start_step, last, LARGEST_INTEGER),
        (runs.offset, runs.offset_step, last[:, None], LARGEST_INTEGER),
    )
    for start, step, steps, largest in columns:
        end = start.astype(np.float64) + steps * step
        wrong = (end < 0) | (end > largest) | (start > largest)
        if wrong.any():
            row = int(np.argwhere(wrong)[0, 0])
            name = tensors[int(runs.tensor[row])].name
            raise FormatError(
                f"{name}: a piece lies outside of its tensor, or in none of the "
                f"{format_count(len(manifest.files), 'file')} that are listed"
            )


def _refuse_shared_bytes(layout: Layout) -> None:
    """Refuse pieces of a data file that share bytes. In foreign checkpoints, tensors may share."""
    pieces = layout.pieces
    order = np.lexsort((pieces.start, pieces.file))
    file, start, end = pieces.file[order], pieces.start[order], layout.piece_ends(pieces)[order]
    overlaps = (np.diff(file) == 0) & (start[1:] < end[:-1])
    if overlaps.any():
        first = int(np.argmax(overlaps))
        names = [_tensor_name(layout, pieces, int(order[i])) for i in (first, first + 1)]
        raise FormatError(
            f"pieces of {names[0]} and {names[1]} share bytes of {layout.files[file[first]].name}"
        )


def _check_pieces(layout: Layout) -> Layout:
    """Check the pieces and replicas, and return the layout with padded columns."""
    stored = np.array([t.same_as is None for t in layout.tensors], bool)
    for index in layout.terms:
        if not 0 <= index < len(stored):
            raise FormatError(f"a term belongs to tensor {index}, which does not exist")
    layout = replace(
        layout,
        pieces=layout.pieces.padded(layout.dims),
        replicas=layout.replicas.padded(layout.dims),
    )
    for pieces in (layout.pieces, layout.replicas):
        _check_table(layout, pieces)
    pieces = layout.pieces
    has_own = ~stored[layout.tensor_of[pieces.tensor]]
    if has_own.any():
        tensor = layout.tensors[int(layout.tensor_of[pieces.tensor[np.argmax(has_own)]])]
        raise FormatError(
            f"{tensor.name}: the tensor is tied to {tensor.same_as!r}, but has its own pieces"
        )
    stored = stored[layout.tensor_of]
    stored[list(layout.terms)] = False
    wrong = find_uncovered_tensors(
        layout.shapes, pieces.tensor, pieces.offset, pieces.shape, stored
    )
    if len(wrong):
        of_wrong = layout.tensor_of[wrong[:5]].tolist()
        names = ", ".join(dict.fromkeys(layout.tensors[i].name for i in of_wrong))
        tensors = format_count(len(wrong), "tensor")
        raise FormatError(f"the pieces of {tensors} overlap or leave gaps: {names}")
    return layout


def _check_table(layout: Layout, pieces: Pieces) -> None:
    if len(pieces) > MOST_PIECES:
        raise FormatError(
            f"the checkpoint has {len(pieces)} pieces; at most {MOST_PIECES} are supported: save "
            "it again from fewer ranks"
        )
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
    low, high = np.array([f.data_range for f in layout.files], np.int64).reshape(-1, 2).T
    # In floating point, because integers could overflow.
    itemsize = layout.itemsizes[pieces.tensor]
    last = ((pieces.shape - 1.0) * pieces.stride).sum(axis=1) * itemsize
    outside = (pieces.start < low[pieces.file]) | (
        last > high[pieces.file] - itemsize - pieces.start
    )
    _refuse_pieces(layout, pieces, outside, "lies outside of its file's data")
    shared = ~_have_disjoint_elements(pieces.shape, pieces.stride)
    _refuse_pieces(layout, pieces, shared, "has elements that share bytes")


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
    is_wrong = np.asarray(wrong)
    if not is_wrong.any():
        return
    row = int(np.argmax(is_wrong))
    tensor = layout.tensors[int(layout.tensor_of[pieces.tensor[row]])]
    file = layout.files[int(pieces.file[row])]
    offset, shape = (c[row, : len(tensor.shape)].tolist() for c in (pieces.offset, pieces.shape))
    raise FormatError(
        f"{tensor.name}, of shape {list(tensor.shape)}: the piece at {offset} of shape {shape} in "
        f"{file.name} {problem}"
    )


def _tensor_name(layout: Layout, pieces: Pieces, row: int) -> str:
    return layout.tensors[int(layout.tensor_of[pieces.tensor[row]])].name
