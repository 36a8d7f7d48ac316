"""The telemetry of an operation as a file: JSON, compressed with gzip.

Between ranks, it is the same JSON without compression.
"""

from __future__ import annotations

import gzip
import zlib
from typing import Annotated, Any

import msgspec
import numpy as np

from shardwise.kernel.boxes.box import IntArray
from shardwise.kernel.decoding import DECODE_ERRORS, prepare_decoding
from shardwise.kernel.errors import FormatError
from shardwise.kernel.manifest.manifest import LARGEST_INTEGER, Count, SignedCount
from shardwise.parts.telemetry.records import (
    MOST_RANKS,
    NOT_RUN,
    NameArray,
    StageColumns,
    Telemetry,
)

FORMAT, VERSION = "shardwise-telemetry", 1
LARGEST_DOCUMENT = 2**27
"""Bytes of the JSON; 131,072 ranks need about 40 MB."""
MOST_STAGES = 256
MOST_AXES = 16
LONGEST_TEXT = 4096

_Text = Annotated[str, msgspec.Meta(max_length=LONGEST_TEXT)]
_ShortText = Annotated[str, msgspec.Meta(max_length=255)]
# No commas, so that commas can be counted before a list is decoded.
_HostName = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9._:-]{1,255}\Z")]
_FileName = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9._/-]{1,255}\Z")]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class _Stage(msgspec.Struct, frozen=True):
    name: _ShortText
    start: msgspec.Raw
    duration: msgspec.Raw
    bytes: msgspec.Raw
    file: msgspec.Raw
    retries: msgspec.Raw
    waited: msgspec.Raw


