"""The plan of an export: the tensors and values to write, and the files to write them to.

A module of `targets/` turns `ExportContents` into `ExportFiles`. A file is a sequence of segments:
known bytes, parts of tensors, and bytes that are computed from checksums.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from shardwise.kernel.boxes import Box
from shardwise.kernel.errors import StateError
from shardwise.kernel.manifest.checksums import crc32
from shardwise.kernel.manifest.dtypes import DTYPES
from shardwise.kernel.manifest.layout import Layout
from shardwise.kernel.manifest.manifest import FROZEN, ObjectEntry, TensorEntry
from shardwise.kernel.state.plain_values import describes_tensor
from shardwise.kernel.store.store import Buffer

MOST_LISTED = 8
T = TypeVar("T")
RangeChecksums = Sequence[int]
"""CRC-32 checksums of the consecutive ranges of a file."""


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A box of a tensor in the source, in row-major order.

    Attributes:
        name: the name of the tensor in the source.
        box: the elements of the tensor.
        dtype: the torch dtype to which the elements are converted, for example "bfloat16".
    """

    name: str
    box: Box
    dtype: str

    @property
    def size(self) -> int:
        """The size in bytes."""
        return self.box.size * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class BytesFromChecksums:
    """Bytes of a file that are computed from the checksums of the bytes before them.

    Attributes:
        size: the number of bytes.
        make_bytes: takes the checksums of all ranges that end before these bytes, and returns the
            bytes.
    """

    size: int
    make_bytes: Callable[[RangeChecksums], bytes]


Segment = bytes | TensorPart | BytesFromChecksums


class OutputFile:
    """A file to write, which is planned from front to back.

    Args:
        name: path below the target directory, with `/` as the separator.
        segments: the first segments.
        checksum_boundaries: ascending offsets in bytes, without the start and the end of the file.
            They divide the file into ranges, and each range gets a checksum.

    Attributes:
        segments: contents of the file, in order.
        starts: the offset of each segment in the file.
        size: the size in bytes.
    """

    def __init__(
        self, name: str, segments: Iterable[Segment] = (), checksum_boundaries: Iterable[int] = ()
    ) -> None:
        self.name = name
        self.segments: list[Segment] = []
        self.starts: list[int] = []
        self.size = 0
        self.checksum_boundaries = list(checksum_boundaries)
        for segment in segments:
            self.add(segment)

    def add(self, segment: Segment) -> None:
        """Append a segment.

        Raises:
            ValueError: the offset of a part of a tensor is no multiple of the size of its elements.
        """
        if isinstance(segment, TensorPart) and self.size % DTYPES[segment.dtype].itemsize:
            raise ValueError(f"{self.name}: {segment.name} is not aligned: at byte {self.size}")
        self.segments.append(segment)
        self.starts.append(self.size)
        self.size += size_of(segment)

    def add_with_checksum(self, part: TensorPart) -> int:
        """Append a nonempty part. Return the index of its checksum in the checksums of the file."""
        if self.checksum_boundaries[-1:] != [self.size] and self.size:
            self.checksum_boundaries.append(self.size)
        self.add(part)
        self.checksum_boundaries.append(self.size)
        return len(self.checksum_boundaries) - 1

    def align(self, alignment: int) -> None:
        """Pad the file to a multiple of `alignment` bytes."""
        self.add(bytes(-self.size % alignment))

    def tensor_parts(self) -> list[TensorPart]:
        """Return the parts of tensors in the file."""
        return [segment for segment in self.segments if isinstance(segment, TensorPart)]


class RunningChecksums:
    """Computes the checksum of each range of a file. The caller adds the bytes in order.

    Attributes:
        complete: the checksums of the ranges that have ended.
    """

    def __init__(self, file: OutputFile) -> None:
        self._boundaries = [*file.checksum_boundaries, file.size]
        self._offset = 0
        self._running = 0
        self.complete: list[int] = []

    def add(self, data: Buffer) -> None:
        """Add the next bytes."""
        while len(data):
            remaining = self._boundaries[len(self.complete)] - self._offset
            part, data = data[:remaining], data[remaining:]
            self._running = crc32(part, self._running)
            self._offset += len(part)
            if len(part) == remaining:
                self.complete.append(self._running)
                self._running = 0

    def finish(self) -> list[int]:
        """Return the checksums of all ranges; 0 for empty ranges at the end."""
        return self.complete + [0] * (len(self._boundaries) - len(self.complete))


@dataclass(frozen=True, slots=True)
class ExportFiles:
    """All files to write.

    Attributes:
        tensor_files: files with tensors, which are written in any order.
        make_index_files: takes the checksums of each tensor file, and returns the names and
            contents of the small files that are written last, in this order. The last of these
            files makes the checkpoint complete.
        left_out: one line for each name that the format cannot hold, with the reason.
    """

    tensor_files: tuple[OutputFile, ...]
    make_index_files: Callable[[Mapping[str, RangeChecksums]], Mapping[str, bytes]]
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TargetTensor:
    """A tensor to write.

    Attributes:
        name: name in the target.
        entry: the tensor's entry in the manifest of the source.
        dtype: dtype in the target.
    """

    name: str
    entry: TensorEntry
    dtype: str

    @property
    def part(self) -> TensorPart:
        """The whole tensor in the source; if it is tied, the tensor that it is tied to."""
        return TensorPart(
            self.entry.same_as or self.entry.name, Box.whole(self.entry.shape), self.dtype
        )


