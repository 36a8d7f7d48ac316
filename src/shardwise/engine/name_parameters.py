"""Names the parameters of optimizers in a checkpoint that identifies them by position."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from shardwise.engine.group import Group
from shardwise.engine.rounds import Round
from shardwise.manifest.layout import Layout
from shardwise.manifest.manifest import ObjectEntry
from shardwise.state.leaves import ParameterOrder

GROUPS, STATE, PARAMS = "param_groups", "state", "params"
_Orders = dict[str, list[list[tuple[str, tuple[int, ...]]]]]
"""The parameters of each optimizer, in order, with their shapes."""


def name_parameters(
    layout: Layout, orders: Callable[[], Mapping[str, ParameterOrder]], group: Group
) -> Layout:
    """Name the parameters of optimizers that the checkpoint identifies by position.

    As in `Optimizer.load_state_dict`, the first parameter of a saved group is the first parameter
    of the target's group. An optimizer is left unchanged if the sizes of its groups, or the shapes
    of its state, differ from those of the target. All ranks call this function together.

    Args:
        layout: the checkpoint.
        orders: returns the parameters of each optimizer on this rank, in order. The keys are the
            names of the optimizers in the checkpoint.
        group: the ranks.

    Returns:
        The layout with the names of the target.
    """
    positional = [
        entry.name.removesuffix(f".{GROUPS}")
        for entry in layout.objects
        if entry.name.endswith(f".{GROUPS}") and _positions_of(entry.value) is not None
    ]
    if not positional:
        return layout

    with Round(group, "naming parameters") as step:
        known = step.reduce(dict(orders()), _Orders, _equal_or_none, _Orders)
    for optimizer in positional:
        if optimizer in known:
            layout = _name_parameters(layout, optimizer, known[optimizer])
    return layout


def _equal_or_none(orders: list[dict[str, ParameterOrder]]) -> dict[str, ParameterOrder]:
    """Return the orders if they are equal on all ranks, or nothing."""
    return orders[0] if all(each == orders[0] for each in orders) else {}


def _positions_of(groups: Any) -> list[list[int]] | None:
    """Return the positions of each group's parameters; None if the groups have names instead."""
    try:
        found = msgspec.convert(groups, list[dict[str, Any]])
        return msgspec.convert([group.get(PARAMS) for group in found], list[list[int]])
    except msgspec.ValidationError:
        return None


def _name_parameters(layout: Layout, optimizer: str, order: ParameterOrder) -> Layout:
    """Return the layout with names for one optimizer, or the same layout if they do not fit."""
    groups = next(each.value for each in layout.objects if each.name == f"{optimizer}.{GROUPS}")
    positions = _positions_of(groups) or []
    if [len(each) for each in positions] != [len(each) for each in order]:
        return layout
    pairs = zip(
        (position for each in positions for position in each),
        (parameter for each in order for parameter in each),
        strict=True,
    )
    parameters = {f"{optimizer}.{STATE}.{position}": parameter for position, parameter in pairs}
    tensors = []
    for entry in layout.tensors:
        owner, _, key = entry.name.rpartition(".")
        parameter_name, shape = parameters.get(owner, ("", ()))
        if parameter_name and entry.shape not in ((), shape):
            return layout
        name = f"{optimizer}.{parameter_name}.{key}" if parameter_name else entry.name
        tensors.append(msgspec.structs.replace(entry, name=name))
    named_groups = [
        {
            "members": [name for name, _ in members],
            "value": {key: value for key, value in settings.items() if key != PARAMS},
        }
        for members, settings in zip(order, groups, strict=True)
    ]
    objects = tuple(
        ObjectEntry(each.name, named_groups) if each.name == f"{optimizer}.{GROUPS}" else each
        for each in layout.objects
    )
    return replace(layout, tensors=tuple(tensors), objects=objects)
