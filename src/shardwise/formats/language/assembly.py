"""Global tensors as rules add boxes to them, and the checks once all rules are applied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from shardwise.errors import FormatError, LayoutError
from shardwise.formats.foreign import Catalogue, Foreign, PieceTable
from shardwise.formats.language.expressions import Known, Value
from shardwise.formats.language.match import Matches, Tensors, captured_numbers, coordinate
from shardwise.formats.language.pieces import ArrayGroup, Boxes
from shardwise.formats.language.rules import Rule, Skip, Spec, Target
from shardwise.layout.flat import row_major
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import TensorEntry
from shardwise.manifest.table import Int, Pieces, padded_rows
from shardwise.manifest.validate import uncovered

SHOWN = 8
Shapes = Sequence[tuple[int, ...] | None]


@dataclass(slots=True)
class Assembly:
    """The state while rules are applied.

    Attributes:
        boxes: boxes of tensors in arrays.
        arrays: for each group of arrays, their tensors, their rows in the catalogue, and the
            shape that the rule gives the tensors.
        problems: everything that is wrong.
    """

    spec: Spec
    catalogue: Catalogue
    matches: Matches
    known: Known
    tensors: Tensors = field(default_factory=Tensors)
    boxes: list[Boxes] = field(default_factory=list)
    arrays: list[tuple[Int, Int, tuple[int, ...]]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def rule(self, number: int) -> Rule:
        """Return a rule by its number.

        Raises:
            LayoutError: the number is that of a `skip`.
        """
        rule = self.spec.rules[number]
        if not isinstance(rule, Rule):
            raise LayoutError(f"rule {number} is a skip")
        return rule

    def line(self, rule: Rule | Skip) -> str:
        """Return the source and line of a rule."""
        return f"{self.spec.text.source}:{self.spec.text.line(rule.at)}"

    def positions(self, number: int) -> dict[str, Int]:
        """Return the positions of a rule's arrays along axes of ranks and captured numbers."""
        rows = self.matches.rows[number]
        ranks = {
            axis: coordinate(self.catalogue, axis)[rows] for axis in sorted(self.spec.rank_axes)
        }
        return ranks | captured_numbers(self.spec, self.catalogue, self.matches, number)

    def sizes(self, rule: Rule, declared: Mapping[str, Value]) -> dict[str, Value]:
        """Return the sizes of a rule's axes that are known without its arrays."""
        own = self.spec.rank_axes | set(rule.pattern.captures())
        sizes = {name: size for name, size in self.known.sizes.items() if name in own}
        return {**self.known.constants, **sizes, **declared}

    def tensors_of(self, number: int, target: Target, group: ArrayGroup) -> Int:
        """Return the number of each array's tensor.

        Raises:
            LayoutError: a name uses an unknown value.
        """
        known = replace(self.known, sizes={**self.known.sizes, **group.sizes})
        columns = self.catalogue.name[group.rows], group.positions
        numbers = self.spec.numbers()
        texts = {
            i: {name: text for name, text in found.items() if name not in numbers}
            for i, found in self.matches.captured[number].items()
        }
        return self.tensors.add(target.name, self.rule(number).average, texts, columns, known)

    def complain(self, tensor: int, what: str) -> None:
        """Add a problem of a tensor."""
        self.problems.append(f"{self.tensors.names[tensor]}: {what}")

    def reject(self, rows: Int, rule: Rule, what: str) -> None:
        """Add a problem of stored arrays to which a rule cannot be applied."""
        for i in np.unique(self.catalogue.name[rows]).tolist():
            self.problems.append(f"{self.catalogue.names[i]} ({self.line(rule)}): {what}")


