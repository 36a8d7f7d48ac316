"""Send the structures of the states of ranks to all ranks, each distinct one once."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from shardwise.kernel.boxes.box import IntArray
from shardwise.kernel.decoding import prepare_decoding
from shardwise.kernel.engine.group import Group
from shardwise.kernel.engine.rounds import Round
from shardwise.kernel.errors import RankError, StateError
from shardwise.kernel.plan.structure import Description, ParamGroups, RanksOfStructure, Structure

_OPERATION = "describing a save"
_REPORT = "This is a bug of shardwise: report it, with the shapes and placements of the tensors"
LARGEST_STRUCTURE = 2**28
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


class _Tensors(NamedTuple):
    """The tensors of a structure. They are long, and structures often have them in common.

    For example, ranks that hold ranges of flat tensors have different structures of the same
    tensors.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    param_groups: ParamGroups


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

    Raises:
        RankError: a rank has sent coordinates that do not fit its structure.
    """
    if group.size == 1:
        coordinates = np.array([description.coordinates], np.int64)
        only = description.structure, np.zeros(1, np.int64), coordinates, fingerprint
        structures = [RanksOfStructure(*only)]
    else:
        structures = _exchange_structures(fingerprint, description, group)
    for each in structures:
        _check_coordinates(each.structure, each.ranks, each.coordinates)
    key_of_all = hashlib.blake2b(digest_size=16)
    for each in structures:
        key_of_all.update(each.fingerprint + each.ranks.tobytes() + each.coordinates.tobytes())
    return key_of_all.digest(), structures


def _exchange_structures(
    fingerprint: bytes, description: Description, group: Group
) -> list[RanksOfStructure]:
    """Return the structures of all ranks, by their first ranks. A collective."""
    tensors: dict[bytes, _Tensors] = {}
    message = _describe(fingerprint, description, group)
    with Round(group, _OPERATION) as all_ranks:
        shared = all_ranks.all_reduce(message, _Described, _unite_descriptions)
    structures = []
    for digest, members in shared.members.items():
        ranks, coordinates = _decode_ranks(members)
        order = np.argsort(ranks)
        if digest == fingerprint:
            structure = description.structure
        else:
            key = members.tensors
            if key not in tensors:
                encoded = _decompress(shared.tensors[key])
                tensors[key] = msgspec.msgpack.decode(encoded, type=_Tensors)
            structure = msgspec.msgpack.decode(_decompress(members.structure), type=Structure)
            structure = msgspec.structs.replace(structure, **tensors[key]._asdict())
        structures.append(RanksOfStructure(structure, ranks[order], coordinates[order], digest))
    found = np.sort(np.concatenate([each.ranks for each in structures]))
    if not np.array_equal(found, np.arange(group.size)):
        raise StateError(
            f"the ranks have described {len(found)} states, not one for each rank. {_REPORT}"
        )
    return sorted(structures, key=lambda each: int(each.ranks[0]))


def _decode_ranks(members: _Members) -> tuple[IntArray, IntArray]:
    """Return the ranks that have a structure, `(n,)`, and their coordinates, `(n, axes)`."""
    count, coordinates = len(members.ranks) // 4, len(members.coordinates) // 4
    if not count or len(members.ranks) % 4 or len(members.coordinates) % (4 * count):
        raise StateError(
            f"planning the save: {count} ranks with the same structure, the first of which are "
            f"{np.frombuffer(members.ranks[: 4 * min(count, 4)], '<i4').tolist()}, sent "
            f"{coordinates} coordinates, which is not the same number for each. {_REPORT}"
        )
    ranks = np.frombuffer(members.ranks, "<i4").astype(np.int64)
    table = np.frombuffer(members.coordinates, "<i4").astype(np.int64)
    return ranks, table.reshape(count, coordinates // count)


def _check_coordinates(structure: Structure, ranks: IntArray, coordinates: IntArray) -> None:
    """Check that coordinates are indices of parts in the axes of a structure.

    Raises:
        RankError: they are not. The error names the ranks.
    """
    splits = {split for rule in structure.rules for split in rule}
    axes = 1 + max((split.axis for split in splits), default=-1)
    if coordinates.shape[1] != axes or min((split.axis for split in splits), default=0) < 0:
        text = (
            f"it sent {coordinates.shape[1]} coordinates for a structure with {axes} axes. "
            f"{_REPORT}"
        )
        raise RankError(_OPERATION, dict.fromkeys(ranks.tolist(), text))
    for split in splits:
        index = coordinates[:, split.axis]
        wrong = np.flatnonzero((index < 0) | (index >= split.parts)).tolist()
        if wrong:
            texts = {
                int(ranks[i]): f"it sent the coordinate {index[i]} for an axis of {split.parts} "
                f"parts. {_REPORT}"
                for i in wrong
            }
            raise RankError(_OPERATION, texts)


def _describe(fingerprint: bytes, description: Description, group: Group) -> _Described:
    """Return the message of one rank."""
    structure = description.structure
    listed = _Tensors(structure.names, structure.dtypes, structure.shapes, structure.param_groups)
    rest = msgspec.structs.replace(structure, names=(), dtypes=(), shapes=(), param_groups=())
    tensors = msgspec.msgpack.encode(listed)
    members = _Members(
        zlib.compress(msgspec.msgpack.encode(rest), 1),
        digest_of(tensors),
        np.array([group.rank], "<i4").tobytes(),
        np.array(description.coordinates, "<i4").tobytes(),
    )
    return _Described({members.tensors: zlib.compress(tensors, 1)}, {fingerprint: members})


def encode_structure(structure: Structure) -> bytes:
    """Return a structure as bytes.

    Raises:
        StateError: it is too large to be sent.
    """
    encoded = msgspec.msgpack.encode(structure)
    if len(encoded) > LARGEST_STRUCTURE:
        raise StateError(
            f"the names, shapes and boxes of this rank's tensors take {len(encoded):,} bytes, more "
            f"than {LARGEST_STRUCTURE:,}: save fewer tensors, or shorten their names"
        )
    return encoded


def _decompress(compressed: bytes) -> bytes:
    return zlib.decompressobj().decompress(compressed, LARGEST_STRUCTURE)


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
