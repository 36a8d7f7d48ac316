"""Reads a checkpoint that DeepSpeed's engine saved: ZeRO 0 to 3, pipelines, tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardwise.errors import FormatError
from shardwise.formats.build import Builder, same_plain
from shardwise.formats.foreign import Foreign
from shardwise.formats.readers.deepspeed.files import NOT_STATE, find_files, has_native_files
from shardwise.formats.readers.deepspeed.groups import groups_of
from shardwise.formats.readers.deepspeed.optimizers import Settings, add_undivided, add_zero_group
from shardwise.formats.readers.deepspeed.ranks import Module, Ranks, read_ranks
from shardwise.formats.readers.deepspeed.states import OF_DEEPSPEED
from shardwise.formats.readers.deepspeed.tensor_parallel import Place, add_shards, whole
from shardwise.formats.readers.deepspeed.zero import add_frozen_slices
from shardwise.formats.tree import Tree

FORMAT = "DeepSpeed"


def recognise(tree: Tree) -> bool:
    """Return whether a place looks like a checkpoint of DeepSpeed's engine, or a folder of them."""
    return has_native_files(tree)


def read(
    tree: Tree,
    tag: str | None = None,
    *,
    place: Place | None = None,
    members: Sequence[Sequence[str]] | None = None,
) -> Foreign:
    """Read a checkpoint of DeepSpeed's engine; no tensor is read.

    Args:
        tree: the directory of a tag, or its parent.
        tag: the tag; by default the one that `latest` names.
        place: how tensor-parallel shards make up parameters; by default the checkpoint says it.
        members: without ZeRO, the names of the parameters in each group of the optimizer. The
            checkpoint does not store them; by default they are inferred from the shapes, where
            these allow only one assignment.

    Raises:
        FormatError: the checkpoint is malformed or incomplete, or does not say how it is divided.
    """
    files = find_files(tree, tag)
    ranks = read_ranks(tree, files)
    builder = Builder(tree.file(name) for name in tree.sizes)
    builder.left_out += ranks.left_out
    place = place or (ranks.place() if ranks.tensor_parallel > 1 else whole)
    modules = ranks.modules()
    if ranks.optimizers:
        _add_zero(builder, ranks, place)
    else:
        _add_without_zero(builder, ranks, modules[0], members, place)
    if ranks.sliced:
        add_frozen_slices(builder, ranks.by_data_parallel(), place)
    add_modules(builder, modules, place, sliced=ranks.sliced)
    add_values(builder, ranks)
    if tree.only is not None and ranks.first.shapes:
        builder.left_out.append(
            "optimizer.*, and weights in full precision: they lie in other ranks' files: open "
            f"{tree.path.parent}"
        )
    # Trainers keep files of their own in the folder above the tag.
    above = [name for name in tree.sizes if files.folder and "/" not in name]
    for name in (*files.others, *above):
        if name not in NOT_STATE:
            builder.left_out.append(f"the file {name}: DeepSpeed's engine does not write it")
    return builder.build(FORMAT, step=ranks.step, world_size=ranks.world_size)


def _add_zero(builder: Builder, ranks: Ranks, place: Place) -> None:
    """Add the weights and the optimizer state that ZeRO divided, of all pipeline stages."""
    settings = Settings(builder)
    config = ranks.first.rest.get("ds_config")
    before = isinstance(config, Mapping) and bool(config.get("use_data_before_expert_parallelism"))
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    for stage in range(ranks.stages):
        shards = []
        for rank in ranks.of_stage(stage):
            states = [ranks.optimizers[d, rank] for d in range(ranks.data_parallel)]
            if isinstance(zero, Mapping) and zero.get("round_robin_gradients"):
                # DeepSpeed 0.19.8 then writes the slices in another order, by mistake.
                states = [replace(state, slices=None) for state in states]
            shapes = ranks.models[0, rank].shapes
            shards.append(list(groups_of(shapes, states, data_before_experts=before)))
        known = ranks.optimizers[0, ranks.of_stage(stage)[0]]
        for groups in zip(*shards, strict=True):
            add_zero_group(builder, groups, place)
            if known.settings is not None:
                settings.add(groups[0].names, known.settings[groups[0].settings])
        if known.settings is None and stage == 0:
            builder.left_out.append(
                "optimizer.param_groups: an elastic checkpoint does not store them"
            )
    settings.finish()


