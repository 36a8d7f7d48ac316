"""What there is to say about a specification and a checkpoint, before any byte moves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from shardwise.errors import FormatError
from shardwise.formats.foreign import Foreign, PieceTable
from shardwise.formats.language.assembly import Assembly
from shardwise.formats.language.pieces import Block
from shardwise.formats.language.rules import Rule, Skip
from shardwise.layout.flat import row_major
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import TensorEntry
from shardwise.manifest.table import Int, Pieces
from shardwise.manifest.validate import padded_shapes, uncovered


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Whether a specification fits, and what it makes of a checkpoint.

    Attributes:
        source: what the specification is called.
        problems: all that is wrong, one line each; without any, every element of every tensor is
            there exactly once (or is a declared average), and every stored array is used or
            skipped.
        arrays, tensors: how many there are.
        replicas: how many pieces more than one rank has, and which can be compared.
        averages: how many tensors are the mean of several.
        skipped: names of arrays that were left out, each with the line that says so.
        unused: rules that matched nothing.
    """

    source: str
    problems: tuple[str, ...]
    arrays: int = 0
    tensors: int = 0
    replicas: int = 0
    averages: int = 0
    skipped: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def __str__(self) -> str:
        head = f"{self.source}: {self.arrays} arrays make up {self.tensors} tensors"
        if self.problems:
            head = f"{self.source} does not fit: {len(self.problems)} problem(s)"
        counted = (
            (self.replicas, "pieces are replicas of others"),
            (self.averages, "tensors are means"),
            (len(self.skipped), "names of arrays are skipped"),
        )
        lines = [f"  {number} {what}" for number, what in counted if number]
        lines += [f"  ✗ {problem}" for problem in self.problems]
        lines += [f"  unused: {rule}" for rule in self.unused]
        return "\n".join([head, *lines])


SHOWN = 8


def complete(assembly: Assembly) -> tuple[Foreign | None, Report]:
    """Put all boxes together and check them; without problems, the foreign checkpoint comes out."""
    spec, catalogue = assembly.spec, assembly.catalogue
    for i in np.unique(catalogue.name[assembly.matches.unmatched]).tolist():
        what = "no rule matches it; `skip` what is not wanted"
        assembly.problems.append(f"{catalogue.names[i]}: {what}")
    shapes = _shapes(assembly)
    block = _united(assembly.blocks, max((len(s) for s in shapes if s is not None), default=0))
    dtypes = _dtypes(assembly)
    ties = _ties(assembly, shapes, dtypes)
    block, tied = _tied_apart(assembly, block, ties)
    block, copies = _first_copies(block, shapes)
    copies = _united([copies, tied], block.offset.shape[1])
    covered = zip(assembly.tensors.names, shapes, strict=True)
    _check_cover(assembly, block, [None if name in ties else shape for name, shape in covered])
    _check_numbers(assembly)
    tensors = _entries(assembly, shapes, dtypes, ties)
    report = _report(assembly, tensors, copies)
    if assembly.problems:
        return None, report
    names = list(catalogue.axes)
    copies = _taken(copies, np.argsort(copies.tensor, kind="stable"))
    foreign = Foreign(
        format=f"rank files, as {spec.text.source} says",
        files=catalogue.files,
        tensors=tensors,
        table=_laid(assembly, block, shapes),
        replicas=_laid(assembly, copies, shapes),
        replica_names=tuple(catalogue.names[i] for i in catalogue.name[copies.row].tolist()),
        averages={name: tuple(own) for name, own in assembly.tensors.averages.items()},
        world_size=int(np.prod([catalogue.axes[name] for name in names], dtype=np.int64)),
        left_out=report.skipped,
    )
    return foreign, report


def _shapes(assembly: Assembly) -> list[tuple[int, ...] | None]:
    found: list[tuple[int, ...] | None] = [None] * len(assembly.tensors.names)
    for tensors, _, shape in assembly.arrays:
        for tensor in np.unique(tensors).tolist():
            before = found[tensor]
            if before is None:
                found[tensor] = shape
            elif before != shape:
                assembly.complain(tensor, f"arrays make it {list(shape)} and {list(before)}")
    for tensor, own in enumerate(found):
        given = assembly.given.get(assembly.tensors.names[tensor])
        if own is not None and given is not None and tuple(given) != own:
            assembly.complain(tensor, f"it is {list(own)}, and should be {list(given)}")
    return found


