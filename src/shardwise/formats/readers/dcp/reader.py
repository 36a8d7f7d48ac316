"""PyTorch DCP, as FSDP, DTensor, torchtitan, Lightning and others save with it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from shardwise.errors import CheckpointNotFoundError
from shardwise.formats.foreign import Foreign
from shardwise.formats.laying.leaves import Leaves, foreign_of
from shardwise.formats.laying.optimizers import Path
from shardwise.formats.readers.dcp.folded import fold
from shardwise.formats.readers.dcp.metadata import METADATA, Metadata, read_metadata
from shardwise.formats.readers.dcp.stored import Stored, read_stored, world_size
from shardwise.formats.tree import Tree

FORMAT = "PyTorch DCP"
_OF_LIGHTNING = re.compile(r"state_dict|optimizer_\d{1,4}")
"""How Lightning names what it writes by DCP. Its other file says that, and has the rest."""


def recognise(tree: Tree) -> bool:
    """Whether a place has what `torch.distributed.checkpoint` writes, or is a file of it."""
    return any(name == METADATA or _is_data(name) for name in tree.sizes)


def _is_data(name: str) -> bool:
    return name.endswith(".distcp") and "/" not in name


def read(tree: Tree) -> Foreign:
    """Read a checkpoint of `torch.distributed.checkpoint`.

    Raises:
        CheckpointNotFoundError: it was never finished, or this is a file of it.
        FormatError: it is malformed, or is stored in a way that cannot be read in place.
    """
    if tree.only is not None:
        parent = tree.path.parent
        raise CheckpointNotFoundError(f"{tree} is a part of what {FORMAT} wrote: open {parent}")
    if METADATA not in tree.sizes:
        raise CheckpointNotFoundError(
            f"{tree} has no {METADATA}, which {FORMAT} writes last: its save was never finished, "
            "or it was copied without (as by `cp *`, which leaves out names with a dot in front)"
        )
    metadata = read_metadata(tree)
    stored = read_stored(tree, metadata)
    found = leaves(stored, metadata)
    tops = {str(path[0]) for path in (*(path for path, _, _ in found.tensors), *found.values)}
    absent = {}
    if "state_dict" in tops and all(map(_OF_LIGHTNING.fullmatch, tops)):
        absent = dict.fromkeys(
            ("model", "optimizer", "scheduler"), "meta.pt, which Lightning writes,"
        )
    foreign = foreign_of(found, FORMAT)
    return replace(foreign, world_size=world_size(stored.files), absent=absent)


def leaves(
    stored: Stored, metadata: Metadata, moved: Callable[[Path], Path] = lambda path: path
) -> Leaves:
    """What is stored, by its paths in the state; a name whose path is not known is one part.

    Args:
        moved: what a path is instead.
    """
    paths = [moved(metadata.paths.get(name, (name,))) for name in stored.names]
    values = {
        moved(metadata.paths.get(name, (name,))): value for name, value in stored.values.items()
    }
    return Leaves(
        stored.files,
        list(zip(paths, stored.dtypes, stored.shapes, strict=True)),
        stored.table,
        fold(values, paths),
        stored.left_out,
    )
