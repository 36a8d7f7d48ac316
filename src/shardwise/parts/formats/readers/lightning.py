"""Reads checkpoints of Lightning: a file, or a DCP directory with unsharded state in `meta.pt`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.parts.formats.reader import Builder, FileTree, Reader
from shardwise.parts.formats.readers.dcp.metadata import METADATA
from shardwise.parts.formats.readers.dcp.reader import read_state

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
    return tree.pickle_mentions(tree.single_file, _VERSION.encode())


def read(tree: FileTree, builder: Builder) -> None:
    """Read a checkpoint of a Trainer, or a directory of Fabric.

    The module is `model`; optimizers and schedulers are `optimizer` and `scheduler`, then
    `optimizer_1` and so on. Everything else keeps its name.

    Raises:
        FormatError: it is malformed, or contains objects of classes that shardwise does not read.
    """
    unsharded_file = tree.single_file or UNSHARDED_FILE
    state = tree.load(unsharded_file, kind=dict)
    if tree.single_file is None:
        sharded = read_state(tree, builder)
        builder.add_state(_rename(sharded) if _VERSION in state else sharded, is_ordered=False)
    builder.add_file(unsharded_file)
    trainer = {key: state[key] for key in _TRAINER_KEYS if key in state}
    rest = {key: value for key, value in state.items() if key not in trainer}
    builder.add_state(_rename(rest) if _VERSION in state else rest)
    for key, value in trainer.items():
        builder.add_value(key, value)
    builder.step = state.get("global_step")


READER = Reader("Lightning", recognise, read, overrides=("dcp", "torch", "torch-ranks"))


def _rename(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the state of a Trainer, by our names."""
    renamed: dict[Any, Any] = {}
    for key, value in state.items():
        match = _OPTIMIZER_KEY.fullmatch(str(key))
        if match is not None:
            renamed[_add_number("optimizer", int(match[1]))] = value
        elif key in _LIST_KEYS and isinstance(value, Sequence):
            renamed |= {_add_number(_LIST_KEYS[key], i): item for i, item in enumerate(value)}
        else:
            renamed["model" if key == "state_dict" else key] = value
    return renamed


def _add_number(name: str, number: int) -> str:
    return f"{name}_{number}" if number else name
