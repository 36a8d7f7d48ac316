"""Build the layout of a foreign checkpoint from arrays, boxes, numbers and plain values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch

from shardwise.kernel.boxes import Box
from shardwise.kernel.boxes.box import IntArray
from shardwise.kernel.errors import FormatError, StateError
from shardwise.kernel.manifest.dtypes import DTYPES
from shardwise.kernel.manifest.layout import Layout, StoredFile
from shardwise.kernel.manifest.manifest import LARGEST_INTEGER, ObjectEntry, TensorEntry
from shardwise.kernel.manifest.pieces import Pieces, Runs
from shardwise.parts.formats.file_tree import FileTree
from shardwise.parts.formats.foreign import (
    StoredArray,
    StoredComposite,
    StoredPart,
    StoredTensor,
    hide_terms,
    pieces_of_boxes,
    pieces_of_ranges,
)
from shardwise.parts.formats.merge_ranks import merge_ranks, select_sample
from shardwise.parts.formats.nested import STORED, NestedState, name_leaves, name_parameters
from shardwise.parts.formats.optimizers import ParamGroup, merge_param_groups
from shardwise.parts.formats.stored_composites import describe
from shardwise.parts.formats.values import (
    are_plain_values_equal,
    bytes_of_tensor,
    encode_plain,
    read_small,
)
from shardwise.ports.binding import JsonValue, encode

INLINE_FILE = "(content)"
"""The name of the `StoredFile` that contains the bytes of numbers and numpy arrays in pickles."""


_Box: TypeAlias = tuple[int, int, tuple[int, ...], StoredArray]
"""The index of a tensor, the index of a file, the offset of a box, and its array."""
FlatTensor: TypeAlias = tuple[str, tuple[int, ...], tuple[tuple[Box, tuple[int, ...]], ...]]
"""A tensor's name; the shape of the part of it that was flattened; and boxes of this part.

