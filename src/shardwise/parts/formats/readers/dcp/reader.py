"""PyTorch Distributed Checkpoint, as written by FSDP, DTensor, torchtitan, Lightning and others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from shardwise.parts.formats.reader import (
    Box,
    Builder,
    CheckpointNotFoundError,
    FilePart,
    FileTree,
    FormatError,
    Reader,
    StoredArray,
    StoredComposite,
    StoredTensor,
    UnknownObject,
    UnplaceableError,
    join_shards,
    nest,
)
from shardwise.parts.formats.readers.dcp.data_files import (
    find_arrays,
    read_described_arrays,
    read_values,
)
from shardwise.parts.formats.readers.dcp.metadata import (
    METADATA,
    ChunkedTensor,
    Ints,
    Metadata,
    item_key,
    read_metadata,
)

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
            f"{tree} is a part of a checkpoint of PyTorch DCP: open {tree.parent}"
        )
    if METADATA not in tree.sizes:
        raise CheckpointNotFoundError(
            f"{tree} has no {METADATA}, which PyTorch DCP writes last: its save was never "
            "finished, or the file was not copied (`cp *` skips names that start with a dot): copy "
            "the file, or open another checkpoint"
        )
    state = read_state(tree, builder)
    builder.add_state(state, is_ordered=False)
    if "state_dict" in state and all(_LIGHTNING_KEY.fullmatch(str(key)) for key in state):
        builder.missing_files = dict.fromkeys(
            ("model", "optimizer", "scheduler"), "meta.pt, which Lightning writes,"
        )


READER = Reader("PyTorch DCP", recognise, read, overrides=("torch",))


def read_contents(
    tree: FileTree, builder: Builder, name: str = METADATA
) -> tuple[dict[str, Any], Metadata]:
    """Read the metadata, find the bytes of all tensors, and read all values.

    Args:
        builder: receives the names of files, and in `left_out` what is not read.
        name: the name of the file of metadata.

    Returns:
        The tensors and values by their names in DCP; and the metadata.

    Raises:
        FormatError: the metadata is malformed; or a file or item is missing, or contradicts it.
    """
    metadata, path = read_metadata(tree, name), tree.label(name)
    chunks = [
        (name, chunk)
        for name, tensor in metadata.tensors.items()
        for chunk in tensor.chunks
        if 0 not in chunk.shape
    ]
    items = [_find_item(metadata, name, chunk.offset, path) for name, chunk in chunks]
    value_items = [_find_item(metadata, name, None, path) for name in metadata.values]
    files = sorted({item.file for item in (*items, *value_items)})
    tree.require(files, f"{METADATA} names")
    for file in files:
        builder.add_file(file)
    ranks = [int(match[1]) for file in files if (match := _DATA_FILE.fullmatch(file))]
    builder.world_size = max(builder.world_size, *(rank + 1 for rank in ranks), 1)
    arrays = read_described_arrays(tree, metadata, chunks, items, path)
    if arrays is None:
        arrays = find_arrays(tree, items)
    unknown: dict[str, str] = {}
    found: dict[str, list[tuple[Box, StoredArray | StoredComposite]]] = {}
    for (name, chunk), item, array in zip(chunks, items, arrays, strict=True):
        if isinstance(array, UnknownObject):
            unknown[name] = array.reason
        else:
            _check_array(array, metadata.tensors[name].dtype, chunk, f"{path}: {name}", item)
            found.setdefault(name, []).append((chunk, array))
    contents: dict[str, Any] = {}
    for name, tensor in metadata.tensors.items():
        try:
            if name not in unknown:
                contents[name] = _join_chunks(f"{path}: {name}", tensor, found.get(name, ()))
        except UnplaceableError as error:  # noqa: PERF203 - a tensor is refused by name
            if not tree.skip_unknown:
                raise
            unknown[name] = str(error)
    contents |= zip(metadata.values, read_values(tree, value_items), strict=True)
    builder.left_out += [f"{name}: {reason}" for name, reason in unknown.items()]
    builder.left_out += [
        f"{name}: .metadata says where its bytes are, but not what they are"
        for name in metadata.unused
    ]
    return contents, metadata


def _join_chunks(
    label: str, tensor: ChunkedTensor, chunks: Sequence[tuple[Box, StoredArray | StoredComposite]]
) -> StoredTensor | StoredComposite:
    """Return the tensor that chunks make up.

    Raises:
        FormatError: only some of the chunks wrap other tensors.
        UnplaceableError: nobody knows which part of an inner tensor belongs to a chunk.
    """
    plain = [(box.offset, each) for box, each in chunks if isinstance(each, StoredArray)]
    wrappers = [
        (((box, Box.whole(box.shape)),), each)
        for box, each in chunks
        if isinstance(each, StoredComposite)
    ]
    if not wrappers:
        return StoredTensor(tensor.dtype, tensor.shape, tuple(plain))
    if plain:
        raise FormatError(
            f"{label}: some of its chunks are plain tensors, and others wrap tensors: the files "
            "are from different saves: copy all files of one save"
        )
    return join_shards(label, tensor.shape, wrappers)


def read_state(tree: FileTree, builder: Builder, name: str = METADATA) -> dict[Any, Any]:
    """Return the nested state that DCP flattened; see `read_contents`.

    If the metadata has no path for a name, the path consists of this name.
    """
    contents, metadata = read_contents(tree, builder, name)
    return nest((metadata.paths.get(key, (key,)), leaf) for key, leaf in contents.items())


def _check_array(
    array: StoredArray | StoredComposite, dtype: str, chunk: Box, label: str, item: FilePart
) -> None:
    if (array.dtype, array.shape) != (dtype, chunk.shape):
        raise FormatError(
            f"{label}: the chunk at {list(chunk.offset)} in {item.file} is {array.dtype} of shape "
            f"{list(array.shape)}, but .metadata says {dtype} of shape {list(chunk.shape)}: the "
            "files are from different saves: copy all files of one save"
        )


def _find_item(metadata: Metadata, name: str, offset: Ints | None, path: str) -> FilePart:
    item = metadata.items.get(item_key(name, offset))
    if item is None:
        chunk = "" if offset is None else f" at {list(offset)}"
        raise FormatError(
            f"{path}: {name}{chunk}: the metadata does not say where it is: the file "
            "is damaged, or from an incomplete save: copy all files of one save"
        )
    return item
