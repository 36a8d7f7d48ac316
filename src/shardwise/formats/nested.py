"""Nested states, as torch.save writes them: find their tensors and values, and name them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwise.formats.containers.pickle_values import UnknownObject
from shardwise.formats.foreign import Foreign, ForeignFile, PieceTable, StoredArray
from shardwise.formats.foreign_builder import Builder
from shardwise.formats.optimizers import (
    GROUPS,
    PARAM_NAMES,
    PARAMS,
    STATE,
    Optimizer,
    Path,
    find_optimizers,
)
from shardwise.formats.piece_tables import join_tables, table_of_arrays

_NORM_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of torch's normalization modules, which a state_dict lists among the parameters."""

NestedState = Mapping[Any, Any]


@dataclass(frozen=True, slots=True)
class NestedLeaves:
    """The tensors and values in a nested state, by their paths.

    Attributes:
        files: the files; `table.pieces.file` is an index into them.
        tensors: paths, dtypes and shapes; `table.pieces.tensor` is an index into them.
        table: the pieces of the tensors.
        values: plain values by path.
        left_out: a line for each thing that was not read, with the reason.
    """

    files: tuple[ForeignFile, ...]
    tensors: Sequence[tuple[Path, str, tuple[int, ...]]]
    table: PieceTable
    values: Mapping[Path, Any]
    left_out: Sequence[str] = ()


def join_leaves(*parts: NestedLeaves) -> NestedLeaves:
    """Return the leaves of several files together; file indices refer to the files of all parts."""
    files: list[ForeignFile] = []
    tensors: list[tuple[Path, str, tuple[int, ...]]] = []
    tables: list[PieceTable] = []
    values: dict[Path, Any] = {}
    left_out: list[str] = []
    for part in parts:
        pieces = replace(part.table.pieces, tensor=part.table.pieces.tensor + len(tensors))
        tables.append(replace(part.table, pieces=pieces))
        tensors += part.tensors
        files += part.files
        values |= part.values
        left_out += part.left_out
    return NestedLeaves(tuple(files), tensors, join_tables(*tables), values, left_out)


MODULE_PREFIX = "model."
"""Precedes the names of parameters that are at the top level of a state."""


def build_foreign(leaves: NestedLeaves, format: str) -> Foreign:  # noqa: A002 - as in `Foreign`
    """Return the description of a state, with the names that `shardwise.save` would give.

    A leaf is named by its path, joined by dots. Optimizer state is named
    `<optimizer>.<parameter>.<key>` where the names of the parameters are known. If the parameters
    of a module are at the top level of the state, their names begin with `model.`.
    """
    paths = [path for path, _, _ in leaves.tensors]
    optimizers = find_optimizers((*paths, *leaves.values), leaves.values)
    known = [path for path, v in leaves.values.items() if not isinstance(v, UnknownObject)]
    names = LeafNames(optimizers, paths, known)
    builder = Builder(leaves.files)
    builder.add_table(leaves.table)
    builder.left_out += leaves.left_out
    for path, dtype, shape in leaves.tensors:
        builder.add_tensor(names.name_of(path), dtype, shape)
    group_paths = {path for optimizer in optimizers for path in optimizer.group_paths}
    for path, value in leaves.values.items():
        if path in group_paths:
            continue
        if path[-1] == "step" and names.is_in_optimizer(path) and _is_number(value):
            builder.add_number(names.name_of(path), value)
        else:
            builder.add_value(names.name_of(path), value)
    for optimizer in optimizers:
        name = f"{names.optimizer_name(optimizer)}.{GROUPS}"
        builder.add_groups(optimizer.groups, name)
        if ungrouped := optimizer.find_ungrouped_parameters():
            builder.left_out.append(
                f"{name}: the hyperparameters of {len(ungrouped)} parameters are missing, for "
                f"example those of {ungrouped[0]}: pipeline stages overwrote each other's param "
                "groups in the save"
            )
    return builder.build(format)


