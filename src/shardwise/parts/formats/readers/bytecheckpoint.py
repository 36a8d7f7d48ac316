"""Read ByteCheckpoint 0.0.x: DCP metadata of the module and of the optimizer, and raw bytes."""

from __future__ import annotations

import re

from shardwise.parts.formats.reader import Builder, FileTree, Reader
from shardwise.parts.formats.readers.dcp.metadata import METADATA
from shardwise.parts.formats.readers.dcp.reader import read_state

PARTS = ("model", "optimizer")
_EXTRA_STATE = re.compile(r"extra_state/extra_state_rank_(\d{1,7})\.pt")


def recognise(tree: FileTree) -> bool:
    """Return whether a tree has a folder `model` with DCP metadata."""
    return f"model/{METADATA}" in tree.sizes and METADATA not in tree.sizes


def read(tree: FileTree, builder: Builder) -> None:
    """Read a step saved by ByteCheckpoint: `model`, `optimizer` and `extra_state`.

    Raises:
        FormatError: it is malformed.
    """
    for part in PARTS:
        name = f"{part}/{METADATA}"
        if name in tree.sizes:
            builder.add_state({part: read_state(tree, builder, name)}, is_ordered=False)
        else:
            builder.missing_files[part] = name
    ranks = sorted(int(match[1]) for name in tree.sizes if (match := _EXTRA_STATE.fullmatch(name)))
    builder.world_size = max(builder.world_size, len(ranks))
    if ranks:
        name = f"extra_state/extra_state_rank_{ranks[0]}.pt"
        builder.add_file(name)
        builder.add_value("extra_state", tree.load(name))
    if len(ranks) > 1:
        builder.left_out.append(
            f"extra_state of {len(ranks) - 1} ranks: only that of rank {ranks[0]} is read"
        )


READER = Reader("ByteCheckpoint", recognise, read)
