"""`RetryingStore`: repeats what fails for a reason that may pass, in any store."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

from shardwise.deadline import Deadline
from shardwise.errors import StoreError, StoreUnavailableError
from shardwise.store.names import RETRY_SECONDS
from shardwise.store.store import (
    Buffer,
    FileStatus,
    ReadableFile,
    Store,
    StoreTraits,
    ViewableFile,
    WritableFile,
)

WARNING_SECONDS = 10.0
LATE_SECONDS = 10.0
"""For so many seconds after a write, a server may say that the file does not exist."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 15.0  # seconds

T = TypeVar("T")
log = logging.getLogger("shardwise")


class Retry:
    """Repeats operations of a server, and remembers what was just written to the server.

    Args:
        seconds: how long to repeat an operation.
        warning_seconds: how long to repeat an operation before a warning is logged. There is one
            warning for each outage.
        clock: a monotonic clock, in seconds.
        sleep: the function that waits between two attempts.

    Attributes:
        repeated: how many attempts have failed and were repeated, so far.
    """

    def __init__(
        self,
        seconds: float = RETRY_SECONDS,
        warning_seconds: float = WARNING_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.seconds = seconds
        self._warning_seconds = warning_seconds
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._written_at: dict[str, float] = {}  # by place
        self._has_warned = False
        self.repeated = 0

    def __reduce__(self) -> tuple[type[Retry], tuple[float, float]]:
        return type(self), (self.seconds, self._warning_seconds)

    def call(self, act: Callable[[], T], is_late: Callable[[], bool] = lambda: False) -> T:
        """Return the result of an operation, which may be repeated.

        Args:
            act: the operation.
            is_late: returns whether the operation may miss a file because it was just written.

        Raises:
            OSError: of the last attempt.
        """
        begin = self._clock()
        failure: OSError | None = None
        deadline = Deadline(self.seconds, self._clock, self._sleep)
        for _ in deadline.attempts(pause=FIRST_PAUSE, longest_pause=LONGEST_PAUSE):
            if failure is not None:
                with self._lock:
                    self.repeated += 1
            try:
                result = act()
            except StoreUnavailableError as error:
                failure = error
            except OSError as error:
                if not (_is_missing(error) and is_late()):
                    raise
                failure = error
            else:
                self._has_warned = False
                return result
            self._warn(failure, begin)
        raise failure or StoreUnavailableError("not tried")

    def note_write(self, place: str) -> None:
        """Remember that a file was written."""
        with self._lock:
            self._forget_old()
            self._written_at[place] = self._clock()

    def forget_write(self, place: str) -> None:
        """Forget a file that is deleted."""
        with self._lock:
            self._written_at.pop(place, None)

    def has_written(self, place: str | None) -> bool:
        """Return whether a file was written a moment ago; with None, whether any file was."""
        with self._lock:
            self._forget_old()
            return bool(self._written_at) if place is None else place in self._written_at

    def _forget_old(self) -> None:
        limit = self._clock() - LATE_SECONDS
        self._written_at = {place: at for place, at in self._written_at.items() if at >= limit}

    def _warn(self, failure: OSError, begin: float) -> None:
        passed = self._clock() - begin
        if self._has_warned or passed < self._warning_seconds:
            return
        self._has_warned = True
        end = time.localtime(time.time() + max(0.0, self.seconds - passed))
        log.warning(
            "%s. This has failed for %.0f s, and is repeated until %s (the option retry=%g of the "
            "URL)",
            *(failure, passed, time.strftime("%H:%M:%S", end), self.seconds),
        )


def _is_missing(error: OSError) -> bool:
    """Return whether a server said that it does not find what a request is for."""
    return isinstance(error, FileNotFoundError) or error.errno == errno.ENOENT


class RetryingStore:
    """Repeats the operations of another store while it does not answer.

    A file that this store wrote a moment ago is looked for again if the server does not find it. If
    the answer to `publish` is lost, the file is read: `data` must include a random number that no
    other process uses. `create`, and the writes and the commit of the file that it returns, are not
    repeated, because they may have had an effect when they fail.

    Args:
        store: the other store, which raises `StoreUnavailableError` if trying again may help.
        retry: how long to repeat; shared with the stores below.
    """

    def __init__(self, store: Store, retry: Retry) -> None:
        self.store = store
        self._retry = retry

    def __repr__(self) -> str:
        return repr(self.store)

    def __str__(self) -> str:
        return str(self.store)

    @property
    def retries(self) -> int:
        """How many requests were repeated so far, here and in the stores that share the retry."""
        return self._retry.repeated

    @property
    def traits(self) -> StoreTraits:
        """The traits of the other store."""
        return self.store.traits

    def at(self, name: str) -> RetryingStore:
        """Return the store one level below."""
        return RetryingStore(self.store.at(name), self._retry)

    def list(self) -> list[str]:
        """See `Store.list`."""
        return self._repeat(None, self.store.list)

    def walk(self, limit: int) -> dict[str, FileStatus]:
        """See `Store.walk`."""
        return self._repeat(None, lambda: self.store.walk(limit))

    def stat(self, path: str) -> FileStatus | None:
        """See `Store.stat`."""

        def find() -> FileStatus:
            status = self.store.stat(path)
            if status is None:
                raise FileNotFoundError(errno.ENOENT, "no such file", self._place(path))
            return status

        try:
            return self._repeat(path, find)
        except FileNotFoundError:
            return None

    def open(self, path: str, size: int | None = None) -> ReadableFile:
        """See `Store.open`."""
        file = self._repeat(path, lambda: self.store.open(path, size))
        kind = _ViewableFile if isinstance(file, ViewableFile) else _ReadableFile
        return kind(file, partial(self._repeat, path))

    def read(self, key: str, *, limit: int) -> bytes:
        """See `Store.read`."""
        return self._repeat(key, lambda: self.store.read(key, limit=limit))

    def create(self, key: str, size: int, *, replace: bool = False) -> WritableFile:
        """See `Store.create`."""
        file = self.store.create(key, size, replace=replace)
        return _WritableFile(file, lambda: self._retry.note_write(self._place(key)))

    def publish(
        self,
        key: str,
        data: bytes,
        *,
        replace: bool,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """See `Store.publish`.

        Args:
            check: called before each attempt. If this function raises, nothing is published.
        """

        def publish() -> None:
            check()
            try:
                self.store.publish(key, data, replace=replace)
            except (FileExistsError, StoreUnavailableError) as failure:
                if replace or self._has_failed(key, data, failure):
                    raise

        self._repeat(key, publish)
        self._retry.note_write(self._place(key))

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        self._retry.forget_write(self._place(key))
        self._repeat(key, lambda: self.store.delete(key))

    @contextmanager
    def lock(self, key: str, *, shared: bool = False) -> Iterator[bool]:
        """See `Store.lock`. Only the attempt to lock is repeated."""
        with ExitStack() as locks:
            yield self._repeat(
                key, lambda: locks.enter_context(self.store.lock(key, shared=shared))
            )

    def _repeat(self, path: str | None, act: Callable[[], T]) -> T:
        """Return the result of an operation on a file; on all files here if `path` is None."""
        place = None if path is None else self._place(path)
        return self._retry.call(act, lambda: self._retry.has_written(place))

    def _has_failed(self, key: str, data: bytes, failure: OSError) -> bool:
        """Return whether a file was not published: read it, and compare its data.

        Raises:
            FileExistsError: the file has other content.
            StoreUnavailableError: the server says that the file exists, and does not find it.
        """
        try:
            found = self.store.read(key, limit=len(data))
        except FileNotFoundError:
            if isinstance(failure, FileExistsError):
                raise StoreUnavailableError(
                    f"{self._place(key)}: cannot tell whether the file was written: the server "
                    "says that it exists, and does not find it; check the storage, and try again"
                ) from failure
            return True
        except StoreUnavailableError:
            raise
        except StoreError:  # it is larger
            found = None
        if found == data:
            return False
        raise FileExistsError(
            errno.EEXIST,
            "a file of this name exists already: save again, or remove the file",
            self._place(key),
        )

    def _place(self, path: str) -> str:
        """Return the URL of a file without options."""
        place = str(self.store).partition("?")[0]
        return f"{place}/{path}" if path else place


class _ReadableFile:
    def __init__(self, file: ReadableFile, repeat: Callable[[Callable[[], Any]], Any]) -> None:
        self._file, self._repeat = file, repeat
        self.size = file.size

    def read_at(self, offset: int, out: Buffer) -> int:
        count: int = self._repeat(lambda: self._file.read_at(offset, out))
        return count

    def close(self) -> None:
        self._file.close()


class _ViewableFile(_ReadableFile):
    _file: ViewableFile

    def view(self, offset: int, count: int) -> Buffer:
        found: Buffer = self._repeat(lambda: self._file.view(offset, count))
        return found


class _WritableFile:
    def __init__(self, file: WritableFile, note_write: Callable[[], object]) -> None:
        self._file, self._note_write = file, note_write

    def write_at(self, offset: int, data: Buffer) -> None:
        self._file.write_at(offset, data)

    def commit(self) -> None:
        self._file.commit()
        self._note_write()

    def close(self) -> None:
        self._file.close()
