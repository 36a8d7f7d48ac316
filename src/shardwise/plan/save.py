"""Plan a save: from the tensors that each rank holds, compute the pieces that each rank writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from shardwise.decoding import prepare_decoding
from shardwise.errors import LayoutError, MismatchError
from shardwise.events import format_count
from shardwise.layout import Box, boxes_of_range, find_uncovered_tensors
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import TensorEntry, encode_tensors
from shardwise.manifest.pieces import Pieces, entries_of_runs, find_runs, padded_rows
from shardwise.plan.replica_sets import encode_replica_sets
from shardwise.plan.tables import Description, encode_pieces, pad_columns

Int = npt.NDArray[np.int64]
Float = npt.NDArray[np.float64]
LARGEST_GRAIN = 1 << 20
SMALLEST_GRAIN = 1 << 16
"""Bounds on the unit, in bytes, at which replicas are cut; see `divide_replicas`."""


@prepare_decoding
class ManifestPlan(msgspec.Struct, frozen=True, array_like=True):
    """The part of a manifest that depends on the plan alone.

    Attributes:
        tensors: the list of tensors, encoded.
        writers: the ranks that write a file, in the order of the list of files.
        per_rank: the names of the per-rank values.
        bytes_held: the tensor bytes of all ranks together, with replicas.
        bytes_stored: the tensor bytes that are written, without replicas.
    """

    tensors: bytes
    writers: tuple[int, ...]
    per_rank: tuple[str, ...]
    bytes_held: int
    bytes_stored: int


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The n pieces that all ranks write, in columns, and the planned part of the manifest.

    Rank r writes the rows `limits[r]:limits[r + 1]` to its file, in this order.

    Attributes:
        limits: the first row of each rank, and n, `(ranks + 1,)`.
        fragment: indices of fragments in the description of the rank that writes the piece, `(n,)`.
        offset, shape: boxes of the global tensors, `(n, D)`.
        manifest: the planned part of the manifest.
        replica_sets: the sets of replicas of each rank; `decode_replica_sets` decodes them.
    """

    limits: Int
    fragment: Int
    offset: Int
    shape: Int
    manifest: ManifestPlan
    replica_sets: tuple[bytes, ...]

    def encode_pieces(self, rank: int) -> bytes:
        """Return the pieces that a rank writes; `decode_pieces` decodes them on that rank."""
        rows = slice(int(self.limits[rank]), int(self.limits[rank + 1]))
        return encode_pieces(self.fragment[rows], self.offset[rows], self.shape[rows])


@dataclass(frozen=True, slots=True)
class _Fragments:
    """The fragments of all ranks, in columns; `tensor` has indices in the list of all tensors."""

    tensor: Int
    rank: Int
    fragment: Int
    offset: Int
    shape: Int


def plan_save(descriptions: Sequence[Description]) -> SavePlan:
    """Plan which rank writes which boxes, so that each element is written once.

    Args:
        descriptions: the description of each rank.

    Raises:
        MismatchError: ranks have different dtypes or shapes of the same tensor.
        LayoutError: the shards of a tensor leave gaps, or overlap without being equal.
    """
    tensors = _unite_tensors(descriptions)
    index_of_name = {tensor.name: i for i, tensor in enumerate(tensors)}
    fragments = _unite_fragments(descriptions, index_of_name)
    order, counts = _group_replicas(fragments)
    first_rows = order[np.cumsum(counts) - counts]
    _check_coverage(tensors, fragments, first_rows)
    itemsize = np.array([DTYPES[t.dtype].itemsize for t in tensors], np.int64)
    world = len(descriptions)
    sets = _holder_sets(fragments, order, counts)
    alone = order[(np.cumsum(counts) - counts)[counts == 1]]
    rows, offset, shape = _assign_writers(fragments, alone, sets, itemsize, world)
    writes = np.bincount(fragments.rank[rows], minlength=world) > 0
    files = np.flatnonzero(writes | [bool(d.per_rank) for d in descriptions])
    # Wider types come first in a file, so that every piece is aligned to its own type.
    size = itemsize[fragments.tensor[rows]]
    file_order = np.lexsort(
        [*reversed(offset.T), fragments.tensor[rows], -size, fragments.rank[rows]]
    )
    rows, offset, shape = rows[file_order], offset[file_order], shape[file_order]
    limits = np.searchsorted(fragments.rank[rows], np.arange(world + 1))
    pieces = _place_pieces(fragments, rows, offset, shape, itemsize, limits, files)
    entries = entries_of_runs(find_runs(pieces), [len(t.shape) for t in tensors])
    listed = [
        msgspec.structs.replace(tensor, pieces=tuple(own))
        for tensor, own in zip(tensors, entries, strict=True)
    ]
    manifest = ManifestPlan(
        encode_tensors(listed + _tied_entries(descriptions, tensors, index_of_name)),
        tuple(files.tolist()),
        tuple(dict.fromkeys(name for d in descriptions for name in d.per_rank)),
        int((fragments.shape.prod(axis=1) * itemsize[fragments.tensor]).sum()),
        int((pieces.shape.prod(axis=1) * itemsize[pieces.tensor]).sum()),
    )
    row_sizes = itemsize[fragments.tensor]
    replica_sets = encode_replica_sets(sets, fragments.fragment, row_sizes, world)
    return SavePlan(limits, fragments.fragment[rows], offset, shape, manifest, replica_sets)


