"""The param groups of an optimizer: their state and hyperparameters in the form of checkpoints.

In checkpoints, nested state has dotted keys, and step counts are tensors, as in torch's optimizers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from enum import Enum
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.kernel.errors import StateError
from shardwise.kernel.state.local_state import LocalState, TensorLeaf
from shardwise.kernel.state.name_lookup import SavedNames, Selection
from shardwise.kernel.state.parameters import LOCAL, Parameter
from shardwise.kernel.state.tensors import SHARD

GROUPS = "param_groups"
STEP = "step"
NOT_OF_PARAMETERS = SHARED, ENTRIES, FORMATS, ELSEWHERE = (
    *("shared_state", "entries", "memory_formats", "state_elsewhere"),
)
"""The names below an optimizer's for state that belongs to no single parameter, for what its
`state_dict` returns besides state and param groups, for the strides of state, and for parameters
that have no state on some of the ranks that hold them."""
OTHER_KEYS = "other_keys"
"""The key in checkpoints under which a dict has the state whose keys are not plain names."""
CLASS = "__class__"
"""The key in checkpoints that says of which class an object in the state is."""
NOT_HYPERPARAMETERS = ("params", "param_names", "is_expert_parallel")
"""Keys of a param group that are not hyperparameters."""


class Group:
    """Reads and sets a param group of an optimizer, and the state of its parameters.

    Args:
        optimizer: the optimizer.
        settings: the group itself, an item of `optimizer.param_groups`.
        parameters: its parameters.
        states: the state of each parameter. Default: the state of the optimizer.
        owned: the ids of the parameters that have state here. Default: all may have.

    Attributes:
        names: the names of all original parameters, each of them once.
        states: the state of each parameter.
        with_state: those of the parameters that may have state here.
        steps_are_in: where the optimizer counts its steps. torch's optimizers have a tensor for
            each parameter, DeepSpeed's an integer for each parameter, and those of Apex a number
            for each param group.
        other_keys: the keys of the settings that are not hyperparameters.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        settings: MutableMapping[str, Any],
        parameters: Sequence[Parameter],
        states: MutableMapping[torch.Tensor, Any] | None = None,
        owned: Collection[int] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.settings = settings
        self.parameters = parameters
        self.states = optimizer.state if states is None else states
        self.with_state = [p for p in parameters if owned is None or id(p.tensor) in owned]
        names: dict[str, None] = {}
        for parameter in parameters:
            names.update(dict.fromkeys(parameter.names))
        self.names = tuple(names)
        self.other_keys: Collection[str] = NOT_HYPERPARAMETERS
        self.steps_are_in = steps_are_in(optimizer)
        if self.steps_are_in == "groups":
            self.other_keys = (*NOT_HYPERPARAMETERS, STEP)

    def read_state(self, parameter: torch.Tensor) -> dict[str, object]:
        """Return the state of a parameter by dotted keys, with the step count as a tensor."""
        found = self.states.get(parameter, {})
        if not isinstance(found, Mapping):
            raise StateError(
                f"the state of a parameter of shape {list(parameter.shape)} in the "
                f"{type(self.optimizer).__name__} is a {type(found).__name__}: expected a dict, as "
                "in torch's optimizers"
            )
        state = dict(flatten_keys(_with_plain_keys(found), attributes_of=self._attributes_of))
        if state and self.steps_are_in != "tensors":
            counters = state if self.steps_are_in == "integers" else self.settings
            count = counters.get(STEP)
            if isinstance(count, (int, torch.Tensor)):
                state[STEP] = torch.tensor(float(count), device="cpu")
        return state

    def write_state(self, parameter: torch.Tensor, state: Mapping[str, object]) -> None:
        """Set the state of a parameter, with the step count in the form that the optimizer uses."""
        count = state.get(STEP)
        if isinstance(count, torch.Tensor) and self.steps_are_in == "integers":
            state = {**state, STEP: int(count)}
        elif isinstance(count, torch.Tensor) and self.steps_are_in == "groups":
            state = {key: value for key, value in state.items() if key != STEP}
            current = self.settings.get(STEP)
            self.settings[STEP] = (
                current.copy_(count) if isinstance(current, torch.Tensor) else int(count)
            )
        nested = {key: self._with_objects(value) for key, value in nest_keys(state).items()}
        others = nested.pop(OTHER_KEYS, None)
        self.states[parameter] = nested | others if isinstance(others, dict) else nested

    def find_object_problems(self, name: str, saved: SavedNames) -> Iterator[str]:
        """Yield the reasons why objects in the saved state of a parameter cannot be made."""
        for key in saved.names_below(name):
            if key.endswith(f".{CLASS}") and saved.has_object(f"{name}.{key}"):
                cls = saved.object(f"{name}.{key}")
                if cls not in self._classes:
                    yield (
                        f"{name}.{key}: {str(cls)[:60]!r} is no simple class that the module of "
                        f"{type(self.optimizer).__name__} uses, so the object cannot be made: use "
                        "the optimizer that saved it, or leave the optimizer out with skip="
                    )

    def counts(self, prefix: str, key: str, parameter: Parameter, saved: SavedNames) -> bool:
        """Return whether the saved state of this key is a scalar for parameters that are none."""
        for each in (parameter, *self.parameters):
            if each.name_and_shape[1] != ():
                entry = saved.tensor(f"{prefix}.{each.representative_name}.{key}")
                return entry is not None and entry.shape == ()
        return False

    @cached_property
    def _classes(self) -> dict[str, type]:
        """The classes of objects that can be in the state, by their names.

        They are those that the modules of the optimizer's classes use, and that are defined in the
        same packages. A checkpoint can only choose among them: nothing is imported for it. An
        object is made without its constructor, so its attributes must be all that it has.
        """
        modules = {cls.__module__ for cls in type(self.optimizer).__mro__}
        packages = {each.partition(".")[0] for each in modules} - {"torch", "builtins", "typing"}
        found: dict[str, type] = {}
        for module in map(sys.modules.get, modules):
            is_known = module is not None and module.__name__.partition(".")[0] in packages
            for cls in [*vars(module).values()] if is_known else ():
                is_class = isinstance(cls, type) and cls.__module__.partition(".")[0] in packages
                if is_class and _has_only_attributes(cls):
                    found[f"{cls.__module__}:{cls.__qualname__}"] = cls
        return found

    def _attributes_of(self, value: object) -> Mapping[str, object] | None:
        cls = type(value)
        name = f"{cls.__module__}:{cls.__qualname__}"
        if not hasattr(value, "__dict__") or self._classes.get(name) is not cls:
            return None
        return {CLASS: name, **vars(value)}

    def _with_objects(self, value: object) -> object:
        """Return a nested dict with objects in place of the dicts that describe them."""
        if not isinstance(value, dict):
            return value
        converted = {key: self._with_objects(each) for key, each in value.items()}
        if CLASS not in converted:
            return converted
        made: object = object.__new__(self._classes[str(converted.pop(CLASS))])
        vars(made).update(converted)
        return made


