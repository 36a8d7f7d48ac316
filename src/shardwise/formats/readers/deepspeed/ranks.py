"""What all ranks of a native checkpoint wrote, read and put side by side."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from shardwise.errors import FormatError
from shardwise.formats.containers.ranges import FileRange
from shardwise.formats.containers.torch_files import Contents, ParseCache, read_torch_file
from shardwise.formats.foreign import StoredArray
from shardwise.formats.readers.deepspeed.agreement import check_counters, check_optimizers
from shardwise.formats.readers.deepspeed.files import Files, check_modules, check_ranks
from shardwise.formats.readers.deepspeed.laying import Laying
from shardwise.formats.readers.deepspeed.modules import Module
from shardwise.formats.readers.deepspeed.placements import Placing, placing_of
from shardwise.formats.readers.deepspeed.states import (
    STUBS,
    ModelState,
    OptimizerState,
    arrays_of,
    model_state,
    optimizer_state,
)
from shardwise.formats.tree import Tree

THREADS = 8


def load_all(tree: Tree, names: Iterable[str], laying: Laying) -> dict[str, Any]:
    """The values of files of torch.save, by name, read in parallel.

    Raises:
        FormatError: one is malformed, or not there.
    """
    found = _read_all(tree, names, laying, cache=None)
    return {name: contents.value for name, contents in found.items()}


def _read_all(
    tree: Tree, names: Iterable[str], laying: Laying, *, cache: ParseCache | None
) -> dict[str, Contents]:
    numbers = {name: number for number, name in enumerate(tree.sizes)}

    def load(name: str) -> Contents:
        file = tree.open(name)
        try:
            part = FileRange.whole(file, numbers[name], f"{tree}/{name}")
            return read_torch_file(part, stubs=STUBS, opaque=tree.opaque, cache=cache)
        finally:
            file.close()

    wanted = list(names)
    with ThreadPoolExecutor(THREADS) as threads:
        found = dict(zip(wanted, threads.map(load, wanted), strict=True))
    for name, contents in found.items():
        laying.left_out.extend(f"{name}: {each}" for each in contents.opaque)
    return found


def _model_states(
    tree: Tree, files: Mapping[tuple[int, int], str], laying: Laying
) -> dict[tuple[int, int], ModelState]:
    """What each rank has; files that are alike are parsed once."""
    numbers = {name: number for number, name in enumerate(tree.sizes)}
    found = _read_all(tree, files.values(), laying, cache=ParseCache())
    parsed: dict[int, ModelState] = {}
    states = {}
    for rank, name in files.items():
        contents, where = found[name], f"{tree}/{name}"
        if contents.file not in parsed:
            parsed[contents.file] = model_state(contents.value, where)
        states[rank] = parsed[contents.file].in_file(numbers[name], where)
    return states


@dataclass(frozen=True, slots=True)
class Ranks:
    """What all ranks wrote.

    Attributes:
        models, optimizers: by data-parallel and model-parallel rank. A model-parallel rank is
            `stage * tensor_parallel + tensor-parallel rank`.
        layers: of pipelines, by tensor-parallel rank: weights by name.
        experts: weights by name, by model-parallel rank.
        sliced: ZeRO 3.
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

    @classmethod
    def read(cls, tree: Tree, files: Files, laying: Laying, *, universal: bool = False) -> Ranks:
        """Read all files, in parallel.

        Raises:
            FormatError: one is malformed, or missing.
        """

        def load(names: Iterable[str]) -> dict[str, Any]:
            return load_all(tree, names, laying)

        first = {rank: name for rank, name in files.model.items() if rank[0] == 0}
        values = load(first.values())
        models = {rank: model_state(values[n], f"{tree}/{n}") for rank, n in first.items()}
        others = {rank: name for rank, name in files.model.items() if rank[0]}
        models |= _model_states(tree, others, laying)
        check_counters(tree, models.values())
        if others:
            laying.left_out.append(
                f"buffers of {len(others)} more ranks: each has its own under ZeRO 3; those of the "
                "first are taken, as DeepSpeed's own converters do"
            )
        values = load(files.optimizer.values())
        optimizers = {
            r: optimizer_state(values[n], f"{tree}/{n}") for r, n in files.optimizer.items()
        }
        if not universal:  # there the optimizer's state is with no rank
            _check_ranks(tree, files, models[0, 0], optimizers)
        _check_modules(tree, files, [models[rank] for rank in first])
        values = load([*files.layers.values(), *files.experts.values()])
        layers: dict[int, dict[str, StoredArray]] = {}
        for (layer, rank), name in sorted(files.layers.items()):
            arrays = arrays_of(values[name], f"{tree}/{name}")
            layers.setdefault(rank, {}).update({f"{layer}.{k}": a for k, a in arrays.items()})
        experts: dict[int, dict[str, StoredArray]] = {}
        for (_, _, rank), name in sorted(files.experts.items()):
            experts.setdefault(rank, {}).update(arrays_of(values[name], f"{tree}/{name}"))
        for name in files.expert_optimizers.values():
            laying.left_out.append(f"the file {name}: its optimizer's parameters have no names")
        tensor_parallel, stages = _degrees(models[0, 0], files)
        for stage in range(stages) if optimizers else ():
            of_stage = range(stage * tensor_parallel, (stage + 1) * tensor_parallel)
            own = [state for (_, rank), state in sorted(optimizers.items()) if rank in of_stage]
            laying.left_out += check_optimizers(tree, own)
        return cls(
            str(tree),
            models,
            optimizers,
            layers,
            experts,
            files.data_parallel,
            tensor_parallel,
            stages,
            files.sliced,
        )

    @property
    def first(self) -> ModelState:
        """The model states of the first rank."""
        return self.models[0, 0]

    @property
    def step(self) -> int | None:
        """How many steps were trained."""
        steps = self.first.rest.get("global_steps")
        return steps if type(steps) is int else None

    @property
    def world_size(self) -> int:
        """How many ranks wrote it."""
        parallel = self.first.rest.get("dp_world_size")
        if type(parallel) is not int or not 0 < parallel < 2**20:
            parallel = self.data_parallel
        return parallel * self.tensor_parallel * self.stages

    def placing(self) -> Placing:
        """How tensor-parallel shards make up parameters, as the checkpoint says."""
        return placing_of(self.first.rest.get("universal_checkpoint_info"), self.where)

    def of_stage(self, stage: int) -> list[int]:
        """The model-parallel ranks of a pipeline stage."""
        start = stage * self.tensor_parallel
        return list(range(start, start + self.tensor_parallel))

    def of_data_parallel(self) -> list[list[ModelState]]:
        """Model states of all data-parallel ranks, of each tensor-parallel rank."""
        ranks = range(self.tensor_parallel)
        return [[s for (_, m), s in sorted(self.models.items()) if m == rank] for rank in ranks]

    def module(self, rank: int) -> Module:
        """What a tensor-parallel rank's module has, of all stages."""
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
        return Module(arrays, frozenset(buffers), frozen, shared)


