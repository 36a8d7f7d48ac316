"""Apply a specification to the global tensors of a checkpoint: change their names and shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from shardwise.kernel.boxes import find_overlaps, row_major_strides
from shardwise.kernel.boxes.box import BoolArray, IntArray
from shardwise.kernel.errors import StateError
from shardwise.kernel.manifest.layout import Layout
from shardwise.kernel.manifest.manifest import ObjectEntry, TensorEntry
from shardwise.kernel.manifest.pieces import Pieces, Runs
from shardwise.parts.formats.foreign import StoredArray, build_catalogue
from shardwise.parts.formats.language import apply_spec
from shardwise.parts.formats.language.rules import Spec


def remap(path: str, layout: Layout, spec: Spec, sizes: Mapping[str, int]) -> Layout:
    """Return the layout with the names and shapes that a specification gives its tensors.

    Usually, a specification describes arrays in the files of ranks. Here, it describes the global
    tensors of the checkpoint.

    Args:
        path: the path of the checkpoint, for messages.
        layout: the layout of the checkpoint.
        spec: the specification.
        sizes: values for the numbers that the specification declares with `let`.

    Raises:
        MismatchError: the specification does not match the checkpoint.
        StateError: tensors of the checkpoint are means of several copies, or the specification
            reshapes a tensor across the borders of its shards.
    """
    if layout.terms:
        raise StateError(
            f"{path}: a specification cannot be applied, because tensors of this checkpoint are "
            "averages of several copies; export it first, and open the export"
        )
    index = {tensor.name: i for i, tensor in enumerate(layout.tensors)}
    stored = np.array([index[each.same_as or each.name] for each in layout.tensors], np.int64)
    inside_values = _find_tensors_inside_values(layout)
    # Treat each global tensor as a whole array in a separate file.
    rows = [
        (each.name, StoredArray.contiguous(each.name, 0, each.dtype, each.shape), ())
        for each, inside in zip(layout.tensors, inside_values, strict=True)
        if not inside
    ]
    catalogue = build_catalogue({}, rows, lambda name: int(stored[index[name]]))
    remapped = apply_spec(spec, catalogue, sizes=sizes, checkpoint=path)
    remapped = _add_unchanged(remapped, layout, stored, np.flatnonzero(inside_values))
    labels = [f"{path}: {tensor.name}" for tensor in remapped.tensors]
    # A replica of a new tensor is either an old tensor that the specification declares to be a
    # copy, or a replica of an old tensor.
    replicas = [
        _compose(new, old, layout, labels)
        for new, old in (
            (remapped.replicas, layout.pieces),
            (remapped.pieces, layout.replicas),
            (remapped.replicas, layout.replicas),
        )
        if len(new) and len(old)
    ]
    return replace(
        layout,
        tensors=remapped.tensors,
        objects=tuple(_rename_members(each, remapped, layout.tensors) for each in layout.objects),
        runs=Runs.of_pieces(_compose(remapped.pieces, layout.pieces, layout, labels)),
        replicas=Pieces.join(replicas),
        left_out=(*layout.left_out, *remapped.left_out),
        as_saved=layout,
    )


def _find_tensors_inside_values(layout: Layout) -> BoolArray:
    """Return which tensors are parts of plain values. The specification does not apply to them."""
    values = {entry.name for entry in layout.objects}

    def parents_of(name: str) -> Iterator[str]:
        dot = name.find(".")
        while dot >= 0:
            yield name[:dot]
            dot = name.find(".", dot + 1)

    inside_values = [not values.isdisjoint(parents_of(tensor.name)) for tensor in layout.tensors]
    return np.array(inside_values, bool)


def _add_unchanged(remapped: Layout, layout: Layout, stored: IntArray, rows: IntArray) -> Layout:
    """Add tensors unchanged to the result of a specification.

    Args:
        stored: for each tensor, the index of the tensor that is stored: itself, unless it is tied.
        rows: the indices of the tensors to add.
    """
    entries = [msgspec.structs.replace(layout.tensors[i], same_as=None) for i in rows.tolist()]
    new = len(remapped.tensors) + np.arange(len(rows))
    has_elements = (layout.shapes[rows] > 0).all(axis=1)
    new, rows = new[has_elements], rows[has_elements]
    shape = layout.shapes[rows]
    whole = Pieces(
        new, stored[rows], np.zeros_like(new), np.zeros_like(shape), shape, row_major_strides(shape)
    )
    pieces = Pieces.join([remapped.pieces, whole])
    tensors = (*remapped.tensors, *entries)
    return replace(remapped, tensors=tensors, runs=Runs.of_pieces(pieces))


def _compose(new: Pieces, old: Pieces, layout: Layout, labels: Sequence[str]) -> Pieces:
    """Return pieces of new tensors in files.

    Args:
        new: pieces of new tensors in old tensors, to which they refer as their files.
        old: pieces of old tensors in files.
        layout: the old tensors.
        labels: the names of the new tensors, for messages.

    Raises:
        StateError: a new tensor joins or splits dimensions across the borders of shards.
    """
    dims = layout.dims
    shapes, strides = layout.shapes[new.file], row_major_strides(layout.shapes)[new.file]
    itemsize = layout.itemsizes
    first_element = new.start // itemsize[new.file]
    first_offset = first_element[:, None] // strides % shapes
    source_dims, steps_of_new = _find_source_dims(new, shapes, strides, labels)
    extent_in_old, step = np.ones((2, len(new), dims), np.int64)
    rows, dims_of_new = np.nonzero(source_dims >= 0)
    dims_of_old, steps = source_dims[rows, dims_of_new], steps_of_new[rows, dims_of_new]
    step[rows, dims_of_old] = steps
    extent_in_old[rows, dims_of_old] = (new.shape[rows, dims_of_new] - 1) * steps + 1
    _refuse_reshapes(new, first_offset + extent_in_old > shapes, labels)
    new_rows, old_rows, offset, shape = find_overlaps(
        (new.file, first_offset, extent_in_old), (old.tensor, old.offset, old.shape)
    )
    # Of every `step` elements of the old tensor, the new one has the first.
    step = step[new_rows]
    into_step = (first_offset[new_rows] - offset) % step
    offset, shape = offset + into_step, (shape - into_step + step - 1) // step
    has_elements = (shape > 0).all(axis=1)
    new_rows, old_rows = new_rows[has_elements], old_rows[has_elements]
    offset, shape, step = offset[has_elements], shape[has_elements], step[has_elements]
    old_piece, new_piece = old.select(old_rows), new.select(new_rows)
    skipped = ((offset - old_piece.offset) * old_piece.stride).sum(axis=1)
    old_dims = source_dims[new_rows]

    def take_along_source(values: IntArray, fill: int) -> IntArray:
        values_of_old = np.take_along_axis(values, np.maximum(old_dims, 0), axis=1)
        return np.where(old_dims >= 0, values_of_old, fill)

    shift = take_along_source((offset - first_offset[new_rows]) // step, 0)
    return Pieces(
        new_piece.tensor,
        old_piece.file,
        old_piece.start + skipped * itemsize[new_piece.file],
        new_piece.offset + shift,
        take_along_source(shape, 1),
        take_along_source(old_piece.stride * step, 0),
    )


def _find_source_dims(
    new: Pieces, shapes: IntArray, strides: IntArray, labels: Sequence[str]
) -> tuple[IntArray, IntArray]:
    """Find which dimension of the old tensor each dimension of each piece comes from.

    Args:
        shapes, strides: the old tensor of each piece.

    Returns:
        The dimensions, -1 for dimensions of size 1; and the steps along them: 2 if the piece has
        every other element.

    Raises:
        StateError: a dimension with several elements matches no dimension of the old tensor, or
            two match the same one.
    """
    has_several_elements = new.shape > 1
    matches = new.stride[:, :, None] % np.maximum(strides, 1)[:, None, :] == 0
    matches &= (shapes > 1)[:, None, :]
    # The first match has the largest stride.
    source_dims: IntArray = np.where(has_several_elements, matches.argmax(axis=2), -1)
    is_repeated = (source_dims[:, :, None] == source_dims[:, None, :]).sum(axis=2) > 1
    is_reshaped = ~matches.any(axis=2) | is_repeated
    _refuse_reshapes(new, has_several_elements & is_reshaped, labels)
    own_strides = np.take_along_axis(strides, np.maximum(source_dims, 0), axis=1)
    steps = new.stride // np.maximum(own_strides, 1)
    return source_dims, np.where(has_several_elements, steps, 1)


def _refuse_reshapes(new: Pieces, is_reshaped: BoolArray, labels: Sequence[str]) -> None:
    rows = np.flatnonzero(is_reshaped.any(axis=1))
    if len(rows):
        raise StateError(
            f"{labels[int(new.tensor[rows[0]])]}: the specification joins or splits dimensions of "
            "a stored tensor across the borders of its shards; load the tensor without this rule, "
            "and reshape it afterwards"
        )


def _rename_members(
    entry: ObjectEntry, remapped: Layout, old: Sequence[TensorEntry]
) -> ObjectEntry:
    """Return parameter groups with the new names of their members; other values unchanged."""
    optimizer_name, _, last = entry.name.rpartition(".")
    if last != "param_groups" or not isinstance(entry.value, list):
        return entry
    pieces = remapped.pieces
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
