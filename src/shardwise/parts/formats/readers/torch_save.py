"""Files of torch.save: a single one, or one of each rank with DTensors or ShardedTensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeAlias

from shardwise.parts.formats.reader import Builder, FileTree, FormatError, Reader

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_RANK_IN_NAME = re.compile(r"(.*rank[-_.=]?)(\d{1,7})(.*\.(?:pt|pth|bin|ckpt|tar))", re.IGNORECASE)
_NUMBER_IN_NAME = re.compile(r"([^/\d]*)(\d{1,7})(\.(?:pt|pth|bin|ckpt|tar))")
_WORLD_SIZE = re.compile(r"world_size[-_.=]?(\d{1,7})")
_NOT_A_KEY = re.compile(r"world_size|rank|[^a-z]+")
_MOST_OTHERS_NAMED = 4
_MOST_SETS = 16
"""The most sets of files in one checkpoint.

File names with two rank numbers, such as DeepSpeed's, form more sets: they are not recognised here.
"""
_CLASSES_OF_PARTS = (b"DTensor", b"ShardedTensor")

FilesOfRanks: TypeAlias = Mapping[tuple[str, str], Mapping[int, str]]
"""For each set of files, the file of each rank.

The key of a set is the parts of its file names before and after the rank.
"""


def recognise(tree: FileTree) -> bool:
    """Return whether a tree is a file that starts like one of torch.save."""
    return tree.single_file is not None and tree.container_of(tree.single_file) == "torch.save"


def read(tree: FileTree, builder: Builder) -> None:
    """Read a file of torch.save. A value that is not a dict is named `value`.

    Raises:
        FormatError: it is malformed, contains objects of classes that shardwise does not read, or
            has a DTensor with parts on other ranks.
    """
    name = tree.single_file or ""
    builder.add_ranks([(name, tree.load(name))])


READER = Reader("a file of torch.save", recognise, read)


def recognise_ranks(tree: FileTree) -> bool:
    """Return whether a directory has files named after ranks that contain parts of tensors."""
    sets = _find_files(tree) if tree.single_file is None else {}
    return len(sets) <= _MOST_SETS and any(
        tree.pickle_mentions(files[min(files)], *_CLASSES_OF_PARTS) for files in sets.values()
    )


def read_ranks(tree: FileTree, builder: Builder) -> None:
    """Read the files of all ranks as one checkpoint of global tensors.

    Several sets of files, for example `model_world_size_4_rank_0.pt` and
    `optim_world_size_4_rank_0.pt`, are parts of one state. Their keys are `model`, `optimizer`, or
    the beginning of the file names.

    Raises:
        FormatError: a file is missing or malformed, or the files are from different saves.
    """
    file_sets = _find_files(tree)
    files_by_key = {_state_key(prefix): files for (prefix, _), files in file_sets.items()}
    if len(files_by_key) < len(file_sets):
        examples = ", ".join(min(files.values()) for files in file_sets.values())
        raise FormatError(
            f"{tree} has several sets of ranks' files ({examples}): open a directory that has only "
            "one checkpoint"
        )
    _require_files_of_all_ranks(tree, file_sets)
    names = [name for files in file_sets.values() for _, name in sorted(files.items())]
    values = tree.load_each(names)
    ranks = sorted({rank for files in file_sets.values() for rank in files})
    builder.add_ranks(
        [
            (files[rank], {key: values[files[rank]]} if len(file_sets) > 1 else values[files[rank]])
            for key, files in files_by_key.items()
            for rank in ranks
        ]
    )
    builder.world_size = len(ranks)
    others = [name for name in tree.sizes if name.endswith(SUFFIXES) and name not in values]
    builder.left_out += [
        f"{name}: not named after a rank as the other files are"
        for name in others[:_MOST_OTHERS_NAMED]
    ]


RANKS_READER = Reader("torch.save by each rank", recognise_ranks, read_ranks)


def _find_files(tree: FileTree) -> dict[tuple[str, str], dict[int, str]]:
    """Return the sets of files whose names differ only in the number of the rank.

    Plain numbers count as ranks only if no file name has `rank` before a number.
    """
    for expression in (_RANK_IN_NAME, _NUMBER_IN_NAME):
        sets: dict[tuple[str, str], dict[int, str]] = {}
        for name in tree.sizes:
            match = expression.fullmatch(name)
            if match is not None:
                sets.setdefault((match[1], match[3]), {})[int(match[2])] = name
        if sets:
            return sets
    return {}


def _state_key(prefix: str) -> str:
    """Return the key of a set's files in the state: `optimizer` for `optim_world_size_4_rank_`."""
    words = [word for word in _NOT_A_KEY.split(prefix.rpartition("/")[2].lower()) if word]
    return "optimizer" if words and words[0].startswith("optim") else "_".join(words) or "state"


def _require_files_of_all_ranks(tree: FileTree, sets: FilesOfRanks) -> None:
    """Require that every set has a file of each rank."""
    ranks = {rank for files in sets.values() for rank in files}
    for (prefix, suffix), files in sets.items():
        world_size = _WORLD_SIZE.search(prefix)
        required = ranks | set(range(int(world_size[1]) if world_size else 0))
        missing = [f"{prefix}{rank}{suffix}" for rank in sorted(required - {*files})]
        tree.require(missing, "ranks wrote")
