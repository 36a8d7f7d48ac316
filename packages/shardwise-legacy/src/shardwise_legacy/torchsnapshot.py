"""torchsnapshot 0.1: a JSON manifest over raw bytes and files of torch.save."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import unquote

from shardwise.parts.formats.reader import (
    Builder,
    FileTree,
    FormatError,
    Placed,
    Reader,
    StoredArray,
    StoredTensor,
    nest,
)

MANIFEST = ".snapshot_metadata"
MOST_PATH_PARTS = 64
"""The most keys in the path of a tensor or value."""
STATE = "state"
Path: TypeAlias = tuple[str | int, ...]
_CONTAINERS: dict[str, type] = {"list": list, "dict": dict, "OrderedDict": dict}


@dataclass(frozen=True, slots=True)
class _Shard:
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: _Entry


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry of the manifest. Its type determines which fields it has.

    A tensor of a shard has no type.
    """

    type: str = ""
    location: str = ""
    serializer: str = ""
    dtype: str = ""
    shape: tuple[int, ...] | None = None
    byte_range: tuple[int, int] | None = None
    shards: tuple[_Shard, ...] = ()
    chunks: tuple[_Shard, ...] = ()
    serialized_value: str | None = None

    @property
    def torch_dtype(self) -> str:
        """Torch's name of the dtype."""
        return self.dtype.removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class _Manifest:
    version: str
    world_size: int
    manifest: dict[str, _Entry]


def recognise(tree: FileTree) -> bool:
    """Return whether a tree has the file that torchsnapshot writes last."""
    return MANIFEST in tree.sizes


def read(tree: FileTree, builder: Builder) -> None:
    """Read a snapshot. If values differ between ranks, the first rank's are taken.

    Raises:
        FormatError: it is malformed, or from a version that wrote YAML.
    """
    path = tree.label(MANIFEST)
    expected = "a JSON manifest of torchsnapshot 0.1 (load and save it with 0.1 if it is YAML)"
    manifest = tree.read_json(MANIFEST, _Manifest, expected)
    collector = _EntryCollector(tree, builder)
    for key, entry in manifest.manifest.items():
        rank, _, path_text = key.partition("/")
        parts = path_text.split("/")
        if not rank.isdigit() or not path_text or len(parts) > MOST_PATH_PARTS:
            raise FormatError(
                f"{path}: {key[:200]!r} is not a path below a rank: copy the manifest again from "
                "an intact source"
            )
        try:
            collector.add_entry(int(rank), tuple(map(unquote, parts)), entry)
        except FormatError as error:
            raise FormatError(f"{path}: {key[:200]}: {error}") from error
    builder.add_state(collector.state(), is_ordered=False)
    builder.world_size = max(1, manifest.world_size)


READER = Reader("torchsnapshot", recognise, read)


