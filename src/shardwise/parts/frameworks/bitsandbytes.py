"""Give the layers of bitsandbytes the quantization that they save, but do not load themselves.

bitsandbytes is not imported: its layers are recognised by their names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.kernel.errors import StateError
from shardwise.ports.binding import SavedNames

_LAYERS = ("Linear4bit", "Linear8bitLt")
_PACKED_STATE = "weight.quant_state.bitsandbytes__"


def find_layers(module: nn.Module) -> QuantizedLayers | None:
    """Return the layers of bitsandbytes in a module; None if it has none."""
    found = [
        (f"{path}." if path else "", part, cls.__name__ == "Linear4bit")
        for path, part in module.named_modules(remove_duplicate=False)
        for cls in type(part).__mro__
        if cls.__name__ in _LAYERS and cls.__module__.startswith("bitsandbytes.")
    ]
    return QuantizedLayers(found) if found else None


class QuantizedLayers:
    """The layers of bitsandbytes in a module; see `shardwise.ports.binding.Layers`.

    Args:
        layers: for each layer, the prefix of its names, the layer, and whether it has 4-bit
            weights.
    """

    def __init__(self, layers: Sequence[tuple[str, Any, bool]]) -> None:
        self._layers = layers

    def restore(self, entries: Mapping[str, Any]) -> set[str]:
        """Set the quantization of the layers, and return its keys.

        Args:
            entries: the loaded values by the keys of the module's state dict. Among the layers' own
                tensors, which have the loaded values, are the scales of 8-bit layers.

        Raises:
            StateError: an 8-bit layer was saved in another layout than rows.
        """
        restored: set[str] = set()
        for prefix, layer, is_4_bit in self._layers:
            if not is_4_bit:
                layout = int(entries.get(f"{prefix}weight_format", 0))
                if layout != 0:
                    raise StateError(
                        f"{prefix}weight_format: this 8-bit layer was saved in the layout {layout},"
                        " and bitsandbytes reads only rows (0): save it again with a newer version "
                        "of bitsandbytes"
                    )
                restored.update({f"{prefix}SCB", f"{prefix}weight_format"} & entries.keys())
                continue
            weight, state = f"{prefix}weight.", _state_of(layer)
            keys = [key for key in entries if key.startswith(weight)]
            if state is not None and any(key.startswith(prefix + _PACKED_STATE) for key in keys):
                # from_dict changes the dict that it gets.
                parts = {key.removeprefix(weight): entries[key] for key in keys}
                loaded = type(state).from_dict(parts, device=state.absmax.device)
                vars(state).update(vars(loaded))  # the layer, its weight and FSDP refer to it
                restored.update(keys)
        return restored

    def hidden(self, keys: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the quantization that the state dict of the module lacks.

        FSDP replaces the weights of 4-bit layers, and the layers then leave out the quantization.
        All ranks have it for the whole weight.
        """
        for prefix, layer, is_4_bit in self._layers:
            state = _state_of(layer) if is_4_bit else None
            for key, value in {} if state is None else state.as_dict(packed=True).items():
                if f"{prefix}weight.{key}" not in keys:
                    yield f"{prefix}weight.{key}", value

    def problems(self, module_name: str, saved: SavedNames) -> Iterator[str]:
        """Yield a problem for each 4-bit layer that was saved quantized, but is not now."""
        for prefix, layer, is_4_bit in self._layers:
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
