"""Modules: parameters, persistent buffers and extra state, whatever wraps them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

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


@dataclass(slots=True)
class Contents:
    """What this rank has of a model.

    Attributes:
        tensors: parameters and persistent buffers.
        extra_state: values of `get_extra_state()`, by name.
        problems: reasons why it cannot be loaded.
        left: names that a load leaves alone.
    """

    tensors: list[TensorLeaf] = field(default_factory=list)
    extra_state: dict[str, object] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


class Weights(Protocol):
    """How a framework keeps the weights of a model on this rank.

    A framework that trains master weights in another place than the module gives these in place
    of the module's parameters, under the same names.
    """

    def parameters(self) -> Iterator[Parameter]:
        """Yield what an optimizer may hold, by the names that parameters have in the model."""
        ...

    def contents(self, root: str) -> Contents:
        """Return what to save. All names begin with `root`."""
        ...

    def targets(self, root: str, saved: SavedState, selection: Selection) -> Contents:
        """Return what a load fills; first allocate what does not exist yet."""
        ...

    def restore(self, root: str, extra_state: Mapping[str, object]) -> None:
        """Set extra state, once the tensors are filled."""
        ...

    def rebuild(self) -> None:
        """Compute the module's weights from loaded master weights. All ranks call it together."""
        ...


class ModuleBinding(Binding):
    """A model, or the parts of one that this rank has, such as pipeline stages."""

    kind = "module"

    def __init__(self, name: str, weights: Weights, *, allow_pickle: bool) -> None:
        self.name = name
        self.weights = weights
        self._allow_pickle = allow_pickle
        self._extra_names: tuple[str, ...] = ()

    def parameters(self) -> Iterator[Parameter]:
        """Yield what an optimizer may hold, by the names that parameters have in the model."""
        return self.weights.parameters()

    def local_state(self) -> LocalState:
        """Return tensors by their clean names, and extra state as plain values."""
        return self._encoded(self.weights.contents(self.name))

    def targets(self, saved: SavedState, selection: Selection) -> LocalState:
        """Return what a load fills. Selected tensors on the meta device are allocated first."""
        contents = self.weights.targets(self.name, saved, selection)
        self._extra_names = tuple(contents.extra_state)
        return selection.of(self._encoded(contents))

    def restore(self, values: Mapping[str, JsonValue]) -> None:
        """Set extra state, once the tensors are filled."""
        extra_state = {
            name: decode(values[name], name, allow_pickle=self._allow_pickle)
            for name in self._extra_names
            if name in values
        }
        self.weights.restore(self.name, extra_state)

    def rebuild_weights(self) -> None:
        """Compute the module's weights from loaded master weights."""
        with torch.no_grad():
            self.weights.rebuild()

    def _encoded(self, contents: Contents) -> LocalState:
        objects = {
            name: encode(value, name, allow_pickle=self._allow_pickle)
            for name, value in contents.extra_state.items()
        }
        return LocalState(contents.tensors, objects, problems=contents.problems, left=contents.left)


