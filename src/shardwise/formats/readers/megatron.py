"""Megatron-Core's `torch_dist`: DCP, and a file or item with the state that all ranks share.

Layers are stacked in one tensor there; the reader gives each layer its own name again. The
optimizer's state is named after the parameter. Older versions flattened it; the reader undoes that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from shardwise.errors import FormatError, LayoutError
from shardwise.formats.build import Builder
from shardwise.formats.containers.torch_files import read_torch_file
from shardwise.formats.foreign import Foreign, ForeignFile, PieceTable, StoredArray
from shardwise.formats.optimizers import GROUPS, Group
from shardwise.formats.readers.dcp.metadata import METADATA, Metadata, read_metadata
from shardwise.formats.readers.dcp.reader import Stored, read_stored, world_size
from shardwise.formats.tree import Tree
from shardwise.layout import boxes_of_range, row_major
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.table import Int, Pieces, padded_rows

STACKED = re.compile(r"((?:.*\.)?layers)\.(?!\d+(?:\.|$))(.+)")
"""Names of tensors that stack all layers."""
_FLATTENED = "nd_reformulated_orig_global_shape"


@dataclass(frozen=True, slots=True)
class _Row:
    """A piece of a tensor."""

    tensor: int
    file: int
    start: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


def unflattened(stored: Stored, metadata: Metadata) -> Stored:
    """Undo the flattening of shards: ranges of flat shards become boxes.

    Raises:
        FormatError: the ranges do not make up the tensor that was flattened.
    """
    known = metadata.more.get("mcore_data") or {}
    original = {
        name: tuple(each[_FLATTENED])
        for name, each in (known.items() if isinstance(known, dict) else ())
        if isinstance(each, dict) and _FLATTENED in each
    }
    flat = {i: original[name] for i, name in enumerate(stored.names) if name in original}
    if not flat:
        return stored
    pieces = stored.table.pieces
    is_flat = np.isin(pieces.tensor, list(flat))
    rows: list[_Row] = []
    for row in np.flatnonzero(is_flat).tolist():
        tensor = int(pieces.tensor[row])
        try:
            rows += _boxes(stored, row, tensor, flat[tensor])
        except (LayoutError, TypeError, ValueError, ZeroDivisionError) as error:
            raise FormatError(f"{stored.names[tensor]}: it was flattened: {error}") from error
    shapes = tuple(flat.get(i, shape) for i, shape in enumerate(stored.shapes))
    dims = max(len(shape) for shape in shapes)
    kept = _rows(stored.table, ~is_flat, max(dims, pieces.offset.shape[1]))
    width = kept.stride.shape[1]
    shape = padded_rows([row.shape for row in rows], width, 1)
    made = Pieces(
        np.array([row.tensor for row in rows], np.int64),
        np.array([row.file for row in rows], np.int64),
        np.array([row.start for row in rows], np.int64),
        padded_rows([row.offset for row in rows], width, 0),
        shape,
    )
    table = PieceTable(
        _concatenated(kept.pieces, made), np.concatenate([kept.stride, row_major(shape)])
    )
    return replace(stored, shapes=shapes, table=table)


def _boxes(stored: Stored, row: int, tensor: int, shape: tuple[int, ...]) -> Iterator[_Row]:
    """Yield the boxes of a piece of `[X/x, Y/y, x*y]`, a tensor `[X, Y]` with shards `[x, y]`."""
    pieces = stored.table.pieces
    counts = stored.shapes[tensor][:-1]
    if len(counts) != len(shape) or any(n % count for n, count in zip(shape, counts, strict=True)):
        raise ValueError(f"{list(counts)} shards do not divide the shape {list(shape)}")
    local = tuple(n // count for n, count in zip(shape, counts, strict=True))
    at = pieces.offset[row][: len(shape) + 1].tolist()
    size = int(pieces.shape[row][len(shape)])
    if pieces.shape[row][: len(shape)].tolist() != [1] * len(shape):
        raise ValueError("a piece spans several shards")
    start = int(pieces.start[row])
    itemsize = DTYPES[stored.dtypes[tensor]].itemsize
    for box in boxes_of_range(local, at[-1], at[-1] + size):
        offset = tuple(i * n + o for i, n, o in zip(at, local, box.offset, strict=False))
        yield _Row(tensor, int(pieces.file[row]), start, offset, box.shape)
        start += box.size * itemsize


def unstacked(stored: Stored) -> Stored:
    """Split tensors that stack layers into one tensor for each layer.

    Raises:
        FormatError: a tensor has more layers than pieces.
    """
    pieces = stored.table.pieces
    single = np.ones(len(stored.names), bool)
    if pieces.offset.shape[1]:
        single[pieces.tensor[pieces.shape[:, 0] != 1]] = False
    names: list[str] = []
    dtypes: list[str] = []
    shapes: list[tuple[int, ...]] = []
    first = np.zeros(len(stored.names), np.int64)
    stacked = np.zeros(len(stored.names), bool)
    for i, (name, dtype, shape) in enumerate(
        zip(stored.names, stored.dtypes, stored.shapes, strict=True)
    ):
        match = STACKED.fullmatch(name)
        first[i], stacked[i] = len(names), match is not None and len(shape) > 0 and single[i]
        count = shape[0] if stacked[i] else 1
        if count > max(1, len(pieces)):
            raise FormatError(f"{name}: it has {count} layers, but fewer pieces")
        names += [
            f"{match[1]}.{layer}.{match[2]}" if match and stacked[i] else name
            for layer in range(count)
        ]
        dtypes += [dtype] * count
        shapes += [shape[1:] if stacked[i] else shape] * count
    rows = stacked[pieces.tensor]
    layer = pieces.offset[:, 0] if pieces.offset.shape[1] else 0 * pieces.tensor

    dims = max(map(len, shapes), default=0)

    def shifted(column: Int, fill: int) -> Int:
        moved = np.pad(column[:, 1:], ((0, 0), (0, 1)), constant_values=fill)
        return np.where(rows[:, None], moved, column)[:, :dims]

    table = PieceTable(
        Pieces(
            first[pieces.tensor] + np.where(rows, layer, 0),
            pieces.file,
            pieces.start,
            shifted(pieces.offset, 0),
            shifted(pieces.shape, 1),
        ),
        shifted(stored.table.stride, 0),
    )
    return replace(
        stored, names=tuple(names), dtypes=tuple(dtypes), shapes=tuple(shapes), table=table
    )


def _rows(table: PieceTable, chosen: Any, dims: int) -> PieceTable:
    """Select pieces, padded to `dims` dimensions."""
    pieces = table.pieces
    by = ((0, 0), (0, dims - pieces.offset.shape[1]))
    return PieceTable(
        Pieces(
            pieces.tensor[chosen],
            pieces.file[chosen],
            pieces.start[chosen],
            np.pad(pieces.offset[chosen], by),
            np.pad(pieces.shape[chosen], by, constant_values=1),
        ),
        np.pad(table.stride[chosen], by),
    )


def _concatenated(first: Pieces, second: Pieces) -> Pieces:
    names = ("tensor", "file", "start", "offset", "shape")
    return Pieces(*(np.concatenate([getattr(first, n), getattr(second, n)]) for n in names))


FORMAT = "Megatron-Core torch_dist"
CONFIG, COMMON = "metadata.json", "common.pt"
SHARED = "common_state/shard_0_1"
"""The item that replaces `common.pt` since Megatron-Core 0.19."""
_LARGEST_CONFIG = 2**20
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)")
_MASTERS = ("fp32_param", "param")  # of the mixed-precision optimizer, and the distributed one
_DISTRIBUTED = re.compile(r"(?:chained_\d+\.)?optimizer\.")
_OBJECT = re.compile(r"(.+)/shard_([\d.]+)_([\d.]+)")


def recognise(tree: Tree) -> bool:
    """Whether a tree is a DCP checkpoint with Megatron-Core's additional file or item."""
    if METADATA not in tree.sizes:
        return False
    if COMMON in tree.sizes or _says_backend(tree):
        return True
    return CONFIG not in tree.sizes and SHARED.encode() in tree.read(METADATA)