def join_foreign(first: Foreign, second: Foreign) -> Foreign:
    """Return one description of both. The first must have no file with `content`."""
    pieces = second.table.pieces
    shifted_pieces = replace(
        pieces, tensor=pieces.tensor + len(first.tensors), file=pieces.file + len(first.files)
    )
    return replace(
        first,
        files=(*first.files, *second.files),
        tensors=(*first.tensors, *second.tensors),
        table=join_tables(first.table, replace(second.table, pieces=shifted_pieces)),
        objects=(*first.objects, *second.objects),
        left_out=(*first.left_out, *second.left_out),
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class LeafNames:
    """Names the leaves of a state by their paths."""

    def __init__(
        self, optimizers: Sequence[Optimizer], tensors: Sequence[Path], values: Iterable[Path]
    ) -> None:
        self._optimizer_and_key = {
            path: (optimizer, key)
            for optimizer in optimizers
            for path, key in optimizer.parameter_and_key.items()
        }
        paths_outside_optimizers = [path for path in tensors if path not in self._optimizer_and_key]
        top_level_paths = {path for path in paths_outside_optimizers if len(path) == 1}
        parameter_paths = {(name,) for optimizer in optimizers for name in optimizer.parameters}
        is_module_state = (
            not optimizers
            and len(top_level_paths) == len(tensors) > 0
            and all(map(_is_extra_state, values))
        )
        self._module_paths = (
            top_level_paths if is_module_state or top_level_paths & parameter_paths else set()
        )

    def name_of(self, path: Path) -> str:
        """Return the name of a leaf."""
        found = self._optimizer_and_key.get(path)
        if found is not None:
            optimizer, (parameter, key) = found
            return f"{self.optimizer_name(optimizer)}.{parameter}.{key}"
        name = ".".join(map(str, path))
        in_module = path in self._module_paths or (
            len(self._module_paths) > 0 and _is_extra_state(path)
        )
        return f"{MODULE_PREFIX}{name}" if in_module else name

    def is_in_optimizer(self, path: Path) -> bool:
        """Return whether a leaf is part of the optimizer state of a parameter."""
        return path in self._optimizer_and_key

    @staticmethod
    def optimizer_name(optimizer: Optimizer) -> str:
        """Return the name of an optimizer; `optimizer`, if the optimizer is the whole state."""
        return ".".join(map(str, optimizer.path)) or "optimizer"


def _is_extra_state(path: Path) -> bool:
    return len(path) == 1 and str(path[0]).endswith("_extra_state")


def find_leaves(
    state: NestedState, files: tuple[ForeignFile, ...], values: Mapping[Path, Any] | None = None
) -> NestedLeaves:
    """Return the tensors and values in a state.

    `Optimizer.state_dict()` identifies parameters by position. If the state has one module with as
    many parameters, of the same shapes in the same order, the optimizer's parameters get the names
    of the module's parameters. Otherwise their indices are their names.

    Args:
        state: the state, as `read_torch_file` returns it.
        files: the files; `StoredArray.file` is an index into them.
        values: further values by path, which are kept whole.
    """
    arrays: list[tuple[Path, StoredArray]] = []
    values_by_path: dict[Path, Any] = {}
    for path, leaf in _iterate_leaves(_name_parameters(state), ()):
        if isinstance(leaf, StoredArray):
            arrays.append((path, leaf))
        else:
            values_by_path[path] = leaf
    tensors = [(path, array.dtype, array.shape) for path, array in arrays]
    table = table_of_arrays(
        [(i, array) for i, (_, array) in enumerate(arrays)],
        lambda i: ".".join(map(str, arrays[i][0])),
    )
    return NestedLeaves(files, tensors, table, {**values_by_path, **(values or {})})


def _iterate_leaves(state: NestedState, path: Path) -> Iterator[tuple[Path, Any]]:
    for key, value in state.items():
        leaf_path = (*path, key if isinstance(key, int) else str(key))
        if _is_named_dict(value):
            yield from _iterate_leaves(value, leaf_path)
        elif not (key == STATE and value == {} and GROUPS in state):
            yield leaf_path, value


def _is_named_dict(value: object) -> bool:
    """Return whether each item of a dict gets its own name.

    A dict without tensors, for example a scheduler's state_dict, is one value.
    """
    has_simple_keys = isinstance(value, dict) and all(type(key) in (str, int) for key in value)
    return has_simple_keys and (_is_optimizer(value) or _contains_arrays(value))


def _contains_arrays(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_contains_arrays, value.values()))
    return isinstance(value, StoredArray)


def _is_optimizer(value: object) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get(STATE), dict)
        and isinstance(value.get(GROUPS), list)
        and all(
            isinstance(item, dict) and isinstance(item.get(PARAMS), list) for item in value[GROUPS]
        )
    )


def _name_parameters(state: NestedState) -> NestedState:
    """Add the names of parameters to the optimizers of a state, if they follow from the shapes."""
    modules = [value for value in state.values() if _is_module(value)]
    return {
        key: _with_parameter_names(value, modules[0])
        if _is_optimizer(value) and len(modules) == 1
        else value
        for key, value in state.items()
    }


def _is_module(value: object) -> bool:
    if not isinstance(value, dict) or not all(type(key) is str for key in value):
        return False
    return any(isinstance(item, StoredArray) for item in value.values())


def _with_parameter_names(optimizer: NestedState, module: NestedState) -> NestedState:
    groups = optimizer[GROUPS]
    if any(PARAM_NAMES in group for group in groups):
        return optimizer
    parameter_indices = [index for group in groups for index in group[PARAMS]]
    parameters: dict[StoredArray, str] = {}
    for name, array in module.items():
        if isinstance(array, StoredArray) and name.rpartition(".")[2] not in _NORM_BUFFERS:
            parameters.setdefault(array, name)
    shapes = [array.shape for array in parameters]
    shapes_fit = len(parameter_indices) == len(shapes) and all(
        _state_fits(optimizer[STATE].get(index), shape)
        for index, shape in zip(parameter_indices, shapes, strict=True)
    )
    # With several groups, the parameters may be in another order than in the module.
    if not shapes_fit or (len(groups) > 1 and len(set(shapes)) < len(shapes)):
        return optimizer
    names = iter(parameters.values())
    named_groups = [
        {**group, PARAM_NAMES: [next(names) for _ in group[PARAMS]]} for group in groups
    ]
    return {**optimizer, GROUPS: named_groups}


def _state_fits(state: object, shape: tuple[int, ...]) -> bool:
    """Return whether a parameter of this shape can have this state: None before its first step."""
    if not isinstance(state, dict):
        return state is None
    shapes = {item.shape for item in state.values() if isinstance(item, StoredArray)}
    return shapes <= {shape, ()}
