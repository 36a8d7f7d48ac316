"""Verify a checkpoint.

All bytes are checked against their checksums, the headers of data files are compared with the
manifest, and the copies of tensors with each other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import zip_longest

import msgspec
import numpy as np

from shardwise.kernel.boxes import Box, cover_positions
from shardwise.kernel.boxes.box import IntArray
from shardwise.kernel.decoding import DECODE_ERRORS, prepare_decoding
from shardwise.kernel.engine.buffers import Arena
from shardwise.kernel.engine.data_reader import DataReader
from shardwise.kernel.errors import CorruptionError
from shardwise.kernel.events import Recorder
from shardwise.kernel.manifest.checksums import BLOCK, FileChecksums, crc32
from shardwise.kernel.manifest.layout import Layout
from shardwise.kernel.manifest.manifest import (
    LONGEST_NAME,
    METADATA,
    RESERVED,
    FileEntry,
    encode_header_entries,
    lay_out_file,
    save_id_of_file,
)
from shardwise.kernel.manifest.pieces import Pieces
from shardwise.kernel.store import Files
from shardwise.kernel.store.store import Buffer
from shardwise.parts.checks.compare import compare_copies, refuse_differences
from shardwise.ports.checks import Damage, VerifyReport

BUFFERS_PER_EVENT = 64
"""After how many buffers of a large file an event reports the progress."""
MOST_ENTRIES = 3
"""How many differing entries of a header a description lists."""
CHANGED_BYTES = "not the bytes that were saved"


def refuse_damage(report: VerifyReport) -> None:
    """Refuse a checkpoint with damage.

    Raises:
        CorruptionError: a file is missing or truncated, or bytes do not match their checksum.
        MismatchError: copies of a tensor differ.
    """
    in_files = [each for each in report.damage if each.file is not None]
    if not in_files:
        refuse_differences(report.path, [each.problem for each in report.damage])
        return
    first = in_files[0]
    if first.start is None:
        raise CorruptionError(first.problem)
    more = f", and {len(in_files) - 1} more damaged ranges" if len(in_files) > 1 else ""
    raise CorruptionError(
        f"{report.path}: {first}{more}; copy the file again from an intact source, or load "
        "another checkpoint"
    )


def find_damage(
    store: Files,
    layout: Layout,
    checksums: Iterable[FileChecksums],
    arena: Arena,
    recorder: Recorder,
) -> VerifyReport:
    """Check all checksums, and compare all copies of tensors.

    Args:
        store, layout: the checkpoint.
        checksums: the checksums in the files of a foreign checkpoint.
        arena: the buffers to read through.
        recorder: gets an event for each file, named by the file; several for a large file.
    """
    with ThreadPoolExecutor(arena.threads, "shardwise-verify") as pool:
        check = _Check(store, layout, arena, recorder, pool)
        for index, file in enumerate(layout.files):
            if file.entry is not None:
                check.check_file(index, file.entry)
        if foreign := [*checksums]:
            index_of = {file.name: index for index, file in enumerate(layout.files)}
            for sums in foreign:
                check.check_ranges(index_of[sums.file], sums)
    compared, differences = compare_copies(store, layout, arena, recorder)
    damage = check.damage + [Damage(file=None, problem=p, tensors=[]) for p in differences]
    return VerifyReport(
        str(store),
        layout.step,
        check.files,
        check.checked,
        compared,
        check.unchecked,
        tuple(damage),
        recorder.seconds(),
    )


@dataclass(slots=True)
class _Check:
    """The checkpoint that is checked, what the checks need, and what they have found.

    Attributes:
        files: the number of files with checked bytes.
        checked, unchecked: the number of bytes with and without checksums.
        damage: what is damaged.
    """

    store: Files
    layout: Layout
    arena: Arena
    recorder: Recorder
    pool: ThreadPoolExecutor
    files: int = 0
    checked: int = 0
    unchecked: int = 0
    damage: list[Damage] = field(default_factory=list)

    def check_file(self, index: int, entry: FileEntry) -> None:
        """Check all bytes of a data file of shardwise."""
        arena, reader = self.arena, self._open(index)
        if reader is None:
            return

        def find(start: int) -> list[int]:
            stop = min(start + arena.buffer_size, entry.checksums_at)
            with arena.buffer() as buffer:
                return list(_damaged_blocks(reader, start, stop, buffer))

        blocks: list[int] = []
        size_of_part = arena.buffer_size * BUFFERS_PER_EVENT
        with closing(reader):
            for start in range(0, entry.checksums_at, size_of_part):
                stop = min(start + size_of_part, entry.checksums_at)
                end = entry.size if stop == entry.checksums_at else stop
                with self.recorder.stage(entry.name, end - start):
                    for found in self.pool.map(find, range(start, stop, arena.buffer_size)):
                        blocks += found
            if not blocks or blocks[0] * BLOCK >= entry.data_at:
                self._check_header(index, entry, reader)
        for first, end in cover_positions(np.array(blocks, np.int64), 0).spans:
            start, stop = first * BLOCK, min(end * BLOCK, entry.checksums_at)
            parts = ["the header"] if start < entry.data_at else []
            if stop > entry.objects_at and entry.objects_at < entry.checksums_at:
                parts.append(f"values of rank {entry.rank}")
            problem = CHANGED_BYTES + (f" ({', '.join(parts)})" if parts else "")
            self._add_damage(index, problem, (start, stop))
        self.files += 1
        self.checked += entry.size

    def _check_header(self, index: int, entry: FileEntry, reader: DataReader) -> None:
        """Compare the header of a data file with the pieces that the manifest lists in the file."""
        described = self._pieces_in(index)
        save_id = save_id_of_file(entry.name) or self.layout.save_id
        objects = entry.checksums_at - entry.objects_at
        pieces = encode_header_entries(described)
        expected, laid_out = lay_out_file(save_id, entry.rank, pieces, objects)
        if entry.data_at > laid_out.data_at + len(described) * LONGEST_NAME:
            differing = [f"it has {entry.data_at:,} bytes instead of {laid_out.data_at:,}"]
        else:
            header, step = b"", self.arena.buffer_size
            end = min(-(-entry.data_at // BLOCK) * BLOCK, entry.checksums_at)
            for start in range(0, end, step):
                with self.arena.buffer() as buffer:
                    header += reader.read(start, min(start + step, end), buffer).tobytes()
            names = {each.name for each in self._as_saved.tensors}
            same = header[: entry.data_at] == expected
            differing = [] if same else _differing_entries(header[: entry.data_at], expected, names)
        if differing:
            more = len(differing) - MOST_ENTRIES
            shown = "; ".join(differing[:MOST_ENTRIES]) + (f"; and {more} more" if more > 0 else "")
            problem = f"a header that contradicts the manifest: {shown}"
            self._add_damage(index, problem, (0, entry.data_at))

    @property
    def _as_saved(self) -> Layout:
        return self.layout.as_saved or self.layout

    def _pieces_in(self, index: int) -> list[tuple[str, str, tuple[int, ...], Box]]:
        """Return the pieces in a file, as for `encode_header_entries`."""
        layout, described = self._as_saved, []
        pieces = layout.pieces_in(index)
        for row in np.argsort(pieces.start, kind="stable").tolist():
            tensor = layout.tensors[layout.tensor_of[pieces.tensor[row]]]
            offset, shape = pieces.offset[row].tolist(), pieces.shape[row].tolist()
            ndim = len(tensor.shape)
            box = Box(tuple(offset[:ndim]), tuple(shape[:ndim]))
            described.append((tensor.name, tensor.dtype, tensor.shape, box))
        return described

    def check_ranges(self, index: int, sums: FileChecksums) -> None:
        """Check the ranges of a foreign checkpoint's file that have checksums."""
        arena = self.arena
        start, size, expected = sums.ranges.T
        held = _tensor_ranges(self.layout, index)
        self.unchecked += _length_outside(held, np.stack([start, start + size], axis=1))
        total = int(size.sum())
        reader = self._open(index) if total else None
        if reader is None:
            return

        def checksum_of(start: int, size: int) -> int:
            checksum = 0
            # A read is rounded up to whole blocks, and must fit the buffer.
            step = arena.buffer_size - BLOCK
            with arena.buffer() as buffer:
                for low in range(start, start + size, step):
                    high = min(low + step, start + size)
                    checksum = crc32(reader.read(low, high, buffer)[: high - low], checksum)
            return checksum

        with closing(reader), self.recorder.stage(sums.file, total):
            found = list(self.pool.map(checksum_of, start.tolist(), size.tolist()))
        for row in np.flatnonzero(np.array(found) != expected).tolist():
            self._add_damage(index, CHANGED_BYTES, (int(start[row]), int(start[row] + size[row])))
        self.files += 1
        self.checked += total

    def _open(self, index: int) -> DataReader | None:
        """Open a file; None if it is missing or damaged as a whole, which is noted."""
        try:
            return DataReader(self.store, self.layout.files[index])
        except CorruptionError as error:
            self._add_damage(index, str(error))
            return None

    def _add_damage(self, index: int, problem: str, damaged: tuple[int, int] | None = None) -> None:
        """Note damage of a range of a file; by default, of the whole file."""
        file = self.layout.files[index]
        names = self.layout.tensors_in(index, *(damaged or (0, file.size)))
        start, stop = damaged or (None, None)
        self.damage.append(
            Damage(file=file.name, start=start, stop=stop, problem=problem, tensors=names)
        )


