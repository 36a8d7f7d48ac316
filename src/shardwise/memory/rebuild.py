"""Parity made from what other nodes hold, and lost files decoded from it.

Both go through pieces of at most `PIECE` bytes of a stripe. Each thread holds two of them, and with
two blocks of parity or more to a stripe, one of each of its blocks, whatever the size of the data.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from typing import TypeVar

import numpy as np

from shardwise.engine.arena import aligned_buffer
from shardwise.errors import CorruptionError, StoreError
from shardwise.manifest.checksums import BLOCK, block_checksums, block_count, damaged_blocks
from shardwise.memory.parity import Code, code_of, stripe_of_parity
from shardwise.memory.pieces import Part, extents, needed_files, parts, position_of
from shardwise.memory.placement import (
    TABLE_PAGE,
    Group,
    Member,
    Protection,
    locate,
    parity_file_size,
    parity_name,
)
from shardwise.store.store import Buffer

PIECE = 16 * BLOCK
"""Bytes of a block that are worked on at a time; a multiple of `BLOCK`."""

Read = Callable[[str, str, int, Buffer], None]
"""`read(node, file, offset, out)` fills all of `out` from what `node` held.

It may be called from several threads at once. It has its own bound of time, and raises `OSError`
or `CorruptionError` where the bytes are not to be had.
"""

Write = Callable[[str, int, Buffer], None]
"""`write(file, offset, data)`, at multiples of 4096; the memory is aligned to that too."""

Item = TypeVar("Item")


class _Lost(Exception):  # noqa: N818
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
    n, m = len(group.members), group.parity
    if not m:
        return
    k = n - m
    all_stripes = group.stripes()
    owned = [stripe_of_parity(at, q, n) for q in range(m)]
    tables = np.zeros((m, parity_file_size(group.chunk) - group.chunk), np.uint8)
    pieces = -(-group.chunk // PIECE)

    def make(index: int, buffers: list[Buffer]) -> None:
        q, piece = divmod(index, pieces)
        low = piece * PIECE
        high = min(low + PIECE, group.chunk)
        *sources, block = (buffer[: high - low] for buffer in buffers)

        def data() -> Iterator[tuple[int, Buffer]]:
            for f, position in enumerate(all_stripes[owned[q]].data):
                source = sources[f % code.window]
                _read_data(read, group, position, f * group.chunk + low, source)
                yield f, source

        code.recover(data(), {k + q: block})
        sums = block_checksums(block)
        tables[q].view("<u4")[low // BLOCK : low // BLOCK + len(sums)] = sums
        write(parity_name(save_id, group, q), low, block)

    code = code_of(k, m)
    try:
        _for_each(range(m * pieces), make, code.window + 1, threads)
    except _Lost as lost:
        node = group.members[at].node
        raise StoreError(f"node {node} cannot keep parity: no {lost}") from lost.error
    finally:
        code.close()
    for q in range(m):
        table = aligned_buffer(len(tables[q]))
        table[:] = tables[q]
        write(parity_name(save_id, group, q), group.chunk, table)


def rebuild_file(
    protection: Protection,
    node: str,
    file: str,
    read: Read,
    out: Buffer,
    *,
    offset: int = 0,
    threads: int = 1,
) -> None:
    """Fill `out` with the bytes of a lost node's file from `offset` on; see `Rebuilder`."""
    with Rebuilder(protection, read, lost=[node], threads=threads) as rebuilder:
        rebuilder.read(node, file, offset, out)


