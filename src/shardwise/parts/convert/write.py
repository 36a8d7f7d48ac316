"""Write the files of an export, read them back, and publish them.

A file is written in chunks, through two buffers: one chunk is read from the source while the chunk
before it is written. Memory is bounded, whatever the size of the checkpoint.
"""

from __future__ import annotations

import errno
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from operator import add

import numpy as np
import torch

from shardwise.kernel.boxes import Box, boxes_of_range
from shardwise.kernel.engine.buffers import aligned_buffer
from shardwise.kernel.engine.group import Group
from shardwise.kernel.engine.rounds import Round, unite
from shardwise.kernel.errors import CheckpointExistsError, CorruptionError
from shardwise.kernel.events import Recorder, format_bytes, format_count
from shardwise.kernel.store import Store, store_below, why_no_directory
from shardwise.kernel.store.store import Buffer
from shardwise.parts.convert.block_fp8 import Source
from shardwise.parts.convert.plan import (
    BytesFromChecksums,
    ExportFiles,
    OutputFile,
    RangeChecksums,
    RunningChecksums,
    TensorPart,
    size_of,
)

CHUNK = 32 << 20
"""The bytes that are read or written at a time. An export needs about six times as much memory."""
ALIGNMENT = 4096
UNFINISHED, LOCK = ".shardwise-convert", "lock"
"""A directory in the target while an export runs, and a lock in it."""
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionReport:
    """The result of `export`. Bytes and seconds are this rank's.

    Attributes:
        path: the path of the target.
        files: the number of tensor files in the target, written by all ranks.
        bytes_written: the size of the files that this rank wrote.
        left_out: names that the source has and the target lacks, with reasons; one line each.
        seconds: the time of each stage (open, write, publish, and the part of verify that did not
            overlap with write), and `total`.
    """

    path: str
    files: int
    bytes_written: int
    left_out: tuple[str, ...]
    seconds: dict[str, float]

    def __repr__(self) -> str:
        return (
            f"<ConversionReport: {format_count(self.files, 'file')} "
            f"in {self.seconds['total']:.2f} s>"
        )

    def __str__(self) -> str:
        files = format_count(self.files, "file")
        left = f"; left out: {len(self.left_out)}" if self.left_out else ""
        return (
            f"wrote {self.path}: {files}, of which this rank wrote "
            f"{format_bytes(self.bytes_written)}, in {self.seconds['total']:.2f} s{left}"
        )


def write_files(
    files: ExportFiles,
    source: Source,
    target: Store,
    group: Group,
    recorder: Recorder,
) -> ConversionReport:
    """Write all files, read them back, and publish the files that commit the checkpoint.

    All ranks call this function together, and share the files.

    Args:
        files: the files to write.
        source: the checkpoint that has the tensors.
        target: a place that is new or empty.
        group: the ranks.
        recorder: gets an event for each stage.

    Raises:
        CheckpointExistsError: the target holds something else, or another process writes there.
        CorruptionError: the source is damaged, or a written file does not read back as written.
        RankError: another rank failed.
    """
    own_files = _divide_among_ranks(files.tensor_files, group.size)[group.rank]

    def publish(sums: dict[str, list[int]]) -> None:
        with recorder.stage("publish"):
            _publish(files, sums, target)

    with ExitStack() as lock:
        with Round(group, "starting an export", rank0_only=True):
            if group.rank == 0:
                lock.enter_context(_lock(target))
        with Round(group, "exporting") as all_ranks:
            own_sums = _write_own_files(own_files, source, target, recorder)
            all_ranks.all_reduce(own_sums, dict[str, list[int]], unite, publish, type(None))
    return ConversionReport(
        path=str(target),
        files=len(files.tensor_files),
        bytes_written=sum(file.size for file in own_files),
        left_out=(*source.left_out, *files.left_out),
        seconds=recorder.seconds(),
    )


