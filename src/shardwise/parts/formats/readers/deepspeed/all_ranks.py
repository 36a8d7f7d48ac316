"""Reads the files of all ranks, and checks that they are complete and from one save."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from shardwise.parts.formats.reader import Builder, FileRange, FileTree, FormatError, StoredArray
from shardwise.parts.formats.readers.deepspeed.files import (
    RankKey,
    TagFiles,
    find_files,
    require_layers_and_experts,
    require_rank_files,
)
from shardwise.parts.formats.readers.deepspeed.states import (
    CLASSES,
    STEP,
    ModelState,
    OptimizerState,
    parse_model_state,
    parse_optimizer_state,
    require_arrays,
)
from shardwise.parts.formats.readers.deepspeed.tensor_parallel import (
    PlacementRule,
    parse_placement_rule,
    place_whole,
)

MOST_FILES_SHOWN = 4
COUNTERS = ("global_steps", "global_samples", "skipped_steps")

Scalars: TypeAlias = Mapping[StoredArray, float]
"""The values of 0-d arrays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllRanks:
    """The contents of the files of all ranks.

    Attributes:
        tree: the checkpoint.
        files: the names of the files.
        models: the model states.
        optimizers: the optimizer states; empty without ZeRO.
        layers: for each tensor-parallel rank, the weights of pipeline layers by name.
        experts: for each model-parallel rank, the weights of experts by name.
        tensor_parallel, stages: the numbers of ranks along these axes.
    """

    tree: FileTree
    files: TagFiles
    models: Mapping[RankKey, ModelState]
    optimizers: Mapping[RankKey, OptimizerState]
    layers: Mapping[int, Mapping[str, StoredArray]]
    experts: Mapping[int, Mapping[str, StoredArray]]
    tensor_parallel: int
    stages: int

    @property
    def first_model(self) -> ModelState:
        """The model states of the first rank."""
        return self.models[0, 0]

    @property
    def world_size(self) -> int:
        """The number of ranks that wrote the checkpoint."""
        data_parallel = self.first_model.values.get("dp_world_size")
        if type(data_parallel) is not int or not 0 < data_parallel < 2**20:
            data_parallel = self.files.data_parallel
        return data_parallel * self.tensor_parallel * self.stages

    def placement_rule(self) -> PlacementRule:
        """Return the rule by which tensor-parallel shards make up parameters.

        Raises:
            FormatError: the checkpoint does not record the rule, or it is malformed.
        """
        if self.tensor_parallel == 1:
            return place_whole
        return parse_placement_rule(
            self.first_model.values.get("universal_checkpoint_info"), str(self.tree)
        )

    def ranks_of_stage(self, stage: int) -> range:
        """Return the model-parallel ranks of a pipeline stage."""
        start = stage * self.tensor_parallel
        return range(start, start + self.tensor_parallel)

    def models_by_tensor_rank(self) -> list[list[ModelState]]:
        """Return, for each tensor-parallel rank, the model states of all data-parallel ranks.

        They are those of the first pipeline stage.
        """
        return [
            [state for (_, model_rank), state in sorted(self.models.items()) if model_rank == rank]
            for rank in range(self.tensor_parallel)
        ]

    def modules(self) -> list[ModelState]:
        """Return the module of each tensor-parallel rank, with all its pipeline stages."""
        modules = []
        for rank in range(self.tensor_parallel):
            arrays: dict[str, StoredArray] = {}
            frozen: dict[str, StoredArray] = {}
            model_ranks = [self.ranks_of_stage(stage)[rank] for stage in range(self.stages)]
            states = [self.models[0, model_rank] for model_rank in model_ranks]
            for model_rank, state in zip(model_ranks, states, strict=True):
                arrays |= {**state.arrays, **self.experts.get(model_rank, {})}
                frozen |= {} if self.files.zero_3 else state.frozen
            module = replace(
                states[0],
                module={**arrays, **self.layers.get(rank, {})},
                buffers=frozenset().union(*(state.buffers for state in states)),
                frozen=frozen,
                ties={k: v for state in states for k, v in state.ties.items()},
            )
            modules.append(module)
        return modules


