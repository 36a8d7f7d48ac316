"""What a rank's data file holds: any range of its bytes, copied from where they lie in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from shardwise.engine.describe import Described
from shardwise.engine.memory import Memory, memory_of
from shardwise.layout import Box, boxes_of_range
from shardwise.manifest.datafile import DataFile, lay_out
from shardwise.plan.save import Share
from shardwise.store.store import Buffer


@dataclass(frozen=True, slots=True)
class PieceSource:
    """A piece to write: `shape` elements of `memory`, from `offset` on, at byte `start` of the
    data section of the file."""

    start: int
    nbytes: int
    memory: Memory
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Data:
    """The data section of a file: pieces by their byte offsets, and the devices they lie on."""

    pieces: Sequence[PieceSource]
    starts: npt.NDArray[np.int64]
    devices: frozenset[torch.device]

    def fill(self, low: int, high: int, out: Buffer, *, wait: bool = True) -> None:
        """Copy bytes `low:high` of the section to `out`; what lies outside of it is left alone.

        Args:
            wait: as for `Memory.read`.
        """
        first = int(np.searchsorted(self.starts, low, side="right")) - 1
        last = int(np.searchsorted(self.starts, high, side="left"))
        for source in self.pieces[max(first, 0) : last]:
            at = source.start
            a, b = max(low, at), min(high, at + source.nbytes)
            if a < b:
                _copy_piece(source, a - at, b - at, out[a - low : b - low], wait)


@dataclass(frozen=True, slots=True)
class Content:
    """The file but for its checksums: data (and header and objects)."""

    layout: DataFile
    data: Data
    objects: bytes

    @property
    def devices(self) -> frozenset[torch.device]:
        """Those on which some of it lies."""
        return self.data.devices

    def fill(self, low: int, high: int, out: Buffer, *, wait: bool = True) -> None:
        """Copy bytes `low:high` of the file to `out`; `wait` is as for `Memory.read`."""
        layout = self.layout
        _copy_bytes(layout.header, 0, low, high, out)
        _copy_bytes(self.objects, layout.objects_at, low, high, out)
        self.data.fill(low - layout.data_at, high - layout.data_at, out, wait=wait)


def content_of(
    share: Share, described: Described, objects: bytes, metadata: dict[str, str]
) -> Content:
    """The file of a share.

    Args:
        share: counts the fragments of `described`.
        objects: this rank's encoded objects; may be empty.
        metadata: goes into the file's header.
    """
    description = described.description
    entries = []
    for index, box in _boxes(share, described):
        tensor = int(description.tensor[index])
        shape, dtype = description.shapes[tensor], description.dtypes[tensor]
        entries.append((description.names[tensor], dtype, shape, box))
    layout = lay_out(entries, len(objects), metadata)
    return Content(layout, data_of(share, described), objects)


def data_of(share: Share, described: Described) -> Data:
    """The data section of a share's file.

    Args:
        share: counts the fragments of `described`; also that of another rank which describes what
            it holds alike.
    """
    memories = {i: memory_of(described.fragments[i].data) for i in set(share.fragment.tolist())}
    pieces = []
    start = 0
    for index, box in _boxes(share, described):
        memory = memories[index]
        nbytes = box.size * memory.itemsize
        base = described.fragments[index].box.offset
        within = tuple(o - p for o, p in zip(box.offset, base, strict=True))
        pieces.append(PieceSource(start, nbytes, memory, within, box.shape))
        start += nbytes
    starts = np.array([piece.start for piece in pieces], np.int64)
    devices = frozenset(each.device for each in memories.values() if each.device is not None)
    return Data(pieces, starts, devices)


def _boxes(share: Share, described: Described) -> Iterator[tuple[int, Box]]:
    """The fragment that each piece is part of, and its box."""
    description = described.description
    rows = zip(share.fragment.tolist(), share.offset.tolist(), share.shape.tolist(), strict=True)
    for index, offset, shape in rows:
        ndim = len(description.shapes[int(description.tensor[index])])
        yield index, Box(tuple(offset[:ndim]), tuple(shape[:ndim]))


def _copy_bytes(data: bytes, at: int, low: int, high: int, out: Buffer) -> None:
    a, b = max(low, at), min(high, at + len(data))
    if a < b:
        out[a - low : b - low] = np.frombuffer(data, np.uint8)[a - at : b - at]


def _copy_piece(source: PieceSource, low: int, high: int, out: Buffer, wait: bool) -> None:
    """Copy bytes `low:high` of a piece, as it lies in the file, to `out`."""
    memory, itemsize = source.memory, source.memory.itemsize
    if low == 0 and high == source.nbytes:
        _copy_box(memory, source.offset, source.shape, out, wait)
        return
    at = 0
    for box in boxes_of_range(source.shape, low // itemsize, high // itemsize):
        nbytes = box.size * itemsize
        offset = tuple(o + b for o, b in zip(source.offset, box.offset, strict=True))
        _copy_box(memory, offset, box.shape, out[at : at + nbytes], wait)
        at += nbytes


def _copy_box(
    memory: Memory, offset: tuple[int, ...], shape: tuple[int, ...], out: Buffer, wait: bool
) -> None:
    index = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
    memory.read(index, out.view(memory.dtype).reshape(shape), wait=wait)