def _has_only_attributes(cls: type) -> bool:
    """Return whether an object of a class has nothing but attributes, and no code to make it."""
    if issubclass(cls, (torch.Tensor, nn.Module, Optimizer, BaseException, type, Enum)):
        return False
    if any(vars(each).get("__slots__") for each in cls.__mro__) or hasattr(cls, "__del__"):
        return False
    special = ("__new__", "__reduce__", "__reduce_ex__", "__getstate__", "__setattr__")
    is_plain = all(getattr(cls, key, None) is getattr(object, key, None) for key in special)
    return is_plain and not hasattr(cls, "__setstate__")


def steps_are_in(optimizer: Optimizer) -> Literal["tensors", "integers", "groups"]:
    """Return where an optimizer counts its steps; see `Group`."""
    module = type(optimizer).__module__
    if module.startswith(("deepspeed.ops.", "deepspeed.runtime.zero.muon.")):
        return "integers"
    return "groups" if module.startswith(("transformer_engine.", "apex.")) else "tensors"


def hyperparameters_of(
    settings: Mapping[str, Any], other_keys: Collection[str] = NOT_HYPERPARAMETERS
) -> dict[str, Any]:
    """Return the hyperparameters among the settings of a param group."""
    hyperparameters = dict(settings)
    for key in other_keys:
        hyperparameters.pop(key, None)
    return hyperparameters


