"""Read ByteCheckpoint 0.0.x: DCP metadata of the module and of the optimizer, and raw bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from shardwise.errors import FormatError
from shardwise.formats.containers.pickle_values import UnknownObject
from shardwise.formats.file_tree import FileTree
from shardwise.formats.foreign import Foreign, PieceTable, StoredArray
from shardwise.formats.nested import NestedLeaves, build_foreign, join_leaves
from shardwise.formats.optimizers import Path
from shardwise.formats.readers.dcp.items import ItemArrays, read_pickled_tensor
from shardwise.formats.readers.dcp.metadata import METADATA, Metadata, parse_item_key, read_metadata
from shardwise.formats.readers.dcp.reader import Chunks, count_ranks, leaves_of, read_content
from shardwise.formats.readers.torch_save import read_value
from shardwise.store import resolve_links

FORMAT = "ByteCheckpoint"
PARTS = ("model", "optimizer")
_EXTRA_STATE = re.compile(r"extra_state/extra_state_rank_(\d{1,7})\.pt")
_STEP = re.compile(r"global_step_(\d{1,15})")

ChunkArrays: TypeAlias = Mapping[tuple[str, tuple[int, ...] | None], StoredArray | UnknownObject]
"""The array of each chunk, or its unknown class, by the tensor's name and the chunk's offset.

The `start` of an array is its offset, in bytes, in the bytes of the chunk.
"""


def recognise(tree: FileTree) -> bool:
    """Return whether a tree has a folder `model` with DCP metadata."""
    return f"model/{METADATA}" in tree.sizes and METADATA not in tree.sizes


def read(tree: FileTree) -> Foreign:
    """Read a step saved by ByteCheckpoint: `model`, `optimizer` and `extra_state`.

    Raises:
        FormatError: it is malformed.
    """
    parts: list[NestedLeaves] = []
    missing = [part for part in PARTS if f"{part}/{METADATA}" not in tree.sizes]
    for part in PARTS:
        if part not in missing:
            parts.append(_read_part(tree, part, sum(len(each.files) for each in parts)))
    ranks = sorted(int(match[1]) for name in tree.sizes if (match := _EXTRA_STATE.fullmatch(name)))
    if ranks:
        name = f"extra_state/extra_state_rank_{ranks[0]}.pt"
        value = read_value(tree, name, sum(len(each.files) for each in parts))
        left_out = []
        if len(ranks) > 1:
            left_out = [
                f"extra_state of {len(ranks) - 1} ranks: only that of rank {ranks[0]} is read"
            ]
        values: dict[Path, Any] = {("extra_state",): value}
        parts.append(NestedLeaves((tree.file(name),), [], PieceTable.empty(), values, left_out))
    leaves = join_leaves(*parts)
    step = _STEP.fullmatch(resolve_links(tree.store).name)
    return replace(
        build_foreign(leaves, FORMAT),
        step=int(step[1]) if step else None,
        world_size=max(count_ranks(leaves.files), len(ranks)),
        missing_files={part: f"{part}/{METADATA}" for part in missing},
    )


def _read_part(tree: FileTree, part: str, first_file_index: int) -> NestedLeaves:
    """Read the model or the optimizer.

    Args:
        part: the name of its folder.
        first_file_index: the index of its first file.
    """
    metadata = read_metadata(tree, f"{part}/{METADATA}")
    arrays = _parse_chunk_arrays(tree, metadata, tree.label(f"{part}/{METADATA}"))
    content = read_content(
        tree,
        metadata,
        folder=f"{part}/",
        first_file_index=first_file_index,
        array_finder=partial(_find_arrays, arrays),
    )
    return leaves_of(content, metadata, lambda path: (part, *path))


def _parse_chunk_arrays(tree: FileTree, metadata: Metadata, path: str) -> ChunkArrays:
    """Return the array of each chunk, from pickles within the pickle of the metadata."""
    parsed: dict[bytes, StoredArray | UnknownObject] = {}
    arrays: dict[tuple[str, tuple[int, ...] | None], StoredArray | UnknownObject] = {}
    pickles = metadata.extra_fields.get("all_tensor_metadata")
    for item_key, data in (pickles if isinstance(pickles, dict) else {}).items():
        try:
            name, offset = parse_item_key(item_key)
        except FormatError as error:
            raise FormatError(f"{path}: all_tensor_metadata: {error}") from error
        if not isinstance(data, bytes):
            continue
        if data not in parsed:
            label = f"{path}: {name}"
            array = read_pickled_tensor(data, label, tree.skip_unknown)
            if array is None:
                raise FormatError(
                    f"{label}: all_tensor_metadata does not describe this tensor by a plain "
                    "tensor: copy the file again from an intact source, or save with "
                    "ByteCheckpoint 0.0.x"
                )
            parsed[data] = array
        arrays[name, offset] = parsed[data]
    return arrays


def _find_arrays(arrays: ChunkArrays, _tree: FileTree, chunks: Chunks) -> ItemArrays:
    distinct_arrays: dict[StoredArray, int] = {}
    distinct_indices, starts = [], []
    unknown: dict[str, UnknownObject] = {}
    for name, item, offset in zip(chunks.names, chunks.items, chunks.offset_tuples, strict=True):
        array = arrays.get((name, offset))
        if array is None:
            raise FormatError(
                f"{chunks.metadata_path}: {name}: all_tensor_metadata lacks the dtype and strides "
                f"of the chunk at {list(offset)}: copy all files of one save"
            )
        if isinstance(array, UnknownObject):
            unknown[name] = array
            continue
        distinct_indices.append(distinct_arrays.setdefault(array, len(distinct_arrays)))
        starts.append(item.offset + array.start)
    return ItemArrays(
        list(distinct_arrays),
        np.array(distinct_indices, np.int64),
        np.array(starts, np.int64),
        unknown,
    )
