"""Files on a local or shared file system: direct I/O, or through the page cache."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

from shardwise.kernel.errors import StoreError
from shardwise.kernel.store.store import Buffer, too_large

ALIGNMENT = 4096
STALE_ATTEMPTS = 10
NODE_LOCAL_FILE_SYSTEMS = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "tmpfs", "ramfs", "overlay"}
)


class NotRegularFileError(StoreError):
    """A path names something other than a regular file, which is not opened."""


def open_regular(
    path: str | os.PathLike[str],
    flags: int = os.O_RDONLY,
    mode: int = 0o666,
    *,
    dir_fd: int | None = None,
) -> int:
    """Open a regular file, and return its descriptor.

    Other kinds are refused without waiting: a named pipe or a device could block or never end.

    Args:
        flags: flags of `os.open`. With O_CREAT, a missing file is created, with this mode.
        dir_fd: an open directory that a relative path refers to.

    Raises:
        FileNotFoundError: there is no such file.
        NotRegularFileError: the path names a link, a directory, a named pipe or a device.
    """
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, mode, dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotRegularFileError(
                f"{path} is a symbolic link, which is not followed: replace it with the file"
            ) from error
        if error.errno in (errno.EISDIR, errno.ENXIO, errno.ENODEV):
            raise _not_regular(path) from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise _not_regular(path)
    except OSError:
        os.close(fd)
        raise
    return fd


def _not_regular(path: str | os.PathLike[str]) -> NotRegularFileError:
    return NotRegularFileError(
        f"{path} is not a regular file, but a directory, a named pipe or a device: replace it with "
        "the file, or remove it"
    )


class LocalWriter:
    """A file that is being written.

    Args:
        path: the path, at which no file exists.
        size: the size in bytes.
        final_path: the path to rename the file to when it is committed.
        page_cache: write through the page cache.
    """

    def __init__(self, path: Path, size: int, final_path: Path, *, page_cache: bool) -> None:
        self._path = path
        self._final_path = final_path
        self._is_committed = False
        self._size = size
        self._page_cache = page_cache
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._fd = os.open(path, flags | (0 if page_cache else os.O_DIRECT), 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._fd = os.open(path, flags & ~os.O_EXCL, 0o666)

    def write_at(self, offset: int, data: Buffer) -> None:
        view, may_be_direct = data.data, True
        while view:
            try:
                written = os.pwrite(self._fd, view, offset)
            except OSError as error:
                if error.errno != errno.EINVAL or not may_be_direct:
                    raise
                # The file system does not support O_DIRECT after all, or a write was short before.
                flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
                fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
                may_be_direct = False
                continue
            if self._page_cache:
                start_writeback(self._fd, offset, written)
            offset += written
            view = view[written:]

    def commit(self) -> None:
        os.ftruncate(self._fd, self._size)
        os.fsync(self._fd)
        if self._path != self._final_path:
            os.replace(self._path, self._final_path)
        self._is_committed = True
        sync_directory(self._path.parent)

    def close(self) -> None:
        os.close(self._fd)
        if self._path != self._final_path and not self._is_committed:
            self._path.unlink(missing_ok=True)


class LocalReader:
    """A file that is being read.

    Pages that are in the page cache are read there, and other pages by direct I/O.

    Args:
        path: the path.
        page_cache: read all pages through the page cache.
    """

    def __init__(self, path: Path, page_cache: bool = False) -> None:
        self._path = path
        self._fd = open_regular(path)
        self._direct: int | None = None
        self.size = os.fstat(self._fd).st_size
        if not page_cache:
            with suppress(OSError):  # by descriptor, because the path may name another file by now
                same_file = f"/proc/self/fd/{self._fd}"
                self._direct = os.open(same_file, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)

    def read_at(self, offset: int, out: Buffer) -> int:
        done = 0
        view = out.data
        try:
            while done < len(view) and (count := self._read(view[done:], offset + done)):
                done += count
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            raise FileNotFoundError(
                errno.ENOENT, "deleted or replaced while it was read", str(self._path)
            ) from error
        return done

    def is_cached(self, offset: int, count: int) -> bool:
        return self._direct is None or is_cached(self._fd, offset, count)

    def _read(self, view: memoryview, offset: int) -> int:
        direct = self._direct
        if direct is not None and offset % ALIGNMENT == 0 and len(view) >= ALIGNMENT:
            whole = view[: len(view) // ALIGNMENT * ALIGNMENT]
            if not is_cached(self._fd, offset, min(len(whole), self.size - offset)):
                try:
                    return os.preadv(direct, [whole], offset)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
        return os.preadv(self._fd, [view], offset)

    def close(self) -> None:
        os.close(self._fd)
        if self._direct is not None:
            os.close(self._direct)


_T = TypeVar("_T")


def repeat_if_stale(directory: Path, act: Callable[[], _T]) -> _T:
    """Open a file again if a client of NFS has remembered an old name.

    For a while, a client remembers which file a name had, or that there was no such file. Meanwhile
    another client may have created, replaced or deleted the file.

    Raises:
        FileNotFoundError: of `act`, also in the second attempt.
        OSError: of `act`; ESTALE after several attempts within a second.
    """
    for attempt in range(STALE_ATTEMPTS - 1):
        try:
            return act()
        except FileNotFoundError:
            if attempt:
                raise
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            time.sleep(0.001 * 2**attempt)
        refresh_directory(directory)
    return act()


def refresh_directory(directory: Path) -> None:
    """Let a client of NFS ask the server which files a directory contains, by opening it.

    To open a file in it by name, a client may use the names that it remembers.
    """
    for each in (directory, *directory.parents):
        try:
            os.close(os.open(each, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue  # the name of the directory may be new, too
        return


_CACHESTAT = 451  # the same number on every architecture; Linux 6.5 and later


_START_WRITEBACK = 2  # SYNC_FILE_RANGE_WRITE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


def start_writeback(fd: int, offset: int, length: int) -> None:
    """Start to write a range of the page cache to the disk.

    This only saves time. `fsync` writes the rest, and reports errors.
    """
    _libc.sync_file_range(fd, offset, length, _START_WRITEBACK)


def is_cached(fd: int, offset: int, length: int) -> bool:
    """Return whether all pages of a range are in the page cache; False if unknown."""
    wanted = (ctypes.c_uint64 * 2)(offset, length)
    found = (ctypes.c_uint64 * 5)()  # cached, dirty, in writeback, evicted, recently evicted
    status = _libc.syscall(_CACHESTAT, fd, wanted, found, 0)
    pages = -(-(offset + length) // 4096) - offset // 4096
    return bool(status == 0 and found[0] >= pages)


def nearest_existing(path: Path) -> Path:
    """Return a path, or the nearest directory above that exists."""
    for each in (path, *path.parents):
        if each.exists():
            break
    return each


def is_node_local(path: Path) -> bool:
    """Return whether a path is on a disk or in the memory of this node; False if unknown."""
    device = nearest_existing(path.absolute()).stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            fields, _, types = line.partition(" - ")
            if fields.split()[2] == number:
                return types.split()[0] in NODE_LOCAL_FILE_SYSTEMS
    return False


def read_regular(path: Path, limit: int, *, private: bool = False) -> bytes:
    """Return the content of a small regular file.

    Args:
        private: refuse a file that others may have written.

    Raises:
        NotRegularFileError: as for `open_regular`.
        StoreError: the file has more than `limit` bytes; or, with `private`, it belongs to another
            user, or others may read or write it.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        status = os.fstat(file.fileno())
        if private and not is_private(status):
            raise StoreError(
                f"{path} belongs to another user, or others may read or write it, so it is not "
                "trusted; if it is yours: chmod 600; otherwise remove it, or choose another "
                "directory"
            )
        if status.st_size > limit:
            raise too_large(path, status.st_size, limit)
        return file.read(status.st_size)


