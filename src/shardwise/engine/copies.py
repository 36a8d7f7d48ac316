"""From spans of files, held in buffers, to the boxes of memory that they are wanted in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.engine.memory import Memory
from shardwise.layout import Box, boxes_of_range
from shardwise.plan.load import Spans, Transfers
from shardwise.state.leaves import byte_strides
from shardwise.store.store import Buffer

Int = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A fragment to fill: its box's offset in the global tensor, its memory, its tensor's name."""

    name: str
    offset: tuple[int, ...]
    memory: Memory


@dataclass(frozen=True, slots=True)
class PieceTable:
    """Where each piece lies: box of the tensor, and absolute byte offset in its file."""

    start: Int
    offset: Int
    shape: Int


class Copies:
    """Copies out of spans: the columns of a plan as lists, which are faster to take apart."""

    def __init__(
        self, transfers: Transfers, spans: Spans, pieces: PieceTable, wanted: Sequence[Wanted]
    ) -> None:
        self._wanted = wanted
        self._first = spans.first.tolist()
        self._span_low = spans.low.tolist()
        self._rows = spans.rows.tolist()
        self._fragment = transfers.fragment.tolist()
        self._low = transfers.low.tolist()
        self._high = transfers.high.tolist()
        self._shape = transfers.shape.tolist()
        self._offset = transfers.offset.tolist()
        piece_offset = pieces.offset[transfers.piece]
        self._within = (transfers.offset - piece_offset).tolist()
        self._piece_shape = pieces.shape[transfers.piece].tolist()
        self._piece_start = pieces.start[transfers.piece].tolist()

    def names(self, span: int) -> str:
        """Which tensors a span holds, for an error."""
        rows = self._rows[self._first[span] : self._first[span + 1]]
        names = list(dict.fromkeys(self._wanted[self._fragment[row]].name for row in rows))
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return ", ".join(names[:3]) + more

    def copy(self, span: int, data: Buffer) -> None:
        """Copy all that a span holds, whose bytes are `data`."""
        low = self._span_low[span]
        high = low + len(data)
        for row in self._rows[self._first[span] : self._first[span + 1]]:
            wanted = self._wanted[self._fragment[row]]
            ndim = len(wanted.offset)
            shape = tuple(self._shape[row][:ndim])
            start = [o - w for o, w in zip(self._offset[row], wanted.offset, strict=False)]
            if low <= self._low[row] and self._high[row] <= high:
                strides = byte_strides(self._piece_shape[row][:ndim], wanted.memory.itemsize)
                _copy(data, self._low[row] - low, strides, wanted.memory, start, shape)
            else:
                self._copy_part(row, low, high, data, start, shape)

    def _copy_part(
        self, row: int, low: int, high: int, data: Buffer, start: list[int], shape: tuple[int, ...]
    ) -> None:
        """Copy of a transfer what this span holds: a flat range of its piece, as boxes."""
        memory = self._wanted[self._fragment[row]].memory
        ndim, itemsize = len(shape), memory.itemsize
        piece_shape = tuple(self._piece_shape[row][:ndim])
        piece_start = self._piece_start[row]
        strides = byte_strides(piece_shape, itemsize)
        box = Box(tuple(self._within[row][:ndim]), shape)
        size = itemsize * int(np.prod(piece_shape, dtype=np.int64))
        first = (max(low, piece_start) - piece_start) // itemsize
        last = (min(high, piece_start + size) - piece_start) // itemsize
        for part in boxes_of_range(piece_shape, first, last):
            common = part.intersect(box)
            if common is None:
                continue
            at = piece_start - low + sum(o * s for o, s in zip(common.offset, strides, strict=True))
            into = [s + c - b for s, c, b in zip(start, common.offset, box.offset, strict=True)]
            _copy(data, at, strides, memory, into, common.shape)


def _copy(
    data: Buffer,
    at: int,
    strides: tuple[int, ...],
    memory: Memory,
    start: list[int],
    shape: tuple[int, ...],
) -> None:
    source: npt.NDArray[np.generic] = np.ndarray(shape, memory.dtype, data, at, strides)
    memory.write(tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True)), source)
