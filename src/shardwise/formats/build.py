"""A saved state that was taken apart into leaves, and the names that shardwise gives them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shardwise.errors import StateError
from shardwise.formats.foreign import Foreign, ForeignFile, PieceTable, StoredArray
from shardwise.formats.optimizers import (
    GROUPS,
    Optimizer,
    Path,
    encoded_groups,
    find_optimizers,
)
from shardwise.formats.piece_tables import joined, lay
from shardwise.formats.plain import bytes_of, encode_plain, number_tensor
from shardwise.manifest.manifest import ObjectEntry, TensorEntry

CONTENT = "(content)"
"""The file that is none, for numbers and arrays that lie in pickles and are wanted as tensors."""


@dataclass(frozen=True, slots=True)
class Leaves:
    """Tensors and values of a nested state, by their paths in it.

    `tensors` are paths, dtypes and shapes, which `table` counts.
    """

    files: tuple[ForeignFile, ...]
    tensors: Sequence[tuple[Path, str, tuple[int, ...]]]
    table: PieceTable
    values: Mapping[Path, Any]
    left_out: Sequence[str] = ()


def united(*parts: Leaves) -> Leaves:
    """All of several; their arrays count the files of all of them."""
    files: list[ForeignFile] = []
    tensors: list[tuple[Path, str, tuple[int, ...]]] = []
    tables: list[PieceTable] = []
    values: dict[Path, Any] = {}
    left_out: list[str] = []
    for part in parts:
        pieces = replace(part.table.pieces, tensor=part.table.pieces.tensor + len(tensors))
        tables.append(replace(part.table, pieces=pieces))
        tensors += part.tensors
        files += part.files
        values |= part.values
        left_out += part.left_out
    return Leaves(tuple(files), tensors, joined(*tables), values, left_out)


def foreign_of(leaves: Leaves, format: str) -> Foreign:  # noqa: A002 - as it is called in Foreign
    """A state as shardwise would have named it.

    What hangs in the state keeps its path, parts joined by dots. An optimizer's state has the
    names of its parameters, `<optimizer>.<parameter>.<key>`, if they are known. A module whose
    parameters lie at the top, as in a state that is flat or beside an optimizer that has them, is
    called `model`.
    """
    paths = [path for path, _, _ in leaves.tensors]
    optimizers = find_optimizers((*paths, *leaves.values), leaves.values)
    names = _Names(optimizers, paths, leaves.values)
    builder = Builder(leaves.files, leaves.table, list(leaves.left_out))
    for path, dtype, shape in leaves.tensors:
        builder.add_tensor(names.of(path), dtype, shape)
    taken = {path for optimizer in optimizers for path in optimizer.taken}
    for path, value in leaves.values.items():
        if path in taken:
            continue
        if path[-1] == "step" and names.in_optimizer(path) and _is_number(value):
            builder.add_number(names.of(path), value)
        else:
            builder.add_value(names.of(path), value)
    for optimizer in optimizers:
        name = f"{names.root(optimizer)}.{GROUPS}"
        builder.add_groups(optimizer.groups, name)
        if lost := optimizer.ungrouped():
            builder.left_out.append(
                f"{name}: it has no hyperparameters of {len(lost)} parameters, such as {lost[0]}: "
                "stages of a pipeline overwrote each other's when this was saved"
            )
    return builder.build(format)


def beside(one: Foreign, other: Foreign) -> Foreign:
    """Both, of which the first has all its bytes in files."""
    pieces = other.table.pieces
    moved = replace(
        pieces, tensor=pieces.tensor + len(one.tensors), file=pieces.file + len(one.files)
    )
    return replace(
        one,
        files=(*one.files, *other.files),
        tensors=(*one.tensors, *other.tensors),
        table=joined(one.table, replace(other.table, pieces=moved)),
        objects=(*one.objects, *other.objects),
        left_out=(*one.left_out, *other.left_out),
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class _Names:
    """The name of each path of a state."""

    def __init__(
        self, optimizers: Sequence[Optimizer], tensors: Sequence[Path], values: Iterable[Path]
    ) -> None:
        self._keys = {
            path: (optimizer, key)
            for optimizer in optimizers
            for path, key in optimizer.keys.items()
        }
        outside = [path for path in tensors if path not in self._keys]
        flat = {path for path in outside if len(path) == 1}
        parameters = {(name,) for optimizer in optimizers for name in optimizer.parameters}
        alone = not optimizers and len(flat) == len(tensors) > 0 and all(map(_is_extra, values))
        self._module = flat if alone or flat & parameters else set()

    def of(self, path: Path) -> str:
        """The name of a leaf."""
        found = self._keys.get(path)
        if found is not None:
            optimizer, (parameter, key) = found
            return f"{self.root(optimizer)}.{parameter}.{key}"
        name = ".".join(map(str, path))
        module = path in self._module or (len(self._module) > 0 and _is_extra(path))
        return f"model.{name}" if module else name

    def in_optimizer(self, path: Path) -> bool:
        """Whether this is part of the state of a parameter."""
        return path in self._keys

    @staticmethod
    def root(optimizer: Optimizer) -> str:
        """The name of an optimizer; of one that is all of the state, `optimizer`."""
        return ".".join(map(str, optimizer.root)) or "optimizer"


def _is_extra(path: Path) -> bool:
    return len(path) == 1 and str(path[0]).endswith("_extra_state")


@dataclass(slots=True)
class Builder:
    """A `Foreign` that grows: what is added lies behind the tensors that `table` covers."""

    files: tuple[ForeignFile, ...]
    table: PieceTable
    left_out: list[str]
    tensors: list[TensorEntry] = field(default_factory=list)
    objects: list[ObjectEntry] = field(default_factory=list)
    _arrays: list[tuple[int, StoredArray]] = field(default_factory=list)
    _content: bytearray = field(default_factory=bytearray)

    def add_tensor(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        """The next of the tensors that `table` counts, all of which are added first."""
        self.tensors.append(TensorEntry(name, dtype, shape))

    def add_array(self, name: str, array: StoredArray) -> None:
        """A tensor that is an array of one of the files."""
        self._arrays.append((len(self.tensors), array))
        self.tensors.append(TensorEntry(name, array.dtype, array.shape))

    def add_number(self, name: str, value: float) -> None:
        """A number as a 0-d float32 tensor, which is what optimizers count steps with."""
        self.add_content(name, number_tensor(value))

    def add_content(self, name: str, tensor: torch.Tensor) -> None:
        """A tensor that lies in no file."""
        start, stride = len(self._content), tuple(tensor.stride())
        self._content += bytes_of(tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.add_array(
            name, StoredArray(len(self.files), start, dtype, tuple(tensor.shape), stride)
        )

    def add_value(self, name: str, value: object) -> None:
        """A plain value, with the arrays in it; or a line of `left_out`, if it is none."""
        try:
            plain = encode_plain(value, name)
        except StateError as error:
            self.left_out.append(str(error))
            return
        self.objects.append(ObjectEntry(name, plain.value))
        for where, array in plain.arrays.items():
            self.add_array(where, array)
        for where, tensor in plain.contents.items():
            self.add_content(where, tensor)

    def add_groups(self, groups: Iterable[Any], name: str) -> None:
        """The param groups of an optimizer; or a line of `left_out`."""
        try:
            self.objects.append(ObjectEntry(name, encoded_groups(groups, name)))
        except StateError as error:
            self.left_out.append(str(error))

    def build(self, format: str) -> Foreign:  # noqa: A002 - as it is called in Foreign
        """All of it."""
        files = self.files
        if self._content:
            files = (*files, ForeignFile(CONTENT, len(self._content), bytes(self._content)))
        return Foreign(
            format=format,
            files=files,
            tensors=tuple(self.tensors),
            table=joined(self.table, lay(self._arrays)),
            objects=tuple(self.objects),
            left_out=tuple(self.left_out),
        )
