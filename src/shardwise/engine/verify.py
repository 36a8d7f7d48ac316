"""Verify a checkpoint: check all bytes against their checksums, and compare copies of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from shardwise.engine.buffers import Arena
from shardwise.engine.data_reader import DataReader
from shardwise.engine.opened import Opened
from shardwise.engine.replicas import find_differences, refuse_differences
from shardwise.errors import CorruptionError
from shardwise.events import Recorder, format_bytes
from shardwise.manifest.checksums import BLOCK, FileChecksums, crc32
from shardwise.manifest.pieces import Int


@dataclass(frozen=True, slots=True)
class VerifiedFile:
    """The result for one file of a foreign checkpoint.

    Attributes:
        bytes_checked: the number of bytes that have a checksum.
        bytes_unchecked: the number of bytes of tensors that have no checksum.
        damaged: the ranges that do not match their checksums.
    """

    bytes_checked: int
    bytes_unchecked: int
    damaged: list[DamagedRange]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of a verification that found no damage. Damage raises an error instead.

    Attributes:
        path: the path of the checkpoint.
        bytes_checked: the number of bytes that match their checksums.
        bytes_compared: the number of bytes of the other copies of tensors, which loads do not
            read. All of them were equal to the copy that loads read.
        bytes_unchecked: the number of bytes of tensors that have no checksum.
        seconds: the duration of each file's check, and `total`, in seconds.
    """

    path: str
    bytes_checked: int
    bytes_compared: int
    bytes_unchecked: int
    seconds: dict[str, float]

    def __repr__(self) -> str:
        return f"<VerifyReport: {format_bytes(self.bytes_checked)} checked>"

    def __str__(self) -> str:
        compared = f", {format_bytes(self.bytes_compared)} of copies compared"
        without = f", {format_bytes(self.bytes_unchecked)} without checksums"
        return (
            f"verified {self.path}: {format_bytes(self.bytes_checked)} checked"
            f"{compared if self.bytes_compared else ''}{without if self.bytes_unchecked else ''}"
            f", in {self.seconds['total']:.2f} s"
        )


@dataclass(frozen=True, slots=True)
class DamagedRange:
    """A range of a file that does not match its checksum.

    Attributes:
        file: the name of the file.
        start, stop: the range, in bytes.
        tensors: the names of the tensors that have bytes in the range.
    """

    file: str
    start: int
    stop: int
    tensors: list[str]

    def __str__(self) -> str:
        shown = ", ".join(self.tensors[:5]) + (", …" if len(self.tensors) > 5 else "")
        return (
            f"{self.file}: bytes {self.start}:{self.stop} do not match their checksum"
            f"{f' ({shown})' if shown else ''}"
        )


def verify_checkpoint(opened: Opened, arena: Arena, recorder: Recorder) -> VerifyReport:
    """Check all checksums, and compare all copies of tensors.

    Args:
        opened: the checkpoint.
        arena: the buffers to read through.
        recorder: gets an event for each file.

    Raises:
        CorruptionError: a file is missing or truncated, or bytes do not match their checksum.
        MismatchError: copies of a tensor differ.
    """
    checked_bytes = unchecked_bytes = 0
    if opened.foreign is None:
        checked_bytes = verify_files(opened, arena, recorder)
    else:
        for file in verify_foreign_files(opened, arena, recorder):
            if file.damaged:
                raise CorruptionError(
                    f"{opened.store}: {file.damaged[0]}; copy the file again from an intact source"
                )
            checked_bytes += file.bytes_checked
            unchecked_bytes += file.bytes_unchecked
    compared_bytes, differences = find_differences(opened, arena, recorder)
    refuse_differences(opened, differences)
    return VerifyReport(
        str(opened.store), checked_bytes, compared_bytes, unchecked_bytes, recorder.seconds()
    )


