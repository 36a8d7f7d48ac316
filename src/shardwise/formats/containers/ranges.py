"""A range of bytes of a file."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.errors import FormatError
from shardwise.store import ReadableFile


@dataclass(frozen=True, slots=True)
class FileRange:
    """A range of bytes of a file. Offsets in methods are relative to the start of the range.

    Attributes:
        file: the file.
        name: the name of the file below the checkpoint's directory.
        offset: the start of the range in the file, in bytes.
        size: the length in bytes.
        label: the path of the file, and a name of the range, for messages.
        is_remote: whether each read is a request to another machine. Then make few reads.
    """

    file: ReadableFile
    name: str
    offset: int
    size: int
    label: str
    is_remote: bool = False

    @classmethod
    def whole_file(cls, file: ReadableFile, name: str, label: str) -> FileRange:
        """Return the range of a whole file."""
        return cls(file, name, 0, file.size, label)

    def subrange(self, offset: int, size: int, label: str) -> FileRange:
        """Return a range within this range.

        Raises:
            FormatError: the new range exceeds this range.
        """
        if not self._contains(offset, size):
            raise FormatError(
                f"{self.label}: {label} should be at bytes [{offset}, {offset + size}), but there "
                f"are only {self.size} bytes: copy the file again"
            )
        start = self.offset + offset
        label = f"{self.label}: {label}"
        return FileRange(self.file, self.name, start, size, label, self.is_remote)

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`.

        Raises:
            FormatError: the bytes exceed this range, or the file became shorter.
        """
        if not self._contains(offset, size):
            raise FormatError(
                f"{self.label}: truncated, or contains a wrong length: bytes [{offset}, "
                f"{offset + size}) are needed, but there are only {self.size} bytes: copy the file "
                "again"
            )
        data = np.empty(size, np.uint8)
        if self.file.read_at(self.offset + offset, data) != size:
            raise FormatError(
                f"{self.label}: the file became shorter while it was read: open the checkpoint "
                "when no program writes it"
            )
        return data.tobytes()

    def _contains(self, offset: int, size: int) -> bool:
        return offset >= 0 and 0 <= size <= self.size and offset <= self.size - size
