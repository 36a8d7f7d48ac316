"""What an optimizer holds, as its `state_dict` says: also in wrappers, hooks and overrides.

Most optimizers of torch hold their state in `state` and `param_groups`, and are read and set there.
An optimizer that changes what `state_dict` returns, or what `load_state_dict` does, is read and set
by these methods. A wrapper has the state of the optimizers inside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.kernel.errors import StateError, user_code
from shardwise.kernel.state.tensors import is_instance

STATE, GROUPS, PARAMS = "state", "param_groups", "params"
_DEPTH = 4
"""How deep an inner optimizer may lie in the attributes of another one."""
_HOOKS = tuple(
    f"_optimizer_{method}_{when}_hooks"
    for method in ("state_dict", "load_state_dict")
    for when in ("pre", "post")
)
_States = MutableMapping[torch.Tensor, Any]


class View:
    """An optimizer that holds its state in `state` and `param_groups`.

    Attributes:
        optimizer: the optimizer.
        states: the state of each parameter.
        groups: the settings of the param groups, with their parameters.
        shared: state that belongs to no single parameter, by its keys.
        entries: what the optimizer's `state_dict` returns besides state and param groups. None if
            it can have no such entries.
        owned: the ids of the parameters that have state here. None if all of them may have.
    """

    def __init__(self, name: str, optimizer: Optimizer) -> None:
        self.name = name
        self.optimizer = optimizer
        self.states: _States = optimizer.state
        self.groups = groups_of(optimizer)
        self.entries: dict[str, object] | None = None
        self.owned: set[int] | None = None
        self.shared: dict[Any, Any]
        self.shared = {k: v for k, v in self.states.items() if not isinstance(k, torch.Tensor)}

    def refuse_stray_state(self) -> None:
        """Refuse state of tensors that are in no param group, as torch's `state_dict` does.

        Raises:
            StateError: there is such state.
        """
        known = set(map(id, _parameters_of(self.groups)))
        for key, value in self.optimizer.state.items():
            if isinstance(key, torch.Tensor) and value and id(key) not in known:
                raise StateError(
                    f"{self.name}: the optimizer has state for a tensor of shape "
                    f"{list(key.shape)} that is in none of its param groups, so the state has no "
                    "name: delete the entry from optimizer.state, or add the tensor to a group"
                )

    def set_shared(self, shared: object) -> None:
        """Replace the state that belongs to no single parameter."""
        self.shared = _mapping(f"{self.name}.shared_state", shared)
        for key in [key for key in self.optimizer.state if not isinstance(key, torch.Tensor)]:
            del self.optimizer.state[key]
        self.optimizer.state.update(self.shared)

    def set_entries(self, entries: object) -> None:
        """Replace the further entries of the state dict, before `finish` passes them on."""
        self.entries = _mapping(f"{self.name}.entries", entries)

    def finish(self) -> None:
        """Give the optimizer what was set, after a load has filled all tensors."""


class _DictView(View):
    """An optimizer that is read by its `state_dict`, and set by its `load_state_dict`."""

    def __init__(self, name: str, optimizer: Optimizer) -> None:
        self.name = name
        self.optimizer = optimizer
        self.owned = None
        with user_code(name, "state_dict()"):
            found = optimizer.state_dict()
        self._found = _mapping(name, found)
        self._ids: dict[torch.Tensor, object] = {}
        self.is_standard = self._find_ids()
        entries = dict(self._found)
        self.states, self.groups, self.shared = {}, [], {}
        if self.is_standard:
            states = entries.pop(STATE)
            for group, saved in zip(groups_of(optimizer), entries.pop(GROUPS), strict=True):
                self.groups.append({**saved, PARAMS: group[PARAMS]})
            self.states = {
                tensor: states[key] for tensor, key in self._ids.items() if key in states
            }
            ids = set(self._ids.values())
            self.shared = {key: value for key, value in states.items() if key not in ids}
        self.entries = entries

    def _find_ids(self) -> bool:
        """Find the keys of the parameters, and return whether the dict is as that of torch."""
        saved, groups = self._found.get(GROUPS), groups_of(self.optimizer)
        if not isinstance(self._found.get(STATE), Mapping) or not isinstance(saved, list):
            return False
        if len(saved) != len(groups) or not all(isinstance(each, Mapping) for each in saved):
            return False
        for group, each in zip(groups, saved, strict=True):
            keys = each.get(PARAMS)
            if not isinstance(keys, list) or len(keys) != len(group[PARAMS]):
                return False
            self._ids |= zip(group[PARAMS], keys, strict=True)
        return True

    def refuse_stray_state(self) -> None:
        """Do nothing: `state_dict` decides what to return."""

    def set_shared(self, shared: object) -> None:
        """Replace the state that belongs to no single parameter, before `finish` passes it on."""
        self.shared = _mapping(f"{self.name}.shared_state", shared)

    def finish(self) -> None:
        """Pass everything to `load_state_dict`. State in use keeps its dtype and device.

        torch's `load_state_dict` converts state to the dtype of its parameter.
        """
        new: dict[str, Any] = {**self._found, **(self.entries or {})}
        if self.is_standard:
            own = {key: self.states[t] for t, key in self._ids.items() if self.states.get(t)}
            new[STATE] = {**own, **self.shared}
            new[GROUPS] = [
                {**group, PARAMS: saved[PARAMS]}
                for group, saved in zip(self.groups, self._found[GROUPS], strict=True)
            ]
        connected = [self.optimizer, *inner_optimizers(self.optimizer)]
        before = [[*groups_of(each)] for each in connected]
        with user_code(self.name, "load_state_dict()"):
            self.optimizer.load_state_dict(new)
        _share_groups_again(connected, before)
        live: _States = _state_of(self.optimizer) or {}
        pairs = [(own, live[t]) for t, own in self.states.items() if live.get(t)]
        if any(_is_converted(own, current) for own, current in pairs):
            again = _DictView(self.name, self.optimizer)
            for tensor, own in self.states.items():
                if live.get(tensor):
                    live[tensor] = _unconverted(own, live[tensor], again.states.get(tensor))


class _JointStates(dict[torch.Tensor, Any]):
    """The state of a wrapper and of the optimizers inside it, by parameter.

    The wrapper's own state of a parameter lies under a key of its own.

    Args:
        own: the wrapper's own state.
        inner: the state inside, by the id of the parameter.
        key: the key of the wrapper's own state.
    """

    def __init__(self, own: _States, inner: Mapping[int, _States], key: str) -> None:
        self._own, self._inner, self._key = own, inner, key

    def get(self, tensor: torch.Tensor, default: Any = None) -> Any:
        own, inner = self._own.get(tensor), self._of(tensor).get(tensor)
        return {**(inner or {}), **({self._key: own} if own else {})} or default

    def __setitem__(self, tensor: torch.Tensor, state: Any) -> None:
        inner = dict(state)
        own = inner.pop(self._key, None)
        for states, value in ((self._own, own), (self._of(tensor), inner)):
            if value:
                states[tensor] = value
            else:
                states.pop(tensor, None)

    def pop(self, tensor: torch.Tensor, *default: Any) -> Any:
        self._own.pop(tensor, None)
        return self._of(tensor).pop(tensor, None)

    def _of(self, tensor: torch.Tensor) -> _States:
        return self._inner.get(id(tensor), {})


class _WrapperView(View):
    """A wrapper, and the optimizers inside it, whose state the wrapper's `state_dict` leaves out.

    Args:
        own: the view of the wrapper.
        inner: the views of the optimizers inside it.
        wins: whether the wrapper's settings replace those inside, as in ZeRO. Otherwise they must
            be equal.
    """

    def __init__(self, own: View, inner: Sequence[View], *, wins: bool) -> None:
        self.name, self.optimizer, self.groups = own.name, own.optimizer, own.groups
        self.shared, self.entries, self._views = own.shared, own.entries, (*inner, own)
        self._own, self._inner_groups = own, [group for view in inner for group in view.groups]
        states = {id(t): view.states for view in inner for t in _parameters_of(view.groups)}
        self.states = inner[0].states
        self.owned = set(states) if wins else None
        if not wins:
            self.states = _JointStates(own.states, states, type(own.optimizer).__name__)
        for view in inner:
            if view.shared or view.entries:
                raise StateError(
                    f"{self.name}: the {type(view.optimizer).__name__} inside this "
                    f"{type(own.optimizer).__name__} has state that belongs to no parameter, which "
                    f"the state_dict() of the {type(own.optimizer).__name__} leaves out: put the "
                    "inner optimizer into the state instead, or override state_dict()"
                )
        if not wins:
            self._refuse_other_settings()

    def refuse_stray_state(self) -> None:
        """Refuse state of tensors that are in no param group."""
        for view in self._views:
            view.refuse_stray_state()

    def set_shared(self, shared: object) -> None:
        """Replace the wrapper's state that belongs to no single parameter."""
        self._own.set_shared(shared)

    def set_entries(self, entries: object) -> None:
        """Replace the further entries of the wrapper's state dict."""
        self._own.set_entries(entries)

    def finish(self) -> None:
        """Give all optimizers what was set, and the inner ones the settings of the wrapper."""
        for inner, outer in self._pairs():
            inner.update({key: value for key, value in outer.items() if key != PARAMS})
        for view in self._views:
            view.finish()

    def _refuse_other_settings(self) -> None:
        for inner, outer in self._pairs():
            keys = [key for key in inner.keys() & outer.keys() if key != PARAMS]
            different = sorted(key for key in keys if not _equal(inner[key], outer[key]))
            if different:
                raise StateError(
                    f"{self.name}: this {type(self.optimizer).__name__} and the optimizer inside "
                    f"it have different {', '.join(map(str, different))}: give both the same param "
                    "groups, or put the inner optimizer into the state instead"
                )

    def _pairs(self) -> Iterator[tuple[MutableMapping[str, Any], Mapping[str, Any]]]:
        """Yield the groups inside, each with the group of the wrapper for the same parameters."""
        outer_of = {id(t): group for group in self.groups for t in group[PARAMS]}
        for position, inner in enumerate(self._inner_groups):
            outer = next((outer_of[id(t)] for t in inner[PARAMS] if id(t) in outer_of), None)
            if outer is None and len(self._inner_groups) == len(self.groups):
                outer = self.groups[position]
            if outer is not None and outer is not inner:
                yield inner, outer


