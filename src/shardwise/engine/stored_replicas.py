"""Compare the replicas in a foreign checkpoint: several stored copies of a tensor."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

import numpy as np
import torch

from shardwise.boxes import Box, batch_boxes
from shardwise.boxes.table import IntArray
from shardwise.engine.buffers import Arena
from shardwise.engine.group import Group
from shardwise.engine.load import read_boxes
from shardwise.engine.rounds import Round
from shardwise.errors import MismatchError
from shardwise.events import Recorder
from shardwise.manifest.layout import Layout, Pieces
from shardwise.plan.name_lookup import SavedNames
from shardwise.state.leaves import same_bytes
from shardwise.store import Files

LARGEST_BATCH = 16 << 20


def find_differences(
    store: Files,
    layout: Layout,
    arena: Arena,
    recorder: Recorder,
    *,
    tensors: Collection[int] | None = None,
    batch_bytes: int = LARGEST_BATCH,
    share: tuple[int, int] = (0, 1),
) -> tuple[int, list[str]]:
    """Compare each further copy of a tensor, byte by byte, with the copy that a load reads.

    A *row* is an index into `layout.replicas`: one box of a further copy.

    Args:
        store, layout: the checkpoint.
        arena: the buffers to read through.
        recorder: gets an event for each batch.
        tensors: the indices of the tensors to compare. Default: all.
        batch_bytes: the bytes of further copies in a batch. The comparison needs twice as much
            memory.
        share: `(i, n)`: compare only batches i, i + n, i + 2n …

    Returns:
        The number of compared bytes, and one line for each tensor whose copies differ, with the
        first place that differs.
    """
    replicas = layout.replicas
    tensor_of = layout.tensor_of[replicas.tensor]
    rows = np.arange(len(replicas))
    # Several copies of a tensor have the same boxes, so each copy is read as a tensor of its own.
    first = len(layout.tensor_of)
    indices = [*layout.tensor_of.tolist(), *tensor_of.tolist()]
    all_copies = Layout(
        format=layout.format,
        files=layout.files,
        tensors=tuple(layout.tensors[index] for index in indices),
        pieces=Pieces.join([layout.pieces, replace(replicas, tensor=first + rows)]),
    )
    if tensors is not None:
        rows = rows[np.isin(tensor_of, [*tensors])]
    total = 0
    differences: dict[int, str] = {}
    for number, batch in enumerate(batch_boxes(_boxes_of_rows(layout, rows.tolist()), batch_bytes)):
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
        _, own = find_differences(
            store,
            layout,
            Arena(2 * LARGEST_BATCH),
            recorder,
            tensors={saved.stored_index(name) for name in names},
            share=(group.rank, group.size),
        )
        differences = all_ranks.all_gather(own, list[str])
    refuse_differences(str(store), [line for lines in differences for line in lines])


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
    pieces = layout.pieces
    padded = np.zeros(pieces.offset.shape[1], np.int64)
    padded[: len(position)] = position
    holds = (pieces.offset <= padded) & (padded < pieces.offset + pieces.shape)
    (piece, *_) = np.flatnonzero((pieces.tensor == tensor) & holds.all(axis=1)).tolist()
    first_place = _place_of(layout, pieces, piece, padded)
    copy_place = _place_of(layout, layout.replicas, row, padded)
    name = layout.tensors[int(layout.tensor_of[tensor])].name
    return f"{name}: two copies differ, first at {position}: {first_place}, and {copy_place}"


def _place_of(layout: Layout, pieces: Pieces, row: int, position: IntArray) -> str:
    """Return the file and byte of an element of a piece."""
    elements = int(((position - pieces.offset[row]) * pieces.stride[row]).sum())
    start = int(pieces.start[row]) + elements * int(layout.itemsizes[pieces.tensor[row]])
    return f"{layout.files[int(pieces.file[row])].name} at byte {start}"
