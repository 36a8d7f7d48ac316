"""Apply a specification to the arrays in the files of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np

from shardwise.errors import LayoutError, MismatchError
from shardwise.formats.foreign import Catalogue
from shardwise.formats.language.arithmetic import Environment, NumberOrList
from shardwise.formats.language.array_groups import (
    ArrayGroup,
    Shares,
    compute_tensor_shape,
    group_by_shape,
    locate_shares,
    map_array,
    repeat_split_arrays,
    resolve_ragged_axes,
)
from shardwise.formats.language.assemble import assemble_checkpoint
from shardwise.formats.language.boxes import BoxTable, find_relative_boxes, place_boxes
from shardwise.formats.language.match import (
    add_capture_sizes,
    evaluate_lets,
    evaluate_rule_sizes,
    match_rules,
    sizes_of_rank_axes,
)
from shardwise.formats.language.rules import DimensionMap, Rule, Spec, Target, map_dimensions
from shardwise.formats.language.shapes import size_of
from shardwise.formats.language.tensor_collector import Collector
from shardwise.layout import Box
from shardwise.layout.columns import Int
from shardwise.layout.flat import boxes_within, row_major
from shardwise.manifest.layout import Layout

NO_DIMENSIONS = DimensionMap((), (), (), frozenset(), ())


def apply_spec(
    spec: Spec,
    catalogue: Catalogue,
    *,
    sizes: Mapping[str, int] | None = None,
    checkpoint: str = "the checkpoint",
) -> Layout:
    """Return the checkpoint that a specification makes of the arrays of all ranks.

    Every element of every tensor is there exactly once, apart from replicas and averages. Every
    stored array is used or skipped.

    Args:
        sizes: values for numbers that the specification declares with `let`. They override the
            declared values.
        checkpoint: the path of the checkpoint, for messages.

    Raises:
        MismatchError: the specification does not fit; `problems` lists everything that is wrong.
    """
    try:
        environment = Environment(
            sizes=sizes_of_rank_axes(spec, catalogue.axes),
            constants=evaluate_lets(spec, sizes or {}),
        )
        matches = match_rules(spec, catalogue, environment)
        environment = add_capture_sizes(spec, catalogue, matches, environment)
    except MismatchError as error:
        raise _mismatch_error(spec, checkpoint, error.problems) from error
    except LayoutError as error:
        raise _mismatch_error(spec, checkpoint, [str(error)]) from error
    collector = Collector(spec, catalogue, matches, environment)
    for rule_index, rule in enumerate(spec.rules):
        if isinstance(rule, Rule) and len(matches.rows[rule_index]):
            _apply_rule(collector, rule_index, rule)
    foreign = assemble_checkpoint(collector)
    if collector.problems:
        raise _mismatch_error(spec, checkpoint, collector.problems)
    return foreign


def _mismatch_error(spec: Spec, checkpoint: str, problems: list[str]) -> MismatchError:
    summary = (
        f"{spec.source.source} does not fit {checkpoint}: correct the specification, or copy the "
        "checkpoint again if files are missing:"
    )
    return MismatchError(summary, list(dict.fromkeys(problems)))


def _apply_rule(collector: Collector, rule_index: int, rule: Rule) -> None:
    try:
        declared_sizes = evaluate_rule_sizes(rule, collector.environment)
    except LayoutError as error:
        collector.problems.append(f"{collector.source_line(rule)}: {error}")
        return
    if rule.flat_axes:
        _apply_flat_rule(collector, rule_index, rule, declared_sizes)
        return
    shares = {name: size for name, size in declared_sizes.items() if isinstance(size, tuple)}
    for target in rule.targets:
        groups = _group_arrays(collector, rule_index, rule, target, declared_sizes)
        for group in resolve_ragged_axes(groups, shares, collector.report_tensor):
            _add_boxes(collector, rule, group)


def _group_arrays(
    collector: Collector,
    rule_index: int,
    rule: Rule,
    target: Target,
    declared_sizes: Mapping[str, NumberOrList],
) -> list[ArrayGroup]:
    """Group a rule's arrays by shape. Report arrays whose shape does not fit."""
    rows = collector.matches.rows[rule_index]
    catalogue = collector.catalogue
    positions = collector.positions(rule_index)
    known_sizes = collector.known_sizes(rule, declared_sizes)
    groups = []
    for indices in group_by_shape(catalogue, rows):
        first = int(rows[indices[0]])
        ndim = int(catalogue.ndim[first])
        array_shape = tuple(catalogue.shape[first, :ndim].tolist())
        strides = tuple(catalogue.stride[first, :ndim].tolist())
        group_rows = rows[indices]
        try:
            dimension_map, sizes = map_array(collector.spec, rule, target, array_shape, known_sizes)
            group = ArrayGroup(
                group_rows,
                {axis: column[indices] for axis, column in positions.items()},
                dimension_map,
                sizes,
                strides,
                tensor=np.zeros_like(group_rows),
            )
            group = repeat_split_arrays(group)
            tensor = collector.add_tensors(rule_index, rule, target, group)
        except LayoutError as error:
            collector.report_arrays(group_rows, rule, f"{list(array_shape)}: {error}")
            continue
        groups.append(replace(group, tensor=tensor))
    return groups


