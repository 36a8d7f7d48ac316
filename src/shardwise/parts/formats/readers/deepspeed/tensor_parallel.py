"""How the shards of tensor-parallel ranks make up a parameter, by DeepSpeed's own patterns."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeAlias

import msgspec

from shardwise.parts.formats.reader import Box, FormatError
from shardwise.parts.formats.readers.deepspeed.states import Count, Shape, convert_entry

MOST_REPEATS = 3
_REPEATED_GROUP = re.compile(r"\)[*+?{]")
_REPEAT = re.compile(r"(?<!\\)[*+{]")
_MOST_SHAPES_SHOWN = 8
_REPLICATED = "tp_replicated_parameter_patterns"
_AVERAGED = "parameter_to_average_patterns"
_IN_HALVES = "parameter_with_2_sub_params_cat_dim_0"
_ROW_PARALLEL = "parameter_with_row_parallelism_patterns"
"""Parameters that are divided along the second dimension; others are divided along the first."""
_VOCABULARY = "vocabulary_parameter_patterns"
_UNSUPPORTED = "autotp_unsupported_parameter_patterns"
_PATTERN_KEYS = (_REPLICATED, _AVERAGED, _IN_HALVES, _ROW_PARALLEL, _VOCABULARY, _UNSUPPORTED)
_Pattern: TypeAlias = Annotated[str, msgspec.Meta(max_length=1000)]
_PATTERNS = list[_Pattern] | dict[_Pattern, Any] | None
"""A list of patterns of names; or, for unsupported ones, a dict from a pattern to the reason."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the shards of tensor-parallel ranks lie in a parameter.

    Attributes:
        shape: the shape of the whole parameter.
        parts: for each rank, boxes of its shard and their offsets in the parameter. The rest of the
            shard is padding.
        replicated: whether every rank has the whole parameter, with equal values.
        averaged: whether every rank has the whole parameter, with different values. The parameter
            is their mean.
    """

    shape: Shape
    parts: tuple[tuple[tuple[Box, Shape], ...], ...]
    replicated: bool = False
    averaged: bool = False


PlacementRule: TypeAlias = Callable[[str, Sequence[Shape]], Placement]
"""A function of a parameter's name and its shapes on the ranks that returns its placement."""


def place_whole(name: str, shapes: Sequence[Shape], *, averaged: bool = False) -> Placement:
    """Return the placement of a parameter that every rank has whole.

    Raises:
        FormatError: the shapes differ.
    """
    if len(set(shapes)) != 1:
        raise FormatError(
            f"{name}: the ranks should have the same shape, but have {_join_shapes(shapes)}: copy "
            "all files of one save"
        )
    part = ((Box.whole(shapes[0]), (0,) * len(shapes[0])),)
    return Placement(
        shapes[0],
        (part,) * len(shapes),
        replicated=len(shapes) > 1 and not averaged,
        averaged=len(shapes) > 1 and averaged,
    )


def place_side_by_side(
    name: str, shapes: Sequence[Shape], dim: int, widths: Sequence[Sequence[int]] | None = None
) -> Placement:
    """Return the placement of shards that lie side by side along a dimension.

    A shard may hold parts of several parameters that are fused into one tensor.

    Args:
        dim: the dimension.
        widths: for each fused parameter, its width on each rank; by default there is one parameter.

    Raises:
        FormatError: the shards do not fit together.
    """
    other_dims = {shape[:dim] + shape[dim + 1 :] for shape in shapes}
    if len(other_dims) != 1 or any(not dim < len(shape) == len(shapes[0]) for shape in shapes):
        raise FormatError(
            f"{name}: shards of the shapes {_join_shapes(shapes)} do not join along dimension "
            f"{dim}; copy the files of all ranks of one save, or describe them in a specification "
            "(spec=)"
        )
    shard_widths = [shape[dim] for shape in shapes]
    widths = [shard_widths] if widths is None else widths
    if [
        sum(part_widths[rank] for part_widths in widths) for rank in range(len(shapes))
    ] != shard_widths:
        raise FormatError(
            f"{name}: along dimension {dim}, shards of the shapes {_join_shapes(shapes)} do not "
            f"consist of fused parameters with these widths on the ranks: {widths}; "
            "copy the files of all ranks of one save, or describe them in a specification (spec=)"
        )
    starts = list(
        itertools.accumulate([width for part_widths in widths for width in part_widths], initial=0)
    )
    parts = []
    for rank, shape in enumerate(shapes):
        boxes, local_start = [], 0
        for index, part_widths in enumerate(widths):
            zeros = [0] * len(shape)
            offset, extent, global_offset = list(zeros), list(shape), list(zeros)
            offset[dim], extent[dim] = local_start, part_widths[rank]
            global_offset[dim] = starts[index * len(shapes) + rank]
            local_start += part_widths[rank]
            boxes.append((Box(tuple(offset), tuple(extent)), tuple(global_offset)))
        parts.append(tuple(boxes))
    shape = (*shapes[0][:dim], starts[-1], *shapes[0][dim + 1 :])
    return Placement(shape, tuple(parts))


