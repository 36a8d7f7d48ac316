"""Compare the replicas in a foreign checkpoint: several stored copies of a tensor."""

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
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import TensorEntry
from shardwise.manifest.pieces import Int, Pieces
from shardwise.plan.name_lookup import SavedNames
from shardwise.state.leaves import TensorLeaf, same_bytes

LARGEST_BATCH = 16 << 20
SAMPLE_BYTES = 1 << 10
"""The number of bytes that a sample compares at each place."""
MOST_PLACES = 4096
"""The largest number of places in a sample."""
MOST_PLACES_EACH = 8
"""The largest number of places of a sample in one copy."""


def find_differences(
    opened: Opened,
    arena: Arena,
    recorder: Recorder,
    *,
    tensors: Collection[int] | None = None,
    batch_bytes: int = LARGEST_BATCH,
    share: tuple[int, int] = (0, 1),
) -> tuple[int, list[str]]:
    """Compare all further copies of tensors, byte by byte, with the copies that loads read.

    Args:
        opened: the checkpoint.
        arena: the buffers to read through.
        recorder: gets an event for each batch.
        tensors: the indices of the tensors to compare. Default: all.
        batch_bytes: the bytes of further copies to hold in memory at a time. The copies that loads
            read take as much again.
        share: `(i, n)`: compare only batches i, i + n, i + 2n …

    Returns:
        The number of compared bytes, and one line for each tensor whose copies differ, with the
        first place that differs.
    """
    comparison = _Comparison.of(opened)
    if comparison is None:
        return 0, []
    parts = comparison.all_parts(comparison.rows_of(tensors), batch_bytes)
    batches = _split_into_batches(parts, comparison, batch_bytes)
    own = (batch for i, batch in enumerate(batches) if i % share[1] == share[0])
    return comparison.compare(own, arena, recorder)


def check_sample(
    opened: Opened, arena: Arena, recorder: Recorder, tensors: Collection[int]
) -> None:
    """Compare a sample of the copies: `SAMPLE_BYTES` at each of at most `MOST_PLACES` places.

    Args:
        opened: the checkpoint.
        arena: the buffers to read through.
        recorder: gets an event for each batch.
        tensors: the indices of the tensors to compare.

    Raises:
        MismatchError: copies differ.
    """
    comparison = _Comparison.of(opened)
    if comparison is None:
        return
    parts = comparison.sample_parts(comparison.rows_of(tensors))
    batches = _split_into_batches(parts, comparison, LARGEST_BATCH)
    refuse_differences(opened, comparison.compare(batches, arena, recorder)[1])


def check_sample_together(
    opened: Opened,
    saved: SavedNames,
    leaves: Sequence[TensorLeaf],
    arena: Arena,
    recorder: Recorder,
    group: Group,
) -> None:
    """Compare a sample of the copies of all tensors that any rank loads. Rank 0 reads them.

    Args:
        leaves: the tensors that this rank loads, with the names of `saved`.

    Raises:
        MismatchError: copies differ; the same error on all ranks.
    """
    if opened.replicas is None or not len(opened.replicas.pieces):
        return  # on all ranks

    def make_message() -> bytes:
        return np.array([saved.stored_index(leaf.name) for leaf in leaves], "<i8").tobytes()

    def make_reply(messages: list[bytes]) -> bytes:
        tensors = np.unique(np.concatenate([np.frombuffer(each, "<i8") for each in messages]))
        check_sample(opened, arena, recorder, tensors.tolist())
        return b""

    exchange(group, "comparing replicas", make_message, make_reply)