def _add_boxes(collector: Collector, rule: Rule, group: ArrayGroup) -> None:
    dimension_map = group.dimension_map
    try:
        shape = compute_tensor_shape(dimension_map.tensor_dims, group.sizes, collector.environment)
        collector.arrays.append((group.tensor, group.rows, shape))
        tensor_shape = np.array(shape, np.int64)
        for boxes in find_relative_boxes(dimension_map, group.sizes, group.strides):
            collector.boxes.append(
                place_boxes(boxes, group.rows, group.tensor, group.positions, tensor_shape)
            )
    except LayoutError as error:
        collector.report_arrays(group.rows, rule, str(error))


def _apply_flat_rule(
    collector: Collector, rule_index: int, rule: Rule, declared_sizes: Mapping[str, NumberOrList]
) -> None:
    """Apply a `flat over` rule.

    Its tensors are flattened and concatenated, with padding at the end. Its arrays are consecutive
    ranges of the result.
    """
    catalogue, rows = collector.catalogue, collector.matches.rows[rule_index]
    is_strided = (catalogue.ndim[rows] != 1) | (catalogue.stride[rows, 0] != 1)
    is_strided &= catalogue.shape[rows].prod(axis=1) > 1
    if is_strided.any():
        problem = (
            "an array of a `flat` rule must be contiguous and have one dimension; remove the "
            "clause `flat over`"
        )
        collector.report_arrays(rows[is_strided], rule, problem)
        return
    ranges = _locate_flat_ranges(collector, rule_index, rule)
    tensor_start = 0
    try:
        for target in rule.targets:
            array_starts = ranges.start - tensor_start
            tensor_start += _add_flat_boxes(
                collector, rule_index, rule, target, declared_sizes, array_starts
            )
    except LayoutError as error:
        collector.report_arrays(rows, rule, str(error))
        return
    is_too_short = tensor_start > ranges.total
    if is_too_short.any():
        total = ranges.total[is_too_short][0]
        problem = f"the tensors have {tensor_start} elements, but the arrays have only {total}"
        collector.report_arrays(rows[is_too_short], rule, problem)


def _locate_flat_ranges(collector: Collector, rule_index: int, rule: Rule) -> Shares:
    """Find where each array begins in the concatenated tensors."""
    catalogue, rows = collector.catalogue, collector.matches.rows[rule_index]
    environment = collector.environment
    group, position, count = catalogue.name[rows], np.zeros_like(rows), 1
    positions = collector.positions(rule_index)
    for axis in sorted(collector.spec.rank_axes - set(rule.flat_axes)):
        group = group * environment.size_of(axis) + positions[axis]
    for axis in rule.flat_axes:
        count *= environment.size_of(axis)
        position = position * environment.size_of(axis) + positions[axis]
    shares = locate_shares(group, position, catalogue.shape[rows].prod(axis=1), count)
    for wrong_groups, problem in (
        (
            shares.unequal_groups,
            "ranks at the same position have ranges of different sizes; add the axis that "
            "distinguishes them to `flat over`",
        ),
        (shares.incomplete_groups, "the range of a rank is missing; copy the files of all ranks"),
    ):
        if len(wrong_groups):
            collector.report_arrays(rows[np.isin(group, wrong_groups)], rule, problem)
    return shares