def _unite_tensors(descriptions: Sequence[Description]) -> list[TensorEntry]:
    seen: dict[str, TensorEntry] = {}
    problems = []
    tied = {name for description in descriptions for name, _ in description.ties}
    for rank, description in enumerate(descriptions):
        columns = zip(description.names, description.dtypes, description.shapes, strict=True)
        holds = set(description.tensor.tolist()) if tied else set()
        for i, (name, dtype, shape) in enumerate(columns):
            if name in tied and i not in holds:
                continue  # a rank without a fragment of a tensor cannot see that it is tied
            known = seen.get(name)
            if known is None:
                seen[name] = TensorEntry(name, dtype, shape)
            elif known.dtype != dtype or known.shape != shape:
                problems.append(
                    f"{name}: {dtype} {list(shape)} on rank {rank}, "
                    f"{known.dtype} {list(known.shape)} on an earlier rank"
                )
    if problems:
        raise MismatchError(
            "ranks have tensors of the same name with different dtypes or shapes; pass the parts "
            "of one tensor as a DTensor or sw.Shards, and give other tensors different names:",
            problems,
        )
    return list(seen.values())


def _unite_fragments(descriptions: Sequence[Description], index: dict[str, int]) -> _Fragments:
    dims = max((d.offset.shape[1] for d in descriptions), default=0)
    tensor = [
        np.array([index.get(name, -1) for name in d.names], np.int64)[d.tensor]
        for d in descriptions
    ]
    return _Fragments(
        np.concatenate(tensor),
        np.repeat(np.arange(len(descriptions)), [len(d.tensor) for d in descriptions]),
        np.concatenate([np.arange(len(d.tensor)) for d in descriptions]),
        np.concatenate([pad_columns(d.offset, dims, 0) for d in descriptions]),
        np.concatenate([pad_columns(d.shape, dims, 1) for d in descriptions]),
    )


def _group_replicas(fragments: _Fragments) -> tuple[Int, Int]:
    """Return an order of rows in which equal boxes are adjacent, and the sizes of the groups."""
    keys = [fragments.tensor, *fragments.offset.T, *fragments.shape.T]
    order = np.lexsort([fragments.rank, *reversed(keys)])
    differs = np.zeros(len(order), bool)
    for key in keys:
        differs[1:] |= np.diff(key[order]) != 0
    groups = np.cumsum(differs)
    return order, np.bincount(groups) if len(groups) else groups


