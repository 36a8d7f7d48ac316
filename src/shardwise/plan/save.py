"""Plan of a save: from the tensors that every rank holds to the pieces that every rank writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from shardwise.errors import LayoutError, MismatchError
from shardwise.layout import Box, boxes_of_range
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import TensorEntry, piece_entries
from shardwise.manifest.table import Pieces, find_runs
from shardwise.manifest.validate import padded_shapes, uncovered
from shardwise.plan.description import Description, widened

Int = npt.NDArray[np.int64]
Float = npt.NDArray[np.float64]
LARGEST_GRAIN = 1 << 20
SMALLEST_GRAIN = 1 << 16


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank writes, in the order of its file: boxes of its own fragments.

    `fragment` is an index into the rank's description; `offset` and `shape` (`(n, D)`) are in
    elements of the global tensor.
    """

    fragment: Int
    offset: Int
    shape: Int

    def encode(self) -> bytes:
        """As bytes, for the rank whose share it is."""
        columns = self.fragment, self.offset, self.shape
        encoded = [np.ascontiguousarray(column).tobytes() for column in columns]
        return msgspec.msgpack.encode([self.offset.shape[1], encoded])


def decode_share(data: bytes) -> Share:
    """The inverse of `Share.encode`."""
    dims, columns = msgspec.msgpack.decode(data, type=tuple[int, tuple[bytes, bytes, bytes]])
    fragment, offset, shape = (np.frombuffer(column, np.int64) for column in columns)
    rows = len(fragment), dims
    return Share(fragment, offset.reshape(rows), shape.reshape(rows))


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Every rank's share, and the tensors as the manifest will list them.

    `files` holds the ranks that write a file, in the manifest's order. `bytes_held` counts what
    all ranks hold, `bytes_stored` what is written of it.
    """

    shares: tuple[Share, ...]
    tensors: tuple[TensorEntry, ...]
    files: tuple[int, ...]
    per_rank: tuple[str, ...]
    bytes_held: int
    bytes_stored: int


@dataclass(frozen=True, slots=True)
class _Held:
    """All fragments of all ranks, in rows; `tensor` counts through the tensors of all."""

    tensor: Int
    rank: Int
    fragment: Int
    offset: Int
    shape: Int


def plan_save(descriptions: Sequence[Description]) -> SavePlan:
    """Divide the state among the ranks, every element once.

    Raises:
        MismatchError: ranks disagree about the dtype or the shape of a tensor.
        LayoutError: the shards of a tensor leave holes, or overlap without being equal.
    """
    tensors = _unite_tensors(descriptions)
    index = {tensor.name: i for i, tensor in enumerate(tensors)}
    held = _unite_fragments(descriptions, index)
    order, counts = _group_replicas(held)
    heads = order[np.cumsum(counts) - counts]
    _check_cover(tensors, held, heads)
    itemsize = np.array([DTYPES[t.dtype].itemsize for t in tensors], np.int64)
    world = len(descriptions)
    chosen = _assign(held, order, counts, itemsize, world)
    ranks = held.rank[chosen.fragment]
    per_rank = tuple(dict.fromkeys(name for d in descriptions for name in d.per_rank))
    writes = np.bincount(ranks, minlength=world) > 0
    files = np.flatnonzero(writes | [bool(d.per_rank) for d in descriptions])
    shares, pieces = _lay_out(held, chosen, ranks, itemsize, files, world)
    entries = piece_entries(find_runs(pieces), [len(t.shape) for t in tensors])
    listed = [
        msgspec.structs.replace(tensor, pieces=tuple(own))
        for tensor, own in zip(tensors, entries, strict=True)
    ]
    held_bytes = int((held.shape.prod(axis=1) * itemsize[held.tensor]).sum())
    stored_bytes = int((pieces.shape.prod(axis=1) * itemsize[pieces.tensor]).sum())
    return SavePlan(
        tuple(shares),
        tuple(listed + _ties(descriptions, tensors, index)),
        tuple(files.tolist()),
        per_rank,
        held_bytes,
        stored_bytes,
    )


def _unite_tensors(descriptions: Sequence[Description]) -> list[TensorEntry]:
    seen: dict[str, TensorEntry] = {}
    problems = []
    tied = {name for description in descriptions for name, _ in description.ties}
    for rank, description in enumerate(descriptions):
        columns = zip(description.names, description.dtypes, description.shapes, strict=True)
        holds = set(description.tensor.tolist()) if tied else set()
        for i, (name, dtype, shape) in enumerate(columns):
            if name in tied and i not in holds:
                continue  # where a rank has nothing of it, it cannot see that it is tied
            known = seen.get(name)
            if known is None:
                seen[name] = TensorEntry(name, dtype, shape)
            elif known.dtype != dtype or known.shape != shape:
                problems.append(
                    f"{name}: {dtype} {list(shape)} on rank {rank}, "
                    f"{known.dtype} {list(known.shape)} on a rank before"
                )
    if problems:
        raise MismatchError("ranks disagree about tensors of the same name:", problems)
    return list(seen.values())


def _unite_fragments(descriptions: Sequence[Description], index: dict[str, int]) -> _Held:
    dims = max((d.offset.shape[1] for d in descriptions), default=0)
    tensor = [
        np.array([index.get(name, -1) for name in d.names], np.int64)[d.tensor]
        for d in descriptions
    ]
    return _Held(
        np.concatenate(tensor),
        np.repeat(np.arange(len(descriptions)), [len(d.tensor) for d in descriptions]),
        np.concatenate([np.arange(len(d.tensor)) for d in descriptions]),
        np.concatenate([widened(d.offset, dims, 0) for d in descriptions]),
        np.concatenate([widened(d.shape, dims, 1) for d in descriptions]),
    )


def _group_replicas(held: _Held) -> tuple[Int, Int]:
    """Order rows so that equal boxes are adjacent, ranks ascending; and the sizes of groups."""
    keys = [held.tensor, *held.offset.T, *held.shape.T]
    order = np.lexsort([held.rank, *reversed(keys)])
    differs = np.zeros(len(order), bool)
    for key in keys:
        differs[1:] |= np.diff(key[order]) != 0
    groups = np.cumsum(differs)
    return order, np.bincount(groups) if len(groups) else groups


def _check_cover(tensors: Sequence[TensorEntry], held: _Held, heads: Int) -> None:
    if not tensors:
        return
    shapes = padded_shapes([t.shape for t in tensors], held.offset.shape[1])
    everything = np.ones(len(tensors), bool)
    boxes = held.tensor[heads], held.offset[heads], held.shape[heads]
    wrong = uncovered(shapes, *boxes, everything).tolist()
    if not wrong:
        return
    lines = []
    for i in wrong[:10]:
        mine = heads[held.tensor[heads] == i][:8]
        ndim = len(tensors[i].shape)
        parts = (
            f"rank {held.rank[row]} has {Box(tuple(offset[:ndim]), tuple(shape[:ndim]))}"
            for row, offset, shape in zip(
                mine.tolist(), held.offset[mine].tolist(), held.shape[mine].tolist(), strict=True
            )
        )
        lines.append(f"  - {tensors[i].name} {list(tensors[i].shape)}: {', '.join(parts)}")
    raise LayoutError(
        f"the shards of {len(wrong)} tensor(s) leave holes, or overlap without being equal; "
        "each element must be held by some rank, in equal boxes where by several:\n"
        + "\n".join(lines)
    )


def _assign(held: _Held, order: Int, counts: Int, itemsize: Int, world: int) -> Share:
    """Choose a writer for every box. In the result, `fragment` counts the rows of `held`."""
    starts = np.cumsum(counts) - counts
    alone = starts[counts == 1]
    rows = order[alone]
    sizes = held.shape[rows].prod(axis=1) * itemsize[held.tensor[rows]]
    loads = np.bincount(held.rank[rows], weights=sizes, minlength=world).astype(np.float64)
    row_parts, offset_parts, shape_parts = [rows], [held.offset[rows]], [held.shape[rows]]
    for holders, groups in _holder_sets(held, order, starts, counts):
        heads = order[starts[groups]]
        replicas = [
            (i, tuple(shape), size)
            for i, (shape, size) in enumerate(
                zip(held.shape[heads].tolist(), itemsize[held.tensor[heads]].tolist(), strict=True)
            )
        ]
        cuts = divide(replicas, holders, loads)
        turn = {rank: k for k, rank in enumerate(holders)}
        group = groups[[cut.replica for cut in cuts]]
        row_parts.append(order[starts[group] + np.array([turn[cut.rank] for cut in cuts])])
        base = held.offset[order[starts[group]]]
        offset_parts.append(base + np.array([cut.box.offset for cut in cuts], np.int64))
        shape_parts.append(np.array([cut.box.shape for cut in cuts], np.int64))
    return Share(
        np.concatenate(row_parts), np.concatenate(offset_parts), np.concatenate(shape_parts)
    )


def _holder_sets(held: _Held, order: Int, starts: Int, counts: Int) -> list[tuple[list[int], Int]]:
    """Groups of replicas by the set of ranks that hold them, the smallest sets first."""
    sets: dict[bytes, list[int]] = {}
    ranks = held.rank[order]
    for group in np.flatnonzero(counts > 1).tolist():
        start = starts[group]
        sets.setdefault(ranks[start : start + counts[group]].tobytes(), []).append(group)
    decoded = [(np.frombuffer(key, np.int64).tolist(), np.array(g)) for key, g in sets.items()]
    return sorted(decoded, key=lambda item: (len(item[0]), item[0]))


def _lay_out(
    held: _Held, writes: Share, ranks: Int, itemsize: Int, files: Int, world: int
) -> tuple[list[Share], Pieces]:
    """Order every rank's boxes as they lie in its file, and say where each begins there.

    Wider types come first, so that every piece is aligned to its own type.
    """
    tensor = held.tensor[writes.fragment]
    size = itemsize[tensor]
    order = np.lexsort([*reversed(writes.offset.T), tensor, -size, ranks])
    rows, ranks, tensor = writes.fragment[order], ranks[order], tensor[order]
    offset, shape = writes.offset[order], writes.shape[order]
    nbytes = shape.prod(axis=1) * size[order]
    ends = np.concatenate([[0], np.cumsum(nbytes)])
    limits = np.searchsorted(ranks, np.arange(world + 1))
    shares = [
        Share(held.fragment[rows[a:b]], offset[a:b], shape[a:b])
        for a, b in zip(limits[:-1].tolist(), limits[1:].tolist(), strict=True)
    ]
    start = ends[:-1] - ends[limits][ranks]
    columns = (tensor, np.searchsorted(files, ranks), start, offset, shape)
    final = np.lexsort([*reversed(offset.T), tensor])
    return shares, Pieces(*(column[final] for column in columns))


def _ties(
    descriptions: Sequence[Description], tensors: Sequence[TensorEntry], index: dict[str, int]
) -> list[TensorEntry]:
    ties: dict[str, TensorEntry] = {}
    for rank, description in enumerate(descriptions):
        for name, same_as in description.ties:
            target = tensors[index[same_as]]
            known = ties.get(name)
            if name in index or (known is not None and known.same_as != same_as):
                raise LayoutError(
                    f"{name} is tied to {same_as} on rank {rank}, and not so on another rank: "
                    "tie it on all ranks, or on none"
                )
            ties[name] = TensorEntry(name, target.dtype, target.shape, (), same_as)
    return list(ties.values())


@dataclass(frozen=True, slots=True)
class Cut:
    """Part of a replica, given to one of its holders: `box` is relative to the replica."""

    replica: int
    rank: int
    box: Box


def fill_levels(loads: Float, amount: float) -> Float:
    """How much of `amount` to pour into each of several vessels so that their levels even out."""
    ordered = np.sort(loads)
    level = amount
    for n in range(1, len(ordered) + 1):
        level = (float(ordered[:n].sum()) + amount) / n
        if n == len(ordered) or level <= ordered[n]:
            break
    poured: Float = np.maximum(level - loads, 0.0)
    return poured


def divide(
    replicas: Sequence[tuple[int, tuple[int, ...], int]],
    holders: Sequence[int],
    loads: Float,
    *,
    grain: int | None = None,
) -> list[Cut]:
    """Give replicas, in their order, to their holders, and cut those that lie on a boundary.

    Each holder gets one contiguous part of the sequence, as long as levels the loads. Replicas
    are cut at multiples of about `grain` bytes, smaller ones not at all; without it the grain is a
    thirty-second of what a holder gets, within bounds.

    Args:
        replicas: index, shape and itemsize of each, all held by the same ranks.
        holders: these ranks.
        loads: bytes that each rank of the world has been given so far; added to in place.
    """
    sizes = [int(np.prod(shape, dtype=np.int64)) * itemsize for _, shape, itemsize in replicas]
    if grain is None:
        part = sum(sizes) // (32 * len(holders))
        grain = max(SMALLEST_GRAIN, min(LARGEST_GRAIN, part))
    ends = np.cumsum(fill_levels(loads[list(holders)], float(sum(sizes)))).tolist()
    ends[-1] = float("inf")
    cuts: list[Cut] = []
    turn = 0
    position = 0
    for (index, shape, itemsize), nbytes in zip(replicas, sizes, strict=True):
        done = 0
        while done < nbytes:
            take = _bytes_to_take(shape, itemsize, done, nbytes, ends[turn] - position, grain)
            boxes = boxes_of_range(shape, done // itemsize, (done + take) // itemsize)
            cuts += [Cut(index, holders[turn], box) for box in boxes]
            loads[holders[turn]] += take
            position += take
            done += take
            if take == 0 or position >= ends[turn] - grain / 2:
                turn += 1
    return cuts


def _bytes_to_take(
    shape: tuple[int, ...], itemsize: int, done: int, nbytes: int, room: float, grain: int
) -> int:
    """How many bytes, from byte `done` on, to take of a replica where there is room for `room`."""
    rest = nbytes - done
    if rest <= room + grain / 2:
        return rest
    unit = itemsize
    for n in reversed(shape):
        if unit * n > grain:
            break
        unit *= n
    unit *= max(1, grain // unit)
    return max(0, min(rest, (done + round(room)) // unit * unit - done))