def flatten_keys(
    tree: Mapping[str, object],
    prefix: str = "",
    attributes_of: Callable[[object], Mapping[str, object] | None] = lambda value: None,
) -> Iterator[tuple[str, object]]:
    """Yield the values of nested dicts with dotted keys.

    A nested dict with other keys than plain names is one value.

    Args:
        attributes_of: returns the attributes of an object, which become a nested dict; None for
            other values.
    """
    for key, value in tree.items():
        name = f"{prefix}{key}"
        described = None if isinstance(value, (torch.Tensor, int)) else attributes_of(value)
        if described is not None:
            yield from flatten_keys(described, f"{name}.", attributes_of)
        elif (
            isinstance(value, Mapping)
            and value
            and name != OTHER_KEYS
            and all(map(_is_plain, value))
        ):
            yield from flatten_keys(value, f"{name}.", attributes_of)
        else:
            yield name, value


def _is_plain(key: object) -> bool:
    return type(key) is str and key not in ("", CLASS) and "." not in key


def _with_plain_keys(state: Mapping[Any, object]) -> Mapping[str, object]:
    """Return a parameter's state, with one dict for all state whose keys are not plain names."""
    others = {k: v for k, v in state.items() if not _is_plain(k) or k == OTHER_KEYS}
    if not others:
        return state
    plain = {key: value for key, value in state.items() if key not in others}
    return plain | {OTHER_KEYS: others}


def nest_keys(leaves: Mapping[str, object]) -> dict[str, object]:
    """Return nested dicts, given values with dotted keys."""
    tree: dict[str, object] = {}
    for name, value in leaves.items():
        *path, last = name.split(".")
        parent = tree
        for part in path:
            child = parent.setdefault(part, {})
            if not isinstance(child, dict):
                child = parent[part] = {}
            parent = child
        parent[last] = value
    return tree


def orders_of(value: object) -> dict[str, tuple[int, ...]]:
    """Return the saved orders of dimensions by the key of the state. The input is not trusted."""
    found = value.items() if isinstance(value, dict) else ()
    return {key: tuple(order) for key, order in found if isinstance(order, list)}


def in_order(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return a new tensor, or one of the same shape whose dimensions have this order in memory."""
    if type(tensor) is not torch.Tensor or sorted(order) != [*range(tensor.dim())]:
        return tensor
    memory = tensor.new_zeros([tensor.shape[dim] for dim in order])
    return memory.permute([order.index(dim) for dim in range(tensor.dim())])


def claim_shards(
    local_state: LocalState,
    prefix: str,
    parameter: Parameter,
    saved: SavedNames,
    selection: Selection,
) -> None:
    """Claim the state that was saved for each shard, which other ranks load.

    If this rank's shard is not among the saved ones, add a problem.
    """
    shards: dict[str, list[str]] = {}
    for key in saved.names_below(prefix):
        if key.endswith(LOCAL):
            local_state.unselected.append(f"{prefix}.{key}")
        elif SHARD in key:
            base, _, shard = key.partition(SHARD)
            shards.setdefault(base, []).append(SHARD + shard)
    for base, found in () if parameter.is_empty else shards.items():
        name, own = f"{prefix}.{base}", parameter.shard
        local_state.unselected += [name + shard for shard in found if shard != own]
        if own not in found and selection.selects(name + found[0]):
            listed = ", ".join(each.removeprefix(SHARD) for each in found[:8])
            local_state.problems.append(
                f"{name}: the optimizer keeps this state for each shard ({listed}), and the "
                f"checkpoint has none for {own.removeprefix(SHARD) or 'the whole parameter'}: "
                "load with the sharding of the save, or leave it out with "
                f"skip=[{name + '@*'!r}]"
            )


def as_saved(leaf: TensorLeaf, saved: SavedNames) -> TensorLeaf:
    """Return the leaf under the name of its shard, if it was saved so."""
    entry = saved.tensor(leaf.name)
    if leaf.of_shard is None or (entry is not None and entry.shape == leaf.shape):
        return leaf
    of_shard = leaf.of_shard()
    if entry is not None:  # one element that ranks shared
        return replace(of_shard, name=leaf.name) if entry.shape == of_shard.shape else leaf
    return leaf if saved.tensor(of_shard.name) is None else of_shard
