"""Reads the files of all ranks, and checks that they are complete and from one save."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.errors import FormatError
from shardwise.formats.containers.torch_files import Contents, ParseCache, read_torch_file
from shardwise.formats.foreign import StoredArray
from shardwise.formats.readers.deepspeed.agreement import check_counters, check_optimizers
from shardwise.formats.readers.deepspeed.files import Files, require_modules, require_ranks
from shardwise.formats.readers.deepspeed.states import (
    STUBS,
    ModelState,
    OptimizerState,
    arrays_of,
    model_state,
    optimizer_state,
)
from shardwise.formats.readers.deepspeed.tensor_parallel import Place, place_of
from shardwise.formats.tree import Tree


@dataclass(frozen=True, slots=True)
class Module:
    """The module of one tensor-parallel rank, of all its pipeline stages.

    Attributes:
        arrays: parameters and buffers by name; under ZeRO 3 the parameters are empty.
        buffers: the names of buffers.
        frozen: second copies of frozen parameters, where DeepSpeed stores them twice.
        shared: names of tied parameters, and the names that they are tied to.
    """

    arrays: Mapping[str, StoredArray]
    buffers: frozenset[str]
    frozen: Mapping[str, StoredArray]
    shared: Mapping[str, str]

    def tied(self) -> dict[str, str]:
        """Return names of tied parameters, and the names that they are tied to."""
        first: dict[StoredArray, str] = {}
        tied = {}
        for name, array in self.arrays.items():
            if math.prod(array.shape) and first.setdefault(array, name) != name:
                tied[name] = first[array]
        return tied | dict(self.shared)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The contents of the files of all ranks.

    Attributes:
        models, optimizers: by data-parallel and model-parallel rank. A model-parallel rank is
            `stage * tensor_parallel + tensor-parallel rank`.
        layers: weights of pipeline layers by name, by tensor-parallel rank.
        experts: weights of experts by name, by model-parallel rank.
        sliced: whether ZeRO 3 divided the parameters.
        left_out: lines about content that is not taken.
    """

    where: str
    models: Mapping[tuple[int, int], ModelState]
    optimizers: Mapping[tuple[int, int], OptimizerState]
    layers: Mapping[int, Mapping[str, StoredArray]]
    experts: Mapping[int, Mapping[str, StoredArray]]
    data_parallel: int
    tensor_parallel: int
    stages: int
    sliced: bool
    left_out: tuple[str, ...]

    @property
    def first(self) -> ModelState:
        """The model states of the first rank."""
        return self.models[0, 0]

    @property
    def step(self) -> int | None:
        """The number of steps that were trained, if it is stored."""
        steps = self.first.rest.get("global_steps")
        return steps if type(steps) is int else None

    @property
    def world_size(self) -> int:
        """The number of ranks that wrote the checkpoint."""
        parallel = self.first.rest.get("dp_world_size")
        if type(parallel) is not int or not 0 < parallel < 2**20:
            parallel = self.data_parallel
        return parallel * self.tensor_parallel * self.stages

    def place(self) -> Place:
        """Return how the checkpoint says that tensor-parallel shards make up parameters.

        Raises:
            FormatError: the checkpoint does not say it, or is malformed.
        """
        return place_of(self.first.rest.get("universal_checkpoint_info"), self.where)

    def of_stage(self, stage: int) -> range:
        """Return the model-parallel ranks of a pipeline stage."""
        start = stage * self.tensor_parallel
        return range(start, start + self.tensor_parallel)

    def by_data_parallel(self) -> list[list[ModelState]]:
        """Return, for each tensor-parallel rank, the model states of all data-parallel ranks."""
        ranks = range(self.tensor_parallel)
        return [[s for (_, m), s in sorted(self.models.items()) if m == rank] for rank in ranks]

    def modules(self) -> list[Module]:
        """Return the module of each tensor-parallel rank, with all its pipeline stages."""
        found = []
        for rank in range(self.tensor_parallel):
            arrays: dict[str, StoredArray] = {}
            buffers: set[str] = set()
            frozen: dict[str, StoredArray] = {}
            shared: dict[str, str] = {}
            for stage in range(self.stages):
                model_rank = self.of_stage(stage)[rank]
                state = self.models[0, model_rank]
                arrays.update(state.module or {})
                arrays.update(self.experts.get(model_rank, {}))
                buffers |= state.buffers
                shared.update(state.shared)
                if not self.sliced:
                    frozen.update(state.frozen)
            arrays.update(self.layers.get(rank, {}))
            found.append(Module(arrays, frozenset(buffers), frozen, shared))
        return found


def read_ranks(tree: Tree, files: Files, *, universal: bool = False) -> Ranks:
    """Read the files of all ranks, in parallel; no tensor is read.

    Args:
        universal: the optimizer's state lies in a universal checkpoint and not in ranks' files.

    Raises:
        FormatError: a file is malformed or missing, or the files are from different saves.
    """
    left_out: list[str] = []
    models = _model_states(tree, files, left_out)
    check_counters(tree, models.values())
    values = read_values(tree, files.optimizer.values(), left_out)
    optimizers = {r: optimizer_state(values[n], f"{tree}/{n}") for r, n in files.optimizer.items()}
    first = models[0, 0]
    if not universal:
        _require_ranks(tree, files, first, optimizers)
    _require_modules(tree, files, [state for (rank, _), state in models.items() if rank == 0])
    values = read_values(tree, [*files.layers.values(), *files.experts.values()], left_out)
    layers: dict[int, dict[str, StoredArray]] = {}
    for (layer, rank), name in sorted(files.layers.items()):
        arrays = arrays_of(values[name], f"{tree}/{name}")
        layers.setdefault(rank, {}).update({f"{layer}.{k}": a for k, a in arrays.items()})
    experts: dict[int, dict[str, StoredArray]] = {}
    for (_, _, rank), name in sorted(files.experts.items()):
        experts.setdefault(rank, {}).update(arrays_of(values[name], f"{tree}/{name}"))
    left_out += [
        f"the file {name}: its optimizer's parameters have no names"
        for name in files.expert_optimizers.values()
    ]
    tensor_parallel, stages = _degrees(first, files)
    for stage in range(stages) if optimizers else ():
        ranks = range(stage * tensor_parallel, (stage + 1) * tensor_parallel)
        own = [state for (_, rank), state in sorted(optimizers.items()) if rank in ranks]
        left_out += check_optimizers(tree, own)
    return Ranks(
        where=str(tree),
        models=models,
        optimizers=optimizers,
        layers=layers,
        experts=experts,
        data_parallel=files.data_parallel,
        tensor_parallel=tensor_parallel,
        stages=stages,
        sliced=files.sliced,
        left_out=tuple(left_out),
    )


