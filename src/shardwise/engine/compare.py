"""Comparison of copies of tensors: in a foreign checkpoint, and on several ranks of a save."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import torch

from shardwise.engine.buffers import Arena
from shardwise.engine.exchange import exchange
from shardwise.engine.group import Group
from shardwise.engine.load import read_boxes
from shardwise.engine.opened import Opened, Replicas
from shardwise.errors import MismatchError
from shardwise.events import Recorder
from shardwise.layout import Box, boxes_of
from shardwise.manifest.checksums import crc32
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import TensorEntry
from shardwise.manifest.table import Int, Pieces
from shardwise.plan.lookup import SavedState
from shardwise.plan.tables import Description
from shardwise.state.leaves import Fragment, TensorLeaf, host_array, same_bytes

_Row = tuple[str, tuple[int, ...], tuple[int, ...], int]
LARGEST_BATCH = 16 << 20
SAMPLE = 1 << 10
"""The number of bytes that a sample compares at each place."""
PLACES = 4096
"""The largest number of places in a sample."""
PLACES_EACH = 8
"""The largest number of places of a sample in one copy."""


def find_differences(
    opened: Opened,
    arena: Arena,
    recorder: Recorder,
    *,
    tensors: Collection[int] | None = None,
    largest: int = LARGEST_BATCH,
    share: tuple[int, int] = (0, 1),
) -> tuple[int, list[str]]:
    """Compare all copies of tensors, byte by byte, with the copies that loads read.

    Args:
        tensors: numbers of the tensors to compare; None for all.
        largest: bytes of copies to hold at a time. Loaded tensors take the same memory again.
        share: `(i, n)`: compare only every n-th batch, from batch i.

    Returns:
        The number of compared bytes, and one line for each tensor whose copies differ, which says
        where they differ.
    """
    comparison = _comparison(opened)
    if comparison is None:
        return 0, []
    rows = comparison.rows_of(tensors)
    batches = _batches(comparison.whole(rows, largest), comparison, largest)
    mine = (batch for number, batch in enumerate(batches) if number % share[1] == share[0])
    return comparison.run(mine, arena, recorder)


def compare_sample(
    opened: Opened, arena: Arena, recorder: Recorder, tensors: Collection[int]
) -> None:
    """Compare a sample of the copies: `SAMPLE` bytes at each of at most `PLACES` places.

    Args:
        tensors: numbers of the tensors to compare.

    Raises:
        MismatchError: copies differ.
    """
    comparison = _comparison(opened)
    if comparison is None:
        return
    parts = comparison.sample(comparison.rows_of(tensors))
    _, differences = comparison.run(_batches(parts, comparison, LARGEST_BATCH), arena, recorder)
    refuse_differences(opened, differences)


def check_sample(
    opened: Opened,
    saved: SavedState,
    leaves: Sequence[TensorLeaf],
    arena: Arena,
    recorder: Recorder,
    group: Group,
) -> None:
    """Compare a sample of the copies of all tensors that any rank loads; rank 0 reads them.

    Args:
        leaves: the tensors that this rank loads, by the names of `saved`.

    Raises:
        MismatchError: on all ranks, if copies differ.
    """
    if opened.replicas is None or not len(opened.replicas.pieces):
        return  # and so do all other ranks

    def speak() -> bytes:
        return np.array([saved.stored_index(leaf.name) for leaf in leaves], "<i8").tobytes()

    def answer(said: list[bytes]) -> bytes:
        wanted = np.unique(np.concatenate([np.frombuffer(each, "<i8") for each in said]))
        compare_sample(opened, arena, recorder, wanted.tolist())
        return b""

    exchange(group, "comparing replicas", speak, answer)


def check_all(
    opened: Opened,
    names: Iterable[str],
    max_memory: int,
    recorder: Recorder,
    group: Group,
) -> None:
    """Compare all copies of some tensors, byte by byte, divided among the ranks.

    Args:
        names: the names of the tensors, the same on all ranks.
        max_memory: bound on the host memory of each rank, in bytes; at least 16 MiB.

    Raises:
        MismatchError: on all ranks, if copies differ.
    """
    if opened.replicas is None or not len(opened.replicas.pieces):
        return  # and so do all other ranks

    def speak() -> bytes:
        saved, largest = SavedState(opened.manifest), min(LARGEST_BATCH, max_memory // 8)
        found = find_differences(
            opened,
            Arena(2 * largest),
            recorder,
            tensors={saved.stored_index(name) for name in names},
            largest=largest,
            share=(group.rank, group.size),
        )
        return msgspec.msgpack.encode(found[1])

    def answer(said: list[bytes]) -> bytes:
        found = [line for each in said for line in msgspec.msgpack.decode(each, type=list[str])]
        refuse_differences(opened, found)
        return b""

    exchange(group, "comparing replicas", speak, answer)


def refuse_differences(opened: Opened, differences: list[str]) -> None:
    """Refuse a checkpoint whose copies of tensors differ.

    Raises:
        MismatchError: `differences` is not empty.
    """
    if differences:
        raise MismatchError(
            f"{opened.store}: the checkpoint stores some tensors several times, and the copies "
            "differ. Copy its files again from an intact source. If the copies differ there too, a "
            "specification can choose one (`skip`) or take their mean (`average over`); "
            "verify=False loads the first:",
            differences,
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """A box of tensor `number`, to compare with the copy in row `row`."""

    number: int
    row: int
    box: Box


@dataclass(frozen=True, slots=True)
class _Comparison:
    """A checkpoint opened twice: the tensors that loads read, and their copies.

    Attributes:
        first: the tensors that loads read, named by their numbers, parts of means included.
        copies: the copies, each a tensor that is named by its row in `replicas`.
    """

    opened: Opened
    replicas: Replicas
    first: Opened
    copies: Opened

    def rows_of(self, tensors: Collection[int] | None) -> list[int]:
        """Return the rows of the copies of some tensors, and of the parts of their means."""
        of = self.replicas.pieces.tensor
        if tensors is None:
            return list(range(len(of)))
        parts = [part for number in tensors for part in self.opened.means.get(number, ())]
        wanted = np.array([*tensors, *parts], np.int64)
        return [int(row) for row in np.flatnonzero(np.isin(of, wanted))]

    def whole(self, rows: Iterable[int], largest: int) -> Iterator[_Part]:
        """Yield all of some copies, in boxes of at most `largest` bytes."""
        for row in rows:
            number, offset, shape = self._place(row)
            for box in boxes_of(shape, max(1, largest // self.itemsize(number))):
                at = tuple(a + b for a, b in zip(offset, box.offset, strict=True))
                yield _Part(number, row, Box(at, box.shape))

    def sample(self, rows: list[int]) -> Iterator[_Part]:
        """Yield a few boxes of some copies, each along the dimension with the smallest stride."""
        if len(rows) > PLACES:
            rows = [rows[len(rows) * k // PLACES] for k in range(PLACES)]
        each = max(1, min(PLACES_EACH, PLACES // max(1, len(rows))))
        for row in rows:
            number, offset, shape = self._place(row)
            length = max(1, SAMPLE // self.itemsize(number))
            size = math.prod(shape)
            if size <= each * length:
                yield _Part(number, row, Box(offset, shape))
                continue
            stride = self.replicas.stride[row].tolist()
            along = min((d for d, n in enumerate(shape) if n > 1), key=lambda d: stride[d])
            extent = [1] * len(shape)
            extent[along] = min(shape[along], length)
            for k in range(each):
                at = [int(i) for i in np.unravel_index((size - 1) * k // max(1, each - 1), shape)]
                at[along] = min(at[along], shape[along] - extent[along])
                place = tuple(a + b for a, b in zip(offset, at, strict=True))
                yield _Part(number, row, Box(place, tuple(extent)))

    def run(
        self, batches: Iterable[list[_Part]], arena: Arena, recorder: Recorder
    ) -> tuple[int, list[str]]:
        """Compare batches; return the number of compared bytes, and a line for each difference."""
        total = 0
        unlike: dict[int, str] = {}
        for batch in batches:
            nbytes = sum(part.box.size * self.itemsize(part.number) for part in batch)
            with recorder.stage("replicas", nbytes):
                boxes = [(self._entry(self.first, part.number), part.box) for part in batch]
                again = [(self._entry(self.copies, part.row), part.box) for part in batch]
                first = read_boxes(boxes, self.first, arena, verify=True)
                other = read_boxes(again, self.copies, arena, verify=True)
                for part, a, b in zip(batch, first, other, strict=True):
                    if part.number not in unlike and not same_bytes(a, b):
                        unlike[part.number] = self._difference(part, a, b)
            total += nbytes
        return total, list(unlike.values())

    def itemsize(self, number: int) -> int:
        """Return the size of an element of a tensor in bytes."""
        return DTYPES[self._entry(self.first, number).dtype].itemsize

    def _entry(self, opened: Opened, number: int) -> TensorEntry:
        return opened.manifest.tensors[number]

    def _place(self, row: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Return the number of a copy's tensor, and the copy's offset and shape within it."""
        pieces = self.replicas.pieces
        number = int(pieces.tensor[row])
        ndim = len(self._entry(self.first, number).shape)
        offset, shape = (column[row, :ndim].tolist() for column in (pieces.offset, pieces.shape))
        return number, tuple(offset), tuple(shape)

    def _difference(self, part: _Part, a: torch.Tensor, b: torch.Tensor) -> str:
        """Return a line with both names and the first place that differs."""
        mine, other = (each.reshape(-1).view(torch.uint8) for each in (a, b))
        element = int((mine != other).nonzero()[0]) // self.itemsize(part.number)
        inside = np.unravel_index(element, part.box.shape) if part.box.shape else ()
        at = [int(i) + offset for i, offset in zip(inside, part.box.offset, strict=True)]
        pieces = self.opened.pieces
        place = np.zeros(pieces.offset.shape[1], np.int64)
        place[: len(at)] = at
        holds = (pieces.offset <= place) & (place < pieces.offset + pieces.shape)
        (row, *_) = np.flatnonzero((pieces.tensor == part.number) & holds.all(axis=1)).tolist()
        here = self._byte(pieces, self.opened.stride, row, place)
        there = self._byte(self.replicas.pieces, self.replicas.stride, part.row, place)
        name, copy = self._names(part)
        return f"{name}: two copies differ, first at {at}: {here}, and {copy}{there}"

    def _names(self, part: _Part) -> tuple[str, str]:
        """Return the name of the tensor, and the name of the stored array if it is known."""
        owners = {n: owner for owner, parts in self.opened.means.items() for n in parts}
        number = owners.get(part.number, part.number)
        copy = f"{self.replicas.names[part.row]} in " if self.replicas.names else ""
        return self.opened.manifest.tensors[number].name, copy

    def _byte(self, pieces: Pieces, stride: Int, row: int, place: Int) -> str:
        steps = int(((place - pieces.offset[row]) * stride[row]).sum())
        start = int(pieces.start[row]) + steps * self.itemsize(int(pieces.tensor[row]))
        file = self.opened.manifest.files[int(pieces.file[row])]
        return f"{file.name} at byte {file.data_at + start}"


