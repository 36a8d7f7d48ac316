"""Hugging Face: published models, and the shards that DCP's `HuggingFaceStorageWriter` leaves.

Models are safetensors or pytorch_model*.bin files, possibly with an index. The names of
tensors are the published names with the prefix `model.`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from shardwise.parts.formats.reader import (
    Builder,
    CheckpointNotFoundError,
    FileRange,
    FileTree,
    FormatError,
    Placed,
    Reader,
    StoredArray,
    StoredComposite,
    StoredTensor,
    UnknownObject,
    read_header,
)
from shardwise.parts.formats.torchao_names import find_composites, keys_of

SAFETENSORS, PICKLED = ".safetensors", ".bin"
INDEX = ".index.json"
_SHARD_FILE_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.safetensors|\.bin)")
_WEIGHTS = ("model", "pytorch_model", "adapter_model", "diffusion_pytorch_model")


def recognise(tree: FileTree) -> bool:
    """Return whether a tree is a safetensors file or an index, or has the weights of a model."""
    if tree.single_file is None:
        return _find_weights(tree) is not None or bool(_list_expected_files(tree))
    if tree.single_file.endswith(INDEX):
        return True
    return tree.container_of(tree.single_file) == "safetensors"


def read(tree: FileTree, builder: Builder) -> None:
    """Read a published model.

    Raises:
        CheckpointNotFoundError: the tree is only an index.
        FormatError: a file is malformed or missing, or contradicts the index.
    """
    if tree.single_file is not None and tree.single_file.endswith(INDEX):
        raise CheckpointNotFoundError(f"{tree} is only an index: open {tree.parent}")
    main_file = tree.single_file or _find_weights(tree)
    if main_file is None:
        tree.require(_list_expected_files(tree), "make up the model")
        raise FormatError(f"{tree} has no weights of a model: open the directory that has them")
    index = _read_index(tree, main_file) if main_file.endswith(INDEX) else None
    names = sorted(set(index.values())) if index is not None else [main_file]
    tree.require(names, f"{main_file} names")
    shards = tree.read_each(names, partial(_read_shard, tree))
    if index is not None:
        _require_indexed_tensors(tree, index, shards)
    weights: dict[str, StoredArray | StoredComposite] = {}
    metadata = {key: text for shard in shards.values() for key, text in shard.metadata.items()}
    for file, shard in shards.items():
        builder.add_file(file)
        for name, array in shard.arrays.items():
            if index is None or index.get(name) == file:
                weights[name] = array
            else:
                builder.left_out.append(
                    f"{name} in {file}: the index says that it is in another file"
                )
        builder.left_out += [
            f"{name} in {file}: {reason}" for name, reason in shard.left_out.items()
        ]
    weights = _join_inner_tensors(tree, builder, weights, metadata)
    builder.add_state({"model": weights} if weights else {})
    # safetensors does not store tied tensors twice.
    for name, owner in (tie for shard in shards.values() for tie in shard.removed_ties.items()):
        if owner in weights and f"model.{name}" not in builder:
            builder.add_tie(f"model.{name}", f"model.{owner}")
    match = _SHARD_FILE_NAME.fullmatch(tree.single_file or "")
    if match is not None:
        builder.left_out.append(
            f"{tree.single_file} is one of {int(match[3])} files: open {tree.parent}"
        )


READER = Reader("Hugging Face", recognise, read)


@dataclass(frozen=True, slots=True)
class _Shard:
    """The content of a file.

    Attributes:
        arrays: for each name, its array.
        left_out: for each name that was left out, the reason.
        removed_ties: names of tied tensors that were removed when the file was written, and the
            names of the tensors that they were tied to.
        metadata: the metadata with which torchao describes tensors.
    """

    arrays: Mapping[str, StoredArray | StoredComposite]
    left_out: Mapping[str, str]
    removed_ties: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)


def _find_weights(tree: FileTree) -> str | None:
    """Return the name of the file or index with the weights, as transformers finds it."""
    for suffix in (SAFETENSORS, PICKLED):
        for name in _WEIGHTS:
            for file in (f"{name}{suffix}", f"{name}{suffix}{INDEX}"):
                if file in tree.sizes:
                    return file
    return None


def _list_expected_files(tree: FileTree) -> list[str]:
    """Return the names that the index and shards of a model should have; empty without shards."""
    matches = [
        match for name in tree.sizes if (match := _SHARD_FILE_NAME.fullmatch(name)) is not None
    ]
    shards = [match for match in matches if match[1] in _WEIGHTS]
    if not shards:
        return []
    stem, _, count, suffix = shards[0].groups()
    numbers = range(1, int(count) + 1)
    return [f"{stem}{suffix}{INDEX}", *(f"{stem}-{n:05}-of-{count}{suffix}" for n in numbers)]


def _read_index(tree: FileTree, name: str) -> dict[str, str]:
    index = tree.read_json(name, _Index, "an index of weights")
    for file in set(index.weight_map.values()):
        if not file.endswith((SAFETENSORS, PICKLED)):
            raise FormatError(
                f"{tree.label(name)}: {file[:200]!r} is not a file of weights: an index "
                f"names files that end in {SAFETENSORS} or {PICKLED}; copy it again from an intact "
                "source"
            )
    return index.weight_map


@dataclass(frozen=True, slots=True)
class _Index:
    weight_map: dict[str, str]


def _read_shard(tree: FileTree, file: FileRange) -> _Shard:
    if not file.name.endswith(PICKLED):
        header = read_header(file)
        of_torchao = keys_of(header.metadata)
        removed = {
            name: kept
            for name, kept in header.metadata.items()
            if kept in header.arrays and name not in header.arrays
        }
        unread = {
            f"__metadata__.{key}": "metadata of the program that wrote the file"
            for key in header.metadata
            if key not in removed and key != "format" and key not in of_torchao
        }
        return _Shard(
            header.arrays,
            {**header.left_out, **unread},
            removed,
            {key: header.metadata[key] for key in of_torchao},
        )
    value = tree.load_range(file)
    if not isinstance(value, dict) or not all(type(key) is str for key in value):
        raise FormatError(
            f"{file.label}: expected a state_dict of a module (a dict with texts as keys), "
            f"found {type(value).__name__}: save model.state_dict() in this file"
        )
    arrays = {
        k: item for k, item in value.items() if isinstance(item, StoredArray | StoredComposite)
    }
    left_out = {
        key: item.reason if isinstance(item, UnknownObject) else "not a tensor"
        for key, item in value.items()
        if key not in arrays
    }
    return _Shard(arrays, left_out)


def _join_inner_tensors(
    tree: FileTree,
    builder: Builder,
    weights: dict[str, StoredArray | StoredComposite],
    metadata: Mapping[str, str],
) -> dict[str, StoredArray | StoredComposite]:
    """Return the weights, with one for all inner tensors that torchao's metadata describes."""
    arrays = {name: each for name, each in weights.items() if isinstance(each, StoredArray)}
    described = find_composites(metadata, arrays, str(tree))
    if described.unknown and not tree.skip_unknown:
        names = ", ".join(f"{name} ({kind})" for name, kind in described.unknown.items())
        raise FormatError(
            f"{tree}: tensors of classes of torchao that shardwise does not read: {names[:400]}: "
            "load them with torchao, and save tensor.dequantize(); or leave them out with "
            "skip_unknown=True"
        )
    builder.left_out += [
        f"{name}: a {kind} of torchao, which shardwise does not read"
        for name, kind in described.unknown.items()
    ]
    kept = {name: each for name, each in weights.items() if name not in described.used}
    if clashes := kept.keys() & described.tensors.keys():
        raise FormatError(f"{tree}: {min(clashes)}: both a tensor and its inner tensors")
    return {**kept, **described.tensors}


