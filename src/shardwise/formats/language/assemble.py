"""Assemble a checkpoint from the collected boxes, and check that every tensor is complete."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from shardwise.errors import FormatError
from shardwise.formats.foreign import hide_terms
from shardwise.formats.language.boxes import BoxTable
from shardwise.formats.language.rules import Rule, Skip
from shardwise.formats.language.tensor_collector import Collector
from shardwise.layout import find_uncovered_tensors
from shardwise.layout.columns import padded_rows
from shardwise.layout.flat import row_major
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.layout import Layout, Pieces
from shardwise.manifest.manifest import TensorEntry

MOST_SHOWN = 8
"""The most names or numbers that a message lists."""
TensorShapes = Sequence[tuple[int, ...] | None]
"""The shape of each tensor, or None if the tensor has no arrays."""


def assemble_checkpoint(collector: Collector) -> Layout:
    """Check the tensors and return them as a checkpoint; problems are added to the collector."""
    catalogue = collector.catalogue
    for i in np.unique(catalogue.name[collector.matches.unmatched]).tolist():
        problem = "no rule matches it; `skip` what is not wanted"
        collector.problems.append(f"{catalogue.names[i]}: {problem}")
    shapes = _find_shapes(collector)
    dims = max((len(shape) for shape in shapes if shape is not None), default=0)
    boxes = BoxTable.join(collector.boxes, dims)
    dtypes = _find_dtypes(collector)
    ties = _resolve_ties(collector, shapes, dtypes)
    boxes, tied = _split_tied(collector, boxes, ties)
    boxes, copies = _split_copies(boxes, shapes)
    copies = BoxTable.join([copies, tied])
    names = zip(collector.tensors.names, shapes, strict=True)
    _check_coverage(collector, boxes, [None if name in ties else shape for name, shape in names])
    _check_numbers_in_names(collector)
    copies = copies.select(np.argsort(copies.tensor, kind="stable"))
    entries = _make_entries(collector, shapes, dtypes, ties)
    means = collector.tensors.tensors_to_average
    tensors, terms, index = hide_terms(list(entries.values()), means)
    index_of = dict(zip(entries, index.tolist(), strict=True))
    new_index = np.array([index_of.get(name, 0) for name in collector.tensors.names], np.int64)
    pieces, replicas = (
        replace(table, tensor=new_index[table.tensor])
        for table in (_locate(collector, each, shapes) for each in (boxes, copies))
    )
    return Layout(
        format=f"rank files, as {collector.spec.source.source} says",
        files=catalogue.files,
        tensors=tensors,
        pieces=pieces,
        replicas=replicas,
        replica_names=tuple(catalogue.names[i] for i in catalogue.name[copies.array_row].tolist()),
        terms=terms,
        world_size=int(np.prod(list(catalogue.axes.values()), dtype=np.int64)),
        left_out=tuple(_describe_skipped(collector)),
    )


def _find_shapes(collector: Collector) -> TensorShapes:
    shapes: list[tuple[int, ...] | None] = [None] * len(collector.tensors.names)
    for tensors, _, shape in collector.arrays:
        for tensor in np.unique(tensors).tolist():
            known = shapes[tensor]
            if known is None:
                shapes[tensor] = shape
            elif known != shape:
                collector.report_tensor(
                    tensor, f"its arrays disagree on its shape: {list(shape)} and {list(known)}"
                )
    return shapes


def _find_dtypes(collector: Collector) -> list[str | None]:
    """Return the dtype of each tensor, or None if it has no arrays.

    All arrays of a tensor must have the same dtype.
    """
    catalogue = collector.catalogue
    lowest = np.full(len(collector.tensors.names), len(catalogue.dtypes), np.int64)
    highest = np.full(len(collector.tensors.names), -1, np.int64)
    for tensor, rows, _ in collector.arrays:
        np.minimum.at(lowest, tensor, catalogue.dtype[rows])
        np.maximum.at(highest, tensor, catalogue.dtype[rows])
    for i in np.flatnonzero((highest >= 0) & (lowest != highest)).tolist():
        low, high = catalogue.dtypes[int(lowest[i])], catalogue.dtypes[int(highest[i])]
        collector.report_tensor(i, f"some of its arrays are {low}, some {high}")
    for rule_index, rule in enumerate(collector.spec.rules):
        if isinstance(rule, Rule) and rule.dtype is not None:
            rows = collector.matches.rows[rule_index]
            is_other = np.array([dtype != rule.dtype for dtype in catalogue.dtypes], bool)
            wrong_rows = rows[is_other[catalogue.dtype[rows]]] if len(rows) else rows
            problem = f"its dtype is not {rule.dtype}, as the rule requires; correct `as`"
            collector.report_arrays(wrong_rows, rule, problem)
    return [catalogue.dtypes[i] if i >= 0 else None for i in highest.tolist()]


def _split_copies(boxes: BoxTable, shapes: TensorShapes) -> tuple[BoxTable, BoxTable]:
    """Separate the first copy of each box from the others."""
    dims = boxes.offset.shape[1]
    strides = row_major(padded_rows([shape or () for shape in shapes], dims, 1))
    if not len(boxes.tensor):
        return boxes, boxes
    first_element = (boxes.offset * strides[boxes.tensor]).sum(axis=1)
    order = np.lexsort((first_element, boxes.tensor))
    is_same_box = (np.diff(boxes.tensor[order]) == 0) & (np.diff(first_element[order]) == 0)
    is_same_box &= (np.diff(boxes.shape[order], axis=0) == 0).all(axis=1)
    is_copy = np.zeros(len(order), bool)
    is_copy[order[1:]] = is_same_box
    return boxes.select(~is_copy), boxes.select(is_copy)


def _check_coverage(collector: Collector, boxes: BoxTable, shapes: TensorShapes) -> None:
    """Check that boxes cover each tensor exactly once; tensors without a shape are not checked."""
    dims = boxes.offset.shape[1]
    padded_shapes = padded_rows([shape or () for shape in shapes], dims, 1)
    stored = np.array([shape is not None for shape in shapes], bool)
    try:
        wrong_tensors = find_uncovered_tensors(
            padded_shapes, boxes.tensor, boxes.offset, boxes.shape, stored
        )
    except FormatError as error:
        collector.problems.append(str(error))
        return
    if not len(wrong_tensors):
        return
    stored_elements = np.zeros(len(shapes), np.int64)
    np.add.at(stored_elements, boxes.tensor, boxes.shape.prod(axis=1))
    order = np.argsort(boxes.tensor, kind="stable")
    row_bounds = np.searchsorted(boxes.tensor[order], np.stack([wrong_tensors, wrong_tensors + 1]))
    for i, tensor in enumerate(wrong_tensors.tolist()):
        total = int(padded_shapes[tensor].prod())
        rows = boxes.array_row[order[row_bounds[0, i] : row_bounds[1, i]]]
        catalogue = collector.catalogue
        arrays = list(dict.fromkeys(catalogue.names[k] for k in catalogue.name[rows]))
        source_names = ", ".join(arrays[:MOST_SHOWN]) + (" …" if len(arrays) > MOST_SHOWN else "")
        problem = f"{stored_elements[tensor]} of its {total} elements are there"
        if stored_elements[tensor] >= total:
            problem = "its arrays overlap"
        shape = list(shapes[tensor] or ())
        collector.report_tensor(tensor, f"{shape}: {problem}, from {source_names or 'no array'}")


def _check_numbers_in_names(collector: Collector) -> None:
    """Check that the numbers that rules compute for names, such as layers, are 0 to n - 1."""
    for prefix, numbers in collector.tensors.numbers_in_names.items():
        missing = sorted(set(range(min(max(numbers) + 1, 2**20))) - numbers)
        if missing:
            shown = ", ".join(map(str, missing[:MOST_SHOWN])) + (
                " …" if len(missing) > MOST_SHOWN else ""
            )
            collector.problems.append(
                f"{prefix}…: numbers go up to {max(numbers)}, without {shown}; captures of the "
                "same name must count the same things; put `~` before a capture if ranks have "
                "different numbers of it"
            )


def _make_entries(
    collector: Collector,
    shapes: TensorShapes,
    dtypes: Sequence[str | None],
    ties: Mapping[str, str],
) -> dict[str, TensorEntry]:
    tensors = collector.tensors
    entries = {
        name: TensorEntry(name, dtype, shape, same_as=ties.get(name))
        for name, shape, dtype in zip(tensors.names, shapes, dtypes, strict=True)
        if shape is not None and dtype is not None
    }
    for mean, terms in tensors.tensors_to_average.items():
        term_entries = [entries[name] for name in terms if name in entries]
        if mean in entries:
            collector.problems.append(f"{mean}: it is stored, and is also the mean of other arrays")
        elif term_entries:
            entries[mean] = TensorEntry(mean, term_entries[0].dtype, term_entries[0].shape)
    for tied, target in ties.items():
        if target not in entries:
            collector.problems.append(f"{tied}: it is tied to {target}, which does not exist")
        elif tied not in entries:
            entry = entries[target]
            entries[tied] = TensorEntry(tied, entry.dtype, entry.shape, same_as=target)
    return entries


def _resolve_ties(
    collector: Collector, shapes: TensorShapes, dtypes: Sequence[str | None]
) -> dict[str, str]:
    """Return the stored tensor that each tied name is tied to.

    Tied tensors must have equal shapes and dtypes, and no tensor may be tied to itself.
    """
    tensors = collector.tensors
    declared: dict[str, str] = {}
    for tied, target in _declared_ties(collector):
        if declared.setdefault(tied, target) != target:
            collector.problems.append(f"{tied}: it is tied to {target} and to {declared[tied]}")
    ties = {}
    for tied in declared:
        target, visited = declared[tied], {tied}
        while target in declared and target not in visited:
            visited.add(target)
            target = declared[target]
        if target in visited:
            collector.problems.append(f"{tied}: it is tied to itself; remove one of the ties")
            continue
        ties[tied] = target
        if tied in tensors.tensors_to_average or (
            tied in tensors and target in tensors.tensors_to_average
        ):
            collector.problems.append(f"{tied}: it is tied to {target}, and one of them is a mean")
        elif tied in tensors and target in tensors:
            tied_index, target_index = tensors.index_of(tied), tensors.index_of(target)
            if (shapes[tied_index], dtypes[tied_index]) != (
                shapes[target_index],
                dtypes[target_index],
            ):
                descriptions = [
                    f"{dtypes[i]} {list(shapes[i] or ())}" for i in (tied_index, target_index)
                ]
                problem = (
                    f"is {descriptions[0]}, but is tied to {target}, which is {descriptions[1]}"
                )
                collector.problems.append(f"{tied}: it {problem}")
    return ties


def _declared_ties(collector: Collector) -> Iterator[tuple[str, str]]:
    """Yield each tied name, and the name it is tied to."""
    tensors_to_average = collector.tensors.tensors_to_average
    terms = {name for terms in tensors_to_average.values() for name in terms}
    names = [name for name in (*collector.tensors.names, *tensors_to_average) if name not in terms]
    for tie in collector.spec.ties:
        match = tie.target.compile(())
        pairs = [(texts, name) for name in names if (texts := match(name)) is not None]
        if not pairs:
            collector.problems.append(
                f"{tie.target}: no tensor has this name, so nothing is tied to it"
            )
        for texts, name in pairs:
            tied = tie.name.fill(texts)
            if not (tie.unless_stored and tied in collector.tensors):
                yield tied, name


def _split_tied(
    collector: Collector, boxes: BoxTable, ties: Mapping[str, str]
) -> tuple[BoxTable, BoxTable]:
    """Separate the boxes of tensors that are tied to another stored tensor.

    They become copies of boxes of the other tensor.
    """
    tensors = collector.tensors
    target_index_of = np.arange(len(tensors.names))
    for tied, target in ties.items():
        if tied in tensors and target in tensors:
            target_index_of[tensors.index_of(tied)] = tensors.index_of(target)
    new_tensor = target_index_of[boxes.tensor]
    is_tied = new_tensor != boxes.tensor
    copies = replace(boxes.select(is_tied), tensor=new_tensor[is_tied])
    return boxes.select(~is_tied), copies


def _locate(collector: Collector, boxes: BoxTable, shapes: TensorShapes) -> Pieces:
    """Return boxes in arrays as pieces of files, sorted by tensor."""
    catalogue, boxes = collector.catalogue, boxes.select(np.argsort(boxes.tensor, kind="stable"))
    itemsize = np.array([DTYPES[dtype].itemsize for dtype in catalogue.dtypes], np.int64)
    row = boxes.array_row
    # A dimension of size 1 may have any stride: use the stride of a row-major box.
    ndim = np.array([len(shape or ()) for shape in shapes], np.int64)[boxes.tensor]
    is_dim = np.arange(boxes.offset.shape[1]) < ndim[:, None]
    stride = np.where(boxes.shape == 1, row_major(boxes.shape), boxes.stride)
    return Pieces(
        boxes.tensor,
        catalogue.file[row],
        catalogue.start[row] + boxes.start * itemsize[catalogue.dtype[row]],
        boxes.offset,
        boxes.shape,
        np.where(is_dim, stride, 0),
    )


def _describe_skipped(collector: Collector) -> Iterator[str]:
    """Yield a line for each skipped name."""
    catalogue = collector.catalogue
    for rule, rows in zip(collector.spec.rules, collector.matches.rows, strict=True):
        if isinstance(rule, Skip):
            for i in np.unique(catalogue.name[rows]).tolist():
                yield f"{catalogue.names[i]}: skipped by {collector.source_line(rule)}"
