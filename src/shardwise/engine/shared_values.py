"""Plain values that all ranks share: compare them between ranks, and unite them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from shardwise.errors import MismatchError
from shardwise.manifest.manifest import ObjectEntry
from shardwise.state.leaves import LocalState
from shardwise.state.objects import JsonValue, differences


class SharedValues(msgspec.Struct, array_like=True):
    """The shared values of one rank: objects by name, and groups as `[members, value]`."""

    objects: dict[str, JsonValue]
    grouped: dict[str, list[tuple[tuple[str, ...], JsonValue]]]

    @classmethod
    def of(cls, state: LocalState) -> SharedValues:
        """Return the shared values of a local state."""
        grouped = {
            name: [(group.members, group.value) for group in groups]
            for name, groups in state.grouped.items()
        }
        return cls(state.objects, grouped)

    def encode(self) -> bytes:
        """Return the values as bytes, for the rank that publishes."""
        return msgspec.json.encode(self)

    def digest(self) -> bytes:
        """Return a digest of the values; equal values have equal digests."""
        encoded = msgspec.json.encode(self, order="sorted")
        return hashlib.blake2b(encoded, digest_size=16).digest()


def unite_values(encoded: Sequence[bytes]) -> tuple[ObjectEntry, ...]:
    """Unite the shared values of all ranks: keep one of equal objects, and join groups.

    Args:
        encoded: the encoded values of each rank; empty if another rank has the same values.

    Raises:
        MismatchError: ranks have different values under one name; lists all of them.
    """
    objects: dict[str, JsonValue] = {}
    origin: dict[str, int] = {}
    settings: dict[str, dict[str, JsonValue]] = {}
    problems: list[str] = []
    for rank, data in enumerate(encoded):
        if not data:
            continue
        values = msgspec.json.decode(data, type=SharedValues)
        for name, value in values.objects.items():
            if name not in objects:
                objects[name], origin[name] = value, rank
            elif objects[name] != value:
                at = ", ".join(differences(objects[name], value, name)[:5])
                problems.append(f"{at}: rank {origin[name]} and rank {rank} differ")
        for name, groups in values.grouped.items():
            known = settings.setdefault(name, {})
            for members, value in groups:
                problems += [
                    f"{name}: hyperparameters of {member} differ between ranks"
                    for member in members
                    if known.setdefault(member, value) != value
                ]
    if problems:
        raise MismatchError(
            "plain values differ between ranks; wrap values that each rank has for itself in "
            "sw.PerRank(value):",
            problems,
        )
    for name, known in settings.items():
        objects[name] = _regrouped(known)
    return tuple(ObjectEntry(name, value) for name, value in objects.items())


def _regrouped(settings: dict[str, JsonValue]) -> JsonValue:
    """Return the members grouped by equal values."""
    groups: dict[bytes, tuple[list[JsonValue], JsonValue]] = {}
    for member, value in settings.items():
        key = msgspec.json.encode(value)
        groups.setdefault(key, ([], value))[0].append(member)
    return [{"members": members, "value": value} for members, value in groups.values()]
