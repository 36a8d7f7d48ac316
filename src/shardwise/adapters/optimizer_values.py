"""Plain values in an optimizer's state, and the tensors inside them, such as LBFGS's history.

The tensors are saved like all others. Their names have the indices and keys of the value, for
example `optimizer.weight.old_dirs.3`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from shardwise.adapters.parameters import Parameter
from shardwise.adapters.tensors import tensor_of_array
from shardwise.adapters.values import missing_inside, tensors_inside
from shardwise.errors import StateError
from shardwise.manifest.manifest import TensorEntry
from shardwise.plan.name_lookup import SavedNames
from shardwise.state.leaves import LocalState
from shardwise.state.plain_values import encode
from shardwise.state.selection import Selection


def add_value(
    local_state: LocalState,
    optimizer: str,
    parameter: Parameter,
    key: str,
    value: object,
    *,
    allow_pickle: bool,
) -> None:
    """Add a value of a parameter's state, and the tensors inside it.

    Raises:
        StateError: the value cannot be saved.
    """
    found: dict[str, Any] = {}
    for name in parameter.names:
        full_name = f"{optimizer}.{name}.{key}"
        found = {}
        local_state.objects[full_name] = encode(
            value, full_name, found.__setitem__, allow_pickle=allow_pickle
        )
    prefix = f"{optimizer}.{parameter.names[-1]}."
    for name, tensor in found.items():
        if isinstance(tensor, np.ndarray):
            tensor = tensor_of_array(name, tensor)
        if not isinstance(tensor, torch.Tensor):
            raise StateError(
                f"{name}: a {type(tensor).__name__} cannot be part of an optimizer's state: keep a "
                "tensor or a DTensor"
            )
        local_state.tensors += parameter.leaves(optimizer, name.removeprefix(prefix), tensor)


def names_inside_values(names: Iterable[str], saved: SavedNames) -> set[str]:
    """Return the names of the tensors that are inside some values of the checkpoint."""
    return {
        inside for name in names if saved.has_object(name) for inside in tensors_inside(name, saved)
    }


def add_value_to_load(
    local_state: LocalState,
    optimizer: str,
    parameter: Parameter,
    key: str,
    saved: SavedNames,
    selection: Selection,
    allocate: Callable[[str, TensorEntry], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Add a saved value of a parameter's state, and new tensors for those inside it.

    Args:
        local_state: gets the value, or lists its names as unselected. A value and its tensors are
            selected together.
        allocate: returns a tensor for the parameter, given its key and its entry.

    Returns:
        The new tensors, by the names that the saved value has for them.
    """
    prefix = f"{optimizer}.{parameter.representative_name}."
    inside = tensors_inside(prefix + key, saved)
    if not selection.selects(prefix + key, *inside):
        local_state.unselected += [prefix + key, *inside]
        return {}
    local_state.objects |= {f"{optimizer}.{name}.{key}": None for name in parameter.names}
    tensors: dict[str, torch.Tensor] = {}
    for name, saved_name in inside.items():
        entry = saved.tensor(name)
        if entry is None:
            local_state.problems.append(missing_inside(name, prefix + key))
            continue
        inner_key = name.removeprefix(prefix)
        tensors[saved_name] = allocate(inner_key, entry)
        local_state.tensors += parameter.leaves(optimizer, inner_key, tensors[saved_name])
    return tensors