def _differing_entries(header: bytes, expected: bytes, names: Collection[str]) -> list[str]:
    """Return what the headers of a file say differently, with what the file and the manifest say.

    Ranks that save through DCP write before they know the final names. So a name in the file may
    differ if the manifest has no tensor of that name.

    Args:
        header, expected: the header in the file, and the one that the manifest leads to.
        names: the names of the tensors in the manifest.
    """
    try:
        found, wanted = _entries_by_place(header), _entries_by_place(expected)
    except DECODE_ERRORS as error:
        return [f"it is not the header of a data file: {error}"]
    differing = []
    for own, other in zip_longest(found, wanted, fillvalue=_NO_ENTRY):
        (*place, name), (*other_place, other_name) = own, other
        box = other_name[other_name.rfind("[") :] if other_name.endswith("]") else ""
        is_known = other_name.startswith((RESERVED, METADATA)) or name.removesuffix(box) in names
        if place != other_place or (name != other_name and (is_known or name in names)):
            differing.append(f"the file has {_describe(own)}, the manifest {_describe(other)}")
    return differing


_Entry = tuple[tuple[int, ...], str, tuple[int, ...], str]
"""Of an entry in a header: the range of bytes, the dtype, the shape, and the name."""
_NO_ENTRY: _Entry = ((), "", (), "")


