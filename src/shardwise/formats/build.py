"""Builds the manifest of a foreign checkpoint from arrays, boxes, numbers and plain values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from shardwise.errors import FormatError, StateError
from shardwise.formats.containers.pickle_values import Name, Opaque, Record
from shardwise.formats.containers.torch_values import Storage
from shardwise.formats.foreign import Foreign, ForeignFile, PieceTable, StoredArray
from shardwise.formats.optimizers import ParamGroup, encode_param_groups
from shardwise.formats.piece_tables import joined, table_of_boxes
from shardwise.layout import Box
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import LARGEST, ObjectEntry, TensorEntry
from shardwise.state.objects import JsonValue, encode

CONTENT = "(content)"
"""The name of the file entry for numbers and numpy arrays whose bytes lie in a pickle."""
_NAMESPACES = ("argparse.Namespace", "types.SimpleNamespace")


class Builder:
    """Collects tensors, pieces and plain values of a foreign checkpoint.

    Args:
        files: the files that arrays count.

    Attributes:
        left_out: lines about content that is not taken.
        averages: as in `Foreign`.
    """

    def __init__(self, files: Iterable[ForeignFile]) -> None:
        self.files = tuple(files)
        self.left_out: list[str] = []
        self.averages: dict[str, tuple[str, ...]] = {}
        self._tensors: list[TensorEntry] = []
        self._numbers: dict[str, int] = {}
        self._objects: list[ObjectEntry] = []
        self._tables: dict[bool, list[PieceTable]] = {False: [], True: []}
        self._boxes: dict[bool, list[tuple[int, tuple[int, ...], StoredArray]]] = {
            False: [],
            True: [],
        }
        self._content = bytearray()
        self._starts: dict[bytes, int] = {}

    @classmethod
    def of(cls, foreign: Foreign) -> Builder:
        """Return a builder that adds to an existing manifest."""
        builder = cls(foreign.files)
        for entry in foreign.tensors:
            builder._numbers.setdefault(entry.name, len(builder._tensors))
            builder._tensors.append(entry)
        builder._objects += foreign.objects
        builder.add_table(foreign.table)
        builder.add_table(foreign.replicas, replica=True)
        builder.averages |= foreign.averages
        builder.left_out += foreign.left_out
        return builder

    def __contains__(self, name: str) -> bool:
        return name in self._numbers

    def entry(self, name: str) -> TensorEntry:
        """Return the entry of a tensor that was added."""
        return self._tensors[self._numbers[name]]

    def names(self) -> Iterable[str]:
        """Return the names of all tensors that were added."""
        return self._numbers.keys()

    def number(self, name: str) -> int:
        """Return the number of a tensor that was added."""
        return self._numbers[name]

    def add_tensor(
        self, name: str, dtype: str, shape: tuple[int, ...], *, same_as: str | None = None
    ) -> int:
        """Add a tensor without pieces, and return its number.

        `validate.checked` refuses a name that is added twice.

        Raises:
            FormatError: the shape is too large.
        """
        itemsize = DTYPES[dtype].itemsize if dtype in DTYPES else 1
        if math.prod(n for n in shape if n) * itemsize > LARGEST:
            raise FormatError(f"{name}: the shape {list(shape)} is absurdly large")
        self._numbers[name] = len(self._tensors)
        self._tensors.append(TensorEntry(name, dtype, tuple(shape), same_as=same_as))
        return len(self._tensors) - 1

    def tie(self, name: str, other: str) -> None:
        """Add a tensor that is the same as another one."""
        entry = self.entry(other)
        self.add_tensor(name, entry.dtype, entry.shape, same_as=entry.same_as or other)

    def add_table(self, table: PieceTable, *, replica: bool = False) -> None:
        """Add pieces of tensors; as replicas, if the tensors already have these pieces."""
        self._tables[replica].append(table)

    def add_array(self, name: str, array: StoredArray) -> int:
        """Add a tensor that is one array of a file, and return its number.

        Raises:
            FormatError: the shape is too large.
        """
        tensor = self.add_tensor(name, array.dtype, array.shape)
        self._boxes[False].append((tensor, (0,) * len(array.shape), array))
        return tensor

    def add_box(
        self,
        tensor: int,
        offset: tuple[int, ...],
        array: StoredArray,
        box: Box | None = None,
        *,
        replica: bool = False,
    ) -> None:
        """Add a box of an array, by default all of it, as the piece at `offset` of a tensor."""
        if box is not None:
            steps = sum(o * step for o, step in zip(box.offset, array.stride, strict=True))
            start = array.start + steps * array.itemsize
            array = StoredArray(array.file, start, array.dtype, box.shape, array.stride)
        self._boxes[replica].append((tensor, offset, array))

    def content(self, tensor: torch.Tensor) -> StoredArray:
        """Return an array for a tensor that lies in no file; equal bytes are kept once."""
        data = bytes_of(tensor)
        start = self._starts.setdefault(data, len(self._content))
        if start == len(self._content):
            self._content += data
        dtype = str(tensor.dtype).removeprefix("torch.")
        return StoredArray(
            len(self.files), start, dtype, tuple(tensor.shape), tuple(tensor.stride())
        )

    def add_number(self, name: str, value: float) -> None:
        """Add a number as a 0-d float32 tensor, the type that optimizers count steps with.

        Raises:
            FormatError: the number is too large.
        """
        self.add_array(name, self.content(number_tensor(value)))

    def add_value(self, name: str, value: object) -> None:
        """Add a plain value and the arrays in it; a lone array becomes a tensor.

        A value that has no plain form adds a line to `left_out`.
        """
        if isinstance(value, StoredArray):
            self.add_array(name, value)
            return
        try:
            plain = encode_plain(value, name)
        except StateError as error:
            self.left_out.append(str(error))
            return
        self._objects.append(ObjectEntry(name, plain.value))
        for where, array in plain.arrays.items():
            self.add_array(where, array)
        for where, tensor in plain.contents.items():
            self.add_array(where, self.content(tensor))

    def add_groups(self, groups: Iterable[ParamGroup], name: str) -> None:
        """Add the param groups of an optimizer, or a line to `left_out`."""
        try:
            self._objects.append(ObjectEntry(name, encode_param_groups(groups, name)))
        except StateError as error:
            self.left_out.append(str(error))

    def build(
        self,
        format: str,  # noqa: A002 - the name that `Foreign` has for it
        *,
        step: int | None = None,
        world_size: int = 1,
        replica_names: tuple[str, ...] = (),
    ) -> Foreign:
        """Return the manifest of everything that was added.

        Raises:
            FormatError: the elements of an array share bytes too often.
        """
        files = self.files
        if self._content:
            files = (*files, ForeignFile(CONTENT, len(self._content), bytes(self._content)))
        table, replicas = (
            joined(*self._tables[replica], table_of_boxes(self._boxes[replica]))
            for replica in (False, True)
        )
        return Foreign(
            format=format,
            files=files,
            tensors=tuple(self._tensors),
            table=table,
            replicas=replicas,
            replica_names=replica_names,
            averages=dict(self.averages),
            objects=tuple(self._objects),
            step=step,
            world_size=world_size,
            left_out=tuple(self.left_out),
        )


@dataclass(frozen=True, slots=True)
class Plain:
    """An encoded value, and the arrays that it refers to by name.

    Attributes:
        arrays: arrays of files.
        contents: numpy arrays, whose bytes lie in a pickle.
    """

    value: JsonValue
    arrays: Mapping[str, StoredArray]
    contents: Mapping[str, torch.Tensor]


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor in memory, row-major."""
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def number_tensor(value: float) -> torch.Tensor:
    """Return a number as a 0-d float32 tensor, the type that optimizers count steps with.

    Raises:
        FormatError: the number is too large.
    """
    try:
        return torch.tensor(float(value), dtype=torch.float32, device="cpu")
    except OverflowError as error:
        raise FormatError("a number in an optimizer's state is too large for a float") from error


