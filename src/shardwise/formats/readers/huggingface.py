"""Hugging Face: published models, and the shards that DCP's `HuggingFaceStorageWriter` leaves.

Models are safetensors or pytorch_model*.bin files, possibly with an index. Names are those of the
published model, below `model.`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from shardwise.errors import CheckpointNotFoundError, FormatError
from shardwise.formats.build import Builder
from shardwise.formats.containers.safetensors import METADATA, Header, is_safetensors, read_header
from shardwise.formats.containers.torch_files import read_torch_file
from shardwise.formats.foreign import Foreign, StoredArray
from shardwise.formats.piece_tables import table_of_boxes, with_ties
from shardwise.formats.tree import Tree
from shardwise.manifest.manifest import Dims, TensorEntry

FORMAT = "Hugging Face"
SAFETENSORS, PICKLED = ".safetensors", ".bin"
INDEX = ".index.json"
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.safetensors|\.bin)")
_LARGEST_INDEX = 2**28
_WEIGHTS = ("model", "pytorch_model", "adapter_model", "diffusion_pytorch_model")
_THREADS = 8


def recognise(tree: Tree) -> bool:
    """Whether a tree is a safetensors file or an index, or has the weights of a model."""
    if tree.only is None:
        return _weights(tree) is not None or bool(_without_index(tree))
    if tree.only.endswith(INDEX):
        return True
    with open(tree.path, "rb") as file:
        return is_safetensors(file.read(9))


def read(tree: Tree) -> Foreign:
    """Read a published model.

    Raises:
        CheckpointNotFoundError: the tree is only an index.
        FormatError: a file is malformed or missing, or contradicts the index.
    """
    if tree.only is not None and tree.only.endswith(INDEX):
        raise CheckpointNotFoundError(f"{tree} is only an index: open {tree.path.parent}")
    main = tree.only or _weights(tree)
    if main is None:
        tree.require(_without_index(tree), "make up the model")
        raise FormatError(f"{tree} has no weights of a model")
    index = _read_index(tree, main) if main.endswith(INDEX) else None
    names = sorted(set(index.values())) if index is not None else [main]
    tree.require(names, f"{main} names")
    with ThreadPoolExecutor(_THREADS) as threads:
        shards = list(threads.map(partial(_read_shard, tree), names, range(len(names))))
    files = tuple(tree.file(name) for name in names)
    builder = Builder(files)
    for name, shard in zip(names, shards, strict=True):
        _add(builder, name, shard, index)
    if tree.only is not None and (found := _SHARD.fullmatch(tree.only)) is not None:
        builder.left_out.append(
            f"{tree.only} is one of {int(found[3])} files: open {tree.path.parent}"
        )
    if index is not None:
        _check_all_there(index, dict(zip(names, shards, strict=True)))
    foreign = with_ties(builder.build(FORMAT))
    return _with_removed(foreign, shards)


@dataclass(frozen=True, slots=True)
class _Shard:
    """The content of a file.

    Attributes:
        arrays: arrays by name.
        left_out: the reason why a name was left out, by name.
        same: names of tied tensors that were removed when the file was written, with the name of
            the tensor they were tied to.
    """

    arrays: Mapping[str, StoredArray]
    left_out: Mapping[str, str]
    same: Mapping[str, str] = field(default_factory=dict)


def _weights(tree: Tree) -> str | None:
    """Return the file or index with the weights, in the order in which transformers looks."""
    for suffix in (SAFETENSORS, PICKLED):
        for name in _WEIGHTS:
            for file in (f"{name}{suffix}", f"{name}{suffix}{INDEX}"):
                if file in tree.sizes:
                    return file
    return None


def _without_index(tree: Tree) -> list[str]:
    """If there are shards of a model, return the names that its index and shards should have."""
    found = [shard for name in tree.sizes if (shard := _SHARD.fullmatch(name)) is not None]
    known = [shard for shard in found if shard[1] in _WEIGHTS]
    if not known:
        return []
    stem, _, count, suffix = known[0].groups()
    numbers = range(1, int(count) + 1)
    return [f"{stem}{suffix}{INDEX}", *(f"{stem}-{n:05}-of-{count}{suffix}" for n in numbers)]


def _read_index(tree: Tree, name: str) -> dict[str, str]:
    try:
        found = msgspec.json.decode(tree.read(name, limit=_LARGEST_INDEX), type=_Index)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{tree}/{name}: not an index of weights: {error}") from error
    for file in set(found.weight_map.values()):
        if not file.endswith((SAFETENSORS, PICKLED)):
            raise FormatError(f"{tree}/{name}: {file[:200]!r} is not a file of weights")
    return found.weight_map


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _read_shard(tree: Tree, name: str, number: int) -> _Shard:
    with tree.open_range(name, number) as part:
        if not name.endswith(PICKLED):
            return _shard_of(read_header(part))
        value: Any = read_torch_file(part, opaque=tree.opaque).value
    if not isinstance(value, dict) or not all(type(key) is str for key in value):
        raise FormatError(f"{part.where}: not a state_dict of a module")
    arrays = {key: each for key, each in value.items() if isinstance(each, StoredArray)}
    return _Shard(arrays, {key: "not a tensor" for key in value if key not in arrays})


def _shard_of(header: Header) -> _Shard:
    removed = {
        name: kept
        for name, kept in header.metadata.items()
        if kept in header.arrays and name not in header.arrays
    }
    notes = {
        f"{METADATA}.{key}": "metadata of the program that wrote the file"
        for key in header.metadata
        if key not in removed and key != "format"
    }
    return _Shard(header.arrays, {**header.left_out, **notes}, removed)


def _add(builder: Builder, file: str, shard: _Shard, index: Mapping[str, str] | None) -> None:
    for name, array in shard.arrays.items():
        if index is None or index.get(name) == file:
            builder.add_array(f"model.{name}", array)
        else:
            builder.left_out.append(f"{name} in {file}: the index says that it is in another file")
    builder.left_out.extend(f"{name} in {file}: {why}" for name, why in shard.left_out.items())


def _check_all_there(index: Mapping[str, str], shards: Mapping[str, _Shard]) -> None:
    missing = [
        name
        for name, file in index.items()
        if name not in shards[file].arrays and name not in shards[file].left_out
    ]
    if missing:
        raise FormatError(
            f"the index names {len(missing)} tensor(s) that are not in their files, for example "
            f"{missing[0][:200]!r} in {index[missing[0]]}"
        )


def _with_removed(foreign: Foreign, shards: Sequence[_Shard]) -> Foreign:
    """Add the names that were removed because safetensors does not store tied tensors twice."""
    known = {entry.name: entry for entry in foreign.tensors}
    added = []
    for name, same in (
        (f"model.{a}", f"model.{b}") for shard in shards for a, b in shard.same.items()
    ):
        entry = known.get(same)
        if entry is not None and name not in known:
            added.append(TensorEntry(name, entry.dtype, entry.shape, same_as=entry.same_as or same))
    return replace(foreign, tensors=(*foreign.tensors, *added))


SHARDED_FORMAT = "Hugging Face sharded by DCP"
_SHARDED_FILE = re.compile(r"shard-(\d{5,7})-model-(\d{5,7})-of-(\d{5,7})\.safetensors")
_PLACES = "DCP_SHARDING_INFO"

_Box = tuple[Dims, StoredArray]


def recognise_sharded(tree: Tree) -> bool:
    """Whether a tree has shards of `HuggingFaceStorageWriter`, or is one."""
    return any(map(_SHARDED_FILE.fullmatch, tree.sizes))


def read_sharded(tree: Tree) -> Foreign:
    """Read the shards that ranks left before consolidation. Names are below `model`.

    The files do not contain shapes of tensors. A tensor ends where its last shard ends.

    Raises:
        CheckpointNotFoundError: the tree is one of the files.
        FormatError: a file is missing or malformed, or lacks the offsets of its arrays.
    """
    if tree.only is not None:
        raise CheckpointNotFoundError(f"{tree} is one of several shards: open {tree.path.parent}")
    names = [name for name in tree.sizes if _SHARDED_FILE.fullmatch(name)]
    _check_all_files(tree, names)
    boxes: dict[str, list[_Box]] = {}
    left_out: list[str] = []
    for number, name in enumerate(names):
        with tree.open_range(name, number) as part:
            header = read_header(part)
        for tensor, box in _boxes(header, part.where):
            boxes.setdefault(tensor, []).append(box)
        left_out += [f"{tensor} in {name}: {why}" for tensor, why in header.left_out.items()]
    rows = [
        (number, offset, array)
        for number, found in enumerate(boxes.values())
        for offset, array in found
    ]
    builder = Builder(map(tree.file, names))
    builder.add_table(table_of_boxes(rows))
    builder.left_out += left_out
    for tensor, found in boxes.items():
        builder.add_tensor(f"model.{tensor}", *_tensor_of(tensor, found))
    return builder.build(SHARDED_FORMAT)


def _check_all_files(tree: Tree, names: list[str]) -> None:
    """Check that the files of all ranks are there."""
    found = [match for name in names if (match := _SHARDED_FILE.fullmatch(name)) is not None]
    largest = max(int(match[3]) for match in found)
    for what, numbers, count in (
        ("shard", {int(match[1]) for match in found}, max(int(match[1]) for match in found)),
        ("model", {int(match[2]) for match in found}, largest),
    ):
        missing = next((number for number in range(1, count + 1) if number not in numbers), None)
        if missing is not None:
            raise FormatError(f"{tree}: the file of {what}-{missing:05} is missing, of {count}")


def _boxes(header: Header, where: str) -> Iterator[tuple[str, _Box]]:
    """Yield the arrays of a file, and the offset of each in its tensor."""
    try:
        places = msgspec.json.decode(header.metadata.get(_PLACES, "{}"), type=dict[str, _Place])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise FormatError(f"{where}: its {_PLACES} is malformed: {error}") from error
    for name, array in header.arrays.items():
        place = places.get(name)
        if place is None or len(place.saved_offsets) != len(array.shape):
            raise FormatError(f"{where}: it lacks the offset of its array in {name[:200]!r}")
        yield name, (place.saved_offsets, array)


class _Place(msgspec.Struct, frozen=True):
    saved_offsets: Dims


def _tensor_of(name: str, boxes: list[_Box]) -> tuple[str, tuple[int, ...]]:
    """Return the dtype and shape of the tensor that shards make up."""
    kinds = {(array.dtype, len(array.shape)) for _, array in boxes}
    if len(kinds) > 1:
        raise FormatError(f"{name}: its shards have different dtypes or numbers of dimensions")
    ends = [[a + n for a, n in zip(at, array.shape, strict=True)] for at, array in boxes]
    return boxes[0][1].dtype, tuple(map(max, zip(*ends, strict=True)))
