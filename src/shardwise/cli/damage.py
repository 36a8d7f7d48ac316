"""What of a checkpoint's files is not what was saved, and which tensors that concerns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardwise.cli.places import Saved
from shardwise.engine.buffers import Arena
from shardwise.engine.datareader import DataReader
from shardwise.errors import CorruptionError
from shardwise.events import Event, Recorder
from shardwise.manifest.checksums import BLOCK
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import FileEntry
from shardwise.manifest.table import Pieces
from shardwise.store.store import Buffer

if TYPE_CHECKING:
    from shardwise.engine.opened import Opened

Range = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """Bytes `start:stop` of a file that are not those that were saved, whole blocks.

    `start` and `stop` are None where the file as a whole cannot be trusted; `file` where that is
    the manifest, or where two copies of a tensor differ. `tensors` are those that have bytes there.
    """

    file: str | None
    start: int | None = None
    stop: int | None = None
    problem: str
    tensors: list[str]


@dataclass(frozen=True, slots=True)
class Search:
    """A search for damage in the files of one checkpoint."""

    saved: Saved
    pieces: Pieces

    def run(self, arena: Arena, advance: Callable[[str, int], None]) -> Iterator[Damage]:
        """Read every byte of every file.

        Args:
            advance: told the file, and how many more of its bytes were read.
        """
        with ThreadPoolExecutor(arena.threads, "shardwise-verify") as pool:
            for number, entry in enumerate(self.saved.manifest.files):
                try:
                    reader = DataReader(self.saved.store, entry)
                except CorruptionError as error:
                    names = self._tensors(number, (0, entry.size))
                    yield Damage(file=entry.name, problem=str(error), tensors=names)
                    continue

                def check(low: int, reader: DataReader = reader) -> list[Range]:
                    high = min(low + arena.chunk, reader.entry.checksums_at)
                    with arena.buffer() as buffer:
                        found = list(_damaged_ranges(reader, low, high, buffer))
                    advance(reader.entry.name, high - low)
                    return found

                try:
                    lows = range(0, entry.checksums_at, arena.chunk)
                    found = [each for part in pool.map(check, lows) for each in part]
                finally:
                    reader.close()
                yield from (self._damage(number, entry, each) for each in _joined(found))

    def _damage(self, number: int, entry: FileEntry, where: Range) -> Damage:
        start, stop = where
        parts = []
        if start < entry.data_at:
            parts.append("the header")
        if stop > entry.objects_at and entry.objects_at < entry.checksums_at:
            parts.append(f"values of rank {entry.rank}")
        return Damage(
            file=entry.name,
            start=start,
            stop=stop,
            problem="not the bytes that were saved" + (f" ({', '.join(parts)})" if parts else ""),
            tensors=self._tensors(number, where),
        )

    def _tensors(self, number: int, where: Range) -> list[str]:
        """Names of the tensors that have bytes in a range of a file, tied ones too."""
        manifest, pieces = self.saved.manifest, self.pieces
        itemsize = np.array([DTYPES[entry.dtype].itemsize for entry in manifest.tensors], np.int64)
        start = pieces.start + manifest.files[number].data_at
        stop = start + pieces.shape.prod(axis=1) * itemsize[pieces.tensor]
        hit = (pieces.file == number) & (start < where[1]) & (stop > where[0])
        names = {manifest.tensors[i].name for i in set(pieces.tensor[hit].tolist())}
        return [t.name for t in manifest.tensors if t.name in names or t.same_as in names]


@dataclass(slots=True)
class ForeignSearch:
    """A search for damage in what has checksums of a foreign checkpoint, and in copies of tensors.

    Attributes:
        advance: told the file, and how many more of its bytes were read.
        bytes, files: what was checked by checksums.
        compared: bytes of copies that were compared.
        unchecked: bytes of tensors that have no checksum.
    """

    opened: Opened
    arena: Arena
    advance: Callable[[str, int], None]
    bytes: int = 0
    files: int = 0
    compared: int = 0
    unchecked: int = 0

    def run(self) -> Iterator[Damage]:
        """Read all ranges that have a checksum, and all copies."""
        # Torch takes a second: only those wait who need it.
        from shardwise.engine.compare import find_differences
        from shardwise.engine.verify import verify_sums

        recorder = Recorder(self._note)
        for checked in verify_sums(self.opened, self.arena, recorder):
            self.bytes += checked.bytes
            self.files += checked.bytes > 0
            self.unchecked += checked.unchecked
            for each in checked.altered:
                yield Damage(
                    file=each.file,
                    start=each.start,
                    stop=each.stop,
                    problem="not the bytes that were saved",
                    tensors=each.tensors,
                )
        self.compared, unlike = find_differences(self.opened, self.arena, recorder)
        for problem in unlike:
            yield Damage(file=None, problem=problem, tensors=[])

    def _note(self, event: Event) -> None:
        self.advance(event.stage, event.bytes)


def _damaged_ranges(reader: DataReader, low: int, high: int, buffer: Buffer) -> Iterator[Range]:
    try:
        reader.read(low, high, buffer)
    except CorruptionError:
        if high - low <= BLOCK:
            yield low, high
            return
        for at in range(low, high, BLOCK):
            yield from _damaged_ranges(reader, at, min(at + BLOCK, high), buffer)


def _joined(ranges: Iterable[Range]) -> list[Range]:
    """Ascending ranges, those that touch as one."""
    joined: list[Range] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return joined
