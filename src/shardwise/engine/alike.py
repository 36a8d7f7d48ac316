"""Whether a foreign checkpoint that has several replicas of something has the same in all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy as np

from shardwise.engine.arena import Arena
from shardwise.engine.load import read_boxes
from shardwise.engine.opened import Opened
from shardwise.events import Recorder
from shardwise.layout import Box, boxes_of
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import TensorEntry
from shardwise.state.leaves import same_bytes

LARGEST_BATCH = 16 << 20

_Pair = tuple[TensorEntry, TensorEntry, Box]
"""A tensor, the replica as a tensor of its own name, and a box of both."""


def unlike_replicas(opened: Opened, arena: Arena, recorder: Recorder) -> tuple[int, list[str]]:
    """Compare every replica with what is read in its place.

    Returns:
        The bytes of the replicas, and the names of the tensors of which one differs.
    """
    if opened.replicas is None or not len(opened.replicas[0]):
        return 0, []
    pieces, stride = opened.replicas
    tensors = opened.manifest.tensors
    rows = [
        msgspec.structs.replace(tensors[number], name=str(row), same_as=None)
        for row, number in enumerate(pieces.tensor.tolist())
    ]
    apart = replace(
        opened,
        manifest=msgspec.structs.replace(opened.manifest, tensors=tuple(rows)),
        pieces=replace(pieces, tensor=np.arange(len(rows))),
        stride=stride,
        parts={},
    )
    total = 0
    unlike: dict[str, None] = {}
    for batch in _batches(opened, rows):
        nbytes = sum(box.size * DTYPES[entry.dtype].itemsize for entry, _, box in batch)
        with recorder.stage("replicas", nbytes):
            first = read_boxes([(e, box) for e, _, box in batch], opened, arena, verify=True)
            other = read_boxes([(r, box) for _, r, box in batch], apart, arena, verify=True)
            for (entry, _, _), a, b in zip(batch, first, other, strict=True):
                if not same_bytes(a, b):
                    unlike[entry.name] = None
        total += nbytes
    return total, list(unlike)


def _batches(opened: Opened, rows: list[TensorEntry]) -> Iterator[list[_Pair]]:
    pieces = opened.replicas[0] if opened.replicas is not None else opened.pieces
    batch: list[_Pair] = []
    room = LARGEST_BATCH
    for row, each in enumerate(rows):
        entry = opened.manifest.tensors[int(pieces.tensor[row])]
        ndim = len(entry.shape)
        offset, shape = (column[row, :ndim].tolist() for column in (pieces.offset, pieces.shape))
        itemsize = DTYPES[entry.dtype].itemsize
        for part in boxes_of(tuple(shape), LARGEST_BATCH // itemsize):
            if part.size * itemsize > room:
                yield batch
                batch, room = [], LARGEST_BATCH
            at = tuple(a + b for a, b in zip(offset, part.offset, strict=True))
            batch.append((entry, each, Box(at, part.shape)))
            room -= part.size * itemsize
    if batch:
        yield batch
