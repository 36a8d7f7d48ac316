"""Apply a specification to the arrays in the files of all ranks, and check the tensors it makes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from shardwise.kernel.boxes import find_uncovered_tensors
from shardwise.kernel.boxes.box import BoolArray, IntArray, padded_rows
from shardwise.kernel.errors import FormatError, LayoutError, MismatchError
from shardwise.kernel.manifest.layout import Layout
from shardwise.kernel.manifest.manifest import TensorEntry
from shardwise.kernel.manifest.pieces import Pieces, Runs
from shardwise.parts.formats.foreign import Catalogue
from shardwise.parts.formats.language.arithmetic import Environment
from shardwise.parts.formats.language.match import (
    Matches,
    add_captured_numbers,
    evaluate_lets,
    match_rules,
)
from shardwise.parts.formats.language.rules import Spec
from shardwise.parts.formats.language.tensors import Tensors

MOST_SHOWN = 8
"""The most names or numbers that a message lists."""


def apply_spec(
    spec: Spec,
    catalogue: Catalogue,
    *,
    sizes: Mapping[str, int] | None = None,
    checkpoint: str = "the checkpoint",
) -> Layout:
    """Return the layout that a specification makes of the arrays of all ranks, without its files.

    Every element of every tensor is there exactly once, apart from replicas. Every stored array is
    used or skipped.

    Args:
        sizes: values for numbers that the specification declares with `let`. They override the
            declared values.
        checkpoint: the path of the checkpoint, for messages.

    Raises:
        MismatchError: the specification does not fit; `problems` lists everything that is wrong.
    """
    problems = []
    try:
        numbers = evaluate_lets(spec, sizes or {})
        ranks = {**dict.fromkeys(spec.ranks, 1), **catalogue.axes}
        environment = Environment(numbers, {**numbers, **ranks})
        all_matches, unmatched = match_rules(spec, catalogue, environment)
        tensors = Tensors(spec, catalogue, add_captured_numbers(environment, all_matches))
        for matches in all_matches:
            tensors.apply_rule(matches)
        layout = _assemble_layout(tensors, all_matches, unmatched)
        problems = tensors.problems
    except MismatchError as error:
        problems = error.problems
    except LayoutError as error:
        problems = [str(error)]
    if problems:
        summary = (
            f"{spec.source.source} does not fit {checkpoint}: correct the specification, or copy "
            "the checkpoint again if files are missing:"
        )
        raise MismatchError(summary, list(dict.fromkeys(problems)))
    return layout


def _assemble_layout(
    tensors: Tensors, all_matches: Sequence[Matches], unmatched: IntArray
) -> Layout:
    """Check the tensors and return their layout, without files; add problems to the tensors.

    Args:
        all_matches: the arrays of each rule.
        unmatched: rows of the catalogue that no rule matches.
    """
    catalogue = tensors.catalogue
    for i in np.unique(catalogue.name[unmatched]).tolist():
        problem = "no rule matches it; `skip` what is not wanted"
        tensors.problems.append(f"{catalogue.names[i]}: {problem}")
    entries = _make_entries(tensors)
    ties = _resolve_ties(tensors, entries)
    dims = max((len(entry.shape) for entry in entries.values()), default=0)
    boxes = Pieces.join(tensors.boxes, dims)
    # Ranks may have stored a tied tensor, too. These boxes become copies of the tensor's own boxes.
    tied_to: list[int] = [
        tensors.index.get(ties.get(name, name), i) for i, name in enumerate(tensors.index)
    ]
    new_tensor = np.array(tied_to, np.int64)[boxes.tensor]
    is_tied = new_tensor != boxes.tensor
    tied_boxes, boxes = replace(boxes, tensor=new_tensor).select(is_tied), boxes.select(~is_tied)
    is_copy = _find_copies(boxes)
    copies, boxes = Pieces.join([boxes.select(is_copy), tied_boxes]), boxes.select(~is_copy)
    _check_coverage(tensors, boxes, {n: entry for n, entry in entries.items() if n not in ties})
    _check_numbers_in_names(tensors)
    for tied, target in ties.items():
        if target not in entries:
            tensors.problems.append(f"{tied}: it is tied to {target}, which does not exist")
        else:
            entry = entries[target]
            entries[tied] = TensorEntry(tied, entry.dtype, entry.shape, same_as=target)
    return Layout(
        format="",
        files=(),
        tensors=tuple(entries.values()),
        runs=Runs.of_pieces(boxes.select(np.argsort(boxes.tensor, kind="stable"))),
        replicas=copies.select(np.argsort(copies.tensor, kind="stable")),
        left_out=tuple(
            f"{catalogue.names[i]}: skipped by {tensors.spec.source.place_of(each.rule.position)}"
            for each in all_matches
            for i in np.unique(catalogue.name[each.rows]).tolist()
            if not each.rule.targets
        ),
    )


def _make_entries(tensors: Tensors) -> dict[str, TensorEntry]:
    """Return the tensors that have arrays, which must agree on shape and dtype."""
    catalogue, names = tensors.catalogue, tensors.names
    shapes: dict[int, tuple[int, ...]] = {}
    lowest = np.full(len(names), len(catalogue.dtypes), np.int64)
    highest = np.full(len(names), -1, np.int64)
    for indices, rows, shape in tensors.arrays:
        np.minimum.at(lowest, indices, catalogue.dtype[rows])
        np.maximum.at(highest, indices, catalogue.dtype[rows])
        for i in np.unique(indices).tolist():
            if shapes.setdefault(i, shape) != shape:
                problem = f"its arrays disagree on its shape: {list(shape)} and {list(shapes[i])}"
                tensors.problems.append(f"{names[i]}: {problem}")
    for i in np.flatnonzero((highest >= 0) & (lowest != highest)).tolist():
        low, high = catalogue.dtypes[int(lowest[i])], catalogue.dtypes[int(highest[i])]
        tensors.problems.append(f"{names[i]}: some of its arrays are {low}, some {high}")
    return {
        name: TensorEntry(name, catalogue.dtypes[int(highest[i])], shapes[i])
        for i, name in enumerate(names)
        if i in shapes
    }


def _find_copies(boxes: Pieces) -> BoolArray:
    """Return which boxes are copies: of equal boxes, all but the first."""
    keys = np.column_stack([boxes.tensor, boxes.offset, boxes.shape])
    order = np.lexsort(keys.T[::-1])
    is_copy = np.zeros(len(order), bool)
    is_copy[order[1:]] = (np.diff(keys[order], axis=0) == 0).all(axis=1)
    return is_copy


def _check_coverage(tensors: Tensors, boxes: Pieces, entries: Mapping[str, TensorEntry]) -> None:
    """Check that boxes cover each tensor exactly once."""
    catalogue, names = tensors.catalogue, tensors.names
    shapes = [entries[name].shape if name in entries else () for name in names]
    stored = np.array([name in entries for name in names], bool)
    padded_shapes = padded_rows(shapes, boxes.offset.shape[1], 1)
    try:
        wrong_tensors = find_uncovered_tensors(
            padded_shapes, boxes.tensor, boxes.offset, boxes.shape, stored
        )
    except FormatError as error:
        tensors.problems.append(str(error))
        return
    for tensor in wrong_tensors.tolist():
        total = int(padded_shapes[tensor].prod())
        own = boxes.tensor == tensor
        stored_elements = int(boxes.shape[own].prod(axis=1).sum())
        rows = [rows[indices == tensor] for indices, rows, _ in tensors.arrays]
        arrays = dict.fromkeys(catalogue.names[i] for each in rows for i in catalogue.name[each])
        problem = f"{stored_elements} of its {total} elements are there"
        if stored_elements >= total:
            problem = "its arrays overlap"
        source_names = _join_some(arrays) or "no array"
        tensors.problems.append(
            f"{names[tensor]}: {list(shapes[tensor])}: {problem}, from {source_names}"
        )


def _join_some(items: Iterable[object]) -> str:
    listed = list(map(str, items))
    return ", ".join(listed[:MOST_SHOWN]) + (" …" if len(listed) > MOST_SHOWN else "")


def _check_numbers_in_names(tensors: Tensors) -> None:
    """Check that the numbers that rules compute for names, such as layers, are 0 to n - 1."""
    for prefix, numbers in tensors.numbers_in_names.items():
        missing = sorted(set(range(min(max(numbers) + 1, 2**20))) - numbers)
        if missing:
            tensors.problems.append(
                f"{prefix}…: numbers go up to {max(numbers)}, without {_join_some(missing)}; "
                "captures of the same name must count the same things; put `~` before a capture if "
                "ranks have different numbers of it"
            )


def _resolve_ties(tensors: Tensors, entries: Mapping[str, TensorEntry]) -> dict[str, str]:
    """Return the stored tensor that each tied name is tied to.

    Tied tensors must have equal shapes and dtypes, and no tensor may be tied to itself.
    """
    declared: dict[str, str] = {}
    for tied, target in _declared_ties(tensors):
        if declared.setdefault(tied, target) != target:
            tensors.problems.append(f"{tied}: it is tied to {target} and to {declared[tied]}")
    ties = {}
    for tied, target in declared.items():
        visited = {tied}
        while target in declared and target not in visited:
            visited.add(target)
            target = declared[target]
        if target in visited:
            tensors.problems.append(f"{tied}: it is tied to itself; remove one of the ties")
            continue
        ties[tied] = target
        kinds = [
            f"{entry.dtype} {list(entry.shape)}"
            for entry in (entries.get(tied), entries.get(target))
            if entry is not None
        ]
        if len(set(kinds)) > 1:
            tensors.problems.append(
                f"{tied}: it is {kinds[0]}, but is tied to {target}, which is {kinds[1]}"
            )
    return ties


def _declared_ties(tensors: Tensors) -> Iterator[tuple[str, str]]:
    """Yield each tied name, and the name it is tied to."""
    for tie in tensors.spec.ties:
        match = tie.target.compile(())
        pairs = [(texts, name) for name in tensors.names if (texts := match(name)) is not None]
        if not pairs:
            tensors.problems.append(
                f"{tie.target}: no tensor has this name, so nothing is tied to it"
            )
        for texts, name in pairs:
            parts = tie.name.parts
            tied = "".join(p if isinstance(p, str) else texts[p.names[0]] for p in parts)
            if not (tie.unless_stored and tied in tensors.index):
                yield tied, name
