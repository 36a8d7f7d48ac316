"""Checks that the files of all ranks are from one save, by their counters and optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import torch

from shardwise.formats.readers.deepspeed.states import ModelState, OptimizerState
from shardwise.ports.reader import FileRange, FileTree, FormatError, StoredArray

MOST_FILES_SHOWN = 4
COUNTERS = ("global_steps", "global_samples", "skipped_steps")
STEP = "step"

Scalars: TypeAlias = Mapping[tuple[str, int], float]
"""The values of 0-d arrays, by the index of the file and the offset in it, in bytes."""


def check_counters(tree: FileTree, models: Iterable[ModelState]) -> None:
    """Compare the training counters of all ranks.

    Raises:
        FormatError: they differ; the message names the files and the values.
    """
    states = list(models)
    for key in COUNTERS:
        values = [(state.path, repr(state.values.get(key))) for state in states]
        _require_equal(tree, f"{key} is", values, "from different steps")


def check_optimizers(tree: FileTree, ranks: Sequence[OptimizerState]) -> list[str]:
    """Compare type, steps and hyperparameters of optimizers that share their parameters.

    Args:
        ranks: all data-parallel and tensor-parallel ranks of a pipeline stage.

    Returns:
        Lines for `left_out` about other numbers that differ between ranks.

    Raises:
        FormatError: the ranks differ; the message names the files and the values.
    """
    types = [(rank.path, repr(rank.optimizer_type)) for rank in ranks]
    _require_equal(tree, "the optimizer is", types, "from different optimizers")
    scalars = read_scalars(tree, (array for rank in ranks for array in _scalar_arrays(rank)))
    lines = []
    for group in range(min(len(rank.masters) for rank in ranks)):
        suffix = f"of parameter group {group}"
        keys = [(rank.path, ", ".join(sorted(rank.states[group])) or "none") for rank in ranks]
        _require_equal(tree, f"the state {suffix} is", keys, "from different optimizers")
        for key, value in ranks[0].states[group].items():
            if isinstance(value, StoredArray) and value.shape:
                continue
            values = [(rank.path, _to_text(rank.states[group].get(key), scalars)) for rank in ranks]
            if key == STEP:
                _require_equal(tree, f"the step {suffix} is", values, "from different steps")
            elif len({text for _, text in values}) > 1:
                lines.append(f"optimizer.*.{key} {suffix}: ranks differ; the first one's is taken")
        settings = [(rank.path, _hyperparameters_as_text(rank, group, scalars)) for rank in ranks]
        for key in dict.fromkeys(key for _, texts in settings for key in texts):
            values = [(path, texts.get(key, "missing")) for path, texts in settings]
            _require_equal(tree, f"{key} {suffix} is", values, "from different saves or optimizers")
    return lines


def read_scalars(tree: FileTree, arrays: Iterable[StoredArray]) -> Scalars:
    """Read 0-d arrays, a few bytes of each file.

    Raises:
        FormatError: an array lies outside of its file.
    """
    by_file: dict[str, dict[int, StoredArray]] = {}
    for array in arrays:
        by_file.setdefault(array.file, {})[array.start] = array

    def read(file: FileRange) -> dict[tuple[str, int], float]:
        return {
            (file.name, start): _decode_scalar(file.read(start, array.itemsize), array.dtype)
            for start, array in by_file[file.name].items()
        }

    by_name = tree.read_each(by_file, read)
    return {key: value for values in by_name.values() for key, value in values.items()}


def _decode_scalar(data: bytes, dtype: str) -> float:
    value = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).item()
    return value if isinstance(value, (int, float)) else float("nan")


def _scalar_arrays(state: OptimizerState) -> Iterable[StoredArray]:
    for values in (*state.states, *(state.hyperparameters or ())):
        yield from (v for v in values.values() if isinstance(v, StoredArray) and not v.shape)


def _hyperparameters_as_text(state: OptimizerState, group: int, scalars: Scalars) -> dict[str, str]:
    """Return the hyperparameters of a flat group as text."""
    if state.hyperparameters is None:
        return {}
    values = state.hyperparameters[state.param_groups[group]]
    return {key: _to_text(value, scalars) for key, value in values.items()}


def _to_text(value: object, scalars: Scalars) -> str:
    if not isinstance(value, StoredArray):
        return repr(value)
    if value.shape:
        return f"a tensor of {value.dtype} {list(value.shape)}"
    return repr(scalars[value.file, value.start])


def _require_equal(
    tree: FileTree, subject: str, values: Sequence[tuple[str, str]], problem: str
) -> None:
    """Refuse files whose values differ.

    Args:
        subject: the value and a verb, for the message: "global_steps is".
        values: the path and the value of each file.
        problem: a phrase for the message if values differ: "from different steps".
    """
    by_value: dict[str, list[str]] = {}
    for path, value in values:
        by_value.setdefault(value, []).append(tree.relative_path(path))
    if len(by_value) < 2:
        return
    listed = [
        f"{value[:200]} in {', '.join(files[:MOST_FILES_SHOWN])}"
        + (f" and {len(files) - MOST_FILES_SHOWN} more" if len(files) > MOST_FILES_SHOWN else "")
        for value, files in by_value.items()
    ]
    raise FormatError(
        f"{tree}: the files of its ranks are {problem}: {subject} "
        f"{'; '.join(listed[:MOST_FILES_SHOWN])}. Copy all files of one save from a complete copy "
        "of the checkpoint, or open another checkpoint"
    )
