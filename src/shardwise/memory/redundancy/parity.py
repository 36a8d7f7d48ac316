"""Parity made from what other nodes hold.

It goes through pieces of a stripe. Each thread holds three of them, and with two blocks of parity
or more to a stripe, one of each of its blocks, whatever the size of the data.
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
"""Bytes of a block that are worked on at a time; a multiple of `BLOCK`."""

HELD = 8 * PIECE
"""Bytes of what a thread asks other nodes for, that it may hold at a time."""

Read = Callable[[str, str, int, Buffer], Buffer]
"""`read(node, file, offset, out)`: as many bytes of what `node` held as `out` has, in `out`; or, if
they lie in memory, where they lie.

It may be called from several threads at once. It has its own bound of time, and raises `OSError`
or `CorruptionError` where the bytes are not to be had.
"""

Write = Callable[[str, int, Buffer], None]
"""`write(file, offset, data)`, at multiples of 4096; the memory is aligned to that too."""

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Extent:
    """Part of a node's string: bytes `low:high` of it are those of `file` from `offset` on."""

    file: str
    offset: int
    low: int
    high: int


def extents(member: Member, low: int, high: int) -> Iterator[Extent]:
    """Where bytes `low:high` of a node's string lie; those past its files are zeros, and left out.

    Extents count from the start of the string.
    """
    start = 0
    for name, size in member.files:
        first, last = max(low, start), min(high, start + size)
        if first < last:
            yield Extent(name, first - start, first, last)
        start += size


class LostPiece(Exception):  # noqa: N818
    """A block of a stripe could not be read."""

    def __init__(self, key: tuple[str, str], error: Exception) -> None:
        super().__init__(f"{key[1]} of node {key[0]}: {error}")
        self.key = key
        self.error = error


def build_parity(
    save_id: str, group: Group, at: int, read: Read, write: Write, *, threads: int = 1
) -> None:
    """Make the files of parity that a member keeps, with a checksum of each 64 KiB of them.

    A file begins with the block of parity, whose size is the group's `chunk`, and ends with a table
    of checksums, of 4 bytes each. Until this returns, the files are not to be used.

    Args:
        save_id: whose files they are.
        group, at: the group, and the position in it of the member whose files of parity to make.
        read: reads the data files of the other members.
        write: writes to the files, which `placement.parity_files` names.
        threads: how many work at the same time.

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

    size = asked_at_a_time(len(group.members) - group.parity, group.parity)
    everything = ((q, low) for q in range(group.parity) for low in range(0, group.chunk, size))
    encode_pieces(group, at, everything, read, take, size=size, threads=threads)
    for q, table in enumerate(tables):
        write(parity_name(save_id, group, q), group.chunk, table)


def owned(group: Group, at: int) -> list[Stripe]:
    """The stripes of which a member keeps parity, by the number of the block that it keeps."""
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
    """Make pieces of the blocks of parity that a member keeps.

    Parity is linear: made from zeros in place of what is not there, and made from that alone, the
    two add up by XOR.

    Args:
        group, at: the group, and the position of the member in it.
        pieces: number of the block, and where the piece begins in it: a multiple of `size`.
        read: reads the data files of the other members.
        take: is given the number of the block, where the piece begins, and its bytes.
        size: of a piece, in bytes; a multiple of `PIECE`.
        threads: how many work at the same time.

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
        raise StoreError(f"node {node} cannot keep parity: no {lost}") from lost.error
    finally:
        code.close()


def asked_at_a_time(k: int, m: int) -> int:
    """Bytes of a block that are asked of another node at a time, as each time is a request.

    A power of two, so that what it asks of a file of parity has its checksums on one page.
    """
    held = HELD // (2 if m == 1 else k)
    return max(PIECE, 1 << held.bit_length() - 1)


def buffers_of(size: int, count: int) -> list[Buffer]:
    """So many buffers of this many bytes, of which only what is used takes memory."""
    return [aligned_buffer(size) for _ in range(count)]


def read_data(read: Read, group: Group, position: int, low: int, out: Buffer) -> Buffer:
    """A range of a member's string, in `out` or where it lies; zeros past the end of its files."""
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
    """Do the work for each item, in threads that have buffers of their own; stop at an error."""
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
            failed.set()  # also where this thread was interrupted
