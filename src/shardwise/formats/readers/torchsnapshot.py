"""torchsnapshot 0.1: a JSON manifest over raw bytes and files of torch.save."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

import msgspec

from shardwise.errors import FormatError
from shardwise.formats.containers.torch_files import read_torch_file
from shardwise.formats.foreign import Foreign, StoredArray
from shardwise.formats.nested import Leaves, foreign_of
from shardwise.formats.optimizers import STATE, Path
from shardwise.formats.piece_tables import table_of_boxes
from shardwise.formats.readers.dcp.reader import fold, with_lists
from shardwise.formats.tree import Tree
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import Count, Dims

FORMAT = "torchsnapshot"
MANIFEST = ".snapshot_metadata"
MOST_PARTS = 64
_CONTAINERS: dict[str, type] = {"list": list, "dict": dict, "OrderedDict": dict}


class _Tensor(msgspec.Struct, frozen=True):
    location: str
    serializer: str
    dtype: str
    shape: Dims
    byte_range: tuple[Count, Count] | None = None


class _Shard(msgspec.Struct, frozen=True):
    offsets: Dims
    sizes: Dims
    tensor: _Tensor


class _Entry(msgspec.Struct, frozen=True):
    """An entry of the manifest. Its type determines which fields it has."""

    type: str
    location: str | None = None
    serializer: str | None = None
    dtype: str | None = None
    shape: Dims | None = None
    byte_range: tuple[Count, Count] | None = None
    shards: tuple[_Shard, ...] = ()
    chunks: tuple[_Shard, ...] = ()
    serialized_value: str | None = None


class _Manifest(msgspec.Struct, frozen=True):
    version: str
    world_size: int
    manifest: dict[str, _Entry]


def recognise(tree: Tree) -> bool:
    """Whether a tree has the file that torchsnapshot writes last."""
    return MANIFEST in tree.sizes


def read(tree: Tree) -> Foreign:
    """Read a snapshot. Values that differ between ranks are those of the first rank.

    Raises:
        FormatError: it is malformed, or from a version that wrote YAML.
    """
    where = f"{tree}/{MANIFEST}"
    try:
        manifest = msgspec.json.decode(tree.read(MANIFEST), type=_Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(
            f"{where} is not a manifest of torchsnapshot 0.1 (older versions wrote YAML, which is "
            f"not supported): {error}"
        ) from error
    snapshot = _Snapshot(tree, where)
    for key, entry in manifest.manifest.items():
        rank, _, rest = key.partition("/")
        parts = rest.split("/")
        if not rank.isdigit() or not rest or len(parts) > MOST_PARTS:
            raise FormatError(f"{where}: {key[:200]!r} is not a path below a rank")
        snapshot.add(int(rank), tuple(map(unquote, parts)), entry)
    return replace(snapshot.foreign(), world_size=max(1, manifest.world_size))


class _Snapshot:
    """The tensors and values of a snapshot, collected from the entries of its manifest."""

    def __init__(self, tree: Tree, where: str) -> None:
        self._tree = tree
        self._where = where
        self._files: dict[str, int] = {}
        self._kinds: dict[Path, type] = {}
        self._tensors: dict[Path, tuple[str, tuple[int, ...]]] = {}
        self._boxes: dict[tuple[Path, tuple[int, ...]], StoredArray] = {}
        self._values: dict[Path, Any] = {}
        self._rank: dict[Path, int] = {}
        self._again: list[tuple[Path, tuple[int, ...], StoredArray]] = []
        self._left_out: list[str] = []

    def add(self, rank: int, path: tuple[str, ...], entry: _Entry) -> None:
        """Add an entry of a rank."""
        name = ".".join(path)
        if entry.type in _CONTAINERS:
            self._kinds[path] = _CONTAINERS[entry.type]
        elif entry.type in ("ShardedTensor", "ChunkedTensor"):
            self._add_shards(name, path, entry)
        elif self._rank.setdefault(path, rank) != rank:
            self._add_again(rank, name, path, entry)
        elif entry.type == "Tensor":
            tensor = _whole(entry, name)
            self._tensors[path] = _dtype(tensor, name), tensor.shape
            self._boxes[path, (0,) * len(tensor.shape)] = self._array(tensor, name)
        else:
            self._values[path] = self._value(entry, name)

    def foreign(self) -> Foreign:
        """Return the checkpoint."""
        number = {path: i for i, path in enumerate(self._tensors)}
        boxes = [(number[path], offset, array) for (path, offset), array in self._boxes.items()]
        again = [(number[path], offset, array) for path, offset, array in self._again]
        files = tuple(map(self._tree.file, self._files))
        tensors = [(path, dtype, shape) for path, (dtype, shape) in self._tensors.items()]
        values = fold(self._assembled(), list(self._tensors))
        leaves = Leaves(files, tensors, table_of_boxes(boxes), values, self._left_out)
        return replace(foreign_of(leaves, FORMAT), replicas=table_of_boxes(again))

    def _add_shards(self, name: str, path: Path, entry: _Entry) -> None:
        shards = (*entry.shards, *entry.chunks)
        ends = [tuple(map(sum, zip(s.offsets, s.sizes, strict=False))) for s in shards]
        if not shards or any(len(s.offsets) != len(s.sizes) for s in shards):
            raise FormatError(f"{self._where}: {name} has no shards, or malformed ones")
        known = self._tensors.get(path, (_dtype(shards[0].tensor, name), ends[0]))
        if any(len(end) != len(known[1]) for end in ends):
            raise FormatError(
                f"{self._where}: {name} has shards with different numbers of dimensions"
            )
        shape = entry.shape or tuple(map(max, zip(known[1], *ends, strict=True)))
        self._tensors[path] = known[0], shape
        for shard in shards:
            array = self._array(shard.tensor, name)
            if array.shape != shard.sizes or array.dtype != known[0]:
                raise FormatError(f"{self._where}: a shard of {name} contradicts the manifest")
            first = self._boxes.setdefault((path, shard.offsets), array)
            if first.shape != array.shape:
                raise FormatError(f"{self._where}: shards of {name} overlap")
            if first != array:
                self._again.append((path, shard.offsets, array))

    def _add_again(self, rank: int, name: str, path: Path, entry: _Entry) -> None:
        """Add the entry of a further rank: a replica, an equal value, or left out."""
        if entry.type != "Tensor":
            if path in self._tensors or self._value(entry, name) != self._values[path]:
                self._left_out.append(f"{name}: the value of rank {rank} differs and is left out")
            return
        tensor = _whole(entry, name)
        if self._tensors.get(path) == (_dtype(tensor, name), tensor.shape):
            self._again.append((path, (0,) * len(tensor.shape), self._array(tensor, name)))
        else:
            self._left_out.append(f"{name}: the tensor of rank {rank} differs and is left out")

    def _array(self, tensor: _Tensor, name: str) -> StoredArray:
        dtype = _dtype(tensor, name)
        if tensor.serializer == "torch_save":
            found = self._saved(tensor.location, tensor.byte_range, name)
            if not isinstance(found, StoredArray) or found.shape != tensor.shape:
                raise FormatError(
                    f"{self._where}: {name} is not a tensor of the shape in the manifest"
                )
            return found
        if tensor.serializer != "buffer_protocol":
            raise FormatError(
                f"{self._where}: {name} was written with {tensor.serializer[:40]!r}, which is not "
                "supported: restore it with torchsnapshot"
            )
        start = tensor.byte_range[0] if tensor.byte_range else 0
        size = math.prod(tensor.shape) * DTYPES[dtype].itemsize
        if tensor.byte_range and tensor.byte_range[1] - start != size:
            raise FormatError(f"{self._where}: {name} has the wrong number of bytes for its shape")
        stride = tuple(math.prod(tensor.shape[i + 1 :]) for i in range(len(tensor.shape)))
        return StoredArray(self._file(tensor.location), start, dtype, tensor.shape, stride)

    def _value(self, entry: _Entry, name: str) -> Any:
        if entry.type == "object" and entry.location and entry.serializer == "torch_save":
            return self._saved(entry.location, None, name)
        if entry.type not in _PRIMITIVES or entry.serialized_value is None:
            raise FormatError(
                f"{self._where}: {name} is a {entry.type[:40]!r}, which is not supported"
            )
        try:
            return _PRIMITIVES[entry.type](entry.serialized_value)
        except (KeyError, ValueError, struct.error) as error:
            raise FormatError(
                f"{self._where}: {name} is not a valid {entry.type}: {error!r}"
            ) from error

    def _saved(self, location: str, within: tuple[int, int] | None, name: str) -> Any:
        number = self._file(location)
        with self._tree.open_range(location, number) as part:
            if within is not None:
                part = part.within(within[0], within[1] - within[0], name)
            return read_torch_file(part, opaque=self._tree.opaque).value

    def _file(self, location: str) -> int:
        self._tree.file(location)
        return self._files.setdefault(location, len(self._files))

    def _assembled(self) -> dict[Path, Any]:
        """Return the values, with lists without tensors joined again, and empty containers."""
        above = {path[:n] for path in self._tensors for n in range(1, len(path))}
        made: dict[Path, Any] = {}
        for path, value in self._values.items():
            lists = (n for n in range(1, len(path)) if self._kinds.get(path[:n]) is list)
            cut = next((n for n in lists if path[:n] not in above), len(path))
            here: dict[Any, Any] = made
            key: Any = path[:cut]
            for n in range(cut, len(path)):
                here = here.setdefault(key, {})
                in_list = self._kinds.get(path[:n]) is list and str(path[n]).isdigit()
                key = int(path[n]) if in_list else path[n]
            here[key] = value
        parents = {path[:n] for path in (*self._values, *self._tensors) for n in range(len(path))}
        for path, kind in self._kinds.items():
            if path not in parents and path[-1] != STATE:
                made[path] = kind()
        return {path: with_lists(value) for path, value in made.items()}


def _whole(entry: _Entry, name: str) -> _Tensor:
    if entry.location is None or not entry.serializer or not entry.dtype or entry.shape is None:
        raise FormatError(
            f"{name}: the entry of the tensor has no location, serializer, dtype or shape"
        )
    return _Tensor(entry.location, entry.serializer, entry.dtype, entry.shape, entry.byte_range)


def _dtype(tensor: _Tensor, name: str) -> str:
    dtype = tensor.dtype.removeprefix("torch.")
    if dtype not in DTYPES:
        raise FormatError(f"{name}: dtype {tensor.dtype[:40]!r} is not supported")
    return dtype


_PRIMITIVES: Mapping[str, Callable[[str], Any]] = {
    "int": int,
    "str": str,
    "bool": lambda text: {"True": True, "False": False}[text],
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "float": lambda text: struct.unpack("<d", base64.b64decode(text, validate=True))[0],
}