def finish(assembly: Assembly) -> Foreign:
    """Check the tensors and return them as a checkpoint; problems are added to the assembly."""
    catalogue = assembly.catalogue
    for i in np.unique(catalogue.name[assembly.matches.unmatched]).tolist():
        what = "no rule matches it; `skip` what is not wanted"
        assembly.problems.append(f"{catalogue.names[i]}: {what}")
    shapes = _shapes(assembly)
    boxes = _joined(assembly.boxes, max((len(s) for s in shapes if s is not None), default=0))
    dtypes = _dtypes(assembly)
    ties = _ties(assembly, shapes, dtypes)
    boxes, tied = _split_tied(assembly, boxes, ties)
    boxes, copies = _split_copies(boxes, shapes)
    copies = _joined([copies, tied], boxes.offset.shape[1])
    names = zip(assembly.tensors.names, shapes, strict=True)
    _check_cover(assembly, boxes, [None if name in ties else shape for name, shape in names])
    _check_numbers(assembly)
    copies = _select(copies, np.argsort(copies.tensor, kind="stable"))
    return Foreign(
        format=f"rank files, as {assembly.spec.text.source} says",
        files=catalogue.files,
        tensors=_entries(assembly, shapes, dtypes, ties),
        table=_piece_table(assembly, boxes, shapes),
        replicas=_piece_table(assembly, copies, shapes),
        replica_names=tuple(catalogue.names[i] for i in catalogue.name[copies.row].tolist()),
        averages={name: tuple(own) for name, own in assembly.tensors.averages.items()},
        world_size=int(np.prod(list(catalogue.axes.values()), dtype=np.int64)),
        left_out=tuple(_skipped(assembly)),
    )


def _shapes(assembly: Assembly) -> Shapes:
    """Return the shape of each tensor; None for one without arrays."""
    found: list[tuple[int, ...] | None] = [None] * len(assembly.tensors.names)
    for tensors, _, shape in assembly.arrays:
        for tensor in np.unique(tensors).tolist():
            before = found[tensor]
            if before is None:
                found[tensor] = shape
            elif before != shape:
                assembly.complain(tensor, f"arrays make it {list(shape)} and {list(before)}")
    return found


def _joined(tables: Sequence[Boxes], dims: int) -> Boxes:
    """Join tables, padded to `dims` dimensions."""
    none = np.zeros(0, np.int64)
    flat = np.zeros((0, dims), np.int64)
    if not tables:
        return Boxes(none, none, none, flat, flat, flat)

    def padded(column: Int, fill: int) -> Int:
        wide = np.full((len(column), dims), fill, np.int64)
        wide[:, : column.shape[1]] = column
        return wide

    return Boxes(
        np.concatenate([each.tensor for each in tables]),
        np.concatenate([each.row for each in tables]),
        np.concatenate([each.start for each in tables]),
        np.concatenate([padded(each.offset, 0) for each in tables]),
        np.concatenate([padded(each.shape, 1) for each in tables]),
        np.concatenate([padded(each.stride, 0) for each in tables]),
    )


def _select(boxes: Boxes, which: npt.NDArray[np.bool_] | Int) -> Boxes:
    columns = boxes.tensor, boxes.row, boxes.start, boxes.offset, boxes.shape, boxes.stride
    return Boxes(*(column[which] for column in columns))


def _dtypes(assembly: Assembly) -> list[str | None]:
    """Return the dtype of each tensor, which its arrays must share; None without arrays."""
    catalogue = assembly.catalogue
    low = np.full(len(assembly.tensors.names), len(catalogue.dtypes), np.int64)
    high = np.full(len(assembly.tensors.names), -1, np.int64)
    for tensor, rows, _ in assembly.arrays:
        np.minimum.at(low, tensor, catalogue.dtype[rows])
        np.maximum.at(high, tensor, catalogue.dtype[rows])
    for i in np.flatnonzero((high >= 0) & (low != high)).tolist():
        both = catalogue.dtypes[int(low[i])], catalogue.dtypes[int(high[i])]
        assembly.complain(i, f"some of its arrays are {both[0]}, some {both[1]}")
    for number, rule in enumerate(assembly.spec.rules):
        if isinstance(rule, Rule) and rule.dtype is not None:
            rows = assembly.matches.rows[number]
            wrong = np.array([dtype != rule.dtype for dtype in catalogue.dtypes], bool)
            bad = rows[wrong[catalogue.dtype[rows]]] if len(rows) else rows
            assembly.reject(bad, rule, f"its dtype is not {rule.dtype}, as the rule requires")
    return [catalogue.dtypes[i] if i >= 0 else None for i in high.tolist()]