class Rebuilder:
    """Decodes files of members that are lost, or any range of one, from the others of their group.

    Parity is verified before it is used. Data of other nodes is not: verify what comes out with
    the checksums of the manifest. What could not be read once is not tried again. A context
    manager; `read` may be called from several threads.

    Args:
        protection: who protects whom.
        read: reads files of nodes, of data and of parity.
        lost: nodes that need not be asked.
        threads: how many work on one call of `read` at the same time.
    """

    def __init__(
        self, protection: Protection, read: Read, *, lost: Iterable[str] = (), threads: int = 1
    ) -> None:
        self._protection = protection
        self._read = read
        self._threads = threads
        self._lost_nodes = frozenset(lost)
        self._lost_files: dict[tuple[str, str], Exception] = {}
        self._codes: dict[tuple[int, int], Code] = {}
        self._tables: dict[tuple[str, str, int], Buffer] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Rebuilder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of what decoding needs."""
        for code in self._codes.values():
            code.close()
        self._codes.clear()

    def read(self, node: str, file: str, offset: int, out: Buffer) -> None:
        """Fill `out` with the bytes of a file from `offset` on, without asking its own node.

        Raises:
            StoreError: too few pieces of a stripe are left; says which are missing, and why.
            CorruptionError: as above, and one of them is missing because it was altered.
            FormatError: there is no such file, or it ends before.
        """
        group, at = locate(self._protection, file)
        start = position_of(group.members[at], file, offset, len(out))
        if not len(out):
            return
        if not group.parity:
            raise StoreError(f"{file} of node {node} is not protected by parity")
        k = len(group.members) - group.parity
        code = self._code(k, group.parity)

        def decode(part: Part, buffers: list[Buffer]) -> None:
            first = part.wanted * group.chunk + part.low - start
            self._decode(code, group, part, buffers, out[first : first + part.high - part.low])

        found = parts(group, at, start, start + len(out), grid=PIECE)
        _for_each(found, decode, code.window, self._threads)

    def _decode(
        self, code: Code, group: Group, part: Part, buffers: list[Buffer], out: Buffer
    ) -> None:
        """Decode part of a stripe; again with other pieces, as long as one turns out lost."""
        while True:
            pieces = (
                (number, self._piece(group, part, number, buffer))
                for number, buffer in zip(self._chosen(group, part), cycle(buffers), strict=False)
            )
            try:
                code.recover(pieces, {part.wanted: out})
                return
            except _Lost as lost:
                with self._lock:
                    self._lost_files[lost.key] = lost.error

    def _chosen(self, group: Group, part: Part) -> list[int]:
        """The numbers of the blocks to decode from: data before parity."""
        usable = []
        missing = []
        for number in range(len(group.members)):
            if number == part.wanted:
                continue
            keys = needed_files(self._protection.save_id, group, part, number)
            lost = [key for key in keys if self._is_lost(key)]
            if lost:
                missing.append(lost[0])
            else:
                usable.append(number)
        k = len(part.stripe.data)
        if len(usable) < k:
            owner = group.members[part.stripe.data[part.wanted]]
            raise self._too_many(group, owner, missing, len(usable))
        return usable[:k]

    def _is_lost(self, key: tuple[str, str]) -> bool:
        return key[0] in self._lost_nodes or key in self._lost_files

    def _too_many(
        self, group: Group, owner: Member, missing: list[tuple[str, str]], left: int
    ) -> Exception:
        reasons = [
            f"{file} of node {node}: {self._lost_files.get((node, file), 'the node is lost')}"
            for node, file in missing
        ]
        kind: type[StoreError | CorruptionError] = StoreError
        if any(isinstance(self._lost_files.get(key), CorruptionError) for key in missing):
            kind = CorruptionError
        return kind(
            f"what node {owner.node} held cannot be rebuilt: {left} of the "
            f"{len(group.members) - group.parity} pieces that this takes are left, for its group "
            f"of {len(group.members)} survives the loss of {group.parity}; also missing: "
            + "; ".join(reasons)
        )

    def _piece(self, group: Group, part: Part, number: int, buffer: Buffer) -> Buffer:
        """Part of a block of a stripe, read into a buffer; parity is verified."""
        k = len(part.stripe.data)
        if number < k:
            out = buffer[: part.high - part.low]
            low = number * group.chunk + part.low
            _read_data(self._read, group, part.stripe.data[number], low, out)
            return out
        node = group.members[part.stripe.parity[number - k]].node
        name = parity_name(self._protection.save_id, group, number - k)
        try:
            return self._parity(group, node, name, part, buffer)
        except (OSError, CorruptionError) as error:
            raise _Lost((node, name), error) from error

    def _parity(self, group: Group, node: str, name: str, part: Part, buffer: Buffer) -> Buffer:
        low = part.low // BLOCK * BLOCK
        high = min(block_count(part.high) * BLOCK, group.chunk)
        data = buffer[: high - low]
        self._read(node, name, low, data)
        blocks = range(low // BLOCK, block_count(high))
        expected = np.array([self._checksum(group, node, name, block) for block in blocks], "<u4")
        bad = damaged_blocks(data, expected)
        if bad:
            raise CorruptionError(
                f"parity was altered: bytes {low + bad[0] * BLOCK} and on fail their checksum"
            )
        return data[part.low - low : part.high - low]

    def _checksum(self, group: Group, node: str, name: str, block: int) -> int:
        page, entry = divmod(block, TABLE_PAGE // 4)
        key = (node, name, page)
        if key not in self._tables:
            table = np.empty(TABLE_PAGE, np.uint8)
            self._read(node, name, group.chunk + page * TABLE_PAGE, table)
            self._tables[key] = table
        return int(self._tables[key].view("<u4")[entry])

    def _code(self, k: int, m: int) -> Code:
        with self._lock:
            if (k, m) not in self._codes:
                self._codes[k, m] = code_of(k, m)
            return self._codes[k, m]


def assemblable(protection: Protection, held: Mapping[str, Collection[str]]) -> set[str]:
    """The data files that cannot be had any more: neither read from a node, nor decoded.

    Args:
        protection: who protects whom.
        held: for each live node, the names of the files that it holds whole: data files of its
            own, copies of others', and complete files of parity.
    """
    data_files = {
        name for group in protection.groups for each in group.members for name, _ in each.files
    }
    anywhere = {name for names in held.values() for name in names} & data_files

    def is_there(key: tuple[str, str]) -> bool:
        node, name = key
        return name in anywhere or name in held.get(node, ())

    return {
        name
        for group in protection.groups
        for at, member in enumerate(group.members)
        for name, size in member.files
        if name not in anywhere and not _can_decode(protection, group, at, name, size, is_there)
    }


def _can_decode(
    protection: Protection,
    group: Group,
    at: int,
    name: str,
    size: int,
    is_there: Callable[[tuple[str, str]], bool],
) -> bool:
    if not size:
        return True
    if not group.parity:
        return False
    start = position_of(group.members[at], name, 0, size)
    n, m = len(group.members), group.parity
    for part in parts(group, at, start, start + size, grid=group.chunk):
        left = sum(
            all(map(is_there, needed_files(protection.save_id, group, part, number)))
            for number in range(n)
        )
        if left < n - m:
            return False
    return True


def _read_data(read: Read, group: Group, position: int, low: int, out: Buffer) -> None:
    """A range of a member's string; zeros past the end of its files."""
    member = group.members[position]
    filled = low
    for each in extents(member, low, low + len(out)):
        try:
            read(member.node, each.file, each.offset, out[each.low - low : each.high - low])
        except (OSError, CorruptionError) as error:
            raise _Lost((member.node, each.file), error) from error
        filled = each.high
    out[filled - low :] = 0


def _for_each(
    items: Iterable[Item],
    work: Callable[[Item, list[Buffer]], None],
    buffers: int,
    threads: int,
) -> None:
    """Do the work for each item, in threads that have so many buffers each; stop at an error."""
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
        memory = [aligned_buffer(PIECE) for _ in range(buffers)]
        try:
            for item in mine():
                work(item, memory)
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
