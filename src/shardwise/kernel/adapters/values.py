"""Bindings of tensors, plain values, objects with a state_dict, and per-rank values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from shardwise.kernel.errors import ShardwiseError, StateError, user_code
from shardwise.kernel.manifest.checksums import crc32
from shardwise.kernel.plugins import load_built_in
from shardwise.kernel.state.local_state import (
    LocalState,
    Shards,
    TensorLeaf,
    memory_extent,
    view_for_numpy,
)
from shardwise.kernel.state.name_lookup import SavedNames, Selection
from shardwise.kernel.state.per_rank import PerRankValue
from shardwise.kernel.state.plain_values import (
    COMPOSITES,
    JsonValue,
    decode,
    describes_tensor,
    encode,
)
from shardwise.kernel.state.tensors import (
    TensorLike,
    is_composite,
    tensor_leaf,
    tensor_of_array,
)
from shardwise.ports.binding import Binding


def state_of_tensor(name: str, tensor: TensorLike) -> LocalState:
    """Return what is saved of a tensor that lives in a module, or is an item of the state.

    Raises:
        StateError: this kind of tensor cannot be saved.
    """
    if is_composite(tensor):
        state: LocalState = load_built_in(COMPOSITES, "state_of_tensor")(name, tensor)
        return state
    return LocalState(tensors=[tensor_leaf(name, tensor)])


def fit_to_checkpoint(local_state: LocalState, saved: SavedNames, selection: Selection) -> None:
    """Fit the parts of tensors that wrap others to those in a checkpoint, and find differences."""
    if any(map(describes_tensor, local_state.objects.values())):
        load_built_in(COMPOSITES, "fit_to_checkpoint")(local_state, saved, selection)


class TensorBinding(Binding):
    """A tensor, array or `Shards` in the state."""

    def __init__(self, name: str, value: torch.Tensor | np.ndarray | Shards) -> None:
        self.name = name
        self._value = value

    def local_state(self) -> LocalState:
        """Return the tensor."""
        return state_of_tensor(self.name, self._value)

    def targets(self, saved: SavedNames, selection: Selection) -> LocalState:
        """Return the tensor."""
        if isinstance(self._value, np.ndarray) and not self._value.flags.writeable:
            raise StateError(
                f"{self.name}: the array is read-only, so a load cannot fill it: put a copy into "
                "the state"
            )
        local_state = self.local_state()
        fit_to_checkpoint(local_state, saved, selection)
        return selection.select_from(local_state)


class ObjectBinding(Binding):
    """A plain value, or the state of a `Stateful`. Tensors inside are stored as tensors.

    Args:
        get_value: returns the current value.
        set_value: sets the loaded value.
    """

    def __init__(
        self,
        name: str,
        get_value: Callable[[], object],
        set_value: Callable[[object], object],
        *,
        allow_pickle: bool,
    ) -> None:
        self.name = name
        self._get_value = get_value
        self._set_value = set_value
        self._allow_pickle = allow_pickle
        self._tensors: dict[str, Any] = {}

    def local_state(self) -> LocalState:
        """Return the encoded value, and the tensors in it."""
        self._tensors = {}
        with user_code(self.name, "state_dict()"):
            value = self._get_value()
        encoded = encode(
            value, self.name, self._tensors.__setitem__, allow_pickle=self._allow_pickle
        )
        leaves = [tensor_leaf(name, value) for name, value in self._tensors.items()]
        return LocalState(tensors=leaves, objects={self.name: encoded})

    def targets(self, saved: SavedNames, selection: Selection) -> LocalState:
        """Return the tensors of the saved value. A value and its tensors are selected together.

        Tensors of the current value are filled if their shapes fit. Others are allocated.
        """
        local_state = self.local_state()
        if not saved.has_object(self.name):
            names = [*local_state.names()]
            return local_state if selection.selects(*names) else LocalState(unselected=names)
        inside = tensors_inside(self.name, saved)
        if not selection.selects(self.name, *inside):
            return LocalState(unselected=[self.name, *inside])
        leaves = []
        current, self._tensors = self._tensors, {}
        filled = _FilledMemory()
        shapes = {leaf.name: leaf.shape for leaf in local_state.tensors}
        for name, saved_name in inside.items():
            entry = saved.tensor(name)
            if entry is None:
                local_state.problems.append(missing_inside(name, self.name))
                continue
            tensor: Any = current.get(name)
            can_be_filled = tensor is not None and shapes[name] == entry.shape
            if isinstance(tensor, np.ndarray):
                can_be_filled &= tensor.flags.writeable
            if can_be_filled and not isinstance(tensor, Shards):
                can_be_filled = not (isinstance(tensor, torch.Tensor) and tensor.is_meta)
                can_be_filled = can_be_filled and filled.add(
                    tensor_leaf(name, tensor), saved.stored_index(name)
                )
            if not can_be_filled:
                dtype: torch.dtype = getattr(torch, entry.dtype)
                device = self._device_of(saved_name, saved)
                tensor = torch.empty(entry.shape, dtype=dtype, device=device)
            self._tensors[saved_name] = tensor
            leaves.append(tensor_leaf(name, tensor))
        local_state.tensors = leaves
        return local_state

    def restore(self, values: Mapping[str, JsonValue]) -> None:
        """Build the saved value from the filled tensors, and set it."""
        if self.name in values:
            value = decode(
                values[self.name], self.name, self._filled_tensor, allow_pickle=self._allow_pickle
            )
            with user_code(self.name, "load_state_dict()"):
                self._set_value(value)

    def _device_of(self, saved_name: str, saved: SavedNames) -> torch.device:
        """Return the device for a tensor that the current value lacks."""
        return torch.device("cpu")

    def _filled_tensor(self, name: str) -> torch.Tensor | Shards:
        tensor = self._tensors.get(name)
        if isinstance(tensor, np.ndarray):
            return tensor_of_array(name, tensor)
        if not isinstance(tensor, (torch.Tensor, Shards)):
            raise StateError(
                f"{name}: the saved value {self.name} contains this tensor, which the load left "
                "out: load both, or leave out both with skip="
            )
        return tensor


class _FilledMemory:
    """The memory of the tensors of one value that a load fills in place."""

    def __init__(self) -> None:
        self._ranges: dict[int, list[tuple[int, int, object, int]]] = {}

    def add(self, leaf: TensorLeaf, stored_index: int) -> bool:
        """Add a tensor, and return whether it can be filled in place.

        It cannot if its memory belongs to another tensor, too, for which the checkpoint has other
        bytes. For example, a new scheduler has one tensor under several names.
        """
        for data in (fragment.data for fragment in leaf.fragments):
            start = data.data_ptr()
            stop = start + memory_extent(data) * data.element_size()
            ranges = self._ranges.setdefault(data.untyped_storage().data_ptr(), [])
            for low, high, tie_key, index in ranges:
                is_same = leaf.tie_key == tie_key and index == stored_index
                if start < high and low < stop and not is_same:
                    return False
            ranges.append((start, stop, leaf.tie_key, stored_index))
        return True


class ComparedBinding(ObjectBinding):
    """A value of an optimizer that all ranks must have alike.

    The encoded value has the checksums of its tensors, so that a save compares them as it compares
    plain values. It also names the tensors in host memory.

    Args:
        device: the device of the optimizer's parameters.
    """

    def __init__(
        self,
        name: str,
        value: Mapping[Any, object],
        set_value: Callable[[object], object],
        device: torch.device,
        *,
        allow_pickle: bool,
    ) -> None:
        super().__init__(name, lambda: value, self._set_inner, allow_pickle=allow_pickle)
        self.value = value
        self.set_value, self._device = set_value, device

    def local_state(self) -> LocalState:
        """Return the value, its tensors and their checksums."""
        local_state = super().local_state()
        encoded: dict[str, JsonValue] = {"value": local_state.objects[self.name]}
        wholes = [leaf for leaf in local_state.tensors if leaf.sharding is None and leaf.fragments]
        on_host = [leaf.name for leaf in wholes if leaf.fragments[0].data.device.type == "cpu"]
        if wholes:
            encoded["checksums"] = {leaf.name: _checksum_of(leaf) for leaf in wholes}
        if on_host and self._device.type != "cpu":
            encoded["on_host"] = [*on_host]
        local_state.objects[self.name] = encoded
        return local_state

    def _set_inner(self, loaded: object) -> None:
        self.set_value(loaded["value"] if isinstance(loaded, dict) and "value" in loaded else {})

    def _device_of(self, saved_name: str, saved: SavedNames) -> torch.device:
        encoded = saved.object(self.name)
        on_host = encoded.get("on_host") if isinstance(encoded, dict) else None
        is_on_host = isinstance(on_host, list) and saved_name in on_host
        return torch.device("cpu") if is_on_host else self._device


def _checksum_of(leaf: TensorLeaf) -> int:
    checksum = 0
    for fragment in leaf.fragments:
        array = view_for_numpy(fragment.data.cpu()).contiguous().reshape(-1).view(torch.uint8)
        checksum = crc32(array.numpy(), checksum)
    return checksum


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

    def targets(self, saved: SavedNames, selection: Selection) -> LocalState:
        """Request the value by name. The saved value may have another type than the current one."""
        return selection.select_from(LocalState(per_rank={self.name: None}))

    def restore_ranks(self, encoded: Sequence[JsonValue], rank: int, world: int) -> None:
        """Choose this rank's value from the values of all ranks that saved, and set it."""
        values = _DecodedValues(
            encoded, partial(decode, name=self.name, allow_pickle=self._allow_pickle)
        )
        try:
            with user_code(self.name, "resize or for_rank()"):
                value = self.value.for_rank(values, rank, world)
        except Exception:
            if values.failure is not None:  # the checkpoint failed, not the code of the user
                raise values.failure from None
            raise
        with user_code(self.name, "load_state_dict() or restore()"):
            self.value.restore(value)


