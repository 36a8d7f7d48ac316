"""A range of bytes of a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.kernel.errors import FormatError
from shardwise.kernel.store import ReadableFile
from shardwise.kernel.store.store import Buffer

_LARGEST_GAP = 2**15
"""The largest gap, in bytes, between ranges of a file that are read in one request."""
LARGEST_WINDOW = 2**22
"""The largest number of bytes of several ranges that are read in one request."""


class BytesFile:
    """Bytes in memory, as the part of a file that starts at `offset`.

    Args:
        data: the bytes.
        offset: the offset of these bytes in the file.
        file: the file; None if it has no other bytes.
    """

    def __init__(self, data: bytes, offset: int = 0, file: ReadableFile | None = None) -> None:
        self._data = memoryview(data)
        self._offset = offset
        self._file = file
        self.size = offset + len(data) if file is None else file.size

    def read_at(self, offset: int, out: Buffer) -> int:
        """Copy bytes of the file from `offset` into `out`; return the number of bytes."""
        start = offset - self._offset
        if self._file is not None and not 0 <= start <= len(self._data) - len(out):
            return self._file.read_at(offset, out)
        data = self._data[start : start + len(out)]
        # numpy would release the interpreter lock for each copy of more than 500 elements, and
        # threads that read many small ranges would wait for each other.
        out.data[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Do nothing."""


class BufferedEnds:
    """A file whose first and last bytes are read in one request each, and kept.

    Headers, pickles and directories are at the start or at the end of files.

    Args:
        file: the file.
        end_size: the number of bytes to keep of each end.
        kept: the bytes that are kept, by their offset. Several readers of a file can share them.
    """

    def __init__(self, file: ReadableFile, end_size: int, kept: dict[int, Buffer]) -> None:
        self._file = file
        self.size = file.size
        self._ends = (
            ((0, file.size),)
            if file.size <= 2 * end_size
            else ((0, end_size), (file.size - end_size, file.size))
        )
        self._kept_ends = kept

    def read_at(self, offset: int, out: Buffer) -> int:
        """Read bytes from `offset` into `out`; return the number of bytes."""
        stop = min(offset + len(out), self.size)
        for low, high in self._ends:
            if low <= offset and stop <= high:
                if low not in self._kept_ends:
                    buffer = np.empty(high - low, np.uint8)
                    self._kept_ends[low] = buffer[: self._file.read_at(low, buffer)]
                part = self._kept_ends[low][offset - low : stop - low]
                out[: len(part)] = part
                return len(part)
        return self._file.read_at(offset, out)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


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

    def subrange(self, offset: int, size: int, label: str) -> FileRange:
        """Return a range within this range.

        Raises:
            FormatError: the new range exceeds this range.
        """
        if not self._contains(offset, size):
            raise FormatError(
                f"{self.label}: {label} should be at bytes [{offset}, {offset + size}), but there "
                f"are only {self.size} bytes: the file was truncated; copy it again from an intact "
                "source"
            )
        start = self.offset + offset
        label = f"{self.label}: {label}"
        return FileRange(self.file, self.name, start, size, label, self.is_remote)

    def with_data(self, data: bytes) -> FileRange:
        """Return this range with its first bytes, `data`, in memory, so that no read repeats
        them."""
        file = BytesFile(data, self.offset, self.file)
        return FileRange(file, self.name, self.offset, self.size, self.label, self.is_remote)

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

    def read_ranges(self, ranges: Iterable[tuple[int, int]]) -> Iterator[bytes]:
        """Yield the bytes of ranges. Nearby ranges are read in one request.

        Args:
            ranges: the offset and the size of each range, in ascending order of the offsets.

        Raises:
            FormatError: as for `read`.
        """
        window: list[tuple[int, int]] = []
        stop = 0
        for offset, size in ranges:
            if window and (
                offset - stop > _LARGEST_GAP or offset + size - window[0][0] > LARGEST_WINDOW
            ):
                yield from self._read_window(window, stop)
                window = []
            stop = max(stop, offset + size) if window else offset + size
            window.append((offset, size))
        yield from self._read_window(window, stop)

    def _read_window(self, window: Sequence[tuple[int, int]], stop: int) -> Iterator[bytes]:
        start = window[0][0] if window else stop
        data = self.read(start, stop - start)
        for offset, size in window:
            yield data[offset - start : offset - start + size]

    def _contains(self, offset: int, size: int) -> bool:
        return offset >= 0 and 0 <= size <= self.size and offset <= self.size - size
