"""Write an object: in one put if it is small, otherwise as a multipart upload in the background."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np

from shardwise.errors import StoreError
from shardwise.store.object_errors import translate_errors
from shardwise.store.sequential import EarlyChunks
from shardwise.store.store import Buffer

WAIT_SECONDS = 1.0
STALLED_SECONDS = 120.0
"""How long an upload waits for a chunk that nobody writes."""
ABORT_SECONDS = 60.0

log = logging.getLogger("shardwise")

Put = Callable[[Iterator[memoryview]], object]
"""Uploads parts, and aborts the upload if the iterator raises."""


class UploadShare:
    """The upload requests that one process may have under way at a time, for all its objects.

    Args:
        requests: their number.
    """

    def __init__(self, requests: int) -> None:
        self.requests = requests
        self._used = 0
        self._lock = threading.Lock()

    @contextmanager
    def reserve(self, most: int) -> Iterator[int]:
        """Reserve requests for an object while the block runs.

        Yields:
            Their number: at most `most` and as many as are left, but at least 1, so that no upload
            waits for another.
        """
        with self._lock:
            reserved = max(1, min(most, self.requests - self._used))
            self._used += reserved
        try:
            yield reserved
        finally:
            with self._lock:
                self._used -= reserved


class SmallUpload:
    """An object that is collected in memory and written at once. It is visible after `commit`.

    Args:
        size: the size of the object, in bytes.
        put: uploads the content.
    """

    def __init__(self, size: int, put: Callable[[memoryview], object]) -> None:
        self._content = np.zeros(size, np.uint8)
        self._put = put

    def write_at(self, offset: int, data: Buffer) -> None:
        part = self._content[offset : offset + len(data)]
        part[:] = data[: len(part)]

    def commit(self) -> None:
        self._put(self._content.data)

    def close(self) -> None:
        self._content = np.zeros(0, np.uint8)


class MultipartUpload:
    """An object whose parts are uploaded while it is written. It is visible after `commit`.

    `write_at` copies each chunk, because the upload continues after it returns. It blocks while
    more than `window` bytes wait to be uploaded, but never for the chunk that the upload needs
    next. Chunks may come in any order, as long as at most `window` bytes before a chunk are
    missing.

    Args:
        place: the URL of the object, for messages.
        size: the size of the object, in bytes.
        put: uploads the chunks that an iterator yields.
        abort: deletes the parts of a failed upload from the server.
        window: the bytes that may wait.
    """

    def __init__(
        self, place: str, size: int, put: Put, abort: Callable[[], object], *, window: int
    ) -> None:
        self._place = place
        self._size = size
        self._put = put
        self._abort = abort
        self._changed = threading.Condition()
        self._early = EarlyChunks(place, window)
        self._last_progress = time.monotonic()
        self._is_closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._upload, name="shardwise-upload", daemon=True)
        self._thread.start()

    def write_at(self, offset: int, data: Buffer) -> None:
        data = data[: max(0, self._size - offset)]
        if not len(data):
            return
        with self._changed:
            self._check()
            self._early.check(offset, len(data))
            while not self._early.has_room(offset, len(data)):
                self._refuse_stall()
                self._changed.wait(WAIT_SECONDS)
                self._check()
        chunk = np.array(data)
        with self._changed:
            self._early.check(offset, len(data))
            self._early.add(offset, chunk)
            self._changed.notify_all()

    def commit(self) -> None:
        while self._thread.is_alive():
            self._thread.join(WAIT_SECONDS)
            with self._changed:
                missing = self._early.position
                if missing < self._size and not self._early.has_next():
                    self._is_closed = True
                    self._changed.notify_all()
                    raise StoreError(
                        f"{self._place}: cannot commit the file, because byte {missing} of "
                        f"{self._size} was not written: write all bytes before commit()"
                    )
        with self._changed:
            self._check()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._early.clear()
            self._changed.notify_all()
        self._thread.join(ABORT_SECONDS)

    def _check(self) -> None:
        """Raise if the upload has failed, or is closed."""
        if self._error is not None:
            raise self._error
        if self._is_closed:
            raise StoreError(f"{self._place}: the file is closed already")

    def _refuse_stall(self) -> None:
        """Raise if the upload waits too long for a chunk that nobody writes."""
        is_stalled = time.monotonic() - self._last_progress > STALLED_SECONDS
        if is_stalled and not self._early.has_next():
            raise StoreError(
                f"{self._place}: byte {self._early.position} was not written for "
                f"{STALLED_SECONDS:g} s, and {self._early.waiting} later bytes wait for it; write "
                "the chunks of a file in ascending order"
            )

    def _upload(self) -> None:
        try:
            with translate_errors("write", self._place):
                self._put(self._parts())
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
            with suppress(Exception):  # the error of the upload itself says more
                self._abort()

    def _parts(self) -> Iterator[memoryview]:
        """Yield the chunks in order. A chunk's memory is freed once the chunk is uploaded."""
        while self._early.position < self._size:
            with self._changed:
                while (chunk := self._early.take()) is None:
                    if self._is_closed:
                        raise StoreError(
                            f"{self._place}: the upload was stopped, because the file was closed "
                            "before it was complete"
                        )
                    self._changed.wait(WAIT_SECONDS)
                self._last_progress = time.monotonic()
                self._changed.notify_all()
            yield chunk.data
