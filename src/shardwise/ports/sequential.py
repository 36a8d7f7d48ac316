"""Write a file in any order to a stream that takes its bytes in order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import numpy as np

from shardwise.kernel.errors import StoreError
from shardwise.kernel.store.store import Buffer

LARGEST_BACKLOG = 256 << 20
"""Bytes that wait for earlier ones, before `write_at` waits too."""
LONGEST_STALL = 600.0
"""Seconds that `write_at` waits while no bytes reach the stream."""


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

    Bytes that come early are copied, and wait. If many bytes wait, `write_at` waits too.

    Args:
        stream: gets the bytes.
        size: the size of the file in bytes.
        place: name of the file, for messages.
        finish: is called after the stream was closed by `commit`.
        discard: ends the stream, and removes what was written. `close` calls it without `commit`.
        window: a number of bytes: at most so many bytes wait, and at most so many bytes may be
            missing before a chunk.
        keeps_chunks: whether the stream uses a chunk after `write` has returned. If so, each chunk
            is copied.
    """

    def __init__(
        self,
        stream: Stream,
        size: int,
        place: str,
        *,
        finish: Callable[[], object],
        discard: Callable[[], object],
        window: int = LARGEST_BACKLOG,
        keeps_chunks: bool = False,
    ) -> None:
        self._stream, self._size, self._place = stream, size, place
        self._finish, self._discard = finish, discard
        self._window = window
        self._keeps_chunks = keeps_chunks
        self._position = 0  # of the chunk that is written next
        self._early: dict[int, Buffer] = {}  # the chunks that wait for the bytes before them
        self._is_writing = False
        self._error: BaseException | None = None
        self._is_committed = False
        self._changed = threading.Condition()

    def write_at(self, offset: int, data: Buffer) -> None:
        """See `WritableFile.write_at`."""
        data = data[: max(0, self._size - offset)]
        if not len(data):
            return
        with self._changed:
            self._check()
            self._refuse_twice_or_too_early(offset, len(data))
            self._wait_for_room(offset, len(data))
            # Other threads may have written while this one waited.
            self._refuse_twice_or_too_early(offset, len(data))
            is_next = offset == self._position and not self._is_writing
            is_used_now = is_next and not self._keeps_chunks
            self._early[offset] = data if is_used_now else np.array(data)
            if not is_next:
                return
            self._is_writing = True
        self._write()

    def commit(self) -> None:
        """Complete the file.

        Raises:
            StoreError: some bytes are missing.
        """
        with self._changed:
            self._check()
            if self._position < self._size:
                raise StoreError(
                    f"{self._place}: cannot commit the file, because byte {self._position} "
                    f"of {self._size} was not written: write all bytes before commit()"
                )
        self._stream.close()
        self._finish()
        self._is_committed = True

    def close(self) -> None:
        """Discard the file, unless it is committed."""
        if not self._is_committed:
            with suppress(OSError):
                self._discard()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _refuse_twice_or_too_early(self, offset: int, count: int) -> None:
        """Refuse a chunk that was written before, or that comes far too early.

        If threads begin chunks in ascending order, and together hold less than one window, no chunk
        is refused.

        Raises:
            StoreError: the chunk is refused.
        """
        if offset < self._position or offset in self._early:
            raise StoreError(
                f"{self._place}: bytes {offset}:{offset + count} are written twice; write each "
                "byte of the file once"
            )
        missing = offset - self._position
        if missing > self._window:
            missing -= sum(len(each) for low, each in self._early.items() if low < offset)
        if missing > self._window:
            raise StoreError(
                f"{self._place}: bytes {offset}:{offset + count} come too early, because {missing} "
                f"bytes before them are missing, and at most {self._window} may be; write the "
                "chunks of a file in ascending order"
            )

    def _wait_for_room(self, offset: int, count: int) -> None:
        """Wait until a chunk may be kept. The next chunk always may."""

        def may_go_on() -> bool:
            waiting = sum(map(len, self._early.values()))
            has_room = offset <= self._position or waiting + count <= self._window
            return self._error is not None or has_room

        if not self._changed.wait_for(may_go_on, LONGEST_STALL):
            reason = (
                "the storage took no bytes: check it, and save again"
                if self._is_writing
                else f"nobody wrote byte {self._position}: write the chunks of a file in "
                "ascending order"
            )
            raise StoreError(
                f"{self._place}: bytes {offset}:{offset + count} waited for {LONGEST_STALL:g} s, "
                f"because {reason}"
            )
        self._check()

    def _write(self) -> None:
        """Write the next chunk, and then the early ones that follow."""
        try:
            while True:
                with self._changed:
                    chunk = self._early.pop(self._position, None)
                    self._position += 0 if chunk is None else len(chunk)
                    self._is_writing = chunk is not None
                    self._changed.notify_all()
                if chunk is None:
                    return
                self._stream.write(chunk.data)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._is_writing = False
                self._changed.notify_all()
            raise
