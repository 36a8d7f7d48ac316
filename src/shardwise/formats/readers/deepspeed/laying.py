"""A checkpoint as it is put together: tensors, pieces in columns, plain values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from shardwise.errors import FormatError, StateError
from shardwise.formats.foreign import Foreign, ForeignFile, PieceTable, StoredArray
from shardwise.formats.optimizers import Group, encoded_groups
from shardwise.formats.piece_tables import joined
from shardwise.formats.plain import bytes_of, encode_plain, number_tensor
from shardwise.formats.readers.deepspeed.placements import Placement, whole
from shardwise.layout import Box
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import LARGEST, ObjectEntry, TensorEntry
from shardwise.manifest.table import Int, Pieces

Shape = tuple[int, ...]


class Laying:
    """Tensors by name, and where their bytes lie; each name once.

    Args:
        files: that arrays count.
    """

    def __init__(self, files: Iterable[ForeignFile]) -> None:
        self._files = list(files)
        self._contents: dict[bytes, int] = {}
        self._entries: list[TensorEntry] = []
        self._numbers: dict[str, int] = {}
        self._laid: dict[bool, list[PieceTable]] = {False: [], True: []}
        self._objects: list[ObjectEntry] = []
        self.averages: dict[str, tuple[str, ...]] = {}
        self.left_out: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self._numbers

    def entry(self, name: str) -> TensorEntry:
        """What is known of a tensor that is there."""
        return self._entries[self._numbers[name]]

    def below(self, prefix: str) -> list[str]:
        """The names of tensors that begin so."""
        return [name for name in self._numbers if name.startswith(prefix)]

    def add(self, name: str, dtype: str, shape: Shape) -> int:
        """Declare a tensor; its number.

        Raises:
            FormatError: there is another of this name, or the shape is absurd.
        """
        if name in self._numbers:
            raise FormatError(f"{name}: there are two of this name")
        if math.prod(n for n in shape if n) * DTYPES[dtype].itemsize > LARGEST:
            raise FormatError(f"{name}: absurd shape {list(shape)}")
        self._numbers[name] = len(self._entries)
        self._entries.append(TensorEntry(name, dtype, tuple(shape)))
        return self._numbers[name]

    def tie(self, name: str, other: str) -> None:
        """Declare a tensor that is the same as another."""
        entry = self.entry(other)
        self.add(name, entry.dtype, entry.shape)
        self._entries[-1] = TensorEntry(
            name, entry.dtype, entry.shape, same_as=entry.same_as or other
        )

    def lay(self, laid: PieceTable, *, replica: bool = False) -> None:
        """Lay pieces, in columns; as replicas, if others lie there already."""
        self._laid[replica].append(laid)

    def array(self, name: str, array: StoredArray) -> None:
        """Declare a tensor that is one array; or one more replica of it, if it is there.

        Raises:
            FormatError: it is there, of another dtype or shape.
        """
        self.shards(name, [array], whole(name, [array.shape]))

    def shards(self, name: str, arrays: Sequence[StoredArray], placement: Placement) -> None:
        """Declare a tensor that ranks have shards of; or more replicas of it, if it is there.

        Raises:
            FormatError: dtypes differ; or it is there, of another dtype or shape.
        """
        dtype = arrays[0].dtype
        found = {f"{array.dtype}" for array in arrays}
        replica = name in self
        if replica and (self.entry(name).dtype, self.entry(name).shape) != (dtype, placement.shape):
            found.add(f"{self.entry(name).dtype} {list(self.entry(name).shape)}")
        if len(found) > 1:
            raise FormatError(f"{name}: ranks differ: {', '.join(sorted(found))}")
        tensors = self.declare(name, dtype, placement)
        for rank, (array, boxes) in enumerate(zip(arrays, placement.parts, strict=True)):
            again = replica or (placement.replicated and rank > 0)
            for box, there in boxes:
                if box.size:
                    self._lay_part(int(tensors[rank]), array, box, there, again)

    def declare(self, name: str, dtype: str, placement: Placement) -> Int:
        """Declare a tensor, unless it is there: its number, or of each rank that of its own."""
        if name not in self:
            self.add(name, dtype, placement.shape)
        if not placement.averaged:
            return np.full(len(placement.parts), self._numbers[name])
        hidden = tuple(f"{name}.of_rank_{rank}" for rank in range(len(placement.parts)))
        if name not in self.averages:
            self.averages[name] = hidden
            for each in hidden:
                self.add(each, dtype, placement.shape)
        return np.array([self._numbers[each] for each in hidden], np.int64)

    def scalars(self, names: Sequence[str], arrays: Sequence[StoredArray]) -> None:
        """Declare tensors that are each the first of these 0-d arrays; others are replicas."""
        first = arrays[0]
        tensors = [self.add(name, first.dtype, first.shape) for name in names if name not in self]
        if not tensors or any(array.shape for array in arrays):
            return
        none = np.zeros((len(tensors), 0), np.int64)
        file, start = (np.full(len(tensors), n, np.int64) for n in (first.file, first.start))
        pieces = Pieces(np.array(tensors, np.int64), file, start, none, none)
        self.lay(PieceTable(pieces, none))
        for array in arrays[1:]:
            self._lay_part(tensors[0], array, Box((), ()), (), True)

    def _lay_part(
        self, tensor: int, array: StoredArray, box: Box, there: Shape, replica: bool
    ) -> None:
        steps = zip(box.offset, array.stride, strict=True)
        start = array.start + DTYPES[array.dtype].itemsize * sum(n * step for n, step in steps)
        one = (np.array([n], np.int64) for n in (tensor, array.file, start))
        rows = (np.array([n], np.int64).reshape(1, -1) for n in (there, box.shape))
        stride = np.array(array.stride, np.int64).reshape(1, -1)
        self.lay(PieceTable(Pieces(*one, *rows), stride), replica=replica)

    def number(self, value: float) -> StoredArray:
        """A number that lies in no file as a tensor: as a 0-d float32 tensor."""
        return self._content(number_tensor(value))

    def _content(self, tensor: torch.Tensor) -> StoredArray:
        content = bytes_of(tensor)
        if content not in self._contents:
            self._contents[content] = len(self._files)
            name = f"(content {len(self._contents)})"
            self._files.append(ForeignFile(name, len(content), content))
        dtype, file = str(tensor.dtype).removeprefix("torch."), self._contents[content]
        return StoredArray(file, 0, dtype, tuple(tensor.shape), tuple(tensor.stride()))

    def value(self, name: str, value: object) -> None:
        """Declare a plain value, with the arrays in it as tensors; a lone array is a tensor."""
        if isinstance(value, StoredArray):
            self.array(name, value)
            return
        try:
            plain = encode_plain(value, name)
        except StateError as error:
            self.left_out.append(str(error))
            return
        for each, array in plain.arrays.items():
            self.array(each, array)
        for each, tensor in plain.contents.items():
            self.array(each, self._content(tensor))
        self._objects.append(ObjectEntry(name, plain.value))

    def groups(self, name: str, groups: Iterable[Group]) -> None:
        """Declare the param groups of an optimizer."""
        try:
            self._objects.append(ObjectEntry(name, encoded_groups(groups, name)))
        except StateError as error:
            self.left_out.append(str(error))

    def finish(self, kind: str, *, step: int | None, world_size: int) -> Foreign:
        """All that was laid."""
        return Foreign(
            format=kind,
            files=tuple(self._files),
            tensors=tuple(self._entries),
            table=joined(*self._laid[False]),
            replicas=joined(*self._laid[True]),
            averages=dict(self.averages),
            objects=tuple(self._objects),
            step=step,
            world_size=world_size,
            left_out=tuple(self.left_out),
        )
