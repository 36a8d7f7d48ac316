"""Optimizers: state and hyperparameters by parameter name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.optim import Optimizer

from shardwise.adapters.binding import Binding
from shardwise.adapters.optimizer_state import (
    STEP,
    Group,
    counts_as_torch,
    forget_count,
    set_state,
    settings_of,
    state_of,
)
from shardwise.adapters.parameters import Parameter, joined
from shardwise.errors import StateError
from shardwise.manifest.manifest import TensorEntry
from shardwise.plan.lookup import SavedState
from shardwise.state.leaves import GroupedValue, LocalState, ParameterOrder
from shardwise.state.objects import JsonValue, decode, differences, encode
from shardwise.state.selection import Selection

ParameterMap = Mapping[int, Parameter]
GROUPS = "param_groups"
OF_SCHEDULES = ("_lr", "_momentum")
# Entries of a param group that are not hyperparameters.
BESIDES = ("params", "param_names", "is_expert_parallel")
# Entries that DeepSpeed's Adam has in groups, and torch's has not.
OF_DEEPSPEED = ("bias_correction", STEP)


class OptimizerBinding(Binding):
    """One optimizer, or several that share the parameters of a model.

    Args:
        parameters: returns the parameters by the `id` of their tensors. It is called when they
            are needed, as a load may allocate parameters on the meta device first.
        filled_groups: makes a context in which param groups have their parameters, for ZeRO 3,
            which empties them between steps.
    """

    kind = "optimizer"

    def __init__(
        self,
        name: str,
        optimizers: Sequence[Optimizer],
        parameters: Callable[[], ParameterMap],
        *,
        allow_pickle: bool,
        filled_groups: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        self.name = name
        self._filled_groups = filled_groups or nullcontext
        self._numbered = filled_groups is None and len(optimizers) == 1
        self._optimizers = optimizers
        self._parameters = parameters
        self._allow_pickle = allow_pickle
        self._fitted: dict[int, dict[str, object]] = {}

    def local_state(self) -> LocalState:
        """Return state tensors, sharded as their parameters are, plain state, and param groups."""
        with self._filled_groups():
            return self._local_state()

    def _local_state(self) -> LocalState:
        held = LocalState()
        known = self._parameters()
        for optimizer in self._optimizers:
            for group, parameter in self._each_parameter(optimizer, known):
                if parameter.copy:
                    continue
                for key, value in state_of(optimizer, group, parameter.tensor).items():
                    self._hold(held, parameter, key, value)
        held.tensors = joined(held.tensors, to_fill=False)
        held.grouped[f"{self.name}.{GROUPS}"] = self._groups(known)
        return held

    def targets(self, saved: SavedState, selection: Selection) -> LocalState:
        """Return the state that the checkpoint has. State that does not exist yet is created.

        `restore` gives it to the optimizer, which does not change before.
        """
        with self._filled_groups():
            return self._targets(saved, selection)

    def _targets(self, saved: SavedState, selection: Selection) -> LocalState:
        held = LocalState()
        known = self._parameters()
        self._fitted = {}
        for optimizer in self._optimizers:
            for group, parameter in self._each_parameter(optimizer, known):
                state = state_of(optimizer, group, parameter.tensor)
                fitted = self._fit(group, parameter, state, saved, selection)
                if fitted is not state or not counts_as_torch(optimizer):
                    self._fitted[id(parameter.tensor)] = fitted
                for key, value in fitted.items():
                    self._hold(held, parameter, key, value)
        held.tensors = joined(held.tensors, to_fill=True)
        groups = f"{self.name}.{GROUPS}"
        held.grouped[groups] = self._groups(known)
        if selection.chooses(groups) and saved.has_object(groups):
            settings = _by_member(saved.object(groups))
            held.problems += _group_problems(groups, held.grouped[groups], settings)
            held.problems += _prefix_problems(
                saved.saved_name(groups), held.grouped[groups], settings
            )
            held.problems += self._kind_problems(groups, settings)
        return selection.of(held)

    def restore(self, values: Mapping[str, JsonValue]) -> None:
        """Set created state, plain state and hyperparameters, once the tensors are filled."""
        with self._filled_groups():
            self._restore(values)

    def _restore(self, values: Mapping[str, JsonValue]) -> None:
        known = self._parameters()
        groups = f"{self.name}.{GROUPS}"
        settings = _by_member(values[groups]) if groups in values else {}
        for optimizer in self._optimizers:
            for group, parameter in self._each_parameter(optimizer, known):
                self._restore_state(optimizer, group, parameter, values)
            for group in optimizer.param_groups:
                forget_count(optimizer, group)
                names = self._names_in(group, known) if settings else []
                if names:
                    self._set_group(optimizer, group, settings[names[0]], f"{groups}.{names[0]}")

    def parameter_order(self) -> ParameterOrder | None:
        """Return the names and shapes of the parameters of each group.

        None if there are several optimizers or flattened parameters, whose order differs.
        """
        if not self._numbered:
            return None
        known = self._parameters()
        groups: list[list[tuple[str, tuple[int, ...]]]] = []
        for group in self._optimizers[0].param_groups:
            members = [_known(known, tensor, self.name) for tensor in group["params"]]
            if any(len(member.flat) > 1 for member in members):
                return None
            groups.append([member.named_shape for member in members])
        return groups

    def _hold(self, held: LocalState, parameter: Parameter, key: str, value: object) -> None:
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
                own = settings_of(optimizer, group)
                settings = {key: value for key, value in own.items() if key not in BESIDES}
                name = f"{self.name}.{GROUPS}"
                value = encode(settings, name, allow_pickle=self._allow_pickle)
                grouped.append(GroupedValue(tuple(self._names_in(group, known)), value))
        return grouped

    def _fit(
        self,
        group: Group,
        parameter: Parameter,
        state: dict[str, object],
        saved: SavedState,
        selection: Selection,
    ) -> dict[str, object]:
        """Return a parameter's state with room for all that the checkpoint has of it.

        If the checkpoint has none, the selected state is removed: it was untrained.
        """
        name = f"{self.name}.{parameter.foremost}"
        if not saved.below(name):
            kept = {k: v for k, v in state.items() if not selection.chooses(f"{name}.{k}")}
            return kept if len(kept) < len(state) else state
        made: dict[str, object] = {}
        for key in () if parameter.empty else saved.below(name):
            full = f"{name}.{key}"
            entry = saved.tensor(full)
            wanted = entry is not None or saved.has_object(full)
            fits = key in state and isinstance(state[key], torch.Tensor) == (entry is not None)
            if fits or not wanted or not selection.chooses(full):
                continue
            made[key] = None if entry is None else _new(parameter, key, entry, group)
        return {**state, **made} if made else state

    def _kind_problems(self, name: str, settings: Mapping[str, JsonValue]) -> Iterator[str]:
        """Yield a problem if the checkpoint is of another kind of optimizer.

        Another version of torch may have more settings or fewer. Another kind has both.
        """
        wanted = {key for each in self._optimizers for key in each.defaults}
        known = {key for each in settings.values() if isinstance(each, dict) for key in each}
        present = {key for each in self._optimizers for g in each.param_groups for key in g}
        others = {key for key in known - present if not key.endswith(OF_SCHEDULES)}
        others.difference_update(OF_DEEPSPEED)
        lacking = wanted - known - {*OF_DEEPSPEED}
        if settings and others and lacking:
            yield (
                f"{name}: saved by another kind of optimizer: it has {', '.join(sorted(others))}, "
                f"and not {', '.join(sorted(lacking))}"
            )

    def _restore_state(
        self,
        optimizer: Optimizer,
        group: Group,
        parameter: Parameter,
        values: Mapping[str, JsonValue],
    ) -> None:
        state = state_of(optimizer, group, parameter.tensor)
        fitted = self._fitted.get(id(parameter.tensor), state)
        plain: dict[str, object] = {}
        for key, value in fitted.items():
            name = f"{self.name}.{parameter.foremost}.{key}"
            if not isinstance(value, torch.Tensor) and name in values:
                plain[key] = decode(values[name], name, allow_pickle=self._allow_pickle)
        if plain or fitted is not state:
            set_state(optimizer, group, parameter.tensor, fitted | plain)
        if not optimizer.state.get(parameter.tensor):
            optimizer.state.pop(parameter.tensor, None)

    def _set_group(
        self, optimizer: Optimizer, group: dict[str, object], encoded: JsonValue, name: str
    ) -> None:
        settings = decode(encoded, name, allow_pickle=self._allow_pickle)
        if not isinstance(settings, dict):
            raise StateError(f"{name}: expected a dict of hyperparameters")
        for key, value in settings_of(optimizer, settings).items():
            current = group.get(key)
            if isinstance(current, torch.Tensor) and isinstance(value, (int, float, torch.Tensor)):
                with torch.no_grad():
                    current.copy_(torch.as_tensor(value, device=current.device))
            else:
                group[key] = value

    def _each_parameter(
        self, optimizer: Optimizer, known: ParameterMap
    ) -> Iterator[tuple[Group, Parameter]]:
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                yield group, _known(known, tensor, self.name)

    def _names_in(self, group: dict[str, object], known: ParameterMap) -> list[str]:
        tensors = group["params"]
        if not isinstance(tensors, list):
            raise StateError(f"{self.name}: a param group lacks its list of params")
        names = (name for tensor in tensors for name in _known(known, tensor, self.name).names)
        return list(dict.fromkeys(names))


def _new(
    parameter: Parameter, key: str, entry: TensorEntry, group: Mapping[str, object]
) -> torch.Tensor:
    """Allocate a state tensor on the device where the optimizer would have created it."""
    counts_on_device = group.get("capturable") or group.get("fused")
    on_host = key == STEP and not counts_on_device
    device = torch.device("cpu") if on_host else parameter.tensor.device
    return parameter.new_state(getattr(torch, entry.dtype), entry.shape, device)


def _known(known: ParameterMap, tensor: torch.Tensor, name: str) -> Parameter:
    parameter = known.get(id(tensor))
    if parameter is None:
        raise StateError(
            f"{name}: one of its parameters, of shape {list(tensor.shape)}, belongs to no module "
            "in the state, so its name is unknown: put the module into the state too, or its engine"
        )
    return parameter


def _by_member(encoded: object) -> dict[str, JsonValue]:
    """Return the settings of each member of a saved list of groups."""
    settings: dict[str, JsonValue] = {}
    if not isinstance(encoded, list):
        raise StateError(f"{GROUPS}: expected a list of groups")
    for group in encoded:
        if not isinstance(group, dict) or not isinstance(group.get("members"), list):
            raise StateError(
                f"{GROUPS}: the checkpoint identifies parameters by position, and the optimizer "
                "here has other counts or shapes, or flattened parameters. Save with names "
                "(torch's get_optimizer_state_dict, or an optimizer of "
                "model.named_parameters()), or load without the optimizer"
            )
        value = group.get("value")
        if isinstance(value, dict):
            value = {key: each for key, each in value.items() if key not in BESIDES}
        for member in group["members"]:
            settings[str(member)] = value
    return settings


def _group_problems(
    name: str, groups: Sequence[GroupedValue], settings: Mapping[str, JsonValue]
) -> Iterator[str]:
    """Yield the reasons why groups cannot have the saved settings of their members."""
    for members in [group.members for group in groups]:
        missing = [member for member in members if member not in settings]
        if missing:
            yield f"{name}: the checkpoint has no hyperparameters for {_few(missing)}"
            continue
        for member in members[1:]:
            first, other = settings[members[0]], settings[member]
            if first is not other and first != other:
                keys = ", ".join(key.lstrip(".") for key in differences(first, other, ""))
                yield (
                    f"{name}: {members[0]} and {member} are in one group here, and were saved "
                    f"with different {keys}"
                )
                break


def _prefix_problems(
    name: str, groups: Sequence[GroupedValue], settings: Mapping[str, JsonValue]
) -> Iterator[str]:
    """Yield a specification that helps if all members have one more prefix in the checkpoint."""
    members = [member for group in groups for member in group.members]
    if not members or any(member in settings for member in members):
        return
    first = f".{members[0]}"
    for there in (each.removesuffix(first) for each in settings if each.endswith(first)):
        if all(f"{there}.{member}" in settings for member in members):
            key = name.removesuffix(f".{GROUPS}")
            text = f"{key}.{there}.* -> {key}.*\n* -> *"
            yield (
                f"{name}: the checkpoint has these settings for {there}.{members[0]}: rename= "
                f"does not rename an optimizer's parameters; use spec=sw.spec({text!r})"
            )
            return


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
