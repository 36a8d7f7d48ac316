"""The binding of modules: saves parameters, persistent buffers and extra state.

Names lack the prefixes of wrappers (DDP, torch.compile).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from shardwise.adapters.bitsandbytes import (
    Layer,
    hidden_quantization,
    problems_of_unquantized,
    quantized_layers,
    restore_quantized,
)
from shardwise.errors import StateError, user_code
from shardwise.ports.binding import Binding, Context
from shardwise.state.local_state import LocalState, TensorLeaf
from shardwise.state.name_lookup import SavedNames, Selection
from shardwise.state.plain_values import JsonValue, decode, encode
from shardwise.state.tensors import Parameter, is_dtensor, is_instance, tensor_leaf

EXTRA_STATE = "_extra_state"
_INCOMPLETE = "The load is incomplete: tensors are loaded, optimizers and values may be old"
_WRAPPER_PARTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def modules_in(value: object) -> list[nn.Module]:
    """Return the modules of a value: of a module, or of a list of the parts of a model.

    For any other value, return an empty list.

    Pipeline stages, DistributedDataParallel and DataParallel become the modules inside them.
    """
    modules = []
    parts: Sequence[Any] = value if isinstance(value, (list, tuple)) else [value]
    for part in parts:
        is_stage = is_instance(part, "torch.distributed.pipelining", "PipelineStage")
        module = part.submod if is_stage else part
        while isinstance(module, (DataParallel, DistributedDataParallel)):
            module = module.module
        if not isinstance(module, nn.Module):
            return []
        modules.append(module)
    return modules


def has_fsdp1(modules: Iterable[nn.Module]) -> bool:
    """Return whether a part of the modules is wrapped in FullyShardedDataParallel."""
    for module in modules:
        for part in module.modules():
            if is_instance(part, "torch.distributed.fsdp", "FullyShardedDataParallel"):
                return True
    return False


class Part:
    """One of the modules of a binding. It knows the names of the module's tensors.

    Names lack what wrappers of modules add: torch.compile, activation checkpointing, FSDP and data
    parallelism.

    A module's `state_dict` may return more than the module's own tensors and its extra state. For
    example, `state_dict()` of a quantized module may return a copy of its weight. Filling the copy
    does not change the module, so `load_state_dict()` gets the filled copy.

    Args:
        name: the name of the binding.
        module: the module.

    Attributes:
        entries: all entries of the state dict but extra state, by their paths.
        generated: the paths of the entries that `state_dict` made, by their names.
        quantized: the layers of bitsandbytes.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.module = module
        self.entries: dict[str, object] = {}
        self.generated: dict[str, str] = {}
        self.quantized: list[Layer] = []
        self._binding_name = name
        self._prefixes = {"": f"{name}."}
        self._inside_data_parallel: set[str] = set()
        for path, part in module.named_modules(remove_duplicate=False):
            if isinstance(part, (DataParallel, DistributedDataParallel)):
                self._inside_data_parallel.add(f"{path}.module")

    def name(self, path: str) -> str:
        """Return the full name of a path in the module."""
        parent, _, last_part = path.rpartition(".")
        if parent not in self._prefixes:
            self._prefixes[parent] = f"{self.name(parent)}."
        prefix = self._prefixes[parent]
        is_wrapped = last_part in _WRAPPER_PARTS or path in self._inside_data_parallel
        return prefix[:-1] if is_wrapped else prefix + last_part

    def fit_to_checkpoint(self, local_state: LocalState, saved: SavedNames) -> None:
        """Replace tensors that `state_dict()` made in another shape than the checkpoint's.

        The new tensors are empty, and have the shapes in the checkpoint.

        Add a problem for each layer that was saved quantized, but is not quantized now.
        """
        for index, leaf in enumerate(local_state.tensors if self.generated else ()):
            path = self.generated.get(leaf.name, "")
            current, entry = self.entries.get(path), saved.tensor(leaf.name)
            if type(current) is torch.Tensor and entry and entry.shape != leaf.shape:
                allocated = torch.empty(entry.shape, dtype=leaf.dtype, device=current.device)
                self.entries[path] = allocated
                local_state.tensors[index] = tensor_leaf(leaf.name, allocated)
        if self.quantized:
            local_state.problems += problems_of_unquantized(
                self.quantized, self._binding_name, saved
            )

    def restore_generated(self) -> None:
        """Pass what `state_dict` made to the module.

        Raises:
            StateError: the module does not accept some of it.
        """
        with user_code(self._binding_name, f"load_state_dict(). {_INCOMPLETE}"):
            restored = restore_quantized(self.quantized, self.entries)
            if restored.issuperset(self.generated.values()):
                return
            rest = {path: value for path, value in self.entries.items() if path not in restored}
            result = self.module.load_state_dict(rest, strict=False)
        problems = [f"does not accept {key}" for key in getattr(result, "unexpected_keys", [])]
        problems += [
            f"lacks {key}"
            for key in getattr(result, "missing_keys", [])
            if key.rpartition(".")[2] != EXTRA_STATE
        ]
        if problems:
            raise StateError(
                f"{self._binding_name}: load_state_dict() {', '.join(problems)}, given what "
                f"state_dict() returned: change the module so that both agree. {_INCOMPLETE}"
            )

    def allocate_meta_tensors(self, is_loaded: Callable[[str], bool]) -> None:
        """Allocate meta tensors in place, so that tied modules and optimizers refer to them."""
        module = self.module
        meta_tensors: dict[int, torch.Tensor] = {}
        for named in (module.named_parameters, module.named_buffers):
            for path, tensor in named(remove_duplicate=False):
                if tensor.is_meta and is_loaded(self.name(path)):
                    meta_tensors[id(tensor)] = tensor
        if not meta_tensors:
            return
        others = buffers_of(module, persistent=False)
        lost = [path for path, buffer in others if buffer.is_meta]
        if lost:
            raise StateError(
                f"{self._binding_name}: the buffers {', '.join(lost)} are on the meta device and "
                "not persistent, so no checkpoint has them: compute them on a real device before "
                "loading"
            )
        default = torch.get_default_device()
        for tensor in meta_tensors.values():
            device = torch.device("cpu") if default.type == "meta" else default
            if is_dtensor(tensor):
                device = torch.device(tensor.device_mesh.device_type)
            replacement = torch.empty_like(tensor, device=device)
            if isinstance(tensor, nn.Parameter):
                replacement = nn.Parameter(replacement, requires_grad=tensor.requires_grad)
            torch.utils.swap_tensors(tensor, replacement)  # type: ignore[no-untyped-call]


