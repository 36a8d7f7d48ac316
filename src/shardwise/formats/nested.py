"""Nested states as torch.save writes them: their leaves, and the names shardwise gives them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwise.formats.build import Builder
from shardwise.formats.foreign import Foreign, ForeignFile, PieceTable, StoredArray
from shardwise.formats.optimizers import (
    GROUPS,
    PARAM_NAMES,
    PARAMS,
    STATE,
    Optimizer,
    Path,
    find_optimizers,
)
from shardwise.formats.piece_tables import joined, table_of_arrays

_OF_NORMS = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of torch's own modules, which a state_dict lists among the parameters."""

State = Mapping[Any, Any]


@dataclass(frozen=True, slots=True)
class Leaves:
    """Tensors and values of a nested state, by their paths in it.

    Attributes:
        tensors: paths, dtypes and shapes; `table` counts them.
    """

    files: tuple[ForeignFile, ...]
    tensors: Sequence[tuple[Path, str, tuple[int, ...]]]
    table: PieceTable
    values: Mapping[Path, Any]
    left_out: Sequence[str] = ()


def united(*parts: Leaves) -> Leaves:
    """Return the leaves of all parts; their arrays count the files of all of them."""
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
    return Leaves(tuple(files), tensors, joined(*tables), values, left_out)


def foreign_of(leaves: Leaves, format: str) -> Foreign:  # noqa: A002 - the name in `Foreign`
    """Return the manifest of a state, with the names that shardwise would have given it.

    A leaf is named by its path, joined by dots. Optimizer state is named
    `<optimizer>.<parameter>.<key>` where the names of the parameters are known. A module whose
    parameters lie at the top of the state is called `model`.
    """
    paths = [path for path, _, _ in leaves.tensors]
    optimizers = find_optimizers((*paths, *leaves.values), leaves.values)
    names = _Names(optimizers, paths, leaves.values)
    builder = Builder(leaves.files)
    builder.add_table(leaves.table)
    builder.left_out += leaves.left_out
    for path, dtype, shape in leaves.tensors:
        builder.add_tensor(names.of(path), dtype, shape)
    taken = {path for optimizer in optimizers for path in optimizer.group_paths}
    for path, value in leaves.values.items():
        if path in taken:
            continue
        if path[-1] == "step" and names.in_optimizer(path) and _is_number(value):
            builder.add_number(names.of(path), value)
        else:
            builder.add_value(names.of(path), value)
    for optimizer in optimizers:
        name = f"{names.root(optimizer)}.{GROUPS}"
        builder.add_groups(optimizer.groups, name)
        if lost := optimizer.ungrouped():
            builder.left_out.append(
                f"{name}: the hyperparameters of {len(lost)} parameters are missing, such as of "
                f"{lost[0]}: pipeline stages overwrote each other's param groups in the save"
            )
    return builder.build(format)


