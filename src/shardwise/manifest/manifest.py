"""The manifest, which lists everything in a checkpoint, as values and as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from shardwise.errors import FormatError, StateError
from shardwise.manifest.checksums import crc32
from shardwise.manifest.names import LONGEST_NAME

VERSION = 1
LARGEST = 2**62
LARGEST_MANIFEST = 2**28

Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
Step = Annotated[int, msgspec.Meta(ge=-LARGEST, le=LARGEST)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_NAME)]
Dims = Annotated[tuple[Count, ...], msgspec.Meta(max_length=64)]


class Repeat(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """`count` pieces in arithmetic progression: the differences between one and the next."""

    count: Annotated[int, msgspec.Meta(ge=2, le=2**24)]
    offset: tuple[Step, ...]
    file: Step = 0
    start: Step = 0


class PieceEntry(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A box of the tensor, row-major at byte `start` of the data section of file number `file`."""

    file: Count
    start: Count
    offset: Dims
    shape: Dims
    repeat: Repeat | None = None


class TensorEntry(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A global tensor. One with `same_as` is tied to another and has no pieces."""

    name: Name
    dtype: str
    shape: Dims
    pieces: tuple[PieceEntry, ...] = ()
    same_as: Name | None = None


class ObjectEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plain value that all ranks share, encoded."""

    name: Name
    value: Any


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A data file of `size` bytes, written by `rank`; see `FileLayout` for its parts."""

    name: str
    rank: Count
    size: Count
    data_at: Count
    objects_at: Count
    checksums_at: Count
    checksums_crc32: Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything in a checkpoint.

    `per_rank` has the names of values that differ between ranks. A metric that was not finite is
    None.
    """

    format: str = "shardwise"
    version: int = VERSION
    save_id: str
    step: int | None
    created: str
    world_size: Annotated[int, msgspec.Meta(ge=1, le=2**24)]
    metrics: dict[str, float | None] = {}
    per_rank: tuple[Name, ...] = ()
    files: tuple[FileEntry, ...]
    objects: tuple[ObjectEntry, ...]
    tensors: tuple[TensorEntry, ...]


def encode_tensors(names: Sequence[TensorEntry]) -> bytes:
    """Return the JSON array of tensors, one to a line: the slow part of `encode_manifest`."""
    return b"[" + b",".join(b"\n" + msgspec.json.encode(entry) for entry in names) + b"]"


def encode_manifest(manifest: Manifest, tensors: bytes | None = None) -> bytes:
    """Return the manifest's bytes: one field to a line, with a checksum of all others at the end.

    Args:
        tensors: result of `encode_tensors` for `manifest.tensors`, if it was called before.

    Raises:
        StateError: the manifest would be larger than the limit for reading.
    """
    lines = []
    for field in Manifest.__struct_fields__:
        if field == "tensors":
            value = encode_tensors(manifest.tensors) if tensors is None else tensors
        else:
            value = msgspec.json.encode(getattr(manifest, field))
        lines.append(f'"{field}":'.encode() + value)
    return _sealed(b"{" + b",\n".join(lines) + b",\n")


def complete_manifest(pending: bytes, files: Sequence[FileEntry]) -> bytes:
    """Return a pending manifest, which `encode_manifest` made without files, with its files.

    Raises:
        FormatError: the bytes are not a pending manifest, or were altered.
        StateError: the manifest would be larger than the limit for reading.
    """
    body = _checked(pending, "the pending manifest")
    head, empty, tail = body.partition(b'"files":[],\n')
    if not empty:
        raise FormatError("not a pending manifest: it has files")
    return _sealed(head + b'"files":' + msgspec.json.encode(list(files)) + b",\n" + tail)


def decode_manifest(data: bytes) -> Manifest:
    """Return the manifest in these bytes; `shardwise.manifest.validate` checks its contents.

    Raises:
        FormatError: the bytes are not a manifest, were altered, or have another version.
    """
    body = _checked(data, "the manifest")
    text = body.rstrip(b",\n") + b"}"
    try:
        head = msgspec.json.decode(text, type=_Head)
        if head.format != "shardwise" or head.version != VERSION:
            raise FormatError(
                f"the manifest has format {head.format!r} version {head.version}, but this "
                f"shardwise reads 'shardwise' version {VERSION}: a newer shardwise may be needed"
            )
        return msgspec.json.decode(text, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"the manifest is malformed: {error}") from error


def _sealed(body: bytes) -> bytes:
    """Return a manifest's bytes with the checksum added."""
    if len(body) >= LARGEST_MANIFEST - 32:
        raise StateError(
            f"the manifest would have {len(body)} bytes, and at most {LARGEST_MANIFEST} are read: "
            "save large plain values as tensors, or as several checkpoints"
        )
    return body + b'"crc32":%d}\n' % crc32(body)


def _checked(data: bytes, what: str) -> bytes:
    """Return a manifest's bytes without the checksum at the end, which is verified."""
    body, marker, tail = data.rpartition(b'"crc32":')
    if not marker or not tail.endswith(b"}\n") or not tail[:-2].isdigit():
        raise FormatError(f"{what} is truncated: the checksum at its end is missing")
    if len(tail) > 12 or int(tail[:-2]) != crc32(body):
        raise FormatError(f"{what} was altered: its checksum does not match")
    return body


class _Head(msgspec.Struct):
    format: str = ""
    version: int = 0
