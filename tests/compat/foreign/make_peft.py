"""Make adapters with PEFT 0.21.2, their base models, and the models with the adapter merged.

    python make_peft.py peft.tar.xz

Each case is a directory with `base`, `adapter` and `merged`. Needs torch, transformers and peft.
"""

from __future__ import annotations

import sys
import tarfile
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

SIZES = {"vocab_size": 24, "bos_token_id": 0, "eos_token_id": 1}


def llama() -> PreTrainedModel:
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
    return LlamaForCausalLM(LlamaConfig(**SIZES, **sizes, **heads))


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(**SIZES, n_embd=8, n_layer=1, n_head=2, n_positions=8))


CASES = {
    "patterns": (
        llama,
        LoraConfig(
            r=2,
            lora_alpha=6,
            target_modules=["q_proj", "v_proj", "down_proj"],
            rank_pattern={"down_proj": 3},
            alpha_pattern={"layers.1.self_attn.v_proj": 5},
            init_lora_weights=False,
        ),
    ),
    "wholes": (
        llama,
        LoraConfig(
            r=3,
            lora_alpha=7,
            use_rslora=True,
            target_modules=["embed_tokens", "k_proj"],
            modules_to_save=["lm_head", "norm"],
            init_lora_weights=False,
        ),
    ),
    "transposed": (
        gpt2,
        LoraConfig(
            r=2,
            lora_alpha=3,
            fan_in_fan_out=True,
            lora_bias=True,
            target_modules=["c_attn", "c_fc"],
            init_lora_weights=False,
        ),
    ),
}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, (make, config)) in enumerate(CASES.items()):
            torch.manual_seed(number)
            place = Path(folder, name)
            make().save_pretrained(place / "base")
            model = get_peft_model(type(make()).from_pretrained(place / "base"), config)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.add_(torch.randn_like(parameter))
            model.save_pretrained(place / "adapter")
            base = type(make()).from_pretrained(place / "base")
            again = PeftModel.from_pretrained(base, str(place / "adapter"))
            again.merge_and_unload().save_pretrained(place / "merged")
            for extra in place.rglob("README.md"):
                extra.unlink()
        with tarfile.open(sys.argv[1], "w:xz") as archive:
            archive.add(folder, arcname="peft")


if __name__ == "__main__":
    main()
