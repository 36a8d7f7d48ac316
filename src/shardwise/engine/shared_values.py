"""Plain values that all ranks share: compare them between ranks, and merge them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from shardwise.decoding import prepare_decoding
from shardwise.errors import MismatchError
from shardwise.manifest.manifest import ObjectEntry
from shardwise.state.leaves import LocalState
from shardwise.state.plain_values import JsonValue, differing_names


@prepare_decoding
class SharedValues(msgspec.Struct, array_like=True):
    """The shared values of one rank.

    Attributes:
        objects: plain values by name.
        grouped: for each name, pairs of parameters and the value that they share.
    """

    objects: dict[str, JsonValue]
    grouped: dict[str, list[tuple[tuple[str, ...], JsonValue]]]

    @classmethod
    def of(cls, state: LocalState) -> SharedValues:
        """Return the shared values of a local state."""
        return cls(state.objects, state.grouped)

    def encode(self) -> bytes:
        """Return the values as bytes, for rank 0."""
        return msgspec.json.encode(self)

    def digest(self) -> bytes:
        """Return a digest, which is equal for equal values."""
        encoded = msgspec.json.encode(self, order="sorted")
        return hashlib.blake2b(encoded, digest_size=16).digest()


def merge_values(encoded: Sequence[bytes]) -> tuple[ObjectEntry, ...]:
    """Merge the shared values of all ranks.

    Args:
        encoded: the encoded values of each rank; empty for a rank with the same values as an
            earlier one.

    Raises:
        MismatchError: ranks have different values with the same name. The error lists all names.
    """
    objects: dict[str, JsonValue] = {}
    rank_of: dict[str, int] = {}
    value_of_member: dict[str, dict[str, JsonValue]] = {}
    problems: list[str] = []
    for rank, data in enumerate(encoded):
        if not data:
            continue
        values = msgspec.json.decode(data, type=SharedValues)
        for name, value in values.objects.items():
            if name not in objects:
                objects[name], rank_of[name] = value, rank
            elif objects[name] != value:
                names = ", ".join(differing_names(objects[name], value, name)[:5])
                problems.append(f"{names}: rank {rank_of[name]} and rank {rank} differ")
        for name, groups in values.grouped.items():
            known = value_of_member.setdefault(name, {})
            for members, value in groups:
                different = [each for each in members if known.setdefault(each, value) != value]
                if different:
                    others = f" and {len(different) - 1} more" if len(different) > 1 else ""
                    problems.append(
                        f"{name}: the hyperparameters of {different[0]}{others} on rank {rank} "
                        "differ from those on an earlier rank"
                    )
    if problems:
        raise MismatchError(
            "plain values differ between ranks; set equal hyperparameters on all ranks, and wrap "
            "other values that are meant to differ in sw.PerRank(value):",
            problems,
        )
    for name, known in value_of_member.items():
        objects[name] = _group_by_value(known)
    return tuple(ObjectEntry(name, value) for name, value in objects.items())


def _group_by_value(value_of_member: dict[str, JsonValue]) -> JsonValue:
    """Return the members, grouped by equal values."""
    groups: dict[bytes, tuple[list[JsonValue], JsonValue]] = {}
    for member, value in value_of_member.items():
        key = msgspec.json.encode(value)
        groups.setdefault(key, ([], value))[0].append(member)
    return [{"members": members, "value": value} for members, value in groups.values()]
