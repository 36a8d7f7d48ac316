"""Apply a specification to the global tensors of a checkpoint, to change names and shapes."""

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
from shardwise.formats.piece_tables import joined, table_of_arrays
from shardwise.layout import find_overlaps, row_major
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import ObjectEntry, TensorEntry
from shardwise.manifest.table import Int, Pieces, padded_rows


def remap(opened: Opened, spec: Spec, sizes: Mapping[str, int]) -> Opened:
    """Return a checkpoint with the names and shapes that a specification gives its tensors.

    The global tensors of the checkpoint are the arrays that the specification describes.

    Args:
        opened: the checkpoint.
        spec: the specification.
        sizes: the sizes of the axes of the specification.

    Raises:
        MismatchError: the specification does not match the checkpoint.
        StateError: the checkpoint has tensors that are means of several copies, or the
            specification reshapes a tensor across the borders of its shards.
    """
    if opened.means:
        raise StateError(
            f"{opened.store}: a specification cannot be applied, because tensors of this "
            "checkpoint are means of several copies; export it first, and open the export"
        )
    catalogue = catalogue_of(opened.manifest.tensors)
    held = _inside_values(opened)
    upper = _without_means(
        apply_spec(spec, _select_rows(catalogue, np.flatnonzero(~held)), sizes=sizes)
    )
    upper = _add_arrays(upper, catalogue, np.flatnonzero(held).tolist())
    built, _ = _compose(upper, upper.table, catalogue, opened, (opened.pieces, opened.stride))
    objects = tuple(
        _renamed(each, upper, opened.manifest.tensors) for each in opened.manifest.objects
    )
    manifest = msgspec.structs.replace(opened.manifest, tensors=upper.tensors, objects=objects)
    left_out = (*opened.left_out, *upper.left_out)
    return replace(
        opened,
        manifest=manifest,
        pieces=built.pieces,
        stride=built.stride,
        left_out=left_out,
        replicas=_replicas(upper, catalogue, opened),
    )


def _replicas(upper: Foreign, catalogue: Catalogue, opened: Opened) -> Replicas | None:
    """Return the copies of new tensors: old tensors that the specification equates, and copies."""
    held = (opened.pieces, opened.stride)
    tables: list[tuple[PieceTable, tuple[str, ...], tuple[Pieces, Int], tuple[str, ...]]]
    tables = [(upper.replicas, upper.replica_names, held, ())]
    if opened.replicas is not None:
        again = (opened.replicas.pieces, opened.replicas.stride)
        tables.append((upper.table, (), again, opened.replicas.names))
        tables.append((upper.replicas, upper.replica_names, again, opened.replicas.names))
    found: list[PieceTable] = []
    names: list[str] = []
    for table, of_table, below, of_below in tables:
        if not len(table) or not len(below[0]):
            continue
        built, (left, right) = _compose(upper, table, catalogue, opened, below)
        found.append(built)
        for row, below_row in zip(left.tolist(), right.tolist(), strict=True):
            name = opened.manifest.tensors[int(below[0].tensor[below_row])].name
            names.append(of_table[row] if of_table else of_below[below_row] if of_below else name)
    if not found:
        return None
    united = joined(*found)
    return Replicas(united.pieces, united.stride, tuple(names))


