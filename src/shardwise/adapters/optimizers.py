"""The binding of optimizers: state and hyperparameters, under the names of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch.optim import Optimizer

from shardwise.adapters.binding import Binding
from shardwise.adapters.optimizer_groups import (
    GROUPS,
    NOT_HYPERPARAMETERS,
    group_problems,
    prefix_problems,
    settings_by_member,
)
from shardwise.adapters.optimizer_state import (
    STEP,
    ParamGroup,
    counts_steps_like_torch,
    hyperparameters_of,
    read_state,
    remove_step_count,
    write_state,
)
from shardwise.adapters.optimizer_values import (
    add_value,
    add_value_to_load,
    names_inside_values,
)
from shardwise.adapters.parameters import Parameter, join_leaves
from shardwise.adapters.values import tensors_inside
from shardwise.errors import StateError
from shardwise.manifest.manifest import TensorEntry
from shardwise.plan.name_lookup import SavedNames
from shardwise.state.leaves import GroupedValue, LocalState, ParameterOrder
from shardwise.state.plain_values import JsonValue, decode, encode
from shardwise.state.selection import Selection

ParametersById = Mapping[int, Parameter]
SCHEDULER_KEY_SUFFIXES = ("_lr", "_momentum")
# Keys in the param groups of DeepSpeed's Adam that torch's Adam lacks.
DEEPSPEED_KEYS = ("bias_correction", STEP)


class OptimizerBinding(Binding):
    """One optimizer, or several that share the parameters of a model.

    Args:
        parameters: returns the parameters, keyed by the `id` of their tensors. The function is
            called late, because a load may allocate meta tensors first.
        fill_param_groups: returns a context in which the param groups have their parameters. ZeRO 3
            needs it, because it empties the groups between steps.
    """

    kind = "optimizer"

    def __init__(
        self,
        name: str,
        optimizers: Sequence[Optimizer],
        parameters: Callable[[], ParametersById],
        *,
        allow_pickle: bool,
        fill_param_groups: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        self.name = name
        self._fill_param_groups = fill_param_groups or nullcontext
        self._has_parameter_order = fill_param_groups is None and len(optimizers) == 1
        self._optimizers = optimizers
        self._parameters = parameters
        self._allow_pickle = allow_pickle
        self._fitted_states: dict[int, dict[str, object]] = {}
        self._tensors_in_values: dict[str, torch.Tensor] = {}

    def local_state(self) -> LocalState:
        """Return the state, sharded like the parameters, and the hyperparameters."""
        with self._fill_param_groups():
            return self._local_state()

    def _local_state(self) -> LocalState:
        local_state = LocalState()
        parameters = self._parameters()
        for optimizer in self._optimizers:
            for group, parameter in self._groups_and_parameters(optimizer, parameters):
                if parameter.is_copy:
                    continue
                for key, value in read_state(optimizer, group, parameter.tensor).items():
                    # A rank without elements may count its steps from another number.
                    if not parameter.is_empty or _has_several_elements(value):
                        self._add_value(local_state, parameter, key, value)
        local_state.tensors = join_leaves(local_state.tensors, to_fill=False)
        local_state.grouped[f"{self.name}.{GROUPS}"] = self._grouped_hyperparameters(parameters)
        return local_state

    def targets(self, saved: SavedNames, selection: Selection) -> LocalState:
        """Return the state to load. State that does not exist yet is created.

        The optimizer does not change until `restore` gives it the created state.
        """
        with self._fill_param_groups():
            return self._targets(saved, selection)

    def _targets(self, saved: SavedNames, selection: Selection) -> LocalState:
        local_state, values = LocalState(), LocalState()
        parameters = self._parameters()
        self._fitted_states = {}
        self._tensors_in_values = {}
        for optimizer in self._optimizers:
            for group, parameter in self._groups_and_parameters(optimizer, parameters):
                state = read_state(optimizer, group, parameter.tensor)
                fitted = self._fit_to_checkpoint(group, parameter, state, saved, selection)
                if fitted is not state or not counts_steps_like_torch(optimizer):
                    self._fitted_states[id(parameter.tensor)] = fitted
                prefix = f"{self.name}.{parameter.representative_name}"
                allocate = partial(_allocate_state, parameter, group)
                for key, value in fitted.items():
                    if isinstance(value, torch.Tensor) or not saved.has_object(f"{prefix}.{key}"):
                        self._add_value(local_state, parameter, key, value)
                        continue
                    self._tensors_in_values |= add_value_to_load(
                        values, self.name, parameter, key, saved, selection, allocate
                    )
        local_state.tensors = join_leaves(local_state.tensors, to_fill=True)
        values.tensors = join_leaves(values.tensors, to_fill=True)
        groups_name = f"{self.name}.{GROUPS}"
        local_state.grouped[groups_name] = self._grouped_hyperparameters(parameters)
        if selection.selects(groups_name) and saved.has_object(groups_name):
            settings = settings_by_member(groups_name, saved.object(groups_name))
            local_state.problems += group_problems(
                groups_name, local_state.grouped[groups_name], settings
            )
            local_state.problems += prefix_problems(
                saved.saved_name(groups_name), local_state.grouped[groups_name], settings
            )
            local_state.problems += self._kind_problems(groups_name, settings)
        selected = selection.select_from(local_state)
        selected.add(values)
        return selected

    def restore(self, values: Mapping[str, JsonValue]) -> None:
        """Set created state, plain state and hyperparameters, after the tensors are filled."""
        with self._fill_param_groups():
            self._restore(values)

    def _restore(self, values: Mapping[str, JsonValue]) -> None:
        parameters = self._parameters()
        groups_name = f"{self.name}.{GROUPS}"
        settings: dict[str, JsonValue] = {}
        if groups_name in values:
            settings = settings_by_member(groups_name, values[groups_name])
        for optimizer in self._optimizers:
            for group, parameter in self._groups_and_parameters(optimizer, parameters):
                self._restore_state(optimizer, group, parameter, values)
            for group in optimizer.param_groups:
                remove_step_count(optimizer, group)
                names = self._names_in(group, parameters) if settings else []
                if names:
                    self._set_hyperparameters(
                        optimizer, group, settings[names[0]], f"{groups_name}.{names[0]}"
                    )

    def parameter_order(self) -> ParameterOrder | None:
        """Return the names and shapes of the parameters of each group.

        Return None if there are several optimizers or flattened parameters: their order is unknown.
        """
        if not self._has_parameter_order:
            return None
        parameters = self._parameters()
        groups: list[list[tuple[str, tuple[int, ...]]]] = []
        for group in self._optimizers[0].param_groups:
            members = [_parameter_of(parameters, tensor, self.name) for tensor in group["params"]]
            if any(len(member.flat) > 1 for member in members):
                return None
            groups.append([member.name_and_shape for member in members])
        return groups

    def _add_value(
        self, local_state: LocalState, parameter: Parameter, key: str, value: object
    ) -> None:
        if isinstance(value, torch.Tensor):
            local_state.tensors += parameter.leaves(self.name, key, value)
        else:
            add_value(
                local_state, self.name, parameter, key, value, allow_pickle=self._allow_pickle
            )

    def _grouped_hyperparameters(self, parameters: ParametersById) -> list[GroupedValue]:
        grouped_values = []
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                hyperparameters = hyperparameters_of(optimizer, group)
                settings = {
                    key: value
                    for key, value in hyperparameters.items()
                    if key not in NOT_HYPERPARAMETERS
                }
                name = f"{self.name}.{GROUPS}"
                value = encode(settings, name, allow_pickle=self._allow_pickle)
                grouped_values.append(GroupedValue(tuple(self._names_in(group, parameters)), value))
        return grouped_values

    def _fit_to_checkpoint(
        self,
        group: ParamGroup,
        parameter: Parameter,
        state: dict[str, object],
        saved: SavedNames,
        selection: Selection,
    ) -> dict[str, object]:
        """Return a parameter's state, with new tensors for state that only the checkpoint has.

        If the checkpoint has no state of the parameter, the selected state is removed.
        """
        name = f"{self.name}.{parameter.representative_name}"
        if not saved.names_below(name):
            unselected = {k: v for k, v in state.items() if not selection.selects(f"{name}.{k}")}
            return unselected if len(unselected) < len(state) else state
        created: dict[str, object] = {}
        keys = () if parameter.is_empty else saved.names_below(name)
        inside = names_inside_values([f"{name}.{key}" for key in keys], saved)
        for key in keys:
            full_name = f"{name}.{key}"
            entry = saved.tensor(full_name)
            is_value = saved.has_object(full_name)
            fits = key in state and isinstance(state[key], torch.Tensor) == (entry is not None)
            if fits or full_name in inside or not (entry is not None or is_value):
                continue
            parts = tensors_inside(full_name, saved) if is_value else {}
            if selection.selects(full_name, *parts):
                created[key] = (
                    None if entry is None else _allocate_state(parameter, group, key, entry)
                )
        return {**state, **created} if created else state

    def _kind_problems(self, name: str, settings: Mapping[str, JsonValue]) -> Iterator[str]:
        """Yield a problem if the checkpoint was saved by another kind of optimizer.

        Another version of the same optimizer has more settings or fewer. Another kind has both:
        unexpected settings, and missing ones.
        """
        defaults = {key for each in self._optimizers for key in each.defaults}
        saved_keys = {key for each in settings.values() if isinstance(each, dict) for key in each}
        present_keys = {key for each in self._optimizers for g in each.param_groups for key in g}
        unexpected = {
            key for key in saved_keys - present_keys if not key.endswith(SCHEDULER_KEY_SUFFIXES)
        }
        unexpected.difference_update(DEEPSPEED_KEYS)
        missing = defaults - saved_keys - {*DEEPSPEED_KEYS}
        if settings and unexpected and missing:
            yield (
                f"{name}: saved by another kind of optimizer, whose settings include "
                f"{', '.join(sorted(unexpected))} and not {', '.join(sorted(missing))}: leave it "
                f"out with skip=[{f'{self.name}.*'!r}]"
            )

    def _restore_state(
        self,
        optimizer: Optimizer,
        group: ParamGroup,
        parameter: Parameter,
        values: Mapping[str, JsonValue],
    ) -> None:
        state = read_state(optimizer, group, parameter.tensor)
        fitted = self._fitted_states.get(id(parameter.tensor), state)
        plain_state: dict[str, object] = {}
        for key, value in fitted.items():
            name = f"{self.name}.{parameter.representative_name}.{key}"
            if not isinstance(value, torch.Tensor) and name in values:
                plain_state[key] = decode(
                    values[name], name, self._tensor_in_value, allow_pickle=self._allow_pickle
                )
        if plain_state or fitted is not state:
            write_state(optimizer, group, parameter.tensor, fitted | plain_state)
        if not optimizer.state.get(parameter.tensor):
            optimizer.state.pop(parameter.tensor, None)

    def _tensor_in_value(self, name: str) -> torch.Tensor:
        if name not in self._tensors_in_values:
            raise StateError(
                f"{name}: a value of the optimizer {self.name} contains this tensor, which was not "
                f"loaded: leave the optimizer out with skip=[{f'{self.name}.*'!r}]"
            )
        return self._tensors_in_values[name]

    def _set_hyperparameters(
        self, optimizer: Optimizer, group: dict[str, object], encoded: JsonValue, name: str
    ) -> None:
        settings = decode(encoded, name, allow_pickle=self._allow_pickle)
        if not isinstance(settings, dict):
            raise StateError(
                f"{name}: expected a dict of hyperparameters in the checkpoint, found a "
                f"{type(settings).__name__}: leave the optimizer out with "
                f"skip=[{f'{self.name}.*'!r}]"
            )
        for key, value in hyperparameters_of(optimizer, settings).items():
            current = group.get(key)
            if isinstance(current, torch.Tensor) and isinstance(value, (int, float, torch.Tensor)):
                with torch.no_grad():
                    current.copy_(torch.as_tensor(value, device=current.device))
            else:
                group[key] = value

    def _groups_and_parameters(
        self, optimizer: Optimizer, parameters: ParametersById
    ) -> Iterator[tuple[ParamGroup, Parameter]]:
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                yield group, _parameter_of(parameters, tensor, self.name)

    def _names_in(self, group: dict[str, object], parameters: ParametersById) -> list[str]:
        tensors = group["params"]
        if not isinstance(tensors, list):
            raise StateError(
                f"{self.name}: the entry 'params' of a param group is a {type(tensors).__name__}: "
                "expected a list of parameters, as torch's optimizers make it"
            )
        names = (
            name
            for tensor in tensors
            for name in _parameter_of(parameters, tensor, self.name).names
        )
        return list(dict.fromkeys(names))


def _has_several_elements(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 1


def _allocate_state(
    parameter: Parameter, group: Mapping[str, object], key: str, entry: TensorEntry
) -> torch.Tensor:
    """Allocate a state tensor on the device where the optimizer itself would create it."""
    counts_on_device = group.get("capturable") or group.get("fused")
    on_host = key == STEP and not counts_on_device
    device = torch.device("cpu") if on_host else parameter.tensor.device
    return parameter.allocate_state(getattr(torch, entry.dtype), entry.shape, device)


def _parameter_of(parameters: ParametersById, tensor: torch.Tensor, name: str) -> Parameter:
    parameter = parameters.get(id(tensor))
    if parameter is None:
        raise StateError(
            f"{name}: no module in the state has the optimizer's parameter of shape "
            f"{list(tensor.shape)}, so its name is unknown: put the module, or its engine, into "
            "the state too. If it is there, create the optimizer after all that replaces "
            "parameters, such as fully_shard"
        )
    return parameter