def is_private(status: os.stat_result) -> bool:
    """Return whether a regular file belongs to this user, and no other user may access it."""
    is_own = status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode)
    return is_own and not stat.S_IMODE(status.st_mode) & 0o077


@contextmanager
def write_atomically(
    path: str | os.PathLike[str],
    *,
    mode: int = 0o600,
    replace: bool = True,
    durable: bool = False,
    dir_fd: int | None = None,
) -> Iterator[BinaryIO]:
    """Open a file that appears at `path` at the end of the block, unless the block raises.

    Args:
        mode: the permissions of the file. By default, only the owner can read it.
        replace: an existing file is replaced.
        durable: the file survives a crash of the machine.
        dir_fd: an open directory that a relative path refers to. It needs `replace`.

    Raises:
        FileExistsError: the file exists, and `replace` is False.
        OSError: the file cannot be written; StoreError, if the path is a directory.
    """
    directory, name = os.path.split(path)
    temporary = os.path.join(directory, f".{name}.{secrets.token_hex(4)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, mode, dir_fd=dir_fd), "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        if replace:
            try:
                os.replace(temporary, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
            except IsADirectoryError as error:
                raise StoreError(
                    f"{path} cannot be written, as it is a directory: remove it"
                ) from error
        else:
            try:
                os.link(temporary, path)
            except FileExistsError:
                # If the answer of an NFS server was lost, its client has asked again, and the name
                # was taken by the first request. Then the file has two links.
                if os.stat(temporary).st_nlink < 2:
                    raise
        if durable:
            sync_directory(Path(directory))
        if not replace:
            os.unlink(temporary)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=dir_fd)
        raise


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
