"""Writing: the arrays that each rank's file has, and which boxes of tensors they consist of."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardwise.errors import LayoutError, MismatchError
from shardwise.formats.catalogue import Catalogue
from shardwise.formats.foreign import Foreign, ForeignFile
from shardwise.formats.language.constants import constants_of, rank_sizes, rule_sizes
from shardwise.formats.language.invert import (
    Texts,
    Wanted,
    assignments,
    count_from_names,
    wanted,
    with_listed,
)
from shardwise.formats.language.lay import examine
from shardwise.formats.language.matching import NOBODY
from shardwise.formats.language.names import Matcher
from shardwise.formats.language.numbers import Known, evaluate
from shardwise.formats.language.resolve import local_shapes, resolve
from shardwise.formats.language.rules import Rule, Skip, Spec, Target
from shardwise.formats.language.structure import structure
from shardwise.layout.flat import row_major
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import TensorEntry
from shardwise.manifest.table import Int


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Rank files as they would be: one for each rank, its arrays row-major, one after another.

    Attributes:
        catalogue: all arrays of all ranks; `file` counts the ranks, row-major over the axes.
        foreign: the same, laid over by the specification: which boxes of which tensors lie at
            which bytes of the files. What no piece covers is padding, zeros.
    """

    catalogue: Catalogue
    foreign: Foreign


@dataclass(slots=True)
class _Rows:
    """Rows of a catalogue as they are found."""

    spec: Spec
    known: Known
    ranks: tuple[str, ...]
    tensors: Mapping[str, TensorEntry]
    problems: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    shapes: list[Int] = field(default_factory=list)
    coordinates: list[Int] = field(default_factory=list)
    writer: dict[str, Int] = field(default_factory=dict)
    takers: list[tuple[dict[str, int], Matcher]] = field(default_factory=list)


def arrange(
    spec: Spec,
    tensors: Sequence[TensorEntry],
    axes: Mapping[str, int],
    *,
    sizes: Mapping[str, int] | None = None,
) -> Arrangement:
    """Work out the files of ranks from which a specification would read these tensors.

    On a rank, each tensor is written by the first rule that would: other rules for it stand for
    names that other versions of a framework use, or for ranks that have it too.

    Args:
        axes: of the ranks to write for, and their sizes.
        sizes: numbers that the specification declares with `let`; they count before its own.

    Raises:
        MismatchError: it cannot be done; `problems` lists everything.
    """
    known = Known(sizes=rank_sizes(spec, axes), constants=constants_of(spec, sizes or {}))
    rows = _Rows(spec, known, tuple(axes), {t.name: t for t in tensors if t.same_as is None})
    numbers = spec.numbers()
    rows.takers = [(_places(rule, known), rule.pattern.matcher(numbers)) for rule in spec.rules]
    _find_rows(rows)
    catalogue = _catalogue(rows, axes)
    shapes = {tensor.name: tensor.shape for tensor in rows.tensors.values()}
    foreign = None
    if not rows.problems:
        foreign, report = examine(spec, catalogue, sizes=sizes, shapes=shapes)
        rows.problems += report.problems
    if foreign is not None:
        there = {entry.name for entry in foreign.tensors}
        rows.problems += [f"{name}: no rule writes it" for name in shapes if name not in there]
    if rows.problems or foreign is None:
        what = f"{spec.text.source} cannot write these tensors:"
        raise MismatchError(what, list(dict.fromkeys(rows.problems)))
    return Arrangement(catalogue, foreign)


def _places(rule: Rule | Skip, known: Known) -> dict[str, int]:
    """Coordinates of the ranks whose arrays a rule takes, where it does not take those of all."""
    on = rule.on if isinstance(rule, Rule) else ()
    return {axis: evaluate(value, known) for axis, value in on}


def _find_rows(rows: _Rows) -> None:
    names = list(rows.tensors)
    found: list[tuple[int, Rule, list[Wanted]]] = []
    for number, rule in enumerate(rows.spec.rules):
        if isinstance(rule, Rule):
            try:
                own = [wanted(rows.spec, rule, target, names) for target in rule.targets]
            except LayoutError as error:
                rows.problems.append(f"{_line(rows, rule)}: {error}")
                continue
            if any(each.found for each in own):
                found.append((number, rule, own))
    try:
        rows.known = count_from_names(
            rows.spec,
            rows.known,
            [
                (rule, target, each)
                for _, rule, own in found
                for target, each in zip(rule.targets, own, strict=True)
                if each.found
            ],
        )
    except LayoutError as error:
        rows.problems.append(str(error))
        return
    for number, rule, own in found:
        for texts in dict.fromkeys(key for each in own for key in each.found):
            _write_rule(rows, (number, rule), own, texts)


