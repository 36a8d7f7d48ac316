"""Megatron-Core's `torch_dist`: DCP, and a file or item with the state that all ranks share.

Megatron-Core stacks layers in one tensor; the reader gives each layer its own name again. The
optimizer's state is named after the parameter. Older versions flattened the state; the reader
undoes the flattening.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
    Placed,
    Reader,
    StoredArray,
    StoredTensor,
)
from shardwise.parts.formats.readers.dcp.metadata import METADATA
from shardwise.parts.formats.readers.dcp.reader import read_contents

CONFIG_FILE, COMMON_FILE = "metadata.json", "common.pt"
COMMON_ITEM = "common_state/shard_0_1"
"""The item that replaces `common.pt` since Megatron-Core 0.19."""
STACKED_LAYERS = re.compile(r"((?:.*\.)?layers)\.(?!\d+(?:\.|$))(.+)")
"""Names of tensors that stack all layers."""
_ORIGINAL_SHAPE = "nd_reformulated_orig_global_shape"
_LARGEST_CONFIG = 2**20
GROUPS = "param_groups"
_OPTIMIZER_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)")
_OPTIMIZER_PREFIX = re.compile(r"(?:chained_\d+\.)?optimizer\.")
_MASTER_KEYS = ("fp32_param", "param")
"""Keys of master weights: of the mixed-precision optimizer, and of the distributed one."""
_MOST_BOXES = 64
_SHARDED_OBJECT = re.compile(r"(.+)/shard_([\d.]+)_([\d.]+)")


def recognise(tree: FileTree) -> bool:
    """Return whether a tree is a DCP checkpoint with Megatron-Core's additional file or item."""
    if METADATA not in tree.sizes:
        return False
    if COMMON_FILE in tree.sizes or _config_names_backend(tree):
        return True
    return CONFIG_FILE not in tree.sizes and COMMON_ITEM.encode() in tree.read(METADATA)


def _config_names_backend(tree: FileTree) -> bool:
    return tree.sizes.get(CONFIG_FILE, _LARGEST_CONFIG + 1) <= _LARGEST_CONFIG and (
        b'"sharded_backend"' in tree.read(CONFIG_FILE, limit=_LARGEST_CONFIG)
    )


def read(tree: FileTree, builder: Builder) -> None:
    """Read a checkpoint of `megatron.core.dist_checkpointing` with the backend `torch_dist`.

    Tensors of the model are `model.<name>`. If the optimizer has master weights, these are
    `model.<name>`, and the model's own are `module.<name>`. States of the optimizer are
    `optimizer.<name>.<key>`. Buckets of `dp_reshardable` optimizers keep their names, because the
    files do not say which parameters they contain.

    Raises:
        FormatError: it is malformed, lacks a file, or has another backend.
    """
    tree.require([CONFIG_FILE], "Megatron-Core wrote")
    _check_backend(tree)
    contents, metadata = read_contents(tree, builder)
    if COMMON_ITEM not in contents:
        tree.require([COMMON_FILE], "Megatron-Core wrote")
    common = _read_common(tree, builder, contents)
    values = {name: leaf for name, leaf in contents.items() if not isinstance(leaf, StoredTensor)}
    tensors = {name: leaf for name, leaf in contents.items() if isinstance(leaf, StoredTensor)}
    recorded = metadata.extra_fields.get("mcore_data") or {}
    tensors = unflatten_optimizer(tensors, recorded, str(tree))
    tensors = unstack_layers(tensors, str(tree))
    if wrong := find_wrong_masters(tree, _runs_of_masters(tensors)):
        tensors = {name: t for name, t in tensors.items() if not _OPTIMIZER_STATE.fullmatch(name)}
        builder.left_out.append(
            describe_wrong_masters(
                wrong,
                "Megatron-Core 0.16 saves those of other parameters as fully_reshardable if it "
                "pads its buckets",
                "save again without padding, or as dp_reshardable",
            )
        )
    parameters = _add_tensors(builder, tensors)
    _add_sharded_objects(builder, {k: value for k, value in values.items() if k != COMMON_ITEM})
    for key, value in common.items():
        builder.add_value(f"common.{key}", value)
    _add_param_groups(builder, common, parameters)
    builder.step = common.get("iteration")


