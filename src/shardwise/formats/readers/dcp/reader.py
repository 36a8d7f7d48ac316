"""PyTorch Distributed Checkpoint, as written by FSDP, DTensor, torchtitan, Lightning and others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardwise.errors import CheckpointNotFoundError, FormatError
from shardwise.formats.containers.pickle_values import Stubs
from shardwise.formats.foreign import Foreign, ForeignFile, PieceTable, StoredArray
from shardwise.formats.nested import Leaves, foreign_of
from shardwise.formats.optimizers import Path, is_of_optimizer
from shardwise.formats.readers.dcp.items import Arrays, find_arrays, read_values
from shardwise.formats.readers.dcp.metadata import METADATA, Item, Metadata, read_metadata
from shardwise.formats.tree import Tree
from shardwise.manifest.table import Int, Pieces, check_width, padded_rows


def fold(values: Mapping[Path, Any], tensors: Iterable[Path]) -> dict[Path, Any]:
    """Join values that DCP flattened: dicts and lists without tensors become one value each.

    The state of a scheduler or data loader is one value again, as its `load_state_dict` expects.
    Values of optimizers stay flattened.
    """
    sharded = {path[:n] for path in tensors for n in range(1, len(path) + 1)}
    folded: dict[Path, Any] = {}
    for path, value in values.items():
        cut = next((n for n in range(1, len(path)) if path[:n] not in sharded), len(path))
        if cut == len(path) or is_of_optimizer(path):
            folded[path] = value
            continue
        here = folded.setdefault(path[:cut], {})
        for part in path[cut:-1]:
            here = here.setdefault(part, {})
        here[path[-1]] = value
    return {
        path: with_lists(value) if path not in values else value for path, value in folded.items()
    }


def with_lists(value: Any) -> Any:
    """Replace dicts with integer keys by the lists that were flattened to them."""
    if not isinstance(value, dict):
        return value
    made = {key: with_lists(each) for key, each in value.items()}
    numbered = len(made) > 0 and all(type(key) is int for key in made)
    return [made[key] for key in sorted(made)] if numbered else made


_RANK = re.compile(r"(?:.*/)?__(\d{1,7})_\d+\.distcp")


@dataclass(frozen=True, slots=True)
class Stored:
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


def read_stored(
    tree: Tree,
    metadata: Metadata,
    *,
    folder: str = "",
    first: int = 0,
    stubs: Stubs | None = None,
    find: Callable[[Tree, Chunks], Arrays] | None = None,
) -> Stored:
    """Find the bytes of all tensors, and read all values.

    Args:
        folder: the folder of the files below the tree; empty, or ends in `/`.
        first: the number of the first file.
        stubs: names that are allowed in pickles, in addition to torch's.
        find: finds the arrays of chunks, for formats whose items are not files of torch.save.

    Raises:
        FormatError: a file or item is missing, or does not agree with the metadata.
    """
    chunks = Chunks(metadata, folder)
    values = {name: _item(metadata, folder, name, None) for name in metadata.values}
    used = sorted({item.file for item in (*chunks.items, *values.values())})
    tree.require(used, f"{METADATA} names")
    files = tuple(tree.file(name) for name in used)
    number = {name: i for i, name in enumerate(used, first)}
    arrays = find_arrays(tree, chunks.names, chunks.items) if find is None else find(tree, chunks)
    chunks.check(metadata, arrays.kinds, arrays.kind)
    kinds = padded_rows([kind.stride for kind in arrays.kinds], chunks.offset.shape[1], 0)
    file = np.array([number[item.file] for item in chunks.items], np.int64)
    pieces = Pieces(chunks.tensor, file, arrays.start, chunks.offset, chunks.shape)
    numbers = [number[item.file] for item in values.values()]
    read = read_values(tree, list(values), list(values.values()), numbers, stubs)
    return Stored(
        files,
        tuple(metadata.tensors),
        tuple(tensor.dtype for tensor in metadata.tensors.values()),
        tuple(tensor.shape for tensor in metadata.tensors.values()),
        PieceTable(pieces, kinds[arrays.kind]),
        dict(zip(values, read, strict=True)),
        tuple(_unused(metadata)),
    )


def world_size(files: Sequence[ForeignFile]) -> int:
    """Return the number of ranks that wrote the files, judging by their names."""
    ranks = [int(match[1]) for file in files if (match := _RANK.fullmatch(file.name))]
    return max(ranks, default=0) + 1


class Chunks:
    """The non-empty chunks of all tensors and their items, in columns."""

    def __init__(self, metadata: Metadata, folder: str) -> None:
        self.names: list[str] = []
        self.items: list[Item] = []
        self.offsets: list[tuple[int, ...]] = []
        shape: list[tuple[int, ...]] = []
        tensor: list[int] = []
        for number, (name, each) in enumerate(metadata.tensors.items()):
            for chunk in dict.fromkeys(each.chunks):
                if 0 in chunk.shape:
                    continue
                self.names.append(name)
                self.items.append(_item(metadata, folder, name, chunk.offset))
                tensor.append(number)
                self.offsets.append(chunk.offset)
                shape.append(chunk.shape)
        dims = max((len(each.shape) for each in metadata.tensors.values()), default=0)
        check_width(len(tensor), dims)
        self.tensor: Int = np.array(tensor, np.int64)
        self.offset = padded_rows(self.offsets, dims, 0)
        self.shape = padded_rows(shape, dims, 1)

    def check(self, metadata: Metadata, kinds: Sequence[StoredArray], kind: Int) -> None:
        """Check that arrays have the dtype and shape of their chunks.

        Raises:
            FormatError: an array has others.
        """
        if not self.names:
            return
        dtypes = [tensor.dtype for tensor in metadata.tensors.values()]
        known = {dtype: i for i, dtype in enumerate({*dtypes, *(k.dtype for k in kinds)})}
        said = np.array([known[dtype] for dtype in dtypes], np.int64)[self.tensor]
        found = np.array([known[each.dtype] for each in kinds], np.int64)[kind]
        dims = self.shape.shape[1]
        if any(len(each.shape) > dims for each in kinds):
            raise FormatError("a chunk has more dimensions than any tensor")
        shapes = padded_rows([each.shape for each in kinds], dims, 1)[kind]
        wrong = (said != found) | (shapes != self.shape).any(axis=1)
        if wrong.any():
            row = int(np.argmax(wrong))
            array = kinds[int(kind[row])]
            name = self.names[row]
            raise FormatError(
                f"{name}: the chunk at {self.offset[row].tolist()} in {self.items[row].file} is "
                f"{array.dtype} of shape {list(array.shape)}, but .metadata says "
                f"{metadata.tensors[name].dtype} of shape {self.shape[row].tolist()}: the "
                "files are from different saves"
            )


def _item(metadata: Metadata, folder: str, name: str, offset: tuple[int, ...] | None) -> Item:
    item = metadata.items.get((name, offset))
    if item is None:
        at = "" if offset is None else f" at {list(offset)}"
        raise FormatError(f"{name}{at}: the metadata does not say where it is")
    return Item(folder + item.file, item.offset, item.length) if folder else item


def _unused(metadata: Metadata) -> list[str]:
    known = {*metadata.tensors, *metadata.values}
    names = dict.fromkeys(name for name, _ in metadata.items if name not in known)
    return [f"{name}: it has an item, but no shape" for name in names]


FORMAT = "PyTorch DCP"
_OF_LIGHTNING = re.compile(r"state_dict|optimizer_\d{1,4}")
"""Top-level names in Lightning's DCP files; the file `meta.pt` has the rest of the state."""