@prepare_decoding
class _Document(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON. Its columns are decoded one by one, after their lengths are checked."""

    format: str = FORMAT
    version: int = VERSION
    operation: _ShortText
    id: _ShortText
    step: Count | None
    path: _Text
    started: _ShortText
    seconds: _Seconds
    world_size: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]
    library: _ShortText
    ranks: msgspec.Raw
    hosts: msgspec.Raw
    host: msgspec.Raw
    axes: Annotated[tuple[_ShortText, ...], msgspec.Meta(max_length=MOST_AXES)]
    coordinates: Annotated[tuple[msgspec.Raw, ...], msgspec.Meta(max_length=MOST_AXES)]
    clock: msgspec.Raw
    began: msgspec.Raw = msgspec.Raw()  # may be missing
    stages: Annotated[tuple[_Stage, ...], msgspec.Meta(max_length=MOST_STAGES)]
    phases: Annotated[dict[_ShortText, _Seconds], msgspec.Meta(max_length=MOST_STAGES)] = {}


@prepare_decoding
class _Head(msgspec.Struct):
    format: str = ""
    version: int = 0


def encode_file(telemetry: Telemetry) -> bytes:
    """Return the telemetry as the content of a file: JSON, compressed with gzip."""
    return gzip.compress(encode(telemetry), compresslevel=6, mtime=0)


def decode_file(data: bytes, label: object) -> Telemetry:
    """Return the telemetry in a file.

    Args:
        data: the content of the file.
        label: where the file is, for errors.

    Raises:
        FormatError: the file is damaged, or has another version.
    """
    decompressor = zlib.decompressobj(wbits=31)  # 31: gzip
    try:
        text = decompressor.decompress(data, LARGEST_DOCUMENT + 1)
    except zlib.error as error:
        raise _damaged(label, str(error)) from error
    if len(text) > LARGEST_DOCUMENT:
        raise _damaged(label, f"it has more than {LARGEST_DOCUMENT} bytes")
    if not decompressor.eof:
        raise _damaged(label, "the end of the file is missing")
    return decode(text, label)


def encode(telemetry: Telemetry) -> bytes:
    """Return the telemetry as JSON. Ranks send it to each other in this form."""
    stages = [
        _Stage(
            name=each.name,
            start=_encode_column(each.start),
            duration=_encode_column(each.duration),
            bytes=_encode_column(each.bytes),
            file=_encode_names(each.file),
            retries=_encode_column(each.retries),
            waited=_encode_column(each.waited),
        )
        for each in telemetry.stages
    ]
    return msgspec.json.encode(
        _Document(
            operation=telemetry.operation,
            id=telemetry.id,
            step=telemetry.step,
            path=telemetry.path,
            started=telemetry.started,
            seconds=telemetry.seconds,
            world_size=telemetry.world_size,
            library=telemetry.library,
            ranks=_encode_column(telemetry.ranks),
            hosts=msgspec.Raw(msgspec.json.encode(telemetry.hosts)),
            host=_encode_column(telemetry.host),
            axes=telemetry.axes,
            coordinates=tuple(_encode_column(column) for column in telemetry.coordinates),
            clock=_encode_column(telemetry.clock),
            began=_encode_column(telemetry.began),
            stages=tuple(stages),
            phases=telemetry.phases,
        )
    )


def decode(text: bytes, label: object) -> Telemetry:
    """Return the telemetry in a JSON document, after checking every column.

    Args:
        text: the document.
        label: where it is from, for errors.

    Raises:
        FormatError: the document is damaged, or has another version.
    """
    try:
        head = msgspec.json.decode(text, type=_Head)
        if (head.format, head.version) != (FORMAT, VERSION):
            raise FormatError(
                f"{label}: the telemetry has format {head.format[:40]!r} version {head.version}, "
                f"but this version of shardwise reads {FORMAT!r} version {VERSION}: install a "
                "newer version of shardwise"
            )
        return _check(msgspec.json.decode(text, type=_Document))
    except (*DECODE_ERRORS, _DamagedError) as error:
        raise _damaged(label, str(error)) from error


class _DamagedError(ValueError):
    """A column is damaged."""


def _damaged(label: object, why: str) -> FormatError:
    return FormatError(
        f"{label}: the telemetry is damaged: {why}; the checkpoint itself is not affected: remove "
        "the file, or ignore it"
    )


def _check(document: _Document) -> Telemetry:
    """Decode the columns of a document, and check that they fit together."""
    n = _length(document.ranks)
    if not 1 <= n <= min(document.world_size, MOST_RANKS):
        raise _DamagedError(f"it lists {n} ranks, but the world size is {document.world_size}")
    ranks = _decode_column(document.ranks, n, 0, document.world_size - 1)
    if (np.diff(ranks) <= 0).any():
        raise _DamagedError("its ranks are not in ascending order")
    hosts = _decode_list(document.hosts, _HostName, _length(document.hosts, at_most=n))
    if len(document.coordinates) != len(document.axes):
        raise _DamagedError("the number of coordinates differs from that of axes")
    coordinates = [_decode_column(each, n, NOT_RUN) for each in document.coordinates]
    zeros = np.zeros(n, np.int64)
    return Telemetry(
        operation=document.operation,
        id=document.id,
        step=document.step,
        path=document.path,
        started=document.started,
        seconds=document.seconds,
        world_size=document.world_size,
        library=document.library,
        ranks=ranks,
        hosts=tuple(hosts),
        host=_decode_column(document.host, n, 0, len(hosts) - 1),
        axes=document.axes,
        coordinates=np.array(coordinates, np.int64).reshape(len(document.axes), n),
        clock=_decode_column(document.clock, n, -LARGEST_INTEGER),
        began=_decode_column(document.began, n, -LARGEST_INTEGER)
        if bytes(document.began)
        else zeros,
        stages=tuple(_check_stage(each, n) for each in document.stages),
        phases=document.phases,
    )


def _check_stage(stage: _Stage, n: int) -> StageColumns:
    return StageColumns(
        name=stage.name,
        start=_decode_column(stage.start, n, NOT_RUN),
        duration=_decode_column(stage.duration, n, 0),
        bytes=_decode_column(stage.bytes, n, 0),
        retries=_decode_column(stage.retries, n, 0),
        waited=_decode_column(stage.waited, n, 0),
        file=_decode_names(stage.file, n),
    )


def _encode_column(column: IntArray) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(column.tolist()))


def _decode_column(
    raw: msgspec.Raw, n: int, smallest: int, largest: int = LARGEST_INTEGER
) -> IntArray:
    column = np.array(_decode_list(raw, SignedCount, n), np.int64)
    if column.min() < smallest or column.max() > largest:
        raise _DamagedError(f"a number is not in the range {smallest} … {largest}")
    return column


def _encode_names(names: NameArray) -> msgspec.Raw:
    """Encode the names of files; one null if there are none."""
    texts = [name.decode("ascii") or None for name in names.tolist()] if names.any() else [None]
    return msgspec.Raw(msgspec.json.encode(texts))


def _decode_names(raw: msgspec.Raw, n: int) -> NameArray:
    if n > 1 and _length(raw) == 1:
        _decode_list(raw, type(None), 1)
        return np.zeros(n, "S1")
    names = [name or "" for name in _decode_list(raw, _FileName | None, n)]
    width = max(map(len, names))  # characters are bytes here: _FileName is ASCII
    if width * n > LARGEST_DOCUMENT:
        raise _DamagedError("names of files are too long")
    return np.array(names, f"S{max(1, width)}")


def _length(raw: msgspec.Raw, at_most: int = MOST_RANKS) -> int:
    """Return an upper bound of the length of a list, before it is decoded."""
    count = bytes(raw).count(b",") + 1
    if count > at_most:
        raise _DamagedError(f"a list has more than {at_most} entries")
    return count


def _decode_list(raw: msgspec.Raw, kind: Any, n: int) -> list[Any]:
    """Decode a list of n entries. Nothing is allocated if it has more."""
    _length(raw, at_most=n)
    values: list[Any] = msgspec.json.decode(raw, type=list[kind])
    if len(values) != n:
        raise _DamagedError(f"a list has {len(values)} entries instead of {n}")
    return values
