"""Differences between replicas: their description, the reaction to them, and how to find them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, get_args

import msgspec
import numpy as np

from shardwise.boxes import Box
from shardwise.decoding import prepare_decoding
from shardwise.errors import name_ranks

Reaction = Literal["warn", "raise", "ignore"]
OnDivergence = Reaction | Mapping[str, Reaction]
MOST_BOXES_SHOWN, MOST_NAMES_SHOWN = 3, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Boxes of a tensor that differ between ranks that should hold the same bytes.

    Attributes:
        step: the step of the save at which the boxes differed.
        equal_at: the step of the last save at which the boxes were equal; None if they were not
            compared before.
        tensor: the name of the tensor.
        boxes: the boxes that differ.
        groups: the ranks that hold the boxes, grouped by equal bytes; large groups first.
    """

    step: int
    equal_at: int | None
    tensor: str
    boxes: tuple[Box, ...]
    groups: tuple[tuple[int, ...], ...]

    @property
    def minority(self) -> tuple[int, ...]:
        """The ranks that differ from more than half of the ranks; empty if there is no majority."""
        ranks = [rank for group in self.groups for rank in group]
        has_majority = 2 * len(self.groups[0]) > len(ranks)
        return tuple(sorted(ranks[len(self.groups[0]) :])) if has_majority else ()

    def __str__(self) -> str:
        shown = ", ".join(str(box) for box in self.boxes[:MOST_BOXES_SHOWN] if box.shape)
        if len(self.boxes) > MOST_BOXES_SHOWN:
            shown += f" and {len(self.boxes) - MOST_BOXES_SHOWN} more boxes"
        if self.minority:
            one = len(self.minority) == 1
            differ = f"{name_ranks(self.minority)} {'differs' if one else 'differ'} from "
            differ += name_ranks(self.groups[0])
        else:
            differ = f"{' and '.join(map(name_ranks, self.groups))} differ"
        equal = "" if self.equal_at is None else f" (equal at step {self.equal_at})"
        return f"{self.tensor}{shown}: {differ}{equal}"


@dataclass(frozen=True, slots=True)
class DivergencePolicy:
    """What to do if the replicas of a tensor differ.

    Attributes:
        rules: pairs of a shell pattern and a reaction. The first pattern that matches the name of
            a tensor decides. Without a match, the reaction is "warn".
    """

    rules: tuple[tuple[str, Reaction], ...]

    @classmethod
    def from_option(cls, on_divergence: object) -> DivergencePolicy:
        """Return the policy of the option `on_divergence`.

        Raises:
            ValueError: a reaction is unknown.
            TypeError: the option is neither a reaction nor a dict.
        """
        given = {"*": on_divergence} if isinstance(on_divergence, str) else on_divergence
        if not isinstance(given, Mapping) or not all(isinstance(each, str) for each in given):
            raise TypeError(
                f'on_divergence={on_divergence!r}: expected "warn", "raise", "ignore", or a dict '
                'such as {"*.running_*": "ignore", "*": "raise"}'
            )
        for reaction in given.values():
            if reaction not in get_args(Reaction):
                raise ValueError(
                    f'on_divergence={on_divergence!r}: expected "warn", "raise" or "ignore", not '
                    f"{reaction!r}"
                )
        return cls(tuple(given.items()))

    @property
    def ignores_all(self) -> bool:
        """Whether no tensor is compared."""
        return bool(self.rules) and self.rules[0] == ("*", "ignore")

    def reaction_to(self, tensor: str) -> Reaction:
        """Return what to do if the replicas of a tensor differ."""
        matching = (reaction for pattern, reaction in self.rules if fnmatchcase(tensor, pattern))
        return next(matching, "warn")


_SUM_SIZE = 16
"""The size of a sum of hashes, in bytes."""


@prepare_decoding
class SetDigest(msgspec.Struct, array_like=True):
    """A digest of the checksums of a set of boxes.

    Attributes:
        digest: of the first rank that sent one.
        rank: that rank.
        differs: whether a digest of another rank differs.
    """

    digest: bytes
    rank: int
    differs: bool = False


_Digests = dict[str, dict[int, SetDigest]]
"""The digests of samples of some ranks, by the samples' save and comparison, and by the number of
the set. Samples of the same save and comparison are of the same boxes."""


@prepare_decoding
class SampleDetails(msgspec.Struct, array_like=True):
    """A rank's message about the sets that differ. The keys of dicts are the numbers of the sets.

    Attributes:
        step: the step of the sample.
        checksums: the checksums of this rank.
        boxes: the tensor, offset and shape of each box, from the first owner of a set only.
        equal_at: the step at which the same boxes were last equal, if there is one.
    """

    step: int
    checksums: dict[int, bytes]
    boxes: dict[int, list[tuple[str, tuple[int, ...], tuple[int, ...]]]]
    equal_at: dict[int, int]


