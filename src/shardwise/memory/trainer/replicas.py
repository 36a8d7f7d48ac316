"""What a rank keeps for others, made from its own replica of what they hold: copies, or parity.

It is all but complete: headers, objects and checksums of the others cannot be read here, so their
blocks are left to the agent, who also compares what the others' checksums say with what was read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.manifest.checksums import BLOCK, block_checksums, block_count
from shardwise.memory import records
from shardwise.memory.node.home import write_record
from shardwise.memory.node.place import Place
from shardwise.memory.records import Kept
from shardwise.memory.redundancy.encoding import PIECE, encode_pieces, owned
from shardwise.memory.redundancy.placement import Group, parity_file_size
from shardwise.memory.trainer.rings import Holder, Ring, known_range
from shardwise.memory.trainer.slots import Slot
from shardwise.memory.trainer.stage import Fill, stage
from shardwise.store.store import Buffer


def bytes_read(ring: Ring) -> int:
    """How much is read from replicas to protect the others of a ring, at most."""
    group = ring.group
    ranges = [known_range(each.file) for each in ring.copied()]
    of_parity = group.parity * (len(group.members) - group.parity) * group.chunk
    return sum(high - low for low, high in ranges) + of_parity


@dataclass(frozen=True, slots=True)
class Keeping:
    """How a rank makes what it keeps for others.

    Attributes:
        ring: those who protect each other.
        data: copies from the data sections of the others' files, by rank, as they lie in this
            rank's memory.
        take: gives a free slot of so many bytes, beside those of these names.
        place: the snapshot, on this node.
        pool: does the copying, in so many `threads`.
    """

    ring: Ring
    data: Mapping[int, Fill]
    take: Callable[[int, Collection[str]], Slot]
    place: Place
    pool: ThreadPoolExecutor
    threads: int

    def keep(self) -> None:
        """Make it, and leave a record of each file.

        Raises:
            StoreError: there is no memory for it.
        """
        group = self.ring.group
        if group.parity:
            self._keep_parity(group)
        for number, owner in enumerate(self.ring.copied()):
            slot = self.take(owner.file.size, ())
            low, high = known_range(owner.file)
            stage(self._fill(owner), low, high, slot.buffer, self.pool)
            self._leave(number, slot, None, {owner.file.name: (low, high)}, {})

    def _fill(self, owner: Holder) -> Fill:
        fill, base = self.data[owner.rank], owner.file.data_at
        return lambda low, high, out: fill(low - base, high - base, out)

    def _keep_parity(self, group: Group) -> None:
        slots: list[Slot] = []
        for _ in range(group.parity):
            taken = [slot.name for slot in slots]
            slots.append(self.take(parity_file_size(group.chunk), taken))
        reading = {each.file.name: _Reading(each, self._fill(each)) for each in self._others()}

        def read(_: str, file: str, offset: int, out: Buffer) -> Buffer:
            reading[file].read(offset, out)
            return out

        def take(q: int, low: int, block: Buffer) -> None:
            slots[q].buffer[low : low + len(block)] = block

        pieces = ((q, low) for q in range(group.parity) for low in range(0, group.chunk, PIECE))
        encode_pieces(group, self.ring.at, pieces, read, take, threads=self.threads)
        for q, (slot, stripe) in enumerate(zip(slots, owned(group, self.ring.at), strict=True)):
            of = {}
            sums = {}
            for f, position in enumerate(stripe.data):
                each = reading[self.ring.holders[position].file.name]
                low, high = each.within(f * group.chunk, (f + 1) * group.chunk)
                of[each.name] = low, high
                sums[each.name] = each.sums[low // BLOCK : high // BLOCK].tobytes()
            self._leave(q, slot, q, of, sums)

    def _others(self) -> list[Holder]:
        mine = self.ring.holders[self.ring.at]
        return [each for each in self.ring.holders if each != mine]

    def _leave(
        self,
        number: int,
        slot: Slot,
        block: int | None,
        of: dict[str, tuple[int, int]],
        sums: dict[str, bytes],
    ) -> None:
        record = records.kept(self.ring.holders[self.ring.at].file.name, number)
        file = records.kept_file(record)
        kept = Kept(self.ring.group, file, slot.name, block, of, sums)
        write_record(self.place.path / record, kept)  # first, as for what is staged
        slot.path.rename(self.place.path / file)


class _Reading:
    """A file of which only tensors are known; all else is read as zeros."""

    def __init__(self, holder: Holder, fill: Fill) -> None:
        self.name = holder.file.name
        self._known = known_range(holder.file)
        self._fill = fill
        self.sums: npt.NDArray[np.uint32] = np.zeros(block_count(self._known[1]), "<u4")

    def within(self, low: int, high: int) -> tuple[int, int]:
        """What is known of a range."""
        first = max(low, self._known[0])
        return first, max(first, min(high, self._known[1]))

    def read(self, offset: int, out: Buffer) -> None:
        """Fill `out`, and take the checksums of what is known."""
        low, high = self.within(offset, offset + len(out))
        out[: max(0, low - offset)] = 0
        out[max(0, high - offset) :] = 0
        if low < high:
            part = out[low - offset : high - offset]
            self._fill(low, high, part)
            self.sums[low // BLOCK : high // BLOCK] = block_checksums(part)
