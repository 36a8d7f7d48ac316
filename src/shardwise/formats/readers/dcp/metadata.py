"""DCP's `.metadata` file: the tensors and values of a checkpoint, and where they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from shardwise.errors import FormatError
from shardwise.formats.containers.pickle_values import Record, Stubs, records
from shardwise.formats.containers.pickles import unpickle
from shardwise.formats.containers.torch_values import TORCH
from shardwise.formats.tree import Tree
from shardwise.manifest.manifest import LARGEST
from shardwise.manifest.validate import MOST_PIECES
from shardwise.state.keys import check_keys

METADATA = ".metadata"
MOST_DIMENSIONS = 64
MOST_PARTS = 64
Path: TypeAlias = tuple[str | int, ...]
Ints: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor."""

    offset: Ints
    shape: Ints


@dataclass(frozen=True, slots=True)
class ChunkedTensor:
    """A global tensor and the boxes in which it was saved; `dtype` is torch's name."""

    dtype: str
    shape: Ints
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Item:
    """Where the file of torch.save is that has a chunk or a value."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Metadata:
    """The content of `.metadata`.

    Attributes:
        tensors: tensors by name.
        values: names of the values that are not tensors.
        items: items by name and, for chunks of tensors, offset.
        paths: the path of a name in the saved state, if known.
        more: further fields, which formats built on DCP add.
    """

    tensors: Mapping[str, ChunkedTensor]
    values: tuple[str, ...]
    items: Mapping[tuple[str, Ints | None], Item]
    paths: Mapping[str, Path]
    more: Mapping[str, Any]


def read_metadata(tree: Tree, name: str = METADATA) -> Metadata:
    """Read `.metadata`, which is not trusted.

    Raises:
        FormatError: it is malformed, contains objects that are not read from pickles, or items are
            compressed.
    """
    where = f"{tree}/{name}"
    root = unpickle(tree.read(name), where, stubs=_STUBS, unfolded=False).value
    try:
        return _metadata(_fields(root, "Metadata"))
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from error
    except (AttributeError, KeyError, LookupError, TypeError, ValueError) as error:
        raise FormatError(f"{where}: not the metadata of a DCP checkpoint: {error!r}") from error


class _Properties(Record):
    """Properties of a tensor, which are pickled as a tuple that starts with the dtype."""

    __slots__ = ()

    def set_state(self, state: object) -> None:
        if not isinstance(state, tuple) or not state:
            raise TypeError("the properties of a tensor are not a tuple")
        self.fields["dtype"] = state[0]


_OWN = "torch.distributed.checkpoint"
_OLD = "torch.distributed._shard.sharded_tensor.metadata"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_BYTECHECKPOINT = "bytecheckpoint.checkpointer.meta_type"
_STUBS: Stubs = {
    **TORCH,
    **records(
        *(
            f"{_OWN}.metadata.{name}"
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        *(
            f"{_OWN}.planner.{name}"
            for name in (
                "BytesIOWriteData",
                "SavePlan",
                "TensorWriteData",
                "WriteItem",
                "WriteItemType",
            )
        ),
        f"{_OWN}.filesystem._StorageInfo",
        f"{_OWN}.filesystem._StoragePrefix",
        f"{_OLD}.MEM_FORMAT_ENCODING",
        f"{_MEGATRON}.MCoreMetadata",
        f"{_MEGATRON}.MCoreSavePlan",
        f"{_BYTECHECKPOINT}.Metadata",
        f"{_BYTECHECKPOINT}._StorageInfo",
    ),
    f"{_OWN}.metadata.TensorProperties": lambda *args: _Properties("TensorProperties", args),
    f"{_OLD}.TensorProperties": lambda *args: _Properties("TensorProperties", args),
}
_READ = {"state_dict_metadata", "planner_data", "storage_data"}


def _metadata(root: Mapping[str, Any]) -> Metadata:
    tensors: dict[str, ChunkedTensor] = {}
    values: list[str] = []
    chunks = 0
    for name, entry in root["state_dict_metadata"].items():
        _check(isinstance(name, str) and name != "", "a name is not text")
        if _is(entry, "BytesStorageMetadata"):
            values.append(name)
        else:
            fields = _fields(entry, "TensorStorageMetadata")
            # Many tensors may refer to one list.
            chunks += len(fields["chunks"])
            _check(chunks <= MOST_PIECES, f"it has more than the supported {MOST_PIECES} chunks")
            tensors[name] = _tensor(name, fields)
    listed = list(_items(root["storage_data"] or {}))
    check_keys(key for key, _ in listed)
    items = dict(listed)
    known = root.get("planner_data") or {}
    _check(isinstance(known, dict), "planner_data is not a dict")
    paths = {name: _path(name, known[name]) for name in (*tensors, *values) if name in known}
    more = {key: value for key, value in root.items() if key not in _READ}
    return Metadata(tensors, tuple(values), items, paths, more)


def _tensor(name: str, fields: Mapping[str, Any]) -> ChunkedTensor:
    shape = _ints(fields["size"], f"the shape of {name}")
    dtype = str(_fields(fields["properties"], "TensorProperties")["dtype"]).removeprefix("torch.")
    chunks = []
    for record in fields["chunks"]:
        chunk = _fields(record, "ChunkStorageMetadata")
        offset, sizes = _ints(chunk["offsets"], name), _ints(chunk["sizes"], name)
        _check(
            len(offset) == len(sizes) == len(shape),
            f"{name}: a chunk has another number of dimensions",
        )
        chunks.append(Chunk(offset, sizes))
    if len(chunks) > 1:
        check_keys(chunks)
    return ChunkedTensor(dtype, shape, tuple(chunks))


def index_of(record: object) -> tuple[str, Ints | None]:
    """Return the name and offset in a `MetadataIndex`, the key of an item.

    Raises:
        FormatError: it is malformed.
    """
    index = _fields(record, "MetadataIndex")
    name, offset = index.get("fqn"), index.get("offset")
    if not isinstance(name, str):
        raise FormatError("an item has no name")
    return name, None if offset is None else _ints(offset, f"the offset of {name}")


def _items(storage: Any) -> Iterator[tuple[tuple[str, Ints | None], Item]]:
    for record, info in storage.items():
        (name, offset), place = index_of(record), _fields(info, "_StorageInfo")
        transforms = place.get("transform_descriptors")
        _check(
            not transforms,
            f"{name} was saved with {', '.join(map(str, transforms or ()))}: compressed data "
            "cannot be read in place; load it with torch and save it without compression",
        )
        file = place["relative_path"]
        start, length = _ints((place["offset"], place["length"]), f"the place of {name}")
        _check(isinstance(file, str), f"{name} has no file")
        yield (name, offset), Item(file, start, length)


def _path(name: str, path: Any) -> Path:
    parts = path if isinstance(path, (tuple, list)) else ()
    _check(
        0 < len(parts) <= MOST_PARTS and all(isinstance(part, (str, int)) for part in parts),
        f"the path of {name} is malformed",
    )
    return tuple(parts)


def _fields(value: object, kind: str) -> Mapping[str, Any]:
    _check(_is(value, kind) and isinstance(value, Record), f"a {kind} is missing")
    return value.fields if isinstance(value, Record) else {}


def _is(value: object, kind: str) -> bool:
    return isinstance(value, Record) and value.name.rpartition(".")[2] == kind


def _ints(values: Any, what: str) -> Ints:
    _check(
        isinstance(values, (tuple, list))
        and len(values) <= MOST_DIMENSIONS
        and all(type(n) is int and 0 <= n <= LARGEST for n in values),
        f"{what} has invalid numbers",
    )
    return tuple(values)


def _check(holds: bool, complaint: str) -> None:
    if not holds:
        raise FormatError(complaint)