def encode_sum(key: str, digests: Mapping[int, tuple[bytes, int, bool]]) -> bytes:
    """Return a short message that tells whether the digests of a rank equal those of other ranks.

    The first of m owners of a set adds `(m - 1) * h`, where h is a hash of the set and its digest.
    The other owners subtract h. If all digests are equal, the sum over all ranks is 0. Otherwise,
    it is 0 with a probability of 2^-128.

    Args:
        key: the save and the comparison of the sample.
        digests: for each set, by its number: the digest, the number m of owners, and whether the
            rank is the first of them.
    """
    total = 0
    for number, (digest, owner_count, is_first) in digests.items():
        hashed = hashlib.blake2b(number.to_bytes(8, "little") + digest, digest_size=_SUM_SIZE)
        total += int.from_bytes(hashed.digest(), "little") * (owner_count - 1 if is_first else -1)
    return msgspec.msgpack.encode({key: _encode_sum(total)})


def _encode_sum(total: int) -> bytes:
    return (total % (1 << 8 * _SUM_SIZE)).to_bytes(_SUM_SIZE, "little")


def combine_sums(messages: Sequence[bytes]) -> bytes:
    """Add up the sums of some ranks. A message is empty if a rank has no sample."""
    totals: dict[str, int] = {}
    for message in filter(None, messages):
        for key, total in msgspec.msgpack.decode(message, type=dict[str, bytes]).items():
            totals[key] = totals.get(key, 0) + int.from_bytes(total, "little")
    return msgspec.msgpack.encode({key: _encode_sum(total) for key, total in totals.items()})


def has_difference(message: bytes) -> bool:
    """Return whether digests differ, or some are missing, from the sums of all ranks."""
    sums = msgspec.msgpack.decode(message, type=dict[str, bytes]) if message else {}
    return any(any(total) for total in sums.values())


def combine_digests(messages: Sequence[bytes]) -> bytes:
    """Combine the encoded digests of some ranks. A message is empty if a rank has no sample."""
    combined: _Digests = {}
    for message in messages:
        for key, sets in _decode_digests(message).items():
            own = combined.setdefault(key, {})
            for number, digest in sets.items():
                other = own.get(number, digest)
                first = min(digest, other, key=lambda each: each.rank)
                differs = digest.differs or other.differs or digest.digest != other.digest
                own[number] = SetDigest(first.digest, first.rank, differs)
    return msgspec.msgpack.encode(combined)


def keep_differing(message: bytes) -> bytes:
    """Return the combined digests of all ranks without the sets that are equal."""
    differing = {
        key: {number: each for number, each in sets.items() if each.differs}
        for key, sets in _decode_digests(message).items()
    }
    return msgspec.msgpack.encode({key: sets for key, sets in differing.items() if sets})


def find_differing_sets(message: bytes) -> dict[int, int]:
    """Return the numbers of the sets that differ, with the first rank of each.

    Args:
        message: the combined digests of all ranks.
    """
    sets = _decode_digests(message).values()
    return {
        number: each.rank for own in sets for number, each in sorted(own.items()) if each.differs
    }


def _decode_digests(message: bytes) -> _Digests:
    return msgspec.msgpack.decode(message, type=_Digests) if message else {}


def find_divergences(
    details: Mapping[int, SampleDetails], differing: Mapping[int, int]
) -> tuple[Divergence, ...]:
    """Compare the checksums of all ranks.

    Args:
        details: the details of each rank that has a sample, by rank.
        differing: the sets that differ, with the first rank of each.
    """
    found: list[Divergence] = []
    for number, first_rank in sorted(differing.items()):
        first = details[first_rank]
        ranks = sorted(rank for rank, each in details.items() if number in each.checksums)
        table = np.stack([np.frombuffer(details[r].checksums[number], np.uint32) for r in ranks])
        boxes: dict[tuple[str, tuple[tuple[int, ...], ...]], list[Box]] = {}
        for column in np.flatnonzero((table != table[0]).any(axis=0)).tolist():
            name, offset, shape = first.boxes[number][column]
            groups = group_ranks(ranks, table[:, column].tolist())
            boxes.setdefault((name, groups), []).append(Box(offset, shape))
        found += [
            Divergence(
                step=first.step,
                equal_at=first.equal_at.get(number),
                tensor=name,
                boxes=tuple(own),
                groups=groups,
            )
            for (name, groups), own in boxes.items()
        ]
    return tuple(found)


def group_ranks(ranks: Sequence[int], checksums: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks grouped by equal checksums: large groups first, then by their first rank."""
    groups: dict[int, list[int]] = {}
    for rank, checksum in zip(ranks, checksums, strict=True):
        groups.setdefault(checksum, []).append(rank)
    return tuple(sorted(map(tuple, groups.values()), key=lambda each: (-len(each), each[0])))
