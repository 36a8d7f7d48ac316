"""Write a rank's data file: copy its bytes from tensors, compute checksums, and write them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from shardwise.boxes import Box, boxes_of_range
from shardwise.engine.buffers import Arena, aligned_buffer
from shardwise.engine.tensors import TensorMemory, memory_of, wait_for_current_streams
from shardwise.manifest.checksums import BLOCK, block_checksums, block_count, crc32
from shardwise.manifest.manifest import FileEntry
from shardwise.plan.save import PieceTable
from shardwise.state.leaves import Fragment
from shardwise.store import Store, WritableFile
from shardwise.store.store import Buffer

COPY_CHUNK_BYTES = 1 << 20
"""Bytes that are copied and summed at a time, so that they stay in the CPU cache."""


@dataclass(frozen=True, slots=True)
class FileSource:
    """The content of a data file before it is written. Its checksums are not included.

    `fill` copies any range of the content from tensors in memory.

    Attributes:
        header: the bytes before the pieces.
        entry: the name of the file and the offsets of its parts.
        pieces: the pieces in the file.
        objects: the encoded per-rank values.
        memory_of_fragment: returns the memory of a fragment, given the fragment's index.
        devices: the accelerators that hold some of the fragments.
    """

    header: bytes
    entry: FileEntry
    pieces: PieceTable
    objects: bytes
    memory_of_fragment: Callable[[int], TensorMemory]
    devices: frozenset[torch.device]

    @classmethod
    def of(
        cls,
        pieces: PieceTable,
        fragments: Sequence[Fragment],
        file: tuple[bytes, FileEntry] | None = None,
        objects: bytes = b"",
    ) -> FileSource:
        """Return the source of a file with these pieces.

        Args:
            pieces: the pieces in the file.
            fragments: the fragments that `pieces` refers to.
            file: the result of `lay_out_file`. Default: the pieces alone, without a file.
            objects: the encoded per-rank values.
        """
        if file is None:
            end = int(pieces.start[-1])
            file = b"", FileEntry("", 0, end, 0, end, end, 0)
        devices = {fragments[i].data.device for i in pieces.fragment}
        return cls(
            *file,
            pieces,
            objects,
            lambda i: memory_of(fragments[i].data),
            frozenset(each for each in devices if each.type != "cpu"),
        )

    def fill(self, low: int, high: int, out: Buffer, *, wait: bool = True) -> None:
        """Copy bytes `low:high` of the file to `out`.

        Args:
            low, high: offsets in the file, in bytes.
            out: a buffer of `high - low` bytes.
            wait: as for `TensorMemory.read`.
        """
        entry = self.entry
        _copy_bytes(self.header, 0, low, high, out)
        _copy_bytes(self.objects, entry.objects_at, low, high, out)
        self._fill_pieces(low - entry.data_at, high - entry.data_at, out, wait)

    def _fill_pieces(self, low: int, high: int, out: Buffer, wait: bool) -> None:
        """Copy the bytes `low:high` of the data section, as far as they lie in it."""
        start = self.pieces.start
        first = max(int(np.searchsorted(start, low, side="right")) - 1, 0)
        last = min(int(np.searchsorted(start, high, side="left")), len(self.pieces))
        bounds = start[first : last + 1].tolist()
        for i, begin, end in zip(range(first, last), bounds, bounds[1:], strict=False):
            a, b = max(low, begin), min(high, end)
            if a < b:
                part = a - begin, b - begin
                self._copy_piece(i, part, end - begin, out[a - low : b - low], wait)

    def _copy_piece(
        self, i: int, part: tuple[int, int], nbytes: int, out: Buffer, wait: bool
    ) -> None:
        """Copy a range of the bytes of piece `i`, which has `nbytes` bytes, to `out`."""
        pieces = self.pieces
        memory = self.memory_of_fragment(pieces.fragment[i])
        offset, shape = pieces.offset[i], pieces.shape[i]
        if part == (0, nbytes):
            index = () if pieces.whole[i] else Box(offset, shape).slices()
            memory.read(index, out.view(memory.dtype).reshape(shape), wait=wait)
            return
        itemsize = memory.itemsize
        position = 0
        for box in boxes_of_range(shape, part[0] // itemsize, part[1] // itemsize):
            size = box.size * itemsize
            within = tuple(o + b for o, b in zip(offset, box.offset, strict=True))
            target = out[position : position + size].view(memory.dtype).reshape(box.shape)
            memory.read(Box(within, box.shape).slices(), target, wait=wait)
            position += size


def write_data_file(store: Store, source: FileSource, arena: Arena) -> FileEntry:
    """Write a data file and make it durable.

    Each byte is copied once, into a buffer. Its checksum is computed from the buffer, because
    another thread may change the tensors during the write. Several threads write chunks.

    Args:
        store: the place of the file.
        source: the content of the file.
        arena: the buffers to write through.

    Returns:
        The file's entry in the manifest, with the CRC-32 of its checksums.

    Raises:
        StoreError, OSError: the file cannot be created or written.
    """
    wait_for_current_streams(source.devices)
    entry = source.entry
    checksums = np.zeros(block_count(entry.checksums_at), "<u4")
    # The last, unaligned bytes before the checksums are written together with the checksums.
    alignment = store.traits.alignment
    aligned = entry.checksums_at // alignment * alignment
    tail = aligned_buffer(-(-(entry.size - aligned) // alignment) * alignment)
    file = store.create(entry.name, entry.size)
    try:
        with ThreadPoolExecutor(arena.threads, "shardwise-write") as pool:
            chunks = range(0, entry.checksums_at, arena.buffer_size)
            target = _Target(file, alignment, arena, checksums, tail)
            writes = [pool.submit(_write_chunk, source, low, target) for low in chunks]
            try:
                for write in writes:
                    write.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        encoded = checksums.view(np.uint8)
        position = entry.checksums_at - aligned
        tail[position : position + len(encoded)] = encoded
        file.write_at(aligned, tail)
        file.commit()
    finally:
        file.close()
    return msgspec.structs.replace(entry, checksums_crc32=crc32(encoded))


@dataclass(frozen=True, slots=True)
class _Target:
    """The destination of chunks.

    Attributes:
        file: the file.
        alignment: the alignment that the store needs, in bytes.
        arena: the buffers to write through.
        checksums: gets the checksum of each block of the file.
        tail: gets the last, unaligned bytes of the file.
    """

    file: WritableFile
    alignment: int
    arena: Arena
    checksums: npt.NDArray[np.uint32]
    tail: Buffer


def _write_chunk(source: FileSource, low: int, target: _Target) -> None:
    high = min(low + target.arena.buffer_size, source.entry.checksums_at)
    with target.arena.buffer() as buffer:
        for start in range(low, high, COPY_CHUNK_BYTES):
            stop = min(start + COPY_CHUNK_BYTES, high)
            part = buffer[start - low : stop - low]
            source.fill(start, stop, part)
            sums = block_checksums(part)
            target.checksums[start // BLOCK : start // BLOCK + len(sums)] = sums
        aligned = (high - low) // target.alignment * target.alignment
        if aligned:
            target.file.write_at(low, buffer[:aligned])
        rest = high - low - aligned  # 0 except for the last chunk
        target.tail[:rest] = buffer[aligned : aligned + rest]


def _copy_bytes(data: bytes, offset: int, low: int, high: int, out: Buffer) -> None:
    """Copy the overlap of bytes `low:high` of a file and `data`, which starts at `offset`."""
    a, b = max(low, offset), min(high, offset + len(data))
    if a < b:
        out[a - low : b - low] = np.frombuffer(data, np.uint8)[a - offset : b - offset]
