"""How the shards of tensor-parallel ranks make up a parameter, by DeepSpeed's own patterns."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from shardwise.errors import FormatError
from shardwise.formats.build import Builder
from shardwise.formats.foreign import StoredArray
from shardwise.layout import Box
from shardwise.manifest.table import Int

Shape: TypeAlias = tuple[int, ...]

LONGEST_PATTERN = 1000
MOST_REPEATS = 3
_REPEATED_GROUP = re.compile(r"\)[*+?{]")
_REPEAT = re.compile(r"(?<!\\)[*+{]")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the shards of tensor-parallel ranks lie in a parameter.

    Attributes:
        shape: the shape of the whole parameter.
        parts: for each rank, boxes of its shard and their offsets in the parameter. Elements of the
            shard that are in no box are padding.
        replicated: every rank has the whole parameter, with equal values.
        averaged: every rank has the whole parameter, with its own values; the parameter is their
            mean.
    """

    shape: Shape
    parts: tuple[tuple[tuple[Box, Shape], ...], ...]
    replicated: bool = False
    averaged: bool = False


Place: TypeAlias = Callable[[str, Sequence[Shape]], Placement]
"""Returns the placement of a parameter, given its name and its shape on each rank."""


def whole(name: str, shapes: Sequence[Shape], *, averaged: bool = False) -> Placement:
    """Return the placement of a parameter that every rank has whole.

    Raises:
        FormatError: the shapes differ.
    """
    if len(set(shapes)) != 1:
        raise FormatError(
            f"{name}: the ranks should have the same shape, but have {_listed(shapes)}"
        )
    part = ((Box.whole(shapes[0]), (0,) * len(shapes[0])),)
    return Placement(
        shapes[0],
        (part,) * len(shapes),
        replicated=len(shapes) > 1 and not averaged,
        averaged=len(shapes) > 1 and averaged,
    )


def side_by_side(
    name: str, shapes: Sequence[Shape], dim: int, widths: Sequence[Sequence[int]]
) -> Placement:
    """Return the placement of shards that lie side by side along `dim`.

    A shard may hold parts of several parameters that are fused into one tensor.

    Args:
        widths: for each fused parameter, its width on each rank.

    Raises:
        FormatError: the shards do not fit together.
    """
    others = {shape[:dim] + shape[dim + 1 :] for shape in shapes}
    if len(others) != 1 or len({len(shape) for shape in shapes}) != 1 or dim >= len(shapes[0]):
        raise FormatError(f"{name}: shards of {_listed(shapes)} do not join along dimension {dim}")
    sums = [sum(row[rank] for row in widths) for rank in range(len(shapes))]
    if sums != [shape[dim] for shape in shapes]:
        raise FormatError(f"{name}: shards of {_listed(shapes)} do not have the widths {widths}")
    starts = list(itertools.accumulate([width for row in widths for width in row], initial=0))
    parts = []
    for rank, shape in enumerate(shapes):
        boxes, at = [], 0
        for index, row in enumerate(widths):
            zeros = [0] * len(shape)
            offset, extent, there = list(zeros), list(shape), list(zeros)
            offset[dim], extent[dim] = at, row[rank]
            there[dim] = starts[index * len(shapes) + rank]
            at += row[rank]
            boxes.append((Box(tuple(offset), tuple(extent)), tuple(there)))
        parts.append(tuple(boxes))
    shape = (*shapes[0][:dim], starts[-1], *shapes[0][dim + 1 :])
    return Placement(shape, tuple(parts))


def cut_to_rows(name: str, placement: Placement, rows: int) -> Placement:
    """Return the placement without the rows after the first `rows`, which pad a vocabulary.

    Raises:
        FormatError: there are fewer rows.
    """
    if not placement.shape or placement.shape[0] < rows:
        raise FormatError(
            f"{name}: its shape {list(placement.shape)} has fewer rows than the original "
            f"vocabulary, {rows}"
        )
    parts = []
    for boxes in placement.parts:
        kept = []
        for box, there in boxes:
            count = max(0, min(box.shape[0], rows - there[0]))
            kept.append((Box(box.offset, (count, *box.shape[1:])), there))
        parts.append(tuple(kept))
    shape = (rows, *placement.shape[1:])
    return Placement(shape, tuple(parts), placement.replicated, placement.averaged)


