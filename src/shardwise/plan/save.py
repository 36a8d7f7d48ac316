"""Compute the pieces that each rank writes, from the structures of all ranks.

Every rank computes the same plan, so that no plan is sent. `engine/planning.py` sends the rest.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import msgspec
import numpy as np

from shardwise.boxes import Box, find_uncovered_tensors
from shardwise.boxes.box import IntArray, check_table_size, padded_rows
from shardwise.errors import FormatError, LayoutError, MismatchError, StateError
from shardwise.events import format_count
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import TensorEntry, encode_header_entries
from shardwise.manifest.pieces import Runs, encode_tensors, find_runs, join_runs
from shardwise.plan.assignment import assign_writers, bytes_held
from shardwise.plan.division import SMALLEST_DIVISION, find_divisions
from shardwise.plan.file_layout import PieceGroup, PieceRows, lay_out_pieces
from shardwise.plan.replicas import Replicas, find_replicas
from shardwise.plan.structure import (
    Coordinates,
    Description,
    HeldBoxes,
    ParamGroups,
    RanksOfStructure,
    find_held_boxes,
    list_tensors,
)

DIFFERENT_KINDS = (
    "ranks have different kinds of values under one name; use the same kind on all ranks, for "
    "example a tensor on each:"
)


@dataclass(frozen=True, slots=True)
class PieceTable:
    """The n pieces in the data section of a rank's file, which follow each other without gaps.

    Most columns are lists, because the loop that copies pieces reads them one by one.

    Attributes:
        start: the offset of each piece in the data section, in bytes, followed by the end of the
            last piece, `(n + 1,)`.
        fragment: the index of the fragment that contains each piece.
        box: each piece, as a box of the global tensor.
    """

    start: IntArray
    fragment: list[int]
    box: list[Box]

    def describe_pieces(
        self, description: Description
    ) -> Iterator[tuple[str, str, tuple[int, ...], Box]]:
        """Yield the name, dtype and global shape of each piece's tensor, and the piece's box."""
        structure, tensors = description.structure, description.tensor.tolist()
        for fragment, box in zip(self.fragment, self.box, strict=True):
            i = tensors[fragment]
            yield structure.names[i], structure.dtypes[i], structure.shapes[i], box


def piece_table(
    description: Description, fragment: IntArray, offset: IntArray, shape: IntArray
) -> PieceTable:
    """Return a table of pieces, in the order of the file.

    Args:
        description: the fragments that contain the pieces.
        fragment: the index of the fragment that contains each piece, `(n,)`.
        offset, shape: the pieces, as boxes of the global tensors, `(n, D)`.
    """
    structure = description.structure
    end, ends, boxes = 0, [0], []
    tensors = description.tensor[fragment].tolist()
    for i, low, extent in zip(tensors, offset.tolist(), shape.tolist(), strict=True):
        ndim = len(structure.shapes[i])
        box = Box(tuple(low[:ndim]), tuple(extent[:ndim]))
        end += box.size * DTYPES[structure.dtypes[i]].itemsize
        ends.append(end)
        boxes.append(box)
    return PieceTable(np.array(ends, np.int64), fragment.tolist(), boxes)


@dataclass(frozen=True, eq=False)
class SavePlan:
    """The pieces that all ranks write, as computed by one rank.

    Attributes:
        rank: the rank that computed the plan.
        world: the number of ranks.
        description: the structure and the fragments of this rank.
        per_rank: the names of the per-rank values of all ranks.
        param_groups: by the fingerprint of each structure, its first rank and its param groups.
        tensors: all tensors, without pieces; then the names that share the data of another tensor.
        replicas: the boxes that this and other ranks hold.
        bytes_held: the tensor bytes of all ranks together, with replicas.
        bytes_stored: the tensor bytes that are written, without replicas.
        writers: the ranks that write a file, in the order of the list of files.
        rows, piece_groups: the pieces.
    """

    rank: int
    world: int
    description: Description
    per_rank: tuple[str, ...]
    param_groups: Mapping[bytes, tuple[int, ParamGroups]]
    tensors: tuple[TensorEntry, ...]
    replicas: tuple[Replicas, ...]
    bytes_held: int
    bytes_stored: int
    writers: IntArray
    rows: PieceRows
    piece_groups: tuple[PieceGroup, ...]

    @cached_property
    def digest(self) -> bytes:
        """A digest of the files of all ranks, which differs if two ranks plan differently."""
        digest = hashlib.blake2b(digest_size=16)
        names = self.world, self.tensors, self.per_rank
        digest.update(msgspec.msgpack.encode(names))
        rows = self.rows
        columns = [self.writers, rows.rank, rows.tensor, rows.start, rows.offset, rows.shape]
        for group in self.piece_groups:
            columns += [group.tensors, group.ranks, group.box, group.within, group.shape]
            columns += [group.layout, group.starts]
        for column in columns:
            digest.update(str(column.shape).encode() + np.ascontiguousarray(column).tobytes())
        return digest.digest()

    @cached_property
    def pieces(self) -> PieceTable:
        """The pieces that this rank writes."""
        return self.pieces_of(self.rank)

    def pieces_of(self, rank: int) -> PieceTable:
        """Return the pieces that a rank writes, in the fragments of this rank.

        Args:
            rank: this rank, or another one that holds equal boxes.

        Raises:
            StateError: the fragments of this rank are not those in the plan.
        """
        low, high = np.searchsorted(self.rows.rank, [rank, rank + 1]).tolist()
        rows = slice(low, high)
        tensor = [self.rows.tensor[rows]]
        start, fragment = [self.rows.start[rows]], [self.rows.fragment[rows]]
        offset, shape = [self.rows.offset[rows]], [self.rows.shape[rows]]
        for group in self.piece_groups:
            for i in np.flatnonzero(group.ranks == rank).tolist():
                t = len(group.tensors)
                start.append(group.starts[group.layout[i]])
                box = tuple(group.box[i].tolist())
                found = [self._fragment_at[tensor, box] for tensor in group.tensors.tolist()]
                fragment.append(np.array(found, np.int64))
                tensor.append(group.tensors)
                offset.append(np.tile(group.offset[i], (t, 1)))
                shape.append(np.tile(group.shape, (t, 1)))
        order = np.argsort(np.concatenate(start), kind="stable")
        columns = np.concatenate(fragment), np.concatenate(offset), np.concatenate(shape)
        table = piece_table(self.description, *(column[order] for column in columns))
        names = [self.tensors[i].name for i in np.concatenate(tensor)[order].tolist()]
        own = [self.description.structure.names[i] for i in self.description.tensor[table.fragment]]
        if names != own or table.start[:-1].tolist() != np.concatenate(start)[order].tolist():
            raise StateError(
                f"rank {self.rank} would write other pieces than the plan of the save says. This "
                "is a bug of shardwise: report it, with the shapes and placements of the tensors"
            )
        return table

    @cached_property
    def _fragment_at(self) -> dict[tuple[int, tuple[int, ...]], int]:
        """The index of this rank's fragment with a tensor and an offset."""
        return fragments_by_offset(self.description, self.tensors, self.rows.offset.shape[1])

    @cached_property
    def kinds(self) -> dict[str, str]:
        """What each name is: a tensor, or a per-rank value."""
        return {each.name: "a tensor" for each in self.tensors} | dict.fromkeys(
            self.per_rank, "a value in sw.PerRank"
        )

    @cached_property
    def header_entries(self) -> tuple[bytes, int]:
        """The entries of this rank's pieces in the header of its file; see `lay_out_file`."""
        return encode_header_entries(self.pieces.describe_pieces(self.description))

    @cached_property
    def encoded_tensors(self) -> msgspec.Raw:
        """The list of tensors in the manifest, with their pieces, encoded."""
        file_of = np.zeros(int(self.writers.max(initial=0)) + 1, np.int64)
        file_of[self.writers] = np.arange(len(self.writers))
        rows = self.rows.select(np.lexsort([*reversed(self.rows.offset.T), self.rows.tensor]))
        tables = [find_runs(rows.tensor, file_of[rows.rank], rows.start, rows.offset, rows.shape)]
        tables += [_runs_of_group(group, file_of) for group in self.piece_groups]
        runs = join_runs(tables)
        order = np.lexsort([*reversed(runs.offset.T), runs.tensor])
        return encode_tensors(self.tensors, runs.select(order))


