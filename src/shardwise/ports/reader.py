"""Read checkpoints of another format: everything that such a reader needs.

A reader is two functions. `recognise(files)` says whether files look like its format, and
`read(files, builder)` tells the builder which tensors and values there are, and where their bytes
lie. No tensor is read. docs/ports/reader.md has a complete example.
"""

from __future__ import annotations

from shardwise.boxes import Box as Box
from shardwise.errors import CheckpointNotFoundError as CheckpointNotFoundError
from shardwise.errors import FormatError as FormatError
from shardwise.formats.containers.pickle_values import PickledInstance as PickledInstance
from shardwise.formats.containers.pickle_values import UnknownObject as UnknownObject
from shardwise.formats.containers.ranges import FileRange as FileRange
from shardwise.formats.containers.safetensors import read_header as read_header
from shardwise.formats.file_tree import FilePart as FilePart
from shardwise.formats.file_tree import FileTree as FileTree
from shardwise.formats.foreign import Placed as Placed
from shardwise.formats.foreign import StoredArray as StoredArray
from shardwise.formats.foreign import StoredPart as StoredPart
from shardwise.formats.foreign import StoredTensor as StoredTensor
from shardwise.formats.foreign_builder import Builder as Builder
from shardwise.formats.nested import name_leaves as name_leaves
from shardwise.formats.nested import nest as nest
from shardwise.formats.opening import Reader as Reader
from shardwise.formats.optimizers import ParamGroup as ParamGroup
