"""The binding of modules: saves parameters, persistent buffers and extra state.

Names lack the prefixes of wrappers (DDP, torch.compile).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import nn

from shardwise.adapters.binding import Binding
from shardwise.adapters.bitsandbytes import (
    hidden_quantization,
    problems_of_unquantized,
    restore_quantized,
)
from shardwise.adapters.dtensor import is_dtensor
from shardwise.adapters.fsdp1 import (
    flat_parameters,
    is_fsdp1,
    leaves_of_flat_parameters,
    reshard_fsdp1,
)
from shardwise.adapters.parameters import NameCleaner, Parameter, unwrap_data_parallel
from shardwise.adapters.tensors import tensor_leaf
from shardwise.errors import StateError, user_code
from shardwise.plan.name_lookup import SavedNames
from shardwise.state.leaves import LocalState, TensorLeaf
from shardwise.state.plain_values import JsonValue, decode, encode
from shardwise.state.selection import Selection

EXTRA_STATE = "_extra_state"
_INCOMPLETE = "The load is incomplete: tensors are loaded, optimizers and values may be old"


@dataclass(slots=True)
class ModuleContents:
    """The part of a model that this rank holds.

    Attributes:
        tensors: parameters and persistent buffers.
        extra_state: for each name, the value of `get_extra_state()`.
        problems: reasons why the model cannot be loaded.
        unselected: names that a load does not change.
    """

    tensors: list[TensorLeaf] = field(default_factory=list)
    extra_state: dict[str, object] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unselected: list[str] = field(default_factory=list)


class Weights(Protocol):
    """How one framework gives access to the weights of a model on this rank.

    If a framework keeps master weights, they take the place of the module's parameters, under the
    same names.
    """

    def parameters(self) -> Iterator[Parameter]:
        """Yield the parameters that an optimizer may hold, with their names in the model."""
        ...

    def contents(self, module_name: str) -> ModuleContents:
        """Return the tensors and values to save. All names begin with `module_name`."""
        ...

    def targets(self, module_name: str, saved: SavedNames, selection: Selection) -> ModuleContents:
        """Return the tensors and values to load. Tensors that do not exist yet are allocated."""
        ...

    def restore(self, module_name: str, extra_state: Mapping[str, object]) -> None:
        """Set extra state, after the tensors are filled."""
        ...

    def update_from_master_weights(self) -> None:
        """Compute the module's weights from the loaded master weights. This is a collective."""
        ...


class ModuleBinding(Binding):
    """A model, or the parts of a model that this rank holds, such as pipeline stages."""

    kind = "module"

    def __init__(self, name: str, weights: Weights, *, allow_pickle: bool) -> None:
        self.name = name
        self.weights = weights
        self._allow_pickle = allow_pickle
        self._extra_names: tuple[str, ...] = ()

    def parameters(self) -> Iterator[Parameter]:
        """Yield the parameters that an optimizer may hold, with their names in the model."""
        return self.weights.parameters()

    def local_state(self) -> LocalState:
        """Return tensors by their clean names, and extra state as plain values."""
        return self._encode(self.weights.contents(self.name))

    def targets(self, saved: SavedNames, selection: Selection) -> LocalState:
        """Return the tensors and values to load. Selected meta tensors are allocated first."""
        contents = self.weights.targets(self.name, saved, selection)
        self._extra_names = tuple(contents.extra_state)
        return selection.select_from(self._encode(contents))

    def restore(self, values: Mapping[str, JsonValue]) -> None:
        """Set extra state, after the tensors are filled."""
        extra_state = {
            name: decode(values[name], name, allow_pickle=self._allow_pickle)
            for name in self._extra_names
            if name in values
        }
        self.weights.restore(self.name, extra_state)

    def rebuild_weights(self) -> None:
        """Compute the module's weights from the loaded master weights."""
        with torch.no_grad():
            self.weights.update_from_master_weights()

    def _encode(self, contents: ModuleContents) -> LocalState:
        objects = {
            name: encode(value, name, allow_pickle=self._allow_pickle)
            for name, value in contents.extra_state.items()
        }
        return LocalState(
            contents.tensors, objects, problems=contents.problems, unselected=contents.unselected
        )