def place_of(info: object, where: str) -> Place:
    """Return the placements that a checkpoint's `universal_checkpoint_info` describes.

    Raises:
        FormatError: it is missing or malformed; the returned function, if it does not fit the
            shards.
    """
    if not isinstance(info, Mapping):
        raise FormatError(
            f"{where}: tensor-parallel ranks wrote this checkpoint, and it does not say how their "
            "shards make up parameters: save it with a `universal_checkpoint_info` in "
            "client_state, which DeepSpeed's own converter needs too"
        )
    replicated = _patterns(info, "tp_replicated_parameter_patterns", where)
    averaged = _patterns(info, "parameter_to_average_patterns", where)
    halved = _patterns(info, "parameter_with_2_sub_params_cat_dim_0", where)
    by_row = _patterns(info, "parameter_with_row_parallelism_patterns", where)
    vocabulary = _patterns(info, "vocabulary_parameter_patterns", where)
    unsupported = _patterns(info, "autotp_unsupported_parameter_patterns", where)
    fused = _fused(info, where)
    rows = info.get("original_vocab_size")

    def place(name: str, shapes: Sequence[Shape]) -> Placement:
        if _matches(unsupported, name):
            raise FormatError(
                f"{name}: the checkpoint says that its shards cannot be joined (autotp_unsupported)"
            )
        if _matches(replicated, name):
            made = whole(name, shapes)
        elif _matches(averaged, name):
            made = whole(name, shapes, averaged=True)
        elif _matches(halved, name):
            widths = [_first(shape, name) // 2 for shape in shapes]
            made = side_by_side(name, shapes, 0, [widths, widths])
        elif sub := next((sub for sub in fused if sub.pattern.match(name)), None):
            made = side_by_side(name, shapes, sub.dim, sub.widths(name, shapes))
        else:
            dim = 1 if _matches(by_row, name) else 0
            if any(len(shape) <= dim for shape in shapes):
                raise FormatError(f"{name}: shards of {_listed(shapes)} do not join along {dim}")
            made = side_by_side(name, shapes, dim, [[shape[dim] for shape in shapes]])
        if not _matches(vocabulary, name):
            return made
        if type(rows) is not int or rows < 0:
            raise FormatError(
                f"{where}: the vocabulary is padded, and original_vocab_size is missing"
            )
        return cut_to_rows(name, made, rows)

    return place


def declare(builder: Builder, name: str, dtype: str, placement: Placement) -> Int:
    """Add a tensor unless it is there, and return its number for each rank.

    The ranks of a parameter that is averaged each have a hidden tensor of their own.

    Raises:
        FormatError: the shape is too large.
    """
    ranks = range(len(placement.parts))
    if name not in builder:
        builder.add_tensor(name, dtype, placement.shape)
    if not placement.averaged:
        return np.full(len(ranks), builder.number(name))
    if name not in builder.averages:
        hidden = tuple(f"{name}.of_rank_{rank}" for rank in ranks)
        builder.averages[name] = hidden
        for each in hidden:
            builder.add_tensor(each, dtype, placement.shape)
    return np.array([builder.number(each) for each in builder.averages[name]], np.int64)


def add_shards(
    builder: Builder, name: str, arrays: Sequence[StoredArray], placement: Placement
) -> None:
    """Add a tensor of the ranks' shards; if it is there already, add them as replicas.

    Raises:
        FormatError: dtypes differ, or the tensor is there with another dtype or shape.
    """
    dtype = arrays[0].dtype
    found = {array.dtype for array in arrays}
    replica = name in builder
    if replica:
        entry = builder.entry(name)
        if (entry.dtype, entry.shape) != (dtype, placement.shape):
            found.add(f"{entry.dtype} {list(entry.shape)}")
    if len(found) > 1:
        raise FormatError(f"{name}: ranks differ: {', '.join(sorted(found))}")
    tensors = declare(builder, name, dtype, placement)
    for rank, (array, boxes) in enumerate(zip(arrays, placement.parts, strict=True)):
        again = replica or (placement.replicated and rank > 0)
        for box, offset in boxes:
            if box.size:
                builder.add_box(int(tensors[rank]), offset, array, box, replica=again)


@dataclass(frozen=True, slots=True)
class _Fused:
    """Parameters fused along `dim`; `sizes` are their widths, or their number if they are equal."""

    pattern: re.Pattern[str]
    dim: int
    sizes: tuple[int, ...] | int
    recorded: tuple[tuple[int, ...], ...] | None

    def widths(self, name: str, shapes: Sequence[Shape]) -> Sequence[Sequence[int]]:
        if self.recorded is not None:
            if any(len(row) != len(shapes) for row in self.recorded):
                raise FormatError(f"{name}: its recorded widths are not for {len(shapes)} ranks")
            return self.recorded
        if any(len(shape) <= self.dim for shape in shapes):
            raise FormatError(f"{name}: shards of {_listed(shapes)} have no dimension {self.dim}")
        sizes = self.sizes
        if isinstance(sizes, int):
            total = sum(shape[self.dim] for shape in shapes)
            if sizes < 1 or total % sizes:
                raise FormatError(
                    f"{name}: a width of {total} does not divide into {sizes} equal parts"
                )
            sizes = (total // sizes,) * sizes
        if any(size % len(shapes) for size in sizes):
            raise FormatError(
                f"{name}: widths of {list(sizes)} do not divide by {len(shapes)} ranks"
            )
        return [[size // len(shapes)] * len(shapes) for size in sizes]


def _fused(info: Mapping[Any, Any], where: str) -> list[_Fused]:
    recorded = info.get("sub_param_shard_widths") or {}
    found = []
    for entry in info.get("parameter_with_sub_params") or ():
        fields = entry if isinstance(entry, Mapping) else getattr(entry, "fields", {})
        dim, shape = fields.get("partition_dim"), fields.get("shape")
        if (
            type(dim) is not int
            or not isinstance(shape, (tuple, list))
            or not 0 <= dim < len(shape)
        ):
            raise FormatError(f"{where}: parameter_with_sub_params is malformed")
        for pattern in fields.get("patterns") or ():
            known = recorded.get(pattern) if isinstance(recorded, Mapping) else None
            widths = None if known is None else tuple(_counts(row, where) for row in known)
            sizes = shape[dim]
            sizes = sizes if type(sizes) is int else _counts(sizes, where)
            found.append(_Fused(_compiled(pattern, where), dim, sizes, widths))
    return found


def _patterns(info: Mapping[Any, Any], key: str, where: str) -> tuple[re.Pattern[str], ...]:
    listed = info.get(key) or ()
    if not isinstance(listed, (list, tuple)):
        raise FormatError(f"{where}: {key} is not a list")
    return tuple(_compiled(pattern, where) for pattern in listed)


def _compiled(pattern: object, where: str) -> re.Pattern[str]:
    if not isinstance(pattern, str) or len(pattern) > LONGEST_PATTERN:
        raise FormatError(
            f"{where}: a pattern of parameter names is not a string of up to {LONGEST_PATTERN} "
            "characters"
        )
    # Matching a hostile pattern could take forever.
    if _REPEATED_GROUP.search(pattern) or len(_REPEAT.findall(pattern)) > MOST_REPEATS:
        raise FormatError(
            f"{where}: the pattern {pattern[:80]!r} has too many repetitions to be matched safely"
        )
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise FormatError(f"{where}: {pattern[:80]!r} is not a valid pattern: {error}") from error


def _counts(values: object, where: str) -> tuple[int, ...]:
    if not isinstance(values, (list, tuple)) or not all(type(n) is int and n >= 0 for n in values):
        raise FormatError(f"{where}: the widths of fused parameters are not counts")
    return tuple(values)


def _matches(patterns: Sequence[re.Pattern[str]], name: str) -> bool:
    return any(pattern.match(name) for pattern in patterns)


def _first(shape: Shape, name: str) -> int:
    if not shape or shape[0] % 2:
        raise FormatError(f"{name}: a shard of {list(shape)} does not divide into two equal halves")
    return shape[0]


def _listed(shapes: Sequence[Shape]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes[:8])
