"""The port of readers: everything that a reader of another format needs.

A `Reader` is two functions. `recognise(files)` says whether files look like its format, and
`read(files, builder)` tells the builder which tensors and values there are, and where their bytes
lie. No tensor is read. docs/ports/reader.md has a complete example.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwise.kernel.boxes import Box
from shardwise.kernel.errors import CheckpointNotFoundError, FormatError
from shardwise.parts.formats.containers.pickle_values import PickledInstance, UnknownObject
from shardwise.parts.formats.containers.ranges import FileRange
from shardwise.parts.formats.containers.safetensors import read_header
from shardwise.parts.formats.file_tree import FilePart, FileTree
from shardwise.parts.formats.foreign import (
    Placed,
    StoredArray,
    StoredComposite,
    StoredPart,
    StoredTensor,
)
from shardwise.parts.formats.foreign_builder import Builder
from shardwise.parts.formats.masters import (
    Run,
    describe_wrong_masters,
    find_common_run,
    find_wrong_masters,
)
from shardwise.parts.formats.nested import name_leaves, name_parameters, nest
from shardwise.parts.formats.optimizers import ParamGroup
from shardwise.parts.formats.stored_composites import UnplaceableError, join_shards

__all__ = [
    "Box",
    "Builder",
    "CheckpointNotFoundError",
    "FilePart",
    "FileRange",
    "FileTree",
    "FormatError",
    "ParamGroup",
    "PickledInstance",
    "Placed",
    "Reader",
    "Run",
    "StoredArray",
    "StoredComposite",
    "StoredPart",
    "StoredTensor",
    "UnknownObject",
    "UnplaceableError",
    "describe_wrong_masters",
    "find_common_run",
    "find_wrong_masters",
    "join_shards",
    "name_leaves",
    "name_parameters",
    "nest",
    "read_header",
]


@dataclass(frozen=True, slots=True)
class Reader:
    """A foreign format.

    Attributes:
        name: the name of the format in messages.
        recognise: returns whether files look like this format. It reads a few bytes at most.
        read: adds all tensors and values of the files to a builder. It reads no tensor.
        overrides: the keys of other formats to ignore if this format is recognised. Their readers
            recognise the same files.
    """

    name: str
    recognise: Callable[[FileTree], bool]
    read: Callable[[FileTree, Builder], None]
    overrides: tuple[str, ...] = ()
