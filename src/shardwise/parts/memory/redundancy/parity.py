"""Computes parity chunks from the data of other nodes, a part of a chunk at a time.

A part has `bytes_per_read(k, m)` bytes. A thread needs memory for three parts if a stripe has one
parity chunk; otherwise, for a part of each data chunk, and one part of the result. The size of the
data does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import cycle
from queue import Empty, SimpleQueue
from typing import TypeVar

import numpy as np

from shardwise.kernel.engine.buffers import aligned_buffer
from shardwise.kernel.errors import CorruptionError, StoreError
from shardwise.kernel.manifest.checksums import BLOCK, block_checksums
from shardwise.kernel.store.store import Buffer
from shardwise.parts.memory.redundancy.placement import ProtectionGroup
from shardwise.parts.memory.redundancy.stripes import (
    Stripe,
    index_of_parity_stripe,
    make_erasure_code,
)

SECTION = 16 * BLOCK
"""The size in bytes of a section, the part of a chunk that is processed at a time."""

MOST_BYTES_PER_THREAD = 8 * SECTION
"""The largest number of bytes of other nodes' data that a thread may hold at a time."""

ReadRange = Callable[[str, str, int, Buffer], Buffer]
"""`read_range(node, file, offset, out)` returns `len(out)` bytes of a file of `node`.

The bytes are in `out`, or the result is a view of the memory that already contains them. Several
threads may call the function at once. The function has a time limit. It raises `OSError` or
`CorruptionError` if the bytes cannot be read.
"""

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class NodeFile:
    """A file of a node."""

    node: str
    name: str

    def __str__(self) -> str:
        return f"{self.name} of node {self.node}"


class UnreadableFileError(Exception):
    """A file that contains part of a stripe could not be read, because of `error`."""

    def __init__(self, file: NodeFile, error: Exception) -> None:
        super().__init__(f"{file}: {error}")
        self.file = file
        self.error = error


def parity_stripe(group: ProtectionGroup, index: int, parity_index: int) -> Stripe:
    """Return the stripe of a parity chunk that a member stores; see `encode_parity`."""
    return group.stripes()[index_of_parity_stripe(index, parity_index, len(group.members))]


def encode_parity(
    group: ProtectionGroup,
    index: int,
    parity_index: int,
    read_range: ReadRange,
    write_section: Callable[[int, Buffer], None],
    *,
    is_needed: Callable[[int, int], bool] = lambda low, high: True,
    threads: int = 1,
) -> None:
    """Compute a parity chunk that a member stores, section by section.

    Parity is linear, so it can be computed in two passes. Each pass reads part of the data, and
    takes zeros for the rest. The XOR of both results is the parity.

    Args:
        group: the group.
        index: the index of the member in the group.
        parity_index: the index of the parity chunk in its stripe.
        read_range: reads the data files of the other members.
        write_section: receives the offset of each section in the chunk, and its bytes.
        is_needed: returns whether the section between two offsets is computed.
        threads: the number of threads that work at the same time.

    Raises:
        StoreError: a file of another node cannot be read, or pyeclib is needed and missing.
    """
    k = len(group.members) - group.parity
    stripe = parity_stripe(group, index, parity_index)

    def encode(low: int) -> None:
        with coder.lend_buffers() as buffers:
            high = min(low + coder.size, group.chunk)
            *inputs, parity = (buffer[: high - low] for buffer in buffers)
            chunks = (
                (f, read_member_data(read_range, group, member, f * group.chunk + low, out))
                for (f, member), out in zip(enumerate(stripe.data), cycle(inputs), strict=False)
            )
            coder.code.recover(chunks, {k + parity_index: parity})
            write_section(low, parity)

    with closing(Coder(k, group.parity, more_buffers=1)) as coder:
        lows = range(0, group.chunk, coder.size)
        needed = [low for low in lows if is_needed(low, min(low + coder.size, group.chunk))]
        try:
            for_each_in_threads(needed, encode, threads)
        except UnreadableFileError as error:
            node = group.members[index].node
            raise StoreError(
                f"node {node} cannot compute parity: cannot read {error}: look whether that node "
                "and its agent run, and at the agent's log; the next snapshot is protected anew"
            ) from error.error


def add_checksums(parity: Buffer, chunk: int) -> None:
    """Fill the end of a parity file, after a chunk of `chunk` bytes, with its checksums."""
    table = parity[chunk:]
    table[:] = 0
    sums = block_checksums(parity[:chunk]).view(np.uint8)
    table[: len(sums)] = sums


def bytes_per_read(k: int, m: int) -> int:
    """Return how many bytes of a chunk to read from another node in one request.

    The result is a multiple of `SECTION`.

    Args:
        k: the number of data chunks in a stripe.
        m: the number of parity chunks in a stripe.
    """
    max_bytes = MOST_BYTES_PER_THREAD // (2 if m == 1 else k)
    return max(SECTION, max_bytes // SECTION * SECTION)


class Coder:
    """An erasure code, and memory for the threads that use it.

    Args:
        k: the number of data chunks in a stripe.
        m: the number of parity chunks in a stripe.
        more_buffers: the number of buffers that a thread needs besides those of the chunks.

    Attributes:
        code: the code.
        size: how many bytes of each chunk to process at a time.

    Raises:
        StoreError: as for `make_erasure_code`.
    """

    def __init__(self, k: int, m: int, *, more_buffers: int = 0) -> None:
        self.code = make_erasure_code(k, m)
        self.size = bytes_per_read(k, m)
        self._count = self.code.window + more_buffers
        self._free: SimpleQueue[list[Buffer]] = SimpleQueue()

    @contextmanager
    def lend_buffers(self) -> Iterator[list[Buffer]]:
        """Lend the buffers that one thread needs. Pages that are never written take no memory."""
        try:
            buffers = self._free.get_nowait()
        except Empty:
            buffers = [aligned_buffer(self.size) for _ in range(self._count)]
        try:
            yield buffers
        finally:
            self._free.put(buffers)

    def close(self) -> None:
        """Release the resources of the code."""
        self.code.close()


def read_member_data(
    read_range: ReadRange, group: ProtectionGroup, index: int, low: int, out: Buffer
) -> Buffer:
    """Return `len(out)` bytes of a member's data from offset `low`.

    The bytes are in `out`, or the result is a view of the memory that already contains them.

    Raises:
        UnreadableFileError: a file cannot be read.
    """
    member = group.members[index]
    filled = low
    for extent in member.extents(low, low + len(out)):
        part = out[extent.data_start - low : extent.data_stop - low]
        try:
            found = read_range(member.node, extent.file, extent.file_offset, part)
        except (OSError, CorruptionError) as error:
            raise UnreadableFileError(NodeFile(member.node, extent.file), error) from error
        if len(part) == len(out):
            return found
        if found is not part:
            part[:] = found
        filled = extent.data_stop
    out[filled - low :] = 0
    return out


def for_each_in_threads(
    items: Sequence[Item], work: Callable[[Item], object], threads: int
) -> None:
    """Call `work` for each item in several threads. After an error, waiting items are not begun.

    Args:
        items: the items.
        work: receives an item.
        threads: the number of threads; 1 for the calling thread.
    """
    if threads == 1:
        for item in items:
            work(item)
        return
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(work, items):
            pass
