"""ByteCheckpoint 0.0.x: DCP metadata of the module and of the optimizer, over raw bytes."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from shardwise.errors import FormatError
from shardwise.formats.containers.pickles import unpickle
from shardwise.formats.containers.torch_files import read_torch_file
from shardwise.formats.containers.torch_values import TORCH
from shardwise.formats.foreign import Foreign, ForeignFile, PieceTable, StoredArray
from shardwise.formats.nested import Leaves, foreign_of
from shardwise.formats.optimizers import Path
from shardwise.formats.piece_tables import joined
from shardwise.formats.readers.dcp.items import Arrays, first_storage
from shardwise.formats.readers.dcp.metadata import METADATA, Metadata, index_of, read_metadata
from shardwise.formats.readers.dcp.reader import Chunks, fold, read_stored, world_size
from shardwise.formats.tree import Tree

FORMAT = "ByteCheckpoint"
PARTS = ("model", "optimizer")
_EXTRA = re.compile(r"extra_state/extra_state_rank_(\d{1,7})\.pt")
_STEP = re.compile(r"global_step_(\d{1,15})")


def recognise(tree: Tree) -> bool:
    """Whether a tree has a folder `model` with DCP metadata."""
    return f"model/{METADATA}" in tree.sizes and METADATA not in tree.sizes


def read(tree: Tree) -> Foreign:
    """Read a step saved by ByteCheckpoint: `model`, `optimizer` and `extra_state`.

    Raises:
        FormatError: it is malformed.
    """
    files: tuple[ForeignFile, ...] = ()
    tensors: list[tuple[Path, str, tuple[int, ...]]] = []
    table = PieceTable.nothing()
    values: dict[Path, Any] = {}
    left_out: list[str] = []
    for part in PARTS:
        if f"{part}/{METADATA}" not in tree.sizes:
            continue
        metadata = read_metadata(tree, f"{part}/{METADATA}")
        find = partial(_find, _geometries(metadata))
        stored = read_stored(tree, metadata, folder=f"{part}/", first=len(files), find=find)
        table = joined(table, _behind(stored.table, len(tensors)))
        paths = [(part, *metadata.paths.get(name, (name,))) for name in stored.names]
        tensors += zip(paths, stored.dtypes, stored.shapes, strict=True)
        for name, value in stored.values.items():
            values[(part, *metadata.paths.get(name, (name,)))] = value
        files += stored.files
        left_out += stored.left_out
    ranks = sorted(int(match[1]) for name in tree.sizes if (match := _EXTRA.fullmatch(name)))
    if ranks:
        name = f"extra_state/extra_state_rank_{ranks[0]}.pt"
        with tree.open_range(name, len(files)) as part_of:
            values["extra_state",] = read_torch_file(part_of, opaque=tree.opaque).value
        files += (tree.file(name),)
    if len(ranks) > 1:
        left_out.append(
            f"extra_state of {len(ranks) - 1} ranks: only that of rank {ranks[0]} is read"
        )
    lacking = [part for part in PARTS if f"{part}/{METADATA}" not in tree.sizes]
    folded = fold(values, [path for path, _, _ in tensors])
    foreign = foreign_of(Leaves(files, tensors, table, folded, left_out), FORMAT)
    step = _STEP.fullmatch(tree.path.resolve().name)
    world = max(world_size(files), len(ranks))
    return replace(
        foreign,
        step=int(step[1]) if step else None,
        world_size=world,
        absent={part: f"{part}/{METADATA}" for part in lacking},
    )


def _geometries(metadata: Metadata) -> dict[tuple[str, tuple[int, ...] | None], StoredArray]:
    """Return the array of each chunk, with its start in the storage: a pickle within the pickle."""
    known: dict[bytes, StoredArray] = {}
    found: dict[tuple[str, tuple[int, ...] | None], StoredArray] = {}
    pickles = metadata.more.get("all_tensor_metadata")
    for record, data in (pickles if isinstance(pickles, dict) else {}).items():
        key = index_of(record)
        if not isinstance(data, bytes):
            continue
        if data not in known:
            array = unpickle(data, key[0], stubs=TORCH, persistent=first_storage).value
            if not isinstance(array, StoredArray):
                raise FormatError(
                    f"{key[0]}: expected a plain tensor, found {type(array).__name__}"
                )
            known[data] = array
        found[key] = known[data]
    return found


def _find(
    geometries: dict[tuple[str, tuple[int, ...] | None], StoredArray], tree: Tree, chunks: Chunks
) -> Arrays:
    kinds: dict[StoredArray, int] = {}
    kind, start = [], []
    for name, item, offset in zip(chunks.names, chunks.items, chunks.offsets, strict=True):
        array = geometries.get((name, offset))
        if array is None:
            raise FormatError(f"{name} at {list(offset)}: the metadata has no dtype and strides")
        kind.append(kinds.setdefault(array, len(kinds)))
        start.append(item.offset + array.start)
    return Arrays(list(kinds), np.array(kind, np.int64), np.array(start, np.int64))


def _behind(table: PieceTable, tensors: int) -> PieceTable:
    """Return the pieces, with tensor numbers increased by `tensors`."""
    return replace(table, pieces=replace(table.pieces, tensor=table.pieces.tensor + tensors))
