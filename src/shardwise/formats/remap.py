"""Apply a specification to the global tensors of a checkpoint: change their names and shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from shardwise.engine.opened import Opened, Replicas
from shardwise.errors import StateError
from shardwise.formats.foreign import Catalogue, Foreign, ForeignFile, PieceTable, StoredArray
from shardwise.formats.language import apply_spec
from shardwise.formats.language.rules import Spec
from shardwise.formats.piece_tables import join_tables, table_of_boxes
from shardwise.layout import find_overlaps, row_major
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import ObjectEntry, TensorEntry
from shardwise.manifest.pieces import Int, Pieces, padded_rows


def remap(opened: Opened, spec: Spec, sizes: Mapping[str, int]) -> Opened:
    """Return a checkpoint with the names and shapes that a specification gives its tensors.

    Usually, a specification describes arrays in the files of ranks. Here, it describes the global
    tensors of the checkpoint.

    Args:
        opened: the checkpoint.
        spec: the specification.
        sizes: values for the numbers that the specification declares with `let`.

    Raises:
        MismatchError: the specification does not match the checkpoint.
        StateError: tensors of the checkpoint are averages of several copies, or the specification
            reshapes a tensor across the borders of its shards.
    """
    if opened.averages:
        raise StateError(
            f"{opened.store}: a specification cannot be applied, because tensors of this "
            "checkpoint are averages of several copies; export it first, and open the export"
        )
    catalogue = catalogue_of_tensors(opened.manifest.tensors)
    inside_values = _find_tensors_inside_values(opened)
    remapped = _drop_averages(
        apply_spec(
            spec,
            _select_rows(catalogue, np.flatnonzero(~inside_values)),
            sizes=sizes,
            checkpoint=str(opened.store),
        )
    )
    remapped = _add_unchanged(remapped, catalogue, np.flatnonzero(inside_values).tolist())
    stored_table = PieceTable(opened.pieces, opened.stride)
    composed_table, _ = _compose_pieces(remapped, remapped.table, catalogue, opened, stored_table)
    objects = tuple(
        _rename_members(each, remapped, opened.manifest.tensors) for each in opened.manifest.objects
    )
    manifest = msgspec.structs.replace(opened.manifest, tensors=remapped.tensors, objects=objects)
    left_out = (*opened.left_out, *remapped.left_out)
    return replace(
        opened,
        manifest=manifest,
        pieces=composed_table.pieces,
        stride=composed_table.stride,
        left_out=left_out,
        replicas=_remap_replicas(remapped, catalogue, opened),
    )


def _remap_replicas(remapped: Foreign, catalogue: Catalogue, opened: Opened) -> Replicas | None:
    """Return the replicas of new tensors.

    A replica of a new tensor is either an old tensor that the specification declares to be a copy,
    or a replica of an old tensor.
    """
    stored_table = PieceTable(opened.pieces, opened.stride)
    tables: list[tuple[PieceTable, tuple[str, ...], PieceTable, tuple[str, ...]]]
    tables = [(remapped.replicas, remapped.replica_names, stored_table, ())]
    if opened.replicas is not None:
        replica_table = PieceTable(opened.replicas.pieces, opened.replicas.stride)
        tables.append((remapped.table, (), replica_table, opened.replicas.names))
        tables.append(
            (remapped.replicas, remapped.replica_names, replica_table, opened.replicas.names)
        )
    composed_tables: list[PieceTable] = []
    names: list[str] = []
    for new_table, new_names, old_table, old_names in tables:
        if not len(new_table) or not len(old_table):
            continue
        composed_table, (new_rows, old_rows) = _compose_pieces(
            remapped, new_table, catalogue, opened, old_table
        )
        composed_tables.append(composed_table)
        for row, old_row in zip(new_rows.tolist(), old_rows.tolist(), strict=True):
            name = opened.manifest.tensors[int(old_table.pieces.tensor[old_row])].name
            names.append(new_names[row] if new_names else old_names[old_row] if old_names else name)
    if not composed_tables:
        return None
    joined_table = join_tables(*composed_tables)
    return Replicas(joined_table.pieces, joined_table.stride, tuple(names))


def _find_tensors_inside_values(opened: Opened) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which tensors are parts of plain values. The specification does not apply to them."""
    values = {entry.name for entry in opened.manifest.objects}

    def parents_of(name: str) -> Iterator[str]:
        dot = name.find(".")
        while dot >= 0:
            yield name[:dot]
            dot = name.find(".", dot + 1)

    inside_values = [
        not values.isdisjoint(parents_of(tensor.name)) for tensor in opened.manifest.tensors
    ]
    return np.array(inside_values, bool)


