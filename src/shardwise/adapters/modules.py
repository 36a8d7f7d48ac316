"""nn.Module: parameters, persistent buffers and extra state, whatever wraps them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.adapters.binding import Binding
from shardwise.adapters.fsdp1 import flat_parameters, flat_tensors, is_fsdp1, reshard
from shardwise.adapters.parameters import CleanNames, Parameter, unwrapped
from shardwise.adapters.tensors import tensor_leaf
from shardwise.errors import StateError, user_code
from shardwise.plan.lookup import SavedState
from shardwise.state.leaves import LocalState, TensorLeaf
from shardwise.state.objects import JsonValue, decode, encode
from shardwise.state.selection import Selection

EXTRA_STATE = "_extra_state"


class ModuleBinding(Binding):
    """A module, or the parts of one that this rank has (pipeline stages), below one name."""

    def __init__(self, name: str, modules: Sequence[nn.Module], *, allow_pickle: bool) -> None:
        self.name = name
        self._modules = [unwrapped(module) for module in modules]
        self._clean = [CleanNames(module) for module in self._modules]
        self._allow_pickle = allow_pickle
        self._copies: dict[int, dict[str, torch.Tensor]] = {}

    def parameters(self) -> Iterator[Parameter]:
        """All parameters, by the names that they have in the module."""
        for module, clean in zip(self._modules, self._clean, strict=True):
            if is_fsdp1(module):
                yield from flat_parameters(module, "")
            for path, parameter in module.named_parameters(remove_duplicate=False):
                yield Parameter(parameter, clean(path))

    def local_state(self) -> LocalState:
        """Tensors by their clean names, and extra state as plain values."""
        held = LocalState()
        seen: set[str] = set()
        for index, module in enumerate(self._modules):
            for name, value in self._entries(index, module):
                if name in seen:
                    raise StateError(
                        f"{name}: two modules in the list {self.name!r} have it; a list is one "
                        "model in parts, whose names differ: give several models a dict, and a "
                        "key each"
                    )
                seen.add(name)
                if isinstance(value, torch.Tensor):
                    held.tensors.append(tensor_leaf(name, value))
                elif isinstance(value, TensorLeaf):
                    held.tensors.append(value)
                else:
                    held.objects[name] = encode(value, name, allow_pickle=self._allow_pickle)
        return held

    def targets(self, saved: SavedState, selection: Selection) -> LocalState:
        """What to fill. What lies on the meta device, and will be filled, is given memory first."""

        def filled(name: str) -> bool:
            return saved.tensor(name) is not None and selection.chooses(name)

        for module, clean in zip(self._modules, self._clean, strict=True):
            _materialize(module, clean, self.name, filled)
            reshard(module)
        self._copies = {}
        held = self.local_state()
        # Extra state that is None, as of Megatron's modules, is none; some formats leave it out.
        none = [n for n, value in held.objects.items() if value is None and n.endswith(EXTRA_STATE)]
        for name in none:
            if saved.kind(name) is None:
                del held.objects[name]
        return selection.of(held)

    def restore(self, values: Mapping[str, JsonValue]) -> None:
        """Set the extra state, once the tensors are filled, and what the module only lent."""
        for index, module in enumerate(self._modules):
            if index in self._copies:
                with user_code(self.name, "load_state_dict()"):
                    module.load_state_dict(self._copies[index], strict=False)
            for path, part in module.named_modules():
                raw = f"{path}." if path else ""
                name = f"{self.name}.{self._clean[index](raw + EXTRA_STATE)}"
                if name in values:
                    state = decode(values[name], name, allow_pickle=self._allow_pickle)
                    with user_code(name, "set_extra_state()"):
                        part.set_extra_state(state)

    def _entries(self, index: int, module: nn.Module) -> Iterator[tuple[str, object]]:
        if is_fsdp1(module):
            yield from self._fsdp1_entries(module, self._clean[index])
            return
        clean = self._clean[index]
        own = {id(tensor) for tensor in [*module.parameters(), *module.buffers()]}
        with user_code(self.name, "state_dict()"):
            entries = module.state_dict(keep_vars=True)
        for path, value in entries.items():
            if isinstance(value, torch.Tensor) and id(value) not in own:
                # A state_dict hook made it: only load_state_dict brings it back.
                self._copies.setdefault(index, {})[path] = value
            yield f"{self.name}.{clean(path)}", value

    def _fsdp1_entries(self, module: nn.Module, clean: CleanNames) -> Iterator[tuple[str, object]]:
        leaves, shared = flat_tensors(module, self.name)
        by_name = {leaf.name: leaf for leaf in leaves}
        for leaf in leaves:
            yield leaf.name, leaf
        for name, first in shared.items():
            leaf = by_name[first]
            yield name, TensorLeaf(name, leaf.dtype, leaf.shape, leaf.fragments, leaf.identity)
        views = {id(parameter.tensor) for parameter in flat_parameters(module, "")}
        for path, parameter in module.named_parameters(remove_duplicate=False):
            name = f"{self.name}.{clean(path)}"
            if id(parameter) not in views and name not in by_name and name not in shared:
                yield name, parameter
        for path, part in module.named_modules(remove_duplicate=False):
            for key, buffer in part._buffers.items():
                if buffer is not None and key not in part._non_persistent_buffers_set:
                    full = f"{path}.{key}" if path else key
                    yield f"{self.name}.{clean(full)}", buffer


def _materialize(
    module: nn.Module, clean: CleanNames, name: str, filled: Callable[[str], bool]
) -> None:
    """Give memory to what is on the meta device, in place: ties and optimizers keep hold of it."""
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    meta = [
        (path, tensor)
        for path, tensor in named
        if tensor.is_meta and filled(f"{name}.{clean(path)}")
    ]
    if meta:
        _refuse_lost(module, name)
    for _, tensor in meta:
        if not tensor.is_meta:
            continue  # it was another name of one before
        where = tensor.device_mesh.device_type if isinstance(tensor, DTensor) else _device()
        made = torch.empty_like(tensor, device=where)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        torch.utils.swap_tensors(tensor, made)  # type: ignore[no-untyped-call]


def _refuse_lost(module: nn.Module, name: str) -> None:
    lost = [
        f"{path}.{key}" if path else key
        for path, part in module.named_modules()
        for key, buffer in part._buffers.items()
        if buffer is not None and buffer.is_meta and key in part._non_persistent_buffers_set
    ]
    if lost:
        raise StateError(
            f"{name}: {', '.join(lost)} lie on the meta device and are not persistent, so that no "
            "checkpoint has them: compute them on a real device before loading"
        )


def _device() -> torch.device:
    """Where a load gives memory to what is on the meta device."""
    default = torch.get_default_device()
    return torch.device("cpu") if default.type == "meta" else default
