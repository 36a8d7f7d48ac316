"""Plan adapters as PEFT writes them: `adapter_model.safetensors` and `adapter_config.json`.

The adapter `default` is in the target itself, and each other one in a directory of its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from shardwise.kernel.errors import StateError
from shardwise.kernel.manifest.manifest import ADAPTERS, FROZEN
from shardwise.parts.convert.plan import ExportContents, ExportFiles, TargetTensor
from shardwise.parts.convert.targets.hf import (
    PEFT_PREFIX,
    plan_safetensors_file,
    split_adapter_name,
)
from shardwise.ports.binding import decode

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_DEFAULT = "default"
_KINDS = ("LORA", "IA3", "LOHA", "LOKR", "OFT", "HRA")
"""The kinds of adapters whose files have the tensors of the model, under other names."""
_SAVE_WITH_PEFT = "load the checkpoint into the model, and call its save_pretrained()"


def plan_peft_files(contents: ExportContents) -> ExportFiles:
    """Plan the files of all adapters of the model. `max_file` does not apply.

    Raises:
        StateError: there is no adapter, or one of another kind; or the model has a trained tensor
            that belongs to no adapter; or safetensors does not support the dtype of a tensor.
    """
    configs = _configs(contents)
    adapters: dict[str, list[TargetTensor]] = {}
    others: list[TargetTensor] = []
    for each in contents.model_tensors():
        found = split_adapter_name(each.name, configs)
        if found is not None:
            adapters.setdefault(found[0], []).append(replace(each, name=_with_prefix(found[1])))
        elif owners := [name for name in configs if _has_bias(configs[name], each.name)]:
            for name in owners:
                bias = replace(each, name=_with_prefix(each.name))
                adapters.setdefault(name, []).append(bias)
        else:
            others.append(each)
    if not adapters:
        raise StateError(
            f"no adapter of PEFT is below {contents.model_key!r}, of the kinds {', '.join(_KINDS)}:"
            " choose the model with model_key= (on the command line, --model-key); for other kinds "
            f"of adapters, {_SAVE_WITH_PEFT}"
        )
    left_out = list(contents.describe_left_out())
    if others and contents.described.frozen:
        raise StateError(
            f"{others[0].entry.name}: {len(others)} tensors are trained or buffers, but belong to "
            "no adapter of PEFT, which would not load them: publish the merged model instead, or "
            f"leave them out with skip=[{others[0].entry.name!r}, …]"
        )
    if others:
        left_out.append(f"{others[0].entry.name}, … ({len(others)}): the base of the adapters")
    folders = {name: "" if name == _DEFAULT else f"{name}/" for name in adapters}
    files = [
        plan_safetensors_file(f"{folders[name]}{WEIGHTS}", tensors)
        for name, tensors in adapters.items()
    ]
    final_files: dict[str, bytes] = {}
    for name, folder in folders.items():
        if name in configs:
            encoded = msgspec.json.encode(configs[name], order="sorted")
            final_files[f"{folder}{CONFIG}"] = msgspec.json.format(encoded, indent=2) + b"\n"
        else:
            left_out.append(
                f"{folder}{CONFIG}: the checkpoint does not have the configuration of this adapter:"
                f" write it with model.peft_config[{name!r}].save_pretrained()"
            )
    return ExportFiles(tuple(files), lambda sums: final_files, tuple(left_out))


def _configs(contents: ExportContents) -> Mapping[str, Mapping[str, Any]]:
    """Return the configurations in the checkpoint, by the names of the adapters.

    Raises:
        StateError: an adapter is of another kind.
    """
    key = f".{FROZEN}.{ADAPTERS}."
    start = f"{contents.model_key}." if contents.model_key else ""
    configs: dict[str, Mapping[str, Any]] = {}
    for entry in contents.described.objects:
        if key in entry.name and entry.name.startswith(start):
            config: Any = decode(entry.value, entry.name)
            kind = config.get("peft_type") if isinstance(config, Mapping) else None
            name = entry.name.partition(key)[2]
            if kind not in _KINDS:
                raise StateError(
                    f"{entry.name}: the adapter {name!r} is of the kind {kind}, whose files are "
                    f"not only the tensors of the model: {_SAVE_WITH_PEFT}"
                )
            configs[name] = config
    return configs


def _has_bias(config: Mapping[str, Any], name: str) -> bool:
    """Return whether an adapter trains a bias of its base."""
    if config.get("bias") == "all":
        return name.endswith(".bias")
    return str(config.get("bias")).endswith("_only") and name.endswith(".base_layer.bias")


def _with_prefix(name: str) -> str:
    return name if name.startswith(PEFT_PREFIX) else f"{PEFT_PREFIX}{name}"
