"""Stores in HDFS, by the client hdfs-native."""

from __future__ import annotations

import errno
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from shardwise.errors import StoreError, StoreUnavailableError
from shardwise.store.remote_files import Entry, RemoteFileStore
from shardwise.store.store import FileStatus
from shardwise.store.store_url import parse_url

if TYPE_CHECKING:
    from hdfs_native import Client, FileReader, FileWriter
    from hdfs_native import FileStatus as HdfsStatus

REQUEST_SECONDS = 120.0
# The client tries to reach a NameNode that does not answer for about 15 s, and then raises. By
# default, it tries for several minutes.
CONFIG = {"dfs.client.failover.max.attempts": "4"}
_ADVICE = "check that its NameNode and DataNodes run and can be reached"
_TEMPORARY = (
    "SafeModeException",  # the NameNode starts
    "StandbyException",
    "RetriableException",
    "DataTransferError",
    "Failed to complete file in time",
    "There are 0 datanode(s) running",
    "node(s) are excluded in this operation",  # because they do not answer
)
"""Parts of the messages of errors that may end by themselves."""
_JAVA_TRACE = re.compile(r"\s*(\\n|\n)\s*(\\t|\t)at .*", re.DOTALL)

T = TypeVar("T")


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
    place = parse_url(url, (), needs_host=False)
    return RemoteFileStore(HdfsFiles(f"hdfs://{place.host}"), place)


@dataclass(frozen=True)
class HdfsFiles:
    """The files of an HDFS file system.

    The client waits without a bound for a server that is reached, but does not answer. So each
    request runs in a thread, and this class waits only for a limited time. The server may execute
    the request later.

    Args:
        url: `hdfs://namenode:port`, or `hdfs://` and the name of a name service.
        seconds: the longest time of a request.
    """

    url: str
    seconds: float = field(default=REQUEST_SECONDS, compare=False)
    refuses_to_replace = True  # renames in HDFS are atomic
    _clients: dict[int, Client] = field(default_factory=dict, compare=False, repr=False)

    def __reduce__(self) -> tuple[type[HdfsFiles], tuple[str, float]]:
        return type(self), (self.url, self.seconds)

    def find(self, path: str) -> Entry:
        """Return what is at a path."""
        return _entry(self.request(path, lambda: self._client.get_file_info(path)))

    def list(self, path: str) -> Mapping[str, Entry]:
        """Return what is in a directory, by name."""
        found = self.request(path, lambda: list(self._client.list_status(path)))
        if len(found) == 1 and found[0].path == path and not found[0].isdir:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), self.url + path)
        return {status.path.rpartition("/")[2]: _entry(status) for status in found}

    def open(self, path: str, size: int | None = None) -> _HdfsFile:
        """Open a file."""
        return _HdfsFile(self, path, self.request(path, lambda: self._client.read(path)))

    def create(self, path: str) -> _HdfsStream:
        """Create a file."""
        from hdfs_native import WriteOptions

        options = WriteOptions(overwrite=False, create_parent=True)
        return _HdfsStream(
            self, path, self.request(path, lambda: self._client.create(path, options))
        )

    def write(self, path: str, data: bytes) -> None:
        """Create or replace a small file under a temporary name, and rename it."""
        self._write(path, data, overwrite=True)

    def write_new(self, path: str, data: bytes) -> None:
        """Write a small file under a temporary name, and rename it unless its name is taken."""
        self._write(path, data, overwrite=False)

    def _write(self, path: str, data: bytes, *, overwrite: bool) -> None:
        directory, _, name = path.rpartition("/")
        temporary = f"{directory}/.{name}.{secrets.token_hex(4)}"
        stream = self.create(temporary)
        try:
            stream.write(memoryview(data))
        finally:
            stream.close()
        try:
            self.request(path, lambda: self._client.rename(temporary, path, overwrite=overwrite))
        except OSError:
            with suppress(OSError):  # the error that led here matters more
                self.delete(temporary)
            raise

    def rename(self, source: str, target: str) -> None:
        """Rename a file. An existing one is replaced."""
        self.request(target, lambda: self._client.rename(source, target, overwrite=True))

    def delete(self, path: str) -> None:
        """Delete a file."""
        if not self.request(path, lambda: self._client.delete(path, recursive=False)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.url + path)

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""
        self.delete(path)

    def request(self, path: str, work: Callable[[], T]) -> T:
        """Return the result of a request.

        Args:
            path: the path, for messages.
            work: sends the request, and waits for the answer.

        Raises:
            StoreUnavailableError: HDFS does not answer in time, or says that it is not ready.
            OSError: the request failed.
        """
        answer: Future[T] = Future()

        def send() -> None:
            try:
                answer.set_result(work())
            except BaseException as error:  # raised again in the thread that waits
                answer.set_exception(error)

        threading.Thread(target=send, name="shardwise-hdfs", daemon=True).start()
        place = f"{self.url}{path}"
        try:
            if not wait([answer], self.seconds).done:
                raise StoreUnavailableError(
                    f"{place}: HDFS has not answered for {self.seconds:g} s; {_ADVICE}"
                )
            with _translate_errors(place):
                return answer.result()
        except StoreUnavailableError:
            self._clients.pop(os.getpid(), None)  # the next request connects anew
            raise

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


@dataclass(frozen=True, slots=True)
class _HdfsFile:
    """A file that is open for reading."""

    files: HdfsFiles
    path: str
    reader: FileReader

    @property
    def size(self) -> int:
        return len(self.reader)

    def read(self, offset: int, count: int) -> bytes:
        if count == 0:
            return b""
        return self.files.request(self.path, lambda: self.reader.read_range(offset, count))


@dataclass(frozen=True, slots=True)
class _HdfsStream:
    """A file that is being written."""

    files: HdfsFiles
    path: str
    writer: FileWriter

    def write(self, data: memoryview) -> None:
        self.files.request(self.path, lambda: self.writer.write(data))

    def close(self) -> None:
        self.files.request(self.path, self.writer.close)


def _entry(status: HdfsStatus) -> Entry:
    found = FileStatus(status.length, str(status.modification_time), is_directory=status.isdir)
    return Entry(found, status.modification_time / 1000)


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
        if number is not None:
            raise type(error)(number, text, place) from None
        is_outage = type(error) is OSError or isinstance(error, (ConnectionError, TimeoutError))
        error_class = StoreUnavailableError if is_outage else StoreError
        raise error_class(f"{place}: HDFS failed: {text}; {_ADVICE}") from None
    except ValueError as error:  # no DataNode has a block
        raise StoreUnavailableError(f"{place}: HDFS failed: {error}; {_ADVICE}") from None
    except RuntimeError as error:
        text = _JAVA_TRACE.sub("", str(error))
        if "PathIsNotEmptyDirectoryException" in text:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), place) from None
        if "AccessControlException" in text:
            raise PermissionError(errno.EACCES, text, place) from None
        is_outage = any(name in text for name in _TEMPORARY)
        error_class = StoreUnavailableError if is_outage else StoreError
        raise error_class(f"{place}: HDFS failed: {text}; {_ADVICE}") from None
