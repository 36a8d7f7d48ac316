"""Lightning: a file, or a DCP directory with the state that is not sharded in `meta.pt`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardwise.errors import FormatError
from shardwise.formats.containers.torch_files import pickle_text, read_torch_file
from shardwise.formats.containers.zip_archive import START
from shardwise.formats.foreign import Foreign
from shardwise.formats.nested import Leaves, foreign_of, nested_leaves, united
from shardwise.formats.optimizers import Path
from shardwise.formats.piece_tables import with_ties
from shardwise.formats.readers.dcp.metadata import METADATA, read_metadata
from shardwise.formats.readers.dcp.reader import leaves, read_stored, world_size
from shardwise.formats.tree import Tree

FORMAT = "Lightning"
BESIDE = "meta.pt"
_VERSION = "pytorch-lightning_version"
_LISTED = {"optimizer_states": "optimizer", "lr_schedulers": "scheduler"}
_WHOLE = ("callbacks", "loops")
"""Keys of the trainer, which are read as one value each."""
_NUMBERED = re.compile(r"optimizer_(\d{1,4})")


def recognise(tree: Tree) -> bool:
    """Whether a tree is a file with Lightning's version, or a directory with both parts."""
    if tree.only is None:
        return METADATA in tree.sizes and BESIDE in tree.sizes
    with tree.open_range(tree.only) as part:
        try:
            return part.read(0, len(START)) == START and _VERSION.encode() in pickle_text(part)
        except FormatError:
            return False


def read(tree: Tree) -> Foreign:
    """Read a checkpoint of a Trainer, or a directory of Fabric.

    The module is `model`; optimizers and schedulers are `optimizer` and `scheduler`, then
    `optimizer_1` and so on. Everything else keeps its name.

    Raises:
        FormatError: it is malformed, or contains objects that are not read from pickles.
    """
    if tree.only is not None:
        value = _value(tree, tree.only, 0)
        found = _leaves(tree, tree.only, value)
        return replace(with_ties(foreign_of(found, FORMAT)), step=_step(value))
    metadata = read_metadata(tree)
    stored = read_stored(tree, metadata)
    value = _value(tree, BESIDE, len(stored.files))
    moved = _moved if _VERSION in value else lambda path: path
    found = united(leaves(stored, metadata, moved), _leaves(tree, BESIDE, value))
    foreign = foreign_of(found, FORMAT)
    return replace(foreign, step=_step(value), world_size=world_size(stored.files))


def _value(tree: Tree, name: str, number: int) -> dict[Any, Any]:
    with tree.open_range(name, number) as part:
        value = read_torch_file(part, opaque=tree.opaque).value
    if not isinstance(value, dict):
        raise FormatError(f"{part.where}: expected a dict")
    return value


def _leaves(tree: Tree, name: str, value: Mapping[Any, Any]) -> Leaves:
    """Return the tensors and values of a file."""
    whole: dict[Path, Any] = {(key,): value[key] for key in _WHOLE if key in value}
    state: dict[Any, Any] = {}
    for key, each in value.items():
        if _VERSION in value and key == "state_dict":
            state["model"] = each
        elif _VERSION in value and key in _LISTED and isinstance(each, Sequence):
            state |= {_numbered(_LISTED[key], i): part for i, part in enumerate(each)}
        elif key not in _WHOLE:
            state[key] = each
    return nested_leaves(state, (tree.file(name),), whole)


def _moved(path: Path) -> Path:
    found = _NUMBERED.fullmatch(str(path[0]))
    if found is not None:
        return (_numbered("optimizer", int(found[1])), *path[1:])
    return ("model", *path[1:]) if path[0] == "state_dict" else path


def _numbered(name: str, number: int) -> str:
    return f"{name}_{number}" if number else name


def _step(value: Mapping[Any, Any]) -> int | None:
    step = value.get("global_step")
    return step if type(step) is int and step >= 0 else None
