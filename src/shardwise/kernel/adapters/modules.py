"""The binding of modules: saves parameters, persistent buffers and extra state.

Names lack the prefixes of wrappers (DDP, torch.compile).
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.nn.parallel import DataParallel, DistributedDataParallel

from shardwise.kernel.adapters.cells import module_cells
from shardwise.kernel.adapters.values import fit_to_checkpoint, state_of_tensor
from shardwise.kernel.errors import StateError, user_code
from shardwise.kernel.plugins import built_in, load_built_in
from shardwise.kernel.state.local_state import LocalState, TensorLeaf
from shardwise.kernel.state.name_lookup import SavedNames, Selection
from shardwise.kernel.state.parameters import Parameter
from shardwise.kernel.state.plain_values import (
    COMPOSITES,
    JsonValue,
    decode,
    describes_tensor,
    encode,
)
from shardwise.kernel.state.stated_geometry import copy_statements
from shardwise.kernel.state.tensors import (
    is_composite,
    is_dtensor,
    is_instance,
    tensor_leaf,
)
from shardwise.ports.binding import Binding, Cells, Context, Layers

EXTRA_STATE = "_extra_state"
_INCOMPLETE = "The load is incomplete: tensors are loaded, optimizers and values may be old"
_WRAPPERS = {
    "OptimizedModule": "_orig_mod",
    "ActivationWrapper": "_checkpoint_wrapped_module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "DataParallel": "module",
    "DistributedDataParallel": "module",
}
"""The attribute with the module inside a wrapper, by the class of the wrapper."""
_NO_USERS_CODE = ("torch.", "bitsandbytes.", "deepspeed.", "transformer_engine.")


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
        extra: the paths and values of extra state, by their names.
        filled_extra: extra state that is one tensor, by its name, after a load has filled it.
        layers: the layers whose state dicts lack something, of each library that has some.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.module = module
        self.entries: dict[str, object] = {}
        self.generated: dict[str, str] = {}
        self.extra: dict[str, tuple[str, object]] = {}
        self.filled_extra: dict[str, torch.Tensor] = {}
        self.metadata: object = None
        self.layers: list[Layers] = []
        self._binding_name = name
        self._prefixes = {"": f"{name}."}
        self._wrapped: set[str] = set()
        for path, part in module.named_modules(remove_duplicate=False):
            for cls in type(part).__mro__:
                if cls.__name__ in _WRAPPERS:
                    inner = f"{path}.{_WRAPPERS[cls.__name__]}".lstrip(".")
                    # FSDP's flat parameters have names without its own wrappers.
                    self._wrapped |= {inner, inner.replace("_fsdp_wrapped_module.", "")}

    def name(self, path: str) -> str:
        """Return the full name of a path in the module."""
        parent, _, last_part = path.rpartition(".")
        if parent not in self._prefixes:
            self._prefixes[parent] = f"{self.name(parent)}."
        prefix = self._prefixes[parent]
        return prefix[:-1] if path in self._wrapped else prefix + last_part

    def fit_to_checkpoint(self, local_state: LocalState, saved: SavedNames) -> None:
        """Replace tensors that `state_dict()` made in another shape than the checkpoint's.

        The new tensors are empty, and have the shapes in the checkpoint.

        Extra state is replaced by that of the checkpoint, in whatever form: `set_extra_state` gets
        it.

        Add the problems of layers that cannot load what was saved.
        """
        self._fit_extra_state(local_state, saved)
        for index, leaf in enumerate(local_state.tensors if self.generated else ()):
            path = self.generated.get(leaf.name, "")
            current, entry = self.entries.get(path), saved.tensor(leaf.name)
            if type(current) is not torch.Tensor or current.shape != leaf.shape:
                continue
            if entry and entry.shape != leaf.shape:
                allocated = torch.empty(entry.shape, dtype=leaf.dtype, device=current.device)
                self.entries[path] = allocated
                local_state.tensors[index] = tensor_leaf(leaf.name, allocated)
        for layers in self.layers:
            local_state.problems += layers.problems(self._binding_name, saved)

    def _fit_extra_state(self, local_state: LocalState, saved: SavedNames) -> None:
        self.filled_extra = {}
        for name, (_, current) in self.extra.items():
            entry = saved.tensor(name)
            if entry is None and not saved.has_object(name):
                if current is None:  # as in Megatron's modules; some formats leave it out
                    local_state.objects.pop(name, None)
                continue
            local_state.tensors = [leaf for leaf in local_state.tensors if leaf.name != name]
            local_state.objects.pop(name, None)
            if entry is None:
                local_state.objects[name] = None
                continue
            dtype: torch.dtype = getattr(torch, entry.dtype)
            own = current if isinstance(current, torch.Tensor) and not current.is_meta else None
            device = torch.device("cpu") if own is None else own.device
            tensor = torch.empty(entry.shape, dtype=dtype, device=device)
            if is_dtensor(own) and (tuple(own.shape), own.dtype) == (entry.shape, dtype):
                tensor = own
            set_filled = partial(self.filled_extra.__setitem__, name, tensor)
            leaf = replace(tensor_leaf(name, tensor), after_load=set_filled)
            local_state.tensors.append(leaf)

    def restore(self, extra: Mapping[str, object], *, through_module: bool) -> None:
        """Set extra state, and pass what `state_dict` made to the module.

        Args:
            extra: the extra state to set, by its path.
            through_module: whether the module's `load_state_dict` sets everything, because code of
                the user has to run.

        Raises:
            StateError: the module does not accept some of it.
        """
        if through_module or self.generated:
            self._call_load_state_dict(extra if through_module else {})
        if through_module or not extra:
            return
        named = {self.name(path): value for path, value in extra.items()}
        for path, part in self.module.named_modules():
            name = self.name(f"{path}.{EXTRA_STATE}".lstrip("."))
            if name in named and type(part).set_extra_state is not nn.Module.set_extra_state:
                with user_code(name, "set_extra_state()"):
                    part.set_extra_state(named[name])

    def _call_load_state_dict(self, extra: Mapping[str, object]) -> None:
        given: OrderedDict[str, object] = OrderedDict()
        with user_code(self._binding_name, f"load_state_dict(). {_INCOMPLETE}"):
            restored = {key for each in self.layers for key in each.restore(self.entries)}
            if restored and restored.issuperset(self.generated.values()) and not extra:
                return
            given |= {path: value for path, value in self.entries.items() if path not in restored}
            given |= extra
            given._metadata = self.metadata  # type: ignore[attr-defined]
            load: Callable[..., Any] = self.module.load_state_dict
            accepts_strict = {"strict", "kwargs"} & signature(load).parameters.keys()
            result = load(given, strict=False) if accepts_strict else load(given)
        # The module's own tensors are filled, also where a hook takes them out of the dict.
        made = set(self.generated.values())
        problems = [
            f"does not accept {key}"
            for key in getattr(result, "unexpected_keys", [])
            if key in made or key not in self.entries
        ]
        problems += [
            f"lacks {key}"
            for key in getattr(result, "missing_keys", [])
            if key.rpartition(".")[2] != EXTRA_STATE and key not in self.entries
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
            if is_composite(tensor):
                replacement = load_built_in(COMPOSITES, "empty_like")(tensor, device)
            else:
                replacement = torch.empty_like(tensor, device=device)
            if isinstance(tensor, nn.Parameter):
                replacement = nn.Parameter(replacement, requires_grad=tensor.requires_grad)
            copy_statements(tensor, replacement)
            torch.utils.swap_tensors(tensor, replacement)  # type: ignore[no-untyped-call]


class ModuleBinding(Binding):
    """A model, or the parts of a model that this rank holds, such as pipeline stages.

    Subclasses bind the models of frameworks. If a framework keeps master weights, they take the
    place of the module's parameters, under the same names.
    """

    kind = "module"
    has_whole_state_dict: ClassVar[bool] = True
    """Whether the module's `load_state_dict` accepts the entries that the binding fills."""

    def __init__(self, name: str, modules: Sequence[nn.Module], context: Context) -> None:
        self.name = name
        self._is_loaded = False
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
                if isinstance(value, torch.Tensor) and self.leaf_of is tensor_leaf:
                    local_state.add(state_of_tensor(name, value))
                elif isinstance(value, torch.Tensor):
                    local_state.tensors.append(self.leaf_of(name, value))
                elif isinstance(value, TensorLeaf):
                    local_state.tensors.append(value)
                else:
                    local_state.objects[name] = encode(value, name, allow_pickle=self._allow_pickle)
        return local_state

    def cells(self) -> Cells | None:
        """Return where the modules keep their tensors, if their state dicts have nothing else."""
        has_others = any(part.generated or part.extra or part.layers for part in self._parts)
        if has_others or type(self) is not ModuleBinding:
            return None
        return module_cells([part.module for part in self._parts])

    def targets(self, saved: SavedNames, selection: Selection) -> LocalState:
        """Return the tensors and values to load. Selected meta tensors are allocated first."""
        return selection.select_from(self.all_targets(saved, selection))

    def all_targets(self, saved: SavedNames, selection: Selection) -> LocalState:
        """Return the targets, also those that are not selected and so stay unchanged."""

        def is_loaded(name: str) -> bool:
            return saved.kind(name) is not None and selection.selects(name)

        for part in self._parts:
            part.allocate_meta_tensors(is_loaded)
        local_state = self.local_state()
        fit_to_checkpoint(local_state, saved, selection)
        for part in self._parts:
            if part.generated or part.layers or part.extra:
                part.fit_to_checkpoint(local_state, saved)
        self._is_loaded = any(map(selection.selects, local_state.names()))
        return local_state

    def restore(self, values: Mapping[str, JsonValue]) -> None:
        """Set extra state, and pass what `state_dict` made to `load_state_dict`.

        Raises:
            StateError: `load_state_dict` does not accept what `state_dict` made.
        """
        for part in self._parts:
            for name, path in part.generated.items():
                if name in values and not describes_tensor(values[name]):
                    part.entries[path] = self._decode(name, values)
            extra: dict[str, object] = {}
            for name, (path, _) in part.extra.items():
                if name in values:
                    extra[path] = self._decode(name, values)
                elif name in part.filled_extra:
                    extra[path] = part.filled_extra[name]
            has_code = self._is_loaded and self.has_whole_state_dict and runs_code(part.module)
            part.restore(extra, through_module=has_code)

    def rebuild_weights(self) -> None:
        """Call the hooks of modules that `load_state_dict` cannot load."""
        if self.has_whole_state_dict or not self._is_loaded:
            return
        for module in (module for part in self._parts for module in part.module.modules()):
            for hook in module._load_state_dict_post_hooks.values():
                if _is_users_code(hook):
                    with user_code(self.name, "hook of load_state_dict()"):
                        hook(module, _IncompatibleKeys([], []))

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
        metadata = getattr(entries, "_metadata", None)
        part.layers = _find_layers(part.module)
        for layers in part.layers:
            entries = {**entries, **dict(layers.hidden(entries))}
        own_tensors = set(map(id, [*part.module.parameters(), *part.module.buffers()]))
        part.entries, part.generated, part.extra = {}, {}, {}
        part.metadata = metadata
        for path, value in entries.items():
            name = part.name(path)
            if path.rpartition(".")[2] == EXTRA_STATE:
                part.extra[name] = path, value
            else:
                part.entries[path] = value
                if id(value) not in own_tensors:
                    part.generated[name] = path
            yield name, value


