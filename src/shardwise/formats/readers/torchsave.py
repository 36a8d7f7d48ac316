"""One file of torch.save: a nested state, or the state_dict of one module."""

from __future__ import annotations

from contextlib import closing

from shardwise.formats.foreign import Foreign
from shardwise.formats.laying.lay import with_ties
from shardwise.formats.laying.leaves import foreign_of
from shardwise.formats.laying.nested import nested_leaves
from shardwise.formats.stored.ranges import Part
from shardwise.formats.stored.torchfile import is_torch_file, read_torch_file
from shardwise.formats.tree import Tree

FORMAT = "a file of torch.save"


def recognise(tree: Tree) -> bool:
    """Whether a place is one file, which begins as those of torch.save do."""
    if tree.only is None:
        return False
    with open(tree.path, "rb") as file:
        return is_torch_file(file.read(64))


def read(tree: Tree) -> Foreign:
    """Read a file of torch.save; optimizers are named as `nested_leaves` says.

    What is no dict is called `value`.

    Raises:
        FormatError: it is malformed, or holds what is not read from pickles.
    """
    name = tree.only or ""
    with closing(tree.open(name)) as file:
        contents = read_torch_file(Part.whole(file, 0, str(tree)), opaque=tree.opaque)
    state = contents.value if isinstance(contents.value, dict) else {"value": contents.value}
    return with_ties(foreign_of(nested_leaves(state, (tree.file(name),)), FORMAT))