def _split_copies(boxes: Boxes, shapes: Shapes) -> tuple[Boxes, Boxes]:
    """Separate the first copy of each box from the others."""
    dims = boxes.offset.shape[1]
    strides = row_major(padded_rows([shape or () for shape in shapes], dims, 1))
    if not len(boxes.tensor):
        return boxes, boxes
    element = (boxes.offset * strides[boxes.tensor]).sum(axis=1)
    order = np.lexsort((element, boxes.tensor))
    same = (np.diff(boxes.tensor[order]) == 0) & (np.diff(element[order]) == 0)
    same &= (np.diff(boxes.shape[order], axis=0) == 0).all(axis=1)
    again = np.zeros(len(order), bool)
    again[order[1:]] = same
    return _select(boxes, ~again), _select(boxes, again)


def _check_cover(assembly: Assembly, boxes: Boxes, shapes: Shapes) -> None:
    """Check that boxes cover each tensor exactly once; tensors without a shape are not checked."""
    dims = boxes.offset.shape[1]
    whole = padded_rows([shape or () for shape in shapes], dims, 1)
    stored = np.array([shape is not None for shape in shapes], bool)
    try:
        wrong = uncovered(whole, boxes.tensor, boxes.offset, boxes.shape, stored)
    except FormatError as error:
        assembly.problems.append(str(error))
        return
    if not len(wrong):
        return
    there = np.zeros(len(shapes), np.int64)
    np.add.at(there, boxes.tensor, boxes.shape.prod(axis=1))
    order = np.argsort(boxes.tensor, kind="stable")
    bounds = np.searchsorted(boxes.tensor[order], np.stack([wrong, wrong + 1]))
    for i, tensor in enumerate(wrong.tolist()):
        total = int(whole[tensor].prod())
        rows = boxes.row[order[bounds[0, i] : bounds[1, i]]]
        names = dict.fromkeys(assembly.catalogue.names[k] for k in assembly.catalogue.name[rows])
        sources = ", ".join(list(names)[:SHOWN]) + (" …" if len(names) > SHOWN else "")
        what = f"{there[tensor]} of its {total} elements are there"
        if there[tensor] >= total:
            what = "its arrays overlap"
        assembly.complain(tensor, f"{list(shapes[tensor] or ())}: {what}, from {sources or 'none'}")


def _check_numbers(assembly: Assembly) -> None:
    """Check that computed numbers in names have no gaps."""
    for text, numbers in assembly.tensors.computed.items():
        missing = sorted(set(range(min(max(numbers) + 1, 2**20))) - numbers)
        if missing:
            shown = ", ".join(map(str, missing[:SHOWN])) + (" …" if len(missing) > SHOWN else "")
            assembly.problems.append(
                f"{text}…: numbers go up to {max(numbers)}, without {shown}; captures of the same "
                "name must count the same thing, and `~` marks one of which ranks have different "
                "numbers"
            )


def _entries(
    assembly: Assembly, shapes: Shapes, dtypes: Sequence[str | None], ties: Mapping[str, str]
) -> tuple[TensorEntry, ...]:
    tensors = assembly.tensors
    found = {
        name: TensorEntry(name, dtype, shape, same_as=ties.get(name))
        for name, shape, dtype in zip(tensors.names, shapes, dtypes, strict=True)
        if shape is not None and dtype is not None
    }
    for mean, own in tensors.averages.items():
        entries = [found[name] for name in own if name in found]
        if mean in found:
            assembly.problems.append(f"{mean}: it is stored, and is also the mean of other arrays")
        elif entries:
            found[mean] = TensorEntry(mean, entries[0].dtype, entries[0].shape)
    for tied, of in ties.items():
        if of not in found:
            assembly.problems.append(f"{tied}: it is tied to {of}, which does not exist")
        elif tied not in found:
            other = found[of]
            found[tied] = TensorEntry(tied, other.dtype, other.shape, same_as=of)
    return tuple(found.values())