def read_ranks(tree: FileTree, builder: Builder, *, universal: bool = False) -> AllRanks:
    """Read the files of all ranks, in parallel; no tensor is read.

    Args:
        builder: receives the names of files, the step, the number of ranks, and in `left_out` what
            is not read.
        universal: whether the optimizer's state lies in the parameter files of a universal
            checkpoint, and not in the ranks' files.

    Raises:
        CheckpointNotFoundError: the tree is a single file of a checkpoint that has several.
        FormatError: a file is malformed or missing, or the files are from different saves.
    """
    files = find_files(tree, universal=universal)
    models = _read_model_states(tree, files, builder.left_out)
    _check_counters(tree, models.values())
    values = tree.load_each(files.optimizer.values(), classes=CLASSES)
    optimizers = {
        key: parse_optimizer_state(values[name], tree.label(name))
        for key, name in files.optimizer.items()
    }
    first = models[0, 0]
    if not universal:
        _require_files_of_recorded_ranks(tree, files, first, optimizers)
    _require_layer_and_expert_files(
        tree, files, [state for (d, _), state in models.items() if d == 0]
    )
    values = tree.load_each([*files.layers.values(), *files.experts.values()], classes=CLASSES)
    layers: dict[int, dict[str, StoredArray]] = {}
    for (layer, rank), name in sorted(files.layers.items()):
        arrays = require_arrays(values[name], tree.label(name))
        layers.setdefault(rank, {}).update({f"{layer}.{key}": a for key, a in arrays.items()})
    experts: dict[int, dict[str, StoredArray]] = {}
    for (_, _, rank), name in sorted(files.experts.items()):
        experts.setdefault(rank, {}).update(require_arrays(values[name], tree.label(name)))
    builder.left_out += [
        f"the file {name}: its optimizer's parameters have no names"
        for name in files.expert_optimizers.values()
    ]
    tensor_parallel, stages = _find_parallel_sizes(first, files)
    for stage in range(stages) if optimizers else ():
        ranks = range(stage * tensor_parallel, (stage + 1) * tensor_parallel)
        states_of_stage = [
            state for (_, rank), state in sorted(optimizers.items()) if rank in ranks
        ]
        builder.left_out += _check_optimizers(tree, states_of_stage)
    for name in tree.sizes:
        builder.add_file(name)
    all_ranks = AllRanks(
        tree=tree,
        files=files,
        models=models,
        optimizers=optimizers,
        layers=layers,
        experts=experts,
        tensor_parallel=tensor_parallel,
        stages=stages,
    )
    builder.step, builder.world_size = first.values.get("global_steps"), all_ranks.world_size
    return all_ranks


def _read_model_states(
    tree: FileTree, files: TagFiles, left_out: list[str]
) -> dict[RankKey, ModelState]:
    """Read the model states of all ranks; equal pickles of later ranks are parsed once."""
    first_files = {key: name for key, name in files.model.items() if key[0] == 0}
    values = tree.load_each(first_files.values(), classes=CLASSES)
    states = {
        key: parse_model_state(values[name], tree.label(name)) for key, name in first_files.items()
    }
    other_files = {key: name for key, name in files.model.items() if key[0]}
    values = tree.load_each(other_files.values(), classes=CLASSES, share_equal=True)
    parsed: dict[int, ModelState] = {}  # by the id of the value
    for key, name in other_files.items():
        value, path = values[name], tree.label(name)
        if id(value) not in parsed:
            parsed[id(value)] = parse_model_state(value, path)
        states[key] = parsed[id(value)].for_rank(name, path)
    if other_files:
        left_out.append(
            f"buffers of {len(other_files)} other ranks: under ZeRO 3 each rank has its own; the "
            "first rank's are taken, as DeepSpeed's converters do"
        )
    return states


def _require_files_of_recorded_ranks(
    tree: FileTree,
    files: TagFiles,
    model: ModelState,
    optimizers: Mapping[RankKey, OptimizerState],
) -> None:
    """Require the files of all ranks. Their number is recorded in the files."""
    dimensions = model.values.get("checkpoint_parallel_dimensions")
    sizes = (
        [*dimensions.values()]
        if isinstance(dimensions, Mapping)
        else [model.values.get("mp_world_size")]
    )
    model_parallel = math.prod(n for n in sizes if type(n) is int and n > 0)
    counts = next((state.partition_counts for _, state in sorted(optimizers.items())), ())
    data_parallel = max(counts, default=0) or model.values.get("dp_world_size")
    require_rank_files(
        tree,
        files,
        data_parallel=max(files.data_parallel, data_parallel if type(data_parallel) is int else 0),
        model_parallel=max(files.model_parallel, model_parallel),
        with_zero=bool(optimizers) or (bool(model.shapes) and tree.single_file is None),
    )


