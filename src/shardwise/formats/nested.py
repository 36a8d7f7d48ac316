"""A nested state as torch.save has it: taken apart, and its optimizers given names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.formats.build import Leaves
from shardwise.formats.foreign import ForeignFile, StoredArray
from shardwise.formats.optimizers import GROUPS, PARAM_NAMES, PARAMS, STATE, Path
from shardwise.formats.piece_tables import lay

_OF_NORMS = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of torch's own modules that lie in a state_dict as parameters do."""

State = Mapping[Any, Any]


def nested_leaves(
    state: State, files: tuple[ForeignFile, ...], beside: Mapping[Path, Any] | None = None
) -> Leaves:
    """The tensors and values of a state.

    An optimizer that numbers its parameters, as `state_dict()` does, is given the names that a
    module beside it has, if both have as many, of the same shapes and in the same order. Else it
    keeps the numbers.

    Args:
        files: which the arrays in it count.
        beside: values that are not taken apart, by their paths.
    """
    arrays: list[tuple[Path, StoredArray]] = []
    values: dict[Path, Any] = {}
    for path, leaf in _leaves(_named(state), ()):
        if isinstance(leaf, StoredArray):
            arrays.append((path, leaf))
        else:
            values[path] = leaf
    tensors = [(path, array.dtype, array.shape) for path, array in arrays]
    laid = lay([(i, array) for i, (_, array) in enumerate(arrays)])
    return Leaves(files, tensors, laid, {**values, **(beside or {})})


def _leaves(state: State, path: Path) -> Iterator[tuple[Path, Any]]:
    for key, value in state.items():
        here = (*path, key if isinstance(key, int) else str(key))
        if _is_tree(value):
            yield from _leaves(value, here)
        elif not (key == STATE and value == {} and GROUPS in state):
            yield here, value


def _is_tree(value: object) -> bool:
    """Whether what is in a dict has names of its own.

    One without tensors is one value, as the state_dict of a scheduler is wanted.
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
    """The same, with names for the parameters that optimizers in it number, where they are sure."""
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
    # In several groups, parameters need not be in the module's order.
    if not fitting or (len(groups) > 1 and len(set(shapes)) < len(shapes)):
        return optimizer
    names = iter(parameters.values())
    named = [{**group, PARAM_NAMES: [next(names) for _ in group[PARAMS]]} for group in groups]
    return {**optimizer, GROUPS: named}


def _fits(state: object, shape: tuple[int, ...]) -> bool:
    """Whether the state of a parameter may be of one of this shape; there may be none yet."""
    if not isinstance(state, dict):
        return state is None
    shapes = {each.shape for each in state.values() if isinstance(each, StoredArray)}
    return shapes <= {shape, ()}