def _add_without_zero(
    builder: Builder,
    ranks: Ranks,
    module: Module,
    members: Sequence[Sequence[str]] | None,
    place: Place,
) -> None:
    states = [ranks.models[0, rank] for rank in ranks.of_stage(0)]
    if states[0].optimizer is None:
        return
    if ranks.stages > 1:
        builder.left_out.append(
            "optimizer.*: the files of the pipeline's stages do not name its parameters"
        )
        return
    tied = module.tied()
    shapes = {
        name: array.shape
        for name, array in module.arrays.items()
        if name not in module.buffers and name not in tied
    }
    add_undivided(builder, states, shapes, members, place)


def add_modules(builder: Builder, modules: Sequence[Module], place: Place, *, sliced: bool) -> None:
    """Add the modules of all tensor-parallel ranks, after what was trained.

    Weights that were trained in another dtype get names under `module`, everything else under
    `model`. If there are any of the first, `module` has all names.

    Args:
        sliced: ZeRO 3 divided the parameters, so that the modules have only buffers.

    Raises:
        FormatError: the ranks differ.
    """
    first = modules[0]
    if any(list(other.arrays) != list(first.arrays) for other in modules):
        raise FormatError("the modules of tensor-parallel ranks have different names")
    ties = first.tied()
    lower = False
    for name, array in first.arrays.items():
        if name in ties or (sliced and name not in first.buffers):
            continue
        arrays = [module.arrays[name] for module in modules]
        shapes = [each.shape for each in arrays]
        placement = (whole if name in first.buffers else place)(name, shapes)
        full = f"model.{name}"
        if full in builder and builder.entry(full).dtype != array.dtype:
            full, lower = f"module.{name}", True
        elif full not in builder and _may_be_tied(builder, name, placement.shape):
            full = f"module.{name}"
            builder.left_out.append(
                f"model.{name}: it may be one of tied_modules, under whose name it was trained; "
                f"its weights are {full}"
            )
        add_shards(builder, full, arrays, placement)
        again = [module.frozen.get(name) for module in modules]
        if all(each is not None for each in again) and again != arrays:
            add_shards(builder, full, [each for each in again if each is not None], placement)
    for alias, owner in ties.items():
        owner = ties.get(owner, owner)
        for top in ("model", "module"):
            if f"{top}.{owner}" in builder and f"{top}.{alias}" not in builder:
                builder.tie(f"{top}.{alias}", f"{top}.{owner}")
    for name in (*first.arrays, *ties) if lower else ():
        if f"module.{name}" not in builder and f"model.{name}" in builder:
            builder.tie(f"module.{name}", f"model.{name}")


def _may_be_tied(builder: Builder, name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a pipeline layer may be trained under the name of the layer it is tied to.

    DeepSpeed does not store which layers are tied.
    """
    layer, _, key = name.partition(".")
    return layer.isdigit() and any(
        tied.startswith("model.tied_modules.")
        and tied.endswith(f".{key}")
        and builder.entry(tied).shape == shape
        for tied in builder.names()
    )


def add_values(builder: Builder, ranks: Ranks) -> None:
    """Add the first rank's plain values, and lines about other ranks' that differ."""
    rest = dict(ranks.first.rest)
    scheduler = rest.pop("lr_scheduler", None)
    if scheduler is not None:
        builder.add_value("scheduler", scheduler)
    own = ranks.optimizers[0, 0].rest if ranks.optimizers else {}
    of_models = [state.rest for state in ranks.models.values()]
    of_optimizers = [state.rest for state in ranks.optimizers.values()]
    tops = {key: "deepspeed" if key in OF_DEEPSPEED else "client_state" for key in rest}
    held = [(f"{tops[key]}.{key}", key, rest[key], of_models) for key in rest]
    held += [(f"deepspeed.{key}", key, value, of_optimizers) for key, value in own.items()]
    for name, _, value, _ in held:
        if value is not None:
            builder.add_value(name, value)
    for name, key, value, everyone in held:
        others = sum(not same_plain(each.get(key), value) for each in everyone)
        if others:
            builder.left_out.append(
                f"{name}: {others} ranks have other values; the first rank's is taken"
            )
