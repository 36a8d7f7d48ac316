"""The binding of optimizers: state and hyperparameters, under the names of the parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch.optim import Optimizer

from shardwise.kernel.adapters.cells import optimizer_cells
from shardwise.kernel.adapters.optimizer_groups import (
    ELSEWHERE,
    ENTRIES,
    FORMATS,
    GROUPS,
    SHARED,
    STEP,
    Group,
    as_saved,
    claim_shards,
    hyperparameters_of,
    in_order,
    orders_of,
    steps_are_in,
)
from shardwise.kernel.adapters.optimizer_settings import (
    SavedSettings,
    parameters_elsewhere,
    settings_by_member,
)
from shardwise.kernel.adapters.optimizer_views import View, groups_of, steps_of, view_of
from shardwise.kernel.adapters.values import ComparedBinding, missing_inside, tensors_inside
from shardwise.kernel.errors import StateError
from shardwise.kernel.manifest.manifest import TensorEntry
from shardwise.kernel.plugins import load_built_in
from shardwise.kernel.state.local_state import LocalState, ParameterOrder
from shardwise.kernel.state.name_lookup import SavedNames, Selection
from shardwise.kernel.state.parameters import LOCAL, Parameter
from shardwise.kernel.state.plain_values import (
    COMPOSITES,
    JsonValue,
    decode,
    describes_tensor,
    encode,
)
from shardwise.kernel.state.tensors import SHARD, is_composite, tensor_of_array
from shardwise.ports.binding import Binding, Cells, Context


class OptimizerBinding(Binding):
    """One optimizer, or several that share the parameters of a model."""

    kind = "optimizer"
    is_inside_framework: ClassVar[bool] = False
    """Whether a framework holds the optimizer, and its state is read from attributes only."""

    def __init__(self, name: str, optimizers: Sequence[Optimizer], context: Context) -> None:
        self.name = name
        self.optimizers = [step for each in optimizers for step in steps_of(each)]
        self._given = optimizers
        self._bindings = context.bindings
        self._allow_pickle = context.allow_pickle
        self._groups_name = f"{name}.{GROUPS}"
        self._formats_name = f"{name}.{FORMATS}"
        # The order of the dimensions of state tensors in memory, by parameter and key.
        self._formats: dict[str, dict[str, tuple[int, ...]]] = {}
        self._plain: dict[str, tuple[str, bool]] = {}  # kind (without indices), is_like_parameter
        self._views: list[View] = []
        self._saved = LocalState()  # what `local_state` returned last
        self._model_names: dict[str, str] = {}  # the full name of each parameter in its module
        # What `targets` leaves to `restore`: values that belong to no parameter, the groups, each
        # parameter's state and whether some is new, hyperparameters, new tensors inside values, and
        # functions that build tensors which wrap others.
        self._others: list[ComparedBinding] = []
        self._removed: list[ComparedBinding] = []
        self._is_loaded = False
        self._groups: Sequence[Group] = ()
        self._states: list[tuple[Group, Parameter, dict[str, object], bool]] = []
        self._settings: SavedSettings | None = None
        self._tensors_in_values: dict[str, torch.Tensor] = {}
        self._to_build: dict[str, Callable[[], torch.Tensor]] = {}

    def local_state(self) -> LocalState:
        """Return the state, sharded like the parameters, and the hyperparameters."""
        local_state = LocalState()
        groups = self.find_groups()
        self._formats, self._plain = {}, {}
        for group in groups:
            for parameter in group.with_state:
                if parameter.is_copy:
                    continue
                is_empty = parameter.is_empty
                for key, value in group.read_state(parameter.tensor).items():
                    # A rank without elements may have another step count, so leave out its scalars.
                    if not is_empty or (isinstance(value, torch.Tensor) and value.numel() > 1):
                        self._add_value(local_state, group, parameter, key, value)
        # The factors of a square shard have its shape, too: other parameters tell what a key is.
        of_shards = {kind for kind, is_like in self._plain.values() if not is_like}
        names = {name for name, (kind, _) in self._plain.items() if kind in of_shards}
        local_state.tensors = [
            replace(leaf, is_like_parameter=False) if leaf.name in names else leaf
            for leaf in local_state.tensors
        ]
        if not all(leaf.fragments for leaf in local_state.tensors):
            load_built_in(COMPOSITES, "leave_out_empty")(local_state, self.optimizers)
        local_state.join_parts(to_fill=False)
        if elsewhere := parameters_elsewhere(groups):
            local_state.grouped[f"{self.name}.{ELSEWHERE}"] = [(elsewhere, True)]
        grouped: list[tuple[tuple[str, ...], JsonValue]] = []
        for group in groups:
            settings = hyperparameters_of(group.settings, group.other_keys)
            value = encode(settings, self._groups_name, allow_pickle=self._allow_pickle)
            grouped.append((group.names, value))
        local_state.grouped[self._groups_name] = grouped
        if self._formats:
            alike: dict[tuple[tuple[str, tuple[int, ...]], ...], list[str]] = {}
            for name, orders in self._formats.items():
                alike.setdefault(tuple(orders.items()), []).append(name)
            local_state.grouped[self._formats_name] = [
                (tuple(names), {key: list(order) for key, order in orders})
                for orders, names in alike.items()
            ]
        for other in self._other_values():
            if other.value:
                local_state.add(other.local_state())
        self._saved = local_state
        return local_state

    def cells(self) -> Cells | None:
        """Return where the optimizers keep their tensors, if these are all their state."""
        if type(self) is not OptimizerBinding:
            return None
        name, allow_pickle = self._groups_name, self._allow_pickle
        return optimizer_cells(self._views, self._saved, name, allow_pickle=allow_pickle)

    def targets(self, saved: SavedNames, selection: Selection) -> LocalState:
        """Return the state to load. State that does not exist yet is created.

        The optimizer does not change until `restore` gives it the created state.
        """
        local_state, values, self._formats = LocalState(), LocalState(), {}
        self._groups, self._states, self._tensors_in_values = self.find_groups(), [], {}
        self._to_build = {}
        if saved.has_object(self._formats_name):
            orders = settings_by_member(self._formats_name, saved.object(self._formats_name))
            self._formats = {each: orders_of(value) for each, value in orders.items()}
        elsewhere = parameters_elsewhere(self._groups, f"{self.name}.{ELSEWHERE}", saved)
        for group in self._groups:
            for parameter in (each for each in group.with_state if each.name not in elsewhere):
                prefix = f"{self.name}.{parameter.representative_name}"
                local_state.problems += group.find_object_problems(prefix, saved)
                claim_shards(local_state, prefix, parameter, saved, selection)
                current = group.read_state(parameter.tensor)
                state = self._fit_to_checkpoint(prefix, group, parameter, current, saved, selection)
                is_new = state is not current or group.steps_are_in != "tensors"
                self._states.append((group, parameter, state, is_new))
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) or not saved.has_object(f"{prefix}.{key}"):
                        self._add_value(local_state, group, parameter, key, value)
                    else:
                        self._add_saved_value(values, group, parameter, key, saved, selection)
        for each in (local_state, values):
            each.tensors = [as_saved(leaf, saved) for leaf in each.tensors]
            each.objects = {n: v for n, v in each.objects.items() if not n.endswith(LOCAL)}
            each.join_parts(to_fill=True)
        local_state.grouped[self._groups_name] = []  # a load needs only the name
        for name in filter(saved.has_object, (self._formats_name, f"{self.name}.{ELSEWHERE}")):
            local_state.grouped[name] = []
        self._settings = None
        if selection.selects(self._groups_name) and saved.has_object(self._groups_name):
            self._settings = SavedSettings(self._groups_name, self._groups, saved)
            local_state.problems += self._settings.find_problems(saved)
        selected = selection.select_from(local_state)
        selected.add(values)
        self._removed = []
        self._others = self._others_to_load(saved, selection)
        for other in self._others:
            selected.add(other.targets(saved, selection))
        self._is_loaded = bool(self._removed) or any(True for _ in selected.names())
        return selected

    def restore(self, values: Mapping[str, JsonValue]) -> None:
        """Set created state, plain state and hyperparameters, after the tensors are filled."""
        for group, parameter, state, is_new in self._states:
            plain_state: dict[str, object] = {}
            prefix = f"{self.name}.{parameter.representative_name}"
            for key, value in state.items():
                name = f"{prefix}.{key}"
                if not isinstance(value, torch.Tensor) and name in self._to_build:
                    plain_state[key] = self._to_build[name]()
                elif not isinstance(value, torch.Tensor) and name in values:
                    plain_state[key] = decode(
                        values[name], name, self._tensor_in_value, allow_pickle=self._allow_pickle
                    )
            if plain_state or is_new:
                group.write_state(parameter.tensor, state | plain_state)
            if not group.states.get(parameter.tensor):
                group.states.pop(parameter.tensor, None)
        for position, group in enumerate(self._groups):
            if group.steps_are_in == "groups" and not any(
                group.states.get(each.tensor) for each in group.parameters
            ):
                group.settings.pop(STEP, None)
            if self._settings is not None and self._groups_name in values:
                self._settings.set(group, position, allow_pickle=self._allow_pickle)
        for other in self._others:
            other.restore(values)
        for other in self._removed:
            other.set_value({})
        for view in self._views if self._is_loaded else ():
            view.finish()

    def parameter_order(self) -> ParameterOrder | None:
        """Return the names and shapes of the parameters of each group.

        Return None if there are several optimizers or flattened parameters: their order is unknown.
        """
        groups = self.find_groups() if len(self._given) == 1 else []
        if any(len(parameter.flat) > 1 for group in groups for parameter in group.parameters):
            return None
        return [[each.name_and_shape for each in group.parameters] for group in groups] or None

    def find_groups(self) -> list[Group]:
        """Return the param groups, and find their parameters in the state's modules.

        Names are relative to the module if one module has all parameters, and to the state
        otherwise.
        """
        ids: set[int] = set()
        self._views = []
        for optimizer in self._given:
            simple = self.is_inside_framework or steps_are_in(optimizer) != "tensors"
            view = view_of(self.name, optimizer, simple=simple)
            self._views.append(view)
            for settings in view.groups:
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
        self._model_names = {}
        for module, of_module in reversed(found.items()):
            for key, parameter in of_module.items():
                parameters[key] = parameter if len(found) == 1 else parameter.add_prefix(module)
                name = parameters[key].representative_name
                self._model_names[name] = f"{module}.{name}" if len(found) == 1 else name
        groups = []
        for view in self._views:
            for settings in view.groups:
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
                groups.append(Group(view.optimizer, settings, members, view.states, view.owned))
            if not self.is_inside_framework:
                view.refuse_stray_state()
        return groups

    def _other_values(self) -> Iterator[ComparedBinding]:
        """Yield the bindings of what belongs to no single parameter."""
        for index, view in enumerate(self._views):
            suffix = f".{index}" if len(self._views) > 1 else ""
            tensors = (tensor for group in groups_of(view.optimizer) for tensor in group["params"])
            device = next((tensor.device for tensor in tensors), torch.device("cpu"))
            found: list[tuple[str, dict[Any, Any], Callable[[object], None]]]
            found = [(SHARED, view.shared, view.set_shared)]
            if view.entries is not None:
                found.append((ENTRIES, view.entries, view.set_entries))
            for key, value, set_value in found:
                name = f"{self.name}.{key}{suffix}"
                yield ComparedBinding(
                    name, value, set_value, device, allow_pickle=self._allow_pickle
                )

    def _others_to_load(self, saved: SavedNames, selection: Selection) -> list[ComparedBinding]:
        """Return those that the target or the checkpoint have.

        If the checkpoint is from before the first step, `restore` removes shared state.
        """
        found = []
        is_trained = any(not key.startswith(GROUPS) for key in saved.names_below(self.name))
        for each in self._other_values():
            is_state = not each.name.startswith(f"{self.name}.{ENTRIES}")
            if saved.has_object(each.name) or (each.value and (is_trained or not is_state)):
                found.append(each)
            elif each.value and selection.selects(each.name):
                self._removed.append(each)
        return found

    def _add_value(
        self, local_state: LocalState, group: Group, parameter: Parameter, key: str, value: object
    ) -> None:
        """Add a value of a parameter's state: a tensor, or a plain value and the tensors inside it.

        The tensors inside a value, such as the history of LBFGS, are saved like all others. Their
        names have the indices and keys of the value: `optimizer.weight.old_dirs.3`.

        Raises:
            StateError: the value cannot be saved.
        """
        if is_composite(value):
            full_name = f"{self.name}.{parameter.representative_name}.{key}"
            state_of = load_built_in(COMPOSITES, "state_of_parameter")
            local_state.add(state_of(full_name, value, parameter, group.optimizer))
            return
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
        """Add a tensor of a parameter's state, and how it lies on the ranks."""
        if (order := parameter.unusual_order(value)) is not None:
            self._formats.setdefault(parameter.name, {})[key] = order
        leaves = parameter.leaves(self.name, key, value)
        local_state.tensors += leaves
        plain = (x for x in leaves if x.of_shard is not None and value.dim())
        self._plain |= {x.name: (key.rstrip(".0123456789"), x.is_like_parameter) for x in plain}
        if (layout := parameter.layout(value)) is not None:
            local_state.objects[f"{self.name}.{parameter.name}.{key}{LOCAL}"] = layout

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
        described = saved.object(prefix + key)
        if not selection.selects(prefix + key, *inside):
            local_state.unselected += [prefix + key, *inside]
            return
        local_state.objects |= {f"{self.name}.{name}.{key}": None for name in parameter.names}
        if describes_tensor(described):
            state_to_build = load_built_in(COMPOSITES, "state_to_build")
            state = state_to_build(prefix + key, described, parameter, saved, group.optimizer)
            self._to_build[prefix + key] = state.build
            local_state.add(state.targets())
            return
        for name, saved_name in inside.items():
            full_name = name if saved.tensor(name) is not None else name + parameter.shard
            entry = saved.tensor(full_name)
            if entry is None:
                local_state.problems.append(missing_inside(name, prefix + key))
                continue
            inner_key = name.removeprefix(prefix)
            tensor = self._allocate_state(parameter, group, inner_key, entry, saved)
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
            is_plain = isinstance(state.get(key), torch.Tensor) and not is_composite(state[key])
            # A sparse tensor may have another number of values, so it is built anew.
            is_strided = getattr(state.get(key), "layout", torch.strided) is torch.strided
            fits = key in state and is_strided and is_plain == (entry is not None)
            if not fits and selection.selects(saved_name, *inside.get(key, ())):
                new = None
                if entry is not None:
                    new = self._allocate_state(parameter, group, saved_key, entry, saved)
                state = {**state, key: new}
        return state

    def _allocate_state(
        self,
        parameter: Parameter,
        group: Group,
        saved_key: str,
        entry: TensorEntry,
        saved: SavedNames,
    ) -> torch.Tensor:
        """Allocate a state tensor as the optimizer itself would create it.

        A tensor that had the dtype of its parameter at the save has that of the parameter now. Step
        counts, and other scalars that are not moments of scalar parameters, keep their dtype.
        """
        key, _, shard = saved_key.partition(SHARD)
        counts_on_device = group.settings.get("capturable") or group.settings.get("fused")
        on_host = key == STEP and not counts_on_device
        device = torch.device("cpu") if on_host else parameter.tensor.device
        dtype: torch.dtype = getattr(torch, entry.dtype)
        is_scalar = entry.shape == () and group.counts(self.name, saved_key, parameter, saved)
        if key != STEP and not is_scalar and dtype != parameter.tensor.dtype:
            of_parameter = saved.tensor(self._model_names.get(parameter.representative_name, ""))
            if of_parameter is not None and of_parameter.dtype == entry.dtype:
                dtype = parameter.tensor.dtype
        if shard:
            return torch.zeros(entry.shape, dtype=dtype, device=device)
        name = f"{self.name}.{parameter.representative_name}.{saved_key}"
        layout = saved.object(name + LOCAL) if saved.has_object(name + LOCAL) else None
        if layout is False:
            raise StateError(
                f"{name}: the optimizer kept this state as a DTensor over a mesh of its own, which "
                "a load cannot make: call optimizer.step() once before the load, with gradients of "
                f"zeros, which makes it; or leave it out with skip=[{name + '*'!r}]"
            )
        if layout is True and self._is_of_one_element(key, entry.shape, parameter, saved):
            return torch.zeros(entry.shape, dtype=dtype, device=device)
        allocated = parameter.allocate_state(dtype, entry.shape, device, layout=layout)
        return in_order(allocated, self._formats.get(parameter.name, {}).get(key, ()))

    def _is_of_one_element(
        self, key: str, shape: tuple[int, ...], parameter: Parameter, saved: SavedNames
    ) -> bool:
        """Return whether state of one element, as its parameter has, is on each rank nevertheless.

        The state of the other parameters tells: it has one element, too.
        """
        if math.prod(shape) != 1 or shape != parameter.tensor.shape:
            return False
        names = {
            f"{self.name}.{each.representative_name}.{key}": tuple(each.tensor.shape)
            for group in self._groups
            for each in group.parameters
        }
        entries = ((saved.tensor(name), own) for name, own in names.items())
        return any(each is not None and each.shape == shape != own for each, own in entries)

    def _tensor_in_value(self, name: str) -> torch.Tensor:
        if name not in self._tensors_in_values:
            raise StateError(
                f"{name}: a value of the optimizer {self.name} contains this tensor, which was not "
                f"loaded: leave the optimizer out with skip=[{f'{self.name}.*'!r}]"
            )
        return self._tensors_in_values[name]