def _united(blocks: list[Block], dims: int) -> Block:
    """All boxes in one table, padded to the same number of dimensions."""
    none = np.zeros(0, np.int64)
    flat = np.zeros((0, dims), np.int64)
    if not blocks:
        return Block(none, none, none, flat, flat, flat)

    def padded(column: Int, by: int) -> Int:
        wide = np.full((len(column), dims), by, np.int64)
        wide[:, : column.shape[1]] = column
        return wide

    return Block(
        np.concatenate([block.tensor for block in blocks]),
        np.concatenate([block.row for block in blocks]),
        np.concatenate([block.start for block in blocks]),
        np.concatenate([padded(block.offset, 0) for block in blocks]),
        np.concatenate([padded(block.shape, 1) for block in blocks]),
        np.concatenate([padded(block.stride, 0) for block in blocks]),
    )


def _taken(block: Block, which: npt.NDArray[np.bool_] | Int) -> Block:
    columns = block.tensor, block.row, block.start, block.offset, block.shape, block.stride
    return Block(*(column[which] for column in columns))


def _dtypes(assembly: Assembly) -> list[str | None]:
    """The dtype of each tensor, which all of its arrays must have; None if it has no arrays."""
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
            assembly.reject(bad, rule, f"it is not {rule.dtype}")
    return [catalogue.dtypes[i] if i >= 0 else None for i in high.tolist()]


def _first_copies(block: Block, shapes: list[tuple[int, ...] | None]) -> tuple[Block, Block]:
    """Boxes without those that are there before, and those."""
    dims = block.offset.shape[1]
    strides = row_major(padded_shapes([shape or () for shape in shapes], dims))
    if not len(block.tensor):
        return block, block
    element = (block.offset * strides[block.tensor]).sum(axis=1)
    order = np.lexsort((element, block.tensor))
    same = (np.diff(block.tensor[order]) == 0) & (np.diff(element[order]) == 0)
    same &= (np.diff(block.shape[order], axis=0) == 0).all(axis=1)
    again = np.zeros(len(order), bool)
    again[order[1:]] = same
    return _taken(block, ~again), _taken(block, again)


def _check_cover(assembly: Assembly, block: Block, shapes: list[tuple[int, ...] | None]) -> None:
    dims = block.offset.shape[1]
    whole = padded_shapes([shape or () for shape in shapes], dims)
    stored = np.array([shape is not None for shape in shapes], bool)
    try:
        wrong = uncovered(whole, block.tensor, block.offset, block.shape, stored)
    except FormatError as error:
        assembly.problems.append(str(error))
        return
    if not len(wrong):
        return
    size = block.shape.prod(axis=1)
    there = np.zeros(len(shapes), np.int64)
    np.add.at(there, block.tensor, size)
    order = np.argsort(block.tensor, kind="stable")
    bounds = np.searchsorted(block.tensor[order], np.stack([wrong, wrong + 1]))
    for i, tensor in enumerate(wrong.tolist()):
        total = int(whole[tensor].prod())
        rows = block.row[order[bounds[0, i] : bounds[1, i]]]
        names = dict.fromkeys(assembly.catalogue.names[k] for k in assembly.catalogue.name[rows])
        sources = ", ".join(list(names)[:SHOWN]) + (" …" if len(names) > SHOWN else "")
        what = f"{there[tensor]} of its {total} elements are there"
        if there[tensor] >= total:
            what = "its arrays overlap"
        assembly.complain(tensor, f"{list(shapes[tensor] or ())}: {what}, from {sources or 'none'}")


def _check_numbers(assembly: Assembly) -> None:
    for text, numbers in assembly.tensors.computed.items():
        missing = sorted(set(range(min(max(numbers) + 1, 2**20))) - numbers)
        if missing:
            shown = ", ".join(map(str, missing[:SHOWN])) + (" …" if len(missing) > SHOWN else "")
            assembly.problems.append(
                f"{text}…: numbers go up to {max(numbers)}, without {shown}; "
                "captures of the same name must count the same thing, and `~` stands before "
                "those of which ranks have different numbers"
            )


