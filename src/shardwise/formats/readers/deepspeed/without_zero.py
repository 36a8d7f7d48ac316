"""Lays the state of an optimizer that ZeRO does not divide: of parameters by number."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardwise.errors import FormatError
from shardwise.formats.foreign import StoredArray
from shardwise.formats.readers.deepspeed.groups import groups_of
from shardwise.formats.readers.deepspeed.laying import Laying
from shardwise.formats.readers.deepspeed.optimizers import STEP, Settings, lay_group, lay_number
from shardwise.formats.readers.deepspeed.placements import Placing
from shardwise.formats.readers.deepspeed.states import ModelState, OptimizerState, Shape, of_torch

MOST_WAYS = 10_000


def lay_optimizer(
    laying: Laying,
    states: Sequence[ModelState],
    parameters: Mapping[str, Shape],
    members: Sequence[Sequence[str]] | None,
    place: Placing,
) -> None:
    """Lay the optimizer's state, and master weights if there are any.

    Args:
        states: of all tensor-parallel ranks.
        parameters: names and shapes of all that may be trained, on the first rank, in the module's
            order.
        members: the names in each group; by default they are told by the shapes.

    Raises:
        FormatError: the state is malformed, or not of these parameters.
    """
    if any(state.optimizer is None for state in states):
        return
    of_ranks = [_Unzeroed(state.optimizer or {}, state.where) for state in states]
    first = of_ranks[0]
    if members is None:
        members = first.members(parameters)
    if members is None:
        laying.left_out.append(
            "optimizer.*: its parameters have no names in this checkpoint, and their shapes do not "
            "tell which they are: give the names in each group, by `members`"
        )
        return
    unknown = [name for group in members for name in group if name not in parameters]
    if unknown:
        raise FormatError(f"{first.where}: there is no parameter {unknown[0][:200]!r}")
    if first.flat:
        shards = [list(each.as_groups(members, parameters)) for each in of_ranks]
        for of_group in zip(*shards, strict=True):
            lay_group(laying, of_group, place)
    else:
        _lay_each(laying, of_ranks, members, place)
    settings = Settings(laying)
    for names, group in zip(members, first.settings, strict=True):
        settings.add(names, group)
    settings.lay()


class _Unzeroed:
    """The state of an optimizer on one rank: its own, or that of DeepSpeed's around it."""

    def __init__(self, held: Mapping[Any, Any], where: str) -> None:
        self.where = where
        inner = held.get("optimizer_state_dict", held)
        self.states, self.settings, self.groups = of_torch(inner, where)
        self.flat = "fp32_groups_flat" in held
        masters = held.get("fp32_groups_flat" if self.flat else "fp32_groups") or ()
        if not self.flat and isinstance(masters, (list, tuple)):
            masters = [each for group in masters for each in group]
        self.masters = tuple(each for each in masters if isinstance(each, StoredArray))
        if len(self.masters) not in (0, len(self.states)):
            raise FormatError(f"{where}: {len(self.masters)} weights of {len(self.states)} states")

    def members(self, parameters: Mapping[str, Shape]) -> list[list[str]] | None:
        """The names in each group, if shapes tell them."""
        if self.flat:
            sizes = sum(math.prod(shape) for shape in parameters.values())
            whole = len(self.masters) == 1 and self.masters[0].shape == (sizes,)
            return [list(parameters)] if whole else None
        shapes = [self._shape(number) for number in range(len(self.states))]
        if None in shapes:
            return None
        groups: list[list[Shape]] = [[] for _ in self.settings]
        for group, shape in zip(self.groups, shapes, strict=True):
            groups[group].append(shape or ())
        return only_way(list(parameters.items()), groups)

    def _shape(self, number: int) -> Shape | None:
        if self.masters:
            return self.masters[number].shape
        arrays = [a.shape for a in self.states[number].values() if isinstance(a, StoredArray)]
        return max(arrays, key=len, default=None)

    def as_groups(
        self, members: Sequence[Sequence[str]], parameters: Mapping[str, Shape]
    ) -> Iterator[Any]:
        """Groups that are flat as those of ZeRO are, on one rank."""
        state = OptimizerState(
            self.where,
            False,
            self.masters,
            self.states,
            self.settings,
            self.groups,
            (1,) * len(self.masters),
            None,
            None,
            {},
        )
        shapes = [{name: parameters[name] for name in group} for group in members]
        return groups_of(shapes, [state], data_before_experts=False)


