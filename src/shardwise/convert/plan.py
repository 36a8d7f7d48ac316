"""What is written: the tensors and values of a source, and the files of a target.

A target format turns a `Chosen` into a `Target`: files as sequences of known bytes and of parts
of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from shardwise.errors import StateError
from shardwise.layout import Box
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import Manifest, TensorEntry
from shardwise.store.store import Buffer

MOST_PREFIXES = 8
T = TypeVar("T")
Sums = Sequence[int]
"""CRC-32 of each range between the marks of an output."""


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor of the source, row-major, converted to `dtype` (torch's name)."""

    name: str
    box: Box
    dtype: str

    @property
    def size(self) -> int:
        """The size in bytes."""
        return self.box.size * DTYPES[self.dtype].itemsize


class Parts(Protocol):
    """A source that parts of tensors are read from."""

    def read(self, parts: list[tuple[Part, Buffer]]) -> None:
        """Fill each buffer with its part.

        Raises:
            CorruptionError: bytes differ from those that were saved.
        """
        ...


@dataclass(frozen=True, slots=True)
class Late:
    """Bytes that depend on those before them: `make` receives the checksums so far."""

    size: int
    make: Callable[[Sums], bytes]


Segment = bytes | Part | Late


@dataclass(frozen=True, slots=True)
class Output:
    """A file of the target.

    Attributes:
        name: its path below the target, with `/`.
        segments: its contents, in order.
        marks: ascending offsets at which one checksum ends and the next begins. The first checksum
            begins at 0, the last ends at the end of the file.
    """

    name: str
    segments: tuple[Segment, ...]
    marks: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """The size in bytes."""
        return sum(size_of(segment) for segment in self.segments)


@dataclass(frozen=True, slots=True)
class Target:
    """All files of a target.

    Attributes:
        outputs: files with tensors, which are written in any order.
        finals: makes the small files that are written last, by name, from the checksums of each
            output. They are written in order: the last one makes the checkpoint complete.
        left_out: what the format cannot hold, and why; one line each.
    """

    outputs: tuple[Output, ...]
    finals: Callable[[Mapping[str, Sums]], Mapping[str, bytes]]
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Written:
    """A tensor with its name and dtype in the target, and its entry in the source."""

    name: str
    entry: TensorEntry
    dtype: str

    @property
    def part(self) -> Part:
        """The whole tensor; for a tied tensor, the one that it is tied to."""
        return Part(self.entry.same_as or self.entry.name, Box.whole(self.entry.shape), self.dtype)


@dataclass(frozen=True, slots=True)
class Chosen:
    """The tensors and values that are written.

    Attributes:
        source: the manifest with the step and the plain values.
        tensors: in the order of the source. Tied tensors are tied to another one of these.
        save_id: a part of file names; equal for equal exports of the same source.
        root: the name below which the model is, for formats that hold only a model.
        max_file: the most bytes of tensors in a file.
        config: the contents of the model's configuration file, for formats that have one.
    """

    source: Manifest
    tensors: tuple[Written, ...]
    save_id: str
    root: str
    max_file: int
    config: bytes | None = None

    def model(self) -> list[Written]:
        """Return the tensors below the root, with names relative to it.

        Raises:
            StateError: there are none.
        """
        if not self.root:
            return list(self.tensors)
        start = f"{self.root}."
        found = [
            Written(each.name.removeprefix(start), each.entry, each.dtype)
            for each in self.tensors
            if each.name.startswith(start)
        ]
        if not found:
            raise StateError(nothing_below(self.root, [each.name for each in self.tensors]))
        return found

    def beside_model(self) -> tuple[str, ...]:
        """Return what a format without optimizers and values leaves out: at most two lines.

        They list the first parts of names, so that a wrong root is noticed.
        """
        start = f"{self.root}." if self.root else ""
        tensors = [each.name for each in self.tensors if not each.name.startswith(start)]
        values = [each.name for each in self.source.objects] + [*self.source.per_rank]
        lines = []
        if tensors:
            lines.append(
                f"{len(tensors)} tensor(s) below {_prefixes(tensors)}: this format holds only the "
                f"model, which is below {self.root!r}"
            )
        if values:
            lines.append(
                f"{len(values)} plain value(s), of {_prefixes(values)}: this format holds only "
                "tensors"
            )
        return tuple(lines)


def nothing_below(root: str, names: Iterable[str]) -> str:
    """Return the message for a root without tensors."""
    return (
        f"the checkpoint has no tensor below {root!r}: set root= (on the command line --root) to "
        f'the key of the model, one of {_prefixes(names)}; or "" to write all'
    )


def size_of(segment: Segment) -> int:
    """Return the size of a segment in bytes."""
    return len(segment) if isinstance(segment, bytes) else segment.size


def cut(part: Part, most: int) -> list[Part]:
    """Cut a whole tensor into parts of whole rows, each of at most `most` bytes, or one row."""
    shape = part.box.shape
    if part.size <= most or not shape:
        return [part]
    rows, rest = shape[0], shape[1:]
    step = max(1, most // (part.size // rows))
    return [
        Part(part.name, Box((at, *(0,) * len(rest)), (min(step, rows - at), *rest)), part.dtype)
        for at in range(0, rows, step)
    ]


def split(things: Iterable[T], size: Callable[[T], int], most: int) -> list[list[T]]:
    """Divide things among files in order. A thing larger than `most` gets a file for itself."""
    files: list[list[T]] = [[]]
    room = most
    for each in things:
        if files[-1] and size(each) > room:
            files.append([])
            room = most
        files[-1].append(each)
        room -= size(each)
    return files


def _prefixes(names: Iterable[str]) -> str:
    tops = [*dict.fromkeys(name.split(".")[0][:60] for name in names)]
    return ", ".join(tops[:MOST_PREFIXES]) + (", …" if len(tops) > MOST_PREFIXES else "")
