"""Whether the files of all ranks are of one save: their counters, and their optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, TypeAlias

import torch

from shardwise.errors import FormatError
from shardwise.formats.containers.ranges import FileRange
from shardwise.formats.foreign import StoredArray
from shardwise.formats.readers.deepspeed.states import ModelState, OptimizerState
from shardwise.formats.tree import Tree

THREADS = 8
MOST_SHOWN = 4
COUNTERS = ("global_steps", "global_samples", "skipped_steps")
STEP = "step"

Numbers: TypeAlias = Mapping[tuple[int, int], float]
"""The values of 0-d arrays, by the number of their file and their first byte."""


def check_counters(tree: Tree, models: Iterable[ModelState]) -> None:
    """Compare how far each rank says that the training was.

    Raises:
        FormatError: ranks differ; names their files and the values.
    """
    held = list(models)
    for key in COUNTERS:
        said = [(state.where, repr(state.rest.get(key))) for state in held]
        _refuse_unequal(tree, f"{key} is", said, "of different steps")


def check_optimizers(tree: Tree, ranks: Sequence[OptimizerState]) -> list[str]:
    """Compare kinds, steps and hyperparameters of optimizers whose parameters are the same.

    Args:
        ranks: of all data-parallel and tensor-parallel ranks of a pipeline stage.

    Returns:
        Lines for `left_out`: numbers of which each rank may have its own, and has.

    Raises:
        FormatError: ranks differ; names their files and the values.
    """
    _refuse_unequal(
        tree,
        "the optimizer is",
        [(state.where, repr(state.kind)) for state in ranks],
        "of different optimizers",
    )
    numbers = read_numbers(tree, (array for state in ranks for array in _small_arrays(state)))
    notes = []
    for group in range(min(len(state.masters) for state in ranks)):
        where = f"of parameter group {group}"
        kinds = [(each.where, ", ".join(sorted(each.states[group])) or "none") for each in ranks]
        _refuse_unequal(tree, f"the state {where} is", kinds, "of different optimizers")
        for key, value in ranks[0].states[group].items():
            if isinstance(value, StoredArray) and value.shape:
                continue
            said = [(each.where, _shown(each.states[group].get(key), numbers)) for each in ranks]
            if key == STEP:
                _refuse_unequal(tree, f"the step {where} is", said, "of different steps")
            elif len({text for _, text in said}) > 1:
                notes.append(f"optimizer.*.{key} {where}: ranks differ; the first one's is taken")
        settings = [(each.where, _settings(each, group, numbers)) for each in ranks]
        for key in dict.fromkeys(key for _, found in settings for key in found):
            said = [(file, found.get(key, "missing")) for file, found in settings]
            _refuse_unequal(tree, f"{key} {where} is", said, "of different saves, or optimizers")
    return notes


def read_numbers(tree: Tree, arrays: Iterable[StoredArray]) -> Numbers:
    """Read 0-d arrays: a few bytes of each file.

    Raises:
        FormatError: one lies outside of its file.
    """
    names = list(tree.sizes)
    by_file: dict[int, dict[int, StoredArray]] = {}
    for array in arrays:
        by_file.setdefault(array.file, {})[array.start] = array

    def read(number: int) -> list[tuple[tuple[int, int], float]]:
        name = names[number]
        with closing(tree.open(name)) as file:
            part = FileRange.whole(file, number, f"{tree}/{name}")
            return [
                ((number, start), _number(part.read(start, array.itemsize), array.dtype))
                for start, array in by_file[number].items()
            ]

    with ThreadPoolExecutor(THREADS) as threads:
        return dict(pair for pairs in threads.map(read, by_file) for pair in pairs)


def _number(data: bytes, dtype: str) -> float:
    value = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).item()
    return value if isinstance(value, (int, float)) else float("nan")


def _small_arrays(state: OptimizerState) -> Iterable[StoredArray]:
    for held in (*(each.values() for each in state.states), *_values(state.settings)):
        yield from (each for each in held if isinstance(each, StoredArray) and not each.shape)


def _values(settings: Sequence[Mapping[str, Any]] | None) -> list[Iterable[Any]]:
    return [each.values() for each in settings or ()]


def _settings(state: OptimizerState, group: int, numbers: Numbers) -> dict[str, str]:
    """The hyperparameters of a group, as texts; its step too, where it is one of them."""
    if state.settings is None:
        return {}
    held = state.settings[state.groups[group]]
    return {key: _shown(value, numbers) for key, value in held.items()}


def _shown(value: object, numbers: Numbers) -> str:
    if not isinstance(value, StoredArray):
        return repr(value)
    if value.shape:
        return f"a tensor of {value.dtype} {list(value.shape)}"
    return repr(numbers[value.file, value.start])


def _refuse_unequal(tree: Tree, what: str, said: Sequence[tuple[str, str]], problem: str) -> None:
    """Refuse files that say different things.

    Args:
        said: files, and what each says.
    """
    by_value: dict[str, list[str]] = {}
    for where, value in said:
        by_value.setdefault(value, []).append(where.removeprefix(f"{tree}/"))
    if len(by_value) < 2:
        return
    listed = [
        f"{value[:200]} in {', '.join(files[:MOST_SHOWN])}"
        + (f" and {len(files) - MOST_SHOWN} more" if len(files) > MOST_SHOWN else "")
        for value, files in by_value.items()
    ]
    raise FormatError(
        f"{tree}: the files of its ranks are {problem}: {what} {'; '.join(listed[:MOST_SHOWN])}. "
        "Copy all files of one save from where the checkpoint is whole, or open another"
    )