def _drop_averages(remapped: Foreign) -> Foreign:
    """Replace each average with its only tensor, because there are no ranks to average over."""
    average_by_version = {
        version: average for average, versions in remapped.averages.items() for version in versions
    }
    tensors = tuple(
        msgspec.structs.replace(entry, name=average_by_version.get(entry.name, entry.name))
        for entry in remapped.tensors
        if entry.name
        not in remapped.averages  # averages are the last tensors, so the other indices stay valid
    )
    return replace(remapped, tensors=tensors, averages={})


def _select_rows(catalogue: Catalogue, rows: Int) -> Catalogue:
    columns = ("name", "dtype", "file", "start", "ndim", "shape", "stride", "coordinate")
    return replace(catalogue, **{name: getattr(catalogue, name)[rows] for name in columns})


def _add_unchanged(remapped: Foreign, catalogue: Catalogue, rows: Sequence[int]) -> Foreign:
    """Add rows of a catalogue unchanged to the result of a specification."""
    arrays, entries = [], []
    for tensor_index, row in enumerate(rows, len(remapped.tensors)):
        ndim, dtype = int(catalogue.ndim[row]), catalogue.dtypes[int(catalogue.dtype[row])]
        shape, stride = (tuple(c[row, :ndim].tolist()) for c in (catalogue.shape, catalogue.stride))
        array = StoredArray("", 0, dtype, shape, stride)
        arrays.append((tensor_index, int(catalogue.file[row]), (0,) * ndim, array))
        entries.append(TensorEntry(catalogue.names[row], dtype, shape))
    composed = join_tables(remapped.table, table_of_boxes(arrays))
    return replace(remapped, tensors=(*remapped.tensors, *entries), table=composed)


def catalogue_of_tensors(tensors: Sequence[TensorEntry]) -> Catalogue:
    """Return a catalogue without ranks, as if each global tensor were a whole array in one file."""
    tensor_index = {tensor.name: i for i, tensor in enumerate(tensors)}
    dims = max((len(tensor.shape) for tensor in tensors), default=0)
    shape = padded_rows([tensor.shape for tensor in tensors], dims, 1)
    ndim = np.array([len(tensor.shape) for tensor in tensors], np.int64)
    is_dim = np.arange(dims) < ndim[:, None]
    dtypes = sorted({tensor.dtype for tensor in tensors})
    rows = np.arange(len(tensors))
    stored_index = np.array(
        [tensor_index[tensor.same_as or tensor.name] for tensor in tensors], np.int64
    )
    itemsize = np.array([DTYPES[tensor.dtype].itemsize for tensor in tensors], np.int64)
    nbytes = shape.prod(axis=1) * itemsize
    return Catalogue(
        files=tuple(
            ForeignFile(tensor.name, size)
            for tensor, size in zip(tensors, nbytes.tolist(), strict=True)
        ),
        axes={},
        names=[tensor.name for tensor in tensors],
        dtypes=dtypes,
        name=rows,
        dtype=np.array([dtypes.index(tensor.dtype) for tensor in tensors], np.int64),
        file=stored_index,
        start=np.zeros(len(tensors), np.int64),
        ndim=ndim,
        shape=shape,
        stride=np.where(is_dim, row_major(shape), 0),
        coordinate=np.zeros((len(tensors), 0), np.int64),
    )