class _DecodedValues(Sequence[Any]):
    """Values that are read and decoded when they are asked for.

    Args:
        encoded: the encoded values.
        decode: decodes one of them.

    Attributes:
        failure: the error of the last value that could not be read or decoded.
    """

    def __init__(self, encoded: Sequence[JsonValue], decode: Callable[[JsonValue], object]) -> None:
        self._encoded, self._decode = encoded, decode
        self.failure: ShardwiseError | OSError | None = None

    def __len__(self) -> int:
        return len(self._encoded)

    def __getitem__(self, index: int | slice) -> Any:
        """Return a value, or a list of values."""
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        try:
            return self._decode(self._encoded[index])
        except (ShardwiseError, OSError) as error:
            self.failure = error
            raise


def tensors_inside(name: str, saved: SavedNames) -> dict[str, str]:
    """Return the tensors inside a saved value: their names in the checkpoint, by those to load."""
    saved_prefix = saved.saved_name(name)
    return {
        name + each.removeprefix(saved_prefix): each
        for each in tensor_names_in_value(saved.object(name))
    }


def missing_inside(name: str, value: str) -> str:
    """Return the problem that a saved value contains a tensor that the checkpoint lacks."""
    return (
        f"{name}: the saved value {value} contains this tensor, but the checkpoint lacks it: leave "
        f"the value out with skip=[{value!r}]"
    )


def tensor_names_in_value(encoded: object) -> list[str]:
    """Return the names of the tensors inside an encoded value."""
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
