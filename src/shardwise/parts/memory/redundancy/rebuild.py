"""Decodes the files of lost nodes from the data and parity of the remaining nodes.

`stripes.py` explains stripes and chunks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle

import numpy as np

from shardwise.kernel.errors import CorruptionError, StoreError
from shardwise.kernel.manifest.checksums import BLOCK, BlockTable
from shardwise.kernel.store.store import Buffer
from shardwise.parts.memory.redundancy.parity import (
    Coder,
    NodeFile,
    ReadRange,
    UnreadableFileError,
    for_each_in_threads,
    read_member_data,
)
from shardwise.parts.memory.redundancy.placement import (
    Member,
    Protection,
    ProtectionGroup,
    group_of_file,
    parity_file_name,
)
from shardwise.parts.memory.redundancy.stripes import (
    ErasureCode,
    Stripe,
    index_of_data_stripe,
)


class Rebuilder:
    """Decodes any range of a lost node's file from the other members of its group.

    The rebuilder verifies parity, but not the data of other nodes. So verify the result with the
    checksums of the manifest. A file that could not be read once is not read again. Several threads
    may call `read`.

    Args:
        protection: the groups of nodes that protect each other.
        read_range: reads data and parity files of nodes.
        lost: nodes that cannot be read from.
        threads: the number of threads that work on one call of `read`.
    """

    def __init__(
        self,
        protection: Protection,
        read_range: ReadRange,
        *,
        lost: Iterable[str] = (),
        threads: int = 1,
    ) -> None:
        self._protection = protection
        self._read_range = read_range
        self._threads = threads
        self._lost_nodes = frozenset(lost)
        self._lost_files: dict[NodeFile, Exception] = {}
        self._coders: dict[tuple[int, int], Coder] = {}
        self._tables: dict[NodeFile, BlockTable] = {}  # the checksums of parity files
        self._lock = threading.Lock()

    def close(self) -> None:
        """Release the resources of the erasure codes."""
        for coder in self._coders.values():
            coder.close()
        self._coders.clear()

    def read(self, file: str, offset: int, out: Buffer) -> None:
        """Fill `out` with the bytes of a file from `offset`, without reading from its own node.

        Raises:
            StoreError: the protection has no such file, the file ends earlier, it has no parity,
                or too few chunks of a stripe are left. The message says which chunks are missing,
                and why.
            CorruptionError: too few chunks of a stripe are left, because a chunk is damaged.
        """
        group, index = group_of_file(self._protection, file)
        member = group.members[index]
        size = dict(member.files)[file]
        if not 0 <= offset <= offset + len(out) <= size:
            raise StoreError(
                f"cannot rebuild bytes {offset} to {offset + len(out)} of {file} of node "
                f"{member.node}: the file has only {size} bytes; restore another step"
            )
        start = member.offset_of(file) + offset
        if not len(out):
            return
        if not group.parity:
            raise StoreError(
                f"{file} of node {member.node} is not protected by parity, so it cannot be "
                "rebuilt: restore another step"
            )
        coder = self._get_coder(len(group.members) - group.parity, group.parity)

        def decode(part: StripePart) -> None:
            first = part.lost_chunk * group.chunk + part.low - start
            target = out[first : first + part.high - part.low]
            with coder.lend_buffers() as buffers:
                self._decode(coder.code, group, part, buffers, target)

        parts = split_range(group, index, start, start + len(out), cut_every=coder.size)
        for_each_in_threads(list(parts), decode, self._threads)

    def _decode(
        self,
        code: ErasureCode,
        group: ProtectionGroup,
        part: StripePart,
        buffers: list[Buffer],
        out: Buffer,
    ) -> None:
        """Decode part of a stripe. If a chunk cannot be read, try again with another chunk."""
        while True:
            numbers = self._choose_chunks(group, part)
            chunks = (
                (number, self._read_chunk(group, part, number, buffer))
                for number, buffer in zip(numbers, cycle(buffers), strict=False)
            )
            try:
                code.recover(chunks, {part.lost_chunk: out})
                return
            except UnreadableFileError as unreadable:
                with self._lock:
                    self._lost_files[unreadable.file] = unreadable.error

    def _choose_chunks(self, group: ProtectionGroup, part: StripePart) -> list[int]:
        """Return the numbers of the chunks to decode from: data first, then parity."""
        usable = []
        missing = []
        for number in range(len(group.members)):
            if number == part.lost_chunk:
                continue
            files = files_of_chunk(self._protection.save_id, group, part, number)
            lost = [file for file in files if self._is_lost(file)]
            if lost:
                missing.append(lost[0])
            else:
                usable.append(number)
        k = len(part.stripe.data)
        if len(usable) < k:
            owner = group.members[part.stripe.data[part.lost_chunk]]
            raise self._make_error_of_too_many_lost(group, owner, missing, len(usable))
        return usable[:k]

    def _is_lost(self, file: NodeFile) -> bool:
        return file.node in self._lost_nodes or file in self._lost_files

    def _make_error_of_too_many_lost(
        self, group: ProtectionGroup, owner: Member, missing: list[NodeFile], usable: int
    ) -> Exception:
        reasons = [f"{file}: {self._lost_files.get(file, 'the node is lost')}" for file in missing]
        error_class: type[StoreError | CorruptionError] = StoreError
        if any(isinstance(self._lost_files.get(file), CorruptionError) for file in missing):
            error_class = CorruptionError
        return error_class(
            f"the data of node {owner.node} cannot be rebuilt: {usable} of the "
            f"{len(group.members) - group.parity} chunks needed are left; its group of "
            f"{len(group.members)} nodes survives the loss of {group.parity}; also missing: "
            + "; ".join(reasons)
            + "; restart these nodes' agents if their memory is intact, or restore another step"
        )

    def _read_chunk(
        self, group: ProtectionGroup, part: StripePart, number: int, buffer: Buffer
    ) -> Buffer:
        """Read the range of a chunk that `part` covers, and verify it if it is parity."""
        k = len(part.stripe.data)
        if number < k:
            out = buffer[: part.high - part.low]
            low = number * group.chunk + part.low
            return read_member_data(self._read_range, group, part.stripe.data[number], low, out)
        file = parity_file(self._protection.save_id, group, part.stripe, number - k)
        try:
            return self._read_parity(group, file, part, buffer)
        except (OSError, CorruptionError) as error:
            raise UnreadableFileError(file, error) from error

    def _read_parity(
        self, group: ProtectionGroup, file: NodeFile, part: StripePart, buffer: Buffer
    ) -> Buffer:
        low = part.low // BLOCK * BLOCK
        high = -(-part.high // BLOCK) * BLOCK
        data = self._read_range(file.node, file.name, low, buffer[: high - low])
        damaged = self._read_table(group, file).find_damaged(low // BLOCK, data)
        if damaged:
            raise CorruptionError(
                f"parity is damaged: the bytes at {low + damaged[0] * BLOCK} fail their checksum"
            )
        return data[part.low - low : part.high - low]

    def _read_table(self, group: ProtectionGroup, file: NodeFile) -> BlockTable:
        """Return the checksums of a parity file."""
        if file not in self._tables:
            out = np.empty(4 * (group.chunk // BLOCK), np.uint8)
            found = self._read_range(file.node, file.name, group.chunk, out)
            self._tables[file] = BlockTable(np.frombuffer(found.tobytes(), "<u4"))
        return self._tables[file]

    def _get_coder(self, k: int, m: int) -> Coder:
        with self._lock:
            if (k, m) not in self._coders:
                self._coders[k, m] = Coder(k, m)
            return self._coders[k, m]


def find_unreadable_files(
    protection: Protection, stored: Mapping[str, Collection[str]]
) -> set[str]:
    """Return the data files that can neither be read from a node nor decoded.

    Args:
        protection: the groups of nodes that protect each other.
        stored: for each live node, the names of its complete files: data files, copies of other
            nodes' files, and parity.
    """
    data_files = {
        name for group in protection.groups for each in group.members for name, _ in each.files
    }
    readable = {name for names in stored.values() for name in names} & data_files

    def is_stored(file: NodeFile) -> bool:
        return file.name in readable or file.name in stored.get(file.node, ())

    return {
        name
        for group in protection.groups
        for index, member in enumerate(group.members)
        for name, size in member.files
        if name not in readable
        and not _can_decode(protection.save_id, group, index, name, size, is_stored)
    }


def _can_decode(
    save_id: str,
    group: ProtectionGroup,
    index: int,
    name: str,
    size: int,
    is_stored: Callable[[NodeFile], bool],
) -> bool:
    if not size:
        return True
    if not group.parity:
        return False
    start = group.members[index].offset_of(name)
    n, m = len(group.members), group.parity
    for part in split_range(group, index, start, start + size, cut_every=group.chunk):
        usable = sum(
            all(map(is_stored, files_of_chunk(save_id, group, part, number))) for number in range(n)
        )
        if usable < n - m:
            return False
    return True


@dataclass(frozen=True, slots=True)
class StripePart:
    """A byte range of the chunks of a stripe, in which one data chunk is lost.

    Attributes:
        stripe: the stripe.
        lost_chunk: the number of the lost data chunk.
        low: the start of the byte range in each chunk.
        high: the end of the byte range in each chunk.
    """

    stripe: Stripe
    lost_chunk: int
    low: int
    high: int


def split_range(
    group: ProtectionGroup, index: int, low: int, high: int, *, cut_every: int
) -> Iterator[StripePart]:
    """Split bytes `low:high` of a member's data into parts of stripes, in order.

    Chunks are cut at multiples of `cut_every` bytes, and where a file begins or ends in any data
    chunk of the stripe. So each part of a data chunk belongs to at most one file. If the file is
    readable, the part is readable.
    """
    chunk, n = group.chunk, len(group.members)
    stripes = group.stripes()
    for lost_chunk in range(low // chunk, -(-high // chunk)):
        chunk_start = lost_chunk * chunk
        first, last = max(low - chunk_start, 0), min(high - chunk_start, chunk)
        stripe = stripes[index_of_data_stripe(index, lost_chunk, n, group.parity)]
        cuts = {last}
        for number, member in enumerate(stripe.data):
            start = number * chunk
            for extent in group.members[member].extents(start + first, start + last):
                cuts |= {extent.data_start - start, extent.data_stop - start}
        for cut in sorted(cuts):
            while first < cut:
                stop = min(cut, (first // cut_every + 1) * cut_every)
                yield StripePart(stripe, lost_chunk, first, stop)
                first = stop


def files_of_chunk(
    save_id: str, group: ProtectionGroup, part: StripePart, number: int
) -> list[NodeFile]:
    """Return the files that contain a part of a chunk; no files if the part is only padding."""
    k = len(part.stripe.data)
    if number >= k:
        return [parity_file(save_id, group, part.stripe, number - k)]
    member = group.members[part.stripe.data[number]]
    start = number * group.chunk
    extents = member.extents(start + part.low, start + part.high)
    return [NodeFile(member.node, extent.file) for extent in extents]


def parity_file(
    save_id: str, group: ProtectionGroup, stripe: Stripe, parity_index: int
) -> NodeFile:
    """Return the file with the parity chunk of this index in a stripe."""
    node = group.members[stripe.parity[parity_index]].node
    return NodeFile(node, parity_file_name(save_id, group, parity_index))
