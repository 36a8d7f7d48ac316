"""PyTorch Distributed Checkpoint, as written by FSDP, DTensor, torchtitan, Lightning and others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from shardwise.errors import CheckpointNotFoundError, FormatError
from shardwise.formats.containers.pickle_values import UnknownObject
from shardwise.formats.detect import Reader
from shardwise.formats.file_tree import FileTree
from shardwise.formats.foreign import Placed, StoredArray, StoredTensor
from shardwise.formats.foreign_builder import Builder
from shardwise.formats.nested import nest
from shardwise.formats.readers.dcp.items import Found, find_arrays, read_values
from shardwise.formats.readers.dcp.metadata import (
    METADATA,
    Chunk,
    Ints,
    Item,
    Metadata,
    read_metadata,
)

FORMAT = "PyTorch DCP"
_DATA_FILE = re.compile(r"(?:.*/)?__(\d{1,7})_\d+\.distcp")
_LIGHTNING_KEY = re.compile(r"state_dict|optimizer_\d{1,4}")
"""Top-level keys in Lightning's DCP files; the file `meta.pt` has the rest of the state."""


def recognise(tree: FileTree) -> bool:
    """Return whether a tree has files of `torch.distributed.checkpoint`."""
    return any(
        name == METADATA or (name.endswith(".distcp") and "/" not in name) for name in tree.sizes
    )


def read(tree: FileTree, builder: Builder) -> None:
    """Read a checkpoint of `torch.distributed.checkpoint`.

    Raises:
        CheckpointNotFoundError: the save was never finished, or the tree is a single file.
        FormatError: the checkpoint is malformed, or compressed.
    """
    if tree.single_file is not None:
        raise CheckpointNotFoundError(
            f"{tree} is a part of a checkpoint of {FORMAT}: open {tree.parent}"
        )
    if METADATA not in tree.sizes:
        raise CheckpointNotFoundError(
            f"{tree} has no {METADATA}, which {FORMAT} writes last: its save was never finished, "
            "or the file was not copied (`cp *` skips names that start with a dot): copy the file, "
            "or open another checkpoint"
        )
    metadata = read_metadata(tree)
    state = nest_leaves(metadata, read_contents(tree, builder, metadata))
    builder.add_state(state, is_ordered=False)
    if "state_dict" in state and all(_LIGHTNING_KEY.fullmatch(str(key)) for key in state):
        builder.missing_files = dict.fromkeys(
            ("model", "optimizer", "scheduler"), "meta.pt, which Lightning writes,"
        )


READER = Reader(FORMAT, recognise, read, overrides=("torch",))


ArrayFinder: TypeAlias = Callable[
    [FileTree, Sequence[str], Sequence[Item], Sequence[Ints]], Sequence[Found]
]
"""Returns the array of each item, given names, items and offsets of chunks."""


def read_contents(
    tree: FileTree,
    builder: Builder,
    metadata: Metadata,
    *,
    folder: str = "",
    array_finder: ArrayFinder = find_arrays,
) -> dict[str, Any]:
    """Find the bytes of all tensors, and read all values. Return both by their names in DCP.

    Args:
        builder: receives the names of files, and lines about what is left out.
        folder: the folder of the files below the tree; empty, or ends in `/`.
        array_finder: by default, the items are files of torch.save.

    Raises:
        FormatError: a file or item is missing, or contradicts the metadata.
    """
    path = tree.label(f"{folder}{METADATA}")
    chunks = [
        (name, chunk)
        for name, tensor in metadata.tensors.items()
        for chunk in dict.fromkeys(tensor.chunks)
        if 0 not in chunk.shape
    ]
    items = [_find_item(metadata, folder, name, chunk.offset, path) for name, chunk in chunks]
    value_items = {name: _find_item(metadata, folder, name, None, path) for name in metadata.values}
    files = sorted({item.file for item in (*items, *value_items.values())})
    tree.require(files, f"{METADATA} names")
    for file in files:
        builder.add_file(file)
    builder.world_size = max(builder.world_size, count_ranks(files))
    names, offsets = [name for name, _ in chunks], [chunk.offset for _, chunk in chunks]
    found = array_finder(tree, names, items, offsets)
    unknown = {n: a for n, a in zip(names, found, strict=True) if isinstance(a, UnknownObject)}
    boxes: dict[str, list[Placed]] = {name: [] for name in metadata.tensors}
    for (name, chunk), item, array in zip(chunks, items, found, strict=True):
        if isinstance(array, StoredArray):
            _check_array(array, metadata.tensors[name].dtype, chunk, f"{path}: {name}", item)
            boxes[name].append((chunk.offset, array))
    contents: dict[str, Any] = {
        name: StoredTensor(tensor.dtype, tensor.shape, tuple(boxes[name]))
        for name, tensor in metadata.tensors.items()
        if name not in unknown
    }
    values = read_values(tree, list(value_items), list(value_items.values()))
    contents |= zip(value_items, values, strict=True)
    builder.left_out += [f"{name}: {each.reason}" for name, each in unknown.items()]
    names_with_items = dict.fromkeys(name for name, _ in metadata.items)
    builder.left_out += [
        f"{name}: it has an item, but no shape"
        for name in names_with_items
        if name not in metadata.tensors and name not in metadata.values
    ]
    return contents


def _check_array(array: StoredArray, dtype: str, chunk: Chunk, label: str, item: Item) -> None:
    if (array.dtype, array.shape) != (dtype, chunk.shape):
        raise FormatError(
            f"{label}: the chunk at {list(chunk.offset)} in {item.file} is {array.dtype} of shape "
            f"{list(array.shape)}, but .metadata says {dtype} of shape {list(chunk.shape)}: the "
            "files are from different saves: copy all files of one save"
        )


def nest_leaves(metadata: Metadata, contents: Mapping[str, Any]) -> dict[Any, Any]:
    """Return the nested state that DCP flattened to these contents.

    If the metadata has no path for a name, the path consists of this name.
    """
    return nest((metadata.paths.get(name, (name,)), leaf) for name, leaf in contents.items())


def count_ranks(files: Iterable[str]) -> int:
    """Return the number of ranks that wrote files, according to the names of the files."""
    ranks = [int(match[1]) for name in files if (match := _DATA_FILE.fullmatch(name))]
    return max(ranks, default=0) + 1


def _find_item(metadata: Metadata, folder: str, name: str, offset: Ints | None, path: str) -> Item:
    item = metadata.items.get((name, offset))
    if item is None:
        chunk = "" if offset is None else f" at {list(offset)}"
        raise FormatError(
            f"{path}: {name}{chunk}: the metadata does not say where it is: the file "
            "is damaged, or from an incomplete save: copy all files of one save"
        )
    return Item(folder + item.file, item.offset, item.length) if folder else item