READER = Reader("Megatron-Core torch_dist", recognise, read, overrides=("dcp",))


def _check_backend(tree: FileTree) -> None:
    config = tree.read_json(CONFIG_FILE, dict[str, Any], "a JSON object")
    backend = config.get("sharded_backend")
    if backend != "torch_dist":
        raise FormatError(
            f"{tree.label(CONFIG_FILE)}: sharded_backend is {str(backend)[:40]!r}, but only "
            "'torch_dist' is supported: load the checkpoint with Megatron-Core, and save it with "
            "--ckpt-format torch_dist"
        )


def unflatten_optimizer(
    tensors: Mapping[str, StoredTensor], mcore_data: object, path: str
) -> dict[str, StoredTensor]:
    """Undo the flattening of shards: ranges of flat shards become boxes.

    Args:
        mcore_data: what Megatron-Core recorded of each tensor, under this key of the metadata.
        path: the path of the checkpoint, for messages.

    Raises:
        FormatError: the ranges do not make up the tensor that was flattened.
    """
    unflattened = dict(tensors)
    for name, fields in mcore_data.items() if isinstance(mcore_data, dict) else ():
        shape = fields.get(_ORIGINAL_SHAPE) if isinstance(fields, dict) else None
        if name not in tensors or not isinstance(shape, (tuple, list)):
            continue
        try:
            unflattened[name] = _unflatten(tensors[name], tuple(shape))
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise FormatError(
                f"{path}: {name} was flattened, and its pieces do not make up the shape "
                f"{list(shape)}: {error}: copy {METADATA} and all other files from one save"
            ) from error
    return unflattened


def _unflatten(tensor: StoredTensor, shape: tuple[int, ...]) -> StoredTensor:
    """Return the tensor of a shape, for example `[X, Y]`.

    It is stored as `[X/x, Y/y, x*y]`: a grid of shards of shape `[x, y]`, each flattened.
    """
    shard_counts = tensor.shape[:-1]
    if len(shard_counts) != len(shape) or any(
        n % count for n, count in zip(shape, shard_counts, strict=True)
    ):
        raise ValueError(f"{list(shard_counts)} shards do not divide the shape {list(shape)}")
    shard_shape = tuple(n // count for n, count in zip(shape, shard_counts, strict=True))
    boxes: list[Placed] = []
    for (*coordinate, first_element), array in tensor.boxes:
        *ones, size = array.shape
        if ones != [1] * len(shape):
            raise ValueError(
                f"the piece at {[*coordinate, first_element]} has shape {list(array.shape)}, which "
                "spans several shards"
            )
        flat = StoredArray.contiguous(array.file, array.start, array.dtype, (size,))
        for inner, part in flat.boxes_in(shard_shape, first_element):
            place = zip(coordinate, shard_shape, inner, strict=True)
            boxes.append((tuple(index * n + each for index, n, each in place), part))
    return StoredTensor(tensor.dtype, shape, tuple(boxes))


def unstack_layers(tensors: Mapping[str, StoredTensor], path: str) -> dict[str, StoredTensor]:
    """Split tensors that stack layers into one tensor for each layer.

    Args:
        path: the path of the checkpoint, for messages.

    Raises:
        FormatError: a tensor has more layers than there are pieces.
    """
    piece_count = sum(len(tensor.boxes) for tensor in tensors.values())
    unstacked: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        match, shape = STACKED_LAYERS.fullmatch(name), tensor.shape
        if match is None or not shape or any(array.shape[0] != 1 for _, array in tensor.boxes):
            unstacked[name] = tensor
            continue
        if shape[0] > max(1, piece_count):
            raise FormatError(
                f"{path}: {name}: it has {shape[0]} layers, but there are only {piece_count} "
                f"pieces: {METADATA} is damaged: copy the file again from an intact source"
            )
        layers: list[list[Placed]] = [[] for _ in range(shape[0])]
        for (layer, *offset), each in tensor.boxes:
            if layer < len(layers):
                array = StoredArray(
                    each.file, each.start, each.dtype, each.shape[1:], each.stride[1:]
                )
                layers[layer].append((tuple(offset), array))
        for layer, boxes in enumerate(layers):
            key = f"{match[1]}.{layer}.{match[2]}"
            unstacked[key] = StoredTensor(tensor.dtype, shape[1:], tuple(boxes))
    return unstacked


def _runs_of_masters(tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, Run]]:
    """Yield runs of each box of master weights, with the parameters' names."""
    for name, master in tensors.items():
        match = _OPTIMIZER_STATE.fullmatch(name)
        if match is None or match[1] not in _MASTER_KEYS or match[2] not in tensors:
            continue
        weights = tensors[match[2]]
        if weights.shape != master.shape:
            continue
        weights_at = dict(weights.boxes)
        for offset, array in master.boxes:
            candidates = [(offset, weights_at[offset])] if offset in weights_at else weights.boxes
            runs = (find_common_run(offset, array, *each) for each in candidates[:_MOST_BOXES])
            if run := next(filter(None, runs), None):
                yield match[2], run