def _compose_pieces(
    remapped: Foreign,
    new_table: PieceTable,
    catalogue: Catalogue,
    opened: Opened,
    old_table: PieceTable,
) -> tuple[PieceTable, tuple[Int, Int]]:
    """Translate pieces of new tensors, which refer to old tensors, into pieces in files.

    Args:
        remapped: the new tensors.
        new_table: the pieces of new tensors in old tensors.
        catalogue: the old tensors.
        old_table: the pieces of old tensors in files.

    Returns:
        The pieces of new tensors in files; and for each piece, its row in `new_table` and its row
        in `old_table`.
    """
    new_pieces, old_pieces = new_table.pieces, old_table.pieces
    dims = max(catalogue.shape.shape[1], old_pieces.offset.shape[1])
    shapes = _pad_columns(catalogue.shape, dims, 1)
    strides = row_major(shapes)
    itemsize = np.array([DTYPES[t.dtype].itemsize for t in opened.manifest.tensors], np.int64)
    first_element = new_pieces.start // itemsize[new_pieces.file]
    first_offset = first_element[:, None] // strides[new_pieces.file] % shapes[new_pieces.file]
    source_dims = _find_source_dims(str(opened.store), remapped, new_table, shapes, strides)
    extent_in_old = np.ones((len(new_pieces), dims), np.int64)
    rows, dims_of_new = np.nonzero(source_dims >= 0)
    extent_in_old[rows, source_dims[rows, dims_of_new]] = new_pieces.shape[rows, dims_of_new]
    crosses_shards = first_offset + extent_in_old > shapes[new_pieces.file]
    _refuse_reshapes(str(opened.store), remapped, new_table, crosses_shards)
    old_offset = _pad_columns(old_pieces.offset, dims, 0)
    overlaps = find_overlaps(
        (new_pieces.file, first_offset, extent_in_old),
        (old_pieces.tensor, old_offset, _pad_columns(old_pieces.shape, dims, 1)),
    )
    new_rows, old_rows = overlaps.left, overlaps.right
    old_stride = _pad_columns(old_table.stride, dims, 0)[old_rows]
    offset_in_old = overlaps.offset - old_offset[old_rows]
    file_start = (
        old_pieces.start[old_rows]
        + (offset_in_old * old_stride).sum(axis=1) * itemsize[new_pieces.file[new_rows]]
    )
    old_dims = source_dims[new_rows]

    def take_along_source(values: Int, fill: int) -> Int:
        values_of_old = np.take_along_axis(values, np.maximum(old_dims, 0), axis=1)
        return np.where(old_dims >= 0, values_of_old, fill)

    shift = take_along_source(overlaps.offset - first_offset[new_rows], 0)
    pieces = Pieces(
        new_pieces.tensor[new_rows],
        old_pieces.file[old_rows],
        file_start,
        new_pieces.offset[new_rows] + shift,
        take_along_source(overlaps.shape, 1),
    )
    return PieceTable(pieces, take_along_source(old_stride, 0)), (new_rows, old_rows)


def _find_source_dims(
    path: str, remapped: Foreign, table: PieceTable, shapes: Int, strides: Int
) -> Int:
    """Find which dimension of the old tensor each dimension of each piece comes from.

    The result is -1 for dimensions of size 1.

    Raises:
        StateError: a dimension with several elements matches no dimension of the old tensor.
    """
    pieces, stride = table.pieces, table.stride
    has_several_elements = pieces.shape > 1
    matches = stride[:, :, None] == strides[pieces.file][:, None, :]
    matches &= (shapes[pieces.file] > 1)[:, None, :]
    _refuse_reshapes(path, remapped, table, (has_several_elements & ~matches.any(axis=2)))
    source_dims: Int = np.where(has_several_elements, matches.argmax(axis=2), -1)
    return source_dims


def _refuse_reshapes(
    path: str,
    remapped: Foreign,
    table: PieceTable,
    is_reshaped: np.ndarray[tuple[int, int], np.dtype[np.bool_]],
) -> None:
    rows = np.flatnonzero(is_reshaped.any(axis=1))
    if len(rows):
        name = remapped.tensors[int(table.pieces.tensor[rows[0]])].name
        raise StateError(
            f"{path}: {name}: the specification joins or splits dimensions of a stored tensor "
            "across the borders of its shards; load the tensor without this rule, and reshape it "
            "afterwards"
        )


def _pad_columns(columns: Int, dims: int, fill: int) -> Int:
    missing_dims = dims - columns.shape[1]
    return (
        np.pad(columns, ((0, 0), (0, missing_dims)), constant_values=fill)
        if missing_dims
        else columns
    )


def _rename_members(
    entry: ObjectEntry, remapped: Foreign, old: Sequence[TensorEntry]
) -> ObjectEntry:
    """Return parameter groups with the new names of their members; other values unchanged."""
    optimizer_name, _, last = entry.name.rpartition(".")
    if last != "param_groups" or not isinstance(entry.value, list):
        return entry
    pieces = remapped.table.pieces
    pairs = np.unique(np.column_stack([pieces.file, pieces.tensor]), axis=0).tolist()
    new_names: dict[str, dict[str, None]] = {}  # ordered sets of new names
    for old_index, new_index in pairs:
        old_parameter, new_parameter = (
            _parameter_of(old[old_index].name, optimizer_name),
            _parameter_of(remapped.tensors[new_index].name, optimizer_name),
        )
        if old_parameter is not None and new_parameter is not None:
            new_names.setdefault(old_parameter, {})[new_parameter] = None
    groups = [
        {**group, "members": [n for each in group["members"] for n in new_names.get(each, (each,))]}
        for group in entry.value
    ]
    return ObjectEntry(entry.name, groups)


def _parameter_of(name: str, optimizer_name: str) -> str | None:
    """Return the parameter of an optimizer state below `optimizer_name`; None for other names."""
    return (
        name[len(optimizer_name) + 1 :].rpartition(".")[0]
        if name.startswith(f"{optimizer_name}.")
        else None
    )
