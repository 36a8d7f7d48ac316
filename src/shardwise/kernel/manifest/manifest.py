"""The files of a checkpoint, and their names.

The manifest lists data files, tensors and plain values. A data file has a safetensors header, the
pieces, plain values, and checksums.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from shardwise.kernel.boxes import Box
from shardwise.kernel.decoding import DECODE_ERRORS, prepare_decoding
from shardwise.kernel.errors import FormatError, StateError
from shardwise.kernel.manifest.checksums import add_checksum, block_count, verify_checksum
from shardwise.kernel.manifest.data_files import LARGEST_INTEGER as LARGEST_INTEGER
from shardwise.kernel.manifest.data_files import (
    MOST_RANKS,
    FileRule,
    FileTable,
    files_of_rules,
    rules_of,
)
from shardwise.kernel.manifest.data_files import Count as Count
from shardwise.kernel.manifest.data_files import (
    FileEntry as FileEntry,
)
from shardwise.kernel.manifest.data_files import data_file as data_file
from shardwise.kernel.manifest.data_files import save_id_of_file as save_id_of_file
from shardwise.kernel.manifest.dtypes import DTYPES

FORMAT, VERSION = "shardwise", 2
READABLE_VERSIONS = (1, 2)
DATA_FILE_VERSION = 1
"""The version in the headers of data files, which are the same in both versions of the format."""
LARGEST_MANIFEST = 48 << 20
MOST_VALUES = 2**21
"""The most commas and brackets in the encoded plain values. Their values then take less than 200 MB
of memory."""
_TOO_MANY_VALUES = (
    "the plain values have {:,} commas and brackets, and at most "
    f"{MOST_VALUES:,} are read: save long lists as tensors or arrays, and long texts as bytes"
)
MOST_NAMES = 2**18
LARGEST_TELEMETRY = 2**26
"""Bytes of a compressed file; 131,072 ranks need less than 20 MB."""
ALIGNMENT = 4096
"""Pieces begin at a multiple of this many bytes, and so do reads that bypass the page cache."""
METADATA = "__metadata__"
MANIFEST = "manifest.json"
REMOVED = "removed.json"
MIRROR_FILE = "mirror.json"
"""In a root: where its mirror is; see `shardwise.parts.tiers.record`."""
RESERVED = "__shardwise__"
"""Names that begin with this text are left to shardwise itself."""
LONGEST_NAME = 4096
OBJECTS_KEY = f"{RESERVED}.objects"
CHECKSUMS_KEY = f"{RESERVED}.checksums"
FROZEN, ADAPTERS = "_frozen", "adapters"
"""`model._frozen.…` are values that describe the frozen tensors of `model`; see `sw.trainable`.

`model._frozen.adapters.…` are the configurations of its adapters.
"""

ENCODED_FIELDS = (
    *("format", "version", "save_id", "step", "created", "world_size", "metrics", "per_rank"),
    *("left_out", "files", "objects", "tensors"),
)
"""The fields of a manifest, in the order of its lines."""

_STEP = re.compile(r"step-(\d{8,18})")
_SAVE_ID = re.compile(r"[0-9a-f]{16}")
_TELEMETRY_FILE = r"telemetry-[0-9a-f]{16}\.json\.gz"
_FILE_OF_SAVE = re.compile(
    r"r\d{5,}-[0-9a-f]{16}\.safetensors((\.[0-9a-f]{8})?\.part)?|saving-[0-9a-f]{16}\.lock"
    rf"|{_TELEMETRY_FILE}|\.(manifest\.json|{_TELEMETRY_FILE})\.[0-9a-f]{{8}}|removed\.json"
)

Kind = TypeVar("Kind")
SignedCount = Annotated[int, msgspec.Meta(ge=-LARGEST_INTEGER, le=LARGEST_INTEGER)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_NAME)]
Dims = Annotated[tuple[Count, ...], msgspec.Meta(max_length=64)]


class TensorEntry(
    msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, gc=False
):
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


class ManifestFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a manifest says, except the files.

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
        objects: the plain values that all ranks share.
        tensors: the list of tensors, encoded; see `kernel/manifest/pieces.py`. It is long, and most
            readers of a manifest need other fields only.
    """

    format: str = FORMAT
    version: int = VERSION
    save_id: str
    step: Count | None
    created: str
    world_size: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]
    metrics: Annotated[dict[str, float | None], msgspec.Meta(max_length=MOST_NAMES)] = {}
    per_rank: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MOST_NAMES)] = ()
    left_out: Annotated[tuple[str, ...], msgspec.Meta(max_length=MOST_NAMES)] = ()
    objects: tuple[ObjectEntry, ...]
    tensors: msgspec.Raw


