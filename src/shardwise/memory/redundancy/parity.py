"""Computing parity blocks from the data of other nodes, piece by piece.

Each thread needs memory for three pieces; with two or more parity blocks in a stripe, for one piece
of each data block and the result. That does not depend on the size of the data.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from shardwise.engine.buffers import aligned_buffer
from shardwise.errors import CorruptionError, StoreError
from shardwise.manifest.checksums import BLOCK, block_checksums
from shardwise.memory.redundancy.placement import Group, Member, parity_file_size, parity_name
from shardwise.memory.redundancy.stripes import Stripe, code_of, stripe_of_parity
from shardwise.store.store import Buffer

PIECE = 16 * BLOCK
"""Bytes of a block that are processed at a time; a multiple of `BLOCK`."""

HELD = 8 * PIECE
"""How many bytes of other nodes' data a thread may hold at a time."""

Read = Callable[[str, str, int, Buffer], Buffer]
"""`read(node, file, offset, out)` returns `len(out)` bytes of a file of `node`: in `out`, or as a
view of where they lie in memory.

Several threads may call it at once. It applies its own time limit, and raises `OSError` or
`CorruptionError` if the bytes cannot be read.
"""

Write = Callable[[str, int, Buffer], None]
"""`write(file, offset, data)`. Offsets are multiples of 4096, and the memory is aligned to that."""

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Extent:
    """Part of a node's string: its bytes `low:high` are those of `file` from `offset`."""

    file: str
    offset: int
    low: int
    high: int


def extents(member: Member, low: int, high: int) -> Iterator[Extent]:
    """Yield the parts of files that make up bytes `low:high` of a node's string.

    Bytes past the end of the files are zeros and have no extent.
    """
    start = 0
    for name, size in member.files:
        first, last = max(low, start), min(high, start + size)
        if first < last:
            yield Extent(name, first - start, first, last)
        start += size


class LostPiece(Exception):  # noqa: N818
    """A block of a stripe could not be read. `key` is the node and the file."""

    def __init__(self, key: tuple[str, str], error: Exception) -> None:
        super().__init__(f"{key[1]} of node {key[0]}: {error}")
        self.key = key
        self.error = error


