"""Reads a checkpoint that DeepSpeed's engine saved: ZeRO 0 to 3, pipelines, tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardwise.parts.formats.masters import describe_wrong_masters, find_wrong_masters
from shardwise.parts.formats.reader import (
    Builder,
    FileTree,
    FormatError,
    ParamGroup,
    Reader,
    StoredArray,
)
from shardwise.parts.formats.readers.deepspeed.all_ranks import AllRanks, read_ranks
from shardwise.parts.formats.readers.deepspeed.files import (
    FILES_WITHOUT_STATE,
    has_native_files,
)
from shardwise.parts.formats.readers.deepspeed.manifest import (
    add_flat_group,
    add_frozen_slices,
    add_param_groups,
    add_shards,
)
from shardwise.parts.formats.readers.deepspeed.states import (
    DEEPSPEED_KEYS,
    LOSS_SCALING_KEYS,
    ModelState,
)
from shardwise.parts.formats.readers.deepspeed.tensor_parallel import PlacementRule, place_whole
from shardwise.parts.formats.readers.deepspeed.without_zero import add_undivided_optimizer
from shardwise.parts.formats.readers.deepspeed.zero import (
    FlatGroup,
    add_empty_shards,
    find_flat_groups,
    runs_of_masters,
    shapes_of_slices,
)


def read(tree: FileTree, builder: Builder) -> None:
    """Read a checkpoint of DeepSpeed's engine; no tensor is read.

    Args:
        tree: the directory of a tag, or its parent.
        builder: receives the tensors and values.

    Raises:
        CheckpointNotFoundError: the tree is a single file of a checkpoint that has several.
        FormatError: the checkpoint is malformed or incomplete, or does not say how it is divided.
    """
    ranks = read_ranks(tree, builder)
    placement_rule = ranks.placement_rule()
    modules = ranks.modules()
    if ranks.optimizers:
        _add_zero_optimizer(builder, ranks, modules, placement_rule)
    else:
        _add_optimizer_without_zero(builder, ranks, modules, placement_rule)
    if ranks.files.zero_3:
        add_frozen_slices(builder, ranks.models_by_tensor_rank(), placement_rule)
    add_modules(builder, modules, placement_rule, zero_3=ranks.files.zero_3)
    add_values(builder, ranks)
    if tree.single_file is not None and ranks.first_model.shapes:
        builder.left_out.append(
            "optimizer.*, and weights in full precision: they are in files of other ranks: open "
            f"{tree.parent}"
        )
    # Trainers keep their files in the folder above the tag.
    in_parent = [name for name in tree.sizes if ranks.files.folder and "/" not in name]
    for name in (*ranks.files.unknown, *in_parent):
        if name not in FILES_WITHOUT_STATE:
            builder.left_out.append(f"the file {name}: DeepSpeed's engine does not write it")


def _add_zero_optimizer(
    builder: Builder, ranks: AllRanks, modules: Sequence[ModelState], placement_rule: PlacementRule
) -> None:
    """Add the weights and the optimizer state that ZeRO divided, of all pipeline stages.

    If the master weights contradict the modules, leave them and the state out.
    """
    config = _config_of(ranks)
    arrays = [module.arrays for module in modules]
    groups_of_stages = [_find_groups(ranks, stage, arrays, config) for stage in range(ranks.stages)]
    if not _has_stale_masters(config):
        wrong = find_wrong_masters(
            ranks.tree,
            (
                run
                for groups in groups_of_stages
                for shards in groups
                for group, own in zip(shards, arrays, strict=True)
                for run in runs_of_masters(group, own)
            ),
        )
        if wrong:
            builder.left_out.append(describe_wrong_masters(wrong))
            return
    param_groups: list[ParamGroup] = []
    for stage, groups in enumerate(groups_of_stages):
        first = ranks.optimizers[0, ranks.ranks_of_stage(stage)[0]]
        for shards in groups:
            add_flat_group(builder, shards, placement_rule)
            if first.hyperparameters is not None:
                hyperparameters = first.hyperparameters[shards[0].param_group]
                param_groups.append(ParamGroup(shards[0].names, hyperparameters))
        if first.hyperparameters is None and stage == 0:
            builder.left_out.append(
                "optimizer.param_groups: an elastic checkpoint does not store them"
            )
    add_param_groups(builder, param_groups)


def _config_of(ranks: AllRanks) -> Mapping[str, Any]:
    config = ranks.first_model.values.get("ds_config")
    return config if isinstance(config, Mapping) else {}


def _zero_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    zero = config.get("zero_optimization")
    return zero if isinstance(zero, Mapping) else {}


def _has_stale_masters(config: Mapping[str, Any]) -> bool:
    """Return whether master weights are older than the weights, as ZenFlow has them.

    It steps the most important weights themselves, and their masters only now and then.
    """
    return bool(_zero_config(config).get("zenflow"))


def _find_groups(
    ranks: AllRanks,
    stage: int,
    arrays: Sequence[Mapping[str, StoredArray]],
    config: Mapping[str, Any],
) -> list[list[FlatGroup]]:
    """Return the flat groups of a pipeline stage, each on all tensor-parallel ranks.

    Args:
        arrays: the module of each tensor-parallel rank.
    """
    shards = []
    for rank, own in zip(ranks.ranks_of_stage(stage), arrays, strict=True):
        states = [ranks.optimizers[d, rank] for d in range(ranks.files.data_parallel)]
        if _zero_config(config).get("round_robin_gradients"):
            # DeepSpeed 0.19.8 then writes the slices in another order, by mistake.
            states = [replace(state, slices=None) for state in states]
        shapes = ranks.models[0, rank].shapes
        if not shapes and all(state.slices for state in states):
            shapes = shapes_of_slices(states, own)
        data_before_experts = bool(config.get("use_data_before_expert_parallelism"))
        shards.append(
            list(find_flat_groups(shapes, states, data_before_experts=data_before_experts))
        )
    return [add_empty_shards(same_groups, arrays) for same_groups in zip(*shards, strict=True)]


def _add_optimizer_without_zero(
    builder: Builder, ranks: AllRanks, modules: Sequence[ModelState], placement_rule: PlacementRule
) -> None:
    states = [ranks.models[0, rank] for rank in ranks.ranks_of_stage(0)]
    if any(state.optimizer is None for state in states):
        return
    if ranks.stages > 1:
        builder.left_out.append(
            "optimizer.*: the files of the pipeline's stages do not name its parameters"
        )
        return
    ties = modules[0].find_ties()
    shapes = {
        name: array.shape
        for name, array in modules[0].arrays.items()
        if name not in modules[0].buffers and name not in ties
    }
    arrays = [module.arrays for module in modules]
    add_undivided_optimizer(builder, states, arrays, shapes, placement_rule)


def add_modules(
    builder: Builder, modules: Sequence[ModelState], placement_rule: PlacementRule, *, zero_3: bool
) -> None:
    """Add the modules of all tensor-parallel ranks. The trained weights must be added before.

    If a weight was trained in another dtype than the module's, `model.<name>` is the trained
    weight, and `module.<name>` the module's copy. All other tensors are below `model`. If any
    weight has a copy below `module`, all other tensors also get a name below `module`, so that
    `module` is complete.

    Args:
        zero_3: whether ZeRO 3 divided the parameters, so that the modules have only buffers.

    Raises:
        FormatError: the ranks differ.
    """
    first = modules[0]
    for rank, module in enumerate(modules):
        if list(module.arrays) != list(first.arrays):
            names = [*({*module.arrays} ^ {*first.arrays}), "their order"]
            raise FormatError(
                f"the modules of tensor-parallel ranks 0 and {rank} have different names "
                f"({names[0][:200]}): their files are from different saves: copy all files of one "
                "save"
            )
    ties = first.find_ties()
    has_lower_precision = False
    for name, array in first.arrays.items():
        if name in ties or (zero_3 and name not in first.buffers):
            continue
        arrays = [module.arrays[name] for module in modules]
        rule = place_whole if name in first.buffers else placement_rule
        placement = rule(name, [array.shape for array in arrays])
        tensor = f"model.{name}"
        if tensor in builder and builder.entry(tensor).dtype != array.dtype:
            tensor, has_lower_precision = f"module.{name}", True
        elif tensor not in builder and _may_be_tied(builder, name, placement.shape):
            tensor = f"module.{name}"
            builder.left_out.append(
                f"model.{name}: it may be one of tied_modules, under whose name it was trained; "
                f"its weights are {tensor}"
            )
        add_shards(builder, tensor, arrays, placement)
        copies = [module.frozen[name] for module in modules if name in module.frozen]
        if len(copies) == len(modules) and copies != arrays:
            add_shards(builder, tensor, copies, placement)
    for alias, owner in ties.items():
        owner = ties.get(owner, owner)
        for prefix in ("model", "module"):
            if f"{prefix}.{owner}" in builder and f"{prefix}.{alias}" not in builder:
                builder.add_tie(f"{prefix}.{alias}", f"{prefix}.{owner}")
    for name in (*first.arrays, *ties) if has_lower_precision else ():
        if f"module.{name}" not in builder and f"model.{name}" in builder:
            builder.add_tie(f"module.{name}", f"model.{name}")


def _may_be_tied(builder: Builder, name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a pipeline layer may be trained under the name of the layer it is tied to.

    DeepSpeed does not store which layers are tied.
    """
    layer, _, key = name.partition(".")
    return layer.isdigit() and any(
        tied.startswith("model.tied_modules.")
        and tied.endswith(f".{key}")
        and builder.entry(tied).shape == shape
        for tied in builder.tensor_names()
    )


def add_values(builder: Builder, ranks: AllRanks) -> None:
    """Add the first rank's plain values. `left_out` names the values that differ elsewhere."""
    scheduler = ranks.first_model.values.get("lr_scheduler")
    if scheduler is not None:
        builder.add_value("scheduler", scheduler)
    models = [state.values for _, state in sorted(ranks.models.items())]
    optimizers = [state.values for _, state in sorted(ranks.optimizers.items())]
    for values_of_ranks in (models, optimizers):
        builder.add_values(
            [
                {
                    _name_of_value(key): value
                    for key, value in values.items()
                    if value is not None and key != "lr_scheduler"
                }
                for values in values_of_ranks
            ]
        )


def _name_of_value(key: str) -> str:
    is_of_engine = key in (*DEEPSPEED_KEYS, *LOSS_SCALING_KEYS)
    return f"{'deepspeed' if is_of_engine else 'client_state'}.{key}"


READER = Reader(
    "DeepSpeed",
    has_native_files,
    read,
    # DeepSpeed's converter and trainers write other formats into the same directory.
    overrides=("deepspeed-universal", "torch", "torch-ranks", "accelerate", "hf"),
)
