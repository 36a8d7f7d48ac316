"""Published models as Hugging Face stores them: safetensors or pytorch_model*.bin, with an index.

Names are those of the published model, below `model.`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from shardwise.errors import CheckpointNotFoundError, FormatError
from shardwise.formats.containers.ranges import FileRange
from shardwise.formats.containers.safetensors import METADATA, Header, is_safetensors, read_header
from shardwise.formats.containers.torch_files import read_torch_file
from shardwise.formats.foreign import Foreign, PieceTable, StoredArray
from shardwise.formats.laying.lay import with_ties
from shardwise.formats.laying.leaves import Builder
from shardwise.formats.tree import Tree
from shardwise.manifest.manifest import TensorEntry

FORMAT = "Hugging Face"
SAFETENSORS, PICKLED = ".safetensors", ".bin"
INDEX = ".index.json"
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.safetensors|\.bin)")
_LARGEST_INDEX = 2**28
_WEIGHTS = ("model", "pytorch_model", "adapter_model", "diffusion_pytorch_model")
_THREADS = 8


def recognise(tree: Tree) -> bool:
    """Whether a place is a file of safetensors or an index, or has the weights of a model."""
    if tree.only is None:
        return _weights(tree) is not None or bool(_without_index(tree))
    if tree.only.endswith(INDEX):
        return True
    with open(tree.path, "rb") as file:
        return is_safetensors(file.read(9))


def read(tree: Tree) -> Foreign:
    """Read a published model.

    Raises:
        CheckpointNotFoundError: the place is an index.
        FormatError: a file is malformed, or missing; files and index contradict each other.
    """
    if tree.only is not None and tree.only.endswith(INDEX):
        raise CheckpointNotFoundError(f"{tree} is an index alone: open {tree.path.parent}")
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
    builder = Builder(files, PieceTable.nothing(), [])
    for name, shard in zip(names, shards, strict=True):
        _add(builder, name, shard, index)
    if tree.only is not None and (found := _SHARD.fullmatch(tree.only)) is not None:
        builder.left_out.append(f"{tree.only} is one of {int(found[3])}: open {tree.path.parent}")
    if index is not None:
        _check_all_there(index, dict(zip(names, shards, strict=True)))
    foreign = with_ties(builder.build(FORMAT))
    return _with_removed(foreign, shards)


@dataclass(frozen=True, slots=True)
class _Shard:
    """What a file has.

    `left_out` has reasons by names; `same` are names that were removed when it was written, and
    those that they were tied to.
    """

    arrays: Mapping[str, StoredArray]
    left_out: Mapping[str, str]
    same: Mapping[str, str] = field(default_factory=dict)


def _weights(tree: Tree) -> str | None:
    """The file that has all weights, or says where they are: the one that transformers takes."""
    for suffix in (SAFETENSORS, PICKLED):
        for name in _WEIGHTS:
            for file in (f"{name}{suffix}", f"{name}{suffix}{INDEX}"):
                if file in tree.sizes:
                    return file
    return None


def _without_index(tree: Tree) -> list[str]:
    """The index and all shards that there should be, where there are shards and no index."""
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
        raise FormatError(
            f"{tree}/{name}: it says nothing of where weights are: {error}"
        ) from error
    for file in set(found.weight_map.values()):
        if not file.endswith((SAFETENSORS, PICKLED)):
            raise FormatError(f"{tree}/{name}: {file[:200]!r} is no file of weights")
    return found.weight_map


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _read_shard(tree: Tree, name: str, number: int) -> _Shard:
    with closing(tree.open(name)) as file:
        part = FileRange.whole(file, number, f"{tree}/{name}" if tree.only is None else str(tree))
        if not name.endswith(PICKLED):
            return _shard_of(read_header(part))
        value: Any = read_torch_file(part, opaque=tree.opaque).value
    if not isinstance(value, dict) or not all(type(key) is str for key in value):
        raise FormatError(f"{part.where}: it is no state_dict of a module")
    arrays = {key: each for key, each in value.items() if isinstance(each, StoredArray)}
    return _Shard(arrays, {key: "it is no tensor" for key in value if key not in arrays})


def _shard_of(header: Header) -> _Shard:
    removed = {
        name: kept
        for name, kept in header.metadata.items()
        if kept in header.arrays and name not in header.arrays
    }
    notes = {
        f"{METADATA}.{key}": "it is a note of whoever wrote the file"
        for key in header.metadata
        if key not in removed and key != "format"
    }
    return _Shard(header.arrays, {**header.left_out, **notes}, removed)


def _add(builder: Builder, file: str, shard: _Shard, index: Mapping[str, str] | None) -> None:
    for name, array in shard.arrays.items():
        if index is None or index.get(name) == file:
            builder.add_array(f"model.{name}", array)
        else:
            builder.left_out.append(f"{name} in {file}: the index does not look for it there")
    builder.left_out.extend(f"{name} in {file}: {why}" for name, why in shard.left_out.items())


def _check_all_there(index: Mapping[str, str], shards: Mapping[str, _Shard]) -> None:
    missing = [
        name
        for name, file in index.items()
        if name not in shards[file].arrays and name not in shards[file].left_out
    ]
    if missing:
        raise FormatError(
            f"the index names {len(missing)} tensor(s) that are not in their files, such as "
            f"{missing[0][:200]!r} in {index[missing[0]]}"
        )


def _with_removed(foreign: Foreign, shards: Sequence[_Shard]) -> Foreign:
    """With the names that safetensors left out because they were tied to others."""
    known = {entry.name: entry for entry in foreign.tensors}
    added = []
    for name, same in (
        (f"model.{a}", f"model.{b}") for shard in shards for a, b in shard.same.items()
    ):
        entry = known.get(same)
        if entry is not None and name not in known:
            added.append(TensorEntry(name, entry.dtype, entry.shape, same_as=entry.same_as or same))
    return replace(foreign, tensors=(*foreign.tensors, *added))