def _find_layers(module: nn.Module) -> list[Layers]:
    """Return the layers of libraries whose state dicts lack something. Few modules have any."""
    known = [each.load() for each in built_in("shardwise.layers") if each.name in sys.modules]
    return [layers for find in known if (layers := find(module)) is not None]


def runs_code(module: nn.Module) -> bool:
    """Return whether `load_state_dict` of a module runs code of the user.

    This is a hook of any part of the module, or a method that the module or a part overrides.
    """
    if _is_users_code(module.load_state_dict):
        return True
    for part in module.modules():
        hooks = (
            *part._load_state_dict_pre_hooks.values(),
            *part._load_state_dict_post_hooks.values(),
        )
        if any(map(_is_users_code, (part._load_from_state_dict, *hooks))):
            return True
    return False


def _is_users_code(function: Any) -> bool:
    while inner := getattr(function, "hook", None) or getattr(function, "func", None):
        function = inner
    module = getattr(function, "__module__", None) or type(function).__module__
    return not f"{module}.".startswith(_NO_USERS_CODE)


def extra_states(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield the path and the value of the extra state of each part of a module."""
    for path, part in module.named_modules(remove_duplicate=False):
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            yield f"{path}.{EXTRA_STATE}".lstrip("."), part.get_extra_state()


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