def _comparison(opened: Opened) -> _Comparison | None:
    replicas = opened.replicas
    if replicas is None or not len(replicas.pieces):
        return None
    listed = opened.manifest.tensors
    owners = {part: number for number, parts in opened.means.items() for part in parts}
    entries = [*listed, *(listed[owners[part]] for part in sorted(owners))]
    of = replicas.pieces.tensor.tolist()
    copies = replace(replicas.pieces, tensor=np.arange(len(of)))
    return _Comparison(
        opened,
        replicas,
        _numbered(opened, entries, opened.pieces, opened.stride),
        _numbered(opened, [entries[number] for number in of], copies, replicas.stride),
    )


def _numbered(opened: Opened, entries: list[TensorEntry], pieces: Pieces, stride: Int) -> Opened:
    """Return a view of the same files with these tensors, named by their numbers."""
    tensors = tuple(
        msgspec.structs.replace(entry, name=str(number), same_as=None)
        for number, entry in enumerate(entries)
    )
    manifest = msgspec.structs.replace(opened.manifest, tensors=tensors)
    foreign = opened.foreign and replace(opened.foreign, means={})
    return replace(
        opened, manifest=manifest, pieces=pieces, stride=stride, replicas=None, foreign=foreign
    )


def _batches(
    parts: Iterable[_Part], comparison: _Comparison, largest: int
) -> Iterator[list[_Part]]:
    batch: list[_Part] = []
    room = largest
    for part in parts:
        nbytes = part.box.size * comparison.itemsize(part.number)
        if batch and nbytes > room:
            yield batch
            batch, room = [], largest
        batch.append(part)
        room -= nbytes
    if batch:
        yield batch


