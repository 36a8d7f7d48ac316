"""A range of bytes of a file."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.errors import FormatError
from shardwise.store import ReadableFile


@dataclass(frozen=True, slots=True)
class FileRange:
    """`size` bytes of a file from `offset`.

    Attributes:
        number: the index of the file in `Foreign.files`.
        where: a description of the range, for messages.
    """

    file: ReadableFile
    number: int
    offset: int
    size: int
    where: str

    @classmethod
    def whole(cls, file: ReadableFile, number: int, where: str) -> FileRange:
        """Return the range of a whole file."""
        return cls(file, number, 0, file.size, where)

    def within(self, offset: int, size: int, where: str) -> FileRange:
        """Return a range within this range.

        Raises:
            FormatError: it reaches outside of this range.
        """
        if offset < 0 or size < 0 or size > self.size or offset > self.size - size:
            raise FormatError(
                f"{self.where}: {where} should be at bytes [{offset}, {offset + size}), but there "
                f"are only {self.size} bytes"
            )
        return FileRange(
            self.file, self.number, self.offset + offset, size, f"{self.where}: {where}"
        )

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`.

        Raises:
            FormatError: the range is shorter.
        """
        if offset < 0 or size < 0 or size > self.size or offset > self.size - size:
            raise FormatError(f"{self.where}: it is cut off, or contains a wrong length")
        data = np.empty(size, np.uint8)
        if self.file.read_at(self.offset + offset, data) != size:
            raise FormatError(f"{self.where}: it became shorter while it was read")
        return data.tobytes()