@contextmanager
def _lock(target: Store) -> Iterator[None]:
    """Create the target, and lock it while the block runs.

    Raises:
        CheckpointExistsError: the target has files, its path is a file or below a file, or another
            process is writing to it.
    """
    _refuse_unless_empty(target)
    unfinished = target.at(UNFINISHED)
    with unfinished.lock(LOCK) as locked:
        if not locked:
            raise CheckpointExistsError(
                f"another process is writing to {target}: wait until it ends, or choose a new "
                "directory"
            )
        _refuse_unless_empty(target)  # again, because another process may have changed the target
        yield
        unfinished.delete(LOCK)  # after an error, the lock stays, and marks the unfinished export
    # NFS keeps the directory while the lock is held. Another process may be using it by now.
    with suppress(OSError):
        unfinished.delete("")


def _refuse_unless_empty(target: Store) -> None:
    obstacle = why_no_directory(target)
    if obstacle:
        raise CheckpointExistsError(
            f"{target}: cannot be created, because {obstacle}. Choose a new directory"
        )
    found = target.list()
    names = [name for name in found if name != UNFINISHED]
    if names:
        reason = f"is not empty (it has {names[0]}): choose a new directory"
        if UNFINISHED in found:
            reason = "has files of an export that is running or was interrupted: remove it"
        raise CheckpointExistsError(f"{target} {reason}")


def _publish(files: ExportFiles, sums: Mapping[str, RangeChecksums], target: Store) -> None:
    for name, content in files.make_index_files(sums).items():
        folder, file_name = _folder_of(target, name)
        folder.publish(file_name, content, replace=True)


