"""Reads states that each rank saved to a file of torch.save, with DTensors in them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from shardwise.errors import FormatError
from shardwise.formats.containers.torch_files import MOST_NAMED, pickle_text, read_torch_file
from shardwise.formats.containers.torch_values import DTENSORS
from shardwise.formats.containers.zip_archive import START
from shardwise.formats.foreign import Foreign, StoredArray
from shardwise.formats.merge_ranks import lay_ranks
from shardwise.formats.tree import Tree

FORMAT = "torch.save by each rank"
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_NAMED = re.compile(r"(.*rank[-_.=]?)(\d{1,7})(.*\.(?:pt|pth|bin|ckpt|tar))", re.IGNORECASE)
_NUMBERED = re.compile(r"([^/\d]*)(\d{1,7})(\.(?:pt|pth|bin|ckpt|tar))")
_WORLD = re.compile(r"world_size[-_.=]?(\d{1,7})")
_IDENTITY = re.compile(r"world_size|rank|[^a-z]+")
_MARK = b"DTensor"

Sets = Mapping[tuple[str, str], Mapping[int, str]]
"""The file of each rank, by what the file names have before and after the rank."""


def recognise(tree: Tree) -> bool:
    """Return whether a directory has files that are named after ranks and contain DTensors."""
    return tree.only is None and any(
        _has_dtensors(tree, files[min(files)]) for files in _sets(tree).values()
    )


def read(tree: Tree) -> Foreign:
    """Read the files of all ranks as one checkpoint of global tensors.

    Several sets of files, such as `model_world_size_4_rank_0.pt` and
    `optim_world_size_4_rank_0.pt`, are parts of one state: `model`, `optimizer`, or what their
    names begin with.

    Raises:
        FormatError: a file is missing or malformed, or the files are from different saves.
    """
    sets = _sets(tree)
    named = {_key(prefix): files for (prefix, _), files in sets.items()}
    if len(named) < len(sets):
        shown = ", ".join(min(files.values()) for files in sets.values())
        raise FormatError(
            f"{tree} has several sets of ranks' files ({shown}): open a directory that has only "
            "one checkpoint"
        )
    _check_ranks(tree, sets)
    order = [name for files in sets.values() for _, name in sorted(files.items())]
    number = {name: i for i, name in enumerate(order)}
    values = tree.read_each(
        number, lambda part: read_torch_file(part, stubs=DTENSORS, opaque=tree.opaque).value
    )
    ranks = sorted({rank for files in sets.values() for rank in files})
    states: list[tuple[int, Any]] = [(number[name], values[name]) for name in order]
    if len(sets) > 1:
        states = [
            (number[files[rank]], {key: values[files[rank]]})
            for key, files in named.items()
            for rank in ranks
        ]

    def bytes_of(array: StoredArray) -> bytes:
        with tree.open_range(order[array.file], array.file) as part:
            return part.read(array.start, prod(array.shape) * array.itemsize)

    foreign = lay_ranks(
        states,
        tuple(map(tree.file, order)),
        str(tree),
        FORMAT,
        lambda one, other: bytes_of(one) == bytes_of(other),
    )
    others = [name for name in tree.sizes if name.endswith(SUFFIXES) and name not in number]
    left_out = [f"{name}: not named after a rank as the other files are" for name in others]
    return replace(
        foreign, world_size=len(ranks), left_out=(*foreign.left_out, *left_out[:MOST_NAMED])
    )


def _sets(tree: Tree) -> dict[tuple[str, str], dict[int, str]]:
    """Return the files whose names differ only in the number of the rank.

    Plain numbers count as ranks only if no file name has `rank` before a number.
    """
    for expression in (_NAMED, _NUMBERED):
        found: dict[tuple[str, str], dict[int, str]] = {}
        for name in tree.sizes:
            match = expression.fullmatch(name)
            if match is not None:
                found.setdefault((match[1], match[3]), {})[int(match[2])] = name
        if found:
            return found
    return {}


def _key(prefix: str) -> str:
    """Return the key of a set's files in the state: `optimizer` for `optim_world_size_4_rank_`."""
    words = [word for word in _IDENTITY.split(prefix.rpartition("/")[2].lower()) if word]
    return "optimizer" if words and words[0].startswith("optim") else "_".join(words) or "state"


def _check_ranks(tree: Tree, sets: Sets) -> None:
    """Require that every set has a file of each rank."""
    ranks = {rank for files in sets.values() for rank in files}
    for (prefix, suffix), files in sets.items():
        world = _WORLD.search(prefix)
        wanted = ranks | set(range(int(world[1]) if world else 0))
        missing = [f"{prefix}{rank}{suffix}" for rank in sorted(wanted - {*files})]
        tree.require(missing, "ranks wrote")


def _has_dtensors(tree: Tree, name: str) -> bool:
    with tree.open_range(name) as part:
        try:
            return part.read(0, len(START)) == START and _MARK in pickle_text(part)
        except FormatError:
            return False
