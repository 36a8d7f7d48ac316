"""Megatron-Core's `torch_dist`: DCP, and a file or item with the state that all ranks share.

Megatron-Core stacks layers in one tensor; the reader gives each layer its own name again. The
optimizer's state is named after the parameter. Older versions flattened it; the reader undoes that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from shardwise.errors import FormatError, LayoutError
from shardwise.formats.file_tree import FileTree
from shardwise.formats.foreign import (
    Foreign,
    ForeignFile,
    PieceTable,
    StoredArray,
    row_major_strides,
)
from shardwise.formats.foreign_builder import Builder
from shardwise.formats.optimizers import GROUPS, ParamGroup
from shardwise.formats.piece_tables import join_tables, select_rows, table_of_boxes
from shardwise.formats.readers.dcp.metadata import METADATA, Metadata, read_metadata
from shardwise.formats.readers.dcp.reader import DcpContent, count_ranks, read_content
from shardwise.formats.readers.torch_save import read_value
from shardwise.layout import boxes_of_range
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.pieces import Int, Pieces

FORMAT = "Megatron-Core torch_dist"
CONFIG_FILE, COMMON_FILE = "metadata.json", "common.pt"
COMMON_ITEM = "common_state/shard_0_1"
"""The item that replaces `common.pt` since Megatron-Core 0.19."""
STACKED_LAYERS = re.compile(r"((?:.*\.)?layers)\.(?!\d+(?:\.|$))(.+)")
"""Names of tensors that stack all layers."""
_ORIGINAL_SHAPE = "nd_reformulated_orig_global_shape"
_LARGEST_CONFIG = 2**20
_OPTIMIZER_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)")
_OPTIMIZER_PREFIX = re.compile(r"(?:chained_\d+\.)?optimizer\.")
_MASTER_KEYS = ("fp32_param", "param")
"""Keys of master weights: of the mixed-precision optimizer, and of the distributed one."""
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


def read(tree: FileTree) -> Foreign:
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
    metadata = read_metadata(tree)
    if COMMON_ITEM not in metadata.values:
        tree.require([COMMON_FILE], "Megatron-Core wrote")
    content = unflatten_optimizer(read_content(tree, metadata), metadata, str(tree))
    content = unstack_layers(content, str(tree))
    common_files, common = _read_common(tree, content)
    builder = Builder((*content.files, *common_files))
    builder.add_table(content.table)
    builder.left_out += content.left_out
    parameters = _add_tensors(builder, content)
    _add_sharded_objects(
        builder, {k: value for k, value in content.values.items() if k != COMMON_ITEM}
    )
    for key, value in common.items():
        builder.add_value(f"common.{key}", value)
    _add_param_groups(builder, common, parameters)
    step = common.get("iteration")
    return builder.build(
        FORMAT,
        step=step if type(step) is int else None,
        world_size=count_ranks(content.files),
    )


def _check_backend(tree: FileTree) -> None:
    text = tree.read(CONFIG_FILE, limit=_LARGEST_CONFIG)
    try:
        config = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(
            f"{tree.label(CONFIG_FILE)}: not a JSON object ({error}): copy the file again from an "
            "intact source"
        ) from error
    backend = config.get("sharded_backend")
    if backend != "torch_dist":
        raise FormatError(
            f"{tree.label(CONFIG_FILE)}: sharded_backend is {str(backend)[:40]!r}, but only "
            "'torch_dist' is supported: load the checkpoint with Megatron-Core, and save it with "
            "--ckpt-format torch_dist"
        )


def unflatten_optimizer(content: DcpContent, metadata: Metadata, path: str) -> DcpContent:
    """Undo the flattening of shards: ranges of flat shards become boxes.

    Args:
        path: the path of the checkpoint, for messages.

    Raises:
        FormatError: the ranges do not make up the tensor that was flattened.
    """
    recorded = metadata.extra_fields.get("mcore_data") or {}
    original_shapes = {
        name: tuple(fields[_ORIGINAL_SHAPE])
        for name, fields in (recorded.items() if isinstance(recorded, dict) else ())
        if isinstance(fields, dict) and isinstance(fields.get(_ORIGINAL_SHAPE), (tuple, list))
    }
    shapes = {
        i: original_shapes[name] for i, name in enumerate(content.names) if name in original_shapes
    }
    if not shapes:
        return content
    tensors = content.table.pieces.tensor
    is_flat = np.isin(tensors, list(shapes))
    boxes: list[tuple[int, tuple[int, ...], StoredArray]] = []
    for row in np.flatnonzero(is_flat).tolist():
        tensor = int(tensors[row])
        try:
            boxes += _unflatten_piece(content, row, tensor, shapes[tensor])
        except (LayoutError, TypeError, ValueError, ZeroDivisionError) as error:
            raise FormatError(
                f"{path}: {content.names[tensor]} was flattened, and its pieces do not make up the "
                f"shape {list(shapes[tensor])}: {error}: copy {METADATA} and all other files from "
                "one save"
            ) from error
    table = join_tables(select_rows(content.table, ~is_flat), table_of_boxes(boxes))
    unflattened = tuple(shapes.get(i, shape) for i, shape in enumerate(content.shapes))
    return replace(content, shapes=unflattened, table=table)


def _unflatten_piece(
    content: DcpContent, row: int, tensor: int, shape: tuple[int, ...]
) -> Iterator[tuple[int, tuple[int, ...], StoredArray]]:
    """Yield the boxes of a piece of `[X/x, Y/y, x*y]`, a tensor `[X, Y]` with shards `[x, y]`."""
    pieces = content.table.pieces
    shard_counts = content.shapes[tensor][:-1]
    if len(shard_counts) != len(shape) or any(
        n % count for n, count in zip(shape, shard_counts, strict=True)
    ):
        raise ValueError(f"{list(shard_counts)} shards do not divide the shape {list(shape)}")
    shard_shape = tuple(n // count for n, count in zip(shape, shard_counts, strict=True))
    *coordinate, first_element = pieces.offset[row][: len(shape) + 1].tolist()
    size = int(pieces.shape[row][len(shape)])
    if pieces.shape[row][: len(shape)].tolist() != [1] * len(shape):
        raise ValueError(
            f"the piece at {pieces.offset[row].tolist()} has shape {pieces.shape[row].tolist()}, "
            "which spans several shards"
        )
    file, start = int(pieces.file[row]), int(pieces.start[row])
    dtype = content.dtypes[tensor]
    for box in boxes_of_range(shard_shape, first_element, first_element + size):
        offset = tuple(
            index * n + inner
            for index, n, inner in zip(coordinate, shard_shape, box.offset, strict=True)
        )
        yield (
            tensor,
            offset,
            StoredArray(file, start, dtype, box.shape, row_major_strides(box.shape)),
        )
        start += box.size * DTYPES[dtype].itemsize


def unstack_layers(content: DcpContent, path: str) -> DcpContent:
    """Split tensors that stack layers into one tensor for each layer.

    Args:
        path: the path of the checkpoint, for messages.

    Raises:
        FormatError: a tensor has more layers than pieces.
    """
    pieces = content.table.pieces
    has_one_layer = np.ones(len(content.names), bool)
    if pieces.offset.shape[1]:
        has_one_layer[pieces.tensor[pieces.shape[:, 0] != 1]] = False
    names: list[str] = []
    dtypes: list[str] = []
    shapes: list[tuple[int, ...]] = []
    first_index = np.zeros(len(content.names), np.int64)
    is_stacked = np.zeros(len(content.names), bool)
    rows = zip(content.names, content.dtypes, content.shapes, strict=True)
    for i, (name, dtype, shape) in enumerate(rows):
        match = STACKED_LAYERS.fullmatch(name)
        first_index[i] = len(names)
        is_stacked[i] = match is not None and len(shape) > 0 and has_one_layer[i]
        if match is None or not is_stacked[i]:
            names.append(name)
            dtypes.append(dtype)
            shapes.append(shape)
            continue
        if shape[0] > max(1, len(pieces)):
            raise FormatError(
                f"{path}: {name}: it has {shape[0]} layers, but there are only {len(pieces)} "
                f"pieces: {METADATA} is damaged: copy the file again from an intact source"
            )
        names += [f"{match[1]}.{layer}.{match[2]}" for layer in range(shape[0])]
        dtypes += [dtype] * shape[0]
        shapes += [shape[1:]] * shape[0]
    in_stack = is_stacked[pieces.tensor]
    layer = pieces.offset[:, 0] if pieces.offset.shape[1] else 0 * pieces.tensor
    dims = max(map(len, shapes), default=0)

    def drop_layer_dimension(column: Int, fill: int) -> Int:
        shifted = np.pad(column[:, 1:], ((0, 0), (0, 1)), constant_values=fill)
        return np.where(in_stack[:, None], shifted, column)[:, :dims]

    table = PieceTable(
        Pieces(
            first_index[pieces.tensor] + np.where(in_stack, layer, 0),
            pieces.file,
            pieces.start,
            drop_layer_dimension(pieces.offset, 0),
            drop_layer_dimension(pieces.shape, 1),
        ),
        drop_layer_dimension(content.table.stride, 0),
    )
    return replace(
        content, names=tuple(names), dtypes=tuple(dtypes), shapes=tuple(shapes), table=table
    )


def _read_common(
    tree: FileTree, content: DcpContent
) -> tuple[tuple[ForeignFile, ...], dict[Any, Any]]:
    """Return the state that all ranks share, and the file with it if it is not an item.

    If both exist, the file is read, as Megatron-Core does.
    """
    files: tuple[ForeignFile, ...] = ()
    if COMMON_FILE in tree.sizes:
        files, label = (tree.file(COMMON_FILE),), tree.label(COMMON_FILE)
        common = read_value(tree, COMMON_FILE, len(content.files))
    else:
        label, value = f"{tree}: {COMMON_ITEM}", content.values[COMMON_ITEM]
        common = value[0] if isinstance(value, list) and len(value) == 1 else None
    if not isinstance(common, dict):
        raise FormatError(
            f"{label}: expected a dict of the state that all ranks share, found "
            f"{type(common).__name__}: copy all files of one save from an intact source"
        )
    return files, common


def _add_tensors(builder: Builder, content: DcpContent) -> dict[str, tuple[int, ...]]:
    """Add all tensors; return the shapes of the parameters that have optimizer state."""
    parameters: dict[str, tuple[int, ...]] = {}
    matches = [_OPTIMIZER_STATE.fullmatch(name) for name in content.names]
    with_master = {match[2] for match in matches if match is not None and match[1] in _MASTER_KEYS}
    rows = zip(content.names, matches, content.dtypes, content.shapes, strict=True)
    for name, match, dtype, shape in rows:
        if match is not None:
            key, parameter = match.groups()
            parameters[parameter] = shape
            is_master = key in _MASTER_KEYS
            tensor = f"model.{parameter}" if is_master else f"optimizer.{parameter}.{key}"
        elif _OPTIMIZER_PREFIX.match(name):
            tensor = name
        else:
            tensor = f"module.{name}" if name in with_master else f"model.{name}"
        builder.add_tensor(tensor, dtype, shape)
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
        builder.left_out.append(f"{none_names[0]} and {len(none_names) - 1} more: they are None")


def _add_param_groups(
    builder: Builder, common: Mapping[Any, Any], parameters: Mapping[str, tuple[int, ...]]
) -> None:
    """Add param groups and step counts, which all ranks share."""
    if not parameters:
        return
    optimizer = next((common[key] for key in ("optimizer", "optim") if key in common), None)
    torch_optimizer = optimizer.get("optimizer", optimizer) if isinstance(optimizer, dict) else None
    saved_groups = torch_optimizer.get(GROUPS) if isinstance(torch_optimizer, dict) else None
    groups = _assign_to_groups(saved_groups, parameters) if isinstance(saved_groups, list) else None
    if groups is None:
        builder.left_out.append(
            f"optimizer.{GROUPS}: the files do not say which parameters are in which group; set "
            f"its hyperparameters yourself, and load with skip=['optimizer.{GROUPS}']"
        )
        return
    state = torch_optimizer.get("state") if isinstance(torch_optimizer, dict) else None
    common_step = state.get("common_step") if isinstance(state, dict) else None
    for group in groups:
        step = group.hyperparameters.get("step", common_step)
        for name in group.names:
            if isinstance(step, StoredArray):
                builder.add_array(f"optimizer.{name}.step", step)
            elif isinstance(step, (int, float)):
                builder.add_number(f"optimizer.{name}.step", step)
    builder.add_groups(groups, f"optimizer.{GROUPS}")


def _assign_to_groups(
    saved_groups: Sequence[Any], parameters: Mapping[str, tuple[int, ...]]
) -> list[ParamGroup] | None:
    """Assign parameters to groups by Megatron-Core's default rule; None if it is not sufficient.

    Biases and one-dimensional parameters have no weight decay; experts have separate groups.
    """
    group_by_key: dict[tuple[bool, bool], dict[str, Any]] = {}
    for group in saved_groups:
        if not isinstance(group, dict) or group.get("is_decoupled_lr"):
            return None
        group_key = group.get("wd_mult") == 0, bool(group.get("is_expert_parallel"))
        if group_key in group_by_key:
            return None
        group_by_key[group_key] = group
    has_experts = any(of_experts for _, of_experts in group_by_key)
    names: dict[tuple[bool, bool], list[str]] = {group_key: [] for group_key in group_by_key}
    for name, shape in parameters.items():
        without_decay = len(shape) == 1 or name.endswith(".bias")
        group_key = without_decay and len(group_by_key) > 1, has_experts and ".experts." in name
        if group_key not in names:
            return None
        names[group_key].append(name)
    return [
        ParamGroup(tuple(members), group_by_key[group_key]) for group_key, members in names.items()
    ]