def _read_common(tree: FileTree, builder: Builder, contents: Mapping[str, Any]) -> dict[Any, Any]:
    """Return the state that all ranks share, from its file or its item.

    If both exist, the file is read, as Megatron-Core does.
    """
    if COMMON_FILE in tree.sizes:
        builder.add_file(COMMON_FILE)
        common: dict[Any, Any] = tree.load(COMMON_FILE, kind=dict)
        return common
    value = contents[COMMON_ITEM]
    if not isinstance(value, list) or len(value) != 1 or not isinstance(value[0], dict):
        raise FormatError(
            f"{tree}: {COMMON_ITEM}: expected a list with a dict of the state that all ranks "
            f"share, found {type(value).__name__}: copy all files of one save from an intact source"
        )
    return value[0]


def _add_tensors(
    builder: Builder, tensors: Mapping[str, StoredTensor]
) -> dict[str, tuple[int, ...]]:
    """Add all tensors; return the shapes of the parameters that have optimizer state."""
    parameters: dict[str, tuple[int, ...]] = {}
    matches = {name: _OPTIMIZER_STATE.fullmatch(name) for name in tensors}
    with_master = {
        match[2] for match in matches.values() if match is not None and match[1] in _MASTER_KEYS
    }
    for name, tensor in tensors.items():
        match = matches[name]
        if match is not None:
            key, parameter = match.groups()
            parameters[parameter] = tensor.shape
            is_master = key in _MASTER_KEYS
            new_name = f"model.{parameter}" if is_master else f"optimizer.{parameter}.{key}"
        elif _OPTIMIZER_PREFIX.match(name):
            new_name = name
        else:
            new_name = f"module.{name}" if name in with_master else f"model.{name}"
        builder.add_array(new_name, tensor)
    return parameters


def _add_sharded_objects(builder: Builder, values: Mapping[str, Any]) -> None:
    """Add sharded objects, which Megatron saves as lists with one element."""
    none_names = []
    for key, value in values.items():
        match = _SHARDED_OBJECT.fullmatch(key)
        name, shard = (match[1], match[2].split(".")) if match else (key, [])
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
        stacked_match = STACKED_LAYERS.fullmatch(name)
        if stacked_match is not None and shard:
            name = f"{stacked_match[1]}.{shard.pop(0)}.{stacked_match[2]}"
        # An object with a single shard has no number in its name.
        if match is not None and shard and {*match[3].split(".")[-len(shard) :]} != {"1"}:
            name = ".".join([name, *shard])
        if value is None:
            none_names.append(name)
        else:
            is_extra_state = name.endswith("_extra_state")
            builder.add_value(f"model.{name}" if is_extra_state else name, value)
    if none_names:
        more = len(none_names) - 1
        are_none = f" and {more} more: they are None" if more else ": it is None"
        builder.left_out.append(none_names[0] + are_none)


