"""Build the description of a foreign checkpoint from arrays, boxes, numbers and plain values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from shardwise.errors import FormatError, StateError
from shardwise.formats.containers.pickle_values import (
    AllowedCallable,
    PickledInstance,
    UnknownObject,
)
from shardwise.formats.containers.torch_values import Storage
from shardwise.formats.foreign import Foreign, ForeignFile, PieceTable, StoredArray
from shardwise.formats.optimizers import ParamGroup, encode_param_groups
from shardwise.formats.piece_tables import join_tables, table_of_boxes
from shardwise.layout import Box
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import LARGEST_INTEGER, ObjectEntry, TensorEntry
from shardwise.state.plain_values import JsonValue, encode

CONTENT_FILE = "(content)"
"""The name of the `ForeignFile` that contains the bytes of numbers and numpy arrays in pickles."""
_NAMESPACE_CLASSES = ("argparse.Namespace", "types.SimpleNamespace")


class Builder:
    """Collects tensors, pieces and plain values of a foreign checkpoint.

    Args:
        files: the files of the checkpoint; `StoredArray.file` is an index into them.

    Attributes:
        files: the files.
        left_out: a line for each thing that was not read, with the reason.
        averages: for each tensor that is a mean, the names of its terms; see `Foreign.averages`.
    """

    def __init__(self, files: Iterable[ForeignFile]) -> None:
        self.files = tuple(files)
        self.left_out: list[str] = []
        self.averages: dict[str, tuple[str, ...]] = {}
        self._tensors: list[TensorEntry] = []
        self._index: dict[str, int] = {}
        self._objects: list[ObjectEntry] = []
        # The keys of both dicts say whether the pieces are replicas.
        self._tables: dict[bool, list[PieceTable]] = {False: [], True: []}
        self._boxes: dict[bool, list[tuple[int, tuple[int, ...], StoredArray]]] = {
            False: [],
            True: [],
        }
        self._content = bytearray()
        self._content_starts: dict[bytes, int] = {}

    @classmethod
    def from_foreign(cls, foreign: Foreign) -> Builder:
        """Return a builder that adds to an existing description."""
        builder = cls(foreign.files)
        for entry in foreign.tensors:
            builder._index.setdefault(entry.name, len(builder._tensors))
            builder._tensors.append(entry)
        builder._objects += foreign.objects
        builder.add_table(foreign.table)
        builder.add_table(foreign.replicas, replica=True)
        builder.averages |= foreign.averages
        builder.left_out += foreign.left_out
        return builder

    def __contains__(self, name: str) -> bool:
        return name in self._index

    def entry(self, name: str) -> TensorEntry:
        """Return the entry of a tensor that was added."""
        return self._tensors[self._index[name]]

    def tensor_names(self) -> Iterable[str]:
        """Return the names of all tensors that were added."""
        return self._index.keys()

    def index_of(self, name: str) -> int:
        """Return the index of a tensor that was added."""
        return self._index[name]

    def add_tensor(
        self, name: str, dtype: str, shape: tuple[int, ...], *, same_as: str | None = None
    ) -> int:
        """Add a tensor without pieces, and return its index.

        `validate_foreign` refuses a name that is added twice.

        Raises:
            FormatError: the shape is too large.
        """
        itemsize = DTYPES[dtype].itemsize if dtype in DTYPES else 1
        if math.prod(n for n in shape if n) * itemsize > LARGEST_INTEGER:
            raise FormatError(
                f"{name}: a tensor of shape {list(shape)} is larger than {LARGEST_INTEGER} bytes: "
                "the checkpoint is damaged: copy it again from an intact source"
            )
        self._index[name] = len(self._tensors)
        self._tensors.append(TensorEntry(name, dtype, tuple(shape), same_as=same_as))
        return len(self._tensors) - 1

    def add_tie(self, name: str, other: str) -> None:
        """Add a name of a tensor that was added under the name `other`."""
        entry = self.entry(other)
        self.add_tensor(name, entry.dtype, entry.shape, same_as=entry.same_as or other)

    def add_table(self, table: PieceTable, *, replica: bool = False) -> None:
        """Add pieces of tensors, or with `replica`, further copies of pieces."""
        self._tables[replica].append(table)

    def add_array(self, name: str, array: StoredArray) -> int:
        """Add a tensor that is one array of a file, and return its index.

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
        """Add an array as a piece of a tensor.

        Args:
            tensor: the index of the tensor.
            offset: the offset of the piece in the tensor.
            array: the array.
            box: the part of the array to add; None for the whole array.
            replica: whether the tensor already has a piece with the same bytes.
        """
        if box is not None:
            first_element = sum(o * step for o, step in zip(box.offset, array.stride, strict=True))
            start = array.start + first_element * array.itemsize
            array = StoredArray(array.file, start, array.dtype, box.shape, array.stride)
        self._boxes[replica].append((tensor, offset, array))

    def add_content(self, tensor: torch.Tensor) -> StoredArray:
        """Store a tensor in the description; return its array. Equal bytes are stored once."""
        data = bytes_of_tensor(tensor)
        start = self._content_starts.setdefault(data, len(self._content))
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
        self.add_array(name, self.add_content(make_number_tensor(value, name)))

    def add_value(self, name: str, value: object) -> None:
        """Add a plain value, and the arrays in it as tensors.

        If the value itself is an array, add only the tensor `name`. If the value has no plain form,
        add a line to `left_out`.
        """
        if isinstance(value, StoredArray):
            self.add_array(name, value)
            return
        try:
            plain = encode_plain(value, name)
        except StateError as error:
            self.left_out.append(str(error))
            return
        if name not in plain.contents:
            self._objects.append(ObjectEntry(name, plain.value))
        for path, array in plain.arrays.items():
            self.add_array(path, array)
        for path, tensor in plain.contents.items():
            self.add_array(path, self.add_content(tensor))

    def add_groups(self, groups: Iterable[ParamGroup], name: str) -> None:
        """Add an optimizer's param groups, or a line to `left_out` if they have no plain form."""
        try:
            self._objects.append(ObjectEntry(name, encode_param_groups(groups, name)))
        except StateError as error:
            self.left_out.append(str(error))

    def build(
        self,
        format: str,  # noqa: A002 - the name in `Foreign`
        *,
        step: int | None = None,
        world_size: int = 1,
        replica_names: tuple[str, ...] = (),
    ) -> Foreign:
        """Return the description of everything that was added.

        Args:
            format: the name of the format, for people.
            step: the training step, if known.
            world_size: the number of ranks that wrote the checkpoint.
            replica_names: the name of the array of each replica; see `Foreign.replica_names`.

        Raises:
            FormatError: the elements of an array share bytes too often.
        """
        files = self.files
        if self._content:
            files = (*files, ForeignFile(CONTENT_FILE, len(self._content), bytes(self._content)))
        table, replicas = (
            join_tables(
                *self._tables[replica],
                table_of_boxes(self._boxes[replica], lambda i: self._tensors[i].name),
            )
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
class PlainValue:
    """An encoded value, and the arrays that the value refers to by name.

    Attributes:
        value: the value, as `shardwise.state.plain_values` encodes it.
        arrays: arrays in files, by name.
        contents: numpy arrays from pickles, by name.
    """

    value: JsonValue
    arrays: Mapping[str, StoredArray]
    contents: Mapping[str, torch.Tensor]


def bytes_of_tensor(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor in memory, row-major."""
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def make_number_tensor(value: float, name: str) -> torch.Tensor:
    """Return a number as a 0-d float32 tensor, the type that optimizers count steps with.

    Args:
        value: the number.
        name: the name of the tensor, for messages.

    Raises:
        FormatError: the number exceeds the range of a float.
    """
    try:
        return torch.tensor(float(value), dtype=torch.float32, device="cpu")
    except OverflowError as error:
        raise FormatError(
            f"{name}: the number {str(value)[:40]} is too large for a float: the checkpoint is "
            "damaged: copy it again from an intact source"
        ) from error


def encode_plain(value: object, name: str) -> PlainValue:
    """Encode a value as `shardwise.state.plain_values` does.

    Namespaces become dicts; other objects become dicts with the key `class`.

    Raises:
        StateError: a part of the value has no plain form.
    """
    encoder = _Encoder(name)
    encoded = encode(encoder.convert(value), name, encoder.record_array)
    return PlainValue(encoded, encoder.arrays, encoder.contents)


@dataclass(slots=True)
class _Encoder:
    """Replaces stored arrays with meta tensors, which `encode` returns with their names.

    Attributes:
        name: the name of the value, for messages.
        arrays: the stored arrays in the value, by name.
        contents: the numpy arrays in the value, by name.
        stored_by_id: for the id of each meta tensor, its stored array.
    """

    name: str
    arrays: dict[str, StoredArray] = field(default_factory=dict)
    contents: dict[str, torch.Tensor] = field(default_factory=dict)
    stored_by_id: dict[int, tuple[torch.Tensor, StoredArray]] = field(default_factory=dict)

    def record_array(self, path: str, array: torch.Tensor | np.ndarray[Any, Any]) -> None:
        if isinstance(array, np.ndarray):
            self.contents[path] = torch.from_numpy(np.array(array, order="C"))
        else:
            self.arrays[path] = self.stored_by_id[id(array)][1]

    def _make_meta_tensor(self, array: StoredArray) -> torch.Tensor:
        tensor = torch.empty(array.shape, dtype=getattr(torch, array.dtype), device="meta")
        self.stored_by_id[id(tensor)] = (
            tensor,
            array,
        )  # the tensor is kept, so that its id stays unique
        return tensor

    def convert(self, value: Any) -> Any:
        if isinstance(value, StoredArray):
            return self._make_meta_tensor(value)
        if isinstance(value, Storage):
            return self._make_meta_tensor(
                StoredArray(value.file, value.start, "uint8", (value.size,), (1,))
            )
        if isinstance(value, PickledInstance):
            fields = {key: self.convert(item) for key, item in value.fields.items()}
            if value.name in _NAMESPACE_CLASSES:
                return fields
            args = {"args": [self.convert(item) for item in value.args]} if value.args else {}
            return {"class": value.name, **args, **fields}
        if isinstance(value, AllowedCallable):
            return {"class": value.name}
        if isinstance(value, UnknownObject):
            raise StateError(f"{self.name}: {value.reason}")
        if type(value) in (list, tuple):
            return type(value)(self.convert(item) for item in value)
        if isinstance(value, dict):
            new_dict = type(value)()
            new_dict.update({key: self.convert(item) for key, item in value.items()})
            return new_dict
        return value


def are_plain_values_equal(value: object, other: object) -> bool:
    """Return whether two values are equal. Values without a plain form count as equal."""
    if value is other:
        return True
    try:
        plain, other_plain = encode_plain(value, ""), encode_plain(other, "")
    except StateError:
        return True
    contents, other_contents = (
        {name: bytes_of_tensor(tensor) for name, tensor in each.contents.items()}
        for each in (plain, other_plain)
    )
    return (plain.value, plain.arrays, contents) == (
        other_plain.value,
        other_plain.arrays,
        other_contents,
    )


def describe_differing_values(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each name whose values differ between ranks.

    Args:
        ranks: for each rank, its values by name. Readers take the values of the first rank.
    """
    lines = []
    for name in dict.fromkeys(name for values in ranks for name in values):
        if name not in ranks[0]:
            lines.append(f"{name}: missing in the first rank's file, whose values are taken")
            continue
        other_values = [values[name] for values in ranks[1:] if name in values]
        differing_count = sum(
            not are_plain_values_equal(other, ranks[0][name]) for other in other_values
        )
        if differing_count:
            lines.append(
                f"{name}: {differing_count} ranks have other values; the first rank's is taken"
            )
    return lines