def check_all_together(
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
        MismatchError: copies differ; the same error on all ranks.
    """
    if opened.replicas is None or not len(opened.replicas.pieces):
        return  # on all ranks

    def make_message() -> bytes:
        saved, batch_bytes = SavedNames(opened.manifest), min(LARGEST_BATCH, max_memory // 8)
        _, differences = find_differences(
            opened,
            Arena(2 * batch_bytes),
            recorder,
            tensors={saved.stored_index(name) for name in names},
            batch_bytes=batch_bytes,
            share=(group.rank, group.size),
        )
        return msgspec.msgpack.encode(differences)

    def make_reply(messages: list[bytes]) -> bytes:
        decoded = [msgspec.msgpack.decode(each, type=list[str]) for each in messages]
        refuse_differences(opened, [line for lines in decoded for line in lines])
        return b""

    exchange(group, "comparing replicas", make_message, make_reply)


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
    """A part of a copy to compare.

    Attributes:
        tensor: the index of the tensor in `Opened.pieces`.
        row: the row of the copy in `Opened.replicas`.
        box: the part, in the global tensor.
    """

    tensor: int
    row: int
    box: Box


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Two views of a checkpoint: the tensors that loads read, and their further copies.

    Attributes:
        opened: the checkpoint.
        replicas: its further copies.
        first_view: the tensors that loads read, versions of averages included; each is named by its
            index.
        copies_view: the further copies as tensors; each is named by its row in `replicas`.
    """

    opened: Opened
    replicas: Replicas
    first_view: Opened
    copies_view: Opened

    @classmethod
    def of(cls, opened: Opened) -> _Comparison | None:
        """Return the comparison of a checkpoint; None if the checkpoint has no further copies."""
        replicas = opened.replicas
        if replicas is None or not len(replicas.pieces):
            return None
        entries = opened.stored_entries()
        tensors = replicas.pieces.tensor.tolist()
        copies = replace(replicas.pieces, tensor=np.arange(len(tensors)))
        return cls(
            opened,
            replicas,
            _view(opened, entries, opened.pieces, opened.stride),
            _view(opened, [entries[tensor] for tensor in tensors], copies, replicas.stride),
        )

    def rows_of(self, tensors: Collection[int] | None) -> list[int]:
        """Return the rows of the copies of some tensors, and of the versions of their means."""
        tensor_of_row = self.replicas.pieces.tensor
        if tensors is None:
            return list(range(len(tensor_of_row)))
        versions = [each for tensor in tensors for each in self.opened.averages.get(tensor, ())]
        return np.flatnonzero(np.isin(tensor_of_row, [*tensors, *versions])).tolist()

    def all_parts(self, rows: list[int], part_bytes: int) -> Iterator[_Part]:
        """Yield parts of at most `part_bytes` bytes that cover some copies."""
        for row in rows:
            tensor, offset, shape = self._place(row)
            for box in boxes_of(shape, max(1, part_bytes // self.itemsize(tensor))):
                part_offset = tuple(a + b for a, b in zip(offset, box.offset, strict=True))
                yield _Part(tensor, row, Box(part_offset, box.shape))

    def sample_parts(self, rows: list[int]) -> Iterator[_Part]:
        """Yield a few parts of some copies, each along the dimension with the smallest stride."""
        if len(rows) > MOST_PLACES:
            rows = [rows[len(rows) * k // MOST_PLACES] for k in range(MOST_PLACES)]
        places = max(1, min(MOST_PLACES_EACH, MOST_PLACES // max(1, len(rows))))
        for row in rows:
            tensor, offset, shape = self._place(row)
            length = max(1, SAMPLE_BYTES // self.itemsize(tensor))
            size = math.prod(shape)
            if size <= places * length:
                yield _Part(tensor, row, Box(offset, shape))
                continue
            stride = self.replicas.stride[row].tolist()
            along = min((d for d, n in enumerate(shape) if n > 1), key=lambda d: stride[d])
            extent = [1] * len(shape)
            extent[along] = min(shape[along], length)
            for k in range(places):
                element = (size - 1) * k // max(1, places - 1)
                start = [int(i) for i in np.unravel_index(element, shape)]
                start[along] = min(start[along], shape[along] - extent[along])
                part_offset = tuple(a + b for a, b in zip(offset, start, strict=True))
                yield _Part(tensor, row, Box(part_offset, tuple(extent)))

    def compare(
        self, batches: Iterable[list[_Part]], arena: Arena, recorder: Recorder
    ) -> tuple[int, list[str]]:
        """Compare batches; return the number of compared bytes, and a line for each difference."""
        total = 0
        differences: dict[int, str] = {}
        for batch in batches:
            nbytes = sum(part.box.size * self.itemsize(part.tensor) for part in batch)
            with recorder.stage("replicas", nbytes):
                boxes = [(self.first_view.manifest.tensors[p.tensor], p.box) for p in batch]
                copy_boxes = [(self.copies_view.manifest.tensors[p.row], p.box) for p in batch]
                firsts = read_boxes(boxes, self.first_view, arena, verify=True)
                copies = read_boxes(copy_boxes, self.copies_view, arena, verify=True)
                for part, first, copy in zip(batch, firsts, copies, strict=True):
                    if part.tensor not in differences and not same_bytes(first, copy):
                        differences[part.tensor] = self._describe_difference(part, first, copy)
            total += nbytes
        return total, list(differences.values())

    def itemsize(self, tensor: int) -> int:
        """Return the size of an element of a tensor, in bytes."""
        return DTYPES[self.first_view.manifest.tensors[tensor].dtype].itemsize

    def _place(self, row: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Return the index of a copy's tensor, and the copy's offset and shape in the tensor."""
        pieces = self.replicas.pieces
        tensor = int(pieces.tensor[row])
        ndim = len(self.first_view.manifest.tensors[tensor].shape)
        offset, shape = (column[row, :ndim].tolist() for column in (pieces.offset, pieces.shape))
        return tensor, tuple(offset), tuple(shape)

    def _describe_difference(self, part: _Part, first: torch.Tensor, copy: torch.Tensor) -> str:
        """Return a line with the name of the tensor, and the first element that differs."""
        first_bytes, copy_bytes = (each.reshape(-1).view(torch.uint8) for each in (first, copy))
        element = int((first_bytes != copy_bytes).nonzero()[0]) // self.itemsize(part.tensor)
        index = np.unravel_index(element, part.box.shape) if part.box.shape else ()
        position = [int(i) + o for i, o in zip(index, part.box.offset, strict=True)]
        pieces = self.opened.pieces
        padded = np.zeros(pieces.offset.shape[1], np.int64)
        padded[: len(position)] = position
        holds = (pieces.offset <= padded) & (padded < pieces.offset + pieces.shape)
        (row, *_) = np.flatnonzero((pieces.tensor == part.tensor) & holds.all(axis=1)).tolist()
        first_place = self._byte_of(pieces, self.opened.stride, row, padded)
        copy_place = self._byte_of(self.replicas.pieces, self.replicas.stride, part.row, padded)
        if self.replicas.names:
            copy_place = f"{self.replicas.names[part.row]} in {copy_place}"
        tensor = self.opened.average_of_version().get(part.tensor, part.tensor)
        name = self.opened.manifest.tensors[tensor].name
        return f"{name}: two copies differ, first at {position}: {first_place}, and {copy_place}"

    def _byte_of(self, pieces: Pieces, stride: Int, row: int, position: Int) -> str:
        """Return the file and byte of an element of a piece."""
        elements = int(((position - pieces.offset[row]) * stride[row]).sum())
        start = int(pieces.start[row]) + elements * self.itemsize(int(pieces.tensor[row]))
        file = self.opened.manifest.files[int(pieces.file[row])]
        return f"{file.name} at byte {file.data_at + start}"


def _view(opened: Opened, entries: list[TensorEntry], pieces: Pieces, stride: Int) -> Opened:
    """Return a view of the same files with these tensors, each named by its index."""
    tensors = tuple(
        msgspec.structs.replace(entry, name=str(index), same_as=None)
        for index, entry in enumerate(entries)
    )
    manifest = msgspec.structs.replace(opened.manifest, tensors=tensors)
    foreign = opened.foreign and replace(opened.foreign, averages={})
    return replace(
        opened, manifest=manifest, pieces=pieces, stride=stride, replicas=None, foreign=foreign
    )


def _split_into_batches(
    parts: Iterable[_Part], comparison: _Comparison, batch_bytes: int
) -> Iterator[list[_Part]]:
    batch: list[_Part] = []
    remaining = batch_bytes
    for part in parts:
        nbytes = part.box.size * comparison.itemsize(part.tensor)
        if batch and nbytes > remaining:
            yield batch
            batch, remaining = [], batch_bytes
        batch.append(part)
        remaining -= nbytes
    if batch:
        yield batch