class _EntryCollector:
    """Collects the tensors and values of a snapshot from the entries of its manifest.

    Args:
        tree: the files.
        builder: receives the names of files, and in `left_out` what is not read.
    """

    def __init__(self, tree: FileTree, builder: Builder) -> None:
        self._tree = tree
        self._builder = builder
        self._containers: dict[Path, type] = {}
        self._tensors: dict[Path, tuple[str, tuple[int, ...]]] = {}
        self._boxes: dict[Path, dict[tuple[int, ...], StoredArray]] = {}
        self._values: dict[Path, Any] = {}
        self._first_rank_by_path: dict[Path, int] = {}
        self._replicas: dict[Path, list[Placed]] = {}

    def add_entry(self, rank: int, path: tuple[str, ...], entry: _Entry) -> None:
        """Add an entry of a rank.

        Raises:
            FormatError: the entry is malformed, or contradicts an earlier one.
        """
        if entry.type in _CONTAINERS:
            self._containers[path] = _CONTAINERS[entry.type]
        elif entry.type in ("ShardedTensor", "ChunkedTensor"):
            self._add_shards(path, entry)
        elif self._first_rank_by_path.setdefault(path, rank) != rank:
            self._add_replica(rank, path, entry)
        elif entry.type == "Tensor":
            array = self._read_array(entry)
            self._tensors[path] = array.dtype, array.shape
            self._boxes[path] = {(0,) * len(array.shape): array}
        else:
            self._values[path] = self._read_value(entry)

    def state(self) -> dict[Any, Any]:
        """Return the nested state of all entries."""
        leaves: dict[Path, Any] = {
            path: StoredTensor(
                dtype,
                shape,
                tuple(self._boxes[path].items()),
                tuple(self._replicas.get(path, ())),
            )
            for path, (dtype, shape) in self._tensors.items()
        }
        parents = {
            path[:n] for path in (*self._values, *self._tensors) for n in range(1, len(path))
        }
        leaves |= self._values
        leaves |= {
            path: container()
            for path, container in self._containers.items()
            if path not in parents and path[-1] != STATE
        }
        return nest({self._with_indices(path): leaf for path, leaf in leaves.items()}.items())

    def _with_indices(self, path: Path) -> Path:
        """Return a path in which the positions in lists are integers."""
        return tuple(
            int(part) if self._containers.get(path[:n]) is list and str(part).isdigit() else part
            for n, part in enumerate(path)
        )

    def _add_shards(self, path: Path, entry: _Entry) -> None:
        shards = (*entry.shards, *entry.chunks)
        if not shards:
            raise FormatError(
                "the tensor has no shards: copy the manifest again from an intact source"
            )
        for shard in shards:
            if len(shard.offsets) != len(shard.sizes):
                raise FormatError(
                    f"the shard at {list(shard.offsets)} has sizes in another number of "
                    f"dimensions, {list(shard.sizes)}: copy the manifest again from an intact "
                    "source"
                )
        ends = [tuple(map(sum, zip(s.offsets, s.sizes, strict=True))) for s in shards]
        dtype, known_shape = self._tensors.get(path, (shards[0].tensor.torch_dtype, ends[0]))
        if any(len(end) != len(known_shape) for end in ends):
            raise FormatError(
                "the tensor has shards with different numbers of dimensions, "
                f"{sorted({len(end) for end in (known_shape, *ends)})}: copy the manifest again "
                "from an intact source"
            )
        shape = entry.shape or tuple(map(max, zip(known_shape, *ends, strict=True)))
        self._tensors[path] = dtype, shape
        for shard in shards:
            array = self._read_array(shard.tensor)
            if array.shape != shard.sizes or array.dtype != dtype:
                raise FormatError(
                    f"the shard at {list(shard.offsets)} in {shard.tensor.location[:200]} is "
                    f"{array.dtype} of shape {list(array.shape)}, but should be {dtype} of shape "
                    f"{list(shard.sizes)}: copy all files of one save"
                )
            first = self._boxes.setdefault(path, {}).setdefault(shard.offsets, array)
            if first.shape != array.shape:
                raise FormatError(
                    f"two shards at {list(shard.offsets)} have the shapes {list(first.shape)} and "
                    f"{list(array.shape)}: copy all files of one save"
                )
            if first != array:
                self._replicas.setdefault(path, []).append((shard.offsets, array))

    def _add_replica(self, rank: int, path: Path, entry: _Entry) -> None:
        """Add a tensor of a further rank as a replica. Name what differs in `left_out`."""
        name = ".".join(map(str, path))
        if entry.type != "Tensor":
            if path in self._tensors or self._read_value(entry) != self._values[path]:
                self._builder.left_out.append(
                    f"{name}: the value of rank {rank} differs and is left out"
                )
            return
        array = self._read_array(entry)
        if self._tensors.get(path) == (array.dtype, array.shape):
            self._replicas.setdefault(path, []).append(((0,) * len(array.shape), array))
        else:
            self._builder.left_out.append(
                f"{name}: the tensor of rank {rank} differs and is left out"
            )

    def _read_array(self, tensor: _Entry) -> StoredArray:
        shape, dtype = tensor.shape, tensor.torch_dtype
        missing = [
            each for each in ("location", "serializer", "dtype") if not getattr(tensor, each)
        ]
        if shape is None or missing:
            missing += [] if shape is not None else ["shape"]
            raise FormatError(
                f"the entry of the tensor lacks {', '.join(missing)}: copy the manifest again from "
                "an intact source"
            )
        if tensor.serializer == "torch_save":
            saved = self._read_torch_file(tensor.location, tensor.byte_range)
            if not isinstance(saved, StoredArray) or saved.shape != shape:
                raise FormatError(
                    f"{tensor.location[:200]} should have a tensor of shape {list(shape)}, "
                    f"but has {_describe_saved(saved)}: copy all files of one save"
                )
            return saved
        if tensor.serializer != "buffer_protocol":
            raise FormatError(
                f"the tensor was written with {tensor.serializer[:40]!r}, which is not supported: "
                "restore it with torchsnapshot"
            )
        start = tensor.byte_range[0] if tensor.byte_range else 0
        array = StoredArray.contiguous(tensor.location, start, dtype, shape)
        size = math.prod(shape) * array.itemsize
        if tensor.byte_range and tensor.byte_range[1] - start != size:
            raise FormatError(
                f"its byte_range has {tensor.byte_range[1] - start} bytes, but shape "
                f"{list(shape)} of dtype {dtype} needs {size}: the manifest is damaged; "
                "copy the checkpoint again from an intact source"
            )
        self._add_file(tensor.location)
        return array

    def _read_value(self, entry: _Entry) -> Any:
        if entry.type == "object" and entry.location and entry.serializer == "torch_save":
            return self._read_torch_file(entry.location, None)
        if entry.type not in _PRIMITIVE_DECODERS or entry.serialized_value is None:
            raise FormatError(
                f"entries of type {entry.type[:40]!r} are not supported: restore the snapshot with "
                "torchsnapshot, and save it without this value"
            )
        try:
            return _PRIMITIVE_DECODERS[entry.type](entry.serialized_value)
        except (KeyError, ValueError, struct.error) as error:
            raise FormatError(
                f"not a valid {entry.type}: {error!r}: copy the manifest again from an intact "
                "source"
            ) from error

    def _read_torch_file(self, location: str, byte_range: tuple[int, int] | None) -> Any:
        """Return the value in a file of torch.save, which may be a range of a larger file."""
        self._add_file(location)
        with self._tree.open_range(location) as file:
            if byte_range is not None:
                start, stop = byte_range
                file = file.subrange(start, stop - start, "byte_range")
            return self._tree.load_range(file)

    def _add_file(self, location: str) -> None:
        self._tree.file(location)
        self._builder.add_file(location)


def _describe_saved(saved: object) -> str:
    if isinstance(saved, StoredArray):
        return f"a tensor of shape {list(saved.shape)}"
    return f"a {type(saved).__name__}"


_PRIMITIVE_DECODERS: Mapping[str, Callable[[str], Any]] = {
    "int": int,
    "str": str,
    "bool": lambda text: {"True": True, "False": False}[text],
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "float": lambda text: struct.unpack("<d", base64.b64decode(text, validate=True))[0],
}
"""Decodes the serialized values of each type."""
