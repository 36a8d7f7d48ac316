"""A file of torch.save: a nested state, or the state_dict of a module."""

from __future__ import annotations

from shardwise.formats.containers.torch_files import is_torch_file, read_torch_file
from shardwise.formats.containers.torch_values import DTENSORS
from shardwise.formats.foreign import Foreign
from shardwise.formats.merge_ranks import lay_ranks
from shardwise.formats.tree import Tree

FORMAT = "a file of torch.save"


def recognise(tree: Tree) -> bool:
    """Whether a tree is a file that starts like one of torch.save."""
    if tree.only is None:
        return False
    with open(tree.path, "rb") as file:
        return is_torch_file(file.read(64))


def read(tree: Tree) -> Foreign:
    """Read a file of torch.save. A value that is not a dict is named `value`.

    Raises:
        FormatError: it is malformed, contains objects that are not read from pickles, or has a
            DTensor with parts on other ranks.
    """
    name = tree.only or ""
    with tree.open_range(name) as part:
        value = read_torch_file(part, stubs=DTENSORS, opaque=tree.opaque).value
    return lay_ranks([(0, value)], (tree.file(name),), str(tree), FORMAT, lambda *_: True)