def drop_padding_rows(name: str, placement: Placement, rows: object) -> Placement:
    """Return the placement of the first `rows` rows only. The rows after them pad a vocabulary.

    Raises:
        FormatError: there are fewer rows, or their number is unknown.
    """
    if type(rows) is not int or rows < 0:
        raise FormatError(
            f"{name}: the vocabulary is padded, and original_vocab_size is missing from "
            "universal_checkpoint_info: save again with a program that writes it, such as "
            "Megatron-DeepSpeed"
        )
    if not placement.shape or placement.shape[0] < rows:
        raise FormatError(
            f"{name}: its shape {list(placement.shape)} has fewer rows than the original "
            f"vocabulary, {rows}: the files are from different saves: copy all files of one save"
        )
    parts = []
    for boxes in placement.parts:
        kept = []
        for box, offset in boxes:
            count = max(0, min(box.shape[0], rows - offset[0]))
            kept.append((Box(box.offset, (count, *box.shape[1:])), offset))
        parts.append(tuple(kept))
    return replace(placement, shape=(rows, *placement.shape[1:]), parts=tuple(parts))


def parse_placement_rule(info: object, path: str) -> PlacementRule:
    """Return the rule that a checkpoint's `universal_checkpoint_info` describes.

    Args:
        info: the value of that key.
        path: the path of the checkpoint, for messages.

    Raises:
        FormatError: it is missing or malformed. The returned rule raises it if the shards of a
            parameter do not fit together.
    """
    if not isinstance(info, Mapping):
        raise FormatError(
            f"{path}: tensor-parallel ranks wrote this checkpoint, and it does not say how their "
            "shards make up parameters: save it with a `universal_checkpoint_info` in "
            "client_state, which DeepSpeed's own converter needs too"
        )
    patterns = {
        key: [
            _compile(pattern, f"{path}: {key}")
            for pattern in convert_entry(info, path, key, _PATTERNS) or ()
        ]
        for key in _PATTERN_KEYS
    }
    fused, rows = _parse_fused(info, path), info.get("original_vocab_size")

    def matches(name: str, key: str) -> bool:
        return any(pattern.match(name) for pattern in patterns[key])

    def place_unpadded(name: str, shapes: Sequence[Shape]) -> Placement:
        if matches(name, _UNSUPPORTED):
            raise FormatError(
                f"{name}: the checkpoint says that its shards cannot be joined ({_UNSUPPORTED})"
            )
        if matches(name, _REPLICATED) or matches(name, _AVERAGED):
            return place_whole(name, shapes, averaged=not matches(name, _REPLICATED))
        if matches(name, _IN_HALVES):
            halves = [_half_of_rows(shape, name) for shape in shapes]
            return place_side_by_side(name, shapes, 0, [halves, halves])
        if rule := next((rule for rule in fused if rule.pattern.match(name)), None):
            widths = rule.compute_widths(name, shapes)
            return place_side_by_side(name, shapes, rule.dim, widths)
        return place_side_by_side(name, shapes, 1 if matches(name, _ROW_PARALLEL) else 0)

    def place(name: str, shapes: Sequence[Shape]) -> Placement:
        try:
            placement = place_unpadded(name, shapes)
            if not matches(name, _VOCABULARY):
                return placement
            return drop_padding_rows(name, placement, rows)
        except FormatError as error:
            raise FormatError(
                f"{path}: {error}. If the files are from different saves, copy all files of one "
                "save; else correct universal_checkpoint_info in client_state, and save again"
            ) from error

    return place


