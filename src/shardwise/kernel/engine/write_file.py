"""Write a rank's data file: copy its bytes from tensors, compute checksums, and write them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import torch

from shardwise.kernel.boxes import Box, boxes_of_range
from shardwise.kernel.engine.buffers import Arena, aligned_buffer
from shardwise.kernel.engine.tensors import (
    BatchCopier,
    TensorMemory,
    accelerators_of,
    memory_of,
    wait_for_current_streams,
)
from shardwise.kernel.manifest.checksums import BLOCK, block_checksums, block_count, crc32
from shardwise.kernel.manifest.manifest import FileEntry
from shardwise.kernel.plan.save import PieceTable
from shardwise.kernel.state.local_state import Fragment
from shardwise.kernel.store import Store
from shardwise.kernel.store.store import Buffer

COPY_CHUNK_BYTES = 1 << 20
"""Bytes that are copied and summed at a time, so that they stay in the CPU cache."""


class FileSource:
    """The content of a data file before it is written. Its checksums are not included.

    Args:
        pieces: the pieces in the file.
        fragments: the fragments that `pieces` refers to.
        file: the result of `lay_out_file`. Default: the pieces alone, without a file.
        objects: the encoded per-rank values.
        memory_of: returns the memory of the tensor of a fragment.
        devices: the accelerators that hold some of the fragments, if they are known.

    Attributes:
        entry: the name of the file and the offsets of its parts.
        pieces: as above.
        devices: the accelerators that hold some of the fragments.
    """

    def __init__(
        self,
        pieces: PieceTable,
        fragments: Sequence[Fragment],
        file: tuple[bytes, FileEntry] | None = None,
        objects: bytes = b"",
        memory_of: Callable[[torch.Tensor], TensorMemory] = memory_of,
        devices: frozenset[torch.device] | None = None,
    ) -> None:
        end = int(pieces.start[-1])
        self._header, self.entry = file or (b"", FileEntry("", 0, end, 0, end, end, 0))
        self.pieces = pieces
        self._fragments = fragments
        self._objects = objects
        self._memory_of = memory_of
        if devices is None:
            devices = accelerators_of(fragments[i].data for i in pieces.fragment)
        self.devices = devices

    def fill(self, low: int, high: int, out: Buffer, *, wait: bool = True) -> None:
        """Copy bytes `low:high` of the file to `out`.

        Args:
            low, high: offsets in the file, in bytes.
            out: a buffer of `high - low` bytes.
            wait: as for `TensorMemory.read`.
        """
        for data, offset in ((self._header, 0), (self._objects, self.entry.objects_at)):
            a, b = max(low, offset), min(high, offset + len(data))
            if a < b:
                out[a - low : b - low] = np.frombuffer(data, np.uint8)[a - offset : b - offset]
        # From here on, count bytes from the start of the data section.
        low, high = low - self.entry.data_at, high - self.entry.data_at
        pieces, fragments = self.pieces, self._fragments
        first = max(int(np.searchsorted(pieces.start, low, side="right")) - 1, 0)
        last = min(int(np.searchsorted(pieces.start, high, side="left")), len(pieces.fragment))
        bounds = pieces.start[first : last + 1].tolist()
        rows = zip(
            pieces.fragment[first:last], pieces.box[first:last], bounds, bounds[1:], strict=False
        )
        copier = BatchCopier(out, wait=wait)
        with torch.no_grad():
            for index, piece, begin, end in rows:
                fragment = fragments[index]
                if low <= begin and end <= high:
                    tensor = fragment.data
                    if tensor.nbytes != end - begin:
                        tensor = tensor[piece.relative_to(fragment.box.offset).slices()]
                    if copier.add(tensor, begin - low, end - low):
                        continue
                a, b = max(low, begin), min(high, end)
                if a < b:
                    part, target = (a - begin, b - begin), out[a - low : b - low]
                    self._copy_part(fragment, piece, part, target, wait=wait)
            copier.flush()

    def _copy_part(
        self, fragment: Fragment, piece: Box, part: tuple[int, int], out: Buffer, *, wait: bool
    ) -> None:
        """Copy a range of the bytes of a piece to `out`, from a tensor of any strides."""
        memory = self._memory_of(fragment.data)
        itemsize = memory.itemsize
        if piece == fragment.box and part == (0, piece.size * itemsize):
            memory.read((), out.view(memory.dtype).reshape(piece.shape), wait=wait)
            return
        within = piece.relative_to(fragment.box.offset).offset
        position = 0
        for box in boxes_of_range(piece.shape, part[0] // itemsize, part[1] // itemsize):
            size = box.size * itemsize
            offset = tuple(o + b for o, b in zip(within, box.offset, strict=True))
            target = out[position : position + size].view(memory.dtype).reshape(box.shape)
            memory.read(Box(offset, box.shape).slices(), target, wait=wait)
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

    def write_chunk(low: int) -> None:
        high = min(low + arena.buffer_size, entry.checksums_at)
        with arena.buffer() as buffer:
            for start in range(low, high, COPY_CHUNK_BYTES):
                stop = min(start + COPY_CHUNK_BYTES, high)
                part = buffer[start - low : stop - low]
                source.fill(start, stop, part)
                checksums[start // BLOCK : -(-stop // BLOCK)] = block_checksums(part)
            whole = min(high, aligned) - low
            if whole:
                file.write_at(low, buffer[:whole])
            if high > aligned:  # the last chunk
                tail[: high - aligned] = buffer[whole : high - low]

    file = store.create(entry.name, entry.size)
    try:
        with ThreadPoolExecutor(arena.threads, "shardwise-write") as pool:
            # After a failure, `map` cancels the chunks that no thread has begun.
            for _ in pool.map(write_chunk, range(0, entry.checksums_at, arena.buffer_size)):
                pass
        encoded = checksums.view(np.uint8)
        position = entry.checksums_at - aligned
        tail[position : position + len(encoded)] = encoded
        file.write_at(aligned, tail)
        file.commit()
    finally:
        file.close()
    return msgspec.structs.replace(entry, checksums_crc32=crc32(encoded))
