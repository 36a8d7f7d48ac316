"""Give the layers of bitsandbytes the quantization that they save, but do not load themselves.

bitsandbytes is not imported: its layers are recognised by their names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.errors import StateError
from shardwise.state.name_lookup import SavedNames

_LAYERS = ("Linear4bit", "Linear8bitLt")
_PACKED_STATE = "weight.quant_state.bitsandbytes__"
Layer = tuple[str, Any, bool]
"""The prefix of a layer's names, the layer, and whether it has 4-bit weights."""


def quantized_layers(module: nn.Module) -> list[Layer]:
    """Return the layers of bitsandbytes in a module."""
    return [
        (f"{path}." if path else "", part, cls.__name__ == "Linear4bit")
        for path, part in module.named_modules(remove_duplicate=False)
        for cls in type(part).__mro__
        if cls.__name__ in _LAYERS and cls.__module__.startswith("bitsandbytes.")
    ]


def restore_quantized(layers: Sequence[Layer], entries: Mapping[str, Any]) -> set[str]:
    """Set the quantization of layers of bitsandbytes.

    Args:
        layers: the layers. Their own tensors have the loaded values. Among them are the scales of
            8-bit layers.
        entries: the loaded values by the keys of the module's state dict.

    Returns:
        The keys of the quantization. They are restored, and `load_state_dict` does not need them.

    Raises:
        StateError: an 8-bit layer was saved in another layout than rows.
    """
    restored: set[str] = set()
    for prefix, layer, is_4_bit in layers:
        if not is_4_bit:
            layout = int(entries.get(f"{prefix}weight_format", 0))
            if layout != 0:
                raise StateError(
                    f"{prefix}weight_format: this 8-bit layer was saved in the layout {layout}, "
                    "and bitsandbytes reads only rows (0): save it again with a newer version of "
                    "bitsandbytes"
                )
            restored.update({f"{prefix}SCB", f"{prefix}weight_format"} & entries.keys())
            continue
        weight, state = f"{prefix}weight.", _state_of(layer)
        keys = [key for key in entries if key.startswith(weight)]
        if state is not None and any(key.startswith(prefix + _PACKED_STATE) for key in keys):
            # from_dict changes the dict that it gets.
            parts = {key.removeprefix(weight): entries[key] for key in keys}
            loaded = type(state).from_dict(parts, device=state.absmax.device)
            vars(state).update(vars(loaded))  # the layer, its weight and FSDP refer to this object
            restored.update(keys)
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
    for prefix, layer, is_4_bit in layers:
        state = _state_of(layer) if is_4_bit else None
        for key, value in {} if state is None else state.as_dict(packed=True).items():
            if f"{prefix}weight.{key}" not in keys:
                yield f"{prefix}weight.{key}", value


def problems_of_unquantized(
    layers: Sequence[Layer], module_name: str, saved: SavedNames
) -> Iterator[str]:
    """Yield a problem for each 4-bit layer that was saved quantized, but is not quantized now."""
    for prefix, layer, is_4_bit in layers:
        name = f"{module_name}.{prefix}"
        packed = [f"{name}{_PACKED_STATE}{kind}" for kind in ("nf4", "fp4")]
        was_quantized = any(saved.tensor(each) is not None for each in packed)
        if is_4_bit and was_quantized and _state_of(layer) is None:
            yield (
                f"{name}weight: quantized in the checkpoint, but not in the target: "
                "move the module to its device before loading, which quantizes it"
            )


def _state_of(layer: Any) -> Any:
    state = getattr(layer.weight, "quant_state", None)
    return getattr(layer, "quant_state", None) if state is None else state
