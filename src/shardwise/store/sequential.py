"""Write a file in any order to a stream that takes its bytes in order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from shardwise.errors import StoreError
from shardwise.store.store import Buffer

LARGEST_BACKLOG = 256 << 20
"""Bytes that wait for earlier ones, before `write_at` waits too."""
LONGEST_STALL = 600.0
"""Seconds that `write_at` waits while another thread writes to the stream."""


class Stream(Protocol):
    """Takes the bytes of a file in order."""

    def write(self, data: memoryview) -> object:
        """Append bytes."""
        ...

    def close(self) -> object:
        """Complete the file."""
        ...


class SequentialWriter:
    """A `WritableFile` that passes the bytes to a stream in order.

    Bytes that come early are copied, and wait. If many bytes wait, `write_at` waits while another
    thread writes to the stream. It never waits for bytes that no thread is writing: the thread that
    has them may be the one that would wait.

    Args:
        stream: gets the bytes.
        size: the size of the file in bytes.
        place: name of the file, for messages.
        finish: is called after the stream was closed by `commit`.
        discard: is called after the stream was closed by `close`, without `commit`.
    """

    def __init__(
        self,
        stream: Stream,
        size: int,
        place: str,
        *,
        finish: Callable[[], None],
        discard: Callable[[], None],
    ) -> None:
        self._stream, self._size, self._place = stream, size, place
        self._finish, self._discard = finish, discard
        self._position = 0  # up to here, the stream has the bytes
        self._early: dict[int, memoryview] = {}
        self._backlog = 0  # bytes in `_early`
        self._is_writing = False
        self._error: BaseException | None = None
        self._is_committed = False
        self._changed = threading.Condition()

    def write_at(self, offset: int, data: Buffer) -> None:
        """See `WritableFile.write_at`."""
        view = data.data[: max(0, self._size - offset)]
        if not len(view):
            return
        with self._changed:
            if offset != self._position:
                self._wait_for_room(len(view))
            self._check()
            if offset < self._position or offset in self._early:
                raise StoreError(f"{self._place}: the bytes at {offset} were written twice")
            if offset != self._position or self._is_writing:
                self._early[offset] = memoryview(bytes(view))
                self._backlog += len(view)
                return
            self._is_writing = True
        self._write(view)

    def commit(self) -> None:
        """Complete the file.

        Raises:
            StoreError: some bytes are missing.
        """
        with self._changed:
            self._check()
            if self._position < self._size or self._early:
                raise StoreError(
                    f"{self._place}: only the first {self._position} of {self._size} bytes were "
                    "written"
                )
        self._stream.close()
        self._is_committed = True
        self._finish()

    def close(self) -> None:
        """Discard the file, unless it is committed."""
        if not self._is_committed:
            with suppress(OSError):  # the file is discarded in any case
                self._stream.close()
            with suppress(OSError):
                self._discard()

    def _check(self) -> None:
        if self._error is not None:
            raise StoreError(f"{self._place}: an earlier write failed: {self._error}")

    def _wait_for_room(self, count: int) -> None:
        def has_room() -> bool:
            return not self._is_writing or self._backlog + count <= LARGEST_BACKLOG

        if not self._changed.wait_for(has_room, LONGEST_STALL):
            raise StoreError(
                f"{self._place}: the storage took no bytes for {LONGEST_STALL:g} s; check it, and "
                "save again"
            )

    def _write(self, view: memoryview) -> None:
        """Write bytes, and then the early ones that follow them."""
        try:
            following: memoryview | None = view
            while following is not None:
                self._stream.write(following)
                with self._changed:
                    self._position += len(following)
                    following = self._early.pop(self._position, None)
                    self._backlog -= len(following) if following is not None else 0
                    self._is_writing = following is not None
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._is_writing = False
                self._changed.notify_all()
            raise