def _check_coverage(tensors: Sequence[TensorEntry], fragments: _Fragments, first_rows: Int) -> None:
    if not tensors:
        return
    shapes = padded_rows([t.shape for t in tensors], fragments.offset.shape[1], 1)
    everything = np.ones(len(tensors), bool)
    boxes = fragments.tensor[first_rows], fragments.offset[first_rows], fragments.shape[first_rows]
    wrong = find_uncovered_tensors(shapes, *boxes, everything).tolist()
    if not wrong:
        return
    lines = []
    for i in wrong[:10]:
        rows_of_tensor = first_rows[fragments.tensor[first_rows] == i][:8]
        ndim = len(tensors[i].shape)
        parts = (
            f"rank {fragments.rank[row]} has {Box(tuple(offset[:ndim]), tuple(shape[:ndim]))}"
            for row, offset, shape in zip(
                rows_of_tensor.tolist(),
                fragments.offset[rows_of_tensor].tolist(),
                fragments.shape[rows_of_tensor].tolist(),
                strict=True,
            )
        )
        lines.append(f"  - {tensors[i].name} {list(tensors[i].shape)}: {', '.join(parts)}")
    raise LayoutError(
        f"the shards of {format_count(len(wrong), 'tensor')} leave gaps, or overlap without being "
        "equal; some rank must hold each element, and ranks that hold the same element must hold "
        "equal boxes:\n" + "\n".join(lines)
    )


def _assign_writers(
    fragments: _Fragments, alone: Int, sets: list[tuple[list[int], Int]], itemsize: Int, world: int
) -> tuple[Int, Int, Int]:
    """Choose which rank writes each box.

    Args:
        alone: the rows of boxes that a single rank holds.
        sets: the other boxes, as `_holder_sets` returns them.

    Returns:
        Rows of `fragments`, and the offsets and shapes of the boxes to write of each row.
    """
    sizes = fragments.shape[alone].prod(axis=1) * itemsize[fragments.tensor[alone]]
    loads = np.bincount(fragments.rank[alone], weights=sizes, minlength=world).astype(np.float64)
    row_parts = [alone]
    offset_parts, shape_parts = [fragments.offset[alone]], [fragments.shape[alone]]
    for holders, rows in sets:
        heads = rows[:, 0]
        replicas = [
            (i, tuple(shape), size)
            for i, (shape, size) in enumerate(
                zip(
                    fragments.shape[heads].tolist(),
                    itemsize[fragments.tensor[heads]].tolist(),
                    strict=True,
                )
            )
        ]
        cuts = divide_replicas(replicas, holders, loads)
        index_of_holder = {rank: k for k, rank in enumerate(holders)}
        replica = [cut.replica for cut in cuts]
        row_parts.append(rows[replica, [index_of_holder[cut.rank] for cut in cuts]])
        base = fragments.offset[heads[replica]]
        offset_parts.append(base + np.array([cut.box.offset for cut in cuts], np.int64))
        shape_parts.append(np.array([cut.box.shape for cut in cuts], np.int64))
    return np.concatenate(row_parts), np.concatenate(offset_parts), np.concatenate(shape_parts)


def _holder_sets(fragments: _Fragments, order: Int, counts: Int) -> list[tuple[list[int], Int]]:
    """Return the sets of ranks that hold replicas, small sets first.

    Returns:
        The ranks of each set, and for each of its replicas the rows of these ranks,
        `(replicas, ranks)`.
    """
    starts = np.cumsum(counts) - counts
    sets: dict[bytes, list[int]] = {}
    ranks = fragments.rank[order]
    for group in np.flatnonzero(counts > 1).tolist():
        start = starts[group]
        sets.setdefault(ranks[start : start + counts[group]].tobytes(), []).append(group)
    decoded = [(np.frombuffer(key, np.int64).tolist(), np.array(g)) for key, g in sets.items()]
    decoded.sort(key=lambda item: (len(item[0]), item[0]))
    return [
        (holders, order[starts[groups][:, None] + np.arange(len(holders))])
        for holders, groups in decoded
    ]


def _place_pieces(
    fragments: _Fragments,
    rows: Int,
    offset: Int,
    shape: Int,
    itemsize: Int,
    limits: Int,
    files: Int,
) -> Pieces:
    """Return the pieces with their files and offsets, in the order of the manifest.

    Args:
        rows, offset, shape: the pieces, in the order in which files store them.
        limits: the first row of each rank.
        files: the ranks that write a file.
    """
    tensor, ranks = fragments.tensor[rows], fragments.rank[rows]
    ends = np.concatenate([[0], np.cumsum(shape.prod(axis=1) * itemsize[tensor])])
    start = ends[:-1] - ends[limits][ranks]
    columns = (tensor, np.searchsorted(files, ranks), start, offset, shape)
    order = np.lexsort([*reversed(offset.T), tensor])
    return Pieces(*(column[order] for column in columns))


