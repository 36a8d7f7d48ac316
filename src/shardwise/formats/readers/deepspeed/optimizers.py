"""Adds the state of optimizers: of ZeRO's groups, and of optimizers that ZeRO does not divide."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardwise.errors import FormatError
from shardwise.formats import optimizers as param_groups
from shardwise.formats.build import Builder, number_tensor
from shardwise.formats.foreign import StoredArray
from shardwise.formats.readers.deepspeed.groups import groups_of
from shardwise.formats.readers.deepspeed.states import (
    ModelState,
    Number,
    OptimizerState,
    Shape,
    of_torch,
)
from shardwise.formats.readers.deepspeed.tensor_parallel import Place, add_shards
from shardwise.formats.readers.deepspeed.zero import MASTER, Group, add_group, name_of

STEP = "step"
MOST_WAYS = 10_000


def add_zero_group(builder: Builder, shards: Sequence[Group], place: Place) -> None:
    """Add a group of parameters that ZeRO divided: weights, state, and step counts.

    Args:
        shards: the group on each tensor-parallel rank.

    Raises:
        FormatError: the ranks have different parameters, or their shards do not fit together.
    """
    add_group(builder, shards, place)
    first = shards[0]
    for key in first.scalars:
        arrays = [array for group in shards for array in group.scalars.get(key, ())]
        # Other numbers than steps can differ between ranks, as the norm of a rank's part does.
        add_scalars(builder, first.names, key, arrays if key == STEP else arrays[:1])
    for key, number in first.numbers.items():
        add_number(builder, first.names, key, number)
    builder.left_out += first.left_out


def add_scalars(
    builder: Builder, names: Sequence[str], key: str, arrays: Sequence[StoredArray]
) -> None:
    """Add the first of the 0-d arrays as state of each parameter; the others are replicas."""
    first = arrays[0]
    tensors = [
        builder.add_tensor(name_of(name, key), first.dtype, first.shape)
        for name in names
        if name_of(name, key) not in builder
    ]
    if not tensors or any(array.shape for array in arrays):
        return
    for tensor in tensors:
        builder.add_box(tensor, (), first)
    for array in arrays[1:]:
        builder.add_box(tensors[0], (), array, replica=True)


def add_number(builder: Builder, names: Sequence[str], key: str, number: Number) -> None:
    """Add a number as state of some parameters; a step count becomes a tensor, as in torch."""
    if key == STEP and not isinstance(number, bool):
        add_scalars(builder, names, key, [builder.content(number_tensor(number))])
        return
    for name in names:
        if name_of(name, key) not in builder:
            builder.add_value(name_of(name, key), number)


class Settings:
    """Hyperparameters of groups of parameters, which become `optimizer.param_groups`."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder
        self._groups: list[param_groups.Group] = []

    def add(self, names: Sequence[str], settings: Mapping[str, Any]) -> None:
        """Record the hyperparameters of some parameters."""
        kept = dict(settings)
        step = kept.get(STEP)
        if isinstance(step, (int, float)):
            # DeepSpeed's Adam counts steps by group, torch's by parameter.
            del kept[STEP]
            new = [name for name in names if name_of(name, STEP) not in self._builder]
            add_number(self._builder, new, STEP, step)
        if kept.get("bias_correction") is True:
            del kept["bias_correction"]  # torch's Adam always corrects, and has no such setting
        for index, group in enumerate(self._groups):
            if group.settings == kept:
                members = dict.fromkeys((*group.members, *names))
                self._groups[index] = param_groups.Group(tuple(members), kept)
                return
        self._groups.append(param_groups.Group(tuple(names), kept))

    def finish(self) -> None:
        """Add what was recorded to the manifest."""
        if self._groups:
            self._builder.add_groups(self._groups, "optimizer.param_groups")


def add_undivided(
    builder: Builder,
    states: Sequence[ModelState],
    parameters: Mapping[str, Shape],
    members: Sequence[Sequence[str]] | None,
    place: Place,
) -> None:
    """Add the state of an optimizer without ZeRO, and its master weights if there are any.

    Args:
        states: of all tensor-parallel ranks.
        parameters: names and shapes of all parameters that may be trained, on the first rank, in
            the module's order.
        members: the names in each group; by default they are inferred from the shapes.

    Raises:
        FormatError: the state is malformed, or not of these parameters.
    """
    if any(state.optimizer is None for state in states):
        return
    ranks = [_Undivided(state.optimizer or {}, state.where) for state in states]
    first = ranks[0]
    if members is None:
        members = first.members(parameters)
    if members is None:
        builder.left_out.append(
            "optimizer.*: the checkpoint does not name the optimizer's parameters, and their "
            "shapes are ambiguous: pass the names in each group as `members`"
        )
        return
    unknown = [name for group in members for name in group if name not in parameters]
    if unknown:
        raise FormatError(f"{first.where}: there is no parameter {unknown[0][:200]!r}")
    if first.flat:
        shards = [list(each.as_groups(members, parameters)) for each in ranks]
        for groups in zip(*shards, strict=True):
            add_zero_group(builder, groups, place)
    else:
        _add_each(builder, ranks, [name for group in members for name in group], place)
    settings = Settings(builder)
    for names, group in zip(members, first.settings, strict=True):
        settings.add(names, group)
    settings.finish()