def _require_indexed_tensors(
    tree: FileTree, index: Mapping[str, str], shards: Mapping[str, _Shard]
) -> None:
    missing = [
        name
        for name, file in index.items()
        if name not in shards[file].arrays and name not in shards[file].left_out
    ]
    if missing:
        raise FormatError(
            f"{tree}: the files lack {len(missing)} tensor{'s' * (len(missing) > 1)} of the index, "
            f"for example {missing[0][:200]!r} in {index[missing[0]]}: the index is of another "
            "model; copy the index and all files from one place"
        )


_SHARDED_FILE = re.compile(r"shard-(\d{5,7})-model-(\d{5,7})-of-(\d{5,7})\.safetensors")
_OFFSETS_KEY = "DCP_SHARDING_INFO"


def recognise_sharded(tree: FileTree) -> bool:
    """Return whether a tree has shards of `HuggingFaceStorageWriter`, or is such a shard."""
    return any(map(_SHARDED_FILE.fullmatch, tree.sizes))


def read_sharded(tree: FileTree, builder: Builder) -> None:
    """Read the shards that ranks left before consolidation. Names have the prefix `model.`.

    The files do not contain shapes of tensors. A tensor ends where its last shard ends.

    Raises:
        CheckpointNotFoundError: the tree is one of the files.
        FormatError: a file is missing or malformed, or lacks the offsets of its arrays.
    """
    if tree.single_file is not None:
        raise CheckpointNotFoundError(f"{tree} is one of several shards: open {tree.parent}")
    names = [name for name in tree.sizes if _SHARDED_FILE.fullmatch(name)]
    _require_files_of_all_ranks(tree, names)
    boxes: dict[str, list[Placed]] = {}
    for name, header in tree.read_each(names, read_header).items():
        builder.add_file(name)
        text = header.metadata.get(_OFFSETS_KEY, "{}")
        saved = tree.decode_json(
            text, name, dict[str, dict[str, tuple[int, ...]]], f"a file with {_OFFSETS_KEY}"
        )
        for tensor, array in header.arrays.items():
            offset = saved.get(tensor, {}).get("saved_offsets")
            if offset is None or len(offset) != len(array.shape):
                raise FormatError(
                    f"{tree.label(name)}: {tensor[:200]}: {_OFFSETS_KEY} has no offset of "
                    f"{len(array.shape)} dimensions for this array: the file is damaged, or "
                    "HuggingFaceStorageWriter did not write it; copy it again from an intact source"
                )
            boxes.setdefault(tensor, []).append((offset, array))
        builder.left_out += [
            f"{tensor} in {name}: {reason}" for tensor, reason in header.left_out.items()
        ]
    for tensor, parts in boxes.items():
        dtype, shape = _find_dtype_and_shape(f"{tree}: {tensor}", parts)
        builder.add_array(f"model.{tensor}", StoredTensor(dtype, shape, tuple(parts)))