def _add_flat_boxes(
    collector: Collector,
    rule_index: int,
    rule: Rule,
    target: Target,
    declared_sizes: Mapping[str, NumberOrList],
    array_starts: Int,
) -> int:
    """Add the boxes of one tensor of a flat rule; return the number of its elements.

    Args:
        array_starts: the offset of each array in the tensor, in elements.
    """
    rows = collector.matches.rows[rule_index]
    dimension_map, sizes = _map_flat_array(collector, rule, target, declared_sizes)
    dim_sizes = [size_of(dim, sizes) or 0 for dim in dimension_map.array_dims]
    strides = row_major(np.array([dim_sizes], np.int64))[0].tolist()
    shape = compute_tensor_shape(dimension_map.tensor_dims, sizes, collector.environment)
    positions = collector.positions(rule_index)
    group = ArrayGroup(rows, positions, NO_DIMENSIONS, collector.environment.sizes, (), rows)
    tensor = collector.add_tensors(rule_index, rule, target, group)
    collector.arrays.append((tensor, rows, shape))
    lengths = collector.catalogue.shape[rows].prod(axis=1)
    pairs = zip(array_starts.tolist(), lengths.tolist(), strict=True)
    ranges = dict(zip(rows.tolist(), pairs, strict=True))
    for boxes in find_relative_boxes(dimension_map, sizes, strides):
        table = place_boxes(boxes, rows, tensor, positions, np.array(shape))
        collector.boxes.append(_clip_boxes(table, ranges))
    return int(np.prod(dim_sizes, dtype=np.int64))


def _map_flat_array(
    collector: Collector, rule: Rule, target: Target, declared_sizes: Mapping[str, NumberOrList]
) -> tuple[DimensionMap, dict[str, int]]:
    """Return the map from dimensions of the unflattened array to a target, and all axis sizes."""
    dimension_map = map_dimensions(collector.spec, rule, target, ellipsis_dims=0)
    if dimension_map.ragged_axes:
        names = ", ".join(axis.start_key for axis in dimension_map.ragged_axes)
        raise LayoutError(
            f"a tensor of a `flat` rule cannot have a ragged axis: remove the `~` of {names}, or "
            "the clause `flat over`"
        )
    known_sizes = collector.known_sizes(rule, declared_sizes)
    sizes = {name: size for name, size in known_sizes.items() if isinstance(size, int)}
    has_unknown_size = any(size_of(dim, sizes) is None for dim in dimension_map.array_dims)
    if has_unknown_size or rule.shape_of(target).ellipsis is not None:
        raise LayoutError(
            "the shapes of the tensors of a `flat` rule do not follow from the arrays: give "
            "dimensions in brackets, and their sizes with `where`"
        )
    return dimension_map, sizes


def _clip_boxes(boxes: BoxTable, ranges: Mapping[int, tuple[int, int]]) -> BoxTable:
    """Clip boxes to the range of elements that each array has.

    Args:
        ranges: for each row of the catalogue, the first element and the number of elements.
    """
    clipped = []
    columns = boxes.array_row, boxes.start, boxes.offset, boxes.shape, boxes.stride
    for i, (row, start, offset, shape, stride) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        first, length = ranges[row]
        low, high = first - start, first + length - start
        for box in _boxes_within(tuple(shape), tuple(stride), low, high):
            skipped_elements = sum(a * b for a, b in zip(box.offset, stride, strict=True))
            new_offset = [a + b for a, b in zip(offset, box.offset, strict=True)]
            clipped.append((i, start + skipped_elements - first, *new_offset, *box.shape))
    dims = boxes.offset.shape[1]
    table = np.array(clipped, np.int64).reshape(len(clipped), 2 + 2 * dims)
    source = table[:, 0]
    return BoxTable(
        boxes.tensor[source],
        boxes.array_row[source],
        table[:, 1],
        table[:, 2 : 2 + dims],
        table[:, 2 + dims :],
        boxes.stride[source],
    )


@lru_cache(maxsize=4096)
def _boxes_within(
    shape: tuple[int, ...], stride: tuple[int, ...], low: int, high: int
) -> list[Box]:
    return boxes_within(shape, stride, 1, low, high)
