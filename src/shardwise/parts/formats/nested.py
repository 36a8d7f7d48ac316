"""Nested states, as torch.save writes them: find their tensors and values, and name them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from shardwise.kernel.errors import FormatError
from shardwise.parts.formats.containers.pickle_values import UnknownObject
from shardwise.parts.formats.foreign import StoredArray, StoredComposite, StoredPart, StoredTensor
from shardwise.parts.formats.optimizers import (
    GROUPS,
    PARAM_NAMES,
    PARAMS,
    STATE,
    Optimizer,
    Path,
    find_optimizers,
)

_NORM_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of torch's normalization modules, which a state_dict lists among the parameters."""
MODULE_PREFIX = "model."
"""Precedes the names of parameters that are at the top level of a state."""
STORED = StoredArray, StoredTensor, StoredComposite
_ARRAYS = (*STORED, StoredPart)

NestedState: TypeAlias = Mapping[Any, Any]


@dataclass(frozen=True, slots=True)
class NamedState:
    """The leaves of a nested state, with the names that `shardwise.save` gives them.

    Attributes:
        tensors, values: the leaves by path, without those that make up param groups.
        names: the name of each leaf.
        in_optimizers: the paths of the leaves that are state of an optimizer's parameters.
        optimizers: the optimizers, by the names of their param groups.
    """

    tensors: Mapping[Path, StoredArray | StoredTensor | StoredComposite]
    values: Mapping[Path, Any]
    names: Mapping[Path, str]
    in_optimizers: Collection[Path]
    optimizers: Mapping[str, Optimizer]


def name_leaves(state: NestedState, values_with_tensors: Collection[Path] = ()) -> NamedState:
    """Name the leaves of a nested state.

    A leaf is named by its path, joined by dots. Optimizer state is named
    `<optimizer>.<parameter>.<key>`. If the parameters of a module are at the top level of the
    state, their names begin with `model.`.

    Args:
        state: the state. Tensors in it are `StoredArray`s and `StoredTensor`s.
        values_with_tensors: the paths of arrays that are placeholders for plain values with tensors
            inside.
    """
    leaves = dict(_iterate_leaves(state, ()))
    arrays = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, STORED)}
    tensors = {path: leaf for path, leaf in arrays.items() if path not in values_with_tensors}
    plain = {path: leaf for path, leaf in leaves.items() if path not in arrays}
    optimizers = find_optimizers(leaves, plain)
    group_paths = {path for optimizer in optimizers for path in optimizer.group_paths}
    names = {
        path: f"{_name_of_optimizer(optimizer)}.{parameter}.{key}"
        for optimizer in optimizers
        for path, (parameter, key) in optimizer.parameter_and_key.items()
    }
    in_optimizers = set(names)
    known = [path for path, value in plain.items() if not isinstance(value, UnknownObject)]
    in_module = _find_module(
        [path for path in tensors if path not in names],
        optimizers,
        all(map(_is_extra_state, [*known, *values_with_tensors])),
    )
    for path in leaves:
        is_in_module = path in in_module or (in_module and _is_extra_state(path))
        name = ".".join(map(str, path))
        names.setdefault(path, f"{MODULE_PREFIX}{name}" if is_in_module else name)
    return NamedState(
        tensors,
        {path: value for path, value in plain.items() if path not in group_paths},
        names,
        in_optimizers,
        {f"{_name_of_optimizer(each)}.{GROUPS}": each for each in optimizers},
    )


def _find_module(
    tensors: Sequence[Path], optimizers: Sequence[Optimizer], has_no_values: bool
) -> set[Path]:
    """Return the paths of a module's tensors, if the module is the top level of the state.

    Args:
        tensors: the paths of the tensors outside of optimizers.
        has_no_values: whether the state has only these tensors.
    """
    top_level: set[Path] = {path for path in tensors if len(path) == 1}
    parameters: set[Path] = {(name,) for optimizer in optimizers for name in optimizer.parameters}
    is_module = not optimizers and has_no_values and len(top_level) == len(tensors)
    return top_level if is_module or top_level & parameters else set()


def _name_of_optimizer(optimizer: Optimizer) -> str:
    """Return the name of an optimizer; `optimizer`, if the optimizer is the whole state."""
    return ".".join(map(str, optimizer.path)) or "optimizer"


def _is_extra_state(path: Path) -> bool:
    return len(path) == 1 and str(path[0]).endswith("_extra_state")


class _Container(dict[Any, Any]):
    """A dict that `nest` makes for a part of a path. A leaf that is a dict has another class."""


