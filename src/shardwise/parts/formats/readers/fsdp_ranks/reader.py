"""Directories with `model_world_size_W_rank_R.pt` and further files of each rank, as of verl."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from shardwise.parts.formats.reader import Builder, FileTree, FormatError, Reader, name_parameters
from shardwise.parts.formats.readers.fsdp_ranks.flat_optimizers import (
    UnknownLayoutError,
    convert_flat_optimizers,
    is_flat_optimizer,
    is_whole_optimizer,
)

MODEL, OPTIMIZER, EXTRA_STATE = "model", "optim", "extra_state"
_FILE = re.compile(
    rf"({MODEL}|{OPTIMIZER}|{EXTRA_STATE})_world_size_(\d{{1,7}})_rank_(\d{{1,7}})\.pt"
)
MOST_RANKS = 1 << 17
_MOST_LINES = 4
_STATE_KEYS = {MODEL: "model", OPTIMIZER: "optimizer", EXTRA_STATE: "extra_state"}
_SCHEDULER, _RANDOM_STATE = "lr_scheduler", "rng"
_PUBLISHED = "huggingface/"


def recognise(tree: FileTree) -> bool:
    """Return whether a directory has files of a model, with names as verl gives them."""
    return tree.single_file is None and any(map(_FILE.fullmatch, tree.sizes))


def read(tree: FileTree, builder: Builder) -> None:
    """Read the files of all ranks as one checkpoint.

    The keys are `model`, `optimizer`, `scheduler` (if there is one), and `extra_state` for other
    values. Random states of ranks are left out. Flat optimizer state of FSDP1 is divided into
    parameters; if this is not possible with certainty, the optimizer is left out.

    Raises:
        FormatError: a file is missing or malformed, the files are of several world sizes, or from
            different saves.
    """
    files = _find_files(tree)
    values = tree.load_each((name for names in files.values() for name in names), kind=dict)
    by_kind: dict[str, list[Any]] = {
        kind: [values[name] for name in names] for kind, names in files.items()
    }
    builder.left_out += _list_left_out(tree, values)
    try:
        _convert_optimizers(by_kind, builder)
    except UnknownLayoutError as error:
        del by_kind[OPTIMIZER]
        builder.left_out.append(
            f"optimizer: its state is in flat parameters of FSDP1, and {error}. To keep it, "
            "save FSDP.optim_state_dict(model, optimizer)"
        )
    if any(_RANDOM_STATE in value for value in by_kind.get(EXTRA_STATE, [])):
        builder.left_out.append(
            "extra_state.rng: random states of ranks; they belong to the program"
        )
    builder.add_ranks(
        [
            (name, _state_of_file(kind, value))
            for kind, its_values in by_kind.items()
            for name, value in zip(files[kind], its_values, strict=True)
        ]
    )
    builder.world_size = max(map(len, files.values()))


READER = Reader("FSDP files of each rank (verl)", recognise, read, overrides=("torch-ranks",))


def _convert_optimizers(by_kind: dict[str, list[Any]], builder: Builder) -> None:
    """Replace the optimizers' states with states that have named parameters and parts of tensors.

    Raises:
        UnknownLayoutError: the files do not say which parameters a flat state belongs to.
    """
    optimizers = by_kind.get(OPTIMIZER, [])
    models = by_kind.get(MODEL, [{} for _ in optimizers])
    if all(map(is_whole_optimizer, models, optimizers)):
        return
    if any(map(is_flat_optimizer, optimizers)):
        by_kind[OPTIMIZER] = convert_flat_optimizers(models, optimizers, builder)
    elif optimizers:
        by_kind[OPTIMIZER] = [
            name_parameters({MODEL: model, OPTIMIZER: optimizer})[OPTIMIZER]
            for model, optimizer in zip(models, optimizers, strict=True)
        ]


def _find_files(tree: FileTree) -> dict[str, tuple[str, ...]]:
    """Return for each kind of file its name for each rank, in order.

    Raises:
        FormatError: they are of several world sizes, or a file is missing.
    """
    found: dict[str, dict[int, str]] = {}
    example_of_world: dict[int, str] = {}
    for name in tree.sizes:
        if (match := _FILE.fullmatch(name)) is not None:
            found.setdefault(match[1], {})[int(match[3])] = name
            example_of_world.setdefault(int(match[2]), name)
    if len(example_of_world) > 1:
        worlds = " and ".join(f"{world} ({name})" for world, name in example_of_world.items())
        raise FormatError(
            f"{tree} has files of several world sizes: {worlds}. These are different checkpoints: "
            "move the files of each world size to a separate directory, and open one of them"
        )
    ((world_size, example),) = example_of_world.items()
    if not 0 < world_size <= MOST_RANKS:
        raise FormatError(
            f"{tree}: the name {example} has the world size {world_size}: expected 1 to "
            f"{MOST_RANKS}; the file was renamed; open an intact copy"
        )
    expected = {
        kind: tuple(f"{kind}_world_size_{world_size}_rank_{rank}.pt" for rank in range(world_size))
        for kind in (MODEL, OPTIMIZER, EXTRA_STATE)
        if kind in found
    }
    for kind, names in expected.items():
        if too_large := sorted(rank for rank in found[kind] if rank >= world_size):
            raise FormatError(
                f"{tree}: {found[kind][too_large[0]]} is the file of rank {too_large[0]}, but the "
                f"world size is {world_size}: the file was renamed; open an intact copy"
            )
        tree.require(names, f"{world_size} ranks wrote")
    return expected


def _state_of_file(kind: str, value: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the part of the state that a file contains."""
    if kind != EXTRA_STATE:
        return {_STATE_KEYS[kind]: value}
    rest = {k: v for k, v in value.items() if k not in (_SCHEDULER, _RANDOM_STATE)}
    scheduler = value.get(_SCHEDULER)
    return {
        **({} if scheduler is None else {"scheduler": scheduler}),
        **({_STATE_KEYS[kind]: rest} if rest else {}),
    }


def _list_left_out(tree: FileTree, known: Collection[str]) -> list[str]:
    """Return a line for each file that is not read. The published files share one line."""
    others = [name for name in tree.sizes if name not in known and name != "fsdp_config.json"]
    published = [name for name in others if name.startswith(_PUBLISHED)]
    lines = [
        f"{name}: not a file of a rank; open the file itself"
        for name in others
        if name not in published
    ]
    if published:
        lines.append(
            f"{_PUBLISHED}: {len(published)} files for publishing the model, such as "
            f"{published[0].removeprefix(_PUBLISHED)}"
        )
    return lines[:_MOST_LINES]