class ModuleBinding(Binding):
    """A model, or the parts of a model that this rank holds, such as pipeline stages.

    Subclasses bind the models of frameworks. If a framework keeps master weights, they take the
    place of the module's parameters, under the same names.
    """

    kind = "module"

    def __init__(self, name: str, modules: Sequence[nn.Module], context: Context) -> None:
        self.name = name
        self.leaf_of: Callable[[str, torch.Tensor], TensorLeaf] = tensor_leaf
        self._allow_pickle = context.allow_pickle
        self._parts = [*map(partial(Part, name), modules)]

    @property
    def parts(self) -> Sequence[Part]:
        """The modules."""
        return self._parts

    def parameters(self) -> Iterator[Parameter]:
        """Yield all parameters by their clean names."""
        prefix = f"{self.name}."
        for part in self._parts:
            for path, parameter in part.module.named_parameters(remove_duplicate=False):
                yield Parameter(parameter, part.name(path).removeprefix(prefix))

    def local_state(self) -> LocalState:
        """Return the entries of the modules' state dicts by their clean names.

        Raises:
            StateError: two modules have the same name, or a value cannot be saved.
        """
        local_state = LocalState()
        seen_names: set[str] = set()
        for part in self._parts:
            for name, value in self._entries(part):
                if name in seen_names:
                    raise StateError(
                        f"{name}: two modules in the list {self.name!r} have this name, but a "
                        "list is one model in parts, with different names: put several models into "
                        "a dict, each under a separate key"
                    )
                seen_names.add(name)
                if isinstance(value, torch.Tensor):
                    local_state.tensors.append(self.leaf_of(name, value))
                elif isinstance(value, TensorLeaf):
                    local_state.tensors.append(value)
                else:
                    local_state.objects[name] = encode(value, name, allow_pickle=self._allow_pickle)
        return local_state

    def targets(self, saved: SavedNames, selection: Selection) -> LocalState:
        """Return the tensors and values to load. Selected meta tensors are allocated first."""
        return selection.select_from(self.all_targets(saved, selection))

    def all_targets(self, saved: SavedNames, selection: Selection) -> LocalState:
        """Return the targets, also those that are not selected and so stay unchanged."""

        def is_loaded(name: str) -> bool:
            return saved.tensor(name) is not None and selection.selects(name)

        for part in self._parts:
            part.allocate_meta_tensors(is_loaded)
        local_state = self.local_state()
        for part in self._parts:
            if part.generated or part.quantized:
                part.fit_to_checkpoint(local_state, saved)
        # The extra state of Megatron's modules may be None, and some formats leave it out.
        for name, value in [*local_state.objects.items()]:
            if value is None and name.endswith(EXTRA_STATE) and saved.kind(name) is None:
                del local_state.objects[name]
        return local_state

    def restore(self, values: Mapping[str, JsonValue]) -> None:
        """Set extra state, and pass what `state_dict` made to `load_state_dict`.

        Raises:
            StateError: `load_state_dict` does not accept what `state_dict` made.
        """
        for part in self._parts:
            for name, path in part.generated.items():
                if name in values:
                    part.entries[path] = self._decode(name, values)
            if part.generated:
                part.restore_generated()
            for path, module in part.module.named_modules():
                name = part.name(f"{path}.{EXTRA_STATE}".lstrip("."))
                if name in values:
                    extra_state = self._decode(name, values)
                    with user_code(name, "set_extra_state()"):
                        module.set_extra_state(extra_state)

    def generated_names(self) -> set[str]:
        """Return the names of what `state_dict` returned beyond the module's own tensors.

        Call `local_state` or `targets` first.
        """
        return {name for part in self._parts for name in part.generated}

    def _decode(self, name: str, values: Mapping[str, JsonValue]) -> object:
        return decode(values[name], name, allow_pickle=self._allow_pickle)

    def _entries(
        self, part: Part, entries: Mapping[str, object] | None = None
    ) -> Iterator[tuple[str, object]]:
        """Yield the entries of a module by their names: tensors, leaves, and extra state.

        Args:
            part: the module. It keeps the entries.
            entries: the entries by their paths. Default: the state dict of the module.
        """
        if entries is None:
            with user_code(self.name, "state_dict()"):
                entries = part.module.state_dict(keep_vars=True)
        if "bitsandbytes" in sys.modules:
            part.quantized = quantized_layers(part.module)
            entries = {**entries, **dict(hidden_quantization(part.quantized, entries))}
        own_tensors = set(map(id, [*part.module.parameters(), *part.module.buffers()]))
        part.entries, part.generated = {}, {}
        for path, value in entries.items():
            name = part.name(path)
            if path.rpartition(".")[2] != EXTRA_STATE:
                part.entries[path] = value
                if id(value) not in own_tensors:
                    part.generated[name] = path
            yield name, value


def buffers_of(module: nn.Module, *, persistent: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the path and the tensor of each persistent buffer of a module.

    With `persistent=False`, do so for each other buffer.
    """
    for path, part in module.named_modules(remove_duplicate=False):
        for key, buffer in part._buffers.items():
            if buffer is not None and persistent == (key not in part._non_persistent_buffers_set):
                yield f"{path}.{key}" if path else key, buffer


def has_class(value: object, module: str, name: str) -> bool:
    """Return whether a value's class or a base class has this name, and is defined in a module.

    A class in a submodule counts, too. The function compares names, and imports nothing.
    """
    return any(
        cls.__name__ == name and f"{cls.__module__}.".startswith(f"{module}.")
        for cls in type(value).__mro__
    )
