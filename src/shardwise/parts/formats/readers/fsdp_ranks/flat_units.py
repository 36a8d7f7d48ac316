"""FSDP1's flat parameters: find which parameters each of them contains, from sizes and names.

FSDP1 flattens the parameters of each wrapped module (a *unit*) into one flat parameter. An
optimizer's `state_dict()` contains flat parameters in the order of `model.parameters()`, without
names. The search tries which modules are units. Modules with the same structure in one list, such
as layers, are either all units, or none of them is. The sizes of flat parameters then usually
leave one possibility.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

MOST_STATES = 2000
"""The search gives up if it has to follow more states than this. Real models need a few."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class _Module:
    """A module that begins at a parameter: it contains this parameter, but not the previous one.

    Attributes:
        prefix: the prefix of the module's parameters.
        kind: modules of one kind have the same structure, and the same path apart from numbers.
        is_first: whether it is the first module of its kind.
    """

    prefix: str
    kind: int
    is_first: bool


@dataclass(frozen=True, slots=True)
class _OpenUnit:
    """A unit that the search has entered and not left yet: the next parameter may belong to it.

    Attributes:
        index: the index of the flat parameter.
        prefix: the prefix of the unit's parameters; "" for the root.
        elements: the number of elements so far.
    """

    index: int
    prefix: str
    elements: int = 0


@dataclass(frozen=True, slots=True)
class _State:
    """What the search knows before a parameter.

    Attributes:
        opened: the units that contain the parameter before, from the outermost to the innermost.
        unit_count: the number of units so far.
        kinds: the kinds of modules that are units.
    """

    opened: tuple[_OpenUnit, ...]
    unit_count: int
    kinds: frozenset[int] = frozenset()


_Assignments: TypeAlias = set[tuple[int, ...]]
"""Assignments, each of which has the flat parameter of each parameter so far. If there are more
than two, only two are kept. Two are enough to show that the result is not certain."""


def find_flat_units(
    names: Sequence[str], sizes: Sequence[int], flat_sizes: Sequence[int], shard_count: int
) -> list[int] | None:
    """Return for each parameter the index of its flat parameter; None if this is not certain.

    Args:
        names: the names of the parameters, in the order of the model.
        sizes: the number of elements of each parameter.
        flat_sizes: the number of elements of each flat parameter, with padding.
        shard_count: flat parameters are padded to a multiple of this number.
    """

    def is_complete(unit: _OpenUnit) -> bool:
        return -(-unit.elements // shard_count) * shard_count == flat_sizes[unit.index]

    def advance(
        state: _State, name: str, size: int, modules: Sequence[_Module]
    ) -> Iterator[_State]:
        """Yield the states after a parameter; none if the sizes do not fit."""
        opened = state.opened
        while opened and not name.startswith(opened[-1].prefix):
            if not is_complete(opened[-1]):
                return
            opened = opened[:-1]
        for each in _open_units(replace(state, opened=opened), modules):
            if not each.opened or each.unit_count > len(flat_sizes):
                continue
            last = replace(each.opened[-1], elements=each.opened[-1].elements + size)
            if last.elements <= flat_sizes[last.index]:
                yield replace(each, opened=(*each.opened[:-1], last))

    states: dict[_State, _Assignments] = {
        _State((), 0): {()},
        _State((_OpenUnit(0, ""),), 1): {()},
    }
    for name, size, modules in zip(names, sizes, _list_modules(names, sizes), strict=True):
        following: dict[_State, _Assignments] = {}
        for state, assignments in states.items():
            for after in advance(state, name, size, modules):
                longer = {(*before, after.opened[-1].index) for before in assignments}
                following[after] = {*sorted(following.get(after, set()) | longer)[:2]}
        if len(following) > MOST_STATES:
            return None
        states = following
    complete: _Assignments = set()
    for state, assignments in states.items():
        if state.unit_count == len(flat_sizes) and all(map(is_complete, state.opened)):
            complete |= assignments
    return list(complete.pop()) if len(complete) == 1 else None


def _list_modules(names: Sequence[str], sizes: Sequence[int]) -> list[list[_Module]]:
    """Return for each parameter the modules that begin with it, from the outermost."""
    parameters: dict[str, list[tuple[str, int]]] = {}
    for name, size in zip(names, sizes, strict=True):
        for prefix in _prefixes(name):
            parameters.setdefault(prefix, []).append((name[len(prefix) :], size))
    kinds: dict[tuple[str, tuple[tuple[str, int], ...]], int] = {}
    modules: list[list[_Module]] = []
    previous = ""
    for name in names:
        begun = []
        for prefix in _prefixes(name):
            if not previous.startswith(prefix):
                key = _NUMBER.sub("*", prefix), tuple(parameters[prefix])
                is_first = key not in kinds
                begun.append(_Module(prefix, kinds.setdefault(key, len(kinds)), is_first))
        modules.append(begun)
        previous = name
    return modules


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")[:-1]
    return [".".join(parts[: count + 1]) + "." for count in range(len(parts))]


def _open_units(state: _State, modules: Sequence[_Module]) -> Iterator[_State]:
    """Yield the states in which some of the modules are units."""
    if not modules:
        yield state
        return
    module, inner = modules[0], modules[1:]
    if module.is_first or module.kind not in state.kinds:
        yield from _open_units(state, inner)
    if module.is_first or module.kind in state.kinds:
        unit = _OpenUnit(state.unit_count, module.prefix)
        opened = (*state.opened, unit)
        kinds = state.kinds | {module.kind}
        yield from _open_units(_State(opened, state.unit_count + 1, kinds), inner)
