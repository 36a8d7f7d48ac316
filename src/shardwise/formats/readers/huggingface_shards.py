"""Shards of safetensors that `torch.distributed.checkpoint.HuggingFaceStorageWriter` leaves.

Each rank writes files of its own; their headers say where in its tensor each array begins.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing

import msgspec

from shardwise.errors import CheckpointNotFoundError, FormatError
from shardwise.formats.containers.ranges import FileRange
from shardwise.formats.containers.safetensors import Header, read_header
from shardwise.formats.foreign import Foreign, StoredArray
from shardwise.formats.laying.lay import lay_boxes
from shardwise.formats.laying.leaves import Builder
from shardwise.formats.tree import Tree
from shardwise.manifest.manifest import Dims

FORMAT = "Hugging Face sharded by DCP"
_FILE = re.compile(r"shard-(\d{5,7})-model-(\d{5,7})-of-(\d{5,7})\.safetensors")
_PLACES = "DCP_SHARDING_INFO"

_Box = tuple[Dims, StoredArray]


def recognise(tree: Tree) -> bool:
    """Whether a place has such files, or is one."""
    return any(map(_FILE.fullmatch, tree.sizes))


def read(tree: Tree) -> Foreign:
    """Read what all ranks wrote; names are below `model`, as those of a published model.

    How large a tensor is stands nowhere: it ends where its last shard does.

    Raises:
        CheckpointNotFoundError: this is one of the files.
        FormatError: a file is missing or malformed, or says nothing of where its arrays belong.
    """
    if tree.only is not None:
        raise CheckpointNotFoundError(f"{tree} is one of several shards: open {tree.path.parent}")
    names = [name for name in tree.sizes if _FILE.fullmatch(name)]
    _check_complete(tree, names)
    boxes: dict[str, list[_Box]] = {}
    left_out: list[str] = []
    for number, name in enumerate(names):
        with closing(tree.open(name)) as file:
            part = FileRange.whole(file, number, f"{tree}/{name}")
            header = read_header(part)
        for tensor, box in _boxes(header, part.where):
            boxes.setdefault(tensor, []).append(box)
        left_out += [f"{tensor} in {name}: {why}" for tensor, why in header.left_out.items()]
    rows = [
        (number, offset, array)
        for number, found in enumerate(boxes.values())
        for offset, array in found
    ]
    builder = Builder(tuple(map(tree.file, names)), lay_boxes(rows), left_out)
    for tensor, found in boxes.items():
        builder.add_tensor(f"model.{tensor}", *_whole(tensor, found))
    return builder.build(FORMAT)


def _check_complete(tree: Tree, names: list[str]) -> None:
    """Whether all ranks up to the last are there, and all files of the model."""
    found = [match for name in names if (match := _FILE.fullmatch(name)) is not None]
    largest = max(int(match[3]) for match in found)
    for what, numbers, count in (
        ("shard", {int(match[1]) for match in found}, max(int(match[1]) for match in found)),
        ("model", {int(match[2]) for match in found}, largest),
    ):
        missing = next((number for number in range(1, count + 1) if number not in numbers), None)
        if missing is not None:
            raise FormatError(f"{tree}: there is no file of {what}-{missing:05}, of {count}")


def _boxes(header: Header, where: str) -> Iterator[tuple[str, _Box]]:
    """The arrays of a file, and where each begins in its tensor."""
    try:
        places = msgspec.json.decode(header.metadata.get(_PLACES, "{}"), type=dict[str, _Place])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise FormatError(f"{where}: its {_PLACES} is malformed: {error}") from error
    for name, array in header.arrays.items():
        place = places.get(name)
        if place is None or len(place.saved_offsets) != len(array.shape):
            raise FormatError(f"{where}: it does not say where in {name[:200]!r} its array belongs")
        yield name, (place.saved_offsets, array)


class _Place(msgspec.Struct, frozen=True):
    saved_offsets: Dims


def _whole(name: str, boxes: list[_Box]) -> tuple[str, tuple[int, ...]]:
    """The dtype and shape of the tensor that shards make up."""
    kinds = {(array.dtype, len(array.shape)) for _, array in boxes}
    if len(kinds) > 1:
        raise FormatError(f"{name}: its shards have different dtypes, or dimensions")
    ends = [[a + n for a, n in zip(at, array.shape, strict=True)] for at, array in boxes]
    return boxes[0][1].dtype, tuple(map(max, zip(*ends, strict=True)))
