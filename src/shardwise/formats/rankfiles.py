"""Reads files that ranks wrote separately, as arrays by rank that a specification describes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
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

_AXIS = re.compile(r"\{([a-z_][a-z0-9_]*)\}")


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The contents of all ranks' files.

    Attributes:
        catalogue: the arrays of all ranks.
        values: the plain values of the first rank, by name.
        left_out: a line for each name whose values differ between ranks.
    """

    catalogue: Catalogue
    values: Mapping[str, Any]
    left_out: Sequence[str]


def read_rank_files(tree: Tree, pattern: str) -> RankFiles:
    """Read the files of all ranks, of torch.save or safetensors; no array is read.

    Names of nested values are joined by dots.

    Args:
        pattern: the path of the files, with `{axis}` for the rank's number along an axis:
            `mp_rank_{tp}_{pp}/model.pt`.

    Raises:
        CheckpointNotFoundError: no file matches the pattern.
        FormatError: the file of a rank is missing, or a file is malformed.
    """
    axes = _AXIS.findall(pattern)
    found = dict(_matching(tree, pattern))
    if not found:
        raise CheckpointNotFoundError(f"{tree}: no file matches {pattern}")
    coordinate = np.array(list(found.values()), np.int64).reshape(len(found), len(axes))
    sizes = {axis: int(n) + 1 for axis, n in zip(axes, coordinate.max(axis=0), strict=True)}
    _check_complete(tree, pattern, coordinate, sizes)
    read = tree.read_each({name: number for number, name in enumerate(found)}, _read)
    rows = [
        (name, array, found[file])
        for file, (arrays, _) in read.items()
        for name, array in arrays.items()
    ]
    catalogue = catalogued(list(map(tree.file, found)), sizes, rows)
    values = [values for _, values in read.values()]
    return RankFiles(catalogue, values[0], unlike_values(values))


def unlike_values(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each name whose values differ from the first rank's, which are taken."""
    found = []
    for name in dict.fromkeys(name for values in ranks for name in values):
        if name not in ranks[0]:
            found.append(f"{name}: missing in the first rank's file, whose values are taken")
            continue
        having = [values for values in ranks[1:] if name in values]
        others = sum(not same_plain(values[name], ranks[0][name]) for values in having)
        if others:
            found.append(f"{name}: {others} ranks have other values; the first rank's is taken")
    return found


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
        raise FormatError(f"{tree}: two files belong to the same rank, by the pattern {pattern}")
    if distinct < expected:
        ranks = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        raise FormatError(f"{tree} has {distinct} files like {pattern}, not {expected} ({ranks})")


def _read(part: FileRange) -> tuple[Mapping[str, StoredArray], Mapping[str, Any]]:
    """Return the arrays and the plain values of a file by name."""
    if is_safetensors(part.read(0, min(64, part.size))):
        return read_header(part).arrays, {}
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
    return arrays, values


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
