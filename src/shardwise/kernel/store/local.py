"""`LocalStore`: the files in a directory of a local or shared file system."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from itertools import filterfalse
from pathlib import Path

from shardwise.kernel.store.local_files import (
    ALIGNMENT,
    LocalReader,
    LocalWriter,
    NotRegularFileError,
    is_node_local,
    nearest_existing,
    open_regular,
    read_regular,
    refresh_directory,
    repeat_if_stale,
    sync_directory,
    write_atomically,
)
from shardwise.kernel.store.names import (
    StoreUrl,
    check_name,
    check_name_to_write,
    check_path,
    temporary_name,
)
from shardwise.kernel.store.store import (
    FILE_SYSTEM,
    FileStatus,
    StoreTraits,
    not_a_directory,
    too_many_files,
)

_DELETED_IN_NFS = re.compile(r"\.nfs[0-9a-f]{8,}")


class LocalStore:
    """Files in a directory.

    By default, files are written by direct I/O. A read gets pages from the page cache, and the
    pages that the cache lacks by direct I/O. This is fast, and leaves the page cache as it is.
    Without support for O_DIRECT, the page cache is used.

    Args:
        path: the directory.
        page_cache: read and write through the page cache instead. The next reader on this node then
            finds the files there.
        cached_reads: read through the page cache, whatever `page_cache` says.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        page_cache: bool = False,
        cached_reads: bool = False,
    ) -> None:
        self.path = Path(path)
        self._page_cache = page_cache
        self._cached_reads = cached_reads or page_cache

    def __repr__(self) -> str:
        option = ", page_cache=True" if self._page_cache else ""
        return f"LocalStore({str(self.path)!r}{option})"

    def __str__(self) -> str:
        if not self._page_cache:
            return str(self.path)
        return str(StoreUrl("file", "", str(self.path.absolute())[1:], {"page_cache": "true"}))

    @cached_property
    def traits(self) -> StoreTraits:
        """The properties of the store. Whether it is local to this node depends on its mount."""
        is_local = is_node_local(self.path)
        return dataclasses.replace(FILE_SYSTEM, alignment=ALIGNMENT, is_node_local=is_local)

    def at(self, name: str) -> LocalStore:
        """Return the store one level below."""
        check_name(name, self.path)
        return self.at_path(self.path / name)

    def at_path(self, path: Path) -> LocalStore:
        """Return the store at another path, with the same options."""
        return LocalStore(path, page_cache=self._page_cache, cached_reads=self._cached_reads)

    def with_cached_reads(self) -> LocalStore:
        """Return this store, with reads through the page cache."""
        return LocalStore(self.path, page_cache=self._page_cache, cached_reads=True)

    def walk(self, limit: int) -> dict[str, FileStatus]:
        """Return the regular files below, by relative path. Links to files are followed."""
        if self.path.is_file():
            return {self.path.name: _status_of(self.path)}
        found: dict[str, FileStatus] = {}
        if not self.path.exists():
            return found
        for folder, _, names in os.walk(self.path, onerror=_raise_error):
            prefix = os.path.relpath(folder, self.path) + "/"
            for name in names:
                path = Path(folder, name)
                if path.is_file():
                    found[name if prefix == "./" else prefix + name] = _status_of(path)
            if len(found) > limit:
                raise too_many_files(self.path, limit)
        return dict(sorted(found.items()))

    def stat(self, path: str) -> FileStatus | None:
        """Return what is at a path. Links are followed; anything but a directory is a file."""
        check_path(path, self.path)
        full = self.path / path
        if not os.path.lexists(full):
            refresh_directory(full.parent)
        try:
            return _status_of(full)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise
            return None

    def open(self, path: str, size: int | None = None) -> LocalReader:
        """Open a regular file. Symbolic links are refused."""
        check_path(path, self.path)
        full = self.path / path
        return repeat_if_stale(full.parent, partial(LocalReader, full, self._cached_reads))

    def create(self, key: str, size: int, *, replace: bool = False) -> LocalWriter:
        """Create a file of `size` bytes; with `replace`, under a temporary name until `commit`."""
        check_name_to_write(key, self.path)
        name = temporary_name(key) if replace else key
        check_name_to_write(name, self.path)
        self._create_directory()
        return LocalWriter(self.path / name, size, self.path / key, page_cache=self._page_cache)

    def publish(self, key: str, data: bytes, *, replace: bool) -> None:
        """Write and sync a temporary file, rename or link it, and sync the directory."""
        check_name_to_write(key, self.path)
        self._create_directory()
        with write_atomically(self.path / key, mode=0o666, replace=replace, durable=True) as file:
            file.write(data)

    def read(self, key: str, *, limit: int) -> bytes:
        """Return the content of a small file."""
        check_name(key, self.path)
        return repeat_if_stale(self.path, partial(read_regular, self.path / key, limit))

    def list(self) -> list[str]:
        """Return the names of all files and directories, sorted.

        Files that NFS keeps for readers after they were deleted are left out.
        """
        try:
            return sorted(filterfalse(_DELETED_IN_NFS.fullmatch, os.listdir(self.path)))
        except FileNotFoundError:
            return []
        except NotADirectoryError as error:
            raise not_a_directory(str(self.path)) from error

    def delete(self, key: str) -> None:
        """Remove a file, if it exists; with "", the directory, if it is empty.

        A directory stays if it has files that NFS keeps for readers. A later call removes it.
        """
        if key:
            check_name_to_write(key, self.path)
            (self.path / key).unlink(missing_ok=True)
            return
        try:
            os.rmdir(self.path)
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY) or self.list():
                raise

    @contextmanager
    def lock(self, key: str, *, shared: bool = False) -> Iterator[bool]:
        """Lock a file with `flock`, and yield whether this succeeded.

        Raises:
            NotRegularFileError: without `shared`, the path exists and is not a regular file.
        """
        check_name_to_write(key, self.path)
        path, flags = self.path / key, os.O_RDONLY
        if not shared:
            flags = os.O_RDWR | os.O_CREAT
            with suppress(FileExistsError):  # another process may remove it at the same time
                self._create_directory()
        fd = -1
        try:
            fd = open_regular(path, flags)
        except (FileNotFoundError, NotADirectoryError):
            pass  # no yield here, because errors of the block would be chained to this one
        except NotRegularFileError:
            if not shared:  # a reader goes on, and its read refuses the file
                raise
        if fd < 0:
            yield False
            return
        try:
            yield _lock_at(path, fd, shared=shared)
        finally:
            os.close(fd)

    def _create_directory(self) -> None:
        """Create the directory and its parents durably."""
        existing = nearest_existing(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        created = self.path
        while created != existing:
            with suppress(PermissionError):  # a directory that cannot be listed cannot be synced
                sync_directory(created.parent)
            created = created.parent


def _lock_at(path: Path, fd: int, *, shared: bool) -> bool:
    """Lock an open file; return whether it is locked, and its path still names it.

    A file system without locks raises an error. Then the file counts as locked. NFS renames an open
    file that is deleted, so the number of links does not show whether the path names it.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        # Another process holds the lock, or has deleted the file on NFS.
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.ESTALE):
            return False
    refresh_directory(path.parent)
    try:
        opened, named = os.fstat(fd), os.stat(path, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            raise
        return False
    return opened.st_nlink > 0 and os.path.samestat(opened, named)


def _status_of(path: Path) -> FileStatus:
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        return FileStatus(0, "", is_directory=True)
    return FileStatus(status.st_size, str(status.st_mtime_ns))


def _raise_error(error: OSError) -> None:
    """Raise the error of a directory that cannot be listed, which `os.walk` ignores by default."""
    raise error