def _entries_by_place(header: bytes) -> list[_Entry]:
    """Return the entries of a header, by their places in the file, and then its metadata."""
    decoded = msgspec.json.decode(header[8:], type=dict[str, msgspec.Raw])
    metadata = msgspec.json.decode(decoded.pop(METADATA, b"{}"), type=dict[str, str])
    entries: list[_Entry] = []
    for name, encoded in decoded.items():
        entry = msgspec.json.decode(encoded, type=_HeaderEntry)
        # Of two equal names, the second ends with a quote.
        entries.append((entry.data_offsets, entry.dtype, entry.shape, name.rstrip("'")))
    about = ", ".join(f"{key}={value}" for key, value in sorted(metadata.items()))
    return [*sorted(entries), ((), METADATA, (), f"{METADATA} {about}")]


@prepare_decoding
class _HeaderEntry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _describe(entry: _Entry) -> str:
    place, dtype, shape, name = entry
    if not place:
        return name or "nothing"
    return f"{name} ({dtype} {list(shape)} in bytes {place[0]}:{place[1]})"


def _damaged_blocks(reader: DataReader, start: int, stop: int, buffer: Buffer) -> Iterator[int]:
    """Yield the indices of the damaged blocks in a range of a file."""
    try:
        reader.read(start, stop, buffer)
    except CorruptionError:
        if stop - start <= BLOCK:
            yield start // BLOCK
            return
        for block in range(start, stop, BLOCK):
            yield from _damaged_blocks(reader, block, min(block + BLOCK, stop), buffer)


def _tensor_ranges(layout: Layout, file: int) -> IntArray:
    """Return the ranges of a file that hold tensors or their copies, `(n, 2)`: start and stop."""
    replicas = layout.replicas.select(layout.replicas.file == file)
    pieces = Pieces.join([layout.pieces_in(file), replicas])
    return np.stack(layout.byte_ranges(pieces), axis=1)


def _length_outside(ranges: IntArray, others: IntArray) -> int:
    """Return how many bytes of `ranges` are outside of `others`."""
    return _length_of_union(np.concatenate([ranges, others])) - _length_of_union(others)


def _length_of_union(ranges: IntArray) -> int:
    """Return how many bytes are in at least one of the ranges, `(n, 2)`."""
    if not len(ranges):
        return 0
    start, stop = ranges[np.argsort(ranges[:, 0], kind="stable")].T
    stop_before = np.maximum.accumulate(np.concatenate([start[:1], stop[:-1]]))
    return int(np.maximum(stop - np.maximum(start, stop_before), 0).sum())
