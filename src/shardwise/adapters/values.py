"""Single tensors, plain values, objects with state_dict and load_state_dict, per-rank values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from shardwise.adapters.binding import Binding
from shardwise.adapters.tensors import TensorLike, tensor_leaf, tensor_of_array
from shardwise.errors import StateError, user_code
from shardwise.plan.lookup import SavedState
from shardwise.state.leaves import LocalState, TensorLeaf
from shardwise.state.objects import JsonValue, decode, encode
from shardwise.state.per_rank import PerRankValue
from shardwise.state.selection import Selection

Found = dict[str, "TensorLike | np.ndarray"]


@runtime_checkable
class Stateful(Protocol):
    """An object that saves and restores itself: an LR scheduler, a GradScaler, a data loader …"""

    def state_dict(self) -> object:
        """Return its state: plain values and tensors."""
        ...

    def load_state_dict(self, state_dict: object, /) -> object:
        """Set its state."""
        ...


class TensorBinding(Binding):
    """A tensor, array or `Shards` in the state."""

    def __init__(self, name: str, value: TensorLike | np.ndarray) -> None:
        self.name = name
        self._value = value

    def local_state(self) -> LocalState:
        """Return the tensor."""
        return LocalState(tensors=[_leaf(self.name, self._value)])

    def targets(self, saved: SavedState, selection: Selection) -> LocalState:
        """Return the tensor."""
        if isinstance(self._value, np.ndarray) and not self._value.flags.writeable:
            raise StateError(f"{self.name}: the array is read-only: load into a copy")
        return selection.of(self.local_state())


class ObjectBinding(Binding):
    """A plain value, or the state of a Stateful; tensors in it are stored as tensors.

    Args:
        get: returns the current value.
        put: sets the saved value.
    """

    def __init__(
        self,
        name: str,
        get: Callable[[], object],
        put: Callable[[object], object],
        *,
        allow_pickle: bool,
    ) -> None:
        self.name = name
        self._get = get
        self._put = put
        self._allow_pickle = allow_pickle
        self._found: Found = {}

    def local_state(self) -> LocalState:
        """Return the encoded value, and the tensors in it."""
        self._found = {}
        with user_code(self.name, "state_dict()"):
            value = self._get()
        encoded = encode(value, self.name, self._found.__setitem__, allow_pickle=self._allow_pickle)
        leaves = [_leaf(name, value) for name, value in self._found.items()]
        return LocalState(tensors=leaves, objects={self.name: encoded})

    def targets(self, saved: SavedState, selection: Selection) -> LocalState:
        """Return the tensors in the saved value. Existing tensors are filled, others allocated.

        A value is selected together with all its tensors.
        """
        held = self.local_state()
        if not saved.has_object(self.name):
            return selection.of(held)
        origin = saved.saved_name(self.name)
        wanted = saved_tensors(saved.object(self.name))
        names = [self.name + name.removeprefix(origin) for name in wanted]
        if not selection.chooses(self.name, *names):
            return LocalState(left=[self.name, *names])
        leaves = []
        for mine in names:
            entry = saved.tensor(mine)
            if entry is None:
                held.problems.append(
                    f"{mine}: the saved value contains this tensor, but the checkpoint lacks it"
                )
                continue
            here = self._found.get(mine)
            if here is None or tuple(here.shape) != entry.shape or not _can_be_filled(here):
                dtype: torch.dtype = getattr(torch, entry.dtype)
                here = torch.empty(entry.shape, dtype=dtype, device="cpu")
                self._found[mine] = here
            leaves.append(_leaf(mine, here))
        held.tensors = leaves
        return held

    def restore(self, values: Mapping[str, JsonValue]) -> None:
        """Build the saved value from the filled tensors, and set it."""
        if self.name in values:
            value = decode(
                values[self.name], self.name, self._filled, allow_pickle=self._allow_pickle
            )
            with user_code(self.name, "load_state_dict()"):
                self._put(value)

    def _filled(self, name: str) -> torch.Tensor:
        found = self._found.get(name)
        if isinstance(found, np.ndarray):
            return tensor_of_array(name, found)
        if not isinstance(found, torch.Tensor):
            raise StateError(f"{name}: the saved value contains a tensor that was not loaded")
        return found


class PerRankBinding(Binding):
    """A value that differs between ranks."""

    def __init__(self, name: str, value: PerRankValue, *, allow_pickle: bool) -> None:
        self.name = name
        self.value = value
        self._allow_pickle = allow_pickle

    def local_state(self) -> LocalState:
        """Return the encoded value."""
        with user_code(self.name, "state_dict() or capture()"):
            value = self.value.capture()
        encoded = encode(value, self.name, allow_pickle=self._allow_pickle)
        return LocalState(per_rank={self.name: encoded})

    def targets(self, saved: SavedState, selection: Selection) -> LocalState:
        """Return the name. The current value may be of any kind."""
        return selection.of(LocalState(per_rank={self.name: None}))

    def restore_ranks(self, encoded: list[JsonValue], rank: int, world: int) -> None:
        """Choose this rank's value from those of all ranks that saved, and set it."""
        values = [decode(each, self.name, allow_pickle=self._allow_pickle) for each in encoded]
        with user_code(self.name, "resize or for_rank()"):
            mine = self.value.for_rank(values, rank, world)
        with user_code(self.name, "load_state_dict() or restore()"):
            self.value.restore(mine)


def _can_be_filled(value: TensorLike | np.ndarray) -> bool:
    if isinstance(value, np.ndarray):
        return bool(value.flags.writeable)
    return not (isinstance(value, torch.Tensor) and value.is_meta)


def object_in(
    container: MutableMapping[str, object], key: str, name: str, *, allow_pickle: bool
) -> ObjectBinding:
    """Return the binding of a plain value in a dict. A load sets the dict's item."""

    def put(value: object) -> None:
        container[key] = value

    return ObjectBinding(name, lambda: container[key], put, allow_pickle=allow_pickle)


def saved_tensors(encoded: object) -> list[str]:
    """Return the names of the tensors in an encoded value."""
    names: list[str] = []
    stack = [encoded]
    while stack:
        value = stack.pop()
        if isinstance(value, list):
            stack.extend(reversed(value))
        elif isinstance(value, dict):
            name = value.get("name")
            if value.get("$") in ("tensor", "array") and isinstance(name, str):
                names.append(name)
            stack.extend(reversed(list(value.values())))
    return names


def _leaf(name: str, value: TensorLike | np.ndarray) -> TensorLeaf:
    if isinstance(value, np.ndarray):
        return tensor_leaf(name, tensor_of_array(name, value))
    return tensor_leaf(name, value)