def _check_ranks(
    tree: Tree,
    files: Files,
    model: ModelState,
    optimizers: Mapping[tuple[int, int], OptimizerState],
) -> None:
    """Whether as many ranks are there as their files say; all, also of those that are last.

    Where the place is one file, it is what was wanted.
    """
    said = model.rest.get("checkpoint_parallel_dimensions")
    degrees = [*said.values()] if isinstance(said, Mapping) else [model.rest.get("mp_world_size")]
    model_parallel = math.prod(n for n in degrees if type(n) is int and n > 0)
    counts = next((state.counts for _, state in sorted(optimizers.items())), ())
    ranks = max(counts, default=0) or model.rest.get("dp_world_size")
    check_ranks(
        tree,
        files,
        data_parallel=max(files.data_parallel, ranks if type(ranks) is int else 0),
        model_parallel=max(files.model_parallel, model_parallel),
        divided=bool(optimizers) or (bool(model.shapes) and tree.only is None),
    )


def _check_modules(tree: Tree, files: Files, models: Iterable[ModelState]) -> None:
    """Whether there is a file for each layer of a pipeline, and each expert, that has weights."""
    layers: set[int] = set()
    experts: list[int] = []
    for model in models:
        groups = (*model.shapes, model.frozen_shapes) if model.module is None else ()
        heads = {name.partition(".")[0] for group in groups for name in group}
        layers.update(int(head) for head in heads if re.fullmatch(r"[0-9]{1,7}", head))
        said = model.rest.get("num_experts")
        if model.rest.get("ds_autoep_layers"):  # under ZeRO 3 these have no files
            continue
        if isinstance(said, (list, tuple)) and all(type(n) is int and n >= 0 for n in said):
            experts = list(said)
    check_modules(tree, files, sorted(layers), experts)


def _degrees(first: ModelState, files: Files) -> tuple[int, int]:
    """How many tensor-parallel ranks and pipeline stages there are."""
    said = first.rest.get("checkpoint_parallel_dimensions")
    known = said if isinstance(said, Mapping) else {}
    tensor, stages = known.get("tp_degree"), known.get("pp_degree")
    layers = 1 + max((rank for _, rank in files.layers), default=0)
    if type(tensor) is not int:
        tensor = layers if files.layers else files.model_parallel
    if type(stages) is not int:
        stages = files.model_parallel // max(tensor, 1)
    if tensor < 1 or stages < 1 or tensor * stages != files.model_parallel:
        raise FormatError(
            f"{first.where}: {files.model_parallel} model-parallel ranks are not {tensor} "
            f"tensor-parallel ranks in {stages} stages"
        )
    return tensor, stages
