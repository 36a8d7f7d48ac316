"""torch.optim: state by parameter name, hyperparameters by parameter name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch.optim import Optimizer

from shardwise.adapters.parameters import Parameter
from shardwise.adapters.state_tree import leaves_of, rebuilt
from shardwise.errors import StateError
from shardwise.plan.saved import SavedState
from shardwise.state.leaves import GroupedValue, Holdings
from shardwise.state.objects import JsonValue, decode, differences, encode

ParameterMap = Mapping[int, Parameter]
GROUPS = "param_groups"


class OptimizerBinding:
    """One optimizer, or several that share the parameters of a model, below one name.

    Args:
        parameters: what is known of each parameter, by its `id`; asked for when it is needed, for
            loading may give memory to meta parameters first.
    """

    def __init__(
        self,
        name: str,
        optimizers: Sequence[Optimizer],
        parameters: Callable[[], ParameterMap],
        *,
        allow_pickle: bool,
    ) -> None:
        self.name = name
        self._optimizers = optimizers
        self._parameters = parameters
        self._allow_pickle = allow_pickle

    def holdings(self) -> Holdings:
        """State tensors sharded as their parameters are, plain state, and param groups."""
        held = Holdings()
        known = self._parameters()
        for optimizer in self._optimizers:
            for parameter in self._each_parameter(optimizer, known):
                for key, value in leaves_of(optimizer.state.get(parameter.tensor, {})):
                    self._hold(held, parameter, key, value)
        held.grouped[f"{self.name}.{GROUPS}"] = self._groups(known)
        return held

    def targets(self, saved: SavedState) -> Holdings:
        """What to fill: the state that the checkpoint has, made where it does not exist yet."""
        known = self._parameters()
        problems = [line for each in self._optimizers for line in self._fit(each, known, saved)]
        held = self.holdings()
        held.problems += problems
        return held

    def restore(self, values: Mapping[str, JsonValue]) -> None:
        """Set plain state and hyperparameters, once the tensors are filled."""
        known = self._parameters()
        groups = f"{self.name}.{GROUPS}"
        settings = _by_member(values[groups]) if groups in values else {}
        for optimizer in self._optimizers:
            for parameter in self._each_parameter(optimizer, known):
                self._restore_plain(optimizer, parameter, values)
            for group in optimizer.param_groups if settings else ():
                names = self._names_in(group, known)
                if names:
                    self._set_group(group, settings[names[0]], f"{groups}.{names[0]}")

    def _hold(self, held: Holdings, parameter: Parameter, key: str, value: object) -> None:
        if isinstance(value, torch.Tensor):
            held.tensors += parameter.leaves(self.name, key, value)
            return
        for name in parameter.names:
            full = f"{self.name}.{name}.{key}"
            held.objects[full] = encode(value, full, allow_pickle=self._allow_pickle)

    def _groups(self, known: ParameterMap) -> list[GroupedValue]:
        grouped = []
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                settings = {k: v for k, v in group.items() if k not in ("params", "param_names")}
                name = f"{self.name}.{GROUPS}"
                value = encode(settings, name, allow_pickle=self._allow_pickle)
                grouped.append(GroupedValue(tuple(self._names_in(group, known)), value))
        return grouped

    def _fit(self, optimizer: Optimizer, known: ParameterMap, saved: SavedState) -> Iterator[str]:
        """Give the optimizer the state that the checkpoint has; say what cannot be done."""
        groups = f"{self.name}.{GROUPS}"
        settings = _by_member(saved.object(groups)) if saved.has_object(groups) else {}
        for group in optimizer.param_groups:
            names = self._names_in(group, known)
            missing = [name for name in names if name not in settings]
            if missing and settings:
                yield f"{groups}: the checkpoint knows no hyperparameters of {_few(missing)}"
            elif settings:
                yield from _disagreements(groups, names, settings)
            for tensor in group["params"]:
                self._fit_state(optimizer, group, _known(known, tensor, self.name), saved)

    def _fit_state(
        self,
        optimizer: Optimizer,
        group: dict[str, object],
        parameter: Parameter,
        saved: SavedState,
    ) -> None:
        name = f"{self.name}.{parameter.names[0]}"
        keys = saved.below(name)
        if not keys:
            optimizer.state.pop(parameter.tensor, None)
        if not keys or parameter.empty:
            return
        present = {key for key, _ in leaves_of(optimizer.state.get(parameter.tensor, {}))}
        made: dict[str, object] = {}
        for key in keys:
            entry = saved.tensor(f"{name}.{key}")
            if key in present or (entry is None and not saved.has_object(f"{name}.{key}")):
                continue
            if entry is None:
                made[key] = None
                continue
            device = parameter.tensor.device
            if key == "step" and not (group.get("capturable") or group.get("fused")):
                device = torch.device("cpu")
            made[key] = parameter.new_state(getattr(torch, entry.dtype), entry.shape, device)
        if made:
            state = optimizer.state[parameter.tensor]
            state.update(rebuilt(dict(leaves_of(state)) | made))

    def _restore_plain(
        self, optimizer: Optimizer, parameter: Parameter, values: Mapping[str, JsonValue]
    ) -> None:
        state = optimizer.state.get(parameter.tensor)
        if not state:
            return
        plain: dict[str, object] = {}
        for key, value in leaves_of(state):
            name = f"{self.name}.{parameter.names[0]}.{key}"
            if not isinstance(value, torch.Tensor) and name in values:
                plain[key] = decode(values[name], name, allow_pickle=self._allow_pickle)
        if plain:
            state.update(rebuilt(dict(leaves_of(state)) | plain))

    def _set_group(self, group: dict[str, object], encoded: JsonValue, name: str) -> None:
        settings = decode(encoded, name, allow_pickle=self._allow_pickle)
        if not isinstance(settings, dict):
            raise StateError(f"{name}: hyperparameters are not a dict")
        for key, value in settings.items():
            current = group.get(key)
            if isinstance(current, torch.Tensor) and isinstance(value, (int, float, torch.Tensor)):
                with torch.no_grad():
                    current.copy_(torch.as_tensor(value))
            else:
                group[key] = value

    def _each_parameter(self, optimizer: Optimizer, known: ParameterMap) -> Iterator[Parameter]:
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                yield _known(known, tensor, self.name)

    def _names_in(self, group: dict[str, object], known: ParameterMap) -> list[str]:
        tensors = group["params"]
        if not isinstance(tensors, list):
            raise StateError(f"{self.name}: a param group has no list of params")
        return [name for tensor in tensors for name in _known(known, tensor, self.name).names]


def _known(known: ParameterMap, tensor: torch.Tensor, name: str) -> Parameter:
    parameter = known.get(id(tensor))
    if parameter is None:
        raise StateError(
            f"{name}: it optimizes a parameter of shape {list(tensor.shape)} that belongs to no "
            "module in the state, so that its name is not known: put the module into the state too"
        )
    return parameter


def _by_member(encoded: object) -> dict[str, JsonValue]:
    """A stored list of groups as the settings of each member."""
    settings: dict[str, JsonValue] = {}
    if not isinstance(encoded, list):
        raise StateError(f"{GROUPS}: not a list of groups")
    for group in encoded:
        if not isinstance(group, dict) or not isinstance(group.get("members"), list):
            raise StateError(f"{GROUPS}: a group does not name its members")
        for member in group["members"]:
            settings[str(member)] = group.get("value")
    return settings


def _disagreements(
    name: str, members: Sequence[str], settings: Mapping[str, JsonValue]
) -> Iterator[str]:
    first = settings[members[0]] if members else None
    for member in members:
        if settings[member] is not first and settings[member] != first:
            keys = differences(first, settings[member], "")
            yield (
                f"{name}: {members[0]} and {member} are in one group here, and were saved with "
                f"different {', '.join(key.lstrip('.') for key in keys)}"
            )
            return


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