@dataclass(frozen=True, slots=True)
class ExportContents:
    """The tensors and values to write, and the options of their format.

    Attributes:
        source: the layout of the source, with the plain values to write.
        described: the same layout, with all plain values that `skip` does not match.
        tensors: the tensors, in the order of the source, including tied tensors.
        save_id: an id that is part of file names. If an export is repeated, it has the same id.
        model_key: the key of the model in the state, for formats that hold only a model.
        max_file: the largest number of bytes of tensors in a file.
    """

    source: Layout
    described: Layout
    tensors: tuple[TargetTensor, ...]
    save_id: str
    model_key: str
    max_file: int

    def model_tensors(self) -> list[TargetTensor]:
        """Return the tensors of the model, with names relative to it.

        Raises:
            StateError: no tensor is below the model key.
        """
        if not self.model_key:
            return list(self.tensors)
        start = f"{self.model_key}."
        found = [
            TargetTensor(each.name.removeprefix(start), each.entry, each.dtype)
            for each in self.tensors
            if each.name.startswith(start)
        ]
        if not found:
            raise StateError(
                describe_empty_model(self.model_key, [each.name for each in self.tensors])
            )
        return found

    def refuse_partial_model(self) -> None:
        """Raise an error if the source has only the trained part of the model.

        Raises:
            StateError: it has. The message says how to publish an adapter or a whole model.
        """
        start = f"{self.model_key}." if self.model_key else ""
        for module, names in self.described.frozen.items():
            frozen = [name for name in names if f"{module}.{name}".startswith(start)]
            if frozen:
                raise StateError(
                    f"{module}: the checkpoint has only the trained part of the model, without "
                    f"{len(frozen)} frozen tensors, for example {frozen[0]}, and would be taken "
                    "for a whole model: to publish an adapter of PEFT, pass to='peft' (on the "
                    "command line, --to peft); to publish the whole model, load the base and this "
                    f"checkpoint, save {{{module!r}: model}}, and export that; to write the "
                    f"trained part alone, pass skip=['{module}.{FROZEN}.*']"
                )

    def composites_of_model(self) -> list[ObjectEntry]:
        """Return the plain values that describe tensors of the model, which wrap other tensors."""
        start = f"{self.model_key}." if self.model_key else ""
        objects = self.source.objects
        return [o for o in objects if o.name.startswith(start) and describes_tensor(o.value)]

    def describe_left_out(self, written: Collection[str] = ()) -> tuple[str, ...]:
        """Describe what a format that holds only a model leaves out, in at most two lines.

        The lines list the first parts of names, so that users notice a wrong model key.

        Args:
            written: the names of the plain values that the format holds.
        """
        start = f"{self.model_key}." if self.model_key else ""
        tensors = [each.name for each in self.tensors if not each.name.startswith(start)]
        names = (each.name for each in self.source.objects if each.name not in written)
        values = [name for name in names if f".{FROZEN}." not in name]
        values += self.source.per_rank
        lines = []
        if tensors:
            lines.append(
                f"tensors below {_list_first_parts(tensors)} ({len(tensors)}): this format holds "
                f"only the model, which is below {self.model_key!r}"
            )
        if values:
            lines.append(
                f"plain values of {_list_first_parts(values)} ({len(values)}): this format holds "
                "only tensors"
            )
        return tuple(lines)


def describe_empty_model(model_key: str, names: Iterable[str]) -> str:
    """Return the error message for a model key without tensors."""
    return (
        f"model_key={model_key!r}: the checkpoint has no tensor below this name. Set model_key= "
        "to the key of the model, one of "
        f'{_list_first_parts(names)}; or to "" to write all tensors'
    )


def size_of(segment: Segment) -> int:
    """Return the size of a segment in bytes."""
    return len(segment) if isinstance(segment, bytes) else segment.size


def split_rows(part: TensorPart, max_bytes: int) -> list[TensorPart]:
    """Split a whole tensor into parts of whole rows, each of at most `max_bytes` or one row."""
    shape = part.box.shape
    if part.size <= max_bytes or not shape:
        return [part]
    rows, inner = shape[0], shape[1:]
    step = max(1, max_bytes // (part.size // rows))
    boxes = (
        Box((row, *(0,) * len(inner)), (min(step, rows - row), *inner))
        for row in range(0, rows, step)
    )
    return [TensorPart(part.name, box, part.dtype) for box in boxes]


def divide_among_files(
    items: Iterable[T], size: Callable[[T], int], max_bytes: int
) -> list[list[T]]:
    """Divide items among files, in order. An item larger than `max_bytes` gets a separate file."""
    files: list[list[T]] = [[]]
    remaining = max_bytes
    for item in items:
        if files[-1] and size(item) > remaining:
            files.append([])
            remaining = max_bytes
        files[-1].append(item)
        remaining -= size(item)
    return files


def _list_first_parts(names: Iterable[str]) -> str:
    first_parts = [*dict.fromkeys(name.split(".")[0][:60] for name in names)]
    return ", ".join(first_parts[:MOST_LISTED]) + (", …" if len(first_parts) > MOST_LISTED else "")
