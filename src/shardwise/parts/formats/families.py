"""Which built-in specification belongs to a model: by its `config.json`, or Megatron's arguments.

A family is one or more architectures of Hugging Face whose tensors the same specifications
describe: one from Megatron-Core's names and shapes to Hugging Face's, and one back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.kernel.errors import FormatError, StateError
from shardwise.parts.formats.file_tree import FileTree

CONFIG = "config.json"
DIRECTIONS = ("hf", "megatron")
_MEGATRON_PARTS = ("decoder.layers.", "embedding.word_embeddings.", "language_model.")


@dataclass(frozen=True, slots=True)
class Family:
    """The specifications of a family.

    Attributes:
        to_hf: the name of the specification from Megatron-Core to Hugging Face.
        to_megatron: the name of the specification back; None if there is none.
        has_experts: whether the specifications declare the numbers of experts and of layers that
            predict further tokens.
    """

    to_hf: str
    to_megatron: str | None
    has_experts: bool = False


_LLAMA = Family("megatron_llama", "llama_to_megatron")
_MOE = Family("megatron_moe", "moe_to_megatron", has_experts=True)
_MIXTRAL = Family("megatron_mixtral", "moe_to_megatron", has_experts=True)
_GPT_OSS = Family("megatron_gpt_oss", "gpt_oss_to_megatron")
_GPT2 = Family("megatron_gpt2", None)
FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _LLAMA),
    **dict.fromkeys(("qwen3_moe", "glm4_moe", "deepseek_v3"), _MOE),
    "mixtral": _MIXTRAL,
    "gpt_oss": _GPT_OSS,
    "gpt2": _GPT2,
}
"""The families by `model_type` in `config.json`."""


@dataclass(frozen=True, slots=True)
class _Config:
    """What the specifications need of `config.json`."""

    model_type: str
    vocab_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    n_head: int | None = None
    tie_word_embeddings: bool | None = None
    kv_lora_rank: int | None = None
    num_nextn_predict_layers: int | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """A built-in specification, and the numbers that it declares.

    Attributes:
        name: the name of the specification.
        numbers: the numbers by name.
        vocabulary_is_padded: whether `vocab` counts the padding of the vocabulary too, because
            nothing says how large the vocabulary is.
    """

    name: str
    numbers: Mapping[str, int]
    vocabulary_is_padded: bool = False


def choose_by_config(tree: FileTree, to: str) -> Choice:
    """Return the specification of a Hugging Face model.

    Args:
        tree: the directory of the model, with `config.json`.
        to: "hf", from Megatron-Core's names; or "megatron", from Hugging Face's names.

    Raises:
        FormatError: `config.json` is missing, malformed, or lacks a number.
        StateError: no built-in specification belongs to the model.
    """
    config = tree.read_json(CONFIG, _Config, "the configuration of a Hugging Face model")
    label = tree.label(CONFIG)
    family = FAMILIES.get(config.model_type)
    name = None if family is None else family.to_hf if to == "hf" else family.to_megatron
    if family is None or name is None:
        known = ", ".join(n for n, f in FAMILIES.items() if to == "hf" or f.to_megatron)
        raise StateError(
            f"{label}: no built-in specification for model_type {config.model_type[:40]!r}; there "
            f"are some for {known}: write one (docs/language.md), and pass it as spec="
        )
    heads = _required(label, "num_attention_heads", config.num_attention_heads or config.n_head)
    numbers = {"heads": heads}
    if to == "hf":
        numbers["vocab"] = _required(label, "vocab_size", config.vocab_size)
    else:
        numbers["tied"] = int(bool(config.tie_word_embeddings))
    if family is _GPT2:
        return Choice(name, numbers)
    groups = config.num_key_value_heads
    if config.model_type == "llama" and groups is None:
        groups = heads  # older configurations of Llama leave it out
    numbers["groups"] = _required(label, "num_key_value_heads", groups)
    if family.has_experts and name != _MIXTRAL.to_hf:
        numbers["layers"] = _required(label, "num_hidden_layers", config.num_hidden_layers)
        numbers["mla"] = int(config.kv_lora_rank is not None)
        if to == "hf":
            numbers["mtp"] = int(bool(config.num_nextn_predict_layers))
    return Choice(name, numbers)


def _required(label: str, key: str, value: int | None) -> int:
    if value is None or value < 1:
        found = "lacks it" if value is None else f"has {value}"
        raise FormatError(
            f"{label}: the specification needs {key}, but the file {found}: complete the file, or "
            "pass the specification and its numbers as spec=sw.spec(…)"
        )
    return value


def choose_by_arguments(arguments: Mapping[str, Any]) -> Choice | None:
    """Return the specification that fits the arguments of a training with Megatron-LM.

    Several architectures of Hugging Face have the same modules in Megatron-Core, but other names.
    The result is None if the arguments do not say which one it is, or lack a number.

    Args:
        arguments: the arguments by name, for example `num_attention_heads`.
    """
    heads, layers = arguments.get("num_attention_heads"), arguments.get("num_layers")
    padded, vocab = arguments.get("padded_vocab_size"), arguments.get("vocab_size")
    groups = arguments.get("num_query_groups")
    numbers: dict[str, object]
    if not arguments.get("group_query_attention", groups is not None):
        groups = heads
    has_vocabulary = type(vocab) is int
    numbers = {"vocab": vocab if has_vocabulary else padded, "heads": heads, "groups": groups}
    is_gated = bool(arguments.get("swiglu")) and arguments.get("normalization") == "RMSNorm"
    family: Family | None = None
    if arguments.get("softmax_type") == "learnable":
        family = _GPT_OSS
    elif is_gated and not arguments.get("num_experts"):
        family = _LLAMA if not arguments.get("multi_latent_attention") else None
    elif is_gated and (
        arguments.get("qk_layernorm")
        or arguments.get("multi_latent_attention")
        or arguments.get("moe_router_enable_expert_bias")
    ):
        family = _MOE
        numbers["layers"] = layers
        numbers["mla"] = int(bool(arguments.get("multi_latent_attention")))
        numbers["mtp"] = int(bool(arguments.get("mtp_num_layers")))
    known = {name: number for name, number in numbers.items() if type(number) is int}
    if family is None or len(known) < len(numbers):
        return None
    return Choice(family.to_hf, known, vocabulary_is_padded=not has_vocabulary)


def are_of_megatron(names: Iterable[str], model_key: str) -> bool:
    """Return whether a model's tensors have Megatron-Core's names.

    Args:
        names: the names of all tensors of a checkpoint.
        model_key: the key of the model in the checkpoint; "" if it is only a model.
    """
    start = f"{model_key}." if model_key else ""
    parts = tuple(start + part for part in _MEGATRON_PARTS)
    return any(name.startswith(parts) for name in names)
