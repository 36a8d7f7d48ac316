"""The binding of optimizers: state and hyperparameters, under the names of the parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from shardwise.adapters.optimizer_groups import (
    GROUPS,
    NOT_HYPERPARAMETERS,
    find_group_problems,
    find_kind_problems,
    find_prefix_problems,
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
from shardwise.adapters.values import missing_inside, tensors_inside
from shardwise.errors import StateError
from shardwise.manifest.manifest import TensorEntry
from shardwise.plan.name_lookup import SavedNames
from shardwise.ports.binding import Binding, Context
from shardwise.state.leaves import LocalState, ParameterOrder
from shardwise.state.parameters import Parameter
from shardwise.state.plain_values import JsonValue, decode, encode
from shardwise.state.selection import Selection
from shardwise.state.tensors import tensor_of_array

ParametersById = Mapping[int, Parameter]


class OptimizerBinding(Binding):
    """One optimizer, or several that share the parameters of a model."""

    kind = "optimizer"

    def __init__(self, name: str, optimizers: Sequence[Optimizer], context: Context) -> None:
        self.name = name
        self.optimizers = optimizers
        self._bindings = context.bindings
        self._allow_pickle = context.allow_pickle
        self._fitted_states: dict[int, dict[str, object]] = {}
        self._tensors_in_values: dict[str, torch.Tensor] = {}

    def local_state(self) -> LocalState:
        """Return the state, sharded like the parameters, and the hyperparameters."""
        with self.filled_groups():
            return self._local_state()

    def _local_state(self) -> LocalState:
        local_state = LocalState()
        parameters = self._find_parameters()
        for optimizer in self.optimizers:
            for group, parameter in self._groups_and_parameters(optimizer, parameters):
                if parameter.is_copy:
                    continue
                for key, value in read_state(optimizer, group, parameter.tensor).items():
                    # A rank without elements may count its steps from another number.
                    if not parameter.is_empty or _has_several_elements(value):
                        self._add_value(local_state, parameter, key, value)
        local_state.join_parts(to_fill=False)
        local_state.grouped[f"{self.name}.{GROUPS}"] = self._grouped_hyperparameters(parameters)
        return local_state

    def targets(self, saved: SavedNames, selection: Selection) -> LocalState:
        """Return the state to load. State that does not exist yet is created.

        The optimizer does not change until `restore` gives it the created state.
        """
        with self.filled_groups():
            return self._targets(saved, selection)

    def _targets(self, saved: SavedNames, selection: Selection) -> LocalState:
        local_state, values = LocalState(), LocalState()
        parameters = self._find_parameters()
        self._fitted_states = {}
        self._tensors_in_values = {}
        for optimizer in self.optimizers:
            for group, parameter in self._groups_and_parameters(optimizer, parameters):
                state = read_state(optimizer, group, parameter.tensor)
                fitted = self._fit_to_checkpoint(group, parameter, state, saved, selection)
                if fitted is not state or not counts_steps_like_torch(optimizer):
                    self._fitted_states[id(parameter.tensor)] = fitted
                prefix = f"{self.name}.{parameter.representative_name}"
                for key, value in fitted.items():
                    if isinstance(value, torch.Tensor) or not saved.has_object(f"{prefix}.{key}"):
                        self._add_value(local_state, parameter, key, value)
                    else:
                        self._add_saved_value(values, group, parameter, key, saved, selection)
        local_state.join_parts(to_fill=True)
        values.join_parts(to_fill=True)
        groups_name = f"{self.name}.{GROUPS}"
        local_state.grouped[groups_name] = self._grouped_hyperparameters(parameters)
        if selection.selects(groups_name) and saved.has_object(groups_name):
            settings = settings_by_member(groups_name, saved.object(groups_name))
            groups = [members for members, _ in local_state.grouped[groups_name]]
            local_state.problems += find_group_problems(groups_name, groups, settings)
            local_state.problems += find_prefix_problems(
                saved.saved_name(groups_name), groups, settings
            )
            local_state.problems += find_kind_problems(groups_name, self.optimizers, settings)
        selected = selection.select_from(local_state)
        selected.add(values)
        return selected

    def restore(self, values: Mapping[str, JsonValue]) -> None:
        """Set created state, plain state and hyperparameters, after the tensors are filled."""
        with self.filled_groups():
            self._restore(values)

    def _restore(self, values: Mapping[str, JsonValue]) -> None:
        parameters = self._find_parameters()
        groups_name = f"{self.name}.{GROUPS}"
        settings: dict[str, JsonValue] = {}
        if groups_name in values:
            settings = settings_by_member(groups_name, values[groups_name])
        for optimizer in self.optimizers:
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
        if len(self.optimizers) != 1:
            return None
        parameters = self._find_parameters()
        groups: list[list[tuple[str, tuple[int, ...]]]] = []
        for group in self.optimizers[0].param_groups:
            members = [_parameter_of(parameters, tensor, self.name) for tensor in group["params"]]
            if any(len(member.flat) > 1 for member in members):
                return None
            groups.append([member.name_and_shape for member in members])
        return groups

    def filled_groups(self) -> AbstractContextManager[None]:
        """Return a context in which the param groups have their parameters.

        DeepSpeed empties its param groups, so its binding puts the parameters back meanwhile.
        """
        return nullcontext()

    def _find_parameters(self) -> ParametersById:
        """Find the parameters of the optimizers in the state's modules, by the `id` of the tensors.

        Names are relative to the module if one module has all parameters, and to the state
        otherwise.
        """
        optimized_ids = {
            id(tensor)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for tensor in group["params"]
        }
        parameters_by_module: list[tuple[str, dict[int, Parameter]]] = []
        for binding in self._bindings:
            found: dict[int, Parameter] = {}
            for parameter in binding.parameters():
                if id(parameter.tensor) in optimized_ids:
                    found.setdefault(id(parameter.tensor), parameter)
            if found:
                parameters_by_module.append((binding.name, found))
        if len(parameters_by_module) == 1:
            return parameters_by_module[0][1]
        return {
            key: parameter.add_prefix(name)
            for name, found in reversed(parameters_by_module)
            for key, parameter in found.items()
        }

    def _add_value(
        self, local_state: LocalState, parameter: Parameter, key: str, value: object
    ) -> None:
        """Add a value of a parameter's state: a tensor, or a plain value and the tensors inside it.

        The tensors inside a value, such as the history of LBFGS, are saved like all others. Their
        names have the indices and keys of the value: `optimizer.weight.old_dirs.3`.

        Raises:
            StateError: the value cannot be saved.
        """
        if isinstance(value, torch.Tensor):
            local_state.tensors += parameter.leaves(self.name, key, value)
            return
        found: dict[str, Any] = {}
        for name in parameter.names:
            full_name = f"{self.name}.{name}.{key}"
            found = {}
            local_state.objects[full_name] = encode(
                value, full_name, found.__setitem__, allow_pickle=self._allow_pickle
            )
        prefix = f"{self.name}.{parameter.names[-1]}."
        for name, each in found.items():
            tensor = tensor_of_array(name, each) if isinstance(each, np.ndarray) else each
            if not isinstance(tensor, torch.Tensor):
                raise StateError(
                    f"{name}: a {type(tensor).__name__} cannot be part of an optimizer's state: "
                    "keep a tensor or a DTensor"
                )
            local_state.tensors += parameter.leaves(self.name, name.removeprefix(prefix), tensor)

    def _add_saved_value(
        self,
        local_state: LocalState,
        group: ParamGroup,
        parameter: Parameter,
        key: str,
        saved: SavedNames,
        selection: Selection,
    ) -> None:
        """Add a saved value of a parameter's state, and new tensors for those inside it.

        A value and its tensors are selected together.
        """
        prefix = f"{self.name}.{parameter.representative_name}."
        inside = tensors_inside(prefix + key, saved)
        if not selection.selects(prefix + key, *inside):
            local_state.unselected += [prefix + key, *inside]
            return
        local_state.objects |= {f"{self.name}.{name}.{key}": None for name in parameter.names}
        for name, saved_name in inside.items():
            entry = saved.tensor(name)
            if entry is None:
                local_state.problems.append(missing_inside(name, prefix + key))
                continue
            inner_key = name.removeprefix(prefix)
            tensor = _allocate_state(parameter, group, inner_key, entry)
            self._tensors_in_values[saved_name] = tensor
            local_state.tensors += parameter.leaves(self.name, inner_key, tensor)

    def _grouped_hyperparameters(
        self, parameters: ParametersById
    ) -> list[tuple[tuple[str, ...], JsonValue]]:
        grouped_values = []
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                hyperparameters = hyperparameters_of(optimizer, group)
                settings = {
                    key: value
                    for key, value in hyperparameters.items()
                    if key not in NOT_HYPERPARAMETERS
                }
                value = encode(settings, f"{self.name}.{GROUPS}", allow_pickle=self._allow_pickle)
                grouped_values.append((tuple(self._names_in(group, parameters)), value))
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

        For example, a new Adam has no state, and the checkpoint has `exp_avg`, `exp_avg_sq` and
        `step`: the result has three new tensors. A plain value of the checkpoint is None in the
        result until `restore` sets it; tensors inside such a value, as LBFGS has, are left out. If
        the checkpoint has no state of the parameter, the selected state is removed.
        """
        name = f"{self.name}.{parameter.representative_name}"
        if not saved.names_below(name):
            unselected = {k: v for k, v in state.items() if not selection.selects(f"{name}.{k}")}
            return unselected if len(unselected) < len(state) else state
        created: dict[str, object] = {}
        keys = () if parameter.is_empty else saved.names_below(name)
        names = [f"{name}.{key}" for key in keys]
        inside = {
            part for each in names if saved.has_object(each) for part in tensors_inside(each, saved)
        }
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
