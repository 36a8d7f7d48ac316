"""Finds the optimizer state of each parameter of a rank, in each form that Megatron-LM saves it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from shardwise.errors import FormatError
from shardwise.formats.foreign import StoredArray
from shardwise.formats.optimizers import GROUPS, PARAMS, STATE
from shardwise.formats.readers.megatron_legacy.buffers import Bucketing, parameters_in_buffers
from shardwise.formats.readers.megatron_legacy.ranks import Parameter, Rank

MASTER = "param"
STEP = "step"
_HALVES = ("float16", "bfloat16")
_INNER = "optimizer"
_MASTERS = ("fp32_from_fp16_params", "fp32_from_fp16")

Settings: TypeAlias = Mapping[str, Any]


def of_optimizers(
    parameters: Sequence[Parameter], parts: Sequence[Sequence[Settings]]
) -> list[list[Parameter]] | None:
    """Return the parameters of each part of an optimizer, or None if they are unknown.

    A model with experts has one optimizer for them and one for the rest; interleaved stages can
    have one for the first chunk.

    Args:
        parts: the param groups of each part.
    """
    expert = [bool(part) and all(_flag(g, "is_expert_parallel") for g in part) for part in parts]
    dense = len(parts) - sum(expert)
    if dense not in (1, 2) or sum(expert) > 1:
        return None
    shared = [p for p in parameters if not (p.of_expert and any(expert))]
    chunks: list[list[Parameter]] = [shared]
    if dense == 2:
        chunks = [[p for p in shared if p.chunk == 0], [p for p in shared if p.chunk]]
    rest = [p for p in parameters if p.of_expert]
    left = iter(chunks)
    return [rest if own else next(left) for own in expert]


def in_groups(
    parameters: Sequence[Parameter],
    groups: Sequence[Settings],
    fits: Callable[[Sequence[Sequence[Parameter]]], bool],
) -> list[list[Parameter]] | None:
    """Return the parameters of each param group in the module's order, or None if unknown.

    Args:
        fits: returns whether an assignment agrees with the stored state.
    """
    keys = [_key(group) for group in groups]
    ways: list[list[tuple[bool, bool]]] = []
    if len(set(keys)) == len(keys):
        ways.append(keys)
    if len(groups) == 2:  # the order in Megatron-LM before groups recorded their purpose
        ways.append([(True, False), (False, False)])
    if any(key[1] for key in keys):
        own = [lambda p: (p.decays, p.of_embedding)]
    else:
        own = [lambda p: (p.decays, False)]
    for way in ways:
        found = [[p for p in parameters if own[0](p) == key] for key in way]
        if sum(map(len, found)) == len(parameters) and fits(found):
            return found
    return [list(parameters)] if len(groups) == 1 and fits([parameters]) else None


def _key(group: Settings) -> tuple[bool, bool]:
    """Return whether the weights of a group decay, and whether their learning rate is separate."""
    factor = group.get("wd_mult", group.get("pre_wd_mult", group.get("weight_decay")))
    return factor != 0.0, _flag(group, "is_decoupled_lr") or group.get("default_config") is False


def _flag(group: Settings, key: str) -> bool:
    return group.get(key) is True


@dataclass(slots=True)
class State:
    """The optimizer state of one rank.

    Attributes:
        arrays: the arrays of each parameter, by key; `param` is the master weight.
        numbers: the numbers of each parameter, by key.
        groups: members and hyperparameters of each param group.
        others: other values, such as the gradient scaler.
        unknown: why the state cannot be assigned to parameters, or "".
    """

    arrays: dict[Parameter, dict[str, StoredArray]] = field(default_factory=dict)
    numbers: dict[Parameter, dict[str, float]] = field(default_factory=dict)
    groups: list[tuple[list[Parameter], dict[str, Any]]] = field(default_factory=list)
    others: dict[str, Any] = field(default_factory=dict)
    unknown: str = ""


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of an optimizer; a model with experts has several."""

    state: Mapping[Any, Any]
    groups: Sequence[Settings]
    masters: Sequence[Any]
    others: Mapping[str, Any]


def optimizer_state(
    rank: Rank, parameters: Sequence[Parameter], bucketings: Sequence[Bucketing]
) -> State:
    """Return a rank's optimizer state by parameter; it is empty if none was saved.

    Raises:
        FormatError: the state is malformed, or not of these parameters.
    """
    found = State()
    if rank.optimizer is None:
        return found
    listed = rank.optimizer if isinstance(rank.optimizer, list) else [rank.optimizer]
    parts = [_part(each, rank.where) for each in listed]
    for part in parts:
        found.others.update(part.others)
    owned = of_optimizers(parameters, [part.groups for part in parts])
    if owned is None:
        found.unknown = (
            f"it has {len(parts)} parts, and the checkpoint does not say which parameters each has"
        )
        return found
    flat = rank.flat if isinstance(rank.flat, list) else [rank.flat]
    for number, (part, own) in enumerate(zip(parts, owned, strict=True)):
        grouped = in_groups(own, part.groups, _Fits(part))
        if grouped is None:
            found.unknown = (
                "the checkpoint does not name its parameters, and their shapes do not match "
                "Megatron-LM's own param groups"
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
        raise FormatError(f"{where}: the masters of its optimizer are not in groups")
    apart = {_INNER, GROUPS, STATE, *_MASTERS}
    others = {str(key): value for key, value in outer.items() if key not in apart}
    return _Part(state, groups, masters, others)


@dataclass(frozen=True, slots=True)
class _Fits:
    """Checks whether parameters can be those of a part's groups, by their count and shapes."""

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
            return True  # the distributed optimizer does not number them
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
    """Take the state of a torch optimizer, which numbers parameters, and the master weights."""
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
