"""Specifications that users pass to `open`, and the ranks' files that they describe."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.errors import CheckpointNotFoundError, FormatError, StateError
from shardwise.formats.build import Builder, unlike_values
from shardwise.formats.containers.pickle_values import Record
from shardwise.formats.containers.ranges import FileRange
from shardwise.formats.containers.safetensors import is_safetensors, read_header
from shardwise.formats.containers.torch_files import read_torch_file
from shardwise.formats.containers.torch_values import DTENSORS, StoredShard
from shardwise.formats.foreign import Catalogue, Foreign, StoredArray, catalogued
from shardwise.formats.language import Spec, apply_spec, parse
from shardwise.formats.specs import names, shipped
from shardwise.formats.tree import Tree
from shardwise.manifest.table import Int

_AXIS = re.compile(r"\{([a-z_][a-z0-9_]*)\}")


@dataclass(frozen=True, slots=True)
class Specification:
    """A specification of how stored arrays make up global tensors.

    Attributes:
        rules: the parsed text.
        sizes: values of numbers that the text declares with `let`.
        files: the pattern of the ranks' file names, with `{axis}` for the number along an axis;
            None to apply the rules to the global tensors of a checkpoint of any format.
    """

    rules: Spec
    sizes: Mapping[str, int]
    files: str | None = None

    def __str__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in sorted(self.sizes.items()))
        return f"{self.rules.source.text!r} ({sizes}; {self.files})"

    def read(self, tree: Tree) -> Foreign:
        """Read the files of the ranks.

        Raises:
            CheckpointNotFoundError: no file matches the pattern.
            FormatError: a file is missing or malformed.
            MismatchError: the rules do not fit; `problems` lists everything that is wrong.
        """
        catalogue, values = _read_rank_files(tree, self.files or "")
        laid = apply_spec(self.rules, catalogue, sizes=self.sizes)
        builder = Builder.of(laid)
        builder.left_out += unlike_values(values)
        for name, value in values[0].items():
            builder.add_value(name, value)
        return builder.build(f"files of ranks, {self.files}", replica_names=laid.replica_names)


def spec(
    source: str | os.PathLike[str], *, files: str | None = None, **sizes: int
) -> Specification:
    """Parse a specification, which says how stored arrays make up global tensors.

    docs/language.md describes the language. Pass the result as `spec=` to `open` or `load`.

    Args:
        source: the name of a built-in specification (`"megatron_llama"`), a path, or the text.
        files: the pattern of the ranks' file names, relative to the place that is opened. Braces
            stand for the number of an axis of ranks: `"mp_rank_{tp}/model_optim_rng.pt"`. Without
            it, the specification applies to the global tensors of the checkpoint.
        sizes: the numbers that the text declares with `let`.

    Raises:
        SpecError: the text has an error; the message shows the line and a caret.
        StateError: the file does not exist.
    """
    wrong = [name for name, size in sizes.items() if type(size) is not int]
    if wrong:
        raise StateError(f"{wrong[0]}={sizes[wrong[0]]!r}: expected a whole number")
    if isinstance(source, str) and ("->" in source or "\n" in source):
        return Specification(parse(source), sizes, files)
    if source in names():
        return Specification(shipped(str(source)), sizes, files)
    path = Path(source)
    if not path.is_file():
        ships = ", ".join(names())
        raise StateError(
            f"{str(source)!r} is neither a file, nor a built-in specification ({ships}), nor the "
            "text of one, which has a `->` on each line"
        )
    return Specification(parse(path.read_text(), str(path)), sizes, files)


def _read_rank_files(tree: Tree, pattern: str) -> tuple[Catalogue, list[Mapping[str, Any]]]:
    """Read the arrays and each rank's plain values from files of torch.save or safetensors.

    Names of nested values are joined by dots. No array is read.

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
    return catalogue, [values for _, values in read.values()]


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
