"""A file for each rank, named after it: the arrays of all ranks, for a specification to read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.errors import CheckpointNotFoundError, FormatError
from shardwise.formats.build import same_plain
from shardwise.formats.containers.pickle_values import Record
from shardwise.formats.containers.ranges import FileRange
from shardwise.formats.containers.safetensors import is_safetensors, read_header
from shardwise.formats.containers.torch_files import read_torch_file
from shardwise.formats.containers.torch_values import DTENSORS, StoredShard
from shardwise.formats.foreign import Catalogue, StoredArray, catalogued
from shardwise.formats.tree import Tree
from shardwise.manifest.table import Int

THREADS = 8
_AXIS = re.compile(r"\{([a-z_][a-z0-9_]*)\}")


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The arrays of all ranks, and the plain values of the first, by their names.

    Attributes:
        left_out: values that other ranks have, and that are not those; one line each.
    """

    catalogue: Catalogue
    values: Mapping[str, Any]
    left_out: Sequence[str] = ()


def read_rank_files(tree: Tree, pattern: str) -> RankFiles:
    """Read what lies in the files of all ranks; no array is read.

    Args:
        pattern: the path of a file, an axis of the ranks in braces where it has a number:
            `mp_rank_{tp}_{pp}/model.pt`. Files are those of torch.save, or of safetensors; what
            is nested has its names joined by dots.

    Raises:
        CheckpointNotFoundError: no file has such a name.
        FormatError: a rank has no file, or a file is malformed.
    """
    axes = _AXIS.findall(pattern)
    found = dict(_matching(tree, pattern))
    if not found:
        raise CheckpointNotFoundError(f"{tree} has no file that is named like {pattern}")
    coordinate = np.array(list(found.values()), np.int64).reshape(len(found), len(axes))
    sizes = {axis: int(n) + 1 for axis, n in zip(axes, coordinate.max(axis=0), strict=True)}
    _check_complete(tree, pattern, coordinate, sizes)
    with ThreadPoolExecutor(THREADS, "shardwise-open") as pool:
        read = list(pool.map(lambda item: _read(tree, item[1], item[0]), enumerate(found)))
    rows = [
        (name, array, rank)
        for rank, file in zip(found.values(), read, strict=True)
        for name, array in file.arrays.items()
    ]
    catalogue = catalogued(list(map(tree.file, found)), sizes, rows)
    return RankFiles(catalogue, read[0].values, unlike_values([file.values for file in read]))


def unlike_values(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines about the values of which ranks have others than the first, whose are taken."""
    found = []
    for name in dict.fromkeys(name for values in ranks for name in values):
        if name not in ranks[0]:
            found.append(f"{name}: the first rank, whose values are taken, has none")
            continue
        having = [values for values in ranks[1:] if name in values]
        others = sum(not same_plain(values[name], ranks[0][name]) for values in having)
        if others:
            found.append(f"{name}: {others} ranks have other values; that of the first is taken")
    return found


@dataclass(frozen=True, slots=True)
class _File:
    arrays: Mapping[str, StoredArray]
    values: Mapping[str, Any]


def _matching(tree: Tree, pattern: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    parts = _AXIS.split(pattern)
    expression = "".join(
        r"(\d{1,9})" if at % 2 else re.escape(part) for at, part in enumerate(parts)
    )
    for name in tree.sizes:
        match = re.fullmatch(expression, name)
        if match is not None:
            yield name, tuple(map(int, match.groups()))


def _check_complete(tree: Tree, pattern: str, coordinate: Int, sizes: Mapping[str, int]) -> None:
    expected = int(np.prod(list(sizes.values()), dtype=np.float64))
    distinct = len(np.unique(coordinate, axis=0))
    if distinct < len(coordinate):
        raise FormatError(f"{tree}: two files are of one rank, by {pattern}")
    if distinct < expected:
        ranks = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        raise FormatError(f"{tree} has {distinct} files like {pattern}, not {expected} ({ranks})")


def _read(tree: Tree, name: str, number: int) -> _File:
    with closing(tree.open(name)) as file:
        part = FileRange.whole(file, number, f"{tree}/{name}")
        if is_safetensors(part.read(0, min(64, part.size))):
            return _File(read_header(part).arrays, {})
        value = read_torch_file(part, stubs=DTENSORS, opaque=True).value
    arrays: dict[str, StoredArray] = {}
    values: dict[str, Any] = {}
    for path, leaf in _leaves(value, ""):
        if isinstance(leaf, StoredShard):
            arrays[path] = leaf.local
        elif isinstance(leaf, StoredArray):
            arrays[path] = leaf
        else:
            values[path] = leaf
    return _File(arrays, values)


def _leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    items: Mapping[Any, object]
    if isinstance(value, dict):
        items = value
    elif isinstance(value, (list, tuple)) and any(_holds_arrays(each) for each in value):
        items = dict(enumerate(value))
    elif isinstance(value, Record):
        items = value.fields
    else:
        yield path, value
        return
    for key, each in items.items():
        yield from _leaves(each, f"{path}.{key}" if path else str(key))


def _holds_arrays(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_arrays, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_holds_arrays, value))
    return isinstance(value, (StoredArray, StoredShard))