def compare_ranks(description: Description, fragments: Sequence[Fragment], group: Group) -> None:
    """Compare the checksums of the boxes that several ranks hold.

    Raises:
        MismatchError: on all ranks, if boxes differ; lists all of them.
    """

    def speak() -> bytes:
        rows: list[_Row] = [
            (
                description.names[tensor],
                fragment.box.offset,
                fragment.box.shape,
                _crc(fragment.data),
            )
            for tensor, fragment in zip(description.tensor.tolist(), fragments, strict=True)
        ]
        return msgspec.msgpack.encode(rows)

    exchange(group, "comparing replicas", speak, _compare)


def _crc(data: torch.Tensor) -> int:
    array = host_array(data.cpu())
    return crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _compare(said: Sequence[bytes]) -> bytes:
    first: dict[tuple[str, Box], tuple[int, int]] = {}
    problems = []
    for rank, data in enumerate(said):
        for name, offset, shape, crc in msgspec.msgpack.decode(data, type=list[_Row]):
            origin, known = first.setdefault((name, Box(offset, shape)), (rank, crc))
            if known != crc:
                problems.append(f"{name}{Box(offset, shape)}: rank {origin} and rank {rank} differ")
    if problems:
        raise MismatchError(
            "tensors that several ranks hold differ; make them equal before saving (for example, "
            "broadcast them from rank 0), or save without check_replicas:",
            problems,
        )
    return b""