Each box has the offset in the tensor at which it belongs. Without boxes, the part is the whole
tensor.
"""


class Builder:
    """Collects the tensors, pieces and plain values of a foreign checkpoint.

    Args:
        tree: the files of the checkpoint.

    Attributes:
        tree: the files.
        step: the training step. Readers may assign any value from a file: if it is not an integer
            of at least 0, the step counts as unknown.
        world_size: the number of ranks that wrote the checkpoint; 1 if unknown.
        missing_files: files that this format usually has but this checkpoint lacks. The key is the
            name of the file's content in the state: `{"optimizer": "optimizer.pt"}`.
        left_out: a line for each thing that was not read, with the reason.
    """

    def __init__(self, tree: FileTree) -> None:
        self.step: object = None
        self.world_size = 1
        self.missing_files: dict[str, str] = {}
        self.left_out: list[str] = []
        self.tree = tree
        self._files: dict[str, int] = {}
        self._tensors: list[TensorEntry] = []
        self._index: dict[str, int] = {}
        self._terms: dict[str, tuple[str, ...]] = {}
        self._objects: list[ObjectEntry] = []
        # The keys of these dicts say whether the pieces are replicas.
        self._tables: dict[bool, list[Pieces]] = {False: [], True: []}
        self._boxes: dict[bool, list[_Box]] = {False: [], True: []}
        self._ranges: dict[bool, list[Pieces]] = {False: [], True: []}
        self._content = bytearray()
        self._content_starts: dict[bytes, int] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._index

    def entry(self, name: str) -> TensorEntry:
        """Return the dtype and the shape of a tensor that was added."""
        return self._tensors[self._index[name]]

    def tensor_names(self) -> Iterable[str]:
        """Return the names of all tensors that were added."""
        return self._index.keys()

    def add_tensor(
        self, name: str, dtype: str, shape: tuple[int, ...], *, same_as: str | None = None
    ) -> None:
        """Add a tensor, whose boxes follow. A name that is added twice is refused at the end.

        Raises:
            FormatError: the shape is too large.
        """
        itemsize = DTYPES[dtype].itemsize if dtype in DTYPES else 1
        if min(shape, default=0) < 0 or math.prod(filter(None, shape)) * itemsize > LARGEST_INTEGER:
            raise FormatError(
                f"{name}: a tensor cannot have shape {list(shape)}, or is larger than 2**62 bytes: "
                "the checkpoint is damaged: copy it again from an intact source"
            )
        self._index[name] = len(self._tensors)
        self._tensors.append(TensorEntry(name, dtype, tuple(shape), same_as=same_as))

    def add_array(self, name: str, array: StoredArray | StoredTensor | StoredComposite) -> None:
        """Add a tensor and all its elements.

        A tensor that wraps others becomes these, and a plain value that describes it.

        Raises:
            FormatError: the shape is too large, or an inner tensor is a part on one rank, or a part
                of what the tensor keeps besides its inner tensors has no plain form.
        """
        if isinstance(array, StoredComposite):
            self._add_composite(name, array)
            return
        self.add_tensor(name, array.dtype, array.shape)
        if isinstance(array, StoredArray):
            self.add_box(name, (0,) * len(array.shape), array)
            return
        for replica, boxes in ((False, array.boxes), (True, array.replicas)):
            for offset, part in boxes:
                self.add_box(name, offset, part, replica=replica)

    def _add_composite(
        self, name: str, tensor: StoredComposite, tied_to: str | None = None
    ) -> None:
        """Add a tensor that wraps others, and the plain value that describes it.

        Raises:
            FormatError: a part of its context has no plain form, and is not to be skipped.
        """
        try:
            self._objects.append(ObjectEntry(name, describe(name, tensor)))
        except StateError as error:
            if not self.tree.skip_unknown:
                raise FormatError(f"{error}; or leave it out with skip_unknown=True") from error
            self.left_out.append(str(error))
            return
        self._add_inner(name, tensor, tied_to)

    def _add_inner(self, name: str, tensor: StoredComposite, tied_to: str | None = None) -> None:
        """Add the inner tensors of a tensor, or ties to those of another one."""
        for key, each in tensor.inner:
            full_name = f"{name}.{key}"
            if isinstance(each, StoredComposite):
                self._add_inner(full_name, each, tied_to and f"{tied_to}.{key}")
            elif tied_to is not None:
                self.add_tie(full_name, f"{tied_to}.{key}")
            elif isinstance(each, StoredPart):
                raise FormatError(
                    f"{full_name}: only one rank's part: open the directory with all files"
                )
            else:
                self.add_array(full_name, each)

    def add_box(
        self,
        name: str,
        offset: tuple[int, ...],
        array: StoredArray,
        part: Box | None = None,
        *,
        replica: bool = False,
    ) -> None:
        """Add a box of a tensor.

        Args:
            name: the name of the tensor.
            offset: the offset of the box in the tensor.
            array: the array with the elements of the box.
            part: the part of the array that has these elements; None for the whole array.
            replica: whether the tensor already has these elements. Loads compare both copies.
        """
        array = array if part is None else array.part(part.offset, part.shape)
        numbers = (array.start, *offset, *array.shape, *array.stride)
        if min(numbers) < 0 or max(numbers) > LARGEST_INTEGER or len(offset) != len(array.shape):
            raise FormatError(
                f"{name}: the box at {list(offset)} has shape {list(array.shape)} and strides "
                f"{list(array.stride)} at byte {array.start} of {array.file[:200]!r}: the "
                "checkpoint is damaged: copy it again from an intact source"
            )
        row = self._index[name], self.add_file(array.file), offset, array
        self._boxes[replica].append(row)

    def add_flat_range(self, name: str, start: int, array: StoredArray) -> None:
        """Add a range of a flattened tensor.

        Args:
            name: the name of the tensor.
            start: the first element of the range.
            array: the elements: a contiguous array of one dimension.

        Raises:
            FormatError: the range is not inside of the tensor, or the array is not contiguous.
        """
        shape, stop = self.entry(name).shape, start + math.prod(array.shape)
        if stop > math.prod(shape) or start < 0:
            raise FormatError(
                f"{name}: elements {start} to {stop} are not a range of a flat tensor of shape "
                f"{list(shape)}: copy all files of one save from an intact source"
            )
        if not array.is_flat:
            raise _not_flat_error(name, array)
        for offset, part in array.boxes_in(shape, start):
            self.add_box(name, offset, part)

    def add_flat_ranges(
        self,
        tensors: Sequence[FlatTensor],
        replicas: Sequence[bool],
        arrays: Sequence[StoredArray | None],
        ranges: tuple[IntArray, IntArray, IntArray, IntArray, IntArray],
    ) -> None:
        """Add ranges of flattened tensors, or of flattened parts of tensors.

        Args:
            tensors: the flattened tensors, or parts of tensors.
            replicas: for each tensor, whether it already has these elements.
            arrays: the flat arrays with the elements, of one dtype. Where an array is None, its
                ranges are left out.
            ranges: five columns: the index in `tensors`, the index in `arrays`, the start and the
                stop of the range in the flattened tensor, and its start in the array. Starts and
                stops count elements.

        Raises:
            FormatError: an array is not contiguous.
        """
        tensor_of_range, array_of_range = ranges[:2]
        known = [array for array in arrays if array is not None]
        for index, array in enumerate(arrays):
            if array is not None and not array.is_flat:
                holders = tensor_of_range[array_of_range == index]
                raise _not_flat_error(tensors[holders[0] if len(holders) else 0][0], array)
        files = np.array([-1 if a is None else self.add_file(a.file) for a in arrays], np.int64)
        starts = np.array([0 if a is None else a.start for a in arrays], np.int64)
        blocks = [(self._index[name], shape, parts) for name, shape, parts in tensors]
        is_replica = np.array(replicas, bool)[tensor_of_range]
        for replica in (False, True):
            own = (is_replica == replica) & (files[array_of_range] >= 0)
            if own.any():
                tensor, holder, start, stop, first = (column[own] for column in ranges)
                itemsize = known[0].itemsize
                position = starts[holder] + first * itemsize
                self._ranges[replica].append(
                    pieces_of_ranges(blocks, tensor, start, stop, files[holder], position, itemsize)
                )

    def add_tie(self, name: str, other: str) -> None:
        """Add a name of a tensor that was added under the name `other`."""
        entry = self.entry(other)
        self.add_tensor(name, entry.dtype, entry.shape, same_as=entry.same_as or other)

    def add_mean(self, name: str, dtype: str, shape: tuple[int, ...], terms: Sequence[str]) -> None:
        """Add a tensor that is the mean of other tensors, its terms. Users do not see the terms.

        Add the boxes of the terms next. The mean itself has no boxes.

        Args:
            terms: the names of the terms, which no other tensor has.
        """
        for each in (name, *terms):
            self.add_tensor(each, dtype, shape)
        self._terms[name] = tuple(terms)

    def terms_of(self, name: str) -> tuple[str, ...]:
        """Return the names of the terms of a mean; nothing for any other tensor."""
        return self._terms.get(name, ())

    def add_number(self, name: str, value: float) -> None:
        """Add a number as a 0-d float32 tensor, the type that optimizers count steps with.

        Raises:
            FormatError: the number is too large.
        """
        try:
            number = torch.tensor(float(value), dtype=torch.float32, device="cpu")
        except OverflowError as error:
            raise FormatError(
                f"{name}: the number {str(value)[:40]} is too large for a float: the checkpoint is "
                "damaged: copy it again from an intact source"
            ) from error
        self.add_array(name, self.add_inline(number))

    def add_values(self, ranks: Sequence[Mapping[str, object]]) -> None:
        """Add the first rank's values. `left_out` names the values that differ on other ranks.

        Args:
            ranks: the values of each rank, by name.
        """
        for name in dict.fromkeys(name for values in ranks for name in values):
            if name not in ranks[0]:
                self.left_out.append(
                    f"{name}: missing in the first rank's file, whose values are taken"
                )
                continue
            value = ranks[0][name]
            others = [values[name] for values in ranks[1:] if name in values]
            differing = sum(not are_plain_values_equal(other, value) for other in others)
            if differing:
                self.left_out.append(
                    f"{name}: {differing} ranks have other values; the first rank's is taken"
                )
            self.add_value(name, value)

    def add_value(self, name: str, value: object) -> None:
        """Add a plain value, and the arrays in it as tensors.

        If the value itself is an array, add only the tensor `name`. If the value has no plain form,
        add a line to `left_out`.
        """
        if isinstance(value, STORED):
            self.add_array(name, value)
            return
        try:
            plain, arrays = encode_plain(value, name, self.add_inline)
        except StateError as error:
            self.left_out.append(str(error))
            return
        if name not in arrays:
            self._objects.append(ObjectEntry(name, plain))
        for path, array in arrays.items():
            if isinstance(array, StoredComposite):  # `plain` describes it
                self._add_inner(path, array)
            else:
                self.add_array(path, array)

    def add_groups(self, groups: Iterable[ParamGroup], name: str, *, merge: bool = False) -> None:
        """Add the param groups of an optimizer.

        If a hyperparameter has no plain form, add a line to `left_out`.

        Args:
            merge: merge the groups that have equal hyperparameters into one group.
        """
        groups = merge_param_groups(groups) if merge else groups
        try:
            encoded: list[JsonValue] = [
                {"members": list(group.names), "value": encode(self._values_of(group), name)}
                for group in groups
            ]
            self._objects.append(ObjectEntry(name, encoded))
        except StateError as error:
            self.left_out.append(str(error))

    def _values_of(self, group: ParamGroup) -> dict[str, object]:
        return {k: read_small(v, self._read_array) for k, v in group.hyperparameters.items()}

    def add_state(self, state: NestedState, *, is_ordered: bool = True) -> None:
        """Add a nested state with tensors and plain values, under the names of `shardwise.save`.

        A leaf is named by its path, joined by dots. Optimizer state is named
        `<optimizer>.<parameter>.<key>` where the names of the parameters are known. If the
        parameters of a module are at the top level of the state, their names begin with `model.`.
        Tensors that are the same array are tied.

        Args:
            state: the state. Tensors in it are `StoredArray`s and `StoredTensor`s.
            is_ordered: whether the module lists its parameters in the order of the optimizer's
                indices. If so, the module's names replace the indices.
        """
        named = name_leaves(name_parameters(state) if is_ordered else state)
        first_names: dict[StoredArray | StoredTensor | StoredComposite, str] = {}
        for path, array in named.tensors.items():
            name = named.names[path]
            first = first_names.setdefault(array, name) if math.prod(array.shape) else name
            if first == name:
                self.add_array(name, array)
            elif isinstance(array, StoredComposite):
                self._add_composite(name, array, first)
            else:
                self.add_tie(name, first)
        for path, value in named.values.items():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if path[-1] == "step" and path in named.in_optimizers and is_number:
                self.add_number(named.names[path], value)
            else:
                self.add_value(named.names[path], value)
        for name, optimizer in named.optimizers.items():
            self.add_groups(optimizer.groups, name)
            if ungrouped := optimizer.find_ungrouped_parameters():
                self.left_out.append(
                    f"{name}: the hyperparameters of {len(ungrouped)} parameters are missing, for "
                    f"example those of {ungrouped[0]}: pipeline stages overwrote each other's "
                    "param groups in the save"
                )

    def add_ranks(self, states: Sequence[tuple[str, Any]]) -> None:
        """Merge the states that ranks saved separately, and add the result; see `merge_ranks`.

        Args:
            states: the state of each rank, with the name of its file. A state that is not a dict is
                named `value`.

        Raises:
            FormatError: parts of tensors are missing, or the states are not from one save.
        """
        for file, _ in states:
            self.add_file(file)
        merged, differing = merge_ranks(states, str(self.tree), self._have_same_bytes)
        self.left_out += [f"{name}: its value differs between ranks" for name in differing]
        self.add_state(merged if isinstance(merged, dict) else {"value": merged})

    def have_equal_first_elements(self, one: StoredArray, other: StoredArray) -> bool:
        """Read the first elements of two arrays, and return whether they have the same bytes."""
        return self._have_same_bytes(select_sample(one), select_sample(other))

    def _have_same_bytes(self, one: StoredArray, other: StoredArray) -> bool:
        return self._read_array(one) == self._read_array(other)

    def _read_array(self, array: StoredArray) -> bytes:
        with self.tree.open_range(array.file) as file:
            return file.read(array.start, math.prod(array.shape) * array.itemsize)

    def add_inline(self, tensor: torch.Tensor) -> StoredArray:
        """Store a tensor in the layout; return its array. Equal bytes are stored once."""
        data = bytes_of_tensor(tensor)
        start = self._content_starts.setdefault(data, len(self._content))
        if start == len(self._content):
            self._content += data
        dtype = str(tensor.dtype).removeprefix("torch.")
        return StoredArray(INLINE_FILE, start, dtype, tuple(tensor.shape), tuple(tensor.stride()))

    def add_file(self, name: str) -> int:
        """Add a file, which may have values but no tensors; return its index."""
        return self._files.setdefault(name, len(self._files))

    def add_layout(self, layout: Layout) -> None:
        """Add the tensors and pieces of a layout, whose files are numbered as by `add_file`."""
        first = len(self._tensors)
        for i, entry in enumerate(layout.tensors, first):
            self._index.setdefault(entry.name, i)
        self._tensors += layout.tensors
        self.left_out += layout.left_out
        for pieces, replica in ((layout.pieces, False), (layout.replicas, True)):
            self._tables[replica].append(replace(pieces, tensor=pieces.tensor + first))

    def build(self, format: str) -> Layout:  # noqa: A002 - the name in `Layout`
        """Return the layout of everything that was added.

        Args:
            format: the name of the format, for people.

        Raises:
            FormatError: a file does not exist; or an array has to be cut into too many pieces,
                because its elements share bytes, as after `expand`.
        """
        tensors, terms, new_index = hide_terms(self._tensors, self._terms)
        pieces, replicas = (
            replace(each, tensor=new_index[each.tensor])
            for each in (self._join_pieces(replica=False), self._join_pieces(replica=True))
        )
        files = tuple(
            StoredFile(name, len(self._content), bytes(self._content))
            if name == INLINE_FILE
            else self.tree.file(name)
            for name in self._files
        )
        return Layout(
            format=format,
            files=files,
            tensors=tensors,
            runs=Runs.of_pieces(pieces),
            replicas=replicas,
            terms=terms,
            objects=tuple(self._objects),
            step=self.step if type(self.step) is int and self.step >= 0 else None,
            world_size=self.world_size,
            left_out=tuple(self.left_out),
            missing_files=dict(self.missing_files),
        )

    def _join_pieces(self, *, replica: bool) -> Pieces:
        boxes = pieces_of_boxes(self._boxes[replica], lambda i: self._tensors[i].name)
        return Pieces.join([*self._tables[replica], boxes, *self._ranges[replica]])


def _not_flat_error(name: str, array: StoredArray) -> FormatError:
    return FormatError(
        f"{name}: an array of shape {list(array.shape)} in {array.file[:200]!r} is not flat: copy "
        "all files of one save from an intact source"
    )