@dataclass(frozen=True, slots=True)
class _FusedRule:
    """A rule for tensors that consist of several parameters, fused along a dimension.

    Attributes:
        pattern: the names of the tensors.
        dim: the dimension.
        sizes: the whole widths of the parameters, or their number if the widths are equal.
        shard_widths: for each parameter, its width on each rank; None if the widths are equal.
    """

    pattern: re.Pattern[str]
    dim: int
    sizes: Sequence[int] | int
    shard_widths: Sequence[Sequence[int]] | None

    def compute_widths(self, name: str, shapes: Sequence[Shape]) -> Sequence[Sequence[int]]:
        """Return, for each fused parameter, its width on each rank.

        Raises:
            FormatError: the rule does not fit the shapes.
        """
        if self.shard_widths is not None:
            if any(len(row) != len(shapes) for row in self.shard_widths):
                raise FormatError(
                    f"{name}: sub_param_shard_widths should have {len(shapes)} widths for each "
                    "fused parameter, one for each rank, but has "
                    f"{[len(row) for row in self.shard_widths][:8]}"
                )
            return self.shard_widths
        if any(len(shape) <= self.dim for shape in shapes):
            raise FormatError(
                f"{name}: parameter_with_sub_params says partition_dim {self.dim}, but the shards "
                f"have the shapes {_join_shapes(shapes)}"
            )
        sizes = self.sizes
        if isinstance(sizes, int):
            total = sum(shape[self.dim] for shape in shapes)
            if sizes < 1 or total % sizes:
                raise FormatError(
                    f"{name}: parameter_with_sub_params says that dimension {self.dim} consists of "
                    f"{sizes} equal parts, but its size is {total}"
                )
            sizes = [total // sizes] * sizes
        if any(size % len(shapes) for size in sizes):
            raise FormatError(
                f"{name}: parameter_with_sub_params says that the fused parameters have the widths "
                f"{list(sizes)}, which cannot be divided evenly among {len(shapes)} ranks"
            )
        return [[size // len(shapes)] * len(shapes) for size in sizes]


def _parse_fused(info: Mapping[Any, Any], path: str) -> list[_FusedRule]:
    all_widths_type = dict[str, list[list[Count]]] | None
    all_widths = convert_entry(info, path, "sub_param_shard_widths", all_widths_type) or {}
    rules = []
    label = f"{path}: parameter_with_sub_params"
    for entry in convert_entry(info, path, "parameter_with_sub_params", list[Any] | None) or ():
        fields = entry if isinstance(entry, Mapping) else getattr(entry, "fields", {})
        dim = convert_entry(fields, label, "partition_dim", Count)
        shape = convert_entry(fields, label, "shape", list[int | list[Count]])
        if dim >= len(shape):
            raise FormatError(
                f"{label}: partition_dim is {dim}, but the shape has {len(shape)} dimensions: copy "
                "the file again from an intact source"
            )
        for pattern in convert_entry(fields, label, "patterns", _PATTERNS) or ():
            compiled, widths = _compile(pattern, label), all_widths.get(pattern)
            rules.append(_FusedRule(compiled, dim, shape[dim], widths))
    return rules


def _compile(pattern: str, label: str) -> re.Pattern[str]:
    # Matching a hostile pattern could take forever.
    if _REPEATED_GROUP.search(pattern) or len(_REPEAT.findall(pattern)) > MOST_REPEATS:
        raise FormatError(
            f"{label}: the pattern {pattern[:80]!r} has too many repetitions to be matched safely: "
            "load the checkpoint with DeepSpeed, and save it again"
        )
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise FormatError(
            f"{label}: {pattern[:80]!r} is not a valid pattern: {error}; copy the file again from "
            "an intact source"
        ) from error


def _half_of_rows(shape: Shape, name: str) -> int:
    if not shape or shape[0] % 2:
        raise FormatError(f"{name}: a shard of {list(shape)} does not divide into two equal halves")
    return shape[0] // 2


def _join_shapes(shapes: Sequence[Shape]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes[:_MOST_SHAPES_SHOWN])