def _tied_entries(
    descriptions: Sequence[Description], tensors: Sequence[TensorEntry], index: dict[str, int]
) -> list[TensorEntry]:
    ties: dict[str, TensorEntry] = {}
    for rank, description in enumerate(descriptions):
        for name, same_as in description.ties:
            target = tensors[index[same_as]]
            known = ties.get(name)
            if name in index or (known is not None and known.same_as != same_as):
                raise LayoutError(
                    f"{name} is tied to {same_as} on rank {rank} but not on another rank: "
                    "tie it on all ranks, or on none"
                )
            ties[name] = TensorEntry(name, target.dtype, target.shape, (), same_as)
    return list(ties.values())


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of a replica that one of its holders writes.

    Attributes:
        replica: the index of the replica.
        rank: the rank that writes the part.
        box: the part, relative to the replica.
    """

    replica: int
    rank: int
    box: Box


def even_out_loads(loads: Float, amount: float) -> Float:
    """Divide `amount` so that the loads become as equal as possible.

    Returns:
        The amount to add to each load.
    """
    ordered = np.sort(loads)
    level = amount
    for n in range(1, len(ordered) + 1):
        level = (float(ordered[:n].sum()) + amount) / n
        if n == len(ordered) or level <= ordered[n]:
            break
    poured: Float = np.maximum(level - loads, 0.0)
    return poured


def divide_replicas(
    replicas: Sequence[tuple[int, tuple[int, ...], int]],
    holders: Sequence[int],
    loads: Float,
    *,
    grain: int | None = None,
) -> list[Cut]:
    """Divide a sequence of replicas among their holders, and cut replicas at the boundaries.

    Each holder gets one contiguous part of the sequence, so that the loads become even.
    Replicas are cut at multiples of about `grain` bytes, and smaller replicas are not cut. The
    default grain is 1/32 of a holder's part, between `SMALLEST_GRAIN` and `LARGEST_GRAIN`.

    Args:
        replicas: the index, shape and itemsize of each replica. The same ranks hold all of them.
        holders: the ranks that hold the replicas.
        loads: the bytes assigned to each rank so far, float64; updated in place.
        grain: the unit of cuts, in bytes.
    """
    sizes = [int(np.prod(shape, dtype=np.int64)) * itemsize for _, shape, itemsize in replicas]
    if grain is None:
        part = sum(sizes) // (32 * len(holders))
        grain = max(SMALLEST_GRAIN, min(LARGEST_GRAIN, part))
    ends = np.cumsum(even_out_loads(loads[list(holders)], float(sum(sizes)))).tolist()
    ends[-1] = float("inf")
    cuts: list[Cut] = []
    holder_index = 0
    position = 0
    for (index, shape, itemsize), nbytes in zip(replicas, sizes, strict=True):
        done = 0
        while done < nbytes:
            nbytes_taken = _bytes_for_holder(
                shape, itemsize, done, nbytes, ends[holder_index] - position, grain
            )
            boxes = boxes_of_range(shape, done // itemsize, (done + nbytes_taken) // itemsize)
            cuts += [Cut(index, holders[holder_index], box) for box in boxes]
            loads[holders[holder_index]] += nbytes_taken
            position += nbytes_taken
            done += nbytes_taken
            if nbytes_taken == 0 or position >= ends[holder_index] - grain / 2:
                holder_index += 1
    return cuts


def _bytes_for_holder(
    shape: tuple[int, ...], itemsize: int, done: int, nbytes: int, capacity_left: float, grain: int
) -> int:
    """Return how many bytes to assign of a replica from byte `done` on.

    Args:
        capacity_left: the bytes that the current holder can still take.
    """
    rest = nbytes - done
    if rest <= capacity_left + grain / 2:
        return rest
    unit = itemsize
    for n in reversed(shape):
        if unit * n > grain:
            break
        unit *= n
    unit *= max(1, grain // unit)
    return max(0, min(rest, (done + round(capacity_left)) // unit * unit - done))
