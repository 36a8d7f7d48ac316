"""The state of a rank's optimizer, by parameter, whichever way Megatron-LM saved it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.errors import FormatError
from shardwise.formats.foreign import StoredArray
from shardwise.formats.optimizers import GROUPS, PARAMS, STATE
from shardwise.formats.readers.megatron_legacy.buffers import Bucketing, parameters_in_buffers
from shardwise.formats.readers.megatron_legacy.parameters import (
    Parameter,
    Settings,
    in_groups,
    of_optimizers,
)
from shardwise.formats.readers.megatron_legacy.ranks import Rank

MASTER = "param"
STEP = "step"
_HALVES = ("float16", "bfloat16")
_INNER = "optimizer"
_MASTERS = ("fp32_from_fp16_params", "fp32_from_fp16")


@dataclass(slots=True)
class State:
    """State of an optimizer on one rank.

    Attributes:
        arrays: of each parameter, by key; its master weight is `param`.
        numbers: of each parameter, by key, what is a number.
        groups: param groups: members, and hyperparameters.
        beside: what else there is, such as the scaler of gradients.
        unknown: why parameters' states have no names; "" if they have.
    """

    arrays: dict[Parameter, dict[str, StoredArray]] = field(default_factory=dict)
    numbers: dict[Parameter, dict[str, float]] = field(default_factory=dict)
    groups: list[tuple[list[Parameter], dict[str, Any]]] = field(default_factory=list)
    beside: dict[str, Any] = field(default_factory=dict)
    unknown: str = ""


@dataclass(frozen=True, slots=True)
class _Part:
    """One of an optimizer's parts, of which there are several if there are experts."""

    state: Mapping[Any, Any]
    groups: Sequence[Settings]
    masters: Sequence[Any]
    beside: Mapping[str, Any]


def optimizer_state(
    rank: Rank, parameters: Sequence[Parameter], bucketings: Sequence[Bucketing]
) -> State:
    """What a rank has of its optimizer; nothing, if it was not saved.

    Raises:
        FormatError: it is malformed, or not of these parameters.
    """
    found = State()
    if rank.optimizer is None:
        return found
    listed = rank.optimizer if isinstance(rank.optimizer, list) else [rank.optimizer]
    parts = [_part(each, rank.where) for each in listed]
    for part in parts:
        found.beside.update(part.beside)
    owned = of_optimizers(parameters, [part.groups for part in parts])
    if owned is None:
        found.unknown = f"it has {len(parts)} parts, and nothing says of which parameters each is"
        return found
    flat = rank.flat if isinstance(rank.flat, list) else [rank.flat]
    for number, (part, own) in enumerate(zip(parts, owned, strict=True)):
        grouped = in_groups(own, part.groups, _Fits(part))
        if grouped is None:
            found.unknown = (
                "its parameters have no names in this checkpoint, and their shapes are not those "
                "that Megatron-LM's own groups of parameters would have"
            )
            return found
        for members, group in zip(grouped, part.groups, strict=True):
            _take_settings(found, members, group)
        _take_numbered(found, part, grouped)
        buffers = flat[number] if number < len(flat) else None
        if buffers is not None:
            found.arrays |= parameters_in_buffers(buffers, own, bucketings, rank.where)
    return found


def _part(held: Any, where: str) -> _Part:
    outer = held if isinstance(held, dict) else {}
    inner = outer.get(_INNER, outer)
    groups = inner.get(GROUPS) if isinstance(inner, dict) else None
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise FormatError(f"{where}: its optimizer has no param groups")
    state = inner.get(STATE, {})
    masters: Any = next((outer[key] for key in _MASTERS if key in outer), [])
    if not isinstance(state, dict) or not isinstance(masters, list):
        raise FormatError(f"{where}: the state of its optimizer is malformed")
    if not all(isinstance(each, list) for each in masters):
        raise FormatError(f"{where}: the masters of its optimizer are in no groups")
    apart = {_INNER, GROUPS, STATE, *_MASTERS}
    beside = {str(key): value for key, value in outer.items() if key not in apart}
    return _Part(state, groups, masters, beside)


@dataclass(frozen=True, slots=True)
class _Fits:
    """Whether parameters may be those of the groups of a part, by their numbers and shapes."""

    part: _Part

    def __call__(self, grouped: Sequence[Sequence[Parameter]]) -> bool:
        return all(
            self._group(members, group)
            for members, group in zip(grouped, self.part.groups, strict=True)
        ) and all(
            [p.array.shape for p in members if p.array.dtype in _HALVES]
            == [master.shape for master in masters if isinstance(master, StoredArray)]
            for members, masters in zip(grouped, self.part.masters, strict=False)
        )

    def _group(self, members: Sequence[Parameter], group: Settings) -> bool:
        numbers = group.get(PARAMS)
        if numbers is None:
            return True  # the distributed optimizer has none
        if not isinstance(numbers, list) or len(numbers) != len(members):
            return False
        return all(
            array.shape in ((), parameter.array.shape)
            for number, parameter in zip(numbers, members, strict=True)
            for array in _state_of(self.part, number).values()
            if isinstance(array, StoredArray)
        )


def _state_of(part: _Part, number: object) -> Mapping[Any, Any]:
    found = part.state.get(number) if type(number) is int else None
    return found if isinstance(found, dict) else {}


def _take_settings(found: State, members: list[Parameter], group: Settings) -> None:
    kept = {key: value for key, value in group.items() if key not in (PARAMS, STEP)}
    step = group.get(STEP)
    if isinstance(step, (int, float)):
        for parameter in members:
            found.numbers.setdefault(parameter, {})[STEP] = step
    elif step is not None:
        kept[STEP] = step
    found.groups.append((members, kept))


def _take_numbered(found: State, part: _Part, grouped: Sequence[Sequence[Parameter]]) -> None:
    """State by number, of a torch optimizer, and the masters beside it."""
    for place, (members, group) in enumerate(zip(grouped, part.groups, strict=True)):
        for parameter, number in zip(members, group.get(PARAMS, ()), strict=False):
            for key, value in _state_of(part, number).items():
                if isinstance(value, StoredArray):
                    found.arrays.setdefault(parameter, {})[str(key)] = value
                elif type(value) in (int, float):
                    found.numbers.setdefault(parameter, {})[str(key)] = value
        masters = part.masters[place] if place < len(part.masters) else []
        halves = [p for p in members if p.array.dtype in _HALVES]
        for parameter, master in zip(halves, masters, strict=False):
            if isinstance(master, StoredArray):
                found.arrays.setdefault(parameter, {})[MASTER] = master
