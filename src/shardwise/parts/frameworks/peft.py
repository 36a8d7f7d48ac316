"""Find the adapters of PEFT in a model, and their configurations. PEFT is not imported."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from shardwise.ports.module_binding import Part

_DICTS = frozenset({"ModuleDict", "ParameterDict", "BufferDict"})


def find_adapters(parts: Iterable[Part]) -> tuple[set[str], dict[str, dict[str, Any]]]:
    """Return the names of all adapters in the parts of a model, and their configurations.

    Returns:
        The names that all tensors of adapters are below; and what PEFT writes to
        `adapter_config.json`, by the names of adapters that have such a form.
    """
    names: set[str] = set()
    configs: dict[str, dict[str, Any]] = {}
    for part in parts:
        found = _adapters_of(part.module)
        names.update(_names_of(part.module, found, part.name) if found else ())
        for name, (config, module) in found.items():
            document = _config_document(config, module)
            if document is not None:
                configs[name] = document
    return names, configs


def _adapters_of(model: nn.Module) -> dict[str, tuple[Any, nn.Module]]:
    """Return the configuration of each adapter, and the module that has it, by the adapter's name.

    PEFT's models have configurations, and so have models of transformers with `add_adapter`.
    """
    found: dict[str, tuple[Any, nn.Module]] = {}
    for module in model.modules():
        for attribute in ("_peft_config", "peft_config"):
            configs = vars(module).get(attribute)
            if isinstance(configs, Mapping):
                found |= {name: (config, module) for name, config in configs.items()}
    return found


def _names_of(
    model: nn.Module, adapters: Collection[str], name_of: Callable[[str], str]
) -> Iterator[str]:
    """Yield the names of all modules and parameters of adapters, which all tensors are below.

    PEFT keeps them in dicts, by the names of adapters: `up.lora_A` has the key `default`.

    Args:
        model: the model.
        adapters: the names of the adapters.
        name_of: returns the name of a path.
    """
    for path, module in model.named_modules(remove_duplicate=False):
        if not _DICTS.isdisjoint(cls.__name__ for cls in type(module).__mro__):
            for key in (*module._modules, *module._parameters, *module._buffers):
                if key in adapters:
                    yield name_of(f"{path}.{key}")


def _config_document(config: Any, model: nn.Module) -> dict[str, Any] | None:
    """Return what PEFT writes to `adapter_config.json`; None if the configuration has no such form.

    A base model in an absolute path has only the last part of the path, because other nodes may
    have it elsewhere.
    """
    try:
        document = config.to_dict()
        base = document.get("base_model_name_or_path")
        own = getattr(getattr(model, "config", None), "name_or_path", None)
        base = base or own or getattr(model, "name_or_path", None) or None
        if isinstance(base, str) and os.path.isabs(base):
            base = os.path.basename(os.path.normpath(base))
        document |= {"base_model_name_or_path": base, "inference_mode": True}
        found: dict[str, Any] = json.loads(json.dumps(document, default=_sorted_set))
    except (AttributeError, TypeError, ValueError):
        return None
    return found


def _sorted_set(value: object) -> list[str]:
    if isinstance(value, (set, frozenset)):
        return sorted(value)  # all ranks must save the same text
    raise TypeError(f"{type(value).__name__} has no form in JSON")
