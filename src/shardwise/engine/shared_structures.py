"""Send the structures of the states of ranks to all ranks, each distinct one once."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence

import msgspec
import numpy as np

from shardwise.decoding import prepare_decoding
from shardwise.engine.group import Group
from shardwise.engine.rounds import Round
from shardwise.errors import StateError
from shardwise.plan.structure import Description, GroupMembers, RanksOfStructure, Structure

LARGEST_STRUCTURE = 2**30
"""The most bytes of an encoded structure."""


@prepare_decoding
class _Members(msgspec.Struct, array_like=True):
    """A structure, and ranks that have it.

    Attributes:
        structure: the encoded structure without its tensors, compressed.
        tensors: the key of its tensors in `_Described.tensors`.
        ranks: the ranks, as little-endian int32.
        coordinates: the coordinates of these ranks, one rank after the other, as int32.
    """

    structure: bytes
    tensors: bytes
    ranks: bytes
    coordinates: bytes


_Tensors = tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[int, ...], ...], GroupMembers]
"""The names, dtypes, shapes and groups of a structure. They are long, and ranks with ranges of flat
tensors, who have different structures, have them in common."""


@prepare_decoding
class _Described(msgspec.Struct, array_like=True):
    """What some ranks together say of their states.

    Attributes:
        tensors: encoded tensors of structures, compressed, by a digest.
        members: the structures and their ranks, by the fingerprint of the structure.
    """

    tensors: dict[bytes, bytes]
    members: dict[bytes, _Members]


def share_structures(
    fingerprint: bytes, description: Description, group: Group
) -> tuple[bytes, list[RanksOfStructure]]:
    """Send each distinct structure, and the coordinates of all ranks, to all ranks.

    Returns:
        A digest of all structures and coordinates; and the structures, by their first ranks.
    """
    own = _describe(fingerprint, description, group.rank)
    with Round(group, "describing a save") as all_ranks:
        shared = all_ranks.all_reduce(own, _Described, _unite_descriptions)
    tensors: dict[bytes, _Tensors] = {
        digest: msgspec.msgpack.decode(_decompress(encoded), type=_Tensors)
        for digest, encoded in shared.tensors.items()
    }
    structures = []
    for digest, members in shared.members.items():
        ranks = np.frombuffer(members.ranks, "<i4").astype(np.int64)
        coordinates = np.frombuffer(members.coordinates, "<i4").astype(np.int64)
        coordinates = coordinates.reshape(len(ranks), len(coordinates) // len(ranks))
        order = np.argsort(ranks)
        structure = msgspec.msgpack.decode(_decompress(members.structure), type=Structure)
        names, dtypes, shapes, groups = tensors[members.tensors]
        structure = msgspec.structs.replace(
            structure, names=names, dtypes=dtypes, shapes=shapes, groups=groups
        )
        structures.append(RanksOfStructure(structure, ranks[order], coordinates[order], digest))
    structures.sort(key=lambda each: int(each.ranks[0]))
    key = hashlib.blake2b(digest_size=16)
    for each in structures:
        key.update(each.fingerprint + each.ranks.tobytes() + each.coordinates.tobytes())
    return key.digest(), structures


def _describe(fingerprint: bytes, description: Description, rank: int) -> _Described:
    structure = description.structure
    listed = structure.names, structure.dtypes, structure.shapes, structure.groups
    tensors = msgspec.msgpack.encode(listed)
    rest = msgspec.structs.replace(structure, names=(), dtypes=(), shapes=(), groups=())
    members = _Members(
        zlib.compress(msgspec.msgpack.encode(rest), 1),
        digest_of(tensors),
        np.array([rank], "<i4").tobytes(),
        np.array(description.coordinates, "<i4").tobytes(),
    )
    return _Described({members.tensors: zlib.compress(tensors, 1)}, {fingerprint: members})


def _decompress(compressed: bytes) -> bytes:
    stream = zlib.decompressobj()
    encoded = stream.decompress(compressed, LARGEST_STRUCTURE)
    if not stream.eof:
        raise StateError(
            f"the names and shapes of a rank's tensors take more than {LARGEST_STRUCTURE:,} bytes: "
            "save fewer tensors, or shorten their names"
        )
    return encoded


def _unite_descriptions(messages: Sequence[_Described]) -> _Described:
    parts: dict[bytes, list[_Members]] = {}
    for message in messages:
        for fingerprint, members in message.members.items():
            parts.setdefault(fingerprint, []).append(members)
    united = {
        fingerprint: _Members(
            found[0].structure,
            found[0].tensors,
            b"".join(each.ranks for each in found),
            b"".join(each.coordinates for each in found),
        )
        for fingerprint, found in parts.items()
    }
    tensors = {digest: data for each in messages for digest, data in each.tensors.items()}
    return _Described(tensors, united)


def digest_of(data: bytes) -> bytes:
    """Return a digest that differs for different data."""
    return hashlib.blake2b(data, digest_size=16).digest()
