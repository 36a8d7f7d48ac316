"""The manifest, which lists all files, tensors and values of a checkpoint, and its encoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from shardwise.decoding import DECODE_ERRORS, prepare_decoding
from shardwise.errors import FormatError, StateError
from shardwise.manifest.checksums import add_checksum, verify_checksum
from shardwise.manifest.names import LONGEST_NAME

FORMAT, VERSION = "shardwise", 1
LARGEST_INTEGER = 2**62
LARGEST_MANIFEST = 2**28

Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_INTEGER)]
Kind = TypeVar("Kind")
SignedCount = Annotated[int, msgspec.Meta(ge=-LARGEST_INTEGER, le=LARGEST_INTEGER)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_NAME)]
Dims = Annotated[tuple[Count, ...], msgspec.Meta(max_length=64)]


class TensorEntry(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A global tensor.

    Attributes:
        name: the full name.
        dtype: torch's name of the dtype, for example `bfloat16`.
        shape: the global shape.
        same_as: the name of the tensor that this one is tied to. A tied tensor has no pieces.
    """

    name: Name
    dtype: str
    shape: Dims
    same_as: Name | None = None


class ObjectEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plain value that all ranks share, encoded."""

    name: Name
    value: Any


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A data file, whose parts follow each other without gaps.

    The header is in `[0, data_at)`, the pieces are in `[data_at, objects_at)`, and the plain values
    of the rank in `[objects_at, checksums_at)`. The checksums of all bytes before them are in
    `[checksums_at, size)`.

    Attributes:
        name: the name of the file.
        rank: the rank that wrote the file.
        size: the size of the file, in bytes.
        data_at, objects_at, checksums_at: offsets of the parts, in bytes.
        checksums_crc32: the CRC-32 of the table of checksums.
    """

    name: str
    rank: Count
    size: Count
    data_at: Count
    objects_at: Count
    checksums_at: Count
    checksums_crc32: Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


@prepare_decoding
class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The contents of a checkpoint.

    Attributes:
        format: `shardwise`.
        version: the version of the format.
        save_id: the id of the save, which is part of the names of its files.
        step: the training step; None if the checkpoint has none.
        created: the time of the save, in ISO 8601.
        world_size: the number of ranks that saved.
        metrics: the saved metrics; None for metrics that were not finite.
        per_rank: the names of the per-rank values.
        left_out: what an export could not read from its source, with the reason; one line each.
        files: the data files.
        objects: the plain values that all ranks share.
        tensors: the list of tensors, encoded; see `manifest/pieces.py`. It is long, and most
            readers of a manifest need other fields only.
    """

    format: str = FORMAT
    version: int = VERSION
    save_id: str
    step: Count | None
    created: str
    world_size: Annotated[int, msgspec.Meta(ge=1, le=2**24)]
    metrics: dict[str, float | None] = {}
    per_rank: tuple[Name, ...] = ()
    left_out: tuple[str, ...] = ()
    files: tuple[FileEntry, ...]
    objects: tuple[ObjectEntry, ...]
    tensors: msgspec.Raw


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as bytes: one field on each line, then a checksum of all fields.

    Raises:
        StateError: the manifest is larger than the limit for reading.
    """
    lines = []
    for field in Manifest.__struct_fields__:
        if field == "left_out" and not manifest.left_out:
            continue
        lines.append(f'"{field}":'.encode() + msgspec.json.encode(getattr(manifest, field)))
    return _add_checksum(b"{" + b",\n".join(lines) + b",\n")


def complete_manifest(pending: bytes, files: Sequence[FileEntry]) -> bytes:
    """Add the files to a pending manifest.

    Args:
        pending: a manifest that `encode_manifest` encoded without files.
        files: the data files.

    Raises:
        FormatError: the bytes are not a pending manifest, or were altered.
        StateError: the manifest is larger than the limit for reading.
    """
    body = _verify_checksum(pending, "the pending manifest")
    head, empty, tail = body.partition(b'"files":[],\n')
    if not empty:
        raise FormatError(
            "the pending manifest is damaged: it already lists the files that a commit adds; save "
            "the step again"
        )
    return _add_checksum(head + b'"files":' + msgspec.json.encode(list(files)) + b",\n" + tail)


def decode_manifest(data: bytes) -> Manifest:
    """Decode a manifest, except its tensors. `shardwise.manifest.validate` checks the contents.

    Raises:
        FormatError: the bytes are not a manifest, were altered, or have another version.
    """
    body = _verify_checksum(data, "the manifest")
    text = body.rstrip(b",\n") + b"}"
    head = decode_json(text, _Head)
    if head.format != FORMAT or head.version != VERSION:
        raise FormatError(
            f"the manifest has format {head.format!r} version {head.version}, but this version of "
            f"shardwise reads {FORMAT!r} version {VERSION}: install a newer version of shardwise"
        )
    return decode_json(text, Manifest)


def decode_json(encoded: bytes | msgspec.Raw, kind: type[Kind]) -> Kind:
    """Decode a manifest or a part of it.

    Raises:
        FormatError: the bytes are not the JSON of such a value.
    """
    try:
        return msgspec.json.decode(encoded, type=kind)
    except DECODE_ERRORS as error:
        raise FormatError(f"the manifest is malformed: {error}; load another checkpoint") from error


def _add_checksum(body: bytes) -> bytes:
    """Return the bytes of a manifest with the checksum at the end."""
    if len(body) >= LARGEST_MANIFEST - 32:
        raise StateError(
            f"the manifest would have {len(body)} bytes, and at most {LARGEST_MANIFEST} are read: "
            "save large plain values as tensors, or as several checkpoints"
        )
    return add_checksum(body)


def _verify_checksum(data: bytes, label: str) -> bytes:
    """Verify the checksum at the end of a manifest, and return the bytes before it."""
    try:
        return verify_checksum(data)
    except ValueError as error:
        raise FormatError(
            f"{label} was {error}; copy it again from an intact source, or load another checkpoint"
        ) from error


@prepare_decoding
class _Head(msgspec.Struct):
    format: str = ""
    version: int = 0
