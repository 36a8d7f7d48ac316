"""Reads a universal checkpoint: a file for each parameter and each key of its state."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardwise.errors import FormatError
from shardwise.formats.foreign import Foreign, StoredArray
from shardwise.formats.readers.deepspeed.files import (
    SETTINGS,
    WEIGHTS,
    find_files,
    has_universal_files,
)
from shardwise.formats.readers.deepspeed.laying import Laying
from shardwise.formats.readers.deepspeed.modules import lay_frozen_slices, lay_modules
from shardwise.formats.readers.deepspeed.optimizers import STEP, Settings, lay_number
from shardwise.formats.readers.deepspeed.placements import Placing, whole
from shardwise.formats.readers.deepspeed.ranks import Ranks, load_all
from shardwise.formats.readers.deepspeed.states import Shape, of_the_optimizer, of_torch
from shardwise.formats.readers.deepspeed.values import lay_values
from shardwise.formats.tree import Tree

FORMAT = "DeepSpeed universal"
_ATOM = re.compile(r"zero/(.+)/([^/]+)\.pt")
_SETTINGS = f"zero/{SETTINGS}"
MOMENTS = (WEIGHTS, "exp_avg", "exp_avg_sq", "momentum_buffer")
"""What is always as large as the parameter."""


def recognise(tree: Tree) -> bool:
    """Whether a place looks like a universal checkpoint, or a directory with one."""
    return has_universal_files(tree)


def read(tree: Tree, tag: str | None = None, *, placing: Placing | None = None) -> Foreign:
    """Read a universal checkpoint; no tensor is read.

    Weights and the optimizer's state are the atoms; frozen parameters and buffers, which DeepSpeed
    does not restore from a universal checkpoint, are those of the model states beside them.

    Args:
        tree: the universal directory, or the one above it.
        tag: which one; by default what `latest_universal` names.
        placing: as in `native.read`.

    Raises:
        FormatError: it is malformed or incomplete.
    """
    files = find_files(tree, tag, universal=True)
    laying = Laying(tree.file(name) for name in tree.sizes)
    ranks = Ranks.read(tree, files, laying, universal=True)
    below = [
        name.removeprefix(files.folder) for name in tree.sizes if name.startswith(files.folder)
    ]
    atoms = {(m[1], m[2]): f"{files.folder}{m[0]}" for m in map(_ATOM.fullmatch, below) if m}
    wanted = [*atoms.values(), f"{files.folder}{_SETTINGS}"]
    contents = load_all(tree, wanted, laying)
    trained = _trained(ranks)
    place = placing or (ranks.placing() if ranks.tensor_parallel > 1 else whole)
    settings = _settings(contents[wanted[-1]])
    _check_atoms(tree, f"{files.folder}zero", atoms, ranks, settings)
    _lay_atoms(laying, atoms, contents, trained, place)
    _lay_settings(laying, ranks, contents[wanted[-1]], f"{tree}/{wanted[-1]}")
    if ranks.sliced:
        lay_frozen_slices(laying, ranks.of_data_parallel(), place)
    modules = [ranks.module(rank) for rank in range(ranks.tensor_parallel)]
    lay_modules(laying, modules, place, sliced=ranks.sliced)
    _lay_what_has_no_other(laying, atoms, contents, trained)
    lay_values(laying, ranks)
    return laying.finish(FORMAT, step=ranks.step, world_size=ranks.world_size)


def _trained(ranks: Ranks) -> dict[str, tuple[Shape, ...]]:
    """The shapes of all parameters that were trained, on the tensor-parallel ranks."""
    found: dict[str, tuple[Shape, ...]] = {}
    for stage in range(ranks.stages):
        held = [ranks.models[0, rank] for rank in ranks.of_stage(stage)]
        merged = [{n: s for group in state.shapes for n, s in group.items()} for state in held]
        for name in merged[0]:
            found[name] = tuple(shapes[name] for shapes in merged if name in shapes)
    return found


def _settings(value: object) -> list[Mapping[Any, Any]]:
    """The hyperparameters of all groups; none, if there are none."""
    groups = value.get("param_groups") if isinstance(value, Mapping) else None
    listed = groups if isinstance(groups, (list, tuple)) else ()
    return [group for group in listed if isinstance(group, Mapping)]


def _check_atoms(
    tree: Tree,
    folder: str,
    atoms: Mapping[tuple[str, str], str],
    ranks: Ranks,
    settings: Sequence[Mapping[Any, Any]],
) -> None:
    """Whether each parameter has its weights, and the states that others of its group have.

    Raises:
        FormatError: files are missing; they are named.
    """
    keys: dict[str, set[str]] = {}
    for name, key in atoms:
        keys.setdefault(name, set()).add(key)
    for stage in range(ranks.stages):
        for number, group in enumerate(ranks.models[0, ranks.of_stage(stage)[0]].shapes):
            held = settings[number] if number < len(settings) else {}
            wanted = {WEIGHTS}.union(*(keys.get(name, set()) for name in group))
            if "betas" in held and ("amsgrad" in held or "bias_correction" in held):
                wanted |= {"exp_avg", "exp_avg_sq"}  # Adam, of torch or of DeepSpeed
            elif "betas" in held and wanted <= {WEIGHTS, STEP}:
                wanted |= {"exp_avg"}
            files = (f"{folder}/{name}/{key}.pt" for name in group for key in sorted(wanted))
            tree.require(files, "hold parameters and their states")


def _lay_atoms(
    laying: Laying,
    atoms: Mapping[tuple[str, str], str],
    contents: Mapping[str, Any],
    trained: Mapping[str, Sequence[Shape]],
    place: Placing,
) -> None:
    shapes: dict[str, Shape] = {}
    for (name, key), file in atoms.items():
        if name not in trained:
            continue
        full = f"model.{name}" if key == WEIGHTS else f"optimizer.{name}.{key}"
        value = contents[file]
        array = value.get("param") if isinstance(value, Mapping) else value
        if isinstance(array, (int, float)):
            lay_number(laying, [name], key, array)
        elif not isinstance(array, StoredArray):
            raise FormatError(f"{file}: it holds no tensor")
        else:
            array = _shaped(array, trained[name], file)
            if name not in shapes:
                shapes[name] = place(name, trained[name]).shape
            if array.shape != shapes[name] and (array.shape or key in MOMENTS):
                raise FormatError(
                    f"{file}: it is of shape {list(array.shape)}, and its parameter of shape "
                    f"{list(shapes[name])}: it is of another model, or damaged"
                )
            laying.array(full, array)


def _shaped(array: StoredArray, shapes: Sequence[Shape], file: str) -> StoredArray:
    """An atom; one of ZeRO 3, which is flat, in the shape of its parameter."""
    if len(shapes) != 1 or len(array.shape) != 1:
        return array
    (shape,) = shapes
    if math.prod(shape) != array.shape[0] or array.stride != (1,):
        raise FormatError(f"{file}: {array.shape[0]} elements are not of shape {list(shape)}")
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return replace(array, shape=shape, stride=stride)


def _lay_settings(laying: Laying, ranks: Ranks, value: object, where: str) -> None:
    """Lay hyperparameters of all groups, and steps where the atoms have none."""
    held = dict(value) if isinstance(value, Mapping) else {}
    groups = held.get("param_groups")
    if not isinstance(groups, (list, tuple)):
        raise FormatError(f"{where}: it has no param_groups")
    inner = held.get("optimizer_state_dict", {"state": {}, "param_groups": groups})
    states, each, owner = of_torch(inner if isinstance(inner, Mapping) else {}, where)
    settings = Settings(laying)
    for stage in range(ranks.stages):
        shapes = ranks.models[0, ranks.of_stage(stage)[0]].shapes
        if len(owner) != len(shapes):
            raise FormatError(f"{where}: it has {len(owner)} groups, and the model {len(shapes)}")
        for group, state, index in zip(shapes, states, owner, strict=True):
            _lay_steps(laying, list(group), state.get(STEP))
            settings.add(list(group), each[index])
    settings.lay()
    for key, item in of_the_optimizer(held).items():
        if item is not None:
            laying.value(f"deepspeed.{key}", item)
    if "fp32_flat_groups" in held:
        laying.left_out.append(f"{_SETTINGS}: flat state of the first rank, which the atoms have")


def _lay_steps(laying: Laying, names: Sequence[str], step: object) -> None:
    if isinstance(step, StoredArray) and step.shape == ():
        laying.scalars([f"optimizer.{name}.{STEP}" for name in names], [step])
    elif isinstance(step, (int, float)):
        lay_number(laying, names, STEP, step)


def _lay_what_has_no_other(
    laying: Laying,
    atoms: Mapping[tuple[str, str], str],
    contents: Mapping[str, Any],
    trained: Mapping[str, Sequence[Shape]],
) -> None:
    """Lay weights that are atoms only, as those of a pipeline's frozen parameters may be."""
    copies = 0
    for (name, key), file in atoms.items():
        if name in trained or key != WEIGHTS:
            continue
        value = contents[file]
        array = value.get("param") if isinstance(value, Mapping) else value
        if f"model.{name}" in laying:
            copies += 1
        elif isinstance(array, StoredArray):
            laying.array(f"model.{name}", array)
    if copies:
        laying.left_out.append(
            f"zero/*/{WEIGHTS}.pt of {copies} buffers, frozen and tied parameters: copies in "
            "float32 of what the model states have"
        )
