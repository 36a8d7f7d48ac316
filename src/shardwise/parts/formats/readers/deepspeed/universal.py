"""Reads a universal checkpoint: one file for each parameter and each key of its state."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from shardwise.parts.formats.masters import (
    Run,
    describe_wrong_masters,
    find_common_run,
    find_wrong_masters,
)
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
    HYPERPARAMETERS_FILE,
    WEIGHTS_KEY,
    has_universal_files,
)
from shardwise.parts.formats.readers.deepspeed.manifest import (
    add_frozen_slices,
    add_param_groups,
    add_scalars,
    add_state,
)
from shardwise.parts.formats.readers.deepspeed.reader import add_modules, add_values
from shardwise.parts.formats.readers.deepspeed.states import (
    CLASSES,
    STEP,
    ModelState,
    Number,
    Shape,
    parse_torch_optimizer,
    select_loss_scaling_values,
)
from shardwise.parts.formats.readers.deepspeed.tensor_parallel import PlacementRule, place_whole
from shardwise.parts.formats.readers.deepspeed.zero import MASTER

_PARAMETER_FILE = re.compile(r"zero/(.+)/([^/]+)\.pt")
KEYS_OF_PARAMETER_SHAPE = (WEIGHTS_KEY, "exp_avg", "exp_avg_sq", "momentum_buffer")
"""Keys whose tensors always have the shape of the parameter."""

ParameterFiles: TypeAlias = Mapping[tuple[str, str], str]
"""The file of each parameter and key of its state."""
State: TypeAlias = tuple[str, str, "StoredArray | Number"]
"""A parameter; `MASTER` for its weight, or the key of a state; and the value."""


def read(tree: FileTree, builder: Builder) -> None:
    """Read a universal checkpoint; no tensor is read.

    Weights and optimizer state come from the files of the parameters. Frozen parameters and
    buffers, which DeepSpeed does not restore from a universal checkpoint, come from the model
    states in the same folder.

    Args:
        tree: the universal directory, or its parent.
        builder: receives the tensors and values.

    Raises:
        FormatError: the checkpoint is malformed or incomplete.
    """
    ranks = read_ranks(tree, builder, universal=True)
    folder = ranks.files.folder
    names = [name.removeprefix(folder) for name in tree.sizes if name.startswith(folder)]
    parameter_files = {
        (match[1], match[2]): f"{folder}{match[0]}"
        for match in map(_PARAMETER_FILE.fullmatch, names)
        if match is not None
    }
    settings_file = f"{folder}zero/{HYPERPARAMETERS_FILE}"
    values = tree.load_each([*parameter_files.values(), settings_file], classes=CLASSES)
    settings = values[settings_file]
    trained = _trained_shapes(ranks)
    placement_rule = ranks.placement_rule()
    _require_parameter_files(tree, f"{folder}zero", parameter_files, ranks, settings)
    states = _take_states(tree, parameter_files, values, trained, placement_rule)
    runs = _runs_of_masters(states, ranks.modules(), placement_rule)
    if wrong := find_wrong_masters(tree, runs):
        builder.left_out.append(describe_wrong_masters(wrong))
    else:
        for name, key, value in states:
            add_state(builder, name, key, [value], place_whole)
        _add_param_groups(builder, ranks, settings, tree.label(settings_file))
    _add_loss_scaling(builder, settings)
    if ranks.files.zero_3:
        add_frozen_slices(builder, ranks.models_by_tensor_rank(), placement_rule)
    add_modules(builder, ranks.modules(), placement_rule, zero_3=ranks.files.zero_3)
    _add_untrained_weights(builder, parameter_files, values, trained)
    add_values(builder, ranks)


def _trained_shapes(ranks: AllRanks) -> dict[str, tuple[Shape, ...]]:
    """Return the shapes of all trained parameters on the tensor-parallel ranks."""
    trained: dict[str, tuple[Shape, ...]] = {}
    for stage in range(ranks.stages):
        models = [ranks.models[0, rank] for rank in ranks.ranks_of_stage(stage)]
        by_rank = [{n: s for group in model.shapes for n, s in group.items()} for model in models]
        for name in by_rank[0]:
            trained[name] = tuple(shapes[name] for shapes in by_rank if name in shapes)
    return trained


def _require_parameter_files(
    tree: FileTree, folder: str, files: ParameterFiles, ranks: AllRanks, settings: object
) -> None:
    """Require the weights of each parameter, and the same state files within each param group.

    Raises:
        FormatError: files are missing; the message names them.
    """
    param_groups = settings.get("param_groups") if isinstance(settings, Mapping) else None
    saved_groups = param_groups if isinstance(param_groups, (list, tuple)) else ()
    hyperparameters = [group for group in saved_groups if isinstance(group, Mapping)]
    keys_by_name: dict[str, set[str]] = {}
    for name, key in files:
        keys_by_name.setdefault(name, set()).add(key)
    for stage in range(ranks.stages):
        for index, group in enumerate(ranks.models[0, ranks.ranks_of_stage(stage)[0]].shapes):
            group_hyperparameters = hyperparameters[index] if index < len(hyperparameters) else {}
            required = {WEIGHTS_KEY}.union(*(keys_by_name.get(name, set()) for name in group))
            if "betas" in group_hyperparameters and (
                "amsgrad" in group_hyperparameters or "bias_correction" in group_hyperparameters
            ):
                required |= {"exp_avg", "exp_avg_sq"}  # Adam, of torch or of DeepSpeed
            elif "betas" in group_hyperparameters and required <= {WEIGHTS_KEY, STEP}:
                required |= {"exp_avg"}
            paths = (f"{folder}/{name}/{key}.pt" for name in group for key in sorted(required))
            tree.require(paths, "hold parameters and their states")


def _take_states(
    tree: FileTree,
    files: ParameterFiles,
    values: Mapping[str, Any],
    trained: Mapping[str, Sequence[Shape]],
    placement_rule: PlacementRule,
) -> list[State]:
    """Return the weights and states of trained parameters, in their shapes."""
    shapes: dict[str, Shape] = {}
    states: list[State] = []
    for (name, key), file in files.items():
        if name not in trained:
            continue
        path = tree.label(file)
        array = _unwrap_parameter(values[file])
        if not isinstance(array, (int, float, StoredArray)):
            raise FormatError(
                f"{path}: expected a tensor or a number, found {type(array).__name__}: copy the "
                "file again from an intact source, or convert the checkpoint again with "
                "ds_to_universal"
            )
        if isinstance(array, StoredArray):
            array = _unflatten(array, trained[name], path)
            if name not in shapes:
                shapes[name] = placement_rule(name, trained[name]).shape
            if array.shape != shapes[name] and (array.shape or key in KEYS_OF_PARAMETER_SHAPE):
                raise FormatError(
                    f"{path}: its shape is {list(array.shape)}, but its parameter has shape "
                    f"{list(shapes[name])}: the file is of another model, or damaged: copy all "
                    "files of one save"
                )
        states.append((name, MASTER if key == WEIGHTS_KEY else key, array))
    return states


def _runs_of_masters(
    states: Iterable[State], modules: Sequence[ModelState], placement_rule: PlacementRule
) -> Iterator[tuple[str, Run]]:
    """Yield runs of the weights that the modules of tensor-parallel ranks have as well."""
    for name, key, master in states:
        shards = [module.arrays[name] for module in modules if name in module.arrays]
        if key != MASTER or not isinstance(master, StoredArray) or len(shards) < len(modules):
            continue
        placement = placement_rule(name, [shard.shape for shard in shards])
        if placement.averaged or placement.shape != master.shape:
            continue
        for shard, boxes in zip(shards, placement.parts, strict=True):
            for box, offset in boxes:
                pair = master.part(offset, box.shape), shard.part(box.offset, box.shape)
                origin = (0,) * len(offset)
                if run := find_common_run(origin, pair[0], origin, pair[1]):
                    yield name, run


def _unwrap_parameter(value: Any) -> Any:
    return value.get("param") if isinstance(value, Mapping) else value


def _unflatten(array: StoredArray, shapes: Sequence[Shape], path: str) -> StoredArray:
    """Return an array in the shape of its parameter; ZeRO 3's arrays are stored flat."""
    if len(shapes) != 1 or len(array.shape) != 1:
        return array
    (shape,) = shapes
    if math.prod(shape) != array.shape[0] or array.stride != (1,):
        raise FormatError(
            f"{path}: {array.shape[0]} elements do not make up shape {list(shape)}: the file is "
            "of another model, or damaged: copy all files of one save"
        )
    return StoredArray.contiguous(array.file, array.start, array.dtype, shape)