def nest(leaves: Iterable[tuple[Path, Any]]) -> dict[Any, Any]:
    """Return the nested state that has these leaves. Dicts with only integers as keys are lists.

    Raises:
        FormatError: two leaves have the same path, or a leaf lies in another one.
    """
    state = _Container()
    for path, leaf in leaves:
        container = state
        for part in path[:-1]:
            inner = container.setdefault(part, _Container())
            if not isinstance(inner, _Container):
                raise _clash_error(path)
            container = inner
        if path[-1] in container:
            raise _clash_error(path)
        container[path[-1]] = leaf
    return {key: _restore_lists(value, key) for key, value in state.items()}


def _clash_error(path: Path) -> FormatError:
    name = ".".join(map(str, path))
    return FormatError(
        f"the name {name[:200]!r} occurs twice when keys are joined by dots: save one of the two "
        "values under another name"
    )


def _restore_lists(value: Any, of_key: object = None) -> Any:
    """Turn each restored dict with only integer keys into a list, unless it contains tensors.

    Param groups are a list even if learning rates are tensors.
    """
    if not isinstance(value, _Container):
        return value
    restored = {key: _restore_lists(item, key) for key, item in value.items()}
    may_be_list = of_key == GROUPS or not contains_arrays(restored)
    is_list = may_be_list and all(type(key) is int for key in restored)
    return [restored[key] for key in sorted(restored)] if is_list else restored


def _iterate_leaves(
    state: NestedState, path: Path, *, divide_all: bool = False
) -> Iterator[tuple[Path, Any]]:
    """Yield the tensors and values in a state with their paths.

    A dict without tensors, for example a scheduler's state_dict, is one value, unless it is in the
    state of an optimizer.

    Args:
        divide_all: divide each dict in the state, even if it has no tensors.
    """
    for key, value in state.items():
        leaf_path = (*path, key if isinstance(key, int) else str(key))
        is_optimizer_state = key == STATE and is_optimizer(state)
        is_divided = (
            divide_all or is_optimizer_state or is_optimizer(value) or contains_arrays(value)
        )
        if is_divided and _has_simple_keys(value):
            yield from _iterate_leaves(value, leaf_path, divide_all=is_optimizer_state)
        else:
            yield leaf_path, value


def _has_simple_keys(value: object) -> bool:
    return isinstance(value, dict) and all(type(key) in (str, int) for key in value)


def contains_arrays(value: object) -> bool:
    """Return whether a value is a tensor, or a dict with tensors."""
    if isinstance(value, dict):
        return any(map(contains_arrays, value.values()))
    return isinstance(value, STORED)


def is_optimizer(value: object) -> bool:
    """Return whether a value is the state_dict of an optimizer."""
    if not isinstance(value, dict) or not isinstance(value.get(STATE, {}), dict):
        return False
    groups = value.get(GROUPS)
    if not isinstance(groups, list):
        return any(isinstance(key, str) and key.startswith(f"{GROUPS}.") for key in value)
    return all(isinstance(each, dict) and isinstance(each.get(PARAMS), list) for each in groups)


def name_parameters(state: NestedState) -> NestedState:
    """Add the names of parameters to the optimizers of a state, if they follow from the shapes.

    `Optimizer.state_dict()` identifies parameters by position. If the state has one module with as
    many parameters, of the same shapes in the same order, the optimizer's parameters get the names
    of the module's parameters. Otherwise their indices are their names. If tensors of the module
    are sharded, these are its parameters, and the others are buffers.
    """
    modules = [value for value in state.values() if _is_module(value)]
    return {
        key: _with_parameter_names(value, modules[0])
        if is_optimizer(value) and len(modules) == 1
        else value
        for key, value in state.items()
    }


def _is_module(value: object) -> bool:
    if not isinstance(value, dict) or not all(type(key) is str for key in value):
        return False
    return any(isinstance(item, _ARRAYS) for item in value.values())


def _with_parameter_names(optimizer: NestedState, module: NestedState) -> NestedState:
    groups, state = optimizer.get(GROUPS), optimizer.get(STATE, {})
    if not isinstance(groups, list) or any(PARAM_NAMES in group for group in groups):
        return optimizer
    parameter_indices = [index for group in groups for index in group[PARAMS]]
    is_sharded = any(isinstance(array, StoredPart) for array in module.values())
    parameters: dict[StoredArray | StoredTensor | StoredComposite | StoredPart, str] = {}
    for name, array in module.items():
        is_buffer = not is_sharded and name.rpartition(".")[2] in _NORM_BUFFERS
        if isinstance(array, StoredPart if is_sharded else STORED) and not is_buffer:
            parameters.setdefault(array, name)
    shapes = [array.shape for array in parameters]
    shapes_fit = len(parameter_indices) == len(shapes) and all(
        _state_fits(state.get(index), shape)
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
    """Return whether a parameter of this shape can have this state.

    Before the first step, the state is None.
    """
    if not isinstance(state, dict):
        return state is None
    shapes = {item.shape for item in state.values() if isinstance(item, _ARRAYS)}
    return shapes <= {shape, ()}
