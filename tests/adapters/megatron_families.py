"""Published models in Megatron-Core. Tests run these functions on the ranks of a gang.

Only workers import this module, because it changes torch for the whole process. Megatron-Core
computes its own layers, without Transformer Engine; only the product of queries, keys and values
of latent attention is computed here, because Megatron-Core has it for GPUs only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.adapters import megatron_training  # changes torch: it is first

__all__ = ["megatron_training"]

import megatron_on_cpu
import train_megatron as training
from megatron.core import parallel_state as ps
from megatron.core.activations import quick_gelu
from megatron.core.models.gpt import gpt_layer_specs as layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

import shardwise as sw

Config = dict[str, Any]
for absent in ("TEColumnParallelLinear", "TELinear"):
    if not isinstance(getattr(multi_latent_attention, absent), type):  # 0.16 needs a class
        setattr(multi_latent_attention, absent, type(absent, (), {}))
SIGMOID = ("glm4_moe", "deepseek_v3")
PADDED_VOCAB = 64


class PlainAttention(torch.nn.Module):
    """Attention whose values have another size than its keys."""

    def __init__(self, softmax_scale: float, **_: Any) -> None:
        super().__init__()
        self._scale = softmax_scale

    def forward(self, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> torch.Tensor:
        q, k, v = (each.permute(1, 2, 0, 3) for each in (q, k, v))
        hidden = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(-1, -2) * self._scale).masked_fill(hidden, float("-inf"))
        return (scores.softmax(-1) @ v).permute(2, 0, 1, 3).flatten(2)


def config_of(config: Config, division: dict[str, int]) -> TransformerConfig:
    """Return the configuration of Megatron-Core for one of Hugging Face."""
    kind, experts = config["model_type"], number_of_experts(config)
    options: Config = {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": config["num_attention_heads"],
        "num_query_groups": config["num_key_value_heads"],
        "layernorm_epsilon": config["rms_norm_eps"],
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": kind in ("qwen2", "glm4_moe", "gpt_oss"),
        "qk_layernorm": kind in ("qwen3", "qwen3_moe", *SIGMOID),
        "tensor_model_parallel_size": division.get("tp", 1),
        "pipeline_model_parallel_size": division.get("pp", 1),
        "expert_model_parallel_size": division.get("ep", 1),
        "expert_tensor_parallel_size": 1 if division.get("ep") else None,
        "use_cpu_initialization": True,
        "pipeline_dtype": torch.float32,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
    }
    if config.get("head_dim") and kind != "deepseek_v3":
        options["kv_channels"] = config["head_dim"]
    if experts:
        options |= {
            "num_moe_experts": experts,
            "moe_router_topk": config["num_experts_per_tok"],
            "moe_ffn_hidden_size": config.get("moe_intermediate_size")
            or config["intermediate_size"],
            "moe_token_dispatcher_type": "allgather",
            "moe_router_load_balancing_type": "none",
        }
    if kind in SIGMOID:
        options |= options_of_sigmoid(config)
    if kind == "gpt_oss":
        return config_of_gpt_oss(config, options)
    if kind == "deepseek_v3":
        return MLATransformerConfig(**options, **options_of_latent_attention(config))
    return TransformerConfig(**options)


def number_of_experts(config: Config) -> int | None:
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((config[key] for key in keys if key in config), None)


def options_of_sigmoid(config: Config) -> Config:
    """Return the options for a router with a bias, shared experts, and one more layer."""
    dense = config["first_k_dense_replace"]
    options = {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": config["routed_scaling_factor"],
        "moe_shared_expert_intermediate_size": config["moe_intermediate_size"],
        "moe_layer_freq": [0] * dense + [1] * (config["num_hidden_layers"] - dense),
        "mtp_num_layers": config["num_nextn_predict_layers"],
    }
    if config["n_group"] > 1:
        options["moe_router_num_groups"] = config["n_group"]
        options["moe_router_group_topk"] = config["topk_group"]
    return options


def options_of_latent_attention(config: Config) -> Config:
    return {
        "multi_latent_attention": True,
        "q_lora_rank": config["q_lora_rank"],
        "kv_lora_rank": config["kv_lora_rank"],
        "qk_head_dim": config["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": config["qk_rope_head_dim"],
        "v_head_dim": config["v_head_dim"],
        "rope_type": "rope",
        "rotary_base": 10000,
        "rotary_percent": 1.0,
    }


def config_of_gpt_oss(config: Config, options: Config) -> TransformerConfig:
    options |= {
        "add_bias_linear": True,
        "activation_func": quick_gelu,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": config["swiglu_limit"],
        "softmax_type": "learnable",
        "window_size": (config["sliding_window"] - 1, 0),
        "window_attn_skip_freq": 2,
        "attention_softmax_in_fp32": True,
    }
    made: Any = TransformerConfig(**options)
    rope = config["rope_parameters"]
    made.yarn_rotary_scaling_factor = rope["factor"]
    made.yarn_original_max_position_embeddings = rope["original_max_position_embeddings"]
    made.yarn_beta_fast, made.yarn_beta_slow = rope["beta_fast"], rope["beta_slow"]
    made.yarn_correction_range_round_to_int = rope["truncate"]
    made.yarn_mscale, made.yarn_mscale_all_dim = 1.0, 0.0
    return made  # type: ignore[no-any-return]


def model_of(config: Config, options: TransformerConfig) -> Any:
    """Return this rank's part of a model, with random weights."""
    kind = config["model_type"]
    if kind in SIGMOID:  # layers differ
        layers: Any = layer_specs.get_gpt_decoder_block_spec(options, use_transformer_engine=False)
    else:
        layers = layer_specs.get_gpt_layer_local_spec(
            num_experts=options.num_moe_experts,
            moe_grouped_gemm=False,
            qk_layernorm=options.qk_layernorm,
            normalization="RMSNorm",
        )
    for each in layers.layer_specs if kind == "deepseek_v3" else ():
        each.submodules.self_attention.submodules.core_attention = PlainAttention
    predicting: Config = {}
    if options.mtp_num_layers:
        spec = layer_specs.get_gpt_mtp_block_spec(options, layers, use_transformer_engine=False)
        predicting["mtp_block_spec"] = spec
    rope = config["rope_parameters"]
    model: Any = GPTModel(
        config=options,
        transformer_layer_spec=layers,
        vocab_size=PADDED_VOCAB,
        max_sequence_length=64,
        pre_process=ps.is_pipeline_first_stage(),
        post_process=ps.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=config["tie_word_embeddings"],
        position_embedding_type="yarn" if rope["rope_type"] == "yarn" else "rope",
        rotary_percent=rope.get("partial_rotary_factor", 1.0),
        rotary_base=int(rope["rope_theta"]),
        **predicting,
    )
    return model.eval()


def pass_through(published: str, place: str, back: str, division: dict[str, int]) -> torch.Tensor:
    """Load a published model, save it as ours, and export it again; return its logits."""
    config: Config = json.loads((Path(published) / "config.json").read_text())
    ps.initialize_model_parallel(
        division.get("tp", 1),
        division.get("pp", 1),
        expert_model_parallel_size=division.get("ep", 1),
        expert_tensor_parallel_size=1 if division.get("ep") else None,
    )
    try:
        megatron_on_cpu.seed_model_parallel(123)
        model = model_of(config, config_of(config, division))
        sw.load(published, {"model": [model]}, spec=sw.spec(published, to="megatron"))
        sw.save(place, {"model": [model]})
        sw.export(place, back, base=published, group=dist.group.WORLD)
        model.mtp_process, model.config.mtp_num_layers = False, None  # they need labels in 0.16
        return training.logits([model])
    finally:
        ps.destroy_model_parallel()