@dataclass(frozen=True, slots=True)
class _MadeValues:
    """What a module's `state_dict` returns beyond the module's own tensors and its extra state.

    Filling such a tensor may change nothing in the module, so `load_state_dict` gets it.

    Attributes:
        entries: all entries of the state dict but extra state, by their paths.
        path_by_name: the paths of the values that `state_dict` made, by their clean names.
    """

    entries: dict[str, object] = field(default_factory=dict)
    path_by_name: dict[str, str] = field(default_factory=dict)

    def restore(self, module: nn.Module, module_name: str) -> None:
        """Pass the values to the module.

        Raises:
            StateError: the module does not accept some of them.
        """
        with user_code(module_name, f"load_state_dict(). {_INCOMPLETE}"):
            restored = restore_quantized(module, self.entries)
            if restored.issuperset(self.path_by_name.values()):
                return
            rest = {path: value for path, value in self.entries.items() if path not in restored}
            result = module.load_state_dict(rest, strict=False)
        unexpected = getattr(result, "unexpected_keys", [])
        missing = [
            key
            for key in getattr(result, "missing_keys", [])
            if key.rpartition(".")[2] != EXTRA_STATE
        ]
        problems = [f"does not accept {key}" for key in unexpected]
        problems += [f"lacks {key}" for key in missing]
        if problems:
            raise StateError(
                f"{module_name}: load_state_dict() {', '.join(problems)}, given what state_dict() "
                f"returned: change the module so that both agree. {_INCOMPLETE}"
            )


