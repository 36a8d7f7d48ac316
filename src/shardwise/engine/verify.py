"""Verification of a checkpoint: every byte is compared with its checksum."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from shardwise.engine.buffers import Arena
from shardwise.engine.compare import find_differences, refuse_differences
from shardwise.engine.datareader import DataReader
from shardwise.engine.opened import Opened
from shardwise.errors import CorruptionError
from shardwise.events import Recorder, size
from shardwise.manifest.checksums import BLOCK, Summed, crc32
from shardwise.manifest.table import Int


@dataclass(frozen=True, slots=True)
class Checked:
    """The result for one file of a foreign checkpoint.

    Attributes:
        bytes: the bytes that have a checksum.
        unchecked: the bytes of tensors that have no checksum.
        altered: the ranges that do not match their checksums.
    """

    bytes: int
    unchecked: int
    altered: list[Altered]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of `verify`, which raises an error instead if it finds damage.

    Attributes:
        path: the path of the checkpoint.
        bytes_checked: the number of bytes that match their checksums.
        bytes_compared: the number of bytes of further copies of tensors, which equal the copies
            that loads read.
        bytes_unchecked: the number of bytes of tensors that have no checksum.
        seconds: the duration of the check of each file, and `total`.
    """

    path: str
    bytes_checked: int
    bytes_compared: int
    bytes_unchecked: int
    seconds: dict[str, float]

    def __str__(self) -> str:
        compared = f", {size(self.bytes_compared)} of copies compared"
        without = f", {size(self.bytes_unchecked)} without checksums"
        return (
            f"verified {self.path}: {size(self.bytes_checked)} checked"
            f"{compared if self.bytes_compared else ''}{without if self.bytes_unchecked else ''}"
            f", in {self.seconds['total']:.2f} s"
        )


@dataclass(frozen=True, slots=True)
class Altered:
    """A range `start:stop` of a file that does not match its checksum, and the tensors in it."""

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


def verify_all(opened: Opened, arena: Arena, recorder: Recorder) -> VerifyReport:
    """Check all checksums and compare all copies of tensors; record an event for each file.

    Raises:
        CorruptionError: a file is missing or truncated, or bytes do not match their checksum.
        MismatchError: copies of a tensor differ.
    """
    total = unchecked = 0
    if opened.foreign is None:
        total = verify_files(opened, arena, recorder)
    else:
        for checked in verify_sums(opened, arena, recorder):
            if checked.altered:
                raise CorruptionError(
                    f"{opened.store}: {checked.altered[0]}; copy the file again from an intact "
                    "source"
                )
            total += checked.bytes
            unchecked += checked.unchecked
    compared, differences = find_differences(opened, arena, recorder)
    refuse_differences(opened, differences)
    return VerifyReport(str(opened.store), total, compared, unchecked, recorder.seconds())


def verify_files(opened: Opened, arena: Arena, recorder: Recorder) -> int:
    """Check all bytes of every file; record an event for each, named by the file.

    Returns:
        The checked bytes.

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
                        reader.read(low, min(low + arena.chunk, end), buffer)

                try:
                    for _ in pool.map(check, range(0, entry.checksums_at, arena.chunk)):
                        pass
                finally:
                    reader.close()
            total += entry.size
    return total


def verify_sums(opened: Opened, arena: Arena, recorder: Recorder) -> Iterator[Checked]:
    """Check the files of a foreign checkpoint that have checksums; record an event for each.

    Yields:
        The result for each of these files.

    Raises:
        CorruptionError: a file is missing or truncated.
    """
    numbers = {entry.name: number for number, entry in enumerate(opened.manifest.files)}
    with ThreadPoolExecutor(arena.threads, "shardwise-verify") as pool:
        for summed in () if opened.foreign is None else opened.foreign.checksums():
            number = numbers[summed.file]
            start, size, _ = summed.ranges.T
            unchecked = _length_outside(
                _ranges_of_tensors(opened, number), np.stack([start, start + size], axis=1)
            )
            altered: list[Altered] = []
            total = int(size.sum())
            if total:
                with recorder.stage(summed.file, total):
                    altered = list(_altered(opened, number, summed, arena, pool))
            yield Checked(total, unchecked, altered)


def _ranges_of_tensors(opened: Opened, file: int) -> Int:
    """Return the ranges of a file that hold tensors or their copies: `(n, 2)`, start and stop."""
    source, found = opened.source(), [np.zeros((0, 2), np.int64)]
    tables = [(opened.pieces, opened.stride)]
    if opened.replicas is not None:
        tables.append((opened.replicas.pieces, opened.replicas.stride))
    for pieces, stride in tables:
        mine = pieces.file == file
        extent = ((pieces.shape - 1) * stride).sum(axis=1) + 1
        start = pieces.start[mine]
        stop = start + (extent * source.itemsize[pieces.tensor])[mine]
        found.append(np.stack([start, stop], axis=1))
    return np.concatenate(found)


def _length_outside(ranges: Int, others: Int) -> int:
    """Return how many bytes of `ranges` are outside `others`."""
    return _length(np.concatenate([ranges, others])) - _length(others)


def _length(ranges: Int) -> int:
    """Return how many bytes are in any of the ranges."""
    if not len(ranges):
        return 0
    start, stop = ranges[np.argsort(ranges[:, 0], kind="stable")].T
    before = np.maximum.accumulate(np.concatenate([start[:1], stop[:-1]]))
    return int(np.maximum(stop - np.maximum(start, before), 0).sum())


def _altered(
    opened: Opened, number: int, summed: Summed, arena: Arena, pool: ThreadPoolExecutor
) -> Iterator[Altered]:
    reader = opened.reader(number)

    def sum_of(start: int, size: int) -> int:
        found = 0
        step = arena.chunk - BLOCK  # a read may return a little more
        with arena.buffer() as buffer:
            for low in range(start, start + size, step):
                high = min(low + step, start + size)
                found = crc32(reader.read(low, high, buffer)[: high - low], found)
        return found

    try:
        starts, sizes, expected = summed.ranges.T.tolist()
        for start, size, wanted, found in zip(
            starts, sizes, expected, pool.map(sum_of, starts, sizes), strict=True
        ):
            if found != wanted:
                tensors = opened.tensors_in(number, start, start + size)
                yield Altered(summed.file, start, start + size, tensors)
    finally:
        reader.close()
