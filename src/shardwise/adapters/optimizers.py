"""The binding of optimizers: state and hyperparameters, under the names of the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from shardwise.adapters.optimizer_groups import (
    GROUPS,
    STEP,
    Group,
    find_group_problems,
    find_prefix_problems,
    hyperparameters_of,
    settings_by_member,
)
from shardwise.adapters.values import missing_inside, tensors_inside
from shardwise.errors import StateError
from shardwise.manifest.manifest import TensorEntry
from shardwise.ports.binding import Binding, Context
from shardwise.state.local_state import LocalState, ParameterOrder, TensorLeaf
from shardwise.state.name_lookup import SavedNames, Selection
from shardwise.state.parameters import LOCAL, SHARD, Parameter
from shardwise.state.plain_values import JsonValue, decode, encode
from shardwise.state.tensors import is_dtensor, tensor_of_array


class OptimizerBinding(Binding):
    """One optimizer, or several that share the parameters of a model."""

    kind = "optimizer"

    def __init__(self, name: str, optimizers: Sequence[Optimizer], context: Context) -> None:
        self.name = name
        self.optimizers = optimizers
        self._bindings = context.bindings
        self._allow_pickle = context.allow_pickle
        self._groups_name = f"{name}.{GROUPS}"
        # What `targets` leaves to `restore`: the groups, each parameter's state and whether the
        # optimizer lacks some of it, the saved hyperparameters, and new tensors inside values.
        self._groups: Sequence[Group] = ()
        self._states: list[tuple[Group, Parameter, dict[str, object], bool]] = []
        self._settings: Mapping[str, JsonValue] = {}
        self._tensors_in_values: dict[str, torch.Tensor] = {}

    def local_state(self) -> LocalState:
        """Return the state, sharded like the parameters, and the hyperparameters."""
        local_state = LocalState()
        groups = self.find_groups()
        for group in groups:
            for parameter in group.parameters:
                if parameter.is_copy:
                    continue
                is_empty = parameter.is_empty
                for key, value in group.read_state(parameter.tensor).items():
                    # A rank without elements may have another step count, so leave out its scalars.
                    if not is_empty or (isinstance(value, torch.Tensor) and value.numel() > 1):
                        self._add_value(local_state, parameter, key, value)
        local_state.join_parts(to_fill=False)
        grouped: list[tuple[tuple[str, ...], JsonValue]] = []
        for group in groups:
            settings = hyperparameters_of(group.settings, group.other_keys)
            value = encode(settings, self._groups_name, allow_pickle=self._allow_pickle)
            grouped.append((group.names, value))
        local_state.grouped[self._groups_name] = grouped
        return local_state

    def targets(self, saved: SavedNames, selection: Selection) -> LocalState:
        """Return the state to load. State that does not exist yet is created.

        The optimizer does not change until `restore` gives it the created state.
        """
        local_state, values = LocalState(), LocalState()
        self._groups, self._states, self._tensors_in_values = self.find_groups(), [], {}
        for group in self._groups:
            for parameter in group.parameters:
                prefix = f"{self.name}.{parameter.representative_name}"
                self._claim_shards(local_state, prefix, parameter, saved, selection)
                current = group.read_state(parameter.tensor)
                state = self._fit_to_checkpoint(prefix, group, parameter, current, saved, selection)
                is_new = state is not current or group.steps_are_in != "tensors"
                self._states.append((group, parameter, state, is_new))
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) or not saved.has_object(f"{prefix}.{key}"):
                        self._add_value(local_state, parameter, key, value)
                    else:
                        self._add_saved_value(values, group, parameter, key, saved, selection)
        for each in (local_state, values):
            each.tensors = [_as_saved(leaf, saved) for leaf in each.tensors]
            each.objects = {n: v for n, v in each.objects.items() if not n.endswith(LOCAL)}
            each.join_parts(to_fill=True)
        local_state.grouped[self._groups_name] = []  # a load needs only the name
        if selection.selects(self._groups_name) and saved.has_object(self._groups_name):
            self._settings = settings_by_member(self._groups_name, saved.object(self._groups_name))
            problems = [*find_group_problems(self._groups_name, self._groups, self._settings)]
            if problems:
                problems += find_prefix_problems(
                    saved.saved_name(self._groups_name), self._groups, self._settings
                )
            local_state.problems += problems
        selected = selection.select_from(local_state)
        selected.add(values)
        return selected

    def restore(self, values: Mapping[str, JsonValue]) -> None:
        """Set created state, plain state and hyperparameters, after the tensors are filled."""
        for group, parameter, state, is_new in self._states:
            plain_state: dict[str, object] = {}
            prefix = f"{self.name}.{parameter.representative_name}"
            for key, value in state.items():
                name = f"{prefix}.{key}"
                if not isinstance(value, torch.Tensor) and name in values:
                    plain_state[key] = decode(
                        values[name], name, self._tensor_in_value, allow_pickle=self._allow_pickle
                    )
            if plain_state or is_new:
                group.write_state(parameter.tensor, state | plain_state)
            if not group.optimizer.state.get(parameter.tensor):
                group.optimizer.state.pop(parameter.tensor, None)
        for group in self._groups:
            if group.steps_are_in == "groups" and not any(
                group.optimizer.state.get(each.tensor) for each in group.parameters
            ):
                group.settings.pop(STEP, None)
            if self._groups_name in values and group.names:
                self._set_hyperparameters(group)

    def parameter_order(self) -> ParameterOrder | None:
        """Return the names and shapes of the parameters of each group.

        Return None if there are several optimizers or flattened parameters: their order is unknown.
        """
        groups = self.find_groups() if len(self.optimizers) == 1 else []
        if any(len(parameter.flat) > 1 for group in groups for parameter in group.parameters):
            return None
        return [[each.name_and_shape for each in group.parameters] for group in groups] or None

    def find_groups(self) -> list[Group]:
        """Return the param groups, and find their parameters in the state's modules.

        Names are relative to the module if one module has all parameters, and to the state
        otherwise.
        """
        ids: set[int] = set()
        for optimizer in self.optimizers:
            for settings in optimizer.param_groups:
                if not isinstance(settings["params"], list):
                    raise StateError(
                        f"{self.name}: the entry 'params' of a param group is a "
                        f"{type(settings['params']).__name__}: expected a list of parameters, as "
                        "torch's optimizers make it"
                    )
                ids.update(map(id, settings["params"]))
        found: dict[str, dict[int, Parameter]] = {}
        for binding in self._bindings:
            for parameter in binding.parameters() if binding.kind == "module" else ():
                if id(parameter.tensor) in ids:
                    found.setdefault(binding.name, {}).setdefault(id(parameter.tensor), parameter)
        parameters: dict[int, Parameter] = {}
        for module, of_module in reversed(found.items()):
            for key, parameter in of_module.items():
                parameters[key] = parameter if len(found) == 1 else parameter.add_prefix(module)
        groups = []
        for optimizer in self.optimizers:
            for settings in optimizer.param_groups:
                members = []
                for tensor in settings["params"]:
                    if id(tensor) not in parameters:
                        raise StateError(
                            f"{self.name}: no module in the state has the optimizer's parameter of "
                            f"shape {list(tensor.shape)}, so its name is unknown: put the module, "
                            "or its engine, into the state too. If it is there, create the "
                            "optimizer after all that replaces parameters, such as fully_shard"
                        )
                    members.append(parameters[id(tensor)])
                groups.append(Group(optimizer, settings, members))
        return groups

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
            self._add_tensor(local_state, parameter, key, value)
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
            self._add_tensor(local_state, parameter, name.removeprefix(prefix), tensor)

    def _add_tensor(
        self, local_state: LocalState, parameter: Parameter, key: str, value: torch.Tensor
    ) -> None:
        """Add a tensor of a parameter's state, and whether it is plain though sharded."""
        leaves = parameter.leaves(self.name, key, value)
        local_state.tensors += leaves
        if is_dtensor(parameter.tensor) and not is_dtensor(value) and not parameter.flat:
            name = f"{self.name}.{parameter.name}.{key}"
            if value.dim():
                local_state.objects[name + LOCAL] = True

    def _add_saved_value(
        self,
        local_state: LocalState,
        group: Group,
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
            full_name = name if saved.tensor(name) is not None else name + parameter.shard
            entry = saved.tensor(full_name)
            if entry is None:
                local_state.problems.append(missing_inside(name, prefix + key))
                continue
            inner_key = name.removeprefix(prefix)
            tensor = _allocate_state(parameter, group, full_name, entry, saved)
            self._tensors_in_values[saved_name] = tensor
            local_state.tensors += parameter.leaves(self.name, inner_key, tensor)

    def _fit_to_checkpoint(
        self,
        name: str,
        group: Group,
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
        keys = [key for key in saved.names_below(name) if not key.endswith(LOCAL)]
        if not keys:
            unselected = {k: v for k, v in state.items() if not selection.selects(f"{name}.{k}")}
            return unselected if len(unselected) < len(state) else state
        inside: dict[str, Mapping[str, str]] = {}  # the tensors in each plain value
        left_out: set[str] = set()
        for key in keys:
            if saved.has_object(f"{name}.{key}"):
                inside[key] = tensors_inside(f"{name}.{key}", saved)
                left_out.update(inside[key])
        for saved_key in () if parameter.is_empty else keys:
            key, _, shard = saved_key.partition(SHARD)
            if shard and SHARD + shard != parameter.shard:
                continue  # another rank loads it
            saved_name, entry = f"{name}.{saved_key}", saved.tensor(f"{name}.{saved_key}")
            if f"{name}.{key}" in left_out or (entry is None and key not in inside):
                continue
            fits = key in state and isinstance(state[key], torch.Tensor) == (entry is not None)
            if not fits and selection.selects(saved_name, *inside.get(key, ())):
                new = None
                if entry is not None:
                    new = _allocate_state(parameter, group, saved_name, entry, saved)
                state = {**state, key: new}
        return state

    def _claim_shards(
        self,
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

    def _tensor_in_value(self, name: str) -> torch.Tensor:
        if name not in self._tensors_in_values:
            raise StateError(
                f"{name}: a value of the optimizer {self.name} contains this tensor, which was not "
                f"loaded: leave the optimizer out with skip=[{f'{self.name}.*'!r}]"
            )
        return self._tensors_in_values[name]

    def _set_hyperparameters(self, group: Group) -> None:
        """Set the hyperparameters of a group to the saved ones of its first parameter."""
        member = group.names[0]
        name = f"{self._groups_name}.{member}"
        settings = decode(self._settings[member], name, allow_pickle=self._allow_pickle)
        if not isinstance(settings, dict):
            raise StateError(
                f"{name}: expected a dict of hyperparameters in the checkpoint, found a "
                f"{type(settings).__name__}: leave the optimizer out with "
                f"skip=[{f'{self.name}.*'!r}]"
            )
        for key, value in hyperparameters_of(settings, group.other_keys).items():
            current = group.settings.get(key)
            if isinstance(current, torch.Tensor) and isinstance(value, (int, float, torch.Tensor)):
                with torch.no_grad():
                    current.copy_(torch.as_tensor(value, device=current.device))
            else:
                group.settings[key] = value


def _as_saved(leaf: TensorLeaf, saved: SavedNames) -> TensorLeaf:
    """Return the leaf under the name of its shard, if it was saved so."""
    entry = saved.tensor(leaf.name)
    if leaf.of_shard is None or (entry is not None and entry.shape == leaf.shape):
        return leaf
    of_shard = leaf.of_shard()
    if entry is not None:  # one element that ranks shared
        return replace(of_shard, name=leaf.name) if entry.shape == of_shard.shape else leaf
    return leaf if saved.tensor(of_shard.name) is None else of_shard


def _allocate_state(
    parameter: Parameter, group: Group, name: str, entry: TensorEntry, saved: SavedNames
) -> torch.Tensor:
    """Allocate a state tensor on the device where the optimizer itself would create it."""
    base, _, shard = name.partition(SHARD)
    counts_on_device = group.settings.get("capturable") or group.settings.get("fused")
    is_count = base.endswith(f"{parameter.representative_name}.{STEP}")
    on_host = is_count and not counts_on_device
    device = torch.device("cpu") if on_host else parameter.tensor.device
    dtype = getattr(torch, entry.dtype)
    if shard:
        return torch.zeros(entry.shape, dtype=dtype, device=device)
    is_plain = saved.has_object(name + LOCAL)
    return parameter.allocate_state(dtype, entry.shape, device, is_plain=is_plain)
