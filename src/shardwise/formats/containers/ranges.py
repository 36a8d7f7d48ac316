"""Bytes of a part of a file, which may be all of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.errors import FormatError
from shardwise.store import ReadableFile


@dataclass(frozen=True, slots=True)
class FileRange:
    """`size` bytes of a file from `offset` on, which is known to `Foreign` by `number`.

    `where` says what it is, in messages.
    """

    file: ReadableFile
    number: int
    offset: int
    size: int
    where: str

    @classmethod
    def whole(cls, file: ReadableFile, number: int, where: str) -> FileRange:
        """All of a file."""
        return cls(file, number, 0, file.size, where)

    def within(self, offset: int, size: int, where: str) -> FileRange:
        """A part of this part.

        Raises:
            FormatError: it is not within.
        """
        if offset < 0 or size < 0 or size > self.size or offset > self.size - size:
            raise FormatError(
                f"{self.where}: {where} lies at [{offset}, {offset + size}), and there are only "
                f"{self.size} bytes"
            )
        return FileRange(
            self.file, self.number, self.offset + offset, size, f"{self.where}: {where}"
        )

    def read(self, offset: int, size: int) -> bytes:
        """So many bytes.

        Raises:
            FormatError: there are not as many.
        """
        if offset < 0 or size < 0 or size > self.size or offset > self.size - size:
            raise FormatError(f"{self.where}: it is cut off, or a length in it lies")
        data = np.empty(size, np.uint8)
        if self.file.read_at(self.offset + offset, data) != size:
            raise FormatError(f"{self.where}: it has become shorter while it was read")
        return data.tobytes()