def _require_layer_and_expert_files(
    tree: FileTree, files: TagFiles, models: Iterable[ModelState]
) -> None:
    """Require a file for each pipeline layer with weights, and for each expert."""
    layers: set[int] = set()
    experts: list[int] = []
    for model in models:
        groups = (*model.shapes, model.frozen_shapes) if model.module is None else ()
        prefixes = {name.partition(".")[0] for group in groups for name in group}
        layers.update(int(prefix) for prefix in prefixes if re.fullmatch(r"[0-9]{1,7}", prefix))
        counts = model.values.get("num_experts")
        if model.values.get("ds_autoep_layers"):  # under ZeRO 3 these experts have no files
            continue
        if isinstance(counts, (list, tuple)) and all(type(n) is int and n >= 0 for n in counts):
            experts = list(counts)
    require_layers_and_experts(tree, files, sorted(layers), experts)


def _find_parallel_sizes(first: ModelState, files: TagFiles) -> tuple[int, int]:
    """Return the number of tensor-parallel ranks and of pipeline stages."""
    recorded = first.values.get("checkpoint_parallel_dimensions")
    dimensions = recorded if isinstance(recorded, Mapping) else {}
    tensor, stages = dimensions.get("tp_degree"), dimensions.get("pp_degree")
    if type(tensor) is not int:
        tensor = files.model_parallel
        if files.layers:
            tensor = 1 + max(rank for _, rank in files.layers)
    if type(stages) is not int:
        stages = files.model_parallel // max(tensor, 1)
    if tensor < 1 or stages < 1 or tensor * stages != files.model_parallel:
        raise FormatError(
            f"{first.path}: {files.model_parallel} model-parallel ranks do not divide into "
            f"{stages} stages of {tensor} tensor-parallel ranks: copy the files of all ranks from "
            "one save"
        )
    return tensor, stages


def _check_counters(tree: FileTree, models: Iterable[ModelState]) -> None:
    """Compare the training counters of all ranks.

    Raises:
        FormatError: they differ; the message names the files and the values.
    """
    states = list(models)
    for key in COUNTERS:
        values = [(state.path, repr(state.values.get(key))) for state in states]
        _require_equal(tree, f"{key} is", values, "from different steps")


def _check_optimizers(tree: FileTree, ranks: Sequence[OptimizerState]) -> list[str]:
    """Compare type, steps and hyperparameters of optimizers that share their parameters.

    Args:
        ranks: all data-parallel and tensor-parallel ranks of a pipeline stage.

    Returns:
        Lines for `left_out` about other numbers that differ between ranks.

    Raises:
        FormatError: the ranks differ; the message names the files and the values.
    """
    scalars = _read_scalars(tree, (array for rank in ranks for array in _scalar_arrays(rank)))
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

    Each key is a pair: a subject, and the problem if ranks differ in it. The problem is "" if such
    a difference is no reason to refuse the files.
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
            for key, value in rank.hyperparameters[rank.param_group_of[group]].items():
                problem = "from different saves or optimizers"
                facts[f"{key} {suffix}", problem] = _to_text(value, scalars)
    return facts


def _read_scalars(tree: FileTree, arrays: Iterable[StoredArray]) -> Scalars:
    """Read 0-d arrays, a few bytes of each file.

    Raises:
        FormatError: an array lies outside of its file.
    """
    by_file: dict[str, dict[StoredArray, None]] = {}  # distinct arrays
    for array in arrays:
        by_file.setdefault(array.file, {})[array] = None

    def read(file: FileRange) -> Scalars:
        return {
            array: _decode_scalar(file.read(array.start, array.itemsize), array.dtype)
            for array in by_file[file.name]
        }

    by_name = tree.read_each(by_file, read)
    return {array: value for values in by_name.values() for array, value in values.items()}


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
    return repr(scalars[value])


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