class _Undivided:
    """The state of an optimizer on one rank: torch's own, or DeepSpeed's wrapper around it."""

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
            raise FormatError(
                f"{where}: the optimizer has {len(self.masters)} weights and {len(self.states)} "
                "states"
            )

    def members(self, parameters: Mapping[str, Shape]) -> list[list[str]] | None:
        """Return the names in each group, if the shapes determine them."""
        if self.flat:
            size = sum(math.prod(shape) for shape in parameters.values())
            whole = len(self.masters) == 1 and self.masters[0].shape == (size,)
            return [list(parameters)] if whole else None
        groups: list[list[Shape]] = [[] for _ in self.settings]
        for number, group in enumerate(self.groups):
            shape = self._shape(number)
            if shape is None:
                return None
            groups[group].append(shape)
        return only_assignment(list(parameters.items()), groups)

    def _shape(self, number: int) -> Shape | None:
        if self.masters:
            return self.masters[number].shape
        arrays = [a.shape for a in self.states[number].values() if isinstance(a, StoredArray)]
        return max(arrays, key=len, default=None)

    def as_groups(
        self, members: Sequence[Sequence[str]], parameters: Mapping[str, Shape]
    ) -> Iterator[Group]:
        """Return the flat groups as groups of ZeRO on one rank."""
        state = OptimizerState(
            where=self.where,
            sliced=False,
            masters=self.masters,
            states=self.states,
            settings=self.settings,
            groups=self.groups,
            counts=(1,) * len(self.masters),
            rest={},
        )
        shapes = [{name: parameters[name] for name in group} for group in members]
        return groups_of(shapes, [state], data_before_experts=False)


def _add_each(
    builder: Builder, ranks: Sequence[_Undivided], names: Sequence[str], place: Place
) -> None:
    first = ranks[0]
    if any(len(each.states) != len(names) for each in ranks):
        raise FormatError(
            f"{first.where}: the optimizer has state of {len(first.states)} parameters, but the "
            f"groups name {len(names)}"
        )
    for number, name in enumerate(names):
        if first.masters:
            masters = [each.masters[number] for each in ranks]
            shapes = [array.shape for array in masters]
            add_shards(builder, name_of(name, MASTER), masters, place(name, shapes))
        for key, item in first.states[number].items():
            full = name_of(name, key)
            found = [each.states[number].get(key) for each in ranks]
            if not isinstance(item, StoredArray):
                if any(each != item for each in found):
                    builder.left_out.append(f"{full}: ranks differ; the first one's is taken")
                add_number(builder, [name], key, item)
                continue
            arrays = [each for each in found if isinstance(each, StoredArray)]
            if len(arrays) != len(ranks):
                raise FormatError(f"{full}: some tensor-parallel ranks lack it")
            if item.shape == ():
                add_scalars(builder, [name], key, arrays if key == STEP else arrays[:1])
            else:
                shapes = [array.shape for array in arrays]
                add_shards(builder, full, arrays, place(name, shapes))


def only_assignment(
    parameters: Sequence[tuple[str, Shape]], groups: Sequence[Sequence[Shape]]
) -> list[list[str]] | None:
    """Return the names of the members of groups, if their shapes allow exactly one assignment.

    Each group has its members in the order of the module. Parameters may be in no group, as frozen
    ones are.

    Returns:
        Names by group; None if there is no assignment, or more than one.
    """
    # From the end: in how many ways (2 stands for more) the remaining parameters can be assigned
    # after so many members of each group.
    ways: list[dict[tuple[int, ...], int]] = [{tuple(len(group) for group in groups): 1}]
    for _, shape in reversed(parameters):
        here = dict[tuple[int, ...], int]()
        for taken, count in ways[-1].items():
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
        if after.get(taken):
            continue  # in no group
        for index, group in enumerate(groups):
            then = (*taken[:index], taken[index] + 1, *taken[index + 1 :])
            if after.get(then) and group[taken[index]] == shape:
                names[index].append(name)
                taken = then
                break
    return names


def _before(
    taken: tuple[int, ...], shape: Shape, groups: Sequence[Sequence[Shape]]
) -> Iterator[tuple[int, ...]]:
    """Yield how many members were taken of each group before a parameter of this shape."""
    yield taken
    for index, count in enumerate(taken):
        if count and groups[index][count - 1] == shape:
            yield (*taken[:index], count - 1, *taken[index + 1 :])
