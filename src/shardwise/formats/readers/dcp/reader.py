"""PyTorch Distributed Checkpoint, as written by FSDP, DTensor, torchtitan, Lightning and others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from shardwise.errors import CheckpointNotFoundError, FormatError
from shardwise.formats.containers.pickle_values import AllowedNames
from shardwise.formats.file_tree import FileTree
from shardwise.formats.foreign import Foreign, ForeignFile, PieceTable, StoredArray
from shardwise.formats.nested import NestedLeaves, build_foreign
from shardwise.formats.optimizers import Path, is_in_optimizer
from shardwise.formats.readers.dcp.items import ItemArrays, find_arrays, read_values
from shardwise.formats.readers.dcp.metadata import METADATA, Item, Metadata, read_metadata
from shardwise.manifest.pieces import Int, Pieces, check_table_size, padded_rows

FORMAT = "PyTorch DCP"
_DATA_FILE = re.compile(r"(?:.*/)?__(\d{1,7})_\d+\.distcp")
_LIGHTNING_KEY = re.compile(r"state_dict|optimizer_\d{1,4}")
"""Top-level keys in Lightning's DCP files; the file `meta.pt` has the rest of the state."""


def recognise(tree: FileTree) -> bool:
    """Return whether a tree has files of `torch.distributed.checkpoint`."""
    return any(
        name == METADATA or (name.endswith(".distcp") and "/" not in name) for name in tree.sizes
    )


def read(tree: FileTree) -> Foreign:
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
    content = read_content(tree, metadata)
    leaves = leaves_of(content, metadata)
    keys = {str(path[0]) for path in (*(path for path, _, _ in leaves.tensors), *leaves.values)}
    missing_files = {}
    if "state_dict" in keys and all(map(_LIGHTNING_KEY.fullmatch, keys)):
        missing_files = dict.fromkeys(
            ("model", "optimizer", "scheduler"), "meta.pt, which Lightning writes,"
        )
    foreign = build_foreign(leaves, FORMAT)
    return replace(foreign, world_size=count_ranks(content.files), missing_files=missing_files)


@dataclass(frozen=True, slots=True)
class DcpContent:
    """The content of a checkpoint under DCP's names.

    Attributes:
        files: the files.
        names, dtypes, shapes: columns of the tensors.
        table: the pieces of the tensors.
        values: values by name, with `StoredArray` for tensors in them.
        left_out: see `Foreign`.
    """

    files: tuple[ForeignFile, ...]
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    table: PieceTable
    values: Mapping[str, Any]
    left_out: tuple[str, ...]


def read_content(
    tree: FileTree,
    metadata: Metadata,
    *,
    folder: str = "",
    first_file_index: int = 0,
    also_allowed: AllowedNames | None = None,
    array_finder: Callable[[FileTree, Chunks], ItemArrays] | None = None,
) -> DcpContent:
    """Find the bytes of all tensors, and read all values.

    Args:
        folder: the folder of the files below the tree; empty, or ends in `/`.
        first_file_index: the index of the first file.
        also_allowed: names that are allowed in pickles, in addition to torch's.
        array_finder: a function that finds the arrays of chunks. By default, the items are files
            of torch.save.

    Raises:
        FormatError: a file or item is missing, or contradicts the metadata.
    """
    path = tree.label(f"{folder}{METADATA}")
    chunks = Chunks(metadata, folder, path)
    value_items = {name: _find_item(metadata, folder, name, None, path) for name in metadata.values}
    names = sorted({item.file for item in (*chunks.items, *value_items.values())})
    tree.require(names, f"{METADATA} names")
    files = tuple(tree.file(name) for name in names)
    file_indices_by_name = {name: i for i, name in enumerate(names, first_file_index)}
    arrays = (
        find_arrays(tree, chunks.names, chunks.items)
        if array_finder is None
        else array_finder(tree, chunks)
    )
    if arrays.unknown:
        read_known = partial(read_content, tree, metadata.without(arrays.unknown), folder=folder)
        content = read_known(
            first_file_index=first_file_index, also_allowed=also_allowed, array_finder=array_finder
        )
        left_out = [f"{name}: {found.reason}" for name, found in arrays.unknown.items()]
        return replace(content, left_out=(*content.left_out, *left_out))
    chunks.check_arrays(metadata, arrays)
    strides = padded_rows(
        [each.stride for each in arrays.distinct_arrays], chunks.offset.shape[1], 0
    )
    file_column = np.array([file_indices_by_name[item.file] for item in chunks.items], np.int64)
    pieces = Pieces(chunks.tensor, file_column, arrays.start, chunks.offset, chunks.shape)
    file_indices = [file_indices_by_name[item.file] for item in value_items.values()]
    values = read_values(
        tree, list(value_items), list(value_items.values()), file_indices, also_allowed
    )
    return DcpContent(
        files,
        tuple(metadata.tensors),
        tuple(tensor.dtype for tensor in metadata.tensors.values()),
        tuple(tensor.shape for tensor in metadata.tensors.values()),
        PieceTable(pieces, strides[arrays.distinct_index]),
        dict(zip(value_items, values, strict=True)),
        tuple(_describe_unused_items(metadata)),
    )