class ModuleWeights:
    """Weights that the modules themselves hold: plain ones, DTensors, FSDP1's flat parameters."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = [unwrapped(module) for module in modules]
        self._clean = [CleanNames(module) for module in self._modules]
        self._copies: dict[int, dict[str, torch.Tensor]] = {}

    def parameters(self) -> Iterator[Parameter]:
        """Yield all parameters by their clean names."""
        for module, clean in zip(self._modules, self._clean, strict=True):
            if is_fsdp1(module):
                yield from flat_parameters(module)
            for path, parameter in module.named_parameters(remove_duplicate=False):
                yield Parameter(parameter, clean(path))

    def contents(self, root: str) -> Contents:
        """Return the entries of the modules' state dicts by their clean names.

        Raises:
            StateError: two modules have the same name, or a value cannot be saved.
        """
        found = Contents()
        seen: set[str] = set()
        for index in range(len(self._modules)):
            for name, value in self._entries(index, root):
                if name in seen:
                    raise StateError(
                        f"{name}: two modules in the list {root!r} have it; a list is one "
                        "model in parts, whose names differ: give several models a dict, and a "
                        "key each"
                    )
                seen.add(name)
                if isinstance(value, torch.Tensor):
                    found.tensors.append(tensor_leaf(name, value))
                elif isinstance(value, TensorLeaf):
                    found.tensors.append(value)
                else:
                    found.extra_state[name] = value
        return found

    def targets(self, root: str, saved: SavedState, selection: Selection) -> Contents:
        """Return what a load fills. Tensors on the meta device that it fills are allocated."""

        def filled(name: str) -> bool:
            return saved.tensor(name) is not None and selection.chooses(name)

        for module, clean in zip(self._modules, self._clean, strict=True):
            _materialize(module, clean, root, filled)
            reshard(module)
        self._copies = {}
        found = self.contents(root)
        # Megatron's modules have extra state of None, which some formats leave out.
        for name in [name for name, value in found.extra_state.items() if value is None]:
            if name.endswith(EXTRA_STATE) and saved.kind(name) is None:
                del found.extra_state[name]
        return found

    def restore(self, root: str, extra_state: Mapping[str, object]) -> None:
        """Set extra state, and hand tensors that a state_dict hook made to load_state_dict()."""
        for index, module in enumerate(self._modules):
            if index in self._copies:
                with user_code(root, "load_state_dict()"):
                    module.load_state_dict(self._copies[index], strict=False)
            for path, part in module.named_modules():
                raw = f"{path}." if path else ""
                name = f"{root}.{self._clean[index](raw + EXTRA_STATE)}"
                if name in extra_state:
                    with user_code(name, "set_extra_state()"):
                        part.set_extra_state(extra_state[name])

    def rebuild(self) -> None:
        """Do nothing: the modules hold their own weights."""

    def _entries(self, index: int, root: str) -> Iterator[tuple[str, object]]:
        module, clean = self._modules[index], self._clean[index]
        if is_fsdp1(module):
            yield from _fsdp1_entries(module, root, clean)
            return
        own = {id(tensor) for tensor in [*module.parameters(), *module.buffers()]}
        with user_code(root, "state_dict()"):
            entries = module.state_dict(keep_vars=True)
        for path, value in entries.items():
            if isinstance(value, torch.Tensor) and id(value) not in own:
                # A state_dict hook made it, so only load_state_dict() can set it.
                self._copies.setdefault(index, {})[path] = value
            yield f"{root}.{clean(path)}", value


def _fsdp1_entries(module: nn.Module, root: str, clean: CleanNames) -> Iterator[tuple[str, object]]:
    leaves, shared = flat_tensors(module, root)
    by_name = {leaf.name: leaf for leaf in leaves}
    for leaf in leaves:
        yield leaf.name, leaf
    for name, first in shared.items():
        yield name, replace(by_name[first], name=name)
    views = {id(parameter.tensor) for parameter in flat_parameters(module)}
    for path, parameter in module.named_parameters(remove_duplicate=False):
        name = f"{root}.{clean(path)}"
        if id(parameter) not in views and name not in by_name and name not in shared:
            yield name, parameter
    for path, part in module.named_modules(remove_duplicate=False):
        for key, buffer in part._buffers.items():
            if buffer is not None and key not in part._non_persistent_buffers_set:
                full = f"{path}.{key}" if path else key
                yield f"{root}.{clean(full)}", buffer


def _materialize(
    module: nn.Module, clean: CleanNames, root: str, filled: Callable[[str], bool]
) -> None:
    """Allocate tensors on the meta device in place, so that ties and optimizers keep them."""
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    meta = [tensor for path, tensor in named if tensor.is_meta and filled(f"{root}.{clean(path)}")]
    if meta:
        _refuse_lost_buffers(module, root)
    for tensor in meta:
        if not tensor.is_meta:
            continue  # allocated under another name
        where = tensor.device_mesh.device_type if isinstance(tensor, DTensor) else _device()
        made = torch.empty_like(tensor, device=where)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        torch.utils.swap_tensors(tensor, made)  # type: ignore[no-untyped-call]


def _refuse_lost_buffers(module: nn.Module, root: str) -> None:
    lost = [
        f"{path}.{key}" if path else key
        for path, part in module.named_modules()
        for key, buffer in part._buffers.items()
        if buffer is not None and buffer.is_meta and key in part._non_persistent_buffers_set
    ]
    if lost:
        raise StateError(
            f"{root}: the buffers {', '.join(lost)} are on the meta device and not persistent, so "
            "no checkpoint has them: compute them on a real device before loading"
        )


def _device() -> torch.device:
    """Return the device on which a load allocates tensors that are on the meta device."""
    default = torch.get_default_device()
    return torch.device("cpu") if default.type == "meta" else default
