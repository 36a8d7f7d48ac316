"""Reads a checkpoint as DeepSpeed's engine saves it: ZeRO 0 to 3, pipelines, tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardwise.formats.foreign import Foreign
from shardwise.formats.readers.deepspeed.files import NOT_STATE, find_files, has_native_files
from shardwise.formats.readers.deepspeed.groups import groups_of
from shardwise.formats.readers.deepspeed.laying import Laying
from shardwise.formats.readers.deepspeed.modules import Module, lay_frozen_slices, lay_modules
from shardwise.formats.readers.deepspeed.optimizers import Settings, lay_group
from shardwise.formats.readers.deepspeed.placements import Placing, whole
from shardwise.formats.readers.deepspeed.ranks import Ranks
from shardwise.formats.readers.deepspeed.values import lay_values
from shardwise.formats.readers.deepspeed.without_zero import lay_optimizer
from shardwise.formats.tree import Tree

FORMAT = "DeepSpeed"


def recognise(tree: Tree) -> bool:
    """Whether a place looks like a checkpoint of DeepSpeed's engine, or a directory of such."""
    return has_native_files(tree)


def read(
    tree: Tree,
    tag: str | None = None,
    *,
    placing: Placing | None = None,
    members: Sequence[Sequence[str]] | None = None,
) -> Foreign:
    """Read a native checkpoint; no tensor is read.

    Args:
        tree: the directory of a tag, or the one above it.
        tag: which one; by default what `latest` names.
        placing: how tensor-parallel shards make up parameters, where the checkpoint does not say.
        members: without ZeRO, the names of the parameters in each group of the optimizer: these are
            not stored, and told by their shapes only where one way alone is possible.

    Raises:
        FormatError: it is malformed or incomplete, or does not say how it is divided.
    """
    files = find_files(tree, tag)
    laying = Laying(tree.file(name) for name in tree.sizes)
    ranks = Ranks.read(tree, files, laying)
    place = placing or (ranks.placing() if ranks.tensor_parallel > 1 else whole)
    if ranks.optimizers:
        _lay_zero(laying, ranks, place)
    modules = [ranks.module(rank) for rank in range(ranks.tensor_parallel)]
    if not ranks.optimizers:
        _lay_without_zero(laying, ranks, modules, members, place)
    if ranks.sliced:
        lay_frozen_slices(laying, ranks.of_data_parallel(), place)
    lay_modules(laying, modules, place, sliced=ranks.sliced)
    lay_values(laying, ranks)
    if tree.only is not None and ranks.first.shapes:
        laying.left_out.append(
            f"optimizer.*, and weights in full precision: in files of ranks beside this one: open "
            f"{tree.path.parent}"
        )
    # Above the tag, trainers have files of their own.
    above = [name for name in tree.sizes if files.folder and "/" not in name]
    for name in (*files.others, *above):
        if name not in NOT_STATE:
            laying.left_out.append(f"the file {name}: not one of DeepSpeed's engine")
    return laying.finish(FORMAT, step=ranks.step, world_size=ranks.world_size)


def _lay_zero(laying: Laying, ranks: Ranks, place: Placing) -> None:
    settings = Settings(laying)
    config = ranks.first.rest.get("ds_config")
    before = isinstance(config, Mapping) and bool(config.get("use_data_before_expert_parallelism"))
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    for stage in range(ranks.stages):
        shards = []
        for rank in ranks.of_stage(stage):
            states = [ranks.optimizers[d, rank] for d in range(ranks.data_parallel)]
            if isinstance(zero, Mapping) and zero.get("round_robin_gradients"):
                # DeepSpeed writes those of another order then, by mistake (0.19.8).
                states = [replace(state, slices=None) for state in states]
            shapes = ranks.models[0, rank].shapes
            shards.append(list(groups_of(shapes, states, data_before_experts=before)))
        known = ranks.optimizers[0, ranks.of_stage(stage)[0]]
        for of_group in zip(*shards, strict=True):
            lay_group(laying, of_group, place)
            if known.settings is not None:
                settings.add(of_group[0].names, known.settings[of_group[0].settings])
        if known.settings is None and stage == 0:
            laying.left_out.append(
                "optimizer.param_groups: an elastic checkpoint does not have them"
            )
    settings.lay()


def _lay_without_zero(
    laying: Laying,
    ranks: Ranks,
    modules: Sequence[Module],
    members: Sequence[Sequence[str]] | None,
    place: Placing,
) -> None:
    states = [ranks.models[0, rank] for rank in ranks.of_stage(0)]
    if states[0].optimizer is None:
        return
    if ranks.stages > 1:
        laying.left_out.append("optimizer.*: its parameters have no names in the stages' files")
        return
    first = modules[0]
    tied = first.tied()
    shapes = {
        name: array.shape
        for name, array in first.arrays.items()
        if name not in first.buffers and name not in tied
    }
    lay_optimizer(laying, states, shapes, members, place)
