"""Finds the files of a legacy Megatron-LM checkpoint by the names of the ranks' directories."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.errors import CheckpointNotFoundError, FormatError
from shardwise.formats.tree import Tree

LATEST = "latest_checkpointed_iteration.txt"
LARGEST_LATEST = 100
MODEL, FLAT = "model_optim_rng.pt", "distrib_optim.pt"
OLD_MODEL, OLD_OPTIMIZER = "model_rng.pt", "optim.pt"
NAMES = (MODEL, FLAT, OLD_MODEL, OLD_OPTIMIZER)
WROTE = "ranks of Megatron-LM wrote"

_PATH = re.compile(
    r"(?:(iter_\d{1,18}|release)/)?mp_rank_(\d{1,6})(?:_(\d{1,6}))?(?:_(\d{1,6}))?/([a-z_]+\.pt)"
)

Numbers = tuple[int, ...]
"""The numbers in the name of a rank's directory: tensor-parallel, pipeline and expert rank."""


@dataclass(frozen=True, slots=True)
class Files:
    """The files of one iteration.

    Attributes:
        folder: the folder of the iteration with a final `/`, or "" if it is the place itself.
        ranks: the paths of each rank's files, by the rank's numbers and the file's name.
        others: files that are not a rank's.
    """

    folder: str
    ranks: Mapping[Numbers, Mapping[str, str]]
    others: tuple[str, ...]


def has_files(tree: Tree) -> bool:
    """Return whether a place has a rank's file where Megatron-LM would have written it.

    Also true if the place is the directory of one rank, or has only the file that names the latest
    iteration.
    """
    if tree.only is not None:
        return False
    return tree.sizes.keys() == {LATEST} or any(
        _is_of_rank(name) or (found is not None and found[5] in NAMES)
        for name, found in ((name, _PATH.fullmatch(name)) for name in tree.sizes)
    )


def _is_of_rank(name: str) -> bool:
    return name in (MODEL, FLAT, OLD_MODEL)


def find_files(tree: Tree) -> Files:
    """Find the files of the latest iteration, or of the only one.

    Raises:
        FormatError: the iteration is missing, or there are several and no file names the latest.
    """
    found = {name: match for name in tree.sizes if (match := _PATH.fullmatch(name)) is not None}
    folder = _folder(tree, sorted({match[1] or "" for match in found.values()}))
    ranks: dict[Numbers, dict[str, str]] = {}
    for name, match in found.items():
        if (match[1] or "") == folder:
            numbers = tuple(int(number) for number in match.groups()[1:4] if number is not None)
            if match[5] in ranks.setdefault(numbers, {}):
                raise FormatError(f"{tree}: {name}: another directory is of the same rank")
            ranks[numbers][match[5]] = name
    if len({len(numbers) for numbers in ranks}) > 1:
        raise FormatError(
            f"{tree}: the names of the ranks' directories differ in how many numbers they have"
        )
    prefix = f"{folder}/" if folder else ""
    others = [name for name in tree.sizes if name.startswith(prefix) and name not in found]
    return Files(prefix, dict(sorted(ranks.items())), tuple(n for n in others if n != LATEST))


def _folder(tree: Tree, folders: list[str]) -> str:
    if LATEST in tree.sizes:
        said = tree.read(LATEST, limit=LARGEST_LATEST).decode(errors="replace").strip()
        folder = f"iter_{int(said):07d}" if said.isascii() and said.isdigit() else said
        if folder not in folders:
            there = ", ".join(folders[:5])
            raise FormatError(
                f"{tree}: {LATEST} says {said!r}, and {folder[:40]} is missing: copy it from where "
                "the checkpoint is whole"
                + (f", or open one of the iterations that exist: {there}" if there else "")
            )
        return folder
    if len(folders) > 1:
        raise FormatError(
            f"{tree}: {LATEST} is missing, so that the latest of {', '.join(folders[:5])} is "
            "unknown: open one of them"
        )
    return folders[0] if folders else ""


def require_files(tree: Tree, files: Files) -> None:
    """Require that every rank has the files that other ranks have.

    Raises:
        CheckpointNotFoundError: the place is the directory of one rank.
        FormatError: files are missing; the message names them.
    """
    if not files.ranks:
        raise CheckpointNotFoundError(
            f"{tree} is the directory of one rank: open {tree.path.parent}, which has all of them"
        )
    known = {name for own in files.ranks.values() for name in own}
    main = OLD_MODEL if OLD_MODEL in known and MODEL not in known else MODEL
    names = (main, *(each for each in (FLAT, OLD_OPTIMIZER) if each in known))
    tree.require((path_of(files, rank, name) for rank in files.ranks for name in names), WROTE)


def path_of(files: Files, numbers: Numbers, name: str) -> str:
    """Return the path of a rank's file."""
    tensor, *others = numbers
    folder = "_".join([f"mp_rank_{tensor:02d}", *(f"{number:03d}" for number in others)])
    return f"{files.folder}{folder}/{name}"