class PlanCache:
    """Plans of earlier saves, for later saves of a state with the same structure.

    The key is a digest of the plan, the structures and the coordinates of all ranks, and the rank.

    Structures have names, dtypes, shapes, rules and ties, so that a changed state is planned again.
    A plan does not depend on addresses of tensors in memory. A save uses the cache only if every
    rank has the plan. The key includes the rank, because one process can have different ranks in
    different groups.

    Args:
        capacity: the largest number of plans in the cache.

    Attributes:
        of_shards: the names of tensors in the state of optimizers that are saved for each shard, as
            the ranks decided at an earlier save.
    """

    def __init__(self, capacity: int = 4) -> None:
        self.of_shards: frozenset[str] = frozenset()
        self._capacity = capacity
        self._plans: OrderedDict[tuple[bytes, int], tuple[bytes, SavePlan]] = OrderedDict()

    def plans_for(
        self, rank: int, world: int, fingerprint: bytes, coordinates: Coordinates
    ) -> dict[bytes, SavePlan]:
        """Return the plans in which a rank has this structure and these coordinates, by key.

        Args:
            rank: the rank.
            world: the number of ranks.
            fingerprint: a digest of the structure.
            coordinates: the coordinates.
        """
        wanted = rank, world, fingerprint, coordinates
        return {
            key: plan
            for (key, _), (structure, plan) in self._plans.items()
            if (plan.rank, plan.world, structure, plan.description.coordinates) == wanted
        }

    def get(self, key: bytes, rank: int) -> SavePlan:
        """Return a plan that is in the cache."""
        self._plans.move_to_end((key, rank))
        return self._plans[key, rank][1]

    def put(self, key: bytes, rank: int, fingerprint: bytes, plan: SavePlan) -> None:
        """Add a plan. If the cache is full, remove the least recently used one.

        Args:
            fingerprint: a digest of the structure that the rank has in this plan.
        """
        self._plans[key, rank] = fingerprint, plan
        while len(self._plans) > self._capacity:
            self._plans.popitem(last=False)


