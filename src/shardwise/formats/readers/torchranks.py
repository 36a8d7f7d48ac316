"""A file of torch.save for each rank, with DTensors in them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from math import prod
from typing import Any

from shardwise.errors import FormatError
from shardwise.formats.containers.ranges import FileRange
from shardwise.formats.containers.torch_files import pickle_text, read_torch_file
from shardwise.formats.containers.torch_values import DTENSORS
from shardwise.formats.containers.zip_archive import START
from shardwise.formats.foreign import Foreign, StoredArray
from shardwise.formats.merge_ranks import lay_ranks
from shardwise.formats.tree import MOST_NAMED, Tree

FORMAT = "torch.save by each rank"
THREADS = 8
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_NAMED = re.compile(r"(.*rank[-_.=]?)(\d{1,7})(.*\.(?:pt|pth|bin|ckpt|tar))", re.IGNORECASE)
_NUMBERED = re.compile(r"([^/\d]*)(\d{1,7})(\.(?:pt|pth|bin|ckpt|tar))")
_WORLD = re.compile(r"world_size[-_.=]?(\d{1,7})")
_IDENTITY = re.compile(r"world_size|rank|[^a-z]+")
_MARK = b"DTensor"

Files = Mapping[int, str]
"""The file of each rank."""


def recognise(tree: Tree) -> bool:
    """Whether a directory has files that are named after ranks, with DTensors in them."""
    return tree.only is None and any(_has_dtensors(tree, files) for files in _sets(tree).values())


def read(tree: Tree) -> Foreign:
    """Read the files of all ranks as one checkpoint of global tensors.

    Several sets of files, as `model_world_size_4_rank_0.pt` beside `optim_world_size_4_rank_0.pt`,
    are parts of one state: `model`, `optimizer`, and others by what their names begin with.

    Raises:
        FormatError: a file is missing or malformed, or they are not of one save.
    """
    sets = _sets(tree)
    named = {_key(prefix): files for (prefix, _), files in sets.items()}
    if len(named) < len(sets):
        shown = ", ".join(min(files.values()) for files in sets.values())
        raise FormatError(
            f"{tree} has several sets of files of ranks, as of {shown}: open a directory that has "
            "one checkpoint"
        )
    _check_ranks(tree, sets)
    order = [name for files in sets.values() for _, name in sorted(files.items())]
    with ThreadPoolExecutor(THREADS, "shardwise-open") as pool:
        values = dict(
            zip(
                order, pool.map(lambda i: _value(tree, order[i], i), range(len(order))), strict=True
            )
        )
    number = {name: i for i, name in enumerate(order)}
    ranks = sorted({rank for files in sets.values() for rank in files})
    states: list[tuple[int, Any]] = []
    if len(sets) == 1:
        states = [(number[name], values[name]) for name in order]
    else:
        states = [
            (number[files[rank]], {key: values[files[rank]]})
            for key, files in named.items()
            for rank in ranks
        ]
    files = tuple(map(tree.file, order))

    def bytes_of(array: StoredArray) -> bytes:
        with closing(tree.open(files[array.file].name)) as file:
            part = FileRange.whole(file, array.file, f"{tree}/{files[array.file].name}")
            return part.read(array.start, prod(array.shape) * array.itemsize)

    foreign = lay_ranks(
        states, files, str(tree), FORMAT, lambda one, other: bytes_of(one) == bytes_of(other)
    )
    others = [name for name in tree.sizes if name.endswith(SUFFIXES) and name not in number]
    left_out = [f"{name}: it is not named after a rank as the others are" for name in others]
    return replace(
        foreign, world_size=len(ranks), left_out=(*foreign.left_out, *left_out[:MOST_NAMED])
    )


def _sets(tree: Tree) -> dict[tuple[str, str], dict[int, str]]:
    """Files whose names differ in the number of the rank alone, by what is before and after it.

    A number counts only where no file has `rank` before one.
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
    """What the files of a set are, by their names: `optimizer` of `optim_world_size_4_rank_`."""
    words = [word for word in _IDENTITY.split(prefix.rpartition("/")[2].lower()) if word]
    return "optimizer" if words and words[0].startswith("optim") else "_".join(words) or "state"


def _check_ranks(tree: Tree, sets: Mapping[tuple[str, str], Files]) -> None:
    ranks = {rank for files in sets.values() for rank in files}
    for (prefix, suffix), files in sets.items():
        world = _WORLD.search(prefix)
        wanted = ranks | set(range(int(world[1]) if world else 0))
        missing = [f"{prefix}{rank}{suffix}" for rank in sorted(wanted - {*files})]
        tree.require(missing, "ranks wrote")


def _has_dtensors(tree: Tree, files: Files) -> bool:
    name = files[min(files)]
    with closing(tree.open(name)) as file:
        part = FileRange.whole(file, 0, f"{tree}/{name}")
        try:
            return part.read(0, len(START)) == START and _MARK in pickle_text(part)
        except FormatError:
            return False


def _value(tree: Tree, name: str, number: int) -> Any:
    with closing(tree.open(name)) as file:
        part = FileRange.whole(file, number, f"{tree}/{name}")
        return read_torch_file(part, stubs=DTENSORS, opaque=tree.opaque).value
