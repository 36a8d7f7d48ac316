"""Write an object: in one put if it is small, otherwise as a multipart upload in the background."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np

from shardwise.errors import StoreError
from shardwise.store.object_errors import translate_errors
from shardwise.store.store import Buffer

WAIT_SECONDS = 1.0
ABORT_SECONDS = 60.0

Put = Callable[[Iterator[memoryview]], object]
"""Uploads parts, and aborts the upload if the iterator raises."""


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


class UploadStream:
    """Uploads the bytes of an object in a thread, while a `SequentialWriter` writes them in order.

    Args:
        place: the URL of the object, for messages.
        put: uploads the chunks that an iterator yields.
        abort: deletes the parts of a failed upload from the server.
    """

    def __init__(self, place: str, put: Put, abort: Callable[[], object]) -> None:
        self._place, self._put, self._abort = place, put, abort
        self._chunks: queue.Queue[memoryview | None] = queue.Queue(maxsize=2)
        self._is_discarded = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._upload, name="shardwise-upload", daemon=True)
        self._thread.start()

    def write(self, data: memoryview) -> None:
        """Upload a chunk, whose memory nobody else changes."""
        self._pass_on(data)

    def close(self) -> None:
        """Complete the object."""
        self._pass_on(None)
        self._thread.join()
        self._check()

    def discard(self) -> None:
        """Abort the upload, unless it has ended."""
        self._is_discarded = True
        with suppress(queue.Empty):
            while True:
                self._chunks.get_nowait()
        with suppress(queue.Full):
            self._chunks.put_nowait(None)
        self._thread.join(ABORT_SECONDS)

    def _pass_on(self, chunk: memoryview | None) -> None:
        while True:
            self._check()
            with suppress(queue.Full):
                self._chunks.put(chunk, timeout=WAIT_SECONDS)
                return

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _upload(self) -> None:
        try:
            with translate_errors("write", self._place):
                self._put(self._parts())
        except BaseException as error:
            self._error = error
            with suppress(Exception):  # the error of the upload itself says more
                self._abort()

    def _parts(self) -> Iterator[memoryview]:
        """Yield the chunks. The memory of a chunk is freed once the chunk is uploaded."""
        while (chunk := self._chunks.get()) is not None and not self._is_discarded:
            yield chunk
        if self._is_discarded:
            raise StoreError(
                f"{self._place}: the upload was stopped, because the file was closed before it was "
                "complete"
            )
