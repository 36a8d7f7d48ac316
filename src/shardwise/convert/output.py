"""What a conversion writes: files as sequences of bytes that are known, and parts of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shardwise.layout import Box
from shardwise.manifest.dtypes import DTYPES
from shardwise.store.store import Buffer

Sums = Sequence[int]
"""CRC-32 of what lies between the marks of an output."""


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor of the source, row-major, converted to `dtype` (torch's name)."""

    name: str
    box: Box
    dtype: str

    @property
    def size(self) -> int:
        """In bytes."""
        return self.box.size * DTYPES[self.dtype].itemsize


class Parts(Protocol):
    """What parts of tensors are read from."""

    def read(self, parts: list[tuple[Part, Buffer]]) -> None:
        """Fill each buffer with its part.

        Raises:
            CorruptionError: bytes are not those that were saved.
        """
        ...


@dataclass(frozen=True, slots=True)
class Late:
    """Bytes that depend on what lies before them: `make` is given the sums up to here."""

    size: int
    make: Callable[[Sums], bytes]


Segment = bytes | Part | Late


@dataclass(frozen=True, slots=True)
class Output:
    """A file: its path below the target, by `/`, and what it consists of, in order.

    `marks`, ascending, are the bytes at which a checksum ends and the next begins; the first begins
    at 0, the last ends at the file's end.
    """

    name: str
    segments: tuple[Segment, ...]
    marks: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(size_of(segment) for segment in self.segments)


@dataclass(frozen=True, slots=True)
class Target:
    """All that is written: `outputs` in any order, and small files after them, by name.

    `finals` is given the sums of each output, by name; what it makes is written in its order, so
    that what makes a checkpoint whole comes last. `left_out` says what of the source is not in
    it, and why; one line each.
    """

    outputs: tuple[Output, ...]
    finals: Callable[[Mapping[str, Sums]], Mapping[str, bytes]]
    left_out: tuple[str, ...] = ()


def size_of(segment: Segment) -> int:
    """Of a segment, in bytes."""
    return len(segment) if isinstance(segment, bytes) else segment.size