def plan_save(
    structures: Sequence[RanksOfStructure],
    world: int,
    rank: int,
    description: Description,
    *,
    smallest_division: int = SMALLEST_DIVISION,
) -> SavePlan:
    """Plan which rank writes which boxes, so that each element is written once.

    Args:
        structures: the distinct structures, and the ranks that have each of them.
        world: the number of ranks.
        rank: this rank. The pieces of the plan are the same on all ranks.
        description: the structure and the fragments of this rank.
        smallest_division: tensors that are split alike are planned together if they have at least
            this many parts.

    Raises:
        MismatchError: ranks have different dtypes or shapes of the same tensor, or different kinds
            of values under one name.
        LayoutError: the shards of a tensor leave gaps, or overlap without being equal; a tensor is
            tied on some ranks only; or there are too many pieces.
    """
    entries = list_tensors(structures)
    tensors = [*entries.values()]
    dims = max((len(tensor.shape) for tensor in tensors), default=0)
    divisions = find_divisions(structures, entries, smallest_division)
    divided = {i for division in divisions for i in division.tensors.tolist()}
    listed = {name: i for i, name in enumerate(entries) if i not in divided}
    boxes = find_held_boxes(structures, listed, dims, rank, description)
    _check_coverage(tensors, listed.values(), boxes)
    ties = _tied_entries(structures, entries)
    itemsizes = np.array([DTYPES[tensor.dtype].itemsize for tensor in tensors], np.int64)
    rows, groups = assign_writers(boxes, divisions, itemsizes, world)
    try:
        check_table_size(*rows.offset.shape)
    except FormatError as error:
        raise LayoutError(str(error)) from error
    rows, groups, sizes = lay_out_pieces(rows, groups, itemsizes, world)
    writes_file = sizes > 0
    for each in structures:
        writes_file[each.ranks] |= bool(each.structure.per_rank)
    per_rank = _per_rank_names(structures, (*tensors, *ties))
    param_groups = {s.fingerprint: (int(s.ranks[0]), s.structure.param_groups) for s in structures}
    fragment_at = fragments_by_offset(description, tensors, dims) if divisions else {}
    return SavePlan(
        rank=rank,
        world=world,
        description=description,
        per_rank=per_rank,
        param_groups=param_groups,
        tensors=(*tensors, *ties),
        replicas=tuple(find_replicas(boxes, divisions, rank, fragment_at, world)),
        bytes_held=bytes_held(boxes, divisions, itemsizes),
        bytes_stored=int(sizes.sum()),
        writers=np.flatnonzero(writes_file),
        rows=rows,
        piece_groups=tuple(groups),
    )