SHARDED_READER = Reader(
    "Hugging Face sharded by DCP", recognise_sharded, read_sharded, overrides=("hf",)
)


def _require_files_of_all_ranks(tree: FileTree, names: list[str]) -> None:
    """Require the files of all ranks."""
    matches = [match for name in names if (match := _SHARDED_FILE.fullmatch(name)) is not None]
    shards = {int(match[1]) for match in matches}
    models = {int(match[2]) for match in matches}
    last_model = max(int(match[3]) for match in matches)
    for part_name, numbers, count in (
        ("shard", shards, max(shards)),
        ("model", models, last_model),
    ):
        missing = next((number for number in range(1, count + 1) if number not in numbers), None)
        if missing is not None:
            raise FormatError(
                f"{tree}: the file {part_name}-{missing:05} of {count} is missing: copy the files "
                "of all ranks into this directory"
            )


def _find_dtype_and_shape(label: str, shards: list[Placed]) -> tuple[str, tuple[int, ...]]:
    """Return the dtype and shape of the tensor that shards make up."""
    kinds = {(array.dtype, len(array.shape)) for _, array in shards}
    if len(kinds) > 1:
        raise FormatError(
            f"{label}: its shards differ in dtype or number of dimensions: "
            f"{', '.join(f'{dtype} with {dims}' for dtype, dims in sorted(kinds))}: the files are "
            "from different saves: copy all files of one save"
        )
    ends = [[o + n for o, n in zip(offset, array.shape, strict=True)] for offset, array in shards]
    return shards[0][1].dtype, tuple(map(max, zip(*ends, strict=True)))
