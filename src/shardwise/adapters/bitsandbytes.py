"""Give the layers of bitsandbytes the quantization that they save, but do not load themselves.

bitsandbytes is not imported: its layers are recognised by their names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.errors import StateError
from shardwise.state.name_lookup import SavedNames

_PACKED_STATE = "weight.quant_state.bitsandbytes__"


Layer = tuple[str, Any, Callable[[str, Any, Mapping[str, Any]], Iterator[str]]]
"""The prefix of a layer's names, the layer, and the function that restores its quantization."""


def quantized_layers(module: nn.Module) -> list[Layer]:
    """Return the layers of bitsandbytes in a module."""
    layers: list[Layer] = []
    for path, part in module.named_modules(remove_duplicate=False):
        for ancestor in type(part).__mro__:
            restore = _RESTORE_BY_CLASS.get(ancestor.__name__)
            if restore is not None and ancestor.__module__.startswith("bitsandbytes."):
                layers.append((f"{path}." if path else "", part, restore))
                break
    return layers


def restore_quantized(layers: Sequence[Layer], entries: Mapping[str, object]) -> set[str]:
    """Set the quantization of layers of bitsandbytes.

    Args:
        layers: the layers. Their own tensors have the loaded values.
        entries: the loaded values by the keys of the module's state dict.

    Returns:
        The keys of the quantization. They are restored, and `load_state_dict` does not need them.

    Raises:
        StateError: an 8-bit layer was saved in another layout than rows.
    """
    restored: set[str] = set()
    for prefix, layer, restore in layers:
        own = {
            key.removeprefix(prefix): value
            for key, value in entries.items()
            if key.startswith(prefix)
        }
        restored.update(prefix + key for key in restore(prefix, layer, own))
    return restored


def hidden_quantization(
    layers: Sequence[Layer], keys: Collection[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the quantization that the state dict of a module lacks.

    FSDP replaces the weights of 4-bit layers, and the layers then leave out the quantization. All
    ranks have it for the whole weight.

    Args:
        layers: the layers of the module.
        keys: the keys of the state dict.
    """
    for prefix, layer, restore in layers:
        state = _state_of(layer) if restore is _restore_4_bit else None
        for key, value in {} if state is None else state.as_dict(packed=True).items():
            if f"{prefix}weight.{key}" not in keys:
                yield f"{prefix}weight.{key}", value


def problems_of_unquantized(
    layers: Sequence[Layer], module_name: str, saved: SavedNames
) -> Iterator[str]:
    """Yield a problem for each 4-bit layer that is not quantized yet, but was when it was saved."""
    for prefix, layer, restore in layers:
        if restore is _restore_4_bit and _state_of(layer) is None:
            name = f"{module_name}.{prefix}"
            packed = [f"{name}{_PACKED_STATE}{kind}" for kind in ("nf4", "fp4")]
            if any(saved.tensor(each) is not None for each in packed):
                yield (
                    f"{name}weight: quantized in the checkpoint, but not in the target: "
                    "move the module to its device before loading, which quantizes it"
                )


def _restore_4_bit(prefix: str, layer: Any, entries: Mapping[str, Any]) -> Iterator[str]:
    keys = [key for key in entries if key.startswith("weight.")]
    state = _state_of(layer)
    if state is None or not any(key.startswith(_PACKED_STATE) for key in keys):
        return
    # from_dict changes the dict that it gets.
    parts = {key.removeprefix("weight."): entries[key] for key in keys}
    loaded = type(state).from_dict(parts, device=state.absmax.device)
    vars(state).update(vars(loaded))  # the layer, its weight and FSDP refer to this object
    yield from keys


def _state_of(layer: Any) -> Any:
    state = getattr(layer.weight, "quant_state", None)
    return getattr(layer, "quant_state", None) if state is None else state


def _restore_8_bit(prefix: str, layer: Any, entries: Mapping[str, Any]) -> Iterator[str]:
    """Check the layout. The scales are in the layer's own tensor, which the load has filled."""
    keys = [key for key in ("SCB", "weight_format") if key in entries]
    if int(entries.get("weight_format", 0)) != 0:
        raise StateError(
            f"{prefix}weight_format: this 8-bit layer was saved in the layout "
            f"{int(entries['weight_format'])}, and bitsandbytes reads only rows (0): save it again "
            "with a newer version of bitsandbytes"
        )
    yield from keys


_RESTORE_BY_CLASS = {
    "Linear4bit": _restore_4_bit,
    "Linear8bitLt": _restore_8_bit,
}
