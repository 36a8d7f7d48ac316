"""Compare two checkpoints, or the copies of tensors in one, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from msgspec import UNSET
from torch import Tensor

from shardwise.kernel.boxes import Box, batch_boxes
from shardwise.kernel.boxes.box import IntArray
from shardwise.kernel.engine.buffers import Arena
from shardwise.kernel.engine.group import Group, SoloGroup
from shardwise.kernel.engine.load import read_boxes
from shardwise.kernel.engine.per_rank_values import read_per_rank
from shardwise.kernel.engine.rounds import Round, concatenate
from shardwise.kernel.errors import MismatchError
from shardwise.kernel.events import Recorder
from shardwise.kernel.manifest.dtypes import DTYPES
from shardwise.kernel.manifest.layout import Layout
from shardwise.kernel.manifest.manifest import TensorEntry
from shardwise.kernel.manifest.pieces import Pieces, Runs
from shardwise.kernel.state.local_state import same_bytes, view_for_numpy
from shardwise.kernel.state.plain_values import find_differences
from shardwise.kernel.store import Files
from shardwise.ports.binding import SavedNames
from shardwise.ports.checks import Comparison, Difference, TensorDifference

MAX_BATCH_BYTES = 16 << 20
"""The most bytes of each checkpoint, or of further copies, to compare at a time."""
MAX_CONVERTED_ELEMENTS = 1 << 20
"""The most elements to convert to float64 at a time."""

Source: TypeAlias = tuple[Files, Layout]
"""The files and the layout of a checkpoint."""


def compare(a: Source, b: Source, arena: Arena, recorder: Recorder) -> Comparison:
    """Compare two checkpoints, including every byte of the tensors that both have.

    Args:
        a, b: the files and the layout of each checkpoint.
        recorder: gets an event for each batch of tensors.

    Raises:
        CorruptionError: one of the checkpoints is damaged.
    """
    (store_a, layout_a), (store_b, layout_b) = a, b
    kinds_a, kinds_b = _kinds_by_name(layout_a), _kinds_by_name(layout_b)
    common = [name for name in kinds_a if name in kinds_b]
    kinds = [
        Difference(name, kinds_a[name], kinds_b[name])
        for name in common
        if kinds_a[name] != kinds_b[name]
    ]
    tensors_b = {entry.name: entry for entry in layout_b.tensors}
    pairs = [(x, tensors_b[x.name]) for x in layout_a.tensors if x.name in tensors_b]
    comparable = [(x, y) for x, y in pairs if (x.dtype, x.shape) == (y.dtype, y.shape)]
    values_a, values_b = _values_of(*a), _values_of(*b)
    values = [
        Difference(*difference)
        for name in common
        if name in values_a and kinds_a[name] == kinds_b[name]
        for difference in find_differences(values_a[name], values_b[name], name)
    ]
    found = Comparison(
        a=str(store_a),
        b=str(store_b),
        same=False,
        tensors_compared=len(comparable),
        only_in_a=[
            *(name for name in kinds_a if name not in kinds_b),
            *(each.name for each in values if each.b is UNSET),
        ],
        only_in_b=[
            *(name for name in kinds_b if name not in kinds_a),
            *(each.name for each in values if each.a is UNSET),
        ],
        kinds=kinds,
        dtypes=[Difference(x.name, x.dtype, y.dtype) for x, y in pairs if x.dtype != y.dtype],
        shapes=[Difference(x.name, x.shape, y.shape) for x, y in pairs if x.shape != y.shape],
        values=[each for each in values if UNSET not in (each.a, each.b)],
        tensors=_compare_tensors(a, b, comparable, arena, recorder),
    )
    return replace(found, same=not found.differences)


def _kinds_by_name(layout: Layout) -> dict[str, str]:
    return {
        **{entry.name: "tensor" for entry in layout.tensors},
        **{entry.name: "value" for entry in layout.objects},
        **dict.fromkeys(layout.per_rank, "value of each rank"),
    }


def _values_of(store: Files, layout: Layout) -> dict[str, object]:
    """Return the encoded values of all ranks, and a list of each value that differs by rank."""
    values: dict[str, object] = {entry.name: entry.value for entry in layout.objects}
    if layout.per_rank:
        per_rank = read_per_rank(store, layout, layout.per_rank, SoloGroup(), verify=True)
        values |= {name: [*each] for name, each in per_rank.items()}
    return values


@dataclass(slots=True)
class _Tally:
    """The number of differing elements of a tensor, and the largest |a - b| in float64."""

    differing: int = 0
    max_abs_difference: float | None = 0.0

    def add(self, x: Tensor, y: Tensor) -> None:
        """Compare two boxes of the same shape and dtype."""
        bits_x, bits_y = _as_integers(x), _as_integers(y)
        differ = (bits_x != bits_y).any(1)
        count = int(differ.sum())
        self.differing += count
        if count:
            bits_x, bits_y = bits_x[differ], bits_y[differ]
            for start in range(0, count, MAX_CONVERTED_ELEMENTS):
                part = slice(start, start + MAX_CONVERTED_ELEMENTS)
                difference = _max_abs_difference(
                    bits_x[part].view(x.dtype), bits_y[part].view(x.dtype)
                )
                if difference is None or self.max_abs_difference is None:
                    self.max_abs_difference = None
                else:  # the maximum is NaN if one of the two is NaN
                    self.max_abs_difference = float(np.maximum(self.max_abs_difference, difference))


def _compare_tensors(
    a: Source,
    b: Source,
    pairs: Sequence[tuple[TensorEntry, TensorEntry]],
    arena: Arena,
    recorder: Recorder,
) -> list[TensorDifference]:
    """Return the tensors whose bytes differ. Tensors that are tied in a and in b are read once."""
    names_a, names_b = SavedNames(a[1]), SavedNames(b[1])
    # The keys are the indices by which a and b store the bytes.
    keys = [(names_a.stored_index(x.name), names_b.stored_index(y.name)) for x, y in pairs]
    stored = {key: x for key, (x, _) in zip(keys, pairs, strict=True)}
    tallies = {key: _Tally() for key in stored}
    boxes = ((k, Box.whole(x.shape), DTYPES[x.dtype].itemsize) for k, x in stored.items())
    for batch in batch_boxes(boxes, MAX_BATCH_BYTES):
        nbytes = sum(box.size * DTYPES[stored[key].dtype].itemsize for key, box in batch)
        with recorder.stage("compare", nbytes):
            in_a = read_boxes([(i, box) for (i, _), box in batch], *a, arena, verify=True)
            in_b = read_boxes([(j, box) for (_, j), box in batch], *b, arena, verify=True)
            for (key, _), data_a, data_b in zip(batch, in_a, in_b, strict=True):
                tallies[key].add(data_a, data_b)
    differences = []
    for key, (x, _) in zip(keys, pairs, strict=True):
        tally = tallies[key]
        if tally.differing:
            elements = math.prod(x.shape)
            differences.append(
                TensorDifference(x.name, elements, tally.differing, tally.max_abs_difference)
            )
    return differences


def _as_integers(tensor: Tensor) -> Tensor:
    """Return a tensor's bits as integers, with one row for each element."""
    bits = view_for_numpy(tensor.reshape(-1))
    integers = bits.view(torch.int64) if bits.is_complex() else bits
    return integers.reshape(tensor.numel(), -1)