def _ties(assembly: Assembly, shapes: Shapes, dtypes: Sequence[str | None]) -> dict[str, str]:
    """Return each tied name with the stored tensor it is tied to, and check that they fit."""
    tensors = assembly.tensors
    named: dict[str, str] = {}
    for tied, of in _declared_ties(assembly):
        if named.setdefault(tied, of) != of:
            assembly.problems.append(f"{tied}: it is tied to {of} and to {named[tied]}")
    found = {}
    for tied in named:
        of, passed = named[tied], {tied}
        while of in named and of not in passed:
            passed.add(of)
            of = named[of]
        if of in passed:
            assembly.problems.append(f"{tied}: it is tied to itself")
            continue
        found[tied] = of
        if tied in tensors.averages or (tied in tensors and of in tensors.averages):
            assembly.problems.append(f"{tied}: it is tied to {of}, and one of them is a mean")
        elif tied in tensors and of in tensors:
            mine, other = tensors.index(tied), tensors.index(of)
            if (shapes[mine], dtypes[mine]) != (shapes[other], dtypes[other]):
                kinds = [f"{dtypes[i]} {list(shapes[i] or ())}" for i in (mine, other)]
                what = f"is {kinds[0]}, but is tied to {of}, which is {kinds[1]}"
                assembly.problems.append(f"{tied}: it {what}")
    return found


def _declared_ties(assembly: Assembly) -> Iterator[tuple[str, str]]:
    averages = assembly.tensors.averages
    hidden = {name for own in averages.values() for name in own}
    names = [name for name in (*assembly.tensors.names, *averages) if name not in hidden]
    for tie in assembly.spec.ties:
        match = tie.of.matcher(())
        pairs = [(captured, name) for name in names if (captured := match(name)) is not None]
        if not pairs:
            assembly.problems.append(f"{tie.of}: no tensor has this name, so nothing is tied to it")
        for captured, name in pairs:
            tied = tie.name.fill(captured)
            if not (tie.unless_stored and tied in assembly.tensors):
                yield tied, name


def _split_tied(assembly: Assembly, boxes: Boxes, ties: Mapping[str, str]) -> tuple[Boxes, Boxes]:
    """Separate the boxes of tied tensors, which become copies of the tensor they are tied to."""
    tensors = assembly.tensors
    target = np.arange(len(tensors.names))
    for tied, of in ties.items():
        if tied in tensors and of in tensors:
            target[tensors.index(tied)] = tensors.index(of)
    moved = target[boxes.tensor]
    apart = moved != boxes.tensor
    return _select(boxes, ~apart), replace(_select(boxes, apart), tensor=moved[apart])


def _piece_table(assembly: Assembly, boxes: Boxes, shapes: Shapes) -> PieceTable:
    catalogue = assembly.catalogue
    itemsize = np.array([DTYPES[dtype].itemsize for dtype in catalogue.dtypes], np.int64)
    start = catalogue.start[boxes.row] + boxes.start * itemsize[catalogue.dtype[boxes.row]]
    order = np.argsort(boxes.tensor, kind="stable")
    pieces = Pieces(
        boxes.tensor[order],
        catalogue.file[boxes.row][order],
        start[order],
        boxes.offset[order],
        boxes.shape[order],
    )
    # A dimension of size 1 may have any stride; take that of a row-major box.
    dims = np.array([len(shape or ()) for shape in shapes], np.int64)[pieces.tensor]
    real = np.arange(boxes.offset.shape[1]) < dims[:, None]
    stride = np.where(pieces.shape == 1, row_major(pieces.shape), boxes.stride[order])
    return PieceTable(pieces, np.where(real, stride, 0))


def _skipped(assembly: Assembly) -> Iterator[str]:
    """Yield a line for each skipped name."""
    catalogue = assembly.catalogue
    for rule, rows in zip(assembly.spec.rules, assembly.matches.rows, strict=True):
        if isinstance(rule, Skip):
            for i in np.unique(catalogue.name[rows]).tolist():
                yield f"{catalogue.names[i]}: skipped by {assembly.line(rule)}"
