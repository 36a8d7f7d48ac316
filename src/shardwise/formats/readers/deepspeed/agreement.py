"""Checks that the files of all ranks are from one save, by their counters and optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import torch

from shardwise.errors import FormatError
from shardwise.formats.containers.ranges import FileRange
from shardwise.formats.foreign import StoredArray
from shardwise.formats.readers.deepspeed.states import ModelState, OptimizerState
from shardwise.formats.tree import Tree

MOST_SHOWN = 4
COUNTERS = ("global_steps", "global_samples", "skipped_steps")
STEP = "step"

Numbers: TypeAlias = Mapping[tuple[int, int], float]
"""The values of 0-d arrays, by the number of their file and their first byte."""


def check_counters(tree: Tree, models: Iterable[ModelState]) -> None:
    """Compare the training counters of all ranks.

    Raises:
        FormatError: they differ; the message names the files and the values.
    """
    states = list(models)
    for key in COUNTERS:
        values = [(state.where, repr(state.rest.get(key))) for state in states]
        _require_equal(tree, f"{key} is", values, "from different steps")


def check_optimizers(tree: Tree, ranks: Sequence[OptimizerState]) -> list[str]:
    """Compare kind, steps and hyperparameters of optimizers that share their parameters.

    Args:
        ranks: all data-parallel and tensor-parallel ranks of a pipeline stage.

    Returns:
        Lines for `left_out` about other numbers that differ between ranks.

    Raises:
        FormatError: the ranks differ; the message names the files and the values.
    """
    kinds = [(state.where, repr(state.kind)) for state in ranks]
    _require_equal(tree, "the optimizer is", kinds, "from different optimizers")
    numbers = read_numbers(tree, (array for state in ranks for array in _scalars(state)))
    lines = []
    for group in range(min(len(state.masters) for state in ranks)):
        where = f"of parameter group {group}"
        keys = [(each.where, ", ".join(sorted(each.states[group])) or "none") for each in ranks]
        _require_equal(tree, f"the state {where} is", keys, "from different optimizers")
        for key, value in ranks[0].states[group].items():
            if isinstance(value, StoredArray) and value.shape:
                continue
            values = [(each.where, _shown(each.states[group].get(key), numbers)) for each in ranks]
            if key == STEP:
                _require_equal(tree, f"the step {where} is", values, "from different steps")
            elif len({text for _, text in values}) > 1:
                lines.append(f"optimizer.*.{key} {where}: ranks differ; the first one's is taken")
        settings = [(each.where, _settings(each, group, numbers)) for each in ranks]
        for key in dict.fromkeys(key for _, found in settings for key in found):
            values = [(file, found.get(key, "missing")) for file, found in settings]
            _require_equal(tree, f"{key} {where} is", values, "from different saves or optimizers")
    return lines


def read_numbers(tree: Tree, arrays: Iterable[StoredArray]) -> Numbers:
    """Read 0-d arrays, a few bytes of each file.

    Raises:
        FormatError: an array lies outside of its file.
    """
    names = list(tree.sizes)
    by_file: dict[int, dict[int, StoredArray]] = {}
    for array in arrays:
        by_file.setdefault(array.file, {})[array.start] = array

    def read(part: FileRange) -> dict[tuple[int, int], float]:
        return {
            (part.number, start): _number(part.read(start, array.itemsize), array.dtype)
            for start, array in by_file[part.number].items()
        }

    found = tree.read_each({names[number]: number for number in by_file}, read)
    return {place: value for values in found.values() for place, value in values.items()}


def _number(data: bytes, dtype: str) -> float:
    value = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).item()
    return value if isinstance(value, (int, float)) else float("nan")


def _scalars(state: OptimizerState) -> Iterable[StoredArray]:
    for held in (*state.states, *(state.settings or ())):
        yield from (v for v in held.values() if isinstance(v, StoredArray) and not v.shape)


def _settings(state: OptimizerState, group: int, numbers: Numbers) -> dict[str, str]:
    """Return the hyperparameters of a group as text."""
    held = {} if state.settings is None else state.settings[state.groups[group]]
    return {key: _shown(value, numbers) for key, value in held.items()}


def _shown(value: object, numbers: Numbers) -> str:
    if not isinstance(value, StoredArray):
        return repr(value)
    if value.shape:
        return f"a tensor of {value.dtype} {list(value.shape)}"
    return repr(numbers[value.file, value.start])


def _require_equal(tree: Tree, what: str, values: Sequence[tuple[str, str]], problem: str) -> None:
    """Refuse files with different values.

    Args:
        values: each file, and its value.
    """
    by_value: dict[str, list[str]] = {}
    for where, value in values:
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