def _max_abs_difference(x: Tensor, y: Tensor) -> float | None:
    wide_dtype = torch.complex128 if x.dtype.is_complex else torch.float64
    try:
        return float((x.to(wide_dtype) - y.to(wide_dtype)).abs().max())
    except (RuntimeError, NotImplementedError):
        return None  # torch has no arithmetic for this dtype


def compare_copies(
    store: Files,
    layout: Layout,
    arena: Arena,
    recorder: Recorder,
    *,
    tensors: Collection[int] | None = None,
    share: tuple[int, int] = (0, 1),
) -> tuple[int, list[str]]:
    """Compare each further copy of a tensor, byte by byte, with the copy that a load reads.

    A *row* is an index into `layout.replicas`: one box of a further copy.

    Args:
        store, layout: the checkpoint.
        arena: the buffers to read through.
        recorder: gets an event for each batch.
        tensors: the indices of the tensors to compare. Default: all.
        share: `(i, n)`: compare only batches i, i + n, i + 2n …

    Returns:
        The number of compared bytes, and one line for each tensor whose copies differ, with the
        first place that differs.
    """
    replicas = layout.replicas
    if not len(replicas):
        return 0, []
    tensor_of = layout.tensor_of[replicas.tensor]
    rows = np.arange(len(replicas))
    # Several copies of a tensor have the same boxes, so each copy is read as a tensor of its own.
    first = len(layout.tensor_of)
    indices = [*layout.tensor_of.tolist(), *tensor_of.tolist()]
    all_copies = Layout(
        format=layout.format,
        files=layout.files,
        tensors=tuple(layout.tensors[index] for index in indices),
        runs=Runs.of_pieces(Pieces.join([layout.pieces, replace(replicas, tensor=first + rows)])),
    )
    if tensors is not None:
        rows = rows[np.isin(tensor_of, [*tensors])]
    total = 0
    differences: dict[int, str] = {}
    boxes = _boxes_of_rows(layout, rows.tolist())
    for number, batch in enumerate(batch_boxes(boxes, MAX_BATCH_BYTES)):
        if number % share[1] != share[0]:
            continue
        loaded = [(int(replicas.tensor[row]), box) for row, box in batch]
        copies = [(first + row, box) for row, box in batch]
        nbytes = sum(box.size * int(layout.itemsizes[index]) for index, box in loaded)
        with recorder.stage("replicas", nbytes):
            data = read_boxes([*loaded, *copies], store, all_copies, arena, verify=True)
            for (row, box), (tensor, _), one, other in zip(
                batch, loaded, data, data[len(batch) :], strict=False
            ):
                if tensor not in differences and not same_bytes(one, other):
                    differences[tensor] = _describe_difference(layout, row, box, one, other)
        total += nbytes
    return total, list(differences.values())