def build_parity(
    save_id: str, group: Group, at: int, read: Read, write: Write, *, threads: int = 1
) -> None:
    """Write the parity files that a member stores. They are incomplete until this returns.

    A file is a parity block of the group's `chunk` bytes, followed by a table with a checksum of 4
    bytes for each 64 KiB of it.

    Args:
        save_id: the save that the parity protects.
        group, at: the group, and the member's position in it.
        read: reads the data files of the other members.
        write: writes to the files, which are named by `placement.parity_name`.
        threads: the number of threads that work at the same time.

    Raises:
        StoreError: a file of another node cannot be read, or pyeclib is needed and missing.
    """
    tables = [aligned_buffer(parity_file_size(group.chunk) - group.chunk) for _ in owned(group, at)]
    for table in tables:
        table[:] = 0

    def take(q: int, low: int, block: Buffer) -> None:
        sums = block_checksums(block)
        tables[q].view("<u4")[low // BLOCK : low // BLOCK + len(sums)] = sums
        write(parity_name(save_id, group, q), low, block)

    size = bytes_per_read(len(group.members) - group.parity, group.parity)
    everything = ((q, low) for q in range(group.parity) for low in range(0, group.chunk, size))
    encode_pieces(group, at, everything, read, take, size=size, threads=threads)
    for q, table in enumerate(tables):
        write(parity_name(save_id, group, q), group.chunk, table)


def owned(group: Group, at: int) -> list[Stripe]:
    """Return the stripes whose parity a member stores, by the number of the parity block."""
    every = group.stripes()
    return [every[stripe_of_parity(at, q, len(every))] for q in range(group.parity)]


def encode_pieces(
    group: Group,
    at: int,
    pieces: Iterable[tuple[int, int]],
    read: Read,
    take: Callable[[int, int, Buffer], None],
    *,
    size: int = PIECE,
    threads: int = 1,
) -> None:
    """Compute pieces of the parity blocks that a member stores.

    Parity is linear. So it can be computed in two parts, each with zeros in place of the data that
    the other part covers, and the XOR of both is the result.

    Args:
        group, at: the group, and the member's position in it.
        pieces: for each piece, the number of its block, and its offset there: a multiple of `size`.
        read: reads the data files of the other members.
        take: receives the number of the block, the offset of the piece, and its bytes.
        size: bytes of a piece; a multiple of `PIECE`.
        threads: the number of threads that work at the same time.

    Raises:
        StoreError: a file of another node cannot be read, or pyeclib is needed and missing.
    """
    if not group.parity:
        return
    k = len(group.members) - group.parity
    stripes = owned(group, at)

    def make(piece: tuple[int, int], buffers: list[Buffer]) -> None:
        q, low = piece
        high = min(low + size, group.chunk)
        *sources, block = (buffer[: high - low] for buffer in buffers)

        def data() -> Iterator[tuple[int, Buffer]]:
            for f, position in enumerate(stripes[q].data):
                source = sources[f % code.window]
                yield f, read_data(read, group, position, f * group.chunk + low, source)

        code.recover(data(), {k + q: block})
        take(q, low, block)

    code = code_of(k, group.parity)
    try:
        memory = partial(buffers_of, size, code.window + 1)
        for_each(pieces, make, lambda: nullcontext(memory()), threads)
    except LostPiece as lost:
        node = group.members[at].node
        raise StoreError(f"node {node} cannot compute parity: cannot read {lost}") from lost.error
    finally:
        code.close()


def bytes_per_read(k: int, m: int) -> int:
    """Return how many bytes of a block to read from another node in one request.

    The result is a power of two, so that the checksums of a piece of parity lie on one page.
    """
    held = HELD // (2 if m == 1 else k)
    return max(PIECE, 1 << held.bit_length() - 1)


def buffers_of(size: int, count: int) -> list[Buffer]:
    """Return `count` buffers of `size` bytes. Memory is only taken for the pages that are used."""
    return [aligned_buffer(size) for _ in range(count)]


def read_data(read: Read, group: Group, position: int, low: int, out: Buffer) -> Buffer:
    """Return `len(out)` bytes of a member's string from `low`: in `out`, or where they lie.

    Raises:
        LostPiece: a file cannot be read.
    """
    member = group.members[position]
    filled = low
    for each in extents(member, low, low + len(out)):
        part = out[each.low - low : each.high - low]
        try:
            found = read(member.node, each.file, each.offset, part)
        except (OSError, CorruptionError) as error:
            raise LostPiece((member.node, each.file), error) from error
        if len(part) == len(out):
            return found
        if found is not part:
            part[:] = found
        filled = each.high
    out[filled - low :] = 0
    return out


def for_each(
    items: Iterable[Item],
    work: Callable[[Item, list[Buffer]], None],
    memory: Callable[[], AbstractContextManager[list[Buffer]]],
    threads: int,
) -> None:
    """Call `work` for each item, in threads that have buffers of their own; stop at an error."""
    lock = threading.Lock()
    remaining = iter(items)
    failed = threading.Event()

    def mine() -> Iterator[Item]:
        while True:
            with lock:
                if failed.is_set():
                    return
                try:
                    item = next(remaining)
                except StopIteration:
                    return
            yield item

    def run(_: int) -> None:
        try:
            with memory() as buffers:
                for item in mine():
                    work(item, buffers)
        except BaseException:
            failed.set()
            raise

    if threads == 1:
        run(0)
        return
    with ThreadPoolExecutor(threads) as pool:
        try:
            for _ in pool.map(run, range(threads)):
                pass
        finally:
            failed.set()  # also if this thread was interrupted
