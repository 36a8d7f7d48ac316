"""Choose what to save of models with adapters of PEFT."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from shardwise import trainable


def without_base(saved: Any, model: Any) -> Any:
    """Return what to put into a state to save a model's adapters, but not their frozen base.

    Args:
        saved: the model, or the engine of DeepSpeed that has it.
        model: the model itself. If it has no adapters, the result is `saved`.
    """
    if not getattr(model, "peft_config", None):
        return saved
    # Quantized models may have their weights in buffers.
    save_buffers = not getattr(model, "is_quantized", False)
    spec = trainable(saved, buffers=save_buffers, base=_name_of_base(model))
    return replace(spec, whole_is_base=True)


def _name_of_base(model: Any) -> str:
    config = next(iter(model.peft_config.values()))
    own = getattr(model, "config", None)
    name = getattr(config, "base_model_name_or_path", None) or getattr(own, "name_or_path", None)
    revision = getattr(config, "revision", None) or getattr(own, "_commit_hash", None)
    if not name:
        return ""
    # The nodes may have the same files in different directories.
    short = os.path.basename(os.path.normpath(name)) if os.path.isabs(name) else str(name)
    return f"{short}, revision {revision}" if revision else short