def check_all_together(
    store: Files,
    layout: Layout,
    names: Iterable[str],
    recorder: Recorder,
    group: Group,
) -> None:
    """Compare all copies of some tensors, byte by byte, divided among the ranks.

    Args:
        names: the names of the tensors, the same on all ranks.

    Raises:
        MismatchError: copies differ; the same error on all ranks.
    """
    if not len(layout.replicas):
        return  # on all ranks

    with Round(group, "comparing replicas") as all_ranks:
        saved = SavedNames(layout)
        _, own = compare_copies(
            store,
            layout,
            Arena(2 * MAX_BATCH_BYTES),
            recorder,
            tensors={saved.stored_index(name) for name in names},
            share=(group.rank, group.size),
        )
        all_ranks.all_reduce(
            own,
            list[str],
            lambda parts: sorted(concatenate(parts)),
            partial(refuse_differences, str(store)),
            type(None),
        )


def refuse_differences(path: str, differences: list[str]) -> None:
    """Refuse a checkpoint whose copies of tensors differ.

    Args:
        path: the path of the checkpoint.
        differences: a line for each tensor whose copies differ.

    Raises:
        MismatchError: `differences` is not empty.
    """
    if differences:
        raise MismatchError(
            f"{path}: the checkpoint stores some tensors several times, and the copies differ. "
            "Copy its files again from an intact source. If the copies differ there too, a "
            "specification can choose one (`skip`); verify=False uses the first:",
            differences,
        )


def _boxes_of_rows(layout: Layout, rows: list[int]) -> Iterator[tuple[int, Box, int]]:
    """Yield some rows of `Layout.replicas`, with the box and the itemsize of each."""
    replicas = layout.replicas
    for row in rows:
        tensor = int(replicas.tensor[row])
        ndim = len(layout.tensors[int(layout.tensor_of[tensor])].shape)
        offset, shape = (tuple(c[row, :ndim].tolist()) for c in (replicas.offset, replicas.shape))
        yield row, Box(offset, shape), int(layout.itemsizes[tensor])


def _describe_difference(
    layout: Layout, row: int, box: Box, first: torch.Tensor, copy: torch.Tensor
) -> str:
    """Return a line with the name of the tensor, and the first element that differs.

    Args:
        row: the row of the copy in `Layout.replicas`.
        box: the part of the tensor that was compared.
        first, copy: the values of this part.
    """
    tensor = int(layout.replicas.tensor[row])
    first_bytes, copy_bytes = (each.reshape(-1).view(torch.uint8) for each in (first, copy))
    element = int((first_bytes != copy_bytes).nonzero()[0]) // first.element_size()
    index = np.unravel_index(element, box.shape) if box.shape else ()
    position = [int(i) + o for i, o in zip(index, box.offset, strict=True)]
    pieces = layout.pieces_of(tensor)
    padded = np.zeros(pieces.offset.shape[1], np.int64)
    padded[: len(position)] = position
    holds = (pieces.offset <= padded) & (padded < pieces.offset + pieces.shape)
    (piece, *_) = np.flatnonzero(holds.all(axis=1)).tolist()
    first_place = _place_of(layout, pieces, piece, padded)
    copy_place = _place_of(layout, layout.replicas, row, padded)
    name = layout.tensors[int(layout.tensor_of[tensor])].name
    return f"{name}: two copies differ, first at {position}: {first_place}, and {copy_place}"


def _place_of(layout: Layout, pieces: Pieces, row: int, position: IntArray) -> str:
    """Return the file and byte of an element of a piece."""
    elements = int(((position - pieces.offset[row]) * pieces.stride[row]).sum())
    file = int(pieces.file[row])
    start = int(layout.file_bounds[file, 0] + pieces.start[row])
    start += elements * int(layout.itemsizes[pieces.tensor[row]])
    return f"{layout.files[file].name} at byte {start}"