def view_of(name: str, optimizer: Optimizer, *, simple: bool = False) -> View:
    """Return the view of an optimizer that is in a state.

    Args:
        name: the name of the optimizer.
        optimizer: the optimizer.
        simple: whether to look at `state` and `param_groups` only.

    Raises:
        StateError: the optimizer has an optimizer inside whose state cannot be saved.
    """
    if simple:
        return View(name, optimizer)
    inner = inner_optimizers(optimizer)
    if is_instance(optimizer, "torch.distributed.optim", "ZeroRedundancyOptimizer"):
        views = [view_of(name, each) for each in inner]
        return (
            _WrapperView(_ZeroView(name, optimizer), views, wins=True)
            if views
            else (View(name, optimizer))
        )
    if is_instance(optimizer, "torch.distributed.optim", "_NamedOptimizer") and inner:
        return view_of(name, inner[0])  # whose state cannot be loaded before the first step
    own = _DictView(name, optimizer) if has_own_methods(optimizer) else View(name, optimizer)
    hidden = [each for each in inner if _state_of(each) is not _state_of(optimizer)]
    if _overrides(optimizer, "state_dict"):
        _refuse_left_out(own, hidden)
    elif hidden:
        return _WrapperView(own, [view_of(name, each) for each in hidden], wins=False)
    return own


