"""Which files a legacy checkpoint of Megatron-LM consists of, by their names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.errors import FormatError
from shardwise.formats.tree import Tree

LATEST = "latest_checkpointed_iteration.txt"
LARGEST_LATEST = 100
MODEL, FLAT = "model_optim_rng.pt", "distrib_optim.pt"
OLD_MODEL, OLD_OPTIMIZER = "model_rng.pt", "optim.pt"
NAMES = (MODEL, FLAT, OLD_MODEL, OLD_OPTIMIZER)

_PATH = re.compile(
    r"(?:(iter_\d{1,18}|release)/)?mp_rank_(\d{1,6})(?:_(\d{1,6}))?(?:_(\d{1,6}))?/([a-z_]+\.pt)"
)

Numbers = tuple[int, ...]
"""Of a rank, as its directory has them: tensor-parallel, then pipeline and expert, if any."""


@dataclass(frozen=True, slots=True)
class Files:
    """The files of one iteration.

    Attributes:
        folder: with `/` at its end; or "" if the place is that folder itself.
        ranks: by the numbers of a rank, its files by their names within its directory.
        others: those that are none of these.
    """

    folder: str
    ranks: Mapping[Numbers, Mapping[str, str]]
    others: tuple[str, ...]


def has_files(tree: Tree) -> bool:
    """Whether there is a file of a rank where Megatron-LM would have written it.

    Also where the place is the directory of a rank, or only a note of the latest iteration is left.
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
    """The files of the iteration that is the latest, or the only one.

    Raises:
        FormatError: it is not there, or there are several and nothing says which is the latest.
    """
    found = {name: match for name in tree.sizes if (match := _PATH.fullmatch(name)) is not None}
    folder = _folder(tree, sorted({match[1] or "" for match in found.values()}))
    ranks: dict[Numbers, dict[str, str]] = {}
    for name, match in found.items():
        if (match[1] or "") == folder:
            numbers = tuple(int(number) for number in match.groups()[1:4] if number is not None)
            if match[5] in ranks.setdefault(numbers, {}):
                raise FormatError(f"{tree}: {name} is of a rank that another directory is of")
            ranks[numbers][match[5]] = name
    if len({len(numbers) for numbers in ranks}) > 1:
        raise FormatError(f"{tree}: directories of ranks have different numbers of numbers")
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
                f"{tree}: {LATEST} says {said!r}, and {folder[:40]} is not there: copy it from "
                "where the checkpoint is whole"
                + (f", or open one of those that are, below it: {there}" if there else "")
            )
        return folder
    if len(folders) > 1:
        raise FormatError(
            f"{tree}: nothing says which of {', '.join(folders[:5])} is the latest (no {LATEST}): "
            "open one of them"
        )
    return folders[0] if folders else ""