def _inside_values(opened: Opened) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which tensors are parts of plain values; a specification does not apply to them."""
    values = {entry.name for entry in opened.manifest.objects}

    def above(name: str) -> Iterator[str]:
        at = name.find(".")
        while at >= 0:
            yield name[:at]
            at = name.find(".", at + 1)

    held = [not values.isdisjoint(above(tensor.name)) for tensor in opened.manifest.tensors]
    return np.array(held, bool)


def _without_means(upper: Foreign) -> Foreign:
    """Replace each mean by its only value: global tensors have no ranks to average over."""
    mean_of = {own: mean for mean, parts in upper.averages.items() for own in parts}
    tensors = tuple(
        msgspec.structs.replace(entry, name=mean_of.get(entry.name, entry.name))
        for entry in upper.tensors
        if entry.name
        not in upper.averages  # means follow all tensors with pieces, so numbers stay valid
    )
    return replace(upper, tensors=tensors, averages={})


def _select_rows(catalogue: Catalogue, rows: Int) -> Catalogue:
    columns = ("name", "dtype", "file", "start", "ndim", "shape", "stride", "coordinate")
    return replace(catalogue, **{name: getattr(catalogue, name)[rows] for name in columns})


def _add_arrays(upper: Foreign, catalogue: Catalogue, rows: Sequence[int]) -> Foreign:
    """Return the result of a specification together with unchanged arrays of a catalogue."""
    arrays, entries = [], []
    for number, row in enumerate(rows, len(upper.tensors)):
        ndim, dtype = catalogue.ndim[row], catalogue.dtypes[int(catalogue.dtype[row])]
        shape, stride = (tuple(c[row, :ndim].tolist()) for c in (catalogue.shape, catalogue.stride))
        arrays.append((number, StoredArray(int(catalogue.file[row]), 0, dtype, shape, stride)))
        entries.append(TensorEntry(catalogue.names[row], dtype, shape))
    built = joined(upper.table, table_of_arrays(arrays))
    return replace(upper, tensors=(*upper.tensors, *entries), table=built)


def catalogue_of(tensors: Sequence[TensorEntry]) -> Catalogue:
    """Return global tensors as a catalogue of whole arrays without ranks, one in each file."""
    number = {tensor.name: i for i, tensor in enumerate(tensors)}
    dims = max((len(tensor.shape) for tensor in tensors), default=0)
    shape = padded_rows([tensor.shape for tensor in tensors], dims, 1)
    ndim = np.array([len(tensor.shape) for tensor in tensors], np.int64)
    inside = np.arange(dims) < ndim[:, None]
    dtypes = sorted({tensor.dtype for tensor in tensors})
    rows = np.arange(len(tensors))
    stored = np.array([number[tensor.same_as or tensor.name] for tensor in tensors], np.int64)
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
        file=stored,
        start=np.zeros(len(tensors), np.int64),
        ndim=ndim,
        shape=shape,
        stride=np.where(inside, row_major(shape), 0),
        coordinate=np.zeros((len(tensors), 0), np.int64),
    )


def _compose(
    upper: Foreign,
    table: PieceTable,
    catalogue: Catalogue,
    opened: Opened,
    below: tuple[Pieces, Int],
) -> tuple[PieceTable, tuple[Int, Int]]:
    """Translate pieces of new tensors, which refer to old tensors, into pieces in files.

    Args:
        table: the pieces of new tensors.
        below: the pieces of old tensors in files, and their strides.

    Returns:
        The pieces, and for each the row of `table` and the row of `below` that it comes from.
    """
    new, (old, old_strides) = table.pieces, below
    dims = max(catalogue.shape.shape[1], old.offset.shape[1])
    shapes = _padded(catalogue.shape, dims, 1)
    strides = row_major(shapes)
    itemsize = np.array([DTYPES[t.dtype].itemsize for t in opened.manifest.tensors], np.int64)
    first = new.start // itemsize[new.file]
    corner = first[:, None] // strides[new.file] % shapes[new.file]
    source = _source_dims(upper, table, shapes, strides)
    extent = np.ones((len(new), dims), np.int64)
    rows, at = np.nonzero(source >= 0)
    extent[rows, source[rows, at]] = new.shape[rows, at]
    _refuse_reshapes(upper, table, corner + extent > shapes[new.file])
    found = find_overlaps(
        (new.file, corner, extent),
        (old.tensor, _padded(old.offset, dims, 0), _padded(old.shape, dims, 1)),
    )
    left, right = found.left, found.right
    old_stride = _padded(old_strides, dims, 0)[right]
    within = found.offset - _padded(old.offset, dims, 0)[right]
    start = old.start[right] + (within * old_stride).sum(axis=1) * itemsize[new.file[left]]
    along = source[left]

    def along_source(values: Int, otherwise: int) -> Int:
        taken = np.take_along_axis(values, np.maximum(along, 0), axis=1)
        return np.where(along >= 0, taken, otherwise)

    offset = new.offset[left] + along_source(found.offset - corner[left], 0)
    pieces = Pieces(new.tensor[left], old.file[right], start, offset, along_source(found.shape, 1))
    return PieceTable(pieces, along_source(old_stride, 0)), (left, right)


def _source_dims(upper: Foreign, table: PieceTable, shapes: Int, strides: Int) -> Int:
    """Return, for each dimension of each piece, the matching dimension of the old tensor, or -1.

    Raises:
        StateError: a dimension with several elements matches no dimension of the old tensor.
    """
    pieces, stride = table.pieces, table.stride
    runs = pieces.shape > 1
    matches = stride[:, :, None] == strides[pieces.file][:, None, :]
    matches &= (shapes[pieces.file] > 1)[:, None, :]
    _refuse_reshapes(upper, table, (runs & ~matches.any(axis=2)))
    found: Int = np.where(runs, matches.argmax(axis=2), -1)
    return found


def _refuse_reshapes(
    upper: Foreign, table: PieceTable, wrong: np.ndarray[tuple[int, int], np.dtype[np.bool_]]
) -> None:
    rows = np.flatnonzero(wrong.any(axis=1))
    if len(rows):
        name = upper.tensors[int(table.pieces.tensor[rows[0]])].name
        raise StateError(
            f"{name}: the specification joins or splits dimensions of a stored tensor across the "
            "borders of its shards; load the tensor without this rule, and reshape it afterwards"
        )


def _padded(columns: Int, dims: int, fill: int) -> Int:
    missing = dims - columns.shape[1]
    return np.pad(columns, ((0, 0), (0, missing)), constant_values=fill) if missing else columns


def _renamed(entry: ObjectEntry, upper: Foreign, old: Sequence[TensorEntry]) -> ObjectEntry:
    """Return parameter groups with the new names of their members, or any other value unchanged."""
    root, _, last = entry.name.rpartition(".")
    if last != "param_groups" or not isinstance(entry.value, list):
        return entry
    pieces = upper.table.pieces
    pairs = np.unique(np.column_stack([pieces.file, pieces.tensor]), axis=0).tolist()
    names: dict[str, dict[str, None]] = {}  # in order, each once
    for source, target in pairs:
        before, after = (
            _parameter_of(old[source].name, root),
            _parameter_of(upper.tensors[target].name, root),
        )
        if before is not None and after is not None:
            names.setdefault(before, {})[after] = None
    groups = [
        {**group, "members": [n for each in group["members"] for n in names.get(each, (each,))]}
        for group in entry.value
    ]
    return ObjectEntry(entry.name, groups)


def _parameter_of(name: str, root: str) -> str | None:
    """Return the parameter to which a state below `root` belongs; None for other names."""
    return name[len(root) + 1 :].rpartition(".")[0] if name.startswith(f"{root}.") else None
