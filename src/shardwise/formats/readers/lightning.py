"""Reads checkpoints of Lightning: a file, or a DCP directory with unsharded state in `meta.pt`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardwise.errors import FormatError
from shardwise.formats.file_tree import FileTree
from shardwise.formats.foreign import Foreign
from shardwise.formats.nested import NestedLeaves, build_foreign, find_leaves, join_leaves
from shardwise.formats.optimizers import Path
from shardwise.formats.piece_tables import tie_equal_arrays
from shardwise.formats.readers.dcp.metadata import METADATA, read_metadata
from shardwise.formats.readers.dcp.reader import count_ranks, leaves_of, read_content
from shardwise.formats.readers.torch_save import contains_text, read_value

FORMAT = "Lightning"
UNSHARDED_FILE = "meta.pt"
_VERSION = "pytorch-lightning_version"
_LIST_KEYS = {"optimizer_states": "optimizer", "lr_schedulers": "scheduler"}
"""Keys of lists, and our names of their items."""
_TRAINER_KEYS = ("callbacks", "loops")
"""Keys of the trainer, which are read as one value each."""
_OPTIMIZER_KEY = re.compile(r"optimizer_(\d{1,4})")


def recognise(tree: FileTree) -> bool:
    """Return whether a tree is a file with Lightning's version, or a directory with both parts."""
    if tree.single_file is None:
        return METADATA in tree.sizes and UNSHARDED_FILE in tree.sizes
    return contains_text(tree, tree.single_file, _VERSION.encode())


def read(tree: FileTree) -> Foreign:
    """Read a checkpoint of a Trainer, or a directory of Fabric.

    The module is `model`; optimizers and schedulers are `optimizer` and `scheduler`, then
    `optimizer_1` and so on. Everything else keeps its name.

    Raises:
        FormatError: it is malformed, or contains objects that are not read from pickles.
    """
    if tree.single_file is not None:
        state = _read_dict(tree, tree.single_file, 0)
        leaves = _leaves_of_file(tree, tree.single_file, state)
        return replace(tie_equal_arrays(build_foreign(leaves, FORMAT)), step=_find_step(state))
    metadata = read_metadata(tree)
    content = read_content(tree, metadata)
    state = _read_dict(tree, UNSHARDED_FILE, len(content.files))
    rename = _rename_trainer_path if _VERSION in state else lambda path: path
    leaves = join_leaves(
        leaves_of(content, metadata, rename), _leaves_of_file(tree, UNSHARDED_FILE, state)
    )
    foreign = build_foreign(leaves, FORMAT)
    return replace(foreign, step=_find_step(state), world_size=count_ranks(content.files))


def _read_dict(tree: FileTree, name: str, index: int) -> dict[Any, Any]:
    value = read_value(tree, name, index)
    if not isinstance(value, dict):
        raise FormatError(
            f"{tree.label(name)}: expected a dict, found {type(value).__name__}: copy the file "
            "again from an intact source"
        )
    return value


def _leaves_of_file(tree: FileTree, name: str, state: Mapping[Any, Any]) -> NestedLeaves:
    """Return the tensors and values of a file."""
    trainer_values: dict[Path, Any] = {(key,): state[key] for key in _TRAINER_KEYS if key in state}
    renamed: dict[Any, Any] = {}
    for key, value in state.items():
        if _VERSION in state and key == "state_dict":
            renamed["model"] = value
        elif _VERSION in state and key in _LIST_KEYS and isinstance(value, Sequence):
            renamed |= {_add_number(_LIST_KEYS[key], i): item for i, item in enumerate(value)}
        elif key not in _TRAINER_KEYS:
            renamed[key] = value
    return find_leaves(renamed, (tree.file(name),), trainer_values)


def _rename_trainer_path(path: Path) -> Path:
    match = _OPTIMIZER_KEY.fullmatch(str(path[0]))
    if match is not None:
        return (_add_number("optimizer", int(match[1])), *path[1:])
    return ("model", *path[1:]) if path[0] == "state_dict" else path


def _add_number(name: str, number: int) -> str:
    return f"{name}_{number}" if number else name


def _find_step(state: Mapping[Any, Any]) -> int | None:
    step = state.get("global_step")
    return step if type(step) is int and step >= 0 else None