def recognise(tree: Tree) -> bool:
    """Whether a tree has the files of `torch.distributed.checkpoint`, or is one of them."""
    return any(name == METADATA or _is_data(name) for name in tree.sizes)


def _is_data(name: str) -> bool:
    return name.endswith(".distcp") and "/" not in name


def read(tree: Tree) -> Foreign:
    """Read a checkpoint of `torch.distributed.checkpoint`.

    Raises:
        CheckpointNotFoundError: the save was never finished, or the tree is a single file of it.
        FormatError: it is malformed, or compressed.
    """
    if tree.only is not None:
        parent = tree.path.parent
        raise CheckpointNotFoundError(
            f"{tree} is a part of a checkpoint of {FORMAT}: open {parent}"
        )
    if METADATA not in tree.sizes:
        raise CheckpointNotFoundError(
            f"{tree} has no {METADATA}, which {FORMAT} writes last: its save was never finished, "
            "or the file was not copied (`cp *` skips names that start with a dot)"
        )
    metadata = read_metadata(tree)
    stored = read_stored(tree, metadata)
    found = leaves(stored, metadata)
    tops = {str(path[0]) for path in (*(path for path, _, _ in found.tensors), *found.values)}
    absent = {}
    if "state_dict" in tops and all(map(_OF_LIGHTNING.fullmatch, tops)):
        absent = dict.fromkeys(
            ("model", "optimizer", "scheduler"), "meta.pt, which Lightning writes,"
        )
    foreign = foreign_of(found, FORMAT)
    return replace(foreign, world_size=world_size(stored.files), absent=absent)


def leaves(
    stored: Stored, metadata: Metadata, moved: Callable[[Path], Path] = lambda path: path
) -> Leaves:
    """Return the content by its path in the state. A name without a known path is a path itself.

    Args:
        moved: maps each path to the one to use.
    """
    paths = [moved(metadata.paths.get(name, (name,))) for name in stored.names]
    values = {
        moved(metadata.paths.get(name, (name,))): value for name, value in stored.values.items()
    }
    return Leaves(
        stored.files,
        list(zip(paths, stored.dtypes, stored.shapes, strict=True)),
        stored.table,
        fold(values, paths),
        stored.left_out,
    )