def _add_param_groups(
    builder: Builder, common: Mapping[Any, Any], parameters: Mapping[str, tuple[int, ...]]
) -> None:
    """Add param groups and step counts, which all ranks share."""
    if not parameters:
        return
    optimizer = next((common[key] for key in ("optimizer", "optim") if key in common), None)
    saved_groups = _read_groups(optimizer)
    groups = _assign_to_groups(saved_groups, parameters)
    if groups is None:
        builder.left_out.append(
            f"optimizer.{GROUPS}: the files do not say which parameters are in which group; set "
            f"its hyperparameters yourself, and load with skip=['optimizer.{GROUPS}']"
        )
        steps = {repr(group.get("step")): group.get("step") for group in saved_groups}
        step = steps.popitem()[1] if len(steps) == 1 else None
        _add_steps(builder, [ParamGroup(tuple(parameters), {"step": step})])
        return
    _add_steps(builder, groups)
    plain = [
        ParamGroup(
            group.names,
            {k: v for k, v in group.hyperparameters.items() if not isinstance(v, StoredArray)},
        )
        for group in groups
    ]
    builder.add_groups(plain, f"optimizer.{GROUPS}")


def _read_groups(optimizer: object) -> list[dict[str, Any]]:
    """Return the param groups of an optimizer, or of all optimizers in a chain.

    Megatron-Core chains an optimizer of dense parameters and one of experts, for example. Its state
    is then `{0: …, 1: …}`. A step count that a whole optimizer has becomes that of its groups.
    """
    if isinstance(optimizer, dict) and optimizer and all(type(key) is int for key in optimizer):
        optimizer = [optimizer[key] for key in sorted(optimizer)]
    if isinstance(optimizer, list):
        return [group for each in optimizer for group in _read_groups(each)]
    torch_optimizer = optimizer.get("optimizer", optimizer) if isinstance(optimizer, dict) else None
    if not isinstance(torch_optimizer, dict):
        return []
    state, groups = torch_optimizer.get("state"), torch_optimizer.get(GROUPS)
    common_step = state.get("common_step") if isinstance(state, dict) else None
    return [
        group if "step" in group or common_step is None else {**group, "step": common_step}
        for group in (groups if isinstance(groups, list) else ())
        if isinstance(group, dict)
    ]


def _add_steps(builder: Builder, groups: Sequence[ParamGroup]) -> None:
    for group in groups:
        step = group.hyperparameters.get("step")
        for name in group.names:
            if isinstance(step, StoredArray):
                builder.add_array(f"optimizer.{name}.step", step)
            elif isinstance(step, (int, float)):
                builder.add_number(f"optimizer.{name}.step", step)


def _assign_to_groups(
    saved_groups: Sequence[Mapping[str, Any]], parameters: Mapping[str, tuple[int, ...]]
) -> list[ParamGroup] | None:
    """Assign parameters to groups by Megatron-Core's default rule; None if it is not sufficient.

    Biases and one-dimensional parameters have no weight decay; experts have separate groups.
    """
    group_by_key: dict[tuple[bool, bool], Mapping[str, Any]] = {}
    for group in saved_groups:
        if group.get("is_decoupled_lr"):
            return None
        group_key = group.get("wd_mult") == 0, bool(group.get("is_expert_parallel"))
        # Optimizers of several chunks of the model have the same groups.
        if _settings(group_by_key.setdefault(group_key, group)) != _settings(group):
            return None
    has_experts = any(of_experts for _, of_experts in group_by_key)
    names: dict[tuple[bool, bool], list[str]] = {group_key: [] for group_key in group_by_key}
    for name, shape in parameters.items():
        of_expert = has_experts and ".experts." in name
        without_decay = len(shape) == 1 or name.endswith(".bias")
        divided = {(False, of_expert), (True, of_expert)} <= names.keys()
        group_key = without_decay if divided else (True, of_expert) in names, of_expert
        if group_key not in names:
            return None
        names[group_key].append(name)
    return [
        ParamGroup(tuple(members), group_by_key[group_key]) for group_key, members in names.items()
    ]


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