class ModuleWeights:
    """Weights inside the modules: plain tensors, DTensors, or FSDP1's flat parameters."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = [unwrap_data_parallel(module) for module in modules]
        self._cleaners = [NameCleaner(module) for module in self._modules]
        self._made = [_MadeValues() for _ in self._modules]

    def parameters(self) -> Iterator[Parameter]:
        """Yield all parameters by their clean names."""
        for module, clean in zip(self._modules, self._cleaners, strict=True):
            if is_fsdp1(module):
                yield from flat_parameters(module)
            for path, parameter in module.named_parameters(remove_duplicate=False):
                yield Parameter(parameter, clean(path))

    def contents(self, module_name: str) -> ModuleContents:
        """Return the entries of the modules' state dicts by their clean names.

        Raises:
            StateError: two modules have the same name, or a value cannot be saved.
        """
        contents = ModuleContents()
        seen_names: set[str] = set()
        for index in range(len(self._modules)):
            for name, value in self._state_dict_entries(index, module_name):
                if name in seen_names:
                    raise StateError(
                        f"{name}: two modules in the list {module_name!r} have this name, but a "
                        "list is one model in parts, with different names: put several models into "
                        "a dict, each under a separate key"
                    )
                seen_names.add(name)
                if isinstance(value, torch.Tensor):
                    contents.tensors.append(tensor_leaf(name, value))
                elif isinstance(value, TensorLeaf):
                    contents.tensors.append(value)
                else:
                    contents.extra_state[name] = value
        return contents

    def targets(self, module_name: str, saved: SavedNames, selection: Selection) -> ModuleContents:
        """Return the tensors and values to load. Selected meta tensors are allocated."""

        def is_loaded(name: str) -> bool:
            return saved.tensor(name) is not None and selection.selects(name)

        for module, clean in zip(self._modules, self._cleaners, strict=True):
            _allocate_meta_tensors(module, clean, module_name, is_loaded)
            reshard_fsdp1(module)
        contents = self.contents(module_name)
        self._allocate_made_tensors(contents, saved)
        for module in self._modules:
            contents.problems += problems_of_unquantized(
                module, module_name, lambda name: saved.tensor(f"{module_name}.{name}") is not None
            )
        # The extra state of Megatron's modules may be None, and some formats leave it out.
        for name in [name for name, value in contents.extra_state.items() if value is None]:
            if name.endswith(EXTRA_STATE) and saved.kind(name) is None:
                del contents.extra_state[name]
        return contents

    def restore(self, module_name: str, extra_state: Mapping[str, object]) -> None:
        """Set extra state, and pass what `state_dict` made to `load_state_dict`.

        Raises:
            StateError: `load_state_dict` does not accept what `state_dict` made.
        """
        for index, module in enumerate(self._modules):
            made = self._made[index]
            for name, path in made.path_by_name.items():
                if name in extra_state:
                    made.entries[path] = extra_state[name]
            if made.path_by_name:
                made.restore(module, module_name)
            for path, part in module.named_modules():
                prefix = f"{path}." if path else ""
                name = f"{module_name}.{self._cleaners[index](prefix + EXTRA_STATE)}"
                if name in extra_state:
                    with user_code(name, "set_extra_state()"):
                        part.set_extra_state(extra_state[name])

    def update_from_master_weights(self) -> None:
        """Do nothing: the modules hold their own weights."""

    def made_names(self) -> set[str]:
        """Return the names of what `state_dict` returned beyond the module's own tensors.

        Call `contents` or `targets` first.
        """
        return {name for made in self._made for name in made.path_by_name}

    def _state_dict_entries(self, index: int, module_name: str) -> Iterator[tuple[str, object]]:
        module, clean = self._modules[index], self._cleaners[index]
        made = self._made[index] = _MadeValues()
        entries: dict[str, object] = {}
        if is_fsdp1(module):
            yield from _fsdp1_entries(module, module_name, clean)
        else:
            with user_code(module_name, "state_dict()"):
                entries = dict(module.state_dict(keep_vars=True))
        own_tensors = {id(tensor) for tensor in [*module.parameters(), *module.buffers()]}
        entries.update(hidden_quantization(module, entries))
        for path, value in entries.items():
            name = f"{module_name}.{clean(path)}"
            if path.rpartition(".")[2] != EXTRA_STATE:
                made.entries[path] = value
                if id(value) not in own_tensors:
                    made.path_by_name[name] = path
            yield name, value

    def _allocate_made_tensors(self, contents: ModuleContents, saved: SavedNames) -> None:
        """Allocate the tensors that `state_dict` made and that have another shape when saved."""
        for made in filter(lambda each: each.path_by_name, self._made):
            for index, leaf in enumerate(contents.tensors):
                entry = saved.tensor(leaf.name) if leaf.name in made.path_by_name else None
                current = made.entries.get(made.path_by_name.get(leaf.name, ""))
                if entry is None or entry.shape == leaf.shape or type(current) is not torch.Tensor:
                    continue
                allocated = torch.empty(entry.shape, dtype=leaf.dtype, device=current.device)
                made.entries[made.path_by_name[leaf.name]] = allocated
                contents.tensors[index] = tensor_leaf(leaf.name, allocated)


def _fsdp1_entries(
    module: nn.Module, module_name: str, clean: NameCleaner
) -> Iterator[tuple[str, object]]:
    leaves, first_names = leaves_of_flat_parameters(module, module_name)
    leaf_by_name = {leaf.name: leaf for leaf in leaves}
    for leaf in leaves:
        yield leaf.name, leaf
    for name, first_name in first_names.items():
        yield name, replace(leaf_by_name[first_name], name=name)
    flat_parameter_ids = {id(parameter.tensor) for parameter in flat_parameters(module)}
    for path, parameter in module.named_parameters(remove_duplicate=False):
        name = f"{module_name}.{clean(path)}"
        if (
            id(parameter) not in flat_parameter_ids
            and name not in leaf_by_name
            and name not in first_names
        ):
            yield name, parameter
    for path, part in module.named_modules(remove_duplicate=False):
        for key, buffer in part._buffers.items():
            if buffer is not None and key not in part._non_persistent_buffers_set:
                path_of_buffer = f"{path}.{key}" if path else key
                yield f"{module_name}.{clean(path_of_buffer)}", buffer


def _allocate_meta_tensors(
    module: nn.Module, clean: NameCleaner, module_name: str, is_loaded: Callable[[str], bool]
) -> None:
    """Allocate meta tensors in place, so that tied modules and optimizers refer to the new ones."""
    named_tensors = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    meta_tensors = [
        tensor
        for path, tensor in named_tensors
        if tensor.is_meta and is_loaded(f"{module_name}.{clean(path)}")
    ]
    if meta_tensors:
        _refuse_meta_buffers(module, module_name)
    for tensor in meta_tensors:
        if not tensor.is_meta:
            continue  # allocated under another name
        device = (
            tensor.device_mesh.device_type if is_dtensor(tensor) else _device_for_meta_tensors()
        )
        replacement = torch.empty_like(tensor, device=device)
        if isinstance(tensor, nn.Parameter):
            replacement = nn.Parameter(replacement, requires_grad=tensor.requires_grad)
        torch.utils.swap_tensors(tensor, replacement)  # type: ignore[no-untyped-call]


def _refuse_meta_buffers(module: nn.Module, module_name: str) -> None:
    meta_buffers = [
        f"{path}.{key}" if path else key
        for path, part in module.named_modules()
        for key, buffer in part._buffers.items()
        if buffer is not None and buffer.is_meta and key in part._non_persistent_buffers_set
    ]
    if meta_buffers:
        raise StateError(
            f"{module_name}: the buffers {', '.join(meta_buffers)} are on the meta device and not "
            "persistent, so no checkpoint has them: compute them on a real device before loading"
        )


def _device_for_meta_tensors() -> torch.device:
    """Return the device on which a load allocates tensors that are on the meta device."""
    default = torch.get_default_device()
    return torch.device("cpu") if default.type == "meta" else default
