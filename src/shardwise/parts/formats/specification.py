"""`sw.spec`: specifications that users pass to `open`, and the files that they describe."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.kernel.errors import CheckpointNotFoundError, FormatError, StateError
from shardwise.kernel.manifest.layout import Layout
from shardwise.parts.formats.containers.pickle_values import PickledInstance
from shardwise.parts.formats.containers.ranges import FileRange
from shardwise.parts.formats.containers.safetensors import is_safetensors, read_header
from shardwise.parts.formats.containers.torch_files import read_torch_file
from shardwise.parts.formats.families import DIRECTIONS, choose_by_config
from shardwise.parts.formats.file_tree import FileTree
from shardwise.parts.formats.foreign import (
    Row,
    StoredArray,
    StoredComposite,
    StoredPart,
    build_catalogue,
)
from shardwise.parts.formats.foreign_builder import Builder
from shardwise.parts.formats.language import Spec, apply_spec, parse
from shardwise.parts.formats.remap import remap
from shardwise.parts.formats.specs import builtin_names, load_builtin

_AXIS_PLACEHOLDER = re.compile(r"\{([a-z_][a-z0-9_]*)\}")


@dataclass(frozen=True, slots=True)
class Specification:
    """A specification of how stored arrays make up global tensors.

    Attributes:
        rules: the parsed text.
        let_values: the values of the numbers that the text declares with `let`.
        files: the pattern of the names of the ranks' files. `{axis}` stands for the coordinate of
            the rank along an axis. If None, the rules apply to the global tensors of a checkpoint.
    """

    rules: Spec
    let_values: Mapping[str, int]
    files: str | None = None

    def __str__(self) -> str:
        values = ", ".join(f"{name}={value}" for name, value in sorted(self.let_values.items()))
        return f"{self.rules.source.text!r} ({values}; {self.files})"

    def read(self, tree: FileTree) -> Layout:
        """Read the files of the ranks.

        Raises:
            CheckpointNotFoundError: no file matches the pattern.
            FormatError: a file is missing or malformed.
            MismatchError: the rules do not fit; `problems` lists everything that is wrong.
        """
        axes, files, rows, values = _read_rank_files(tree, self.files or "")
        builder = Builder(tree)
        for file in files:
            builder.add_file(file)
        add_by_specification(builder, self.rules, axes, rows, self.let_values)
        builder.add_values(values)
        builder.world_size = math.prod(axes.values())
        return builder.build(f"files of ranks, {self.files}")

    def apply(self, path: str, layout: Layout) -> Layout:
        """Return the layout of a checkpoint with the names and shapes that the rules give.

        With `files`, the rules were applied when the files were read, and nothing changes.

        Args:
            path: the path of the checkpoint, for messages.
            layout: the layout.

        Raises:
            MismatchError, StateError: as for `remap`.
        """
        return remap(path, layout, self.rules, self.let_values) if self.files is None else layout


def spec(
    source: str | os.PathLike[str],
    *,
    files: str | None = None,
    to: str | None = None,
    **let_values: int,
) -> Specification:
    """Parse a specification, which says how stored arrays make up global tensors.

    docs/language.md describes the language. Pass the result as `spec=` to `open` or `load`.

    Args:
        source: the name of a built-in specification (`"megatron_llama"`), a path, or the text; or
            the directory of a Hugging Face model, whose `config.json` then says which built-in
            specification belongs to the model, with which numbers.
        files: the pattern of the names of the ranks' files, relative to the opened directory.
            `{axis}` stands for the coordinate of the rank along an axis:
            `"mp_rank_{tp}/model_optim_rng.pt"`. Without a pattern, the specification applies to the
            global tensors of the checkpoint.
        to: with the directory of a model, whose names the tensors get: `"hf"` (the default), from
            those of Megatron-Core, or `"megatron"`, from those of Hugging Face.
        let_values: the numbers that the text declares with `let`, by name: `spec(…, vocab=50_257)`.

    Raises:
        SpecError: the text has an error; the message shows the line and a caret.
        StateError: the file does not exist, a value is not a whole number, or no built-in
            specification belongs to the model.
        FormatError: the `config.json` of the model is malformed, or lacks a number.
    """
    for name, value in let_values.items():
        if type(value) is not int:
            raise StateError(f"{name}={value!r}: expected a whole number, for example {name}=8")
    if to not in (None, *DIRECTIONS):
        raise StateError(f"to={to!r}: choose one of {', '.join(DIRECTIONS)}")
    is_text = isinstance(source, str) and ("->" in source or "\n" in source)
    is_model = not is_text and source not in builtin_names() and Path(source).is_dir()
    if is_model:
        choice = choose_by_config(FileTree(source), to or "hf")
        return Specification(load_builtin(choice.name), {**choice.numbers, **let_values}, files)
    if to is not None:
        raise StateError(
            f"to={to!r}: it belongs to the directory of a Hugging Face model: pass the directory "
            "that has config.json, or leave out to="
        )
    if is_text:
        return Specification(parse(str(source)), let_values, files)
    if source in builtin_names():
        return Specification(load_builtin(str(source)), let_values, files)
    path = Path(source)
    if not path.is_file():
        builtins = ", ".join(builtin_names())
        raise StateError(
            f"{str(source)!r} is neither a file, nor a built-in specification ({builtins}), nor "
            "the text of a specification, which has a `->` on each line"
        )
    return Specification(parse(path.read_text(encoding="utf-8"), str(path)), let_values, files)


def add_by_specification(
    builder: Builder,
    rules: Spec | str,
    axes: Mapping[str, int],
    rows: Sequence[Row],
    let_values: Mapping[str, int],
) -> Mapping[tuple[str, int], Sequence[str]]:
    """Add the tensors that a specification makes of the arrays of all ranks.

    Args:
        builder: receives the tensors.
        rules: the parsed specification, or the name of a built-in one.
        axes: the axes of the ranks and their sizes.
        rows: the name of each array, the array, and the coordinate of its rank.
        let_values: the numbers that the specification declares with `let`.

    Returns:
        For the file and the start of each stored box, the names of the tensors that have it.

    Raises:
        MismatchError: the rules do not fit; `problems` lists everything that is wrong.
    """
    rules = load_builtin(rules) if isinstance(rules, str) else rules
    catalogue = build_catalogue(axes, rows, builder.add_file)
    layout = apply_spec(rules, catalogue, sizes=let_values, checkpoint=str(builder.tree))
    builder.add_layout(layout)
    files = {builder.add_file(array.file): array.file for _, array, _ in rows}
    names: dict[tuple[str, int], list[str]] = {}
    for pieces in (layout.pieces, layout.replicas):
        columns = (pieces.file, pieces.start, pieces.tensor)
        for file, start, tensor in zip(*(column.tolist() for column in columns), strict=True):
            names.setdefault((files[file], start), []).append(layout.tensors[tensor].name)
    return names


def _read_rank_files(
    tree: FileTree, pattern: str
) -> tuple[Mapping[str, int], Iterable[str], Sequence[Row], list[Mapping[str, Any]]]:
    """Read files of torch.save or safetensors: list all arrays, and read plain values.

    Names of nested values are joined by dots. No array is read.

    Args:
        pattern: the pattern of the names of the files; see `spec`.

    Returns:
        The sizes of the axes, the names of the files, all arrays, and the plain values of each rank
        by name.

    Raises:
        CheckpointNotFoundError: no file matches the pattern.
        FormatError: the file of a rank is missing, or a file is malformed.
    """
    axes = _AXIS_PLACEHOLDER.findall(pattern)
    parts = _AXIS_PLACEHOLDER.split(pattern)
    expression = "".join(r"(\d{1,9})" if i % 2 else re.escape(p) for i, p in enumerate(parts))
    coordinate_by_file = {
        name: tuple(map(int, match.groups()))
        for name in tree.sizes
        if (match := re.fullmatch(expression, name)) is not None
    }
    if not coordinate_by_file:
        raise CheckpointNotFoundError(
            f"{tree}: no file matches {pattern}, which is relative to this directory: correct "
            "files=, for example files='mp_rank_{tp}/model_optim_rng.pt'"
        )
    coordinates = zip(*coordinate_by_file.values(), strict=True)
    axis_sizes = {axis: max(along) + 1 for axis, along in zip(axes, coordinates, strict=True)}
    _require_files_of_all_ranks(tree, pattern, coordinate_by_file, axis_sizes)
    contents_by_file = tree.read_each(coordinate_by_file, _read_rank_file)
    rows = [
        (name, array, coordinate_by_file[file])
        for file, (arrays, _) in contents_by_file.items()
        for name, array in arrays.items()
    ]
    return (
        axis_sizes,
        coordinate_by_file,
        rows,
        [values for _, values in contents_by_file.values()],
    )


def _require_files_of_all_ranks(
    tree: FileTree,
    pattern: str,
    coordinate_by_file: Mapping[str, tuple[int, ...]],
    sizes: Mapping[str, int],
) -> None:
    expected_count = math.prod(sizes.values())
    file_by_coordinate: dict[tuple[int, ...], str] = {}
    for name, coordinate in coordinate_by_file.items():
        other = file_by_coordinate.setdefault(coordinate, name)
        if other != name:
            rank = ", ".join(f"{axis}={i}" for axis, i in zip(sizes, coordinate, strict=False))
            raise FormatError(
                f"{tree}: by {pattern}, {other} and {name} belong to the same rank ({rank}): "
                "remove one of them"
            )
    if len(file_by_coordinate) < expected_count:
        ranks = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        raise FormatError(
            f"{tree} has {len(file_by_coordinate)} files like {pattern}, not {expected_count} "
            f"({ranks}): copy the files of all ranks into this directory"
        )


def _read_rank_file(file_range: FileRange) -> tuple[Mapping[str, StoredArray], Mapping[str, Any]]:
    """Return the arrays and the plain values of a file by name."""
    if is_safetensors(file_range.read(0, min(64, file_range.size))):
        return read_header(file_range).arrays, {}
    value = read_torch_file(file_range, skip_unknown=True)
    leaves = {
        path: leaf.local if isinstance(leaf, StoredPart) and leaf.local is not None else leaf
        for path, leaf in _iterate_leaves(value, "")
    }
    arrays = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, StoredArray)}
    return arrays, {path: leaf for path, leaf in leaves.items() if path not in arrays}


def _iterate_leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    items: Mapping[Any, object]
    if isinstance(value, dict):
        items = value
    elif isinstance(value, (list, tuple)) and any(_contains_arrays(item) for item in value):
        items = dict(enumerate(value))
    elif isinstance(value, PickledInstance):
        items = value.fields
    elif isinstance(value, StoredComposite):
        items = dict(value.inner)
    else:
        yield path, value
        return
    for key, item in items.items():
        yield from _iterate_leaves(item, f"{path}.{key}" if path else str(key))


def _contains_arrays(value: object) -> bool:
    if isinstance(value, (dict, list, tuple)):
        return any(map(_contains_arrays, value.values() if isinstance(value, dict) else value))
    return isinstance(value, (StoredArray, StoredComposite, StoredPart))