def _lay_each(
    laying: Laying,
    ranks: Sequence[_Unzeroed],
    members: Sequence[Sequence[str]],
    place: Placing,
) -> None:
    names = [name for group in members for name in group]
    first = ranks[0]
    if any(len(each.states) != len(names) for each in ranks):
        raise FormatError(f"{first.where}: state of {len(first.states)}, and {len(names)} names")
    for number, name in enumerate(names):
        if first.masters:
            _lay_shards(laying, f"model.{name}", [each.masters[number] for each in ranks], place)
        for key, item in first.states[number].items():
            full = f"optimizer.{name}.{key}"
            if not isinstance(item, StoredArray):
                if any(each.states[number].get(key) != item for each in ranks):
                    laying.left_out.append(f"{full}: ranks differ; the first one's is taken")
                lay_number(laying, [name], key, item)
                continue
            found = [each.states[number].get(key) for each in ranks]
            arrays = [each for each in found if isinstance(each, StoredArray)]
            if len(arrays) != len(ranks):
                raise FormatError(f"{full}: not all tensor-parallel ranks have it")
            if item.shape == ():
                laying.scalars([full], arrays if key == STEP else arrays[:1])
            else:
                _lay_shards(laying, full, arrays, place, parameter=name)


def _lay_shards(
    laying: Laying,
    name: str,
    arrays: Sequence[StoredArray],
    place: Placing,
    *,
    parameter: str | None = None,
) -> None:
    known = parameter if parameter is not None else name.removeprefix("model.")
    laying.shards(name, arrays, place(known, [array.shape for array in arrays]))


def only_way(
    parameters: Sequence[tuple[str, Shape]], groups: Sequence[Sequence[Shape]]
) -> list[list[str]] | None:
    """The names of the members of groups, if their shapes leave one way alone.

    Each group is taken to have its members in the order of the module; some parameters may be in
    none, as those that are frozen.

    Returns:
        Names by group; None if there is no way, or more than one.
    """
    end = tuple(len(group) for group in groups)
    # From the end: at each parameter, in how many ways (two count as many) the rest can be placed.
    ways: list[dict[tuple[int, ...], int]] = [{end: 1}]
    for _, shape in reversed(parameters):
        after, here = ways[-1], dict[tuple[int, ...], int]()
        for taken, count in after.items():
            for before in _before(taken, shape, groups):
                here[before] = min(2, here.get(before, 0) + count)
        if len(here) > MOST_WAYS:
            return None
        ways.append(here)
    ways.reverse()
    taken = (0,) * len(groups)
    if ways[0].get(taken) != 1:
        return None
    names: list[list[str]] = [[] for _ in groups]
    for (name, shape), after in zip(parameters, ways[1:], strict=True):
        for index in (None, *range(len(groups))):
            then = _then(taken, index, shape, groups)
            if then is not None and after.get(then):
                if index is not None:
                    names[index].append(name)
                taken = then
                break
    return names


def _before(
    taken: tuple[int, ...], shape: Shape, groups: Sequence[Sequence[Shape]]
) -> Iterator[tuple[int, ...]]:
    """How many were taken of each group before a parameter, which is in none or one of them."""
    yield taken
    for index, count in enumerate(taken):
        if count and groups[index][count - 1] == shape:
            yield (*taken[:index], count - 1, *taken[index + 1 :])


def _then(
    taken: tuple[int, ...], index: int | None, shape: Shape, groups: Sequence[Sequence[Shape]]
) -> tuple[int, ...] | None:
    """How many are taken after a parameter, which is in this group; None if it cannot be."""
    if index is None:
        return taken
    count = taken[index]
    if count == len(groups[index]) or groups[index][count] != shape:
        return None
    return (*taken[:index], count + 1, *taken[index + 1 :])
