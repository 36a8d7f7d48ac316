"""DCP's `.metadata` file: the tensors and values of a checkpoint, and where they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from shardwise.parts.formats.reader import (
    Box,
    FilePart,
    FileTree,
    FormatError,
    PickledInstance,
)

METADATA = ".metadata"
_COPY_AGAIN = "copy the file again from an intact source"
MOST_DIMENSIONS = 64
MOST_CHUNKS = 2**24
_LARGEST_INTEGER = 2**62
MOST_PATH_PARTS = 64
Path: TypeAlias = tuple[str | int, ...]
Ints: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChunkedTensor:
    """A global tensor and the boxes in which it was saved; `dtype` is torch's name."""

    dtype: str
    shape: Ints
    chunks: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class Metadata:
    """The content of `.metadata`.

    Attributes:
        tensors: tensors by name.
        values: names of the values that are not tensors.
        items: for each chunk and value, the range of a data file that contains it as a file of
            torch.save. The keys are results of `item_key`.
        unused: names of items that are neither tensors nor values.
        paths: for each name, its path in the saved state, if known.
        extra_fields: further fields, which formats built on DCP add.
    """

    tensors: Mapping[str, ChunkedTensor]
    values: tuple[str, ...]
    items: Mapping[str, FilePart]
    unused: tuple[str, ...]
    paths: Mapping[str, Path]
    extra_fields: Mapping[str, Any]


def item_key(name: str, offset: Ints | None) -> str:
    """Return the key of a chunk, or of a value, which has no offset.

    The key is text, because a file could choose numbers that all have the same hash.
    """
    return f"{name}\0{offset}"


def read_metadata(tree: FileTree, name: str = METADATA) -> Metadata:
    """Read `.metadata`, which is not trusted.

    Args:
        name: the name of the file below the tree. Its folder also has the data files.

    Raises:
        FormatError: it is malformed, contains objects of classes that shardwise does not read, or
            has compressed items.
    """
    path = tree.label(name)
    pickled_metadata = tree.load_pickle(name, classes=_METADATA_CLASSES)
    try:
        fields = _fields_of(pickled_metadata, "Metadata", "the content of the file")
        return _parse_metadata(fields, name.removesuffix(METADATA))
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise FormatError(
            f"{path}: not the metadata of a DCP checkpoint: {error!r}; copy the file again from an "
            "intact source"
        ) from error


_TORCH_DCP = "torch.distributed.checkpoint"
_OLD_TORCH = "torch.distributed._shard.sharded_tensor.metadata"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_BYTECHECKPOINT = "bytecheckpoint.checkpointer.meta_type"
_METADATA_CLASSES = (
    *(
        f"{_TORCH_DCP}.metadata.{name}"
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
        f"{_TORCH_DCP}.planner.{name}"
        for name in (
            "BytesIOWriteData",
            "SavePlan",
            "TensorWriteData",
            "WriteItem",
            "WriteItemType",
        )
    ),
    f"{_TORCH_DCP}.filesystem._StorageInfo",
    f"{_TORCH_DCP}.filesystem._StoragePrefix",
    f"{_OLD_TORCH}.MEM_FORMAT_ENCODING",
    f"{_MEGATRON}.MCoreMetadata",
    f"{_MEGATRON}.MCoreSavePlan",
    f"{_BYTECHECKPOINT}.Metadata",
    f"{_BYTECHECKPOINT}._StorageInfo",
)
_PARSED_FIELDS = {"state_dict_metadata", "planner_data", "storage_data"}


def _parse_metadata(fields: Mapping[str, Any], folder: str) -> Metadata:
    tensors: dict[str, ChunkedTensor] = {}
    values: list[str] = []
    chunk_count = 0
    for name, entry in fields["state_dict_metadata"].items():
        _require(isinstance(name, str) and name != "", "the name of a tensor or value is not text")
        if _is_instance_of(entry, "BytesStorageMetadata"):
            values.append(name)
        else:
            tensor_fields = _fields_of(entry, "TensorStorageMetadata", name)
            # Many tensors may refer to one list.
            chunk_count += len(tensor_fields["chunks"])
            if chunk_count > MOST_CHUNKS:
                raise FormatError(
                    f"the tensors have more than {MOST_CHUNKS} chunks, which is not supported: "
                    "save the checkpoint again from fewer ranks"
                )
            tensors[name] = _parse_tensor(name, tensor_fields)
    items = dict(_parse_items(fields["storage_data"] or {}, folder))
    known_names = {*tensors, *values}
    unused = dict.fromkeys(item.name for item in items.values() if item.name not in known_names)
    planned_paths = fields.get("planner_data") or {}
    _require(isinstance(planned_paths, dict), "planner_data is not a dict")
    paths = {
        name: _parse_path(name, planned_paths[name])
        for name in (*tensors, *values)
        if name in planned_paths
    }
    extra_fields = {key: value for key, value in fields.items() if key not in _PARSED_FIELDS}
    return Metadata(tensors, tuple(values), items, tuple(unused), paths, extra_fields)