def read_values(tree: Tree, names: Iterable[str], left_out: list[str]) -> dict[str, Any]:
    """Read files of torch.save in parallel, and return their values by name.

    Args:
        left_out: gets lines about objects that are not read from pickles.

    Raises:
        FormatError: a file is malformed or missing.
    """
    found = _read_files(tree, names, left_out)
    return {name: contents.value for name, contents in found.items()}


def _read_files(
    tree: Tree, names: Iterable[str], left_out: list[str], cache: ParseCache | None = None
) -> dict[str, Contents]:
    numbers = {name: number for number, name in enumerate(tree.sizes)}
    found = tree.read_each(
        {name: numbers.get(name, 0) for name in names},  # a missing file cannot be opened
        lambda part: read_torch_file(part, stubs=STUBS, opaque=tree.opaque, cache=cache),
    )
    for name, contents in found.items():
        left_out.extend(f"{name}: {each}" for each in contents.opaque)
    return found


def _model_states(
    tree: Tree, files: Files, left_out: list[str]
) -> dict[tuple[int, int], ModelState]:
    """Read the model states of all ranks; equal pickles of later ranks are parsed once."""
    first = {rank: name for rank, name in files.model.items() if rank[0] == 0}
    values = read_values(tree, first.values(), left_out)
    states = {rank: model_state(values[n], f"{tree}/{n}") for rank, n in first.items()}
    others = {rank: name for rank, name in files.model.items() if rank[0]}
    numbers = {name: number for number, name in enumerate(tree.sizes)}
    found = _read_files(tree, others.values(), left_out, ParseCache())
    parsed: dict[int, ModelState] = {}
    for rank, name in others.items():
        contents, where = found[name], f"{tree}/{name}"
        if contents.file not in parsed:
            parsed[contents.file] = model_state(contents.value, where)
        states[rank] = parsed[contents.file].in_file(numbers[name], where)
    if others:
        left_out.append(
            f"buffers of {len(others)} more ranks: under ZeRO 3 each rank has its own; those of "
            "the first are taken, as DeepSpeed's converters do"
        )
    return states


def _require_ranks(
    tree: Tree,
    files: Files,
    model: ModelState,
    optimizers: Mapping[tuple[int, int], OptimizerState],
) -> None:
    """Require the files of as many ranks as the files record."""
    dimensions = model.rest.get("checkpoint_parallel_dimensions")
    degrees = (
        [*dimensions.values()]
        if isinstance(dimensions, Mapping)
        else [model.rest.get("mp_world_size")]
    )
    model_parallel = math.prod(n for n in degrees if type(n) is int and n > 0)
    counts = next((state.counts for _, state in sorted(optimizers.items())), ())
    ranks = max(counts, default=0) or model.rest.get("dp_world_size")
    require_ranks(
        tree,
        files,
        data_parallel=max(files.data_parallel, ranks if type(ranks) is int else 0),
        model_parallel=max(files.model_parallel, model_parallel),
        divided=bool(optimizers) or (bool(model.shapes) and tree.only is None),
    )


def _require_modules(tree: Tree, files: Files, models: Iterable[ModelState]) -> None:
    """Require a file for each pipeline layer with weights, and for each expert."""
    layers: set[int] = set()
    experts: list[int] = []
    for model in models:
        groups = (*model.shapes, model.frozen_shapes) if model.module is None else ()
        heads = {name.partition(".")[0] for group in groups for name in group}
        layers.update(int(head) for head in heads if re.fullmatch(r"[0-9]{1,7}", head))
        recorded = model.rest.get("num_experts")
        if model.rest.get("ds_autoep_layers"):  # under ZeRO 3 these experts have no files
            continue
        if isinstance(recorded, (list, tuple)) and all(type(n) is int and n >= 0 for n in recorded):
            experts = list(recorded)
    require_modules(tree, files, sorted(layers), experts)


def _degrees(first: ModelState, files: Files) -> tuple[int, int]:
    """Return the number of tensor-parallel ranks and of pipeline stages."""
    dimensions = first.rest.get("checkpoint_parallel_dimensions")
    known = dimensions if isinstance(dimensions, Mapping) else {}
    tensor, stages = known.get("tp_degree"), known.get("pp_degree")
    layers = 1 + max((rank for _, rank in files.layers), default=0)
    if type(tensor) is not int:
        tensor = layers if files.layers else files.model_parallel
    if type(stages) is not int:
        stages = files.model_parallel // max(tensor, 1)
    if tensor < 1 or stages < 1 or tensor * stages != files.model_parallel:
        raise FormatError(
            f"{first.where}: {files.model_parallel} model-parallel ranks do not divide into "
            f"{stages} stages of {tensor} tensor-parallel ranks"
        )
    return tensor, stages
