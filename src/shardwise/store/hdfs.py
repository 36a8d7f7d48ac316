"""Stores in HDFS, by the client hdfs-native."""

from __future__ import annotations

import errno
import os
import re
import secrets
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardwise.errors import StoreError
from shardwise.store.remote_files import Entry, RemoteFileStore

if TYPE_CHECKING:
    from hdfs_native import Client, FileReader, FileWriter
    from hdfs_native import FileStatus as HdfsStatus

# The client tries to reach a NameNode that does not answer for about 15 s, and then raises. By
# default, it tries for several minutes.
CONFIG = {"dfs.client.failover.max.attempts": "4"}
_ADVICE = "check that its NameNode and DataNodes run and can be reached"
_JAVA_TRACE = re.compile(r"\s*(\\n|\n)\s*(\\t|\t)at .*", re.DOTALL)


def open_hdfs(url: str) -> RemoteFileStore:
    """Return the store at an HDFS URL.

    The client reads Hadoop's configuration from `HADOOP_CONF_DIR` or `HADOOP_HOME`, for example the
    NameNodes of a name service; and the user from `HADOOP_USER_NAME` or Kerberos tickets.

    Args:
        url: a URL such as `hdfs://namenode:8020/runs/7`.

    Raises:
        StoreError: hdfs-native is not installed, or the URL is invalid.
    """
    try:
        import hdfs_native  # noqa: F401
    except ImportError as error:
        raise StoreError(
            f"{url!r}: HDFS needs hdfs-native: pip install 'shardwise[hdfs]'"
        ) from error
    split = urllib.parse.urlsplit(url)
    if split.query or split.fragment or "@" in split.netloc:
        raise StoreError(
            f"{url!r}: a URL of HDFS has no options and no user: hdfs://host:port/path"
        )
    return RemoteFileStore(HdfsFiles(f"hdfs://{split.netloc}"), split.path.rstrip("/") or "/")


@dataclass(frozen=True)
class HdfsFiles:
    """The files of an HDFS file system.

    Args:
        url: `hdfs://namenode:port`, or `hdfs://` and the name of a name service.
    """

    url: str
    refuses_to_replace = True  # renames in HDFS are atomic
    _clients: dict[int, Client] = field(default_factory=dict, compare=False, repr=False)

    def __reduce__(self) -> tuple[type[HdfsFiles], tuple[str]]:
        return type(self), (self.url,)

    def find(self, path: str) -> Entry:
        """Return what is at a path."""
        with _translate_errors(f"{self.url}{path}"):
            return _entry(self._client.get_file_info(path))

    def list(self, path: str) -> Mapping[str, Entry]:
        """Return what is in a directory, by name."""
        with _translate_errors(f"{self.url}{path}"):
            found = list(self._client.list_status(path))
        if len(found) == 1 and found[0].path == path and not found[0].isdir:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), self.url + path)
        return {status.path.rpartition("/")[2]: _entry(status) for status in found}

    def open(self, path: str, size: int | None = None) -> _HdfsFile:
        """Open a file."""
        with _translate_errors(f"{self.url}{path}"):
            return _HdfsFile(self._client.read(path), self.url + path)

    def create(self, path: str) -> _HdfsStream:
        """Create a file."""
        return _HdfsStream(self._writer(path, overwrite=False), self.url + path)

    def write_empty(self, path: str) -> None:
        """Create or replace an empty file."""
        with _translate_errors(f"{self.url}{path}"):
            self._writer(path, overwrite=True).close()

    def write(self, path: str, data: bytes) -> None:
        """Write a small file under a temporary name, and rename it."""
        temporary = self._write_temporary(path, data)
        try:
            self.rename(temporary, path)
        except OSError:
            self._delete_quietly(temporary)
            raise

    def write_new(self, path: str, data: bytes) -> None:
        """Write a small file under a temporary name, and rename it unless its name is taken."""
        temporary = self._write_temporary(path, data)
        try:
            with _translate_errors(f"{self.url}{path}"):
                self._client.rename(temporary, path, overwrite=False)
        except OSError:
            # If the answer to the first attempt was lost, the client's second attempt fails.
            if not self._has_content(path, data):
                self._delete_quietly(temporary)
                raise

    def rename(self, source: str, target: str) -> None:
        """Rename a file. An existing one is replaced."""
        with _translate_errors(f"{self.url}{target}"):
            self._client.rename(source, target, overwrite=True)

    def delete(self, path: str) -> None:
        """Delete a file."""
        with _translate_errors(f"{self.url}{path}"):
            if not self._client.delete(path, recursive=False):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.url + path)

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""
        self.delete(path)

    @property
    def _client(self) -> Client:
        """The client of this process.

        After a fork, the parent's client has no threads. It is kept, because deleting it would wait
        for them.
        """
        client = self._clients.get(os.getpid())
        if client is None:
            from hdfs_native import Client

            with _translate_errors(self.url):
                client = Client(self.url, CONFIG)
            self._clients[os.getpid()] = client
        return client

    def _writer(self, path: str, *, overwrite: bool) -> FileWriter:
        from hdfs_native import WriteOptions

        options = WriteOptions(overwrite=overwrite, create_parent=True)
        with _translate_errors(f"{self.url}{path}"):
            return self._client.create(path, options)

    def _write_temporary(self, path: str, data: bytes) -> str:
        directory, _, name = path.rpartition("/")
        temporary = f"{directory}/.{name}.{secrets.token_hex(4)}"
        stream = self.create(temporary)
        try:
            stream.write(memoryview(data))
        finally:
            stream.close()
        return temporary

    def _has_content(self, path: str, data: bytes) -> bool:
        try:
            file = self.open(path)
            return file.size == len(data) and file.read(0, file.size) == data
        except OSError:
            return False

    def _delete_quietly(self, path: str) -> None:
        with suppress(OSError):  # the error that led here matters more
            self.delete(path)


@dataclass(frozen=True, slots=True)
class _HdfsFile:
    """A file that is open for reading."""

    reader: FileReader
    place: str

    @property
    def size(self) -> int:
        return len(self.reader)

    def read(self, offset: int, count: int) -> bytes:
        if count == 0:
            return b""
        with _translate_errors(self.place):
            return self.reader.read_range(offset, count)


@dataclass(frozen=True, slots=True)
class _HdfsStream:
    """A file that is being written."""

    writer: FileWriter
    place: str

    def write(self, data: memoryview) -> None:
        with _translate_errors(self.place):
            self.writer.write(data)

    def close(self) -> None:
        with _translate_errors(self.place):
            self.writer.close()


def _entry(status: HdfsStatus) -> Entry:
    time = str(status.modification_time)
    return Entry(status.length, status.isdir, status.modification_time / 1000, time)


@contextmanager
def _translate_errors(place: str) -> Iterator[None]:
    """Shorten the messages of the NameNode, and make all errors an `OSError`."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        text = _JAVA_TRACE.sub("", str(error))
        if error.errno is not None:
            raise
        number = {FileNotFoundError: errno.ENOENT, FileExistsError: errno.EEXIST}.get(type(error))
        if number is None:
            raise StoreError(f"{place}: HDFS failed: {text}; {_ADVICE}") from None
        raise type(error)(number, text, place) from None
    except RuntimeError as error:
        text = _JAVA_TRACE.sub("", str(error))
        if "PathIsNotEmptyDirectoryException" in text:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), place) from None
        if "AccessControlException" in text:
            raise PermissionError(errno.EACCES, text, place) from None
        raise StoreError(f"{place}: HDFS failed: {text}; {_ADVICE}") from None