class Manifest(ManifestFields, frozen=True, kw_only=True):
    """The contents of a checkpoint.

    Attributes:
        files: the data files. A decoded manifest has a `FileTable`.
    """

    files: Sequence[FileEntry]


@prepare_decoding
class _EncodedManifest(ManifestFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A manifest as it is stored.

    Each version lists the files in its own way. The values are decoded after they were counted.
    """

    files: msgspec.Raw
    objects: msgspec.Raw  # type: ignore[assignment]


def is_file_of_save(name: str) -> bool:
    """Return whether a file has a name that saves use for files other than the manifest."""
    return _FILE_OF_SAVE.fullmatch(name) is not None


def names_of_checkpoint(manifest: Manifest) -> set[str]:
    """Return the names of the files of a checkpoint, besides the manifest.

    They are the data files, and the telemetry of the save, which may be missing.
    """
    return {*(each.name for each in manifest.files), telemetry_file(manifest.save_id)}


def new_save_id() -> str:
    """Return a new random id of a save, which is part of the names of its files."""
    return secrets.token_hex(8)


def lock_file(save_id: str) -> str:
    """Return the name of the file that is locked while a save runs."""
    return f"saving-{save_id}.lock"


def telemetry_file(save_id: str) -> str:
    """Return the name of the file with the telemetry of a save; see `shardwise.parts.telemetry`."""
    return f"telemetry-{save_id}.json.gz"


def save_id_of_telemetry(name: str) -> str | None:
    """Return the save id in the name of a file of telemetry; None for any other name."""
    save_id = name[len("telemetry-") :][:16]
    return save_id if name == telemetry_file(save_id) else None


def is_lock_file(name: str) -> bool:
    """Return whether a file is the lock of a running or crashed save."""
    return name.startswith("saving-") and name.endswith(".lock")


def step_directory(step: int) -> str:
    """Return the name of a step's directory."""
    return f"step-{step:08d}"


def step_of_directory(name: str) -> int | None:
    """Return the step in the name of a step's directory; None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match.group(1)) if match and name == step_directory(int(match.group(1))) else None


def check_name(name: str) -> str:
    """Return the name of a tensor or value, after checking that a manifest may contain it.

    Raises:
        StateError: the name is too long, reserved, or not valid text.
    """
    if len(name) > LONGEST_NAME:
        raise StateError(
            f"{name[:60]}...: this name has {len(name)} characters, but at most {LONGEST_NAME} are "
            "allowed: shorten the keys of the state"
        )
    if name.startswith(RESERVED) or "\0" in name:
        raise StateError(
            f"{name!r}: names cannot contain NUL or begin with {RESERVED}: rename the key"
        )
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise StateError(
                f"{name!r}: this name is not valid Unicode: {error}; rename the key"
            ) from error
    return name


def check_save_id(save_id: str) -> str:
    """Return the id of a save from a manifest, after checking its form.

    Raises:
        FormatError: the id is not 16 hexadecimal digits.
    """
    if not _SAVE_ID.fullmatch(save_id):
        raise FormatError(f"the save_id {save_id[:40]!r} is not 16 hexadecimal digits")
    return save_id


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as bytes: one field on each line, then a checksum of all fields.

    Raises:
        StateError: the manifest is larger than the limit for reading.
        FormatError: the files are not those of one save, in ascending order of their ranks.
    """
    lines = []
    for field in ENCODED_FIELDS:
        if field == "left_out" and not manifest.left_out:
            continue
        value = getattr(manifest, field)
        encoded = (
            _encode_files(value, manifest.save_id)
            if field == "files"
            else msgspec.json.encode(value)
        )
        if field == "objects" and (count := _count_values(encoded)) > MOST_VALUES:
            raise StateError(_TOO_MANY_VALUES.format(count))
        lines.append(f'"{field}":'.encode() + encoded)
    return _add_checksum(b"{" + b",\n".join(lines) + b",\n")


def _encode_files(files: Sequence[FileEntry], save_id: str) -> bytes:
    rules = [msgspec.json.encode(rule) for rule in rules_of(FileTable.of(files, save_id))]
    return b"[" + b",\n".join(rules) + b"]"


def complete_manifest(pending: bytes, files: Sequence[FileEntry]) -> bytes:
    """Add the files to a pending manifest.

    Args:
        pending: a manifest that `encode_manifest` encoded without files.
        files: the data files, in ascending order of their ranks.

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
    save_id = decode_json(body.rstrip(b",\n") + b"}", _Head).save_id
    encoded = _encode_files(files, save_id)
    return _add_checksum(head + b'"files":' + encoded + b",\n" + tail)


def decode_manifest(data: bytes) -> Manifest:
    """Decode a manifest, except its tensors. `validate.py` checks the contents.

    Raises:
        FormatError: the bytes are not a manifest, were altered, or have another version.
    """
    text = bytearray(_verify_checksum(data, "the manifest").rstrip(b",\n"))
    text += b"}"
    head = decode_json(text, _Head)
    if head.format != FORMAT or head.version not in READABLE_VERSIONS:
        raise FormatError(
            f"the manifest has format {head.format!r} version {head.version}, but this version of "
            f"shardwise reads {FORMAT!r} versions 1 and {VERSION}: install a newer version of "
            "shardwise"
        )
    encoded = decode_json(text, _EncodedManifest)
    if head.version == 1:
        files = FileTable.of(decode_json(encoded.files, tuple[FileEntry, ...]), encoded.save_id)
    else:
        files = files_of_rules(decode_json(encoded.files, tuple[FileRule, ...]), encoded.save_id)
    del text  # a large value is not kept twice
    fields = {name: getattr(encoded, name) for name in ManifestFields.__struct_fields__}
    if (count := _count_values(bytes(encoded.objects))) > MOST_VALUES:
        raise FormatError(_TOO_MANY_VALUES.format(count))
    fields["objects"] = decode_json(encoded.objects, tuple[ObjectEntry, ...])
    return Manifest(files=files, **fields)


def _count_values(encoded: bytes) -> int:
    """Return an upper bound on the number of elements in the encoded plain values."""
    return sum(encoded.count(mark) for mark in (b",", b"[", b"{"))


def decode_json(encoded: bytes | bytearray | msgspec.Raw, kind: type[Kind]) -> Kind:
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
    save_id: str = ""


def encode_header_entries(
    pieces: Iterable[tuple[str, str, tuple[int, ...], Box]],
) -> tuple[bytes, int]:
    """Encode the header's entries for pieces that are stored one after another.

    Args:
        pieces: the name, dtype and global shape of each piece's tensor, and the piece's box.

    Returns:
        The entries as a JSON object, and the size of all pieces in bytes.
    """
    entries: dict[str, object] = {}
    start = 0
    for name, dtype, shape, box in pieces:
        element = DTYPES[dtype]
        code, stored_shape = element.safetensors_code, box.shape
        if code is None:  # store such elements as bytes
            code, stored_shape = "U8", (*box.shape, element.itemsize)
        key = name if box.shape == shape else f"{name}{box}"
        while key in entries or key == METADATA:
            key += "'"
        stop = start + box.size * element.itemsize
        entries[key] = {"dtype": code, "shape": stored_shape, "data_offsets": [start, stop]}
        start = stop
    return msgspec.json.encode(entries), start


def lay_out_file(
    save_id: str, rank: int, pieces: tuple[bytes, int], objects_bytes: int = 0
) -> tuple[bytes, FileEntry]:
    """Return the header of a rank's data file, and the file's entry in a manifest.

    Args:
        save_id: the id of the save.
        rank: the rank that writes the file.
        pieces: the result of `encode_header_entries`.
        objects_bytes: the size of the encoded plain values of the rank, in bytes.

    Returns:
        The bytes up to the first piece; and the entry, in which the CRC-32 of the checksums is 0
        until they are known.
    """
    entries, objects_start = pieces
    objects_stop = objects_start + objects_bytes

    metadata = {"shardwise": str(DATA_FILE_VERSION), "save_id": save_id, "rank": str(rank)}
    head = msgspec.json.encode({METADATA: metadata})[:-1] + b","
    head += entries[1:-1] + b"," if entries != b"{}" else b""

    def encode_header(checksums_stop: int) -> bytes:
        ends = {OBJECTS_KEY: (objects_start, objects_stop)} if objects_bytes else {}
        ends[CHECKSUMS_KEY] = objects_stop, checksums_stop
        others = {}
        for key, (start, stop) in ends.items():
            shape, offsets = [stop - start], [start, stop]
            others[key] = {"dtype": "U8", "shape": shape, "data_offsets": offsets}
        return head + msgspec.json.encode(others)[1:]

    # The entry of the checksums contains offsets that depend on the size of the header. So reserve
    # space for an entry with larger offsets, which is at least as long.
    needed = 8 + len(encode_header(2 * objects_stop + (1 << 24)))
    data_at = -(-needed // ALIGNMENT) * ALIGNMENT
    checksums_stop = objects_stop + 4 * block_count(data_at + objects_stop)
    encoded = encode_header(checksums_stop).ljust(data_at - 8)
    entry = FileEntry(
        name=data_file(rank, save_id),
        rank=rank,
        size=data_at + checksums_stop,
        data_at=data_at,
        objects_at=data_at + objects_start,
        checksums_at=data_at + objects_stop,
        checksums_crc32=0,
    )
    return len(encoded).to_bytes(8, "little") + encoded, entry