def _line(rows: _Rows, rule: Rule) -> str:
    return f"{rows.spec.text.source}:{rows.spec.text.line(rule.at)}"


def _write_rule(
    rows: _Rows, numbered: tuple[int, Rule], own: Sequence[Wanted], texts: Texts
) -> None:
    """All arrays of one rule whose names have the same texts in them."""
    try:
        for position, named in _arrays_of(rows, numbered[1], own, texts):
            _write_arrays(rows, numbered, dict(texts), position, named)
    except LayoutError as error:
        rows.problems.append(f"{_line(rows, numbered[1])}: {error}")


def _arrays_of(
    rows: _Rows, rule: Rule, own: Sequence[Wanted], texts: Texts
) -> Iterator[tuple[dict[str, int], list[list[str]]]]:
    """Positions that tensors' names tell arrays of a rule to be at, and these tensors."""
    on = _places(rule, rows.known)
    declared = rule_sizes(rule, rows.known)
    stored = rows.spec.rank_axes | set(rule.pattern.captures())
    arrays: dict[tuple[tuple[str, int], ...], list[list[str]]] = {}
    for k, each in enumerate(own):
        known = with_listed(rows.known, each, texts, declared)
        for position, numbers in assignments(each, known, on):
            if numbers in each.found.get(texts, {}):
                key = tuple(sorted((a, n) for a, n in position.items() if a in stored))
                arrays.setdefault(key, [[] for _ in own])[k].append(each.found[texts][numbers])
    for key, named in arrays.items():
        if not all(named):
            lacking = rule.targets[[bool(names) for names in named].index(False)].name
            shown = next(name for names in named for name in names)
            raise LayoutError(f"{shown} is there, but no {lacking}, which is stored with it")
        yield {**on, **dict(key)}, named


