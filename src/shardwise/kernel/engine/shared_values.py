"""The plain values that ranks share: whether they are equal, and what a manifest has of them.

Hyperparameters of an optimizer are *grouped*: a learning rate belongs to a list of parameters, the
*members* of its group. The members are a part of a rank's structure, because they seldom change.
Only the hyperparameters themselves are compared at each save.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from shardwise.kernel.engine.group import Group
from shardwise.kernel.engine.rounds import Round
from shardwise.kernel.engine.shared_structures import digest_of
from shardwise.kernel.errors import MismatchError
from shardwise.kernel.manifest.manifest import ObjectEntry
from shardwise.kernel.plan.save import DIFFERENT_KINDS, SavePlan
from shardwise.kernel.plan.structure import ParamGroups
from shardwise.kernel.state.local_state import LocalState
from shardwise.kernel.state.plain_values import JsonValue, find_differences, is_empty

DIFFERENT_VALUES = (
    "plain values differ between ranks; set equal hyperparameters on all ranks, and wrap other "
    "values that are meant to differ in sw.PerRank(value):"
)
MOST_PARTS_SHOWN = 5
LONGEST_SHOWN = 40
"""The most characters of a value to show in an error message."""

SharedValues = tuple[dict[str, JsonValue], dict[str, list[tuple[tuple[str, ...], JsonValue]]]]
"""Two dicts of one rank: the plain values, by name; and the grouped values, by name. A grouped
value is a list of pairs: the members of a group, and the value that they have in common."""
_Values = tuple[dict[str, JsonValue], dict[str, list[JsonValue]]]
"""The same without the members."""


def members_of(state: LocalState) -> ParamGroups:
    """Return the members of the groups of a state, by the name of the grouped value."""
    groups = state.grouped.items()
    return tuple((name, tuple(members for members, _ in listed)) for name, listed in groups)


def encode_values(state: LocalState, *, order: Literal["sorted"] | None = None) -> bytes:
    """Return the plain values of a state, encoded without the members of groups.

    Args:
        order: `"sorted"` sorts the keys of all dicts, so that equal values have equal bytes.
    """
    groups = {name: [value for _, value in listed] for name, listed in state.grouped.items()}
    return msgspec.json.encode((state.objects, groups), order=order)


def decode_values(encoded: bytes, members: ParamGroups) -> SharedValues:
    """Return the values that `encode_values` has encoded, with the members of their groups.

    Args:
        members: as in the structure of a rank that has these values.
    """
    objects, groups = msgspec.json.decode(encoded, type=_Values)
    return objects, {name: list(zip(listed, groups[name], strict=True)) for name, listed in members}


def share_values(
    state: LocalState, fingerprint: bytes, plan: SavePlan, group: Group, *, differ: bool
) -> tuple[ObjectEntry, ...]:
    """Return the plain values of all ranks for the manifest.

    If they differ, ranks with the same structure and the same values send them once.

    Args:
        differ: whether plain values of ranks differ.

    Raises:
        MismatchError: ranks have different values with the same name.
    """
    encoded = encode_values(state)
    if not differ:
        groups = plan.param_groups.values()
        return merge_values(
            {rank: decode_values(encoded, members) for rank, members in groups}, plan.kinds
        )
    with Round(group, "comparing plain values") as all_ranks:
        own = {digest_of(fingerprint + encoded): (group.rank, fingerprint, encoded)}
        listed = all_ranks.all_reduce(own, dict[bytes, tuple[int, bytes, bytes]], _first_of_each)
    return merge_values(
        {
            rank: decode_values(values, plan.param_groups[digest][1])
            for rank, digest, values in sorted(listed.values())
        },
        plan.kinds,
    )


def _first_of_each(
    messages: Sequence[dict[bytes, tuple[int, bytes, bytes]]],
) -> dict[bytes, tuple[int, bytes, bytes]]:
    first: dict[bytes, tuple[int, bytes, bytes]] = {}
    for message in messages:
        for digest, item in message.items():
            first[digest] = min(item, first.get(digest, item))
    return first


def merge_values(
    values: Mapping[int, SharedValues],
    other_kinds: Mapping[str, str],
    summary: str = DIFFERENT_VALUES,
) -> tuple[ObjectEntry, ...]:
    """Merge the plain values of ranks.

    A rank that has `{}`, `[]`, `()` or None, where other ranks have names below this name, has
    nothing there: `{"model": model.state_dict() if rank == 0 else {}}` has no value `model`.

    Args:
        values: the values of some ranks by rank, ascending. Other ranks have the same values as one
            of these.
        other_kinds: the names of what ranks have besides plain values, and what each of them is.
        summary: the first line of the error for different values.

    Raises:
        MismatchError: ranks have different values, or different kinds of values, with the same
            name. The error lists all names.
    """
    # A value and the first rank that has the value: in `objects` by name, and in `grouped` by name
    # and member of a group.
    objects: dict[str, tuple[JsonValue, int]] = {}
    grouped: dict[str, dict[str, tuple[JsonValue, int]]] = {}
    # The position of each group, and whether it has members, by name.
    placed: dict[str, list[tuple[int, bool, JsonValue]]] = {}
    problems: list[str] = []
    placeholders = _find_placeholders(values, other_kinds)
    for rank, (own_objects, own_groups) in values.items():
        for name, value in own_objects.items():
            if name in placeholders and is_empty(value):
                continue
            first, first_rank = objects.setdefault(name, (value, rank))
            if first != value:
                problems += _describe_differences(first, value, name, first_rank, rank)
        for name, groups in own_groups.items():
            first_of = grouped.setdefault(name, {})
            for position, (members, value) in enumerate(groups):
                placed.setdefault(name, []).append((position, bool(members), value))
                own = value, rank
                wrong = [
                    each
                    for each in members
                    if (known := first_of.setdefault(each, own)) is not own and known[0] != value
                ]
                if wrong:
                    first, first_rank = first_of[wrong[0]]
                    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
                    group = f"{name} of {wrong[0]}{more}"
                    problems += _describe_differences(first, value, group, first_rank, rank)
    if problems:
        raise MismatchError(summary, problems)
    _refuse_other_kinds(values, other_kinds)
    entries = [ObjectEntry(name, value) for name, (value, _) in objects.items()]
    for name, first_of in grouped.items():
        entries.append(ObjectEntry(name, _merge_groups(first_of, placed.get(name, ()))))
    return tuple(entries)


def _merge_groups(
    first_of: Mapping[str, tuple[JsonValue, int]], placed: Iterable[tuple[int, bool, JsonValue]]
) -> list[dict[str, Any]]:
    """Return the groups for the manifest. Members with equal values are one group.

    A group has the positions that it had on ranks, unless all positions are those in the list. A
    load sets a group without members, for example on a pipeline stage, by its position.
    """
    merged: dict[bytes, dict[str, Any]] = {}
    items: list[tuple[JsonValue, str, object]]
    items = [(value, "members", member) for member, (value, _) in first_of.items()]
    for position, has_members, value in placed:
        items.append((value, "positions" if has_members else "empty_positions", position))
    group_of: dict[int, dict[str, Any]] = {}  # by the id of a value, which many members share
    for value, key, item in items:
        group = group_of.get(id(value))
        if group is None:
            group = merged.setdefault(msgspec.json.encode(value), {"members": [], "value": value})
            group_of[id(value)] = group
        if key == "members" or item not in group.get(key, ()):
            group.setdefault(key, []).append(item)
    groups = [*merged.values()]
    is_in_order = all(group.get("positions") == [at] for at, group in enumerate(groups))
    if is_in_order and not any("empty_positions" in group for group in groups):
        for group in groups:
            del group["positions"]
    return groups


def _find_placeholders(values: Mapping[int, SharedValues], other_names: Iterable[str]) -> set[str]:
    """Return the names of empty values in whose place other ranks have names below this name."""
    empty = {
        name for objects, _ in values.values() for name, value in objects.items() if is_empty(value)
    }
    absent = {n for n in empty if any(n not in objects for objects, _ in values.values())}
    if not absent:
        return absent
    names = [*other_names, *(name for parts in values.values() for part in parts for name in part)]
    return {n for n in absent if any(each.startswith(f"{n}.") for each in names)}


def _refuse_other_kinds(values: Mapping[int, SharedValues], other_kinds: Mapping[str, str]) -> None:
    """Raise if a name is a plain value on one rank, and something else on another."""
    problems = {}
    grouped = {name: rank for rank, (_, groups) in values.items() for name in groups}
    for rank, (objects, groups) in values.items():
        for name in (*objects, *groups):
            if name in other_kinds:
                problems[name] = (
                    f"{name}: a plain value on rank {rank}, {other_kinds[name]} on others"
                )
        for name in objects.keys() & grouped.keys():
            problems[name] = (
                f"{name}: a plain value on rank {rank}, param groups on rank {grouped[name]}"
            )
    if problems:
        raise MismatchError(DIFFERENT_KINDS, [problems[name] for name in sorted(problems)])


def _describe_differences(
    a: JsonValue, b: JsonValue, name: str, first_rank: int, rank: int
) -> list[str]:
    """Return a line for each of the first few parts in which the values of two ranks differ."""
    lines = [
        f"{part}: {_shown(x)} on rank {first_rank}, {_shown(y)} on rank {rank}"
        for part, x, y in find_differences(a, b, name)
    ]
    if len(lines) > MOST_PARTS_SHOWN:
        lines[MOST_PARTS_SHOWN:] = [f"{name}: and {len(lines) - MOST_PARTS_SHOWN} more parts"]
    return lines


def _shown(encoded: JsonValue) -> str:
    text = "absent" if encoded is msgspec.UNSET else msgspec.json.encode(encoded).decode()
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"
