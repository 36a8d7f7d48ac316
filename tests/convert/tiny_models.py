"""Tiny random models of transformers, as a program saves them: one for each family.

Importing transformers takes seconds, so functions get it as an argument.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

LAYERS, HIDDEN, VOCAB = 4, 32, 61
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"head_dim": 16, "num_experts": 4, "norm_topk_prob": True, **EXPERTS},
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "glm4_moe": (
        "Glm4MoeConfig",
        {"head_dim": 16, "n_routed_experts": 4, "use_qk_norm": True, "attention_bias": True}
        | {"first_k_dense_replace": 1, **EXPERTS},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
        | {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
        | {"v_head_dim": 16, "num_key_value_heads": 4, **EXPERTS},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    ),
}
WITH_PREDICTED_TOKENS = ("glm4_moe", "deepseek_v3")
"""Models whose published files have a layer more than transformers: it predicts a second token."""


def save_tiny_model(transformers: Any, name: str, folder: Path) -> dict[str, torch.Tensor]:
    """Save a model and a file of a tokenizer, and return all tensors of its file."""
    class_name, sizes = MODELS[name]
    generator = torch.Generator().manual_seed(7)
    config = getattr(transformers, class_name)(**{**SIZES, **sizes})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point() and "inv_freq" not in key:
                noise = torch.randn(tensor.shape, generator=generator) * 0.1
                tensor.copy_(noise + 1.0 if "norm" in key else noise)
    model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 64}')
    tensors = load_file(folder / "model.safetensors")
    if name in WITH_PREDICTED_TOKENS:
        tensors |= _predicting_layer(tensors, generator)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def _predicting_layer(
    tensors: dict[str, torch.Tensor], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Return the tensors of a layer that predicts the token after the next."""
    last, new = f"model.layers.{LAYERS - 1}.", f"model.layers.{LAYERS}."
    layer = {
        key.replace(last, new): torch.randn(each.shape, generator=generator)
        for key, each in tensors.items()
        if key.startswith(last)
    }
    layer[f"{new}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    layer[f"{new}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    for key in ("enorm", "hnorm", "shared_head.norm"):
        layer[f"{new}{key}.weight"] = torch.randn(HIDDEN, generator=generator)
    layer[f"{new}eh_proj.weight"] = torch.randn(HIDDEN, 2 * HIDDEN, generator=generator)
    return layer


def logits_of(transformers: Any, folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Return what a saved model says about tokens."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        found: torch.Tensor = model(tokens).logits
    return found