def combined(one: Foreign, other: Foreign) -> Foreign:
    """Return one manifest of both; all bytes of the first must lie in files."""
    pieces = other.table.pieces
    moved = replace(
        pieces, tensor=pieces.tensor + len(one.tensors), file=pieces.file + len(one.files)
    )
    return replace(
        one,
        files=(*one.files, *other.files),
        tensors=(*one.tensors, *other.tensors),
        table=joined(one.table, replace(other.table, pieces=moved)),
        objects=(*one.objects, *other.objects),
        left_out=(*one.left_out, *other.left_out),
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class _Names:
    """Names the leaves of a state by their paths."""

    def __init__(
        self, optimizers: Sequence[Optimizer], tensors: Sequence[Path], values: Iterable[Path]
    ) -> None:
        self._keys = {
            path: (optimizer, key)
            for optimizer in optimizers
            for path, key in optimizer.keys.items()
        }
        outside = [path for path in tensors if path not in self._keys]
        flat = {path for path in outside if len(path) == 1}
        parameters = {(name,) for optimizer in optimizers for name in optimizer.parameters}
        alone = not optimizers and len(flat) == len(tensors) > 0 and all(map(_is_extra, values))
        self._module = flat if alone or flat & parameters else set()

    def of(self, path: Path) -> str:
        """Return the name of a leaf."""
        found = self._keys.get(path)
        if found is not None:
            optimizer, (parameter, key) = found
            return f"{self.root(optimizer)}.{parameter}.{key}"
        name = ".".join(map(str, path))
        module = path in self._module or (len(self._module) > 0 and _is_extra(path))
        return f"model.{name}" if module else name

    def in_optimizer(self, path: Path) -> bool:
        """Return whether a leaf is part of the optimizer state of a parameter."""
        return path in self._keys

    @staticmethod
    def root(optimizer: Optimizer) -> str:
        """Return the name of an optimizer: `optimizer`, if it is the whole state."""
        return ".".join(map(str, optimizer.root)) or "optimizer"


def _is_extra(path: Path) -> bool:
    return len(path) == 1 and str(path[0]).endswith("_extra_state")


def nested_leaves(
    state: State, files: tuple[ForeignFile, ...], values: Mapping[Path, Any] | None = None
) -> Leaves:
    """Return the tensors and values of a state.

    If an optimizer numbers its parameters, as `state_dict()` does, and the state has one module
    with as many parameters, of the same shapes in the same order, the optimizer's parameters get
    the module's names. Otherwise they keep their numbers.

    Args:
        files: the files that arrays in the state count.
        values: further values by path, which are kept whole.
    """
    arrays: list[tuple[Path, StoredArray]] = []
    found: dict[Path, Any] = {}
    for path, leaf in _leaves(_named(state), ()):
        if isinstance(leaf, StoredArray):
            arrays.append((path, leaf))
        else:
            found[path] = leaf
    tensors = [(path, array.dtype, array.shape) for path, array in arrays]
    table = table_of_arrays([(i, array) for i, (_, array) in enumerate(arrays)])
    return Leaves(files, tensors, table, {**found, **(values or {})})


def _leaves(state: State, path: Path) -> Iterator[tuple[Path, Any]]:
    for key, value in state.items():
        here = (*path, key if isinstance(key, int) else str(key))
        if _is_tree(value):
            yield from _leaves(value, here)
        elif not (key == STATE and value == {} and GROUPS in state):
            yield here, value


def _is_tree(value: object) -> bool:
    """Return whether the items of a dict get names of their own.

    A dict without tensors is one value, as a scheduler's state_dict.
    """
    named = isinstance(value, dict) and all(type(key) in (str, int) for key in value)
    return named and (_is_optimizer(value) or _has_arrays(value))


def _has_arrays(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_has_arrays, value.values()))
    return isinstance(value, StoredArray)


def _is_optimizer(value: object) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get(STATE), dict)
        and isinstance(value.get(GROUPS), list)
        and all(
            isinstance(each, dict) and isinstance(each.get(PARAMS), list) for each in value[GROUPS]
        )
    )


def _named(state: State) -> State:
    """Add names of parameters to the optimizers of a state, where the names are certain."""
    modules = [value for value in state.values() if _is_module(value)]
    return {
        key: _with_names(value, modules[0]) if _is_optimizer(value) and len(modules) == 1 else value
        for key, value in state.items()
    }


def _is_module(value: object) -> bool:
    if not isinstance(value, dict) or not all(type(key) is str for key in value):
        return False
    return any(isinstance(each, StoredArray) for each in value.values())


def _with_names(optimizer: State, module: State) -> State:
    groups = optimizer[GROUPS]
    if any(PARAM_NAMES in group for group in groups):
        return optimizer
    numbers = [number for group in groups for number in group[PARAMS]]
    parameters: dict[StoredArray, str] = {}
    for name, array in module.items():
        if isinstance(array, StoredArray) and name.rpartition(".")[2] not in _OF_NORMS:
            parameters.setdefault(array, name)
    shapes = [array.shape for array in parameters]
    fitting = len(numbers) == len(shapes) and all(
        _fits(optimizer[STATE].get(number), shape)
        for number, shape in zip(numbers, shapes, strict=True)
    )
    # Several groups need not have the parameters in the module's order.
    if not fitting or (len(groups) > 1 and len(set(shapes)) < len(shapes)):
        return optimizer
    names = iter(parameters.values())
    named = [{**group, PARAM_NAMES: [next(names) for _ in group[PARAMS]]} for group in groups]
    return {**optimizer, GROUPS: named}


def _fits(state: object, shape: tuple[int, ...]) -> bool:
    """Return whether a parameter of this shape can have this state; None is no state yet."""
    if not isinstance(state, dict):
        return state is None
    shapes = {each.shape for each in state.values() if isinstance(each, StoredArray)}
    return shapes <= {shape, ()}