def _add_param_groups(builder: Builder, ranks: AllRanks, settings: object, path: str) -> None:
    """Add hyperparameters, and the steps of parameters without a step file."""
    values = settings if isinstance(settings, Mapping) else {}
    saved_groups = values.get("param_groups")
    if not isinstance(saved_groups, (list, tuple)):
        raise FormatError(
            f"{path}: not a file of hyperparameters: it has no list param_groups; copy the file "
            "again from an intact source"
        )
    state = values.get("optimizer_state_dict", {"state": {}, "param_groups": list(saved_groups)})
    optimizer = parse_torch_optimizer(state, path)
    param_groups: list[ParamGroup] = []
    for stage in range(ranks.stages):
        shapes = ranks.models[0, ranks.ranks_of_stage(stage)[0]].shapes
        if len(optimizer.states) != len(shapes):
            raise FormatError(
                f"{path}: it has state of {len(optimizer.states)} groups, but the model has "
                f"{len(shapes)}: the file is of another model: copy all files of one save"
            )
        rows = zip(shapes, optimizer.states, optimizer.param_group_of, strict=True)
        for group, group_state, index in rows:
            step = group_state.get(STEP)
            if step is not None and not (isinstance(step, StoredArray) and step.shape):
                add_scalars(builder, list(group), STEP, [step])
            param_groups.append(ParamGroup(tuple(group), (optimizer.hyperparameters or ())[index]))
    add_param_groups(builder, param_groups)


def _add_loss_scaling(builder: Builder, settings: object) -> None:
    values = settings if isinstance(settings, Mapping) else {}
    for key, item in select_loss_scaling_values(values).items():
        if item is not None:
            builder.add_value(f"deepspeed.{key}", item)
    if "fp32_flat_groups" in values:
        builder.left_out.append(
            f"zero/{HYPERPARAMETERS_FILE}: the first rank's flat state, which the parameters' "
            "files have too"
        )


def _add_untrained_weights(
    builder: Builder,
    files: ParameterFiles,
    values: Mapping[str, Any],
    trained: Mapping[str, Sequence[Shape]],
) -> None:
    """Add weights that only files of parameters have: for example, a pipeline's frozen weights."""
    copies = 0
    for (name, key), file in files.items():
        if name in trained or key != WEIGHTS_KEY:
            continue
        array = _unwrap_parameter(values[file])
        if f"model.{name}" in builder:
            copies += 1
        elif isinstance(array, StoredArray):
            builder.add_array(f"model.{name}", array)
    if copies:
        builder.left_out.append(
            f"zero/*/{WEIGHTS_KEY}.pt of {copies} buffers, frozen and tied parameters: copies in "
            "float32 of tensors in the model states"
        )


READER = Reader("DeepSpeed universal", has_universal_files, read)