class _ZeroView(View):
    """ZeRO's own part: the param groups. The optimizer inside has the state."""

    def __init__(self, name: str, optimizer: Optimizer) -> None:
        super().__init__(name, optimizer)
        self.shared = {}

    def refuse_stray_state(self) -> None:
        """Do nothing: a load with torch leaves state of other ranks behind, which is unused."""


def _share_groups_again(
    optimizers: Sequence[Optimizer], before: Sequence[Sequence[dict[str, Any]]]
) -> None:
    """Let optimizers share param groups as before: `load_state_dict` gives one of them new ones.

    Otherwise, a scheduler of a wrapper would change groups that are not used any more.
    """
    replaced: dict[int, dict[str, Any]] = {}
    for optimizer, old_groups in zip(optimizers, before, strict=True):
        for old, new in zip(old_groups, groups_of(optimizer), strict=False):
            if old is not new:
                replaced[id(old)] = new
    for optimizer in optimizers:
        groups = groups_of(optimizer)
        for position, group in enumerate(groups):
            groups[position] = replaced.get(id(group), group)


def steps_of(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers whose hooks run at each step: those inside, if a wrapper has no hooks.

    Some wrappers do not call the constructor of `Optimizer`, which creates the hooks.
    """
    if "_optimizer_step_pre_hooks" in vars(optimizer):
        return [optimizer]
    return [each for inner in inner_optimizers(optimizer) for each in steps_of(inner)]


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers in the attributes of another one that step the same parameters."""
    own: set[int] | None = None
    found: dict[int, Optimizer] = {}
    seen: set[int] = {id(optimizer)}
    level = [value for key, value in vars(optimizer).items() if key not in (STATE, GROUPS)]
    for _ in range(_DEPTH):
        below: list[Any] = []
        for value in level:
            if id(value) in seen or isinstance(value, _NOT_SEARCHED):
                continue
            seen.add(id(value))
            if isinstance(value, Optimizer):
                if own is None:
                    own = {id(t) for t in _parameters_of(groups_of(optimizer))}
                if not own or any(id(t) in own for t in _parameters_of(groups_of(value))):
                    found[id(value)] = value
            elif isinstance(value, Mapping):
                below += value.values()
            elif isinstance(value, (list, tuple)):
                below += value
            else:
                below += getattr(value, "__dict__", {}).values()
        level = below
    return [*found.values()]


_NOT_SEARCHED = (
    str, bytes, int, float, type(None), type, torch.Tensor, nn.Module, ModuleType, FunctionType,
    MethodType, torch.device, torch.dtype,
)  # fmt: skip


def has_own_methods(optimizer: Optimizer) -> bool:
    """Return whether the optimizer changes what torch's `state_dict` or `load_state_dict` do."""
    if any(getattr(optimizer, hooks, None) for hooks in _HOOKS):
        return True
    if _overrides(optimizer, "state_dict") or _overrides(optimizer, "load_state_dict"):
        return True
    owner = next(cls for cls in type(optimizer).__mro__ if "__setstate__" in vars(cls))
    return not owner.__module__.startswith("torch.optim.")


def _overrides(optimizer: Optimizer, method: str) -> bool:
    own = getattr(type(optimizer), method)
    return method in vars(optimizer) or own is not getattr(Optimizer, method)


def _refuse_left_out(view: View, hidden: Iterable[Optimizer]) -> None:
    """Refuse an optimizer whose own `state_dict` leaves out state of an optimizer inside it."""
    values = (view.states, view.shared, view.entries)
    returned = [each for value in values for each in _tensors_in(value)]
    kinds = Counter((each.dtype, each.shape) for each in returned)
    for inner in hidden:
        kinds_inside = Counter((t.dtype, t.shape) for t in _tensors_in(_state_of(inner)))
        if kinds_inside - kinds:
            raise StateError(
                f"{view.name}: the state_dict() of this {type(view.optimizer).__name__} leaves out "
                f"the state of the {type(inner).__name__} inside it: put the inner optimizer into "
                "the state, or mend state_dict()"
            )


def groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the param groups of an optimizer. Some wrappers have none."""
    return getattr(optimizer, GROUPS, [])


def _state_of(optimizer: Optimizer) -> Any:
    return getattr(optimizer, STATE, None)


def _parameters_of(groups: Iterable[Mapping[str, Any]]) -> Iterator[torch.Tensor]:
    for group in groups:
        yield from group[PARAMS]


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors_in(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors_in(each)


def _mapping(name: str, value: object) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise StateError(
            f"{name}: expected a dict, found a {type(value).__name__}: leave the optimizer out, or "
            "mend its state_dict()"
        )
    return dict(value)


def _equal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    return a is b or bool(a == b)


def _is_converted(own: object, live: object) -> bool:
    if isinstance(own, torch.Tensor) and isinstance(live, torch.Tensor):
        is_other = (own.dtype, own.device) != (live.dtype, live.device)
        return is_other and own.shape == live.shape
    if isinstance(own, Mapping) and isinstance(live, Mapping):
        return any(_is_converted(own[key], live[key]) for key in own.keys() & live.keys())
    if isinstance(own, (list, tuple)) and isinstance(live, (list, tuple)):
        return any(map(_is_converted, own, live))
    return False


def _unconverted(own: Any, live: Any, again: Any) -> Any:
    """Return the state in use, but with our tensors in place of those that torch converted.

    Args:
        own: the state that was passed to `load_state_dict`.
        live: the state that the optimizer has now.
        again: the state that `state_dict` returns now. If it has the tensors in use themselves, the
            saved tensors were in use, too.
    """
    if isinstance(live, torch.Tensor):
        return own if live is again and _is_converted(own, live) else live
    if isinstance(live, dict) and isinstance(own, Mapping) and isinstance(again, Mapping):
        for key in live.keys() & own.keys() & again.keys():
            live[key] = _unconverted(own[key], live[key], again[key])
    elif type(live) in (list, tuple) and len(own) == len(live) == len(again):
        return type(live)(map(_unconverted, own, live, again))
    return live
