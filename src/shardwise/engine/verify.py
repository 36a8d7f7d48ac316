"""Every byte of a checkpoint against its checksums."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from shardwise.engine.arena import Arena
from shardwise.engine.datareader import DataReader
from shardwise.engine.opened import Opened
from shardwise.events import Recorder, size
from shardwise.manifest.checksums import BLOCK, Summed, crc32


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a check of a checkpoint that is intact has covered.

    Attributes:
        path: where it is.
        bytes_checked: bytes that agree with their checksums.
        bytes_compared: bytes of further replicas, equal to those that are read.
        bytes_unchecked: bytes of its files that have no checksum.
        seconds: by file, and their total.
    """

    path: str
    bytes_checked: int
    bytes_compared: int
    bytes_unchecked: int
    seconds: dict[str, float]

    def __str__(self) -> str:
        compared = f", {size(self.bytes_compared)} of replicas compared"
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


def verify_sums(
    opened: Opened, arena: Arena, recorder: Recorder
) -> Iterator[tuple[int, list[Altered]]]:
    """Read what a foreign checkpoint has checksums of; an event for each file that has some.

    Returns:
        For each file the bytes that were checked, and those that are not what was saved.

    Raises:
        CorruptionError: a file is missing or cut off.
    """
    numbers = {entry.name: number for number, entry in enumerate(opened.manifest.files)}
    with ThreadPoolExecutor(arena.threads, "shardwise-verify") as pool:
        for summed in opened.sums() if opened.sums is not None else ():
            number = numbers[summed.file]
            total = int(summed.ranges[:, 1].sum())
            with recorder.stage(summed.file, total):
                altered = list(_altered(opened, number, summed, arena, pool))
            yield total, altered


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
