"""Reads the records of a node repeatedly, each only once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from shardwise.decoding import prepare_decoding
from shardwise.errors import StoreError
from shardwise.manifest.manifest import verify_manifest
from shardwise.memory.files import decode_record, read_record
from shardwise.memory.records import PendingManifest, SaveId

T = TypeVar("T")


@prepare_decoding
class _SaveId(msgspec.Struct):
    """The save id of a manifest."""

    save_id: SaveId


def _decode_save_id(data: bytes, record_type: type[_SaveId], label: object) -> _SaveId:
    """Return the save id of a manifest, without decoding the rest.

    Raises:
        StoreError: the manifest is damaged.
    """
    try:
        verify_manifest(data)
        return msgspec.json.decode(data, type=record_type)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{label} is damaged: {error}") from error


class RecordCache:
    """Reads each record once, and again only after the file was replaced.

    A replaced file has another inode, modification time or size.

    Args:
        logs: whether to log damaged records. A node logs each of them once.
    """

    def __init__(self, *, logs: bool = True) -> None:
        self.logs = logs
        self._records: dict[tuple[Path, type], tuple[tuple[int, int, int], object]] = {}
        self._used: set[tuple[Path, type]] = set()

    def read(
        self,
        path: Path,
        record_type: type[T],
        decode: Callable[[bytes, type[T], object], T] = decode_record,
    ) -> tuple[T | StoreError, float] | None:
        """Return a record, or the error if it is damaged; and its modification time in seconds.

        Return None if the file does not exist. The field `manifest` of a `PendingManifest` is
        emptied, because its text can be large.

        Args:
            decode: decodes the file, like `decode_record`.
        """
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return None
        key, version = (path, record_type), (status.st_ino, status.st_mtime_ns, status.st_size)
        self._used.add(key)
        known = self._records.get(key)
        if known is None or known[0] != version:
            try:
                record: T | StoreError | None = read_record(path, record_type, decode)
            except StoreError as error:
                record = error
            if record is None:
                return None
            if isinstance(record, PendingManifest):
                record = msgspec.structs.replace(record, manifest="")
            known = self._records[key] = version, record
        return known[1], status.st_mtime  # type: ignore[return-value]

    def read_save_id(self, manifest: Path) -> str | None:
        """Return the save id of a manifest; "" if it is damaged, None if it does not exist."""
        found = self.read(manifest, _SaveId, _decode_save_id)
        if found is None:
            return None
        return "" if isinstance(found[0], StoreError) else found[0].save_id

    def forget_unused(self) -> None:
        """Remove records that were not read since the last call from the cache."""
        self._records = {key: each for key, each in self._records.items() if key in self._used}
        self._used = set()