def verify_files(opened: Opened, arena: Arena, recorder: Recorder) -> int:
    """Check all bytes of every file of a shardwise checkpoint.

    Args:
        recorder: gets an event for each file, named by the file.

    Returns:
        The number of checked bytes.

    Raises:
        CorruptionError: a file is missing or truncated, or bytes do not match their checksum.
    """
    total = 0
    with ThreadPoolExecutor(arena.threads, "shardwise-verify") as pool:
        for entry in opened.manifest.files:
            with recorder.stage(entry.name, entry.size):
                reader = DataReader(opened.store, entry)

                def check(
                    low: int, reader: DataReader = reader, end: int = entry.checksums_at
                ) -> None:
                    with arena.buffer() as buffer:
                        reader.read(low, min(low + arena.buffer_size, end), buffer)

                try:
                    for _ in pool.map(check, range(0, entry.checksums_at, arena.buffer_size)):
                        pass
                finally:
                    reader.close()
            total += entry.size
    return total


def verify_foreign_files(
    opened: Opened, arena: Arena, recorder: Recorder
) -> Iterator[VerifiedFile]:
    """Check the files of a foreign checkpoint that have checksums.

    Args:
        recorder: gets an event for each of these files, named by the file.

    Yields:
        The result for each of these files.

    Raises:
        CorruptionError: a file is missing or truncated.
    """
    index_of = {entry.name: index for index, entry in enumerate(opened.manifest.files)}
    with ThreadPoolExecutor(arena.threads, "shardwise-verify") as pool:
        for sums in () if opened.foreign is None else opened.foreign.checksums():
            index = index_of[sums.file]
            start, size, _ = sums.ranges.T
            unchecked = _length_outside(
                _tensor_ranges(opened, index), np.stack([start, start + size], axis=1)
            )
            damaged: list[DamagedRange] = []
            total = int(size.sum())
            if total:
                with recorder.stage(sums.file, total):
                    damaged = list(_damaged_ranges(opened, index, sums, arena, pool))
            yield VerifiedFile(total, unchecked, damaged)


def _tensor_ranges(opened: Opened, file: int) -> Int:
    """Return the ranges of a file that hold tensors or their copies, `(n, 2)`: start and stop."""
    itemsize, ranges = opened.source().itemsize, [np.zeros((0, 2), np.int64)]
    tables = [(opened.pieces, opened.stride)]
    if opened.replicas is not None:
        tables.append((opened.replicas.pieces, opened.replicas.stride))
    for pieces, stride in tables:
        in_file = pieces.file == file
        extent = ((pieces.shape - 1) * stride).sum(axis=1) + 1
        start = pieces.start[in_file]
        stop = start + (extent * itemsize[pieces.tensor])[in_file]
        ranges.append(np.stack([start, stop], axis=1))
    return np.concatenate(ranges)


def _length_outside(ranges: Int, others: Int) -> int:
    """Return how many bytes of `ranges` are outside of `others`."""
    return _length_of_union(np.concatenate([ranges, others])) - _length_of_union(others)


def _length_of_union(ranges: Int) -> int:
    """Return how many bytes are in at least one of the ranges, `(n, 2)`."""
    if not len(ranges):
        return 0
    start, stop = ranges[np.argsort(ranges[:, 0], kind="stable")].T
    stop_before = np.maximum.accumulate(np.concatenate([start[:1], stop[:-1]]))
    return int(np.maximum(stop - np.maximum(start, stop_before), 0).sum())


def _damaged_ranges(
    opened: Opened, index: int, sums: FileChecksums, arena: Arena, pool: ThreadPoolExecutor
) -> Iterator[DamagedRange]:
    reader = opened.reader(index)

    def checksum_of(start: int, size: int) -> int:
        checksum = 0
        step = (
            arena.buffer_size - BLOCK
        )  # a read is rounded up to whole blocks, and must fit the buffer
        with arena.buffer() as buffer:
            for low in range(start, start + size, step):
                high = min(low + step, start + size)
                checksum = crc32(reader.read(low, high, buffer)[: high - low], checksum)
        return checksum

    try:
        starts, sizes, expected = sums.ranges.T.tolist()
        for start, size, wanted, found in zip(
            starts, sizes, expected, pool.map(checksum_of, starts, sizes), strict=True
        ):
            if found != wanted:
                tensors = opened.tensors_in(index, start, start + size)
                yield DamagedRange(sums.file, start, start + size, tensors)
    finally:
        reader.close()
