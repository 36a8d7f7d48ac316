"""`LocalStore`: the files in a directory of a local or shared file system."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from shardwise.errors import StoreError
from shardwise.store.local_files import (
    ALIGNMENT,
    LocalReader,
    LocalWriter,
    NotRegularFileError,
    is_node_local,
    open_regular,
    refresh_directory,
    repeat_if_stale,
    sync_directory,
)
from shardwise.store.names import check_name, check_name_to_write
from shardwise.store.store import LOCAL_TRANSFER, FileStatus, StoreTraits
from shardwise.store.store_url import StoreUrl

_DELETED_IN_NFS = re.compile(r"\.nfs[0-9a-f]{8,}")


LOCAL_TRAITS = StoreTraits(
    alignment=ALIGNMENT, lock_expiry=0.0, reading_grace=0.0, transfer=LOCAL_TRANSFER
)


class LocalStore:
    """Files in a directory.

    By default, direct I/O writes files, and reads all pages that the page cache lacks. This is
    fast, and leaves the page cache as it is. Without support for O_DIRECT, the page cache is used.

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
        return replace(LOCAL_TRAITS, is_node_local=is_node_local(self.path))

    @property
    def name(self) -> str:
        """The last component of the path."""
        return self.path.name

    @property
    def parent(self) -> LocalStore | None:
        """The directory above; None for the root of the file system."""
        return None if self.path.parent == self.path else self.at_path(self.path.parent)

    def at(self, name: str) -> LocalStore:
        """Return the store one level below."""
        return self.at_path(self._path_to_read(name))

    def at_path(self, path: Path) -> LocalStore:
        """Return the store at another path, with the same options."""
        return LocalStore(path, page_cache=self._page_cache, cached_reads=self._cached_reads)

    def with_cached_reads(self) -> LocalStore:
        """Return this store, with reads through the page cache."""
        return LocalStore(self.path, page_cache=self._page_cache, cached_reads=True)

    def exists(self) -> bool:
        """Return whether the path exists. Links are followed."""
        if not self.path.exists():
            refresh_directory(self.path.parent)
        return self.path.exists()

    def is_file(self) -> bool:
        """Return whether the path is a regular file. Links are followed."""
        return self.path.is_file()

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
                raise StoreError(
                    f"{self.path}: the directory contains more than the supported {limit} files; "
                    "open the directory of one checkpoint"
                )
        return dict(sorted(found.items()))

    def open_below(self, path: str, size: int | None = None) -> LocalReader:
        """Open a regular file. Links are followed, for example in caches of published models."""
        file = self.path / path
        return repeat_if_stale(file.parent, lambda: LocalReader(file.resolve(), self._cached_reads))

    def create(self, key: str, size: int) -> LocalWriter:
        """Create a file of `size` bytes."""
        self._create_directory()
        return LocalWriter(self._path_to_write(key), size, page_cache=self._page_cache)

    def create_atomic(self, key: str, size: int) -> LocalWriter:
        """Create a file under a temporary name, and rename it when it is committed."""
        temporary = self._path_to_write(f"{key}.part")
        self._create_directory()
        temporary.unlink(missing_ok=True)
        return LocalWriter(temporary, size, self._path_to_write(key), page_cache=self._page_cache)

    def open(self, key: str) -> LocalReader:
        """Open a regular file. Symbolic links are refused."""
        path = self._path_to_read(key)
        return repeat_if_stale(path.parent, lambda: LocalReader(path, self._cached_reads))

    def publish(self, key: str, data: bytes, *, replace: bool) -> None:
        """Write and sync a temporary file, rename or link it, and sync the directory."""
        self._create_directory()
        target = self._path_to_write(key)
        temporary = self._path_to_write(f".{key}.{secrets.token_hex(4)}")
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            with os.fdopen(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            self.sync()
            if replace:
                os.replace(temporary, target)
            else:
                _link(temporary, target)
            self.sync()
        finally:
            temporary.unlink(missing_ok=True)

    def read(self, key: str, *, limit: int) -> bytes:
        """Return the content of a small file."""
        return repeat_if_stale(self.path, lambda: self._read(key, limit))

    def _read(self, key: str, limit: int) -> bytes:
        reader = LocalReader(self._path_to_read(key), page_cache=True)
        try:
            if reader.size > limit:
                raise StoreError(
                    f"{self.path / key} has {reader.size} bytes, but at most {limit} are expected: "
                    "it is damaged, or another program wrote it"
                )
            return reader.read_all()
        finally:
            reader.close()

    def list(self) -> list[str]:
        """Return the names of all files and directories, sorted.

        Files that NFS keeps for readers after they were deleted are left out.
        """
        try:
            return sorted(n for n in os.listdir(self.path) if not _DELETED_IN_NFS.fullmatch(n))
        except FileNotFoundError:
            return []

    def delete(self, key: str) -> None:
        """Remove a file, if it exists."""
        self._path_to_write(key).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the directory, if it is empty.

        It stays if it has files that NFS keeps for readers. A later call removes it.
        """
        try:
            os.rmdir(self.path)
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY) or self.list():
                raise

    def free_bytes(self) -> int | None:
        """Return the free space for this user; None if the file system does not report it."""
        existing = next(path for path in (self.path, *self.path.parents) if path.exists())
        statistics = os.statvfs(existing)
        return statistics.f_bavail * statistics.f_frsize if statistics.f_blocks else None

    def stores_with(self, key: str) -> set[str]:
        """Return the names of the directories that contain this file."""
        return {name for name in self.list() if self._contains(self.path / name, key)}

    @staticmethod
    def _contains(directory: Path, key: str) -> bool:
        if not os.path.lexists(directory / key):
            refresh_directory(directory)
        return os.path.lexists(directory / key)

    def is_writable(self) -> bool:
        """Return whether this user may create files in the directory, or create the directory."""
        existing = next(path for path in (self.path, *self.path.parents) if path.exists())
        return os.access(existing, os.W_OK)

    def sync(self) -> None:
        """Sync the directory."""
        sync_directory(self.path)

    @contextmanager
    def hold(self, key: str, *, shared: bool) -> Iterator[bool]:
        """Lock a file with `flock`, and yield whether this succeeded.

        Raises:
            NotRegularFileError: without `shared`, the path exists and is not a regular file.
        """
        if shared:
            flags = os.O_RDONLY
        else:
            flags = os.O_RDWR | os.O_CREAT
            with suppress(FileExistsError):  # it existed, but another process removed it
                self._create_directory()
        fd = -1
        try:
            fd = open_regular(self._path_to_write(key), flags)
        except (FileNotFoundError, NotADirectoryError):
            pass  # no yield here, because errors of the block would be chained to this one
        except NotRegularFileError:
            if not shared:  # a reader goes on, and its read refuses the file
                raise
        if fd < 0:
            yield False
            return
        try:
            yield _try_lock(fd, shared=shared) and _is_at(self._path_to_write(key), fd)
        finally:
            os.close(fd)

    def _create_directory(self) -> None:
        """Create the directory and its parents durably."""
        missing = [each for each in (self.path, *self.path.parents) if not each.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        for each in missing:
            with suppress(PermissionError):  # a directory that cannot be listed cannot be synced
                sync_directory(each.parent)

    def _path_to_read(self, name: str) -> Path:
        check_name(name, str(self.path))
        return self.path / name

    def _path_to_write(self, name: str) -> Path:
        check_name_to_write(name, str(self.path))
        return self.path / name


def local_path(store: object) -> Path | None:
    """Return the path of a store on a local or shared file system; None for any other store."""
    return store.path if isinstance(store, LocalStore) else None


def _link(source: Path, target: Path) -> None:
    """Give a file a second name, unless the name is taken.

    If the answer of an NFS server is lost, its client asks again, and the second answer is that the
    name is taken. If the file has two links, the first request has given it this name.
    """
    try:
        os.link(source, target)
    except FileExistsError:
        if os.stat(source).st_nlink < 2:
            raise


def _try_lock(fd: int, *, shared: bool) -> bool:
    """Lock an open file with `flock`, unless another process has locked it.

    A file system without locks raises other errors. Then the file counts as locked.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.ESTALE)
    return True


def _is_at(path: Path, fd: int) -> bool:
    """Return whether a path still names an open file, rather than a new file or no file.

    NFS renames an open file that is deleted, so the number of links is not enough.
    """
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
    return FileStatus(status.st_size, str(status.st_mtime_ns))


def _raise_error(error: OSError) -> None:
    """Raise the error of a directory that cannot be listed, which `os.walk` ignores by default."""
    raise error