def _divide_among_ranks(files: Sequence[OutputFile], ranks: int) -> list[list[OutputFile]]:
    """Divide files among ranks by size: each file, largest first, goes to the least loaded rank."""
    shares: list[list[OutputFile]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for file in sorted(files, key=lambda each: -each.size):
        rank = loads.index(min(loads))
        shares[rank].append(file)
        loads[rank] += file.size
    return shares


def _write_own_files(
    files: Sequence[OutputFile],
    source: Source,
    target: Store,
    recorder: Recorder,
) -> dict[str, list[int]]:
    """Write files, and read each back while the next one is written; return their checksums."""
    with recorder.stage("plan", 2 * sum(file.size for file in files)):
        pass  # announces the total to progress bars
    sums: dict[str, list[int]] = {}
    with ThreadPoolExecutor(1, "shardwise-convert-verify") as verifier:
        verifying = []
        for file in files:
            with recorder.stage("write", file.size):
                sums[file.name] = list(write_file(file, source, target))
            verifying.append(verifier.submit(_verify_file, file, sums[file.name], target))
        for file, verification in zip(files, verifying, strict=True):
            with recorder.stage("verify", file.size):
                verification.result()
    return sums


def write_file(file: OutputFile, source: Source, target: Store) -> RangeChecksums:
    """Write a file, which appears under its name when it is durable.

    Returns:
        The checksums of the ranges between the file's `checksum_boundaries`.

    Raises:
        CorruptionError: the source is damaged.
        OSError: the storage failed.
    """
    folder, name = _folder_of(target, file.name)
    try:
        with closing(folder.create(name, file.size, replace=True)) as writable:
            sums = RunningChecksums(file)
            for low, data, padded in _chunks_of(file, source, sums):
                sums.add(data)
                writable.write_at(low, padded)
            writable.commit()
            return sums.finish()
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        message = f"{error.strerror}: free some space, remove {target}, and export again"
        raise OSError(error.errno, message, str(folder.at(name))) from error


def _chunks_of(
    file: OutputFile, source: Source, sums: RunningChecksums
) -> Iterator[tuple[int, Buffer, Buffer]]:
    """Yield three values for each chunk of a file.

    The values are the offset of the chunk; the bytes of the chunk that `sums` has not got yet; and
    all bytes of the chunk, padded.

    Args:
        sums: gets the bytes before a `BytesFromChecksums` here. The caller adds the other bytes.
    """
    computed = [
        (start, segment)
        for start, segment in zip(file.starts, file.segments, strict=True)
        if isinstance(segment, BytesFromChecksums)
    ]
    content = b""
    for low, data, padded in _read_ahead(file.size, partial(_fill, file, source)):
        high, summed = low + len(data), 0
        while computed and computed[0][0] < high:
            start, segment = computed[0]
            at = max(start - low, 0)
            if start >= low:
                sums.add(data[summed:at])
                summed, content = at, segment.make_bytes(sums.complete)
            part = content[max(low - start, 0) : high - start]
            data[at : at + len(part)] = np.frombuffer(part, np.uint8)
            if start + segment.size > high:
                break  # the rest is in the next chunk
            computed.pop(0)
        padded[len(data) :] = 0
        yield low, data[summed:], padded


def _fill(file: OutputFile, source: Source, low: int, data: Buffer) -> None:
    """Fill a chunk with the known bytes of a file, and with the parts of tensors.

    Args:
        low: the offset of the chunk in the file.
        data: the bytes of the chunk.
    """
    high = low + len(data)
    requests: list[tuple[str, Box, torch.Tensor]] = []
    for index in range(bisect_right(file.starts, low) - 1, len(file.segments)):
        start, segment = file.starts[index], file.segments[index]
        if start >= high:
            break
        first, last = max(low - start, 0), min(high - start, size_of(segment))
        out = data[start + first - low : start + last - low]
        if isinstance(segment, bytes):
            out[:] = np.frombuffer(segment, np.uint8)[first:last]
        elif isinstance(segment, TensorPart):
            elements = torch.from_numpy(out).view(getattr(torch, segment.dtype))
            itemsize = elements.element_size()
            for box in boxes_of_range(segment.box.shape, first // itemsize, last // itemsize):
                offset = tuple(map(add, segment.box.offset, box.offset))
                part, elements = elements[: box.size], elements[box.size :]
                requests.append((segment.name, Box(offset, box.shape), part.view(box.shape)))
    source.read_parts(requests, cast=True)


def _verify_file(file: OutputFile, sums: RangeChecksums, target: Store) -> None:
    """Read a file back and compare its checksums.

    Raises:
        CorruptionError: the file differs from what was written.
    """
    found = RunningChecksums(file)
    folder, name = _folder_of(target, file.name)
    with closing(folder.open(name)) as readable:
        for _, data, _ in _read_ahead(file.size, readable.read_at):
            found.add(data)
    if readable.size != file.size or found.finish() != list(sums):
        raise CorruptionError(
            f"{folder.at(name)}: does not read back as written. Check the storage, remove "
            f"{target}, and export again"
        )


def _read_ahead(
    size: int, read: Callable[[int, Buffer], object]
) -> Iterator[tuple[int, Buffer, Buffer]]:
    """Yield the chunks of a file; each is read while the caller uses the one before.

    Args:
        size: the size of the file.
        read: fills a buffer with the bytes from an offset on.

    Yields:
        The offset of the chunk; its bytes; and the same memory, padded to `ALIGNMENT`.
    """
    buffers = [aligned_buffer(min(CHUNK, -(-size // ALIGNMENT) * ALIGNMENT)) for _ in range(2)]

    def read_chunk(low: int) -> tuple[int, Buffer, Buffer]:
        buffer, nbytes = buffers[low // CHUNK % 2], min(CHUNK, size - low)
        read(low, buffer[:nbytes])
        return low, buffer[:nbytes], buffer[: -(-nbytes // ALIGNMENT) * ALIGNMENT]

    with ThreadPoolExecutor(1, "shardwise-convert-read") as reader:
        upcoming: deque[Future[tuple[int, Buffer, Buffer]]] = deque()
        for low in range(0, size, CHUNK):
            upcoming.append(reader.submit(read_chunk, low))
            if len(upcoming) > 1:
                yield upcoming.popleft().result()
        if upcoming:
            yield upcoming.popleft().result()


def _folder_of(target: Store, path: str) -> tuple[Store, str]:
    """Return the store of a file's directory, and the last part of the file's name."""
    folder, _, name = path.rpartition("/")
    return (store_below(target, folder) if folder else target), name