def encode_plain(value: object, name: str) -> Plain:
    """Encode a value as `shardwise.state.objects` does.

    Namespaces become dicts; other objects become dicts with the key `class`.

    Raises:
        StateError: a part of it has no plain form.
    """
    encoder = _Encoder(name)
    encoded = encode(encoder.plain(value), name, encoder.give)
    return Plain(encoded, encoder.arrays, encoder.contents)


@dataclass(slots=True)
class _Encoder:
    """Replaces stored arrays by meta tensors, which `encode` hands back with their names."""

    name: str
    arrays: dict[str, StoredArray] = field(default_factory=dict)
    contents: dict[str, torch.Tensor] = field(default_factory=dict)
    stored: dict[int, tuple[torch.Tensor, StoredArray]] = field(default_factory=dict)

    def give(self, where: str, array: torch.Tensor | np.ndarray[Any, Any]) -> None:
        if isinstance(array, np.ndarray):
            self.contents[where] = torch.from_numpy(np.array(array, order="C"))
        else:
            self.arrays[where] = self.stored[id(array)][1]

    def _stand_in(self, array: StoredArray) -> torch.Tensor:
        tensor = torch.empty(array.shape, dtype=getattr(torch, array.dtype), device="meta")
        self.stored[id(tensor)] = tensor, array  # holds the tensor, so that its id stays unique
        return tensor

    def plain(self, value: Any) -> Any:
        if isinstance(value, StoredArray):
            return self._stand_in(value)
        if isinstance(value, Storage):
            return self._stand_in(
                StoredArray(value.file, value.start, "uint8", (value.size,), (1,))
            )
        if isinstance(value, Record):
            fields = {key: self.plain(each) for key, each in value.fields.items()}
            if value.name in _NAMESPACES:
                return fields
            args = {"args": [self.plain(each) for each in value.args]} if value.args else {}
            return {"class": value.name, **args, **fields}
        if isinstance(value, Name):
            return {"class": value.name}
        if isinstance(value, Opaque):
            raise StateError(f"{self.name}: {value.name} is not read from pickles")
        if type(value) in (list, tuple):
            return type(value)(self.plain(each) for each in value)
        if isinstance(value, dict):
            made = type(value)()
            made.update({key: self.plain(each) for key, each in value.items()})
            return made
        return value


def same_plain(value: object, other: object) -> bool:
    """Return whether two values are equal; values without a plain form count as equal."""
    if value is other:
        return True
    try:
        one, two = encode_plain(value, ""), encode_plain(other, "")
    except StateError:
        return True
    known, found = ({k: bytes_of(t) for k, t in each.contents.items()} for each in (one, two))
    return (one.value, one.arrays, known) == (two.value, two.arrays, found)


def unlike_values(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each name whose values differ from the first rank's, which are taken."""
    found = []
    for name in dict.fromkeys(name for values in ranks for name in values):
        if name not in ranks[0]:
            found.append(f"{name}: missing in the first rank's file, whose values are taken")
            continue
        having = [values for values in ranks[1:] if name in values]
        others = sum(not same_plain(values[name], ranks[0][name]) for values in having)
        if others:
            found.append(f"{name}: {others} ranks have other values; the first rank's is taken")
    return found