def _write_arrays(
    rows: _Rows,
    numbered: tuple[int, Rule],
    texts: Mapping[str, str],
    position: Mapping[str, int],
    named: Sequence[Sequence[str]],
) -> None:
    """The arrays that hold some tensors, on all ranks that have them.

    Args:
        position: coordinates of these ranks, and captured numbers, where tensors' names say them.
        named: tensors, by target; several where an axis of the array tells them apart.
    """
    number, rule = numbered
    unknown = dict.fromkeys(rule.pattern.captures(), "0")
    words = {**unknown, **{axis: str(at) for axis, at in position.items()}, **texts}
    if _is_of_before(rows, number, _stored_name(rule, words), position):
        return
    declared = rule_sizes(rule, rows.known)
    entries = [rows.tensors[names[0]] for names in named]
    structures = [
        structure(rows.spec, rule, target, max(0, len(entry.shape) - _dims(rule, target)))
        for target, entry in zip(rule.targets, entries, strict=True)
    ]
    base = {**rows.known.constants, **declared}
    base |= {axis: rows.known.size(axis) for axis in rows.spec.rank_axes}
    base |= {
        axis: len(names)
        for own, names in zip(structures, named, strict=True)
        for axis in own.listed
    }
    shapes = [entry.shape for entry in entries]
    if rule.stored is None:  # each tensor has axes of its own
        pairs = zip(structures, shapes, strict=True)
        solved = [resolve([own], [shape], base) for own, shape in pairs]
    else:
        solved = [resolve(structures, shapes, base)] * len(shapes)
    names = [name for own in named for name in own]
    coordinate = _unwritten(rows, number, position, names)
    mine = dict.fromkeys(rows.spec.rank_axes, np.zeros(len(coordinate), np.int64))
    mine |= dict(zip(rows.ranks, coordinate.T, strict=True))
    local = [
        local_shapes(own, sizes, declared, mine)
        for own, sizes in zip(structures, solved, strict=True)
    ]
    if rule.flat:
        total = np.stack([shape.prod(axis=1) for shape in local]).sum(axis=0)
        count = math.prod(rows.known.size(axis) for axis in rule.flat)
        local = [-(-total // count)[:, None]]
    numbers = [name for name in rule.pattern.captures() if name not in texts]
    ranges = [[position[a]] if a in position else range(solved[0][a]) for a in numbers]
    for values in itertools.product(*ranges):
        words = {**texts, **{a: str(n) for a, n in zip(numbers, values, strict=True)}}
        rows.names.append(_stored_name(rule, words))
        rows.dtypes.append(rule.dtype or entries[0].dtype)
        rows.shapes.append(local[0])
        rows.coordinates.append(coordinate)


def _stored_name(rule: Rule, words: Mapping[str, str]) -> str:
    parts = rule.pattern.parts
    return "".join(part if isinstance(part, str) else words[part.name] for part in parts)


def _is_of_before(rows: _Rows, number: int, name: str, position: Mapping[str, int]) -> bool:
    """Whether a rule before takes the arrays of this name, so that this one never sees them."""
    return any(
        places.items() <= position.items() and match(name) is not None
        for places, match in rows.takers[:number]
    )


def _dims(rule: Rule, target: Target) -> int:
    return len(rule.shape_of(target).dims)


def _unwritten(rows: _Rows, number: int, position: Mapping[str, int], names: Sequence[str]) -> Int:
    """Coordinates of the ranks at a position on which no other rule writes these tensors."""
    sizes = [rows.known.size(axis) for axis in rows.ranks]
    grid = np.indices(sizes).reshape(len(sizes), math.prod(sizes))
    at = np.ones(grid.shape[1], bool)
    for axis, column in zip(rows.ranks, grid, strict=True):
        if axis in position:
            at &= column == position[axis]
    for name in names:
        writer = rows.writer.setdefault(name, np.full(grid.shape[1], NOBODY, np.int16))
        at &= (writer == NOBODY) | (writer == number)
        writer[at] = number
    return grid[:, at].T


def _catalogue(rows: _Rows, axes: Mapping[str, int]) -> Catalogue:
    """All arrays, sorted by rank, row-major and one after another in the file of each."""
    names, dtypes = list(dict.fromkeys(rows.names)), list(dict.fromkeys(rows.dtypes))
    index = {name: i for i, name in enumerate(names)}
    counts = [len(shape) for shape in rows.shapes]
    dims = max((shape.shape[1] for shape in rows.shapes), default=0)
    shape = np.ones((sum(counts), dims), np.int64)
    ends = np.cumsum([0, *counts])
    for begin, own in zip(ends.tolist(), rows.shapes, strict=False):
        shape[begin : begin + len(own), : own.shape[1]] = own
    ndim = np.repeat(np.array([own.shape[1] for own in rows.shapes], np.int64), counts)
    coordinate = np.concatenate([np.zeros((0, len(axes)), np.int64), *rows.coordinates])
    sizes = list(axes.values())
    rank = np.zeros(len(coordinate), np.int64)
    for size, column in zip(sizes, coordinate.T, strict=True):
        rank = rank * size + column
    name = np.repeat(np.array([index[name] for name in rows.names], np.int64), counts)
    dtype = np.repeat(np.array([dtypes.index(dtype) for dtype in rows.dtypes], np.int64), counts)
    order = np.argsort(rank, kind="stable")
    name, dtype, rank, ndim = name[order], dtype[order], rank[order], ndim[order]
    shape, coordinate = shape[order], coordinate[order]
    itemsize = np.array([DTYPES[each].itemsize for each in dtypes], np.int64)
    nbytes = shape.prod(axis=1) * itemsize[dtype]
    ends = np.cumsum(nbytes)
    world = int(np.prod(sizes, dtype=np.int64))
    of_rank = np.zeros(world, np.int64)
    np.add.at(of_rank, rank, nbytes)
    start = ends - nbytes - (np.cumsum(of_rank) - of_rank)[rank]
    files = tuple(ForeignFile(f"rank{i}", size) for i, size in enumerate(of_rank.tolist()))
    real = np.arange(dims) < ndim[:, None]
    stride = np.where(real, row_major(shape), 0)
    return Catalogue(
        files, axes, names, dtypes, name, dtype, rank, start, ndim, shape, stride, coordinate
    )
