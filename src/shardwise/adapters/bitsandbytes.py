"""Give the layers of bitsandbytes the quantization that they save, but do not load themselves.

bitsandbytes is not imported: its layers are recognised by their names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shardwise.errors import StateError

_PACKED_STATE = "weight.quant_state.bitsandbytes__"


def restore_quantized(module: nn.Module, entries: Mapping[str, object]) -> set[str]:
    """Set the quantization of all layers of bitsandbytes in a module.

    Args:
        module: the module. Its own tensors have the loaded values.
        entries: the loaded values by the keys of the module's state dict.

    Returns:
        The keys of the quantization. They are restored, and `load_state_dict` does not need them.

    Raises:
        StateError: an 8-bit layer was saved in another layout than rows.
    """
    restored: set[str] = set()
    for prefix, layer, restore in _quantized_layers(module):
        own = {
            key.removeprefix(prefix): value
            for key, value in entries.items()
            if key.startswith(prefix)
        }
        restored.update(prefix + key for key in restore(prefix, layer, own))
    return restored


def hidden_quantization(
    module: nn.Module, keys: Collection[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the quantization that a module's state dict lacks.

    FSDP replaces the weights of 4-bit layers, and the layers then leave out the quantization. All
    ranks have it for the whole weight.

    Args:
        module: the module.
        keys: the keys of the state dict.
    """
    for prefix, layer, restore in _quantized_layers(module):
        state = _state_of(layer) if restore is _restore_4_bit else None
        for key, value in {} if state is None else state.as_dict(packed=True).items():
            if f"{prefix}weight.{key}" not in keys:
                yield f"{prefix}weight.{key}", value


def problems_of_unquantized(
    module: nn.Module, module_name: str, is_saved: Callable[[str], bool]
) -> Iterator[str]:
    """Yield a problem for each 4-bit layer that is not quantized yet, but was when it was saved."""
    for prefix, layer, restore in _quantized_layers(module):
        if restore is _restore_4_bit and _state_of(layer) is None:
            name = f"{prefix}weight"
            if any(is_saved(f"{prefix}{_PACKED_STATE}{kind}") for kind in ("nf4", "fp4")):
                yield (
                    f"{module_name}.{name}: quantized in the checkpoint, but not in the target: "
                    "move the module to its device before loading, which quantizes it"
                )


_Restore = Callable[[str, Any, Mapping[str, Any]], Iterator[str]]


def _quantized_layers(module: nn.Module) -> Iterator[tuple[str, Any, _Restore]]:
    for path, part in module.named_modules(remove_duplicate=False):
        for ancestor in type(part).__mro__:
            restore = _RESTORE_BY_CLASS.get(ancestor.__name__)
            if restore is not None and ancestor.__module__.startswith("bitsandbytes."):
                yield f"{path}." if path else "", part, restore
                break


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


_RESTORE_BY_CLASS: Mapping[str, _Restore] = {
    "Linear4bit": _restore_4_bit,
    "Linear8bitLt": _restore_8_bit,
}
