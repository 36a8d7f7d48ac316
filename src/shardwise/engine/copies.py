"""From spans of files, held in buffers, to the boxes of memory that they are wanted in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.engine.memory import Memory
from shardwise.layout import boxes_within
from shardwise.plan.load import Spans, Transfers
from shardwise.store.store import Buffer

Int = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A fragment to fill: its box's offset in the global tensor, its memory, its tensor's name."""

    name: str
    offset: tuple[int, ...]
    memory: Memory


class Copies:
    """Copies out of spans: the columns of a plan as lists, which are faster to take apart.

    Args:
        strides: of all pieces, `(n, D)`, in elements.
    """

    def __init__(
        self, transfers: Transfers, spans: Spans, strides: Int, wanted: Sequence[Wanted]
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
        self._stride = strides[transfers.piece].tolist()

    def names(self, span: int) -> str:
        """Which tensors a span holds, for an error."""
        rows = self._rows[self._first[span] : self._first[span + 1]]
        names = list(dict.fromkeys(self._wanted[self._fragment[row]].name for row in rows))
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return ", ".join(names[:3]) + more

    def copy(self, span: int, data: Buffer) -> None:
        """Copy all that a span holds, whose bytes are `data`; more than its own are no harm."""
        low = self._span_low[span]
        high = low + len(data)
        for row in self._rows[self._first[span] : self._first[span + 1]]:
            wanted = self._wanted[self._fragment[row]]
            ndim = len(wanted.offset)
            shape = tuple(self._shape[row][:ndim])
            start = [o - w for o, w in zip(self._offset[row], wanted.offset, strict=False)]
            memory = wanted.memory
            strides = tuple(s * memory.itemsize for s in self._stride[row][:ndim])
            at = self._low[row] - low
            if at >= 0 and self._high[row] <= high:
                _copy(data, at, strides, memory, start, shape)
                continue
            for part in boxes_within(shape, strides, memory.itemsize, -at, high - low - at):
                there = at + sum(o * s for o, s in zip(part.offset, strides, strict=True))
                into = [s + o for s, o in zip(start, part.offset, strict=True)]
                _copy(data, there, strides, memory, into, part.shape)


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
