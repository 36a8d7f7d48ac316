"""Write one output from front to back: read ahead, checksum and write through two buffers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch

from shardwise.convert.plan import Late, Output, Part, Parts, Segment, size_of
from shardwise.engine.buffers import Arena, aligned_buffer
from shardwise.engine.load import fill, plan_filling
from shardwise.engine.opened import Opened
from shardwise.layout import boxes_of_range
from shardwise.manifest.checksums import crc32
from shardwise.manifest.dtypes import DTYPES
from shardwise.plan.lookup import SavedState
from shardwise.state.leaves import Fragment, TensorLeaf
from shardwise.store import WritableFile
from shardwise.store.store import Buffer

ALIGNMENT = 4096


@dataclass(slots=True)
class _Job:
    """Bytes `[low, high)` of an output: segments or parts of them, with their offsets."""

    low: int
    high: int
    known: list[tuple[int, bytes | Late]] = field(default_factory=list)
    parts: list[tuple[int, Part]] = field(default_factory=list)


class Source:
    """A checkpoint that parts of tensors are read from.

    Args:
        opened: the checkpoint.
        arena: the buffers that it is read through.
        verify: whether to check checksums.
    """

    def __init__(self, opened: Opened, arena: Arena, *, verify: bool = True) -> None:
        self.opened = opened
        self.saved = SavedState(opened.manifest)
        self._arena = arena
        self._verify = verify

    def read(self, parts: list[tuple[Part, Buffer]]) -> None:
        """Fill buffers with parts.

        Raises:
            CorruptionError: bytes differ from those that were saved.
        """
        leaves = []
        apart: list[tuple[torch.Tensor, Buffer]] = []
        for part, buffer in parts:
            dtype = getattr(torch, part.dtype)
            if buffer.ctypes.data % dtype.itemsize:
                data = torch.empty(part.box.shape, dtype=dtype, device="cpu")
                apart.append((data, buffer))
            else:
                data = torch.from_numpy(buffer).view(dtype).view(part.box.shape)
            entry = self.saved.tensor(part.name)
            shape = part.box.shape if entry is None else entry.shape
            leaves.append(TensorLeaf(part.name, dtype, shape, (Fragment(part.box, data),)))
        filling = plan_filling(leaves, self.saved, self.opened, self._arena)
        fill(filling, self.opened, self._arena, verify=self._verify)
        for data, buffer in apart:
            buffer[:] = data.reshape(-1).view(torch.uint8).numpy()


def write_output(output: Output, source: Parts, file: WritableFile, largest: int) -> list[int]:
    """Write an output, and make it durable.

    Args:
        file: a file of the output's size.
        largest: bytes that are read or written at a time; twice as many are held.

    Returns:
        The checksums between the output's marks.

    Raises:
        CorruptionError: the source is damaged.
        OSError: the storage failed.
    """
    jobs = list(_jobs(output, largest))
    buffers = [aligned_buffer(largest + 2 * ALIGNMENT) for _ in range(2)]
    sums = MarkedSums(output)

    def begin(number: int) -> Buffer:
        job = jobs[number]
        at = job.low % ALIGNMENT
        data = buffers[number % 2][at : at + job.high - job.low]
        source.read([(part, data[p - job.low :][: part.size]) for p, part in job.parts])
        return data

    with (
        ThreadPoolExecutor(1, "shardwise-convert-read") as ahead,
        ThreadPoolExecutor(1, "shardwise-convert-write") as behind,
    ):
        coming: Future[Buffer] | None = ahead.submit(begin, 0) if jobs else None
        carried = np.zeros(0, np.uint8)
        for number, job in enumerate(jobs):
            data = coming.result() if coming else begin(number)
            coming = ahead.submit(begin, number + 1) if number + 1 < len(jobs) else None
            summed = 0
            for at, piece in job.known:
                if isinstance(piece, Late):
                    sums.add(data[summed : at - job.low])
                    summed = at - job.low
                content = piece.make(sums.done) if isinstance(piece, Late) else piece
                data[at - job.low :][: size_of(piece)] = np.frombuffer(content, np.uint8)
            last = job.high == output.size
            writing = behind.submit(_write, file, job, buffers[number % 2], carried, last=last)
            sums.add(data[summed:])
            carried = writing.result()
    file.commit()
    return sums.all()


def _write(file: WritableFile, job: _Job, buffer: Buffer, carried: Buffer, *, last: bool) -> Buffer:
    """Write whole pages, beginning with the bytes carried over. Returns the bytes of the rest."""
    start = job.low // ALIGNMENT * ALIGNMENT
    buffer[: len(carried)] = carried
    held = job.high - start
    whole = held // ALIGNMENT * ALIGNMENT
    if last and held > whole:
        buffer[held : whole + ALIGNMENT] = 0
        whole += ALIGNMENT
    if whole:
        file.write_at(start, buffer[:whole])
    return buffer[whole:held].copy() if held > whole else np.zeros(0, np.uint8)


class MarkedSums:
    """Checksums of a stream of bytes, one for each range between an output's marks."""

    def __init__(self, output: Output) -> None:
        self._marks = [*output.marks, output.size]
        self._at = 0
        self._running = 0
        self.done: list[int] = []

    def add(self, data: Buffer) -> None:
        """Add the next bytes."""
        while len(data):
            room = self._marks[len(self.done)] - self._at
            part, data = data[:room], data[room:]
            self._running = crc32(part, self._running)
            self._at += len(part)
            if len(part) == room:
                self.done.append(self._running)
                self._running = 0

    def all(self) -> list[int]:
        """Return the checksums of all ranges, also of empty ones at the end."""
        return self.done + [0] * (len(self._marks) - len(self.done))


def _jobs(output: Output, largest: int) -> Iterator[_Job]:
    """Cut an output into jobs of at most `largest` bytes."""
    at = 0
    job = _Job(0, 0)
    for segment in output.segments:
        for piece in _cut(segment, largest):
            if job.high > job.low and at + size_of(piece) - job.low > largest:
                yield job
                job = _Job(at, at)
            if isinstance(piece, Part):
                job.parts.append((at, piece))
            else:
                job.known.append((at, piece))
            at += size_of(piece)
            job.high = at
    if job.high > job.low:
        yield job


def _cut(segment: Segment, largest: int) -> Iterator[Segment]:
    """Cut a segment into pieces that fit into a buffer."""
    if isinstance(segment, bytes):
        for low in range(0, len(segment), largest):
            yield segment[low : low + largest]
    elif isinstance(segment, Part):
        step = max(1, largest // DTYPES[segment.dtype].itemsize)
        for low in range(0, segment.box.size, step):
            for box in boxes_of_range(segment.box.shape, low, min(low + step, segment.box.size)):
                offset = tuple(a + b for a, b in zip(segment.box.offset, box.offset, strict=True))
                yield Part(segment.name, type(box)(offset, box.shape), segment.dtype)
    else:
        yield segment