def _entries(
    assembly: Assembly,
    shapes: list[tuple[int, ...] | None],
    dtypes: list[str | None],
    ties: Mapping[str, str],
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
            assembly.problems.append(f"{mean}: it is stored, and the mean of others too")
        elif entries:
            found[mean] = TensorEntry(mean, entries[0].dtype, entries[0].shape)
    for tied, of in ties.items():
        if of not in found:
            assembly.problems.append(f"{tied}: is tied to {of}, which is not there")
        elif tied not in found:
            other = found[of]
            found[tied] = TensorEntry(tied, other.dtype, other.shape, same_as=of)
    return tuple(found.values())


def _ties(
    assembly: Assembly, shapes: list[tuple[int, ...] | None], dtypes: list[str | None]
) -> dict[str, str]:
    """Names that are tied, and to what; where arrays are stored for both they must fit."""
    tensors = assembly.tensors
    named: dict[str, str] = {}
    for tied, of in _named_ties(assembly):
        if named.setdefault(tied, of) != of:
            assembly.problems.append(f"{tied}: is tied to {of}, and to {named[tied]}")
    found = {}
    for tied in named:
        of, passed = named[tied], {tied}
        while of in named and of not in passed:
            passed.add(of)
            of = named[of]
        if of in passed:
            assembly.problems.append(f"{tied}: is tied to itself")
            continue
        found[tied] = of
        if tied in tensors.averages or (tied in tensors and of in tensors.averages):
            assembly.problems.append(f"{tied}: is tied to {of}, and one of them is a mean")
        elif tied in tensors and of in tensors:
            mine, other = tensors.index(tied), tensors.index(of)
            if (shapes[mine], dtypes[mine]) != (shapes[other], dtypes[other]):
                told = [f"{dtypes[i]} {list(shapes[i] or ())}" for i in (mine, other)]
                assembly.problems.append(f"{tied}: is {told[0]}, tied to {of}, which is {told[1]}")
    return found


def _tied_apart(assembly: Assembly, block: Block, ties: Mapping[str, str]) -> tuple[Block, Block]:
    """Boxes without those of tied tensors, and these: copies of what they are tied to."""
    tensors = assembly.tensors
    target = np.arange(len(tensors.names))
    for tied, of in ties.items():
        if tied in tensors and of in tensors:
            target[tensors.index(tied)] = tensors.index(of)
    moved = target[block.tensor]
    apart = moved != block.tensor
    return _taken(block, ~apart), replace(_taken(block, apart), tensor=moved[apart])


def _named_ties(assembly: Assembly) -> Iterator[tuple[str, str]]:
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


def _laid(assembly: Assembly, block: Block, shapes: list[tuple[int, ...] | None]) -> PieceTable:
    catalogue = assembly.catalogue
    itemsize = np.array([DTYPES[dtype].itemsize for dtype in catalogue.dtypes], np.int64)
    start = catalogue.start[block.row] + block.start * itemsize[catalogue.dtype[block.row]]
    order = np.argsort(block.tensor, kind="stable")
    pieces = Pieces(
        block.tensor[order],
        catalogue.file[block.row][order],
        start[order],
        block.offset[order],
        block.shape[order],
    )
    # The stride of what is one element long is free: let it be a row-major box's.
    dims = np.array([len(shape or ()) for shape in shapes], np.int64)[pieces.tensor]
    real = np.arange(block.offset.shape[1]) < dims[:, None]
    stride = np.where(pieces.shape == 1, row_major(pieces.shape), block.stride[order])
    return PieceTable(pieces, np.where(real, stride, 0))


def _report(assembly: Assembly, tensors: tuple[TensorEntry, ...], copies: Block) -> Report:
    spec, catalogue = assembly.spec, assembly.catalogue
    skipped: list[str] = []
    used: dict[int, bool] = {}
    for number, rule in enumerate(spec.rules):
        rows = assembly.matches.rows[number]
        used[rule.at] = used.get(rule.at, False) or len(rows) > 0
        if isinstance(rule, Skip):
            names = np.unique(catalogue.name[rows]).tolist()
            skipped += [f"{catalogue.names[i]}: skipped by {assembly.line(rule)}" for i in names]
    unused = [rule for rule in {r.at: r for r in spec.rules}.values() if not used[rule.at]]
    return Report(
        source=spec.text.source,
        problems=tuple(dict.fromkeys(assembly.problems)),
        arrays=len(catalogue),
        tensors=len(tensors),
        replicas=len(copies.tensor),
        averages=len(assembly.tensors.averages),
        skipped=tuple(skipped),
        unused=tuple(f"{assembly.line(rule)}: {rule.pattern}" for rule in unused),
    )