def _per_rank_names(
    structures: Sequence[RanksOfStructure], tensors: Sequence[TensorEntry]
) -> tuple[str, ...]:
    """Return the names of the per-rank values of all ranks, which no tensors have."""
    names = dict.fromkeys(chain(*(each.structure.per_rank for each in structures)))
    both = names.keys() & {each.name for each in tensors}
    if both:
        lines = [f"{name}: a tensor, and a value in sw.PerRank" for name in sorted(both)]
        raise MismatchError(DIFFERENT_KINDS, lines)
    return tuple(names)


def fragments_by_offset(
    description: Description, tensors: Sequence[TensorEntry], dims: int
) -> dict[tuple[int, tuple[int, ...]], int]:
    """Return the index of each fragment by its tensor and its offset, padded to `dims`."""
    index_of = {tensor.name: i for i, tensor in enumerate(tensors)}
    index = [index_of[name] for name in description.structure.names]
    padding = dims - description.offset.shape[1]
    offsets = np.pad(description.offset, ((0, 0), (0, padding))).tolist()
    listed = enumerate(zip(description.tensor.tolist(), offsets, strict=True))
    return {(index[tensor], tuple(offset)): i for i, (tensor, offset) in listed}


def _check_coverage(
    tensors: Sequence[TensorEntry], listed: Collection[int], boxes: HeldBoxes
) -> None:
    """Check that boxes cover the listed tensors exactly once."""
    if not listed:
        return
    shapes = padded_rows([t.shape for t in tensors], boxes.offset.shape[1], 1)
    is_listed = np.zeros(len(tensors), bool)
    is_listed[[*listed]] = True
    columns = boxes.tensor, boxes.offset, boxes.shape
    wrong = find_uncovered_tensors(shapes, *columns, is_listed).tolist()
    if not wrong:
        return
    lines = []
    for i in wrong[:10]:
        ndim = len(tensors[i].shape)
        parts = [
            (boxes.owner_sets[boxes.owner_set[row]][0], boxes.offset[row], boxes.shape[row])
            for row in np.flatnonzero(boxes.tensor == i)[:8].tolist()
        ]
        shown = ", ".join(
            f"rank {rank} has {Box(tuple(offset[:ndim].tolist()), tuple(shape[:ndim].tolist()))}"
            for rank, offset, shape in parts
        )
        lines.append(f"  - {tensors[i].name} {list(tensors[i].shape)}: {shown}")
    if len(wrong) > len(lines):
        lines.append(f"  - and {format_count(len(wrong) - len(lines), 'more tensor')}")
    raise LayoutError(
        f"the shards of {format_count(len(wrong), 'tensor')} leave gaps, or overlap without being "
        "equal; some rank must hold each element, and ranks that hold the same element must hold "
        "equal boxes:\n" + "\n".join(lines)
    )


def _runs_of_group(group: PieceGroup, file_of: IntArray) -> Runs:
    """Return the runs of a group, whose ranks and boxes are the same for each of its tensors."""
    order = np.argsort(group.layout, kind="stable")
    q, r = len(order), len(group.tensors)
    runs = find_runs(
        tensor=group.layout[order],  # for now, the layout stands for the tensors
        file=file_of[group.ranks[order]],
        start=np.zeros(q, np.int64),
        offset=group.offset[order],
        shape=np.tile(group.shape, (q, 1)),
    )
    starts = group.starts[runs.tensor].T.reshape(-1)
    repeated = runs.select(np.tile(np.arange(len(runs)), r))
    return replace(repeated, tensor=np.repeat(group.tensors, len(runs)), start=starts)


def _tied_entries(
    structures: Sequence[RanksOfStructure], tensors: Mapping[str, TensorEntry]
) -> list[TensorEntry]:
    ties: dict[str, TensorEntry] = {}
    for each in structures:
        for name, same_as in each.structure.ties:
            target = tensors[same_as]
            known = ties.get(name)
            if known is not None and known.same_as != same_as:
                raise LayoutError(
                    f"{name} is tied to {known.same_as} on some ranks and to {same_as} on others: "
                    "tie it to the same tensor on all ranks"
                )
            if name in tensors:
                raise LayoutError(
                    f"{name} is tied to {same_as} on some ranks but not on others: "
                    "tie it on all ranks, or on none"
                )
            ties[name] = TensorEntry(name, target.dtype, target.shape, same_as)
    return list(ties.values())