def _parse_tensor(name: str, fields: Mapping[str, Any]) -> ChunkedTensor:
    shape = _require_ints(fields["size"], f"the shape of {name}")
    properties = _fields_of(fields["properties"], "TensorProperties", f"the properties of {name}")
    dtype = str(properties["dtype"]).removeprefix("torch.")
    chunks = []
    label = f"a chunk of {name}"
    for pickled_chunk in fields["chunks"]:
        chunk = _fields_of(pickled_chunk, "ChunkStorageMetadata", label)
        offset = _require_ints(chunk["offsets"], f"the offset of {label}")
        sizes = _require_ints(chunk["sizes"], f"the shape of {label}")
        _require(
            len(offset) == len(sizes) == len(shape),
            f"{name}: a chunk has {len(offset)} offsets and {len(sizes)} sizes, but the tensor has "
            f"{len(shape)} dimensions",
        )
        chunks.append(Box(offset, sizes))
    distinct = {item_key(name, (*chunk.offset, *chunk.shape)): chunk for chunk in chunks}
    return ChunkedTensor(dtype, shape, tuple(distinct.values()))


def parse_index(pickled_index: object) -> tuple[str, Ints | None]:
    """Return the name and offset in a `MetadataIndex`.

    Raises:
        FormatError: the index is malformed.
    """
    fields = _fields_of(pickled_index, "MetadataIndex", "the index of an item")
    name, offset = fields.get("fqn"), fields.get("offset")
    if not isinstance(name, str):
        raise FormatError(
            f"the index of an item: expected a text as its name (fqn), found a "
            f"{type(name).__name__}; {_COPY_AGAIN}"
        )
    return name, None if offset is None else _require_ints(offset, f"the offset of {name}")


def _parse_items(storage_data: Any, folder: str) -> Iterator[tuple[str, FilePart]]:
    for pickled_index, storage_info in storage_data.items():
        name, offset = parse_index(pickled_index)
        fields = _fields_of(storage_info, "_StorageInfo", f"the item of {name}")
        transforms = fields.get("transform_descriptors")
        if transforms:
            raise FormatError(
                f"{name} was saved with {', '.join(map(str, transforms))}: compressed data cannot "
                "be read in place; load it with torch and save it without compression"
            )
        file = fields["relative_path"]
        label = f"the offset and length of {name}"
        start, length = _require_ints((fields["offset"], fields["length"]), label)
        _require(isinstance(file, str), f"the item of {name} has no file name")
        yield item_key(name, offset), FilePart(folder + file, start, length, name)


def _parse_path(name: str, path: Any) -> Path:
    parts = path if isinstance(path, (tuple, list)) else ()
    _require(
        0 < len(parts) <= MOST_PATH_PARTS and all(isinstance(part, (str, int)) for part in parts),
        f"the path of {name} is not a list of 1 to {MOST_PATH_PARTS} strings and integers",
    )
    return tuple(parts)


def _fields_of(value: object, class_name: str, label: str) -> Mapping[str, Any]:
    if isinstance(value, PickledInstance) and _is_instance_of(value, class_name):
        return value.fields
    found = value.name if isinstance(value, PickledInstance) else type(value).__name__
    raise FormatError(f"{label}: expected a {class_name}, found a {found[:200]}; {_COPY_AGAIN}")


def _is_instance_of(value: object, class_name: str) -> bool:
    return isinstance(value, PickledInstance) and value.name.rpartition(".")[2] == class_name


def _require_ints(numbers: Any, label: str) -> Ints:
    if not isinstance(numbers, (tuple, list)):
        found = f"a {type(numbers).__name__}"
    elif len(numbers) > MOST_DIMENSIONS:
        found = f"{len(numbers)} numbers"
    else:
        wrong = [n for n in numbers if type(n) is not int or not 0 <= n <= _LARGEST_INTEGER]
        if not wrong:
            return tuple(numbers)
        found = "an integer outside of this range"
        if type(wrong[0]) is not int:
            found = f"a {type(wrong[0]).__name__} among them"
    raise FormatError(
        f"{label}: expected at most {MOST_DIMENSIONS} integers from 0 to {_LARGEST_INTEGER}, found "
        f"{found}; {_COPY_AGAIN}"
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise FormatError(f"{message}; {_COPY_AGAIN}")