def _says_backend(tree: Tree) -> bool:
    return tree.sizes.get(CONFIG, _LARGEST_CONFIG + 1) <= _LARGEST_CONFIG and (
        b'"sharded_backend"' in tree.read(CONFIG, limit=_LARGEST_CONFIG)
    )


def read(tree: Tree) -> Foreign:
    """Read a checkpoint of `megatron.core.dist_checkpointing` with the backend `torch_dist`.

    Tensors of the model are `model.<name>`. If the optimizer has master weights, these are
    `model.<name>`, and the model's own are `module.<name>`. States of the optimizer are
    `optimizer.<name>.<key>`. Buckets of `dp_reshardable` optimizers keep their names, because the
    files do not say which parameters they contain.

    Raises:
        FormatError: it is malformed, lacks a file, or has another backend.
    """
    tree.require([CONFIG], "Megatron-Core wrote")
    _check_backend(tree)
    metadata = read_metadata(tree)
    if SHARED not in metadata.values:
        tree.require([COMMON], "Megatron-Core wrote")
    stored = unstacked(unflattened(read_stored(tree, metadata), metadata))
    files, common = _common(tree, stored)
    builder = Builder((*stored.files, *files))
    builder.add_table(stored.table)
    builder.left_out += stored.left_out
    parameters = _add_tensors(builder, stored)
    _add_objects(builder, {key: each for key, each in stored.values.items() if key != SHARED})
    for key, value in common.items():
        builder.add_value(f"common.{key}", value)
    _add_groups(builder, common, parameters)
    step = common.get("iteration")
    return replace(
        builder.build(FORMAT),
        step=step if type(step) is int else None,
        world_size=world_size(stored.files),
    )


