"""Write the files of an export, read them back, and publish them. A stopped export is resumable.

A file is written in chunks, through two buffers: one chunk is read while the chunk before it is
checksummed and written. Memory is bounded, whatever the size of the checkpoint.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

import numpy as np

from shardwise.convert.journal import Journal
from shardwise.convert.plan import (
    BytesFromChecksums,
    ExportFiles,
    OutputFile,
    RangeChecksums,
    RunningChecksums,
    Segment,
    TensorPart,
    size_of,
)
from shardwise.convert.source import CheckpointSource
from shardwise.engine.buffers import Arena, aligned_buffer
from shardwise.engine.group import Group
from shardwise.engine.replicas import check_all_together
from shardwise.engine.rounds import Round
from shardwise.errors import CorruptionError
from shardwise.events import Recorder, format_bytes, format_count
from shardwise.layout import Box, boxes_of_range
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.layout import Layout
from shardwise.store import Files, Store, WritableFile, store_below
from shardwise.store.store import Buffer

SMALLEST_MEMORY = 16 << 20
LARGEST_CHUNK = 32 << 20
ALIGNMENT = 4096
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionReport:
    """The result of `export`. Bytes and seconds are this rank's.

    Attributes:
        path: the path of the target.
        files: the number of tensor files in the target, written by all ranks.
        bytes_written: the size of the files that this rank wrote.
        resumed: the number of this rank's files that an interrupted run had already written.
        left_out: names that the source has and the target lacks, with reasons; one line each.
        seconds: the time of each stage (open, write, publish, and the part of verify that did not
            overlap with write), and `total`.
    """

    path: str
    files: int
    bytes_written: int
    resumed: int
    left_out: tuple[str, ...]
    seconds: dict[str, float]

    def __repr__(self) -> str:
        return (
            f"<ConversionReport: {format_count(self.files, 'file')} "
            f"in {self.seconds['total']:.2f} s>"
        )

    def __str__(self) -> str:
        files = format_count(self.files, "file")
        resumed = f"; {self.resumed} written by an earlier run" if self.resumed else ""
        left = f"; left out: {len(self.left_out)}" if self.left_out else ""
        return (
            f"wrote {self.path}: {files}, of which this rank wrote "
            f"{format_bytes(self.bytes_written)}, in {self.seconds['total']:.2f} s{resumed}{left}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """One export. All ranks of the group run it together and share the files.

    Attributes:
        source, layout: the source.
        verify: whether to verify checksums, and to compare all copies of the written tensors.
        files: the files to write.
        folder: a place that is new, empty, or has files of the same export.
        identity: identifies the source and the options; only the same export is resumed.
        max_memory: the most host memory that each rank uses, in bytes.
    """

    source: Files
    layout: Layout
    verify: bool
    files: ExportFiles
    folder: Store
    identity: str
    max_memory: int
    group: Group
    recorder: Recorder

    def run(self) -> ConversionReport:
        """Write all files, read them back, and publish the files that commit the checkpoint.

        Raises:
            CheckpointExistsError: the folder holds something else, or another process writes there.
            CorruptionError: the source is damaged, or a written file does not read back as written.
            MismatchError: the source stores a tensor several times, and the copies differ.
            RankError: another rank failed. Complete files stay, and the next run resumes.
        """
        if self.verify:
            names = _tensor_names(self.files.tensor_files)
            check_all_together(
                self.source, self.layout, names, self.max_memory, self.recorder, self.group
            )
        journal = Journal(self.folder, self.identity)
        own_files = _divide_among_ranks(self.files.tensor_files, self.group.size)[self.group.rank]
        with ExitStack() as lock:
            with Round(self.group, "starting an export", first_only=True):
                if self.group.rank == 0:
                    lock.enter_context(journal.lock_target())
            with Round(self.group, "exporting") as step:
                resumed, own_sums = self._write_files(own_files, journal)
                sums = step.gather(own_sums, dict[str, list[int]])
            with Round(self.group, "publishing an export", first_only=True):
                if self.group.rank == 0:
                    self._publish({name: each for own in sums for name, each in own.items()})
                    journal.remove()
        return ConversionReport(
            path=str(self.folder),
            files=len(self.files.tensor_files),
            bytes_written=sum(file.size for file in own_files),
            resumed=resumed,
            left_out=(*self.layout.left_out, *self.files.left_out),
            seconds=self.recorder.seconds(),
        )

    def _publish(self, sums: Mapping[str, list[int]]) -> None:
        with self.recorder.stage("publish"):
            for name, content in self.files.make_final_files(sums).items():
                folder, file_name = _folder_of(self.folder, name)
                folder.publish(file_name, content, replace=True)

    def _write_files(
        self, files: list[OutputFile], journal: Journal
    ) -> tuple[int, dict[str, list[int]]]:
        """Write the files that are not complete yet, and read all files back.

        Returns the number of files that were complete, and the checksums of all files.
        """
        chunk = _chunk_size(self.max_memory)
        source = CheckpointSource(self.source, self.layout, Arena(chunk), verify=self.verify)
        resumed = 0
        sums_of_files: dict[str, list[int]] = {}
        with self.recorder.stage("plan", 2 * sum(file.size for file in files)):
            pass  # announces the total to progress bars
        with ThreadPoolExecutor(1, "shardwise-convert-verify") as verifier:
            verifying: tuple[OutputFile, Future[None]] | None = None
            for file in files:
                sums = journal.read_sums(file)
                if sums is None:
                    with self.recorder.stage("write", file.size):
                        sums = _write_file(file, source, self.folder, chunk)
                        journal.record_sums(file, sums)
                else:
                    resumed += 1
                self._wait_until_verified(verifying)
                verifying = file, verifier.submit(_verify_file, file, sums, self.folder, chunk)
                sums_of_files[file.name] = list(sums)
            self._wait_until_verified(verifying)
        return resumed, sums_of_files

    def _wait_until_verified(self, verifying: tuple[OutputFile, Future[None]] | None) -> None:
        if verifying is not None:
            file, verification = verifying
            with self.recorder.stage("verify", file.size):
                verification.result()


def _tensor_names(files: tuple[OutputFile, ...]) -> set[str]:
    return {part.name for each in files for part in each.segments if isinstance(part, TensorPart)}


def _chunk_size(max_memory: int) -> int:
    """Return the bytes to read or write at a time. An export needs about six times as many."""
    return min(LARGEST_CHUNK, max_memory // 8) // ALIGNMENT * ALIGNMENT


def _divide_among_ranks(files: tuple[OutputFile, ...], ranks: int) -> list[list[OutputFile]]:
    """Divide files among ranks by size: each file, largest first, goes to the least loaded rank."""
    shares: list[list[OutputFile]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for file in sorted(files, key=lambda each: -each.size):
        rank = loads.index(min(loads))
        shares[rank].append(file)
        loads[rank] += file.size
    return shares


def _write_file(
    file: OutputFile, source: CheckpointSource, target: Store, chunk: int
) -> RangeChecksums:
    """Write a file, which appears under its name when it is durable."""
    folder, name = _folder_of(target, file.name)
    try:
        with closing(folder.create(name, file.size, replace=True)) as writable:
            return write_contents(file, source, writable, chunk)
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        message = f"{error.strerror}: free some space, and run the same export again to resume it"
        raise OSError(error.errno, message, str(folder.at(name))) from error


def _verify_file(file: OutputFile, sums: RangeChecksums, target: Store, chunk: int) -> None:
    """Read a file back and compare its checksums. One chunk is summed while the next is read.

    Raises:
        CorruptionError: the file differs from what was written.
    """
    found = RunningChecksums(file)
    buffers = [aligned_buffer(chunk) for _ in range(2)]
    folder, name = _folder_of(target, file.name)
    with (
        closing(folder.open(name)) as readable,
        ThreadPoolExecutor(1, "shardwise-convert-reread") as reader,
    ):

        def read_chunk(start: int) -> Buffer:
            buffer = buffers[start // chunk % 2][: max(0, min(chunk, file.size - start))]
            return buffer[: readable.read_at(start, buffer)]

        upcoming = reader.submit(read_chunk, 0)
        for start in range(chunk, file.size + chunk, chunk):
            data = upcoming.result()
            upcoming = reader.submit(read_chunk, start)
            found.add(data)
    if found.finish() != list(sums):
        raise CorruptionError(
            f"{folder.at(name)}: does not read back as written. Check the storage, remove the "
            "file, and run the same export again"
        )


def _folder_of(target: Store, path: str) -> tuple[Store, str]:
    """Return the store of a file's directory, and the last part of the file's name."""
    folder, _, name = path.rpartition("/")
    return (store_below(target, folder) if folder else target), name


@dataclass(slots=True)
class _Chunk:
    """Bytes `start:stop` of a file: segments or parts of segments, with their file offsets."""

    start: int
    stop: int
    other_segments: list[tuple[int, bytes | BytesFromChecksums]] = field(default_factory=list)
    tensor_parts: list[tuple[int, TensorPart]] = field(default_factory=list)


def write_contents(
    file: OutputFile, source: CheckpointSource, writable: WritableFile, max_bytes: int
) -> list[int]:
    """Write the contents of a file, and make them durable.

    Args:
        writable: a new file of this size.
        max_bytes: bytes to read or write at a time; the two buffers hold twice as many.

    Returns:
        The checksums of the ranges between the file's `checksum_boundaries`.

    Raises:
        CorruptionError: the source is damaged.
        OSError: the storage failed.
    """
    chunks = list(_chunks(file, max_bytes))
    buffers = [aligned_buffer(max_bytes + 2 * ALIGNMENT) for _ in range(2)]
    sums = RunningChecksums(file)

    def read_chunk(index: int) -> Buffer:
        chunk = chunks[index]
        first = chunk.start % ALIGNMENT
        data = buffers[index % 2][first : first + chunk.stop - chunk.start]
        parts = [(part, data[at - chunk.start :][: part.size]) for at, part in chunk.tensor_parts]
        source.read(parts)
        return data

    with (
        ThreadPoolExecutor(1, "shardwise-convert-read") as reader,
        ThreadPoolExecutor(1, "shardwise-convert-write") as writer,
    ):
        upcoming: Future[Buffer] | None = reader.submit(read_chunk, 0) if chunks else None
        unwritten = np.zeros(0, np.uint8)
        for index, chunk in enumerate(chunks):
            data = upcoming.result() if upcoming else read_chunk(index)
            upcoming = reader.submit(read_chunk, index + 1) if index + 1 < len(chunks) else None
            summed = 0
            for offset, segment in chunk.other_segments:
                low = offset - chunk.start
                if isinstance(segment, BytesFromChecksums):
                    sums.add(data[summed:low])
                    summed = low
                    content = segment.make_bytes(sums.complete)
                else:
                    content = segment
                data[low:][: size_of(segment)] = np.frombuffer(content, np.uint8)
            last = chunk.stop == file.size
            writing = writer.submit(
                _write_pages, writable, chunk, buffers[index % 2], unwritten, last=last
            )
            sums.add(data[summed:])
            unwritten = writing.result()
    writable.commit()
    return sums.finish()


def _write_pages(
    writable: WritableFile, chunk: _Chunk, buffer: Buffer, unwritten: Buffer, *, last: bool
) -> Buffer:
    """Write the whole pages of a chunk, and return the bytes of its last, incomplete page.

    Args:
        unwritten: the incomplete page of the chunk before, which is written first.
        last: whether this chunk ends the file; its incomplete page is padded and written too.
    """
    start = chunk.start // ALIGNMENT * ALIGNMENT
    buffer[: len(unwritten)] = unwritten
    length = chunk.stop - start
    paged = length // ALIGNMENT * ALIGNMENT
    if last and length > paged:
        buffer[length : paged + ALIGNMENT] = 0
        paged += ALIGNMENT
    if paged:
        writable.write_at(start, buffer[:paged])
    return buffer[paged:length].copy() if length > paged else np.zeros(0, np.uint8)


def _chunks(file: OutputFile, max_bytes: int) -> Iterator[_Chunk]:
    """Cut a file into chunks of at most `max_bytes` bytes."""
    offset = 0
    chunk = _Chunk(0, 0)
    for whole in file.segments:
        for segment in _cut_segment(whole, max_bytes):
            if chunk.stop > chunk.start and offset + size_of(segment) - chunk.start > max_bytes:
                yield chunk
                chunk = _Chunk(offset, offset)
            if isinstance(segment, TensorPart):
                chunk.tensor_parts.append((offset, segment))
            else:
                chunk.other_segments.append((offset, segment))
            offset += size_of(segment)
            chunk.stop = offset
    if chunk.stop > chunk.start:
        yield chunk


def _cut_segment(segment: Segment, max_bytes: int) -> Iterator[Segment]:
    """Cut a segment into segments of at most `max_bytes` bytes. `BytesFromChecksums` stay whole."""
    if isinstance(segment, bytes):
        for low in range(0, len(segment), max_bytes):
            yield segment[low : low + max_bytes]
    elif isinstance(segment, TensorPart):
        step = max(1, max_bytes // DTYPES[segment.dtype].itemsize)
        for low in range(0, segment.box.size, step):
            for box in boxes_of_range(segment.box.shape, low, min(low + step, segment.box.size)):
                offset = tuple(a + b for a, b in zip(segment.box.offset, box.offset, strict=True))
                yield TensorPart(segment.name, Box(offset, box.shape), segment.dtype)
    else:
        yield segment
