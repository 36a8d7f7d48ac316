"""Write an object: in one put if it is small, otherwise as a multipart upload in the background."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np

from shardwise.errors import StoreError
from shardwise.store.object_errors import translated
from shardwise.store.store import Buffer

WAIT_SECONDS = 1.0
STALLED_SECONDS = 120.0
"""How long an upload waits for a chunk that nobody writes."""
ABORT_SECONDS = 60.0

log = logging.getLogger("shardwise")

Put = Callable[[Iterator[memoryview]], object]
"""Uploads parts, and aborts the upload if the iterator raises."""


class SmallUpload:
    """An object that is collected in memory and written at once. It is visible after `commit`.

    Args:
        place: the URL of the object, for messages.
        size: the size of the object, in bytes.
        put: uploads the content.
    """

    def __init__(self, place: str, size: int, put: Callable[[memoryview], object]) -> None:
        self._place = place
        self._content = np.zeros(size, np.uint8)
        self._put = put

    def write_at(self, offset: int, data: Buffer) -> None:
        part = self._content[offset : offset + len(data)]
        part[:] = data[: len(part)]

    def commit(self) -> None:
        with translated("write", self._place):
            self._put(self._content.data)

    def close(self) -> None:
        self._content = np.zeros(0, np.uint8)


class MultipartUpload:
    """An object whose parts are uploaded while it is written. It is visible after `commit`.

    Chunks may come in any order, if they do not overlap. A chunk is copied, because the upload goes
    on after `write_at` returns. If more than `window` bytes wait, `write_at` waits too, except for
    the chunk that comes next in the object.

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
        self._window = window
        self._changed = threading.Condition()
        self._chunks: dict[int, Buffer] = {}
        self._waiting = 0  # bytes in `_chunks`
        self._next = 0  # the offset of the chunk that the upload takes next
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
            while offset > self._next and self._waiting + len(data) > self._window:
                self._check(f"{self._waiting} later bytes wait for it")
                self._changed.wait(WAIT_SECONDS)
            self._check("")
        chunk = np.array(data)
        with self._changed:
            if offset < self._next or offset in self._chunks:
                raise StoreError(
                    f"{self._place}: bytes {offset}:{offset + len(data)} are written twice; each "
                    "byte of an object can be written once"
                )
            self._chunks[offset] = chunk
            self._waiting += len(chunk)
            self._changed.notify_all()

    def commit(self) -> None:
        while self._thread.is_alive():
            self._thread.join(WAIT_SECONDS)
            with self._changed:
                if self._next < self._size and self._next not in self._chunks:
                    self._is_closed = True
                    self._changed.notify_all()
                    raise StoreError(f"{self._place}: byte {self._next} was never written")
        self._check("")

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._chunks.clear()
            self._changed.notify_all()
        self._thread.join(ABORT_SECONDS)

    def _check(self, stalled: str) -> None:
        """Raise if the upload has failed; or, if `stalled` says why, if it has stalled."""
        if self._error is not None:
            raise self._error
        if self._is_closed:
            raise StoreError(f"{self._place}: the file is closed already")
        is_stalled = time.monotonic() - self._last_progress > STALLED_SECONDS
        if stalled and is_stalled and self._next not in self._chunks:
            raise StoreError(
                f"{self._place}: byte {self._next} was not written for {STALLED_SECONDS:g} s, and "
                f"{stalled}: write chunks roughly in order"
            )

    def _upload(self) -> None:
        try:
            with translated("write", self._place):
                self._put(self._parts())
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
            with suppress(Exception):  # the error of the upload itself says more
                self._abort()

    def _parts(self) -> Iterator[memoryview]:
        """Yield the chunks in order. Their memory is free again when it has been uploaded."""
        while self._next < self._size:
            with self._changed:
                while self._next not in self._chunks:
                    if self._is_closed:
                        raise StoreError(f"{self._place}: the upload was stopped")
                    self._changed.wait(WAIT_SECONDS)
                chunk = self._chunks.pop(self._next)
                self._waiting -= len(chunk)
                self._next += len(chunk)
                self._last_progress = time.monotonic()
                self._changed.notify_all()
            yield chunk.data
