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
from typing import TYPE_CHECKING, TypeVar

from shardwise.kernel.errors import StoreError, StoreUnavailableError
from shardwise.kernel.store.names import parse_url
from shardwise.kernel.store.store import FileStatus, not_a_directory
from shardwise.parts.stores.remote_files import Entry, ReadRange, RemoteFileStore, RequestStream

if TYPE_CHECKING:
    from hdfs_native import Client, FileReader, FileWriter
    from hdfs_native import FileStatus as HdfsStatus

REQUEST_SECONDS = 120.0
# The client tries to reach a NameNode that does not answer for about 15 s, and then raises. By
# default, it tries for several minutes.
CONFIG = {"dfs.client.failover.max.attempts": "4"}
_ADVICE = "check that its NameNode and DataNodes run and can be reached"
_ADVICE_IF_REFUSED = "correct the cause, for example a quota or an invalid path"
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


def open_hdfs(url: str) -> HdfsStore:
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
    return HdfsStore(parse_url(url, (), needs_host=False))


class HdfsStore(RemoteFileStore):
    """Files in a directory of an HDFS file system.

    The client waits without a bound for a server that is reached, but does not answer. So each
    request runs in a thread, and this class waits only for a limited time. The server may execute
    the request later.

    Attributes:
        request_timeout: the longest time of a request, in seconds.
    """

    request_timeout = REQUEST_SECONDS
    refuses_to_replace = True  # renames in HDFS are atomic

    def _connect(self) -> Client:
        from hdfs_native import Client

        with _translate_errors(self._place("")):
            return Client(self._place(""), CONFIG)

    def _find(self, path: str) -> Entry:
        return _entry(self.request(path, lambda: self._client.get_file_info(path)))

    def _list(self, path: str) -> Mapping[str, Entry]:
        found = self.request(path, lambda: list(self._client.list_status(path)))
        if len(found) == 1 and found[0].path == path and not found[0].isdir:
            raise not_a_directory(self._place(path))
        return {status.path.rpartition("/")[2]: _entry(status) for status in found}

    def _open(self, path: str, size: int | None) -> tuple[int, ReadRange]:
        reader: FileReader = self.request(path, lambda: self._client.read(path))

        def read(offset: int, count: int) -> bytes:
            return self.request(path, lambda: reader.read_range(offset, count)) if count else b""

        return len(reader), read

    def _create(self, path: str) -> RequestStream:
        from hdfs_native import WriteOptions

        options = WriteOptions(overwrite=False, create_parent=True)
        writer: FileWriter = self.request(path, lambda: self._client.create(path, options))
        return RequestStream(
            lambda data: self.request(path, lambda: writer.write(data)),
            lambda: self.request(path, writer.close),
        )

    def _write(self, path: str, data: bytes, *, replace: bool) -> None:
        """Write a small file under a temporary name, and rename it."""
        directory, _, name = path.rpartition("/")
        temporary = f"{directory}/.{name}.{secrets.token_hex(4)}"
        stream = self._create(temporary)
        try:
            stream.write(memoryview(data))
        finally:
            stream.close()
        try:
            self.request(path, lambda: self._client.rename(temporary, path, overwrite=replace))
        except OSError:
            with suppress(OSError):  # the error that led here matters more
                self._delete(temporary)
            raise

    def _rename(self, source: str, target: str) -> None:
        self.request(target, lambda: self._client.rename(source, target, overwrite=True))

    def _delete(self, path: str) -> None:
        if not self.request(path, lambda: self._client.delete(path, recursive=False)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._place(path))

    _remove_directory = _delete

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
        place = self._place(path)
        try:
            if not wait([answer], self.request_timeout).done:
                raise StoreUnavailableError(
                    f"{place}: HDFS has not answered for {self.request_timeout:g} s; {_ADVICE}"
                )
            with _translate_errors(place):
                return answer.result()
        except StoreUnavailableError:
            self._forget_client()
            raise


def _entry(status: HdfsStatus) -> Entry:
    found = FileStatus(status.length, str(status.modification_time), is_directory=status.isdir)
    return found, status.modification_time / 1000


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
        raise _failure(place, text, is_outage=is_outage) from None
    except ValueError as error:  # no DataNode has a block
        raise _failure(place, str(error), is_outage=True) from None
    except RuntimeError as error:
        text = _JAVA_TRACE.sub("", str(error))
        if "PathIsNotEmptyDirectoryException" in text:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), place) from None
        if "AccessControlException" in text:
            raise PermissionError(errno.EACCES, text, place) from None
        is_outage = any(name in text for name in _TEMPORARY)
        raise _failure(place, text, is_outage=is_outage) from None


def _failure(place: str, text: str, *, is_outage: bool) -> StoreError:
    error_class = StoreUnavailableError if is_outage else StoreError
    advice = _ADVICE if is_outage else _ADVICE_IF_REFUSED
    return error_class(f"{place}: HDFS failed: {text}; {advice}")
