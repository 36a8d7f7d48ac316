"""Records, locks and bells, through which the processes of a node communicate."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from shardwise.kernel.errors import StoreError
from shardwise.kernel.manifest.checksums import add_checksum, verify_checksum
from shardwise.kernel.store.local_files import open_regular, write_atomically

PLAIN_NAME = r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,199}\Z"
"""The names of files that other nodes may read."""
# The types of the fields of records. A record with another value is damaged.
FileName = Annotated[str, msgspec.Meta(pattern=rf"(?!manifest\.json\Z){PLAIN_NAME}")]
SaveId = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{16}\Z")]
LARGEST_RECORD = 1 << 28
"""Bytes; at least as many as the largest manifest has."""
_HEAD, _TAIL = b'{"record":', b",\n"
T = TypeVar("T")


def write_record(path: Path, record: object) -> None:
    """Write a record atomically, and replace an existing one.

    Args:
        record: bytes, or a value to encode with `encode_record`.
    """
    with write_atomically(path) as file:
        file.write(record if isinstance(record, bytes) else encode_record(record))


def encode_record(record: object) -> bytes:
    """Return a value as a record: JSON with a checksum at the end."""
    return add_checksum(_HEAD + msgspec.json.encode(record) + _TAIL)


def decode_record(data: bytes, record_type: type[T], label: object) -> T:
    """Return the value of a record.

    Args:
        label: where the record is, for errors.

    Raises:
        StoreError: these bytes are not a record of this type.
    """
    try:
        fields = memoryview(verify_checksum(data))
        if bytes(fields[: len(_HEAD)]) != _HEAD:
            raise ValueError("not a record of this version of shardwise")
        return msgspec.json.decode(fields[len(_HEAD) : -len(_TAIL)], type=record_type)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise StoreError(
            f"{label}: the record is damaged: {error}; what it describes is lost: remove the file, "
            "and save again"
        ) from error


def read_record(path: Path, record_type: type[T]) -> T | None:
    """Return a record, or None if the file does not exist.

    Raises:
        StoreError: the file is not a record of this type, or not a regular file.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            data = file.read(LARGEST_RECORD)
    except FileNotFoundError:
        return None
    return decode_record(data, record_type, path)


@contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Open a regular file while the block runs, and yield its descriptor.

    Raises:
        FileNotFoundError: there is no such file, and `flags` do not create it.
        StoreError: the path names a link, a directory, a named pipe or a device.
    """
    fd = open_regular(path, flags, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def regular_files(directory: Path) -> dict[str, os.stat_result]:
    """Return the status of each regular file in a directory, which need not exist."""
    found = {}
    with suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # it was removed meanwhile
                if entry.is_file(follow_symlinks=False):
                    found[entry.name] = entry.stat(follow_symlinks=False)
    return found


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """Lock an open file or directory without waiting; return whether it is locked now."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def lock_directory(directory: Path, *, shared: bool) -> Iterator[bool]:
    """Lock a directory while the block runs, without waiting; yield whether it is locked.

    While a process holds a shared lock, no other process removes the directory.
    """
    fd = -1
    with suppress(FileNotFoundError):
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    if fd < 0:
        yield False
        return
    try:
        locked = try_lock(fd, shared=shared)
        yield locked and os.fstat(fd).st_nlink > 0  # it may have been removed before it was locked
    finally:
        os.close(fd)


def ring_bell(path: Path) -> None:
    """Wake the process that listens to a bell, if there is one."""
    with suppress(OSError):  # nobody listens, or the bell was rung so often that the pipe is full
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if stat.S_ISFIFO(os.fstat(fd).st_mode):
                os.write(fd, b"!")
        finally:
            os.close(fd)


def listen_to_bell(path: Path, wake: Callable[[], None]) -> None:
    """Create a bell (a named pipe), and call `wake` whenever it is rung. Never returns.

    Anything else of this name is removed: a regular file would always be ready to be read.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISFIFO(path.lstat().st_mode):
            path.unlink()
    with suppress(FileExistsError):
        os.mkfifo(path, 0o600)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    while True:
        os.read(fd, 4096)
        wake()