def count_ranks(files: Sequence[ForeignFile]) -> int:
    """Return the number of ranks that wrote the files, according to the names of the files."""
    ranks = [int(match[1]) for file in files if (match := _DATA_FILE.fullmatch(file.name))]
    return max(ranks, default=0) + 1


class Chunks:
    """The non-empty chunks of all tensors and their items, in columns.

    Attributes:
        names: the name of the tensor of each chunk.
        items: the item of each chunk.
        offset_tuples: the offset of each chunk, not padded.
        tensor: `(n,)`, the index of the tensor of each chunk.
        offset, shape: `(n, D)`, padded on the right with 0 and 1.
        metadata_path: the path of `.metadata`, for messages.
    """

    def __init__(self, metadata: Metadata, folder: str, path: str) -> None:
        self.names: list[str] = []
        self.items: list[Item] = []
        self.offset_tuples: list[tuple[int, ...]] = []
        self.metadata_path = path
        shape: list[tuple[int, ...]] = []
        tensor: list[int] = []
        for index, (name, chunked) in enumerate(metadata.tensors.items()):
            for chunk in dict.fromkeys(chunked.chunks):
                if 0 in chunk.shape:
                    continue
                self.names.append(name)
                self.items.append(_find_item(metadata, folder, name, chunk.offset, path))
                tensor.append(index)
                self.offset_tuples.append(chunk.offset)
                shape.append(chunk.shape)
        dims = max((len(chunked.shape) for chunked in metadata.tensors.values()), default=0)
        check_table_size(len(tensor), dims)
        self.tensor: Int = np.array(tensor, np.int64)
        self.offset = padded_rows(self.offset_tuples, dims, 0)
        self.shape = padded_rows(shape, dims, 1)

    def check_arrays(self, metadata: Metadata, arrays: ItemArrays) -> None:
        """Check that arrays have the dtypes and shapes of their chunks.

        Raises:
            FormatError: an array has another dtype or shape.
        """
        if not self.names:
            return
        distinct_arrays = arrays.distinct_arrays
        dtypes = [tensor.dtype for tensor in metadata.tensors.values()]
        dtype_codes = {
            dtype: i for i, dtype in enumerate({*dtypes, *(t.dtype for t in distinct_arrays)})
        }
        expected = np.array([dtype_codes[dtype] for dtype in dtypes], np.int64)[self.tensor]
        found = np.array([dtype_codes[t.dtype] for t in distinct_arrays], np.int64)[
            arrays.distinct_index
        ]
        dims = self.shape.shape[1]
        for name, index in zip(self.names, arrays.distinct_index.tolist(), strict=True):
            if len(distinct_arrays[index].shape) > dims:
                raise FormatError(
                    f"{self.metadata_path}: {name}: a chunk has shape "
                    f"{list(distinct_arrays[index].shape)} in its file, but no tensor in "
                    f"{METADATA} has more than {dims} dimensions: the files are from different "
                    "saves: copy all files of one save"
                )
        shapes = padded_rows([each.shape for each in distinct_arrays], dims, 1)[
            arrays.distinct_index
        ]
        is_mismatch = (expected != found) | (shapes != self.shape).any(axis=1)
        if is_mismatch.any():
            row = int(np.argmax(is_mismatch))
            array: StoredArray = distinct_arrays[int(arrays.distinct_index[row])]
            name = self.names[row]
            raise FormatError(
                f"{self.metadata_path}: {name}: the chunk at {self.offset[row].tolist()} in "
                f"{self.items[row].file} is {array.dtype} of shape {list(array.shape)}, but "
                f".metadata says {metadata.tensors[name].dtype} of shape "
                f"{self.shape[row].tolist()}: the files are from different saves: copy all files "
                "of one save"
            )


