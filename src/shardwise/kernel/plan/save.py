"""Compute the pieces that each rank writes, from the structures of all ranks.

Every rank computes the same plan, so that no plan is sent. `kernel/engine/planning.py` sends the
rest.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import msgspec
import numpy as np

from shardwise.kernel.boxes import Box
from shardwise.kernel.boxes.box import IntArray, count_up, distinct_rows, pad_columns
from shardwise.kernel.errors import LayoutError, MismatchError, StateError
from shardwise.kernel.manifest.dtypes import DTYPES
from shardwise.kernel.manifest.manifest import TensorEntry, encode_header_entries
from shardwise.kernel.manifest.pieces import Runs, encode_tensors, find_runs, join_runs
from shardwise.kernel.plan.assignment import assign_writers
from shardwise.kernel.plan.division import find_divisions
from shardwise.kernel.plan.file_layout import PieceGroup, lay_out_pieces
from shardwise.kernel.plan.replicas import Replicas, find_owner_sets, find_replicas
from shardwise.kernel.plan.structure import (
    Coordinates,
    Description,
    ParamGroups,
    RanksOfStructure,
    list_tensors,
)

FEW_RANKS = 256
"""Up to this many ranks, a group has few enough pieces to search for runs in each tensor."""
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
        groups: the pieces.
        fragment_at: the index of each fragment by its tensor and its offset.
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
    groups: tuple[PieceGroup, ...]
    fragment_at: Mapping[tuple[int, tuple[int, ...]], int]

    @cached_property
    def digest(self) -> bytes:
        """A digest of the files of all ranks, which differs if two ranks plan differently."""
        digest = hashlib.blake2b(digest_size=16)
        names = self.world, self.tensors, self.per_rank
        digest.update(msgspec.msgpack.encode(names))
        columns = [self.writers]
        for group in self.groups:
            columns += [group.tensors, group.ranks, group.offset, group.shape]
            columns += [group.layout, group.starts]
        # Groups whose tensors are split alike have arrays in common, which are read once.
        numbers: dict[int, int] = {}
        for column in columns:
            if id(column) not in numbers:
                numbers[id(column)] = len(numbers)
                digest.update(np.ascontiguousarray(column).data)
            digest.update(b"%d %d " % (numbers[id(column)], len(column)))
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
        dims = max((len(tensor.shape) for tensor in self.tensors), default=0)
        tables = [np.zeros((0, 3 + 2 * dims), np.int64)]  # start, tensor, fragment, offset, shape
        for group in self.groups:
            for i in np.flatnonzero(group.ranks == rank).tolist():
                box, starts = tuple(group.box[i].tolist()), group.starts[group.layout[i]]
                found = [self.fragment_at[tensor, box] for tensor in group.tensors.tolist()]
                piece = np.tile(np.append(group.offset[i], group.shape[i]), (len(found), 1))
                tables.append(np.column_stack([starts, group.tensors, found, piece]))
        table = np.concatenate(tables)
        table = table[np.argsort(table[:, 0], kind="stable")]
        start, tensor, fragment = table[:, :3].T
        offset, shape = np.split(table[:, 3:], 2, axis=1)
        pieces = piece_table(self.description, fragment, offset, shape)
        names = [self.tensors[i].name for i in tensor.tolist()]
        own = [self.description.structure.names[i] for i in self.description.tensor[fragment]]
        if names != own or pieces.start[:-1].tolist() != start.tolist():
            raise StateError(
                f"rank {self.rank} would write other pieces than the plan of the save says. This "
                "is a bug of shardwise: report it, with the shapes and placements of the tensors"
            )
        return pieces

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
        dims = max((len(tensor.shape) for tensor in self.tensors), default=0)
        return encode_tensors(self.tensors, _runs_of_groups(self.groups, file_of, dims))


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
) -> SavePlan:
    """Plan which rank writes which boxes, so that each element is written once.

    Args:
        structures: the distinct structures, and the ranks that have each of them.
        world: the number of ranks.
        rank: this rank. The pieces of the plan are the same on all ranks.
        description: the structure and the fragments of this rank.

    Raises:
        MismatchError: ranks have different dtypes or shapes of the same tensor, or different kinds
            of values under one name.
        LayoutError: the shards of a tensor leave gaps, or overlap without being equal; a tensor is
            tied on some ranks only; or there are too many pieces.
    """
    entries = list_tensors(structures)
    tensors = [*entries.values()]
    divisions = find_divisions(structures, entries)
    sets = find_owner_sets(divisions)
    ties = _tied_entries(structures, entries)
    groups, sizes = lay_out_pieces(assign_writers(divisions, sets, world), world)
    writes_file = sizes > 0
    for each in structures:
        writes_file[each.ranks] |= bool(each.structure.per_rank)
    per_rank = _per_rank_names(structures, (*tensors, *ties))
    param_groups = {s.fingerprint: (int(s.ranks[0]), s.structure.param_groups) for s in structures}
    fragment_at = _fragments_by_offset(description, tensors)
    return SavePlan(
        rank=rank,
        world=world,
        description=description,
        per_rank=per_rank,
        param_groups=param_groups,
        tensors=(*tensors, *ties),
        replicas=tuple(find_replicas(sets, rank, fragment_at)),
        bytes_held=sum(each.bytes_held for each in divisions),
        bytes_stored=int(sizes.sum()),
        writers=np.flatnonzero(writes_file),
        groups=tuple(groups),
        fragment_at=fragment_at,
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


def _fragments_by_offset(
    description: Description, tensors: Sequence[TensorEntry]
) -> dict[tuple[int, tuple[int, ...]], int]:
    """Return the index of each fragment by its tensor and its offset, padded as in groups."""
    index_of = {tensor.name: i for i, tensor in enumerate(tensors)}
    index = [index_of[name] for name in description.structure.names]
    dims = max((len(tensor.shape) for tensor in tensors), default=0)
    offsets = pad_columns(description.offset, dims, 0).tolist()
    listed = enumerate(zip(description.tensor.tolist(), offsets, strict=True))
    return {(index[tensor], tuple(offset)): i for i, (tensor, offset) in listed}


def _runs_of_groups(groups: Sequence[PieceGroup], file_of: IntArray, dims: int) -> Runs:
    """Return the runs of all pieces, sorted by tensor.

    Tensors of the same groups, at equal distances in the files, have runs that differ only in their
    start. For example, the pieces of a tensor begin at byte 0 of two files, and those of two others
    at the bytes 16 and 24, and 32 and 40. Only the last two are alike. Then the runs of one of them
    are found.

    Args:
        groups: the pieces.
        file_of: the index of the file of each rank.
        dims: the number of dimensions of the pieces.
    """
    places: dict[int, list[tuple[int, int, int]]] = {}
    for i, group in enumerate(groups):
        first, kind = distinct_rows((group.starts - group.starts[:1]).T)
        columns = group.tensors.tolist(), first[kind].tolist(), group.starts[0].tolist()
        for tensor, example, start in zip(*columns, strict=True):
            places.setdefault(tensor, []).append((i, example, start))
    alike: dict[tuple[tuple[int, int, int], ...], list[tuple[int, int]]] = {}
    for tensor, each in places.items():
        base = each[0][2]
        key = tuple((i, example, start - base) for i, example, start in each)
        alike.setdefault(key, []).append((tensor, base))
    of_groups = [_runs_of_group(group, file_of) for group in groups]
    none = np.zeros(0, np.int64)
    tables = [Runs.of_rows(none, none, none, *[np.zeros((0, dims), np.int64)] * 2)]
    for number, places_of_tensor in enumerate(alike):
        for i, example, start in places_of_tensor:
            starts, runs = (
                groups[i].starts[:, example] + (start - groups[i].starts[0, example]),
                of_groups[i],
            )
            kind = np.full(len(runs), number)
            tables.append(replace(runs, tensor=kind, start=starts[runs.tensor]))
    runs = join_runs(tables)
    # Pieces at equal places in their files are more often at equal distances.
    keys = [*reversed(runs.offset.T), runs.start, *reversed(runs.shape.T), runs.tensor]
    runs = find_runs(runs.select(np.lexsort(keys)))
    which = np.repeat(np.arange(len(alike)), [*map(len, alike.values())])
    moves = np.array([*chain(*alike.values())], np.int64).reshape(-1, 2)
    begin, end = (np.searchsorted(runs.tensor, which, side=side) for side in ("left", "right"))
    moves = np.repeat(moves, end - begin, axis=0)
    runs = runs.select(np.repeat(begin, end - begin) + count_up(end - begin))
    runs = replace(runs, tensor=moves[:, 0], start=runs.start + moves[:, 1])
    return runs.select(np.lexsort([*reversed(runs.offset.T), runs.tensor]))


def _runs_of_group(group: PieceGroup, file_of: IntArray) -> Runs:
    """Return the pieces of a group as runs, with the layout for the tensor, and start 0.

    The pieces of few ranks stay one by one, because longer runs may be found for single tensors.
    """
    columns = group.layout, file_of[group.ranks], np.zeros_like(group.ranks)
    runs = Runs.of_rows(*columns, group.offset, group.shape)
    if len(runs) <= FEW_RANKS:
        return runs
    keys = [*reversed(runs.offset.T), *reversed(runs.shape.T), runs.tensor]
    return find_runs(runs.select(np.lexsort(keys)))


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