def _check_backend(tree: Tree) -> None:
    try:
        config = msgspec.json.decode(tree.read(CONFIG, limit=_LARGEST_CONFIG), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{tree}/{CONFIG} is malformed: {error}") from error
    backend = config.get("sharded_backend")
    if backend != "torch_dist":
        raise FormatError(
            f"{tree}: its backend is {str(backend)[:40]!r}, but only 'torch_dist' is supported: "
            "load it with Megatron-Core and save it as torch_dist"
        )


def _common(tree: Tree, stored: Stored) -> tuple[tuple[ForeignFile, ...], dict[Any, Any]]:
    """Return the state that all ranks share, and the file with it if it is not an item.

    If both exist, the file is read, as Megatron-Core does.
    """
    if COMMON in tree.sizes:
        files: tuple[ForeignFile, ...] = (tree.file(COMMON),)
        where = f"{tree}/{COMMON}"
        with tree.open_range(COMMON, len(stored.files)) as part:
            common = read_torch_file(part, opaque=tree.opaque).value
    else:
        files, where = (), f"{tree}: {SHARED}"
        listed = stored.values[SHARED]
        common = listed[0] if isinstance(listed, list) and len(listed) == 1 else None
    if not isinstance(common, dict):
        raise FormatError(f"{where}: expected a dict of the state that all ranks share")
    return files, common


def _add_tensors(builder: Builder, stored: Stored) -> dict[str, tuple[int, ...]]:
    """Add all tensors; return the shapes of the parameters that have optimizer state."""
    parameters: dict[str, tuple[int, ...]] = {}
    states = [_OPTIMIZER.fullmatch(name) for name in stored.names]
    mastered = {state[2] for state in states if state is not None and state[1] in _MASTERS}
    columns = zip(stored.names, states, stored.dtypes, stored.shapes, strict=True)
    for name, state, dtype, shape in columns:
        if state is None:
            module = "module" if name in mastered else "model"
            builder.add_tensor(
                name if _DISTRIBUTED.match(name) else f"{module}.{name}", dtype, shape
            )
            continue
        key, parameter = state.groups()
        parameters[parameter] = shape
        full = f"model.{parameter}" if key in _MASTERS else f"optimizer.{parameter}.{key}"
        builder.add_tensor(full, dtype, shape)
    return parameters


def _add_objects(builder: Builder, values: Mapping[str, Any]) -> None:
    """Add sharded objects, which Megatron saves as lists with one element."""
    empty = []
    for key, value in values.items():
        match = _OBJECT.fullmatch(key)
        name, shard = (match[1], match[2].split(".")) if match else (key, [])
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
        layers = STACKED.fullmatch(name)
        if layers is not None and shard:
            name = f"{layers[1]}.{shard.pop(0)}.{layers[2]}"
        # An object with a single shard has no number in its name.
        several = match is not None and {*match[3].split(".")[-len(shard) :]} != {"1"} and shard
        name = ".".join([name, *shard]) if several else name
        if value is None:
            empty.append(name)
        else:
            extra = name.endswith("_extra_state")
            builder.add_value(f"model.{name}" if extra else name, value)
    if empty:
        builder.left_out.append(f"{empty[0]} and {len(empty) - 1} more: they are None")


def _add_groups(
    builder: Builder, common: Mapping[Any, Any], parameters: Mapping[str, tuple[int, ...]]
) -> None:
    """Add param groups and step counts, which all ranks share."""
    if not parameters:
        return
    optimizer = next((common[key] for key in ("optimizer", "optim") if key in common), None)
    inner = optimizer.get("optimizer", optimizer) if isinstance(optimizer, dict) else None
    listed = inner.get(GROUPS) if isinstance(inner, dict) else None
    groups = _members(listed, parameters) if isinstance(listed, list) else None
    if groups is None:
        builder.left_out.append(
            f"optimizer.{GROUPS}: the files do not say which parameters are in which group; set "
            f"its hyperparameters yourself, and load with skip=['optimizer.{GROUPS}']"
        )
        return
    state = inner.get("state") if isinstance(inner, dict) else None
    counted = state.get("common_step") if isinstance(state, dict) else None
    for group in groups:
        step = group.settings.get("step", counted)
        for name in group.members:
            if isinstance(step, StoredArray):
                builder.add_array(f"optimizer.{name}.step", step)
            elif isinstance(step, (int, float)):
                builder.add_number(f"optimizer.{name}.step", step)
    builder.add_groups(groups, f"optimizer.{GROUPS}")


def _members(
    listed: Sequence[Any], parameters: Mapping[str, tuple[int, ...]]
) -> list[Group] | None:
    """Assign parameters to groups by Megatron-Core's default rule; None if it is not sufficient.

    Biases and one-dimensional parameters have no weight decay; experts have separate groups.
    """
    by_kind: dict[tuple[bool, bool], dict[str, Any]] = {}
    for settings in listed:
        if not isinstance(settings, dict) or settings.get("is_decoupled_lr"):
            return None
        kind = settings.get("wd_mult") == 0, bool(settings.get("is_expert_parallel"))
        if kind in by_kind:
            return None
        by_kind[kind] = settings
    experts = any(expert for _, expert in by_kind)
    members: dict[tuple[bool, bool], list[str]] = {kind: [] for kind in by_kind}
    for name, shape in parameters.items():
        small = len(shape) == 1 or name.endswith(".bias")
        kind = small and len(by_kind) > 1, experts and ".experts." in name
        if kind not in members:
            return None
        members[kind].append(name)
    return [Group(tuple(names), by_kind[kind]) for kind, names in members.items()]