def _find_item(
    metadata: Metadata, folder: str, name: str, offset: tuple[int, ...] | None, path: str
) -> Item:
    item = metadata.items.get((name, offset))
    if item is None:
        chunk = "" if offset is None else f" at {list(offset)}"
        raise FormatError(
            f"{path}: {name}{chunk}: the metadata does not say where it is: the file "
            "is damaged, or from an incomplete save: copy all files of one save"
        )
    return Item(folder + item.file, item.offset, item.length) if folder else item


def _describe_unused_items(metadata: Metadata) -> list[str]:
    known_names = {*metadata.tensors, *metadata.values}
    names = dict.fromkeys(name for name, _ in metadata.items if name not in known_names)
    return [f"{name}: it has an item, but no shape" for name in names]


def leaves_of(
    content: DcpContent,
    metadata: Metadata,
    rename: Callable[[Path], Path] = lambda path: path,
) -> NestedLeaves:
    """Return the tensors and values by their paths in the state.

    If the metadata has no path for a name, the path consists of this name.

    Args:
        rename: a function that maps each path to the path to use.
    """
    paths = [rename(metadata.paths.get(name, (name,))) for name in content.names]
    values = {
        rename(metadata.paths.get(name, (name,))): value for name, value in content.values.items()
    }
    all_paths = {*paths, *(rename(metadata.paths.get(name, (name,))) for name in metadata.tensors)}
    return NestedLeaves(
        content.files,
        list(zip(paths, content.dtypes, content.shapes, strict=True)),
        content.table,
        unflatten_values(values, all_paths),
        content.left_out,
    )


def unflatten_values(values: Mapping[Path, Any], tensors: Iterable[Path]) -> dict[Path, Any]:
    """Join the values that DCP flattened: each dict or list without tensors becomes one value.

    So the state of a scheduler is one value, as its `load_state_dict` expects. Values of
    optimizers stay flattened.

    Args:
        values: the values by path.
        tensors: the paths of all tensors.
    """
    tensor_prefixes = {path[:n] for path in tensors for n in range(1, len(path) + 1)}
    unflattened: dict[Path, Any] = {}
    for path, value in values.items():
        value_depth = next(
            (n for n in range(1, len(path)) if path[:n] not in tensor_prefixes), len(path)
        )
        if value_depth == len(path) or is_in_optimizer(path):
            unflattened[path] = value
            continue
        parent = unflattened.setdefault(path[:value_depth], {})
        for part in path[value_depth:-1]:
            parent = parent.setdefault(part, {})
        parent[path[-1]] = value
    return {
        path: restore_lists(value) if path not in values else value
        for path, value in unflattened.items()
    }


def restore_lists(value: Any) -> Any:
    """Replace dicts with integer keys with the lists that were flattened to them."""
    if not isinstance(value, dict):
        return value
    restored = {key: restore_lists(item) for key, item in value.items()}
    is_list = len(restored) > 0 and all(type(key) is int for key in restored)
    return [restored[key] for key in sorted(restored)] if is_list else restored
