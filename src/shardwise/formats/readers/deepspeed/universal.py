"""Reads a universal checkpoint: one file for each parameter and each key of its state."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardwise.errors import FormatError
from shardwise.formats.build import Builder
from shardwise.formats.foreign import Foreign, StoredArray
from shardwise.formats.readers.deepspeed.files import (
    SETTINGS,
    WEIGHTS,
    find_files,
    has_universal_files,
)
from shardwise.formats.readers.deepspeed.optimizers import STEP, Settings, add_number, add_scalars
from shardwise.formats.readers.deepspeed.ranks import Ranks, read_ranks, read_values
from shardwise.formats.readers.deepspeed.reader import add_modules, add_values
from shardwise.formats.readers.deepspeed.states import Shape, of_the_optimizer, of_torch
from shardwise.formats.readers.deepspeed.tensor_parallel import Place, add_shards, whole
from shardwise.formats.readers.deepspeed.zero import MASTER, add_frozen_slices, name_of
from shardwise.formats.tree import Tree

FORMAT = "DeepSpeed universal"
_ATOM = re.compile(r"zero/(.+)/([^/]+)\.pt")
_SETTINGS = f"zero/{SETTINGS}"
MOMENTS = (WEIGHTS, "exp_avg", "exp_avg_sq", "momentum_buffer")
"""Keys whose tensors always have the shape of the parameter."""

Atoms = Mapping[tuple[str, str], str]
"""The file of each parameter and key."""


def recognise(tree: Tree) -> bool:
    """Return whether a place looks like a universal checkpoint, or a directory with one."""
    return has_universal_files(tree)


def read(tree: Tree, tag: str | None = None, *, place: Place | None = None) -> Foreign:
    """Read a universal checkpoint; no tensor is read.

    Weights and optimizer state come from the files of the parameters. Frozen parameters and
    buffers, which DeepSpeed does not restore from a universal checkpoint, come from the model
    states next to them.

    Args:
        tree: the universal directory, or its parent.
        tag: the tag; by default the one that `latest_universal` names.
        place: as for `reader.read`.

    Raises:
        FormatError: the checkpoint is malformed or incomplete.
    """
    files = find_files(tree, tag, universal=True)
    ranks = read_ranks(tree, files, universal=True)
    builder = Builder(tree.file(name) for name in tree.sizes)
    builder.left_out += ranks.left_out
    below = [
        name.removeprefix(files.folder) for name in tree.sizes if name.startswith(files.folder)
    ]
    atoms = {(m[1], m[2]): f"{files.folder}{m[0]}" for m in map(_ATOM.fullmatch, below) if m}
    settings = f"{files.folder}{_SETTINGS}"
    values = read_values(tree, [*atoms.values(), settings], builder.left_out)
    trained = _trained(ranks)
    place = place or (ranks.place() if ranks.tensor_parallel > 1 else whole)
    _require_atoms(tree, f"{files.folder}zero", atoms, ranks, values[settings])
    _add_atoms(builder, atoms, values, trained, place)
    _add_settings(builder, ranks, values[settings], f"{tree}/{settings}")
    if ranks.sliced:
        add_frozen_slices(builder, ranks.by_data_parallel(), place)
    add_modules(builder, ranks.modules(), place, sliced=ranks.sliced)
    _add_untrained(builder, atoms, values, trained)
    add_values(builder, ranks)
    return builder.build(FORMAT, step=ranks.step, world_size=ranks.world_size)


def _trained(ranks: Ranks) -> dict[str, tuple[Shape, ...]]:
    """Return the shapes of all trained parameters on the tensor-parallel ranks."""
    found: dict[str, tuple[Shape, ...]] = {}
    for stage in range(ranks.stages):
        held = [ranks.models[0, rank] for rank in ranks.of_stage(stage)]
        merged = [{n: s for group in state.shapes for n, s in group.items()} for state in held]
        for name in merged[0]:
            found[name] = tuple(shapes[name] for shapes in merged if name in shapes)
    return found


def _require_atoms(tree: Tree, folder: str, atoms: Atoms, ranks: Ranks, settings: object) -> None:
    """Require for each parameter its weights, and the state that others of its group have.

    Raises:
        FormatError: files are missing; the message names them.
    """
    groups = settings.get("param_groups") if isinstance(settings, Mapping) else None
    listed = groups if isinstance(groups, (list, tuple)) else ()
    held = [group for group in listed if isinstance(group, Mapping)]
    keys: dict[str, set[str]] = {}
    for name, key in atoms:
        keys.setdefault(name, set()).add(key)
    for stage in range(ranks.stages):
        for number, group in enumerate(ranks.models[0, ranks.of_stage(stage)[0]].shapes):
            known = held[number] if number < len(held) else {}
            wanted = {WEIGHTS}.union(*(keys.get(name, set()) for name in group))
            if "betas" in known and ("amsgrad" in known or "bias_correction" in known):
                wanted |= {"exp_avg", "exp_avg_sq"}  # Adam, of torch or of DeepSpeed
            elif "betas" in known and wanted <= {WEIGHTS, STEP}:
                wanted |= {"exp_avg"}
            files = (f"{folder}/{name}/{key}.pt" for name in group for key in sorted(wanted))
            tree.require(files, "hold parameters and their states")


def _add_atoms(
    builder: Builder,
    atoms: Atoms,
    values: Mapping[str, Any],
    trained: Mapping[str, Sequence[Shape]],
    place: Place,
) -> None:
    shapes: dict[str, Shape] = {}
    for (name, key), file in atoms.items():
        if name not in trained:
            continue
        array = _content(values[file])
        if isinstance(array, (int, float)):
            add_number(builder, [name], key, array)
        elif not isinstance(array, StoredArray):
            raise FormatError(f"{file}: the file holds no tensor")
        else:
            array = _shaped(array, trained[name], file)
            if name not in shapes:
                shapes[name] = place(name, trained[name]).shape
            if array.shape != shapes[name] and (array.shape or key in MOMENTS):
                raise FormatError(
                    f"{file}: its shape is {list(array.shape)}, but its parameter has shape "
                    f"{list(shapes[name])}: the file is of another model, or damaged"
                )
            full = name_of(name, MASTER if key == WEIGHTS else key)
            add_shards(builder, full, [array], whole(full, [array.shape]))


def _content(value: Any) -> Any:
    return value.get("param") if isinstance(value, Mapping) else value


def _shaped(array: StoredArray, shapes: Sequence[Shape], file: str) -> StoredArray:
    """Return an atom in the shape of its parameter; those of ZeRO 3 are stored flat."""
    if len(shapes) != 1 or len(array.shape) != 1:
        return array
    (shape,) = shapes
    if math.prod(shape) != array.shape[0] or array.stride != (1,):
        raise FormatError(f"{file}: {array.shape[0]} elements do not make up shape {list(shape)}")
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return replace(array, shape=shape, stride=stride)


def _add_settings(builder: Builder, ranks: Ranks, value: object, where: str) -> None:
    """Add the hyperparameters of all groups, and steps of parameters that have no file of them."""
    held = dict(value) if isinstance(value, Mapping) else {}
    groups = held.get("param_groups")
    if not isinstance(groups, (list, tuple)):
        raise FormatError(f"{where}: it has no param_groups")
    inner = held.get("optimizer_state_dict", {"state": {}, "param_groups": groups})
    states, each, owner = of_torch(inner if isinstance(inner, Mapping) else {}, where)
    settings = Settings(builder)
    for stage in range(ranks.stages):
        shapes = ranks.models[0, ranks.of_stage(stage)[0]].shapes
        if len(owner) != len(shapes):
            raise FormatError(
                f"{where}: it has {len(owner)} groups, but the model has {len(shapes)}"
            )
        for group, state, index in zip(shapes, states, owner, strict=True):
            step = state.get(STEP)
            if isinstance(step, StoredArray) and step.shape == ():
                add_scalars(builder, list(group), STEP, [step])
            elif isinstance(step, (int, float)):
                add_number(builder, list(group), STEP, step)
            settings.add(list(group), each[index])
    settings.finish()
    for key, item in of_the_optimizer(held).items():
        if item is not None:
            builder.add_value(f"deepspeed.{key}", item)
    if "fp32_flat_groups" in held:
        builder.left_out.append(
            f"{_SETTINGS}: the first rank's flat state, which the parameters' files have too"
        )


def _add_untrained(
    builder: Builder,
    atoms: Atoms,
    values: Mapping[str, Any],
    trained: Mapping[str, Sequence[Shape]],
) -> None:
    """Add weights that only files of parameters have, as of frozen parameters of a pipeline."""
    copies = 0
    for (name, key), file in atoms.items():
        if name in trained or key != WEIGHTS:
            continue
        array = _content(values[file])
        if f"model.{name}" in builder:
            copies += 1
        elif isinstance(array, StoredArray):
            builder.add_array(f"model.{name}", array)
    if copies:
        builder.left_out.append(
            f"zero/*/{WEIGHTS}.pt of {copies} buffers, frozen and tied parameters: copies in "
            "float32 of what the model states have"
        )
