"""`LocalStore`: the files in a directory of a local or shared file system."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardwise.errors import StoreError
from shardwise.store.names import check_name, check_name_to_write
from shardwise.store.store import Buffer, FileStatus
from shardwise.store.store_url import StoreUrl

ALIGNMENT = 4096
_DELETED_IN_NFS = re.compile(r"\.nfs[0-9a-f]{8,}")


class LocalStore:
    """Files in a directory.

    By default, files are written by direct I/O, and what the page cache lacks is read by direct
    I/O, where the file system supports it. This is fast, and leaves the page cache as it is.

    Args:
        path: the directory.
        page_cache: read and write through the page cache instead. The next reader on this node then
            finds the files there.
    """

    alignment = ALIGNMENT
    lock_expiry = 0.0
    reading_grace = 0.0
    request_bytes = 0

    def __init__(self, path: str | os.PathLike[str], *, page_cache: bool = False) -> None:
        self.path = Path(path)
        self._page_cache = page_cache

    def __repr__(self) -> str:
        option = ", page_cache=True" if self._page_cache else ""
        return f"LocalStore({str(self.path)!r}{option})"

    def __str__(self) -> str:
        if not self._page_cache:
            return str(self.path)
        return str(StoreUrl("file", "", str(self.path.absolute())[1:], {"page_cache": "true"}))

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
        return LocalStore(path, page_cache=self._page_cache)

    def exists(self) -> bool:
        """Return whether the path exists. Links are followed."""
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

    def open_below(self, path: str, size: int | None = None) -> _LocalReader:
        """Open a regular file. Links are followed, for example in caches of published models."""
        return _LocalReader((self.path / path).resolve(), self._page_cache)

    def create(self, key: str, size: int) -> _LocalWriter:
        """Create a file of `size` bytes."""
        self._create_directory()
        return _LocalWriter(self._path_to_write(key), size, page_cache=self._page_cache)

    def create_atomic(self, key: str, size: int) -> _LocalWriter:
        """Create a file under a temporary name, and rename it when it is committed."""
        temporary = self._path_to_write(f"{key}.part")
        self._create_directory()
        temporary.unlink(missing_ok=True)
        return _LocalWriter(temporary, size, self._path_to_write(key), page_cache=self._page_cache)

    def open(self, key: str) -> _LocalReader:
        """Open a regular file. Symbolic links are refused."""
        return _LocalReader(self._path_to_read(key), self._page_cache)

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
        reader = self.open(key)
        try:
            if reader.size > limit:
                raise StoreError(
                    f"{self.path / key} has {reader.size} bytes; at most {limit} are expected"
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
        return {name for name in self.list() if os.path.lexists(self.path / name / key)}

    def is_writable(self) -> bool:
        """Return whether this user may create files in the directory, or create the directory."""
        existing = next(path for path in (self.path, *self.path.parents) if path.exists())
        return os.access(existing, os.W_OK)

    def sync(self) -> None:
        """Sync the directory."""
        _sync(self.path)

    @contextmanager
    def hold(self, key: str, *, shared: bool) -> Iterator[bool]:
        """Lock a file with `flock`."""
        if shared:
            flags = os.O_RDONLY
        else:
            flags = os.O_RDWR | os.O_CREAT
            with suppress(FileExistsError):  # it existed, but another process removed it
                self._create_directory()
        fd = -1
        try:
            fd = os.open(self._path_to_write(key), flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except (FileNotFoundError, NotADirectoryError):
            pass  # no yield here, because errors of the block would be chained to this one
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise StoreError(
                f"{self._path_to_write(key)} is a symbolic link, which is not followed"
            ) from error
        if fd < 0:
            yield False
            return
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            held = (
                os.fstat(fd).st_nlink > 0
            )  # otherwise another process deleted it before it was locked
        except OSError as error:
            # A file system without locks raises other errors. Then the file counts as locked.
            held = error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
        try:
            yield held
        finally:
            os.close(fd)

    def _create_directory(self) -> None:
        """Create the directory and its parents durably."""
        missing = [each for each in (self.path, *self.path.parents) if not each.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        for each in missing:
            with suppress(PermissionError):  # a directory that cannot be listed cannot be synced
                _sync(each.parent)

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
    """Give a file a second name, unless it is taken.

    If the answer of an NFS server is lost, its client asks again, and the second answer is that the
    name is taken. The number of links tells whether it is taken by this file.
    """
    try:
        os.link(source, target)
    except FileExistsError:
        if os.stat(source).st_nlink < 2:
            raise


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _status_of(path: Path) -> FileStatus:
    status = path.stat()
    return FileStatus(status.st_size, str(status.st_mtime_ns))


def _raise_error(error: OSError) -> None:
    """Raise the error of a directory that cannot be listed, which `os.walk` ignores by default."""
    raise error


class _LocalWriter:
    """A file that is being written.

    Args:
        path: the path, at which no file exists.
        size: the size in bytes.
        final_path: the path to rename the file to when it is committed; None to keep its path.
        page_cache: write through the page cache.
    """

    def __init__(
        self, path: Path, size: int, final_path: Path | None = None, *, page_cache: bool
    ) -> None:
        self._path = path
        self._final_path = final_path
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
        view = data.data
        while view:
            written = self._write(view, offset)
            if self._page_cache:
                start_writeback(self._fd, offset, written)
            offset += written
            view = view[written:]

    def _write(self, view: memoryview, offset: int) -> int:
        try:
            return os.pwrite(self._fd, view, offset)
        except OSError as error:
            flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            # The file system does not support O_DIRECT after all, or a write was short before.
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            return os.pwrite(self._fd, view, offset)

    def commit(self) -> None:
        os.ftruncate(self._fd, self._size)
        os.fsync(self._fd)
        if self._final_path is not None:
            os.replace(self._path, self._final_path)
            _sync(self._path.parent)

    def close(self) -> None:
        os.close(self._fd)


class _LocalReader:
    """A file that is being read.

    Pages that are in the page cache are read there, and other pages by direct I/O.

    Args:
        path: the path.
        page_cache: read all pages through the page cache.
    """

    def __init__(self, path: Path, page_cache: bool = False) -> None:
        self._path = path
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            self._fd = os.open(path, flags)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise StoreError(f"{path} is a symbolic link, which is not followed") from error
            raise
        self._direct: int | None = None
        found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode):
            os.close(self._fd)
            raise StoreError(f"{path} is not a regular file")
        self.size = found.st_size
        if not page_cache:
            with suppress(OSError):
                self._direct = os.open(path, flags | os.O_DIRECT)

    def read_at(self, offset: int, out: Buffer) -> int:
        done = 0
        view = out.data
        while done < len(view):
            count = self._read(view[done:], offset + done)
            if count == 0:
                break
            done += count
        return done

    def read_all(self) -> bytes:
        return os.pread(self._fd, self.size, 0)

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


_CACHESTAT = 451  # the same number on every architecture; Linux 6.5 and later


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Statistics(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


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
    wanted, found = _Range(offset, length), _Statistics()
    status = _libc.syscall(_CACHESTAT, fd, ctypes.byref(wanted), ctypes.byref(found), 0)
    pages = -(-(offset + length) // 4096) - offset // 4096
    return bool(status == 0 and found.cached >= pages)
