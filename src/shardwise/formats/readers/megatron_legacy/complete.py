"""Whether the files of all ranks are there, and where the ranks wrote them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from shardwise.errors import CheckpointNotFoundError, FormatError
from shardwise.formats.optimizers import GROUPS, PARAMS
from shardwise.formats.readers.megatron_legacy.files import (
    FLAT,
    MODEL,
    OLD_MODEL,
    OLD_OPTIMIZER,
    Files,
    Numbers,
)
from shardwise.formats.readers.megatron_legacy.geometry import ARGS_OF_AXES, axes_of_numbers
from shardwise.formats.readers.megatron_legacy.ranks import Rank
from shardwise.formats.tree import MOST_FILES, Tree

ITERATION = "iteration"
WROTE = "ranks of Megatron-LM wrote"


def check_files(tree: Tree, files: Files) -> None:
    """Refuse ranks that lack a file that others have.

    Raises:
        CheckpointNotFoundError: the place is the directory of one rank.
        FormatError: files are missing; they are named.
    """
    if not files.ranks:
        raise CheckpointNotFoundError(
            f"{tree} is what one rank wrote: open the directory of all, {tree.path.parent}"
        )
    known = {name for own in files.ranks.values() for name in own}
    main = OLD_MODEL if OLD_MODEL in known and MODEL not in known else MODEL
    names = (main, *(each for each in (FLAT, OLD_OPTIMIZER) if each in known))
    tree.require((_path(files, rank, name) for rank in files.ranks for name in names), WROTE)


def check_ranks(tree: Tree, files: Files, ranks: Sequence[Rank]) -> None:
    """Refuse a checkpoint that ranks are missing of, or whose directories were renamed.

    Raises:
        FormatError: it is so.
    """
    first = ranks[0]
    axes = axes_of_numbers(first)
    said = [first.args.get(ARGS_OF_AXES[axis]) for axis in axes]
    found = [max(column) + 1 for column in zip(*(rank.numbers for rank in ranks), strict=True)]
    sizes = [max(n, m) if type(m) is int else n for n, m in zip(found, said, strict=True)]
    if math.prod(sizes) > MOST_FILES:
        raise FormatError(f"{tree}: {' × '.join(map(str, sizes))} ranks are absurdly many")
    name = MODEL if MODEL in files.ranks[first.numbers] else OLD_MODEL
    wanted = (_path(files, numbers, name) for numbers in product(*map(range, sizes)))
    tree.require(wanted, WROTE)
    flat = [rank.numbers for rank in ranks if rank.flat is None and _is_distributed(rank.optimizer)]
    tree.require((_path(files, numbers, FLAT) for numbers in flat), WROTE)
    _check_order(tree, {rank.numbers: rank for rank in ranks})
    _check_iterations(tree, ranks)


def _path(files: Files, numbers: Numbers, name: str) -> str:
    tensor, *others = numbers
    folder = "_".join([f"mp_rank_{tensor:02d}", *(f"{number:03d}" for number in others)])
    return f"{files.folder}{folder}/{name}"


def _is_distributed(optimizer: object) -> bool:
    """Whether what was saved of an optimizer is without the buffers that lie in another file."""
    parts = optimizer if isinstance(optimizer, list) else [optimizer]
    return any(
        isinstance(group, dict) and group.get(PARAMS) is None
        for part in parts
        for group in _groups(part)
    )


def _groups(part: object) -> Iterator[object]:
    inner = part.get("optimizer", part) if isinstance(part, dict) else None
    groups = inner.get(GROUPS) if isinstance(inner, dict) else None
    yield from groups if isinstance(groups, list) else []


def _check_iterations(tree: Tree, ranks: Sequence[Rank]) -> None:
    """Whether all ranks saved after the same iteration."""
    first = ranks[0]
    for rank in ranks:
        found, wanted = (each.values.get(ITERATION) for each in (rank, first))
        if found != wanted:
            raise FormatError(
                f"{tree}: its directories are of different saves: {first.where} is of iteration "
                f"{wanted!r}, and {rank.where} of iteration {found!r}. Copy all directories of "
                "one save from where the checkpoint is whole, or open another"
            )


def _check_order(tree: Tree, ranks: Mapping[Numbers, Rank]) -> None:
    """Along each axis, a larger number is that of a larger rank, in whatever order ranks are.

    Tools that write checkpoints anew have the same rank in all files, or none, which tells nothing.
    """
    said = {numbers: rank.args.get("rank") for numbers, rank in ranks.items()}
    if len({*said.values()}) < len(said):
        return
    for numbers, rank in said.items():
        for axis in range(len(numbers)):
            before = (*numbers[:axis], numbers[axis] - 1, *numbers[axis + 1 :])
            other = said.get(before)
            if type(rank) is int and type(other) is int and rank < other:
                raise FormatError(
                    f"{tree}: directories were renamed: {ranks[before].where} was written by rank "
                    f"{other}, and {ranks[numbers].where}, which comes after it, by rank {rank}. "
                    "Give them the names that they had"
                )
