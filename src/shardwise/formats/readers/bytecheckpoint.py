"""Read ByteCheckpoint 0.0.x: DCP metadata of the module and of the optimizer, and raw bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from shardwise.errors import FormatError
from shardwise.formats.containers.pickle_values import UnknownObject
from shardwise.formats.detect import Reader
from shardwise.formats.file_tree import FileTree
from shardwise.formats.foreign_builder import Builder
from shardwise.formats.readers.dcp.items import Found, read_pickled_tensor
from shardwise.formats.readers.dcp.metadata import (
    METADATA,
    Ints,
    Item,
    Metadata,
    parse_item_key,
    read_metadata,
)
from shardwise.formats.readers.dcp.reader import nest_leaves, read_contents
from shardwise.store import resolve_links

FORMAT = "ByteCheckpoint"
PARTS = ("model", "optimizer")
_EXTRA_STATE = re.compile(r"extra_state/extra_state_rank_(\d{1,7})\.pt")
_STEP = re.compile(r"global_step_(\d{1,15})")

ChunkArrays: TypeAlias = Mapping[tuple[str, Ints | None], Found]
"""The array of each chunk, or its unknown class, by the tensor's name and the chunk's offset.

The `start` of an array is its offset, in bytes, in the bytes of the chunk.
"""


def recognise(tree: FileTree) -> bool:
    """Return whether a tree has a folder `model` with DCP metadata."""
    return f"model/{METADATA}" in tree.sizes and METADATA not in tree.sizes


def read(tree: FileTree, builder: Builder) -> None:
    """Read a step saved by ByteCheckpoint: `model`, `optimizer` and `extra_state`.

    Raises:
        FormatError: it is malformed.
    """
    for part in PARTS:
        if f"{part}/{METADATA}" in tree.sizes:
            builder.add_state({part: _read_part(tree, builder, part)}, is_ordered=False)
        else:
            builder.missing_files[part] = f"{part}/{METADATA}"
    ranks = sorted(int(match[1]) for name in tree.sizes if (match := _EXTRA_STATE.fullmatch(name)))
    builder.world_size = max(builder.world_size, len(ranks))
    if ranks:
        name = f"extra_state/extra_state_rank_{ranks[0]}.pt"
        builder.add_file(name)
        builder.add_value("extra_state", tree.load(name))
    if len(ranks) > 1:
        builder.left_out.append(
            f"extra_state of {len(ranks) - 1} ranks: only that of rank {ranks[0]} is read"
        )
    step = _STEP.fullmatch(resolve_links(tree.store).name)
    builder.step = int(step[1]) if step else None


READER = Reader(FORMAT, recognise, read)


def _read_part(tree: FileTree, builder: Builder, part: str) -> dict[Any, Any]:
    """Return the state of the model or the optimizer, given the name of its folder."""
    metadata = read_metadata(tree, f"{part}/{METADATA}")
    path = tree.label(f"{part}/{METADATA}")
    arrays = _parse_chunk_arrays(tree, metadata, path)

    def find_arrays(
        _tree: FileTree, names: Sequence[str], items: Sequence[Item], offsets: Sequence[Ints]
    ) -> list[Found]:
        return [_find_array(arrays, path, *row) for row in zip(names, items, offsets, strict=True)]

    contents = read_contents(tree, builder, metadata, folder=f"{part}/", array_finder=find_arrays)
    return nest_leaves(metadata, contents)


def _parse_chunk_arrays(tree: FileTree, metadata: Metadata, path: str) -> ChunkArrays:
    """Return the array of each chunk, from pickles within the pickle of the metadata."""
    parsed: dict[bytes, Found] = {}
    arrays: dict[tuple[str, Ints | None], Found] = {}
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


def _find_array(arrays: ChunkArrays, path: str, name: str, item: Item, offset: Ints) -> Found:
    array = arrays.get((name, offset))
    if array is None:
        raise FormatError(
            f"{path}: {name}: all_tensor_metadata lacks the dtype and strides of the chunk at "
            f"{list(offset)}: copy all files of one save"
        )
    return array if isinstance(array, UnknownObject) else item.place(array)
