"""Adds the state of optimizers that ZeRO does not divide, and assigns it to parameters by shape."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardwise.formats.reader import Builder, FormatError, ParamGroup, StoredArray
from shardwise.formats.readers.deepspeed.manifest import (
    add_flat_group,
    add_param_groups,
    add_state,
    tensor_name,
)
from shardwise.formats.readers.deepspeed.states import (
    ModelState,
    OptimizerState,
    Shape,
    parse_undivided_optimizer,
)
from shardwise.formats.readers.deepspeed.tensor_parallel import PlacementRule
from shardwise.formats.readers.deepspeed.zero import MASTER, find_flat_groups

MOST_PREFIXES = 10_000
"""The most prefixes that `assign_by_shape` follows for each parameter. With more, it gives up."""


def add_undivided_optimizer(
    builder: Builder,
    states: Sequence[ModelState],
    parameters: Mapping[str, Shape],
    placement_rule: PlacementRule,
) -> None:
    """Add the state of an optimizer without ZeRO, and its master weights if there are any.

    The checkpoint does not store the names in each param group. They are inferred from the shapes,
    if only one assignment is possible. Otherwise the state is left out.

    Args:
        states: the model states of all tensor-parallel ranks, with optimizers.
        parameters: names and shapes of all parameters that may be trained, on the first rank, in
            the module's order.

    Raises:
        FormatError: the state is malformed, or does not fit these parameters.
    """
    ranks = [parse_undivided_optimizer(each.optimizer or {}, each.path) for each in states]
    first = ranks[0]
    group_names = _infer_group_names(first, parameters)
    if group_names is None:
        builder.left_out.append(
            "optimizer.*: the checkpoint does not name the optimizer's parameters, and their "
            "shapes are ambiguous: load it with DeepSpeed, and save it with sw.save"
        )
        return
    if first.partition_counts:  # flat, as under ZeRO 1 with a single data-parallel rank
        shapes = [{name: parameters[name] for name in group} for group in group_names]
        shards = [find_flat_groups(shapes, [each], data_before_experts=False) for each in ranks]
        for groups in zip(*shards, strict=True):
            add_flat_group(builder, groups, placement_rule)
    else:
        _add_parameters(
            builder, ranks, [name for group in group_names for name in group], placement_rule
        )
    add_param_groups(
        builder,
        [
            ParamGroup(tuple(group), hyperparameters)
            for group, hyperparameters in zip(group_names, first.hyperparameters or (), strict=True)
        ],
    )


def _infer_group_names(
    optimizer: OptimizerState, parameters: Mapping[str, Shape]
) -> list[list[str]] | None:
    """Return the names in each param group, if the shapes determine them."""
    groups: list[list[Shape | None]] = [[] for _ in optimizer.hyperparameters or ()]
    if optimizer.partition_counts:
        size = sum(math.prod(shape) for shape in parameters.values())
        has_all = [master.shape for master in optimizer.masters] == [(size,)]
        return [list(parameters)] if has_all and len(groups) == 1 else None
    for index, (group, state) in enumerate(
        zip(optimizer.param_group_of, optimizer.states, strict=True)
    ):
        shapes = [array.shape for array in state.values() if isinstance(array, StoredArray)]
        if optimizer.masters:
            shapes = [optimizer.masters[index].shape]
        # A frozen parameter has no state. The order of the others tells which one it is.
        groups[group].append(max(shapes, key=len) if shapes else None)
    return assign_by_shape(list(parameters.items()), groups)


def _add_parameters(
    builder: Builder,
    ranks: Sequence[OptimizerState],
    names: Sequence[str],
    placement_rule: PlacementRule,
) -> None:
    first = ranks[0]
    for rank in ranks:
        if len(rank.states) != len(names):
            raise FormatError(
                f"{rank.path}: the optimizer has state of {len(rank.states)} parameters, but of "
                f"{len(names)} in {first.path}: the files are from different saves: copy all files "
                "of one save"
            )
    for index, name in enumerate(names):
        if first.masters:
            add_state(
                builder, name, MASTER, [rank.masters[index] for rank in ranks], placement_rule
            )
        for key, value in first.states[index].items():
            tensor = tensor_name(name, key)
            values: list[Any] = [rank.states[index].get(key) for rank in ranks]
            is_array = isinstance(value, StoredArray)
            for rank, other in zip(ranks, values, strict=True):
                if is_array and not isinstance(other, StoredArray):
                    raise FormatError(
                        f"{rank.path}: {tensor} is missing, which {first.path} has: the files are "
                        "from different saves: copy all files of one save"
                    )
            if not is_array and any(other != value for other in values):
                builder.left_out.append(f"{tensor}: ranks differ; the first one's is taken")
            add_state(builder, name, key, values if is_array else [value], placement_rule)


def assign_by_shape(
    parameters: Sequence[tuple[str, Shape]], groups: Sequence[Sequence[Shape | None]]
) -> list[list[str]] | None:
    """Return the names of the members of groups, if their shapes allow exactly one assignment.

    Each group has its members in the order of the module. A parameter may be in no group: for
    example, if it is frozen.

    Args:
        parameters: the name and the shape of each parameter, in the module's order.
        groups: the shapes of the members of each group; None for a member of any shape.

    Returns:
        The names in each group; None if there is no assignment, or more than one.
    """
    # A prefix is the number of members of each group that are assigned so far. `ways` has a dict
    # for each parameter, from the last to the first. Its keys are the prefixes that are possible
    # before this parameter. Its values are the numbers of ways, counted up to 2, to assign this
    # parameter and all later ones.
    ways: list[dict[tuple[int, ...], int]] = [{tuple(len(group) for group in groups): 1}]
    for _, shape in reversed(parameters):
        ways_before = dict[tuple[int, ...], int]()
        for prefix, count in ways[-1].items():
            for before in _prefixes_before(prefix, shape, groups):
                ways_before[before] = min(2, ways_before.get(before, 0) + count)
        if len(ways_before) > MOST_PREFIXES:
            return None
        ways.append(ways_before)
    ways.reverse()
    prefix = (0,) * len(groups)
    if ways[0].get(prefix) != 1:
        return None
    names: list[list[str]] = [[] for _ in groups]
    for (name, shape), ways_after in zip(parameters, ways[1:], strict=True):
        if ways_after.get(prefix):
            continue  # in no group
        for index, group in enumerate(groups):
            longer = (*prefix[:index], prefix[index] + 1, *prefix[index + 1 :])
            if ways_after.get(longer) and group[prefix[index]] in (shape, None):
                names[index].append(name)
                prefix = longer
                break
    return names


def _prefixes_before(
    prefix: tuple[int, ...], shape: Shape, groups: Sequence[Sequence[Shape | None]]
) -> Iterator[tuple[int, ...]]:
    """Yield the prefixes from which a parameter of this shape leads to `prefix`."""
    yield prefix
    for index, count in enumerate(prefix):
        if count and groups[index][count - 1] in (shape, None):
            yield (*prefix[:index], count - 1, *prefix[index + 1 :])
