"""Every byte of a checkpoint against its checksums."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from shardwise.engine.buffers import Arena
from shardwise.engine.compare import refuse, unlike_replicas
from shardwise.engine.datareader import DataReader
from shardwise.engine.opened import Opened
from shardwise.errors import CorruptionError
from shardwise.events import Recorder, size
from shardwise.manifest.checksums import BLOCK, Summed, crc32
from shardwise.manifest.table import Int


@dataclass(frozen=True, slots=True)
class Checked:
    """What was checked of a file of a foreign checkpoint.

    Attributes:
        bytes: those that have a checksum.
        unchecked: bytes of tensors that have none.
        altered: those that are not what was saved.
    """

    bytes: int
    unchecked: int
    altered: list[Altered]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify` checked. It only returns a report if it found no damage.

    Attributes:
        path: the path of the checkpoint.
        bytes_checked: bytes that match their checksums.
        bytes_compared: bytes of further copies of tensors that equal the copy that loads read.
        bytes_unchecked: bytes of tensors that have no checksum.
        seconds: the time of each file, and `total`.
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
    """Bytes `start:stop` of a file that are not those that were saved, and whose they are."""

    file: str
    start: int
    stop: int
    tensors: list[str]

    def __str__(self) -> str:
        shown = ", ".join(self.tensors[:5]) + (", …" if len(self.tensors) > 5 else "")
        return (
            f"{self.file}: bytes {self.start}:{self.stop} are not those that were saved"
            f"{f' ({shown})' if shown else ''}"
        )


def verify_all(opened: Opened, arena: Arena, recorder: Recorder) -> VerifyReport:
    """Check all that has a checksum, and compare all copies of tensors; an event for each file.

    Raises:
        CorruptionError: a file is missing or cut off, or bytes are not those that were saved.
        MismatchError: copies of a tensor differ.
    """
    total = unchecked = 0
    if not opened.beyond:
        total = verify_files(opened, arena, recorder)
    else:
        for checked in verify_sums(opened, arena, recorder):
            if checked.altered:
                raise CorruptionError(f"{opened.store}: {checked.altered[0]}")
            total += checked.bytes
            unchecked += checked.unchecked
    compared, unlike = unlike_replicas(opened, arena, recorder)
    refuse(opened, unlike)
    return VerifyReport(str(opened.store), total, compared, unchecked, recorder.seconds())


def verify_files(opened: Opened, arena: Arena, recorder: Recorder) -> int:
    """Read all of every file; an event for each, named by the file.

    Returns:
        The bytes that were checked.

    Raises:
        CorruptionError: a file is missing or cut off, or bytes are not those that were saved.
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
    """Read what a foreign checkpoint has checksums of; an event for each file that has some.

    Returns:
        What was checked of each file.

    Raises:
        CorruptionError: a file is missing or cut off.
    """
    numbers = {entry.name: number for number, entry in enumerate(opened.manifest.files)}
    with ThreadPoolExecutor(arena.threads, "shardwise-verify") as pool:
        for summed in opened.sums() if opened.sums is not None else ():
            number = numbers[summed.file]
            start, size, _ = summed.ranges.T
            unchecked = _beside(_held(opened, number), np.stack([start, start + size], axis=1))
            altered: list[Altered] = []
            total = int(size.sum())
            if total:
                with recorder.stage(summed.file, total):
                    altered = list(_altered(opened, number, summed, arena, pool))
            yield Checked(total, unchecked, altered)


def _held(opened: Opened, file: int) -> Int:
    """Ranges of a file that hold tensors, and copies of tensors: `(n, 2)`, first and last + 1."""
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


def _beside(ranges: Int, others: Int) -> int:
    """How many bytes of ranges are in none of some others."""
    return _length(np.concatenate([ranges, others])) - _length(others)


def _length(ranges: Int) -> int:
    """How many bytes ranges have, those in several of them once."""
    if not len(ranges):
        return 0
    start, stop = ranges[np.argsort(ranges[:, 0], kind="stable")].T
    before = np.maximum.accumulate(np.concatenate([start[:1], stop[:-1]]))
    return int(np.maximum(stop - np.maximum(start, before), 0).sum())


def _altered(
    opened: Opened, number: int, summed: Summed, arena: Arena, pool: ThreadPoolExecutor
) -> Iterator[Altered]:
    reader = DataReader(opened.store, opened.manifest.files[number])

    def sum_of(start: int, size: int) -> int:
        found = 0
        step = arena.chunk - BLOCK  # a read may go on a little
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
