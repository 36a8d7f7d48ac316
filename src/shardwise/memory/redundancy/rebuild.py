"""Decoding the files of lost nodes from the remaining nodes' data and parity, piece by piece."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from queue import Empty, SimpleQueue

import numpy as np

from shardwise.errors import CorruptionError, FormatError, StoreError
from shardwise.manifest.checksums import BLOCK, BlockTable, block_count
from shardwise.memory.redundancy.parity import (
    LostPiece,
    Read,
    buffers_of,
    bytes_per_read,
    extents,
    for_each,
    read_data,
)
from shardwise.memory.redundancy.placement import (
    TABLE_PAGE,
    Group,
    Member,
    Protection,
    locate,
    parity_name,
)
from shardwise.memory.redundancy.stripes import Code, Stripe, code_of, stripe_of_chunk
from shardwise.store.store import Buffer


class Rebuilder:
    """Decodes any range of a lost node's file from the other members of its group.

    Parity is verified before it is used. The data of other nodes is not: verify the result with the
    checksums of the manifest. A file that could not be read once is not tried again. Several
    threads may call `read`.

    Args:
        protection: which nodes protect which.
        read: reads data and parity files of nodes.
        lost: nodes not to read from.
        threads: the number of threads that work on one call of `read`.
    """

    def __init__(
        self, protection: Protection, read: Read, *, lost: Iterable[str] = (), threads: int = 1
    ) -> None:
        self._protection = protection
        self._read = read
        self._threads = threads
        self._lost_nodes = frozenset(lost)
        self._lost_files: dict[tuple[str, str], Exception] = {}
        self._codings: dict[tuple[int, int], _Coding] = {}
        self._tables: dict[tuple[str, str, int], BlockTable] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        """Release the resources of the erasure codes."""
        for coding in self._codings.values():
            coding.code.close()
        self._codings.clear()

    def read(self, file: str, offset: int, out: Buffer) -> None:
        """Fill `out` with the bytes of a file from `offset`, without reading from its own node.

        Raises:
            StoreError: too few pieces of a stripe are left; says which are missing, and why.
            CorruptionError: the same, and one of them is missing because it is damaged.
            FormatError: the file does not exist, or ends earlier.
        """
        group, at = locate(self._protection, file)
        start = position_of(group.members[at], file, offset, len(out))
        if not len(out):
            return
        if not group.parity:
            node = group.members[at].node
            raise StoreError(f"{file} of node {node} is not protected by parity")
        k = len(group.members) - group.parity
        coding = self._coding(k, group.parity)

        def decode(part: Part, buffers: list[Buffer]) -> None:
            first = part.wanted * group.chunk + part.low - start
            target = out[first : first + part.high - part.low]
            self._decode(coding.code, group, part, buffers, target)

        found = parts(group, at, start, start + len(out), grid=coding.size)
        for_each(found, decode, coding.buffers, self._threads)

    def _decode(
        self, code: Code, group: Group, part: Part, buffers: list[Buffer], out: Buffer
    ) -> None:
        """Decode part of a stripe. If a piece turns out to be lost, try again with others."""
        while True:
            pieces = (
                (number, self._piece(group, part, number, buffer))
                for number, buffer in zip(self._chosen(group, part), cycle(buffers), strict=False)
            )
            try:
                code.recover(pieces, {part.wanted: out})
                return
            except LostPiece as lost:
                with self._lock:
                    self._lost_files[lost.key] = lost.error

    def _chosen(self, group: Group, part: Part) -> list[int]:
        """Return the numbers of the blocks to decode from: data first, then parity."""
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
            f"the data of node {owner.node} cannot be rebuilt: {left} of the "
            f"{len(group.members) - group.parity} pieces needed are left; its group of "
            f"{len(group.members)} nodes survives the loss of {group.parity}; also missing: "
            + "; ".join(reasons)
        )

    def _piece(self, group: Group, part: Part, number: int, buffer: Buffer) -> Buffer:
        """Read part of a block of a stripe, and verify it if it is parity."""
        k = len(part.stripe.data)
        if number < k:
            out = buffer[: part.high - part.low]
            low = number * group.chunk + part.low
            return read_data(self._read, group, part.stripe.data[number], low, out)
        node = group.members[part.stripe.parity[number - k]].node
        name = parity_name(self._protection.save_id, group, number - k)
        try:
            return self._parity(group, node, name, part, buffer)
        except (OSError, CorruptionError) as error:
            raise LostPiece((node, name), error) from error

    def _parity(self, group: Group, node: str, name: str, part: Part, buffer: Buffer) -> Buffer:
        low = part.low // BLOCK * BLOCK
        high = min(block_count(part.high) * BLOCK, group.chunk)
        data = self._read(node, name, low, buffer[: high - low])
        page, first = divmod(low // BLOCK, TABLE_PAGE // 4)
        bad = self._table(group, node, name, page).damaged(first, data)
        if bad:
            raise CorruptionError(
                f"parity is damaged: the bytes at {low + bad[0] * BLOCK} fail their checksum"
            )
        return data[part.low - low : part.high - low]

    def _table(self, group: Group, node: str, name: str, page: int) -> BlockTable:
        """Return a page of the checksum table of a parity file."""
        key = (node, name, page)
        if key not in self._tables:
            room = np.empty(TABLE_PAGE, np.uint8)
            found = self._read(node, name, group.chunk + page * TABLE_PAGE, room)
            self._tables[key] = BlockTable(np.frombuffer(found.tobytes(), "<u4"))
        return self._tables[key]

    def _coding(self, k: int, m: int) -> _Coding:
        with self._lock:
            if (k, m) not in self._codings:
                self._codings[k, m] = _Coding(code_of(k, m), bytes_per_read(k, m))
            return self._codings[k, m]


@dataclass(frozen=True, slots=True)
class _Coding:
    """A code, and a pool of buffers for pieces of `size` bytes."""

    code: Code
    size: int
    _free: SimpleQueue[list[Buffer]] = field(default_factory=SimpleQueue)

    @contextmanager
    def buffers(self) -> Iterator[list[Buffer]]:
        """Lend the buffers that one thread needs."""
        try:
            memory = self._free.get_nowait()
        except Empty:
            memory = buffers_of(self.size, self.code.window)
        try:
            yield memory
        finally:
            self._free.put(memory)


def unreadable_files(protection: Protection, held: Mapping[str, Collection[str]]) -> set[str]:
    """Return the data files that can neither be read from a node nor decoded.

    Args:
        protection: which nodes protect which.
        held: for each live node, the names of its complete files: its own data files, copies of
            others', and parity.
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


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes `low:high` of the blocks of a stripe, of which block `wanted` is lost."""

    stripe: Stripe
    wanted: int
    low: int
    high: int


def parts(group: Group, at: int, low: int, high: int, *, grid: int) -> Iterator[Part]:
    """Cut bytes `low:high` of a member's string into parts, in order.

    Cuts are at multiples of `grid` in a chunk, and where a file of another chunk of the stripe
    begins or ends. So each piece of a part lies in one file, and is either available or not.
    """
    chunk, n = group.chunk, len(group.members)
    all_stripes = group.stripes()
    for f in range(low // chunk, -(-high // chunk)):
        first, last = max(low - f * chunk, 0), min(high - f * chunk, chunk)
        stripe = all_stripes[stripe_of_chunk(at, f, n, group.parity)]
        cuts = {last}
        for g, position in enumerate(stripe.data):
            start = g * chunk
            for each in extents(group.members[position], start + first, start + last):
                cuts |= {each.low - start, each.high - start}
        for cut in sorted(cuts):
            while first < cut:
                stop = min(cut, (first // grid + 1) * grid)
                yield Part(stripe, f, first, stop)
                first = stop


def needed_files(save_id: str, group: Group, part: Part, number: int) -> list[tuple[str, str]]:
    """Return node and name of each file that holds a part of a block; none if it is all zeros."""
    k = len(part.stripe.data)
    if number >= k:
        node = group.members[part.stripe.parity[number - k]].node
        return [(node, parity_name(save_id, group, number - k))]
    member = group.members[part.stripe.data[number]]
    start = number * group.chunk
    found = extents(member, start + part.low, start + part.high)
    return [(member.node, each.file) for each in found]


def position_of(member: Member, file: str, offset: int, nbytes: int) -> int:
    """Return where a range of a file begins in its node's string.

    Raises:
        FormatError: the file does not exist, or ends earlier.
    """
    start = 0
    for name, size in member.files:
        if name == file:
            if not 0 <= offset <= offset + nbytes <= size:
                raise FormatError(
                    f"{file} of node {member.node} has {size} bytes, not {offset + nbytes}"
                )
            return start + offset
        start += size
    raise FormatError(f"node {member.node} has no file {file}")
