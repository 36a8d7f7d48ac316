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
    scalars = read_scalars(tree, (array for rank in ranks for array in _scalar_arrays(rank)))
    groups = range(min(len(rank.masters) for rank in ranks))
    facts = [_describe_optimizer(rank, groups, scalars) for rank in ranks]
    lines = []
    for subject, problem in dict.fromkeys(key for each in facts for key in each):
        values = [
            (rank.path, each.get((subject, problem), "missing"))
            for rank, each in zip(ranks, facts, strict=True)
        ]
        if problem:
            _require_equal(tree, f"{subject} is", values, problem)
        elif len({text for _, text in values}) > 1:
            lines.append(f"optimizer.*.{subject}: ranks differ; the first one's is taken")
    return lines


def _describe_optimizer(
    rank: OptimizerState, groups: Iterable[int], scalars: Scalars
) -> dict[tuple[str, str], str]:
    """Return what should be the same on all ranks, as text.

    The keys are the subject, and the problem if ranks differ, or "" if this is no reason to refuse
    the files.
    """
    facts = {("the optimizer", "from different optimizers"): repr(rank.optimizer_type)}
    for group in groups:
        state, suffix = rank.states[group], f"of parameter group {group}"
        keys = ", ".join(sorted(state)) or "none"
        facts[f"the state {suffix}", "from different optimizers"] = keys
        for key, value in state.items():
            if key == STEP:
                facts[f"the step {suffix}", "from different steps"] = _to_text(value, scalars)
            elif not isinstance(value, StoredArray) or not value.shape:
                facts[f"{key} {suffix}", ""] = _to_text(value, scalars)
        if rank.hyperparameters is not None:
            for key, value in rank.hyperparameters[rank.param_groups[group]].items():
                problem = "from different saves or optimizers"
                facts[f"{key} {suffix}", problem] = _to_text(value, scalars)
    return facts


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
