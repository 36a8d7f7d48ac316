"""Specifications that ship: checkpoints of their models, read by them."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import pytest

import shardwise as sw
from tests.formats.language.rankfiles import Array, Ranks, opened, read, same

LAYERS, GROUPS, PER, DIM, WIDTH, INNER, VOCAB = 4, 2, 3, 2, 5, 6, 11
TP, PP = 2, 2
LAYER = "decoder.layers.{}."
SEED = np.random.default_rng(4)


def some(*shape: int) -> Array:
    return SEED.integers(2**31, size=shape, dtype=np.int32)


def halves(array: Array, dim: int = 0) -> list[Array]:
    return [part.copy() for part in np.split(array, TP, axis=dim)]


def with_states(ranks: Mapping[tuple[int, ...], dict[str, Array]]) -> Ranks:
    """With two states of an optimizer for each parameter, which differ from it and each other."""
    for arrays in ranks.values():
        for name, array in list(arrays.items()):
            arrays[f"optimizer.{name}.exp_avg"] = array ^ 1
            arrays[f"optimizer.{name}.step"] = np.array(7, np.float32)
    return ranks


def test_what_ships() -> None:
    of_megatron = "megatron_gpt2, megatron_gpt_oss, megatron_llama, megatron_mixtral, megatron_moe"
    shipped = f"(gpt_oss_to_megatron, llama_to_megatron, {of_megatron}, moe_to_megatron)"
    with pytest.raises(sw.StateError, match=f"nor a built-in specification {re.escape(shipped)}"):
        sw.spec("of_nobody")


def megatron_llama() -> tuple[Ranks, dict[str, Array]]:
    """Parameters of Llama, and as Megatron divides them; written out, as it does."""
    whole = {"model.embed_tokens.weight": some(VOCAB, WIDTH), "model.norm.weight": some(WIDTH)}
    whole["lm_head.weight"] = some(VOCAB, WIDTH)
    ranks: dict[tuple[int, ...], dict[str, Array]] = {
        (t, p): {} for t in range(TP) for p in range(PP)
    }
    padding = np.zeros((1, WIDTH), np.int32)
    for t in range(TP):
        embed = np.concatenate([whole["model.embed_tokens.weight"], padding])
        head = np.concatenate([whole["lm_head.weight"], padding])
        ranks[t, 0]["embedding.word_embeddings.weight"] = halves(embed)[t]
        ranks[t, 1]["output_layer.weight"] = halves(head)[t]
        ranks[t, 1]["decoder.final_layernorm.weight"] = whole["model.norm.weight"]
    for layer in range(LAYERS):
        to, own = f"model.layers.{layer}.", LAYER.format(layer % (LAYERS // PP))
        stage = layer // (LAYERS // PP)
        q, k, v = (some(GROUPS, n, DIM, WIDTH) for n in (PER, 1, 1))
        gate, up, down = some(INNER, WIDTH), some(INNER, WIDTH), some(WIDTH, INNER)
        out, norms = some(WIDTH, GROUPS * PER * DIM), [some(WIDTH), some(WIDTH)]
        for letter, array in zip("qkv", (q, k, v), strict=True):
            whole[f"{to}self_attn.{letter}_proj.weight"] = array.reshape(-1, WIDTH)
        whole[f"{to}self_attn.o_proj.weight"] = out
        for name, array in (("gate", gate), ("up", up), ("down", down)):
            whole[f"{to}mlp.{name}_proj.weight"] = array
        whole[f"{to}input_layernorm.weight"] = norms[0]
        whole[f"{to}post_attention_layernorm.weight"] = norms[1]
        for t in range(TP):
            group = np.concatenate([q[t], k[t], v[t]]).reshape(-1, WIDTH)
            fc1 = np.concatenate([halves(gate)[t], halves(up)[t]])
            ranks[t, stage] |= {
                f"{own}self_attention.linear_qkv.weight": group,
                f"{own}self_attention.linear_qkv.layer_norm_weight": norms[0],
                f"{own}self_attention.linear_proj.weight": halves(out, 1)[t],
                f"{own}mlp.linear_fc1.weight": fc1,
                f"{own}mlp.linear_fc1.layer_norm_weight": norms[1],
                f"{own}mlp.linear_fc2.weight": halves(down, 1)[t],
            }
    return with_states(ranks), whole


def test_megatron_llama() -> None:
    ranks, whole = megatron_llama()
    sizes = {"vocab": VOCAB, "heads": GROUPS * PER, "groups": GROUPS}
    found = read("megatron_llama", {"tp": TP, "pp": PP}, ranks, **sizes)
    assert len(found) == 3 * len(whole)
    for name, array in whole.items():
        same(found[f"model.{name}"], array)
        same(found[f"optimizer.{name}.exp_avg"], array ^ 1)
        same(found[f"optimizer.{name}.step"], np.array(7, np.float32))


def test_a_head_that_is_not_stored_is_the_embedding() -> None:
    ranks, whole = megatron_llama()
    for arrays in ranks.values():
        for name in [name for name in arrays if "output_layer" in name]:
            del arrays[name]
    sizes = {"vocab": VOCAB, "heads": GROUPS * PER, "groups": GROUPS}
    with opened("megatron_llama", {"tp": TP, "pp": PP}, ranks, **sizes) as found:
        entries = {entry.name: entry.same_as for entry in found.layout.tensors}
        assert entries["model.lm_head.weight"] == "model.model.embed_tokens.weight"
        same(found["model.lm_head.weight"][...], whole["model.embed_tokens.weight"])


def test_megatron_gpt2_fuses_otherwise_and_transposes() -> None:
    heads, own = 4, LAYER.format(0) + "self_attention."
    qkv, out = some(heads, 3, DIM, WIDTH), some(WIDTH, heads * DIM)
    parts = halves(qkv.reshape(-1, WIDTH))
    ranks = {
        (t, p): {
            f"{own}linear_qkv.weight": parts[t] + p,
            f"{own}linear_qkv.bias": parts[t][:, 0] + p,
            f"{own}linear_proj.weight": halves(out, 1)[t] + p,
        }
        | ({} if p else {"embedding.word_embeddings.weight": halves(some(12, WIDTH))[t]})
        for t in range(TP)
        for p in range(PP)
    }
    found = read("megatron_gpt2", {"tp": TP, "pp": PP}, ranks, vocab=VOCAB, heads=heads)
    wanted = qkv.transpose(3, 1, 0, 2).reshape(WIDTH, -1)
    for p in range(PP):
        same(found[f"model.transformer.h.{p}.attn.c_attn.weight"], wanted + p)
        same(found[f"model.transformer.h.{p}.attn.c_attn.bias"], wanted[0] + p)
        same(found[f"model.transformer.h.{p}.attn.c_proj.weight"], out.T + p)


def test_megatron_mixtral_has_experts_on_two_axes() -> None:
    experts = [(some(INNER, WIDTH), some(WIDTH, INNER), some(INNER, WIDTH)) for _ in range(4)]
    own = LAYER.format(0) + "mlp."
    ranks: dict[tuple[int, ...], dict[str, Array]] = {}
    for t in range(TP):
        for e in range(2):
            arrays = {f"{own}router.weight": experts[0][0][:4]}
            for local in range(2):
                w1, w2, w3 = experts[2 * e + local]
                fc1 = np.concatenate([halves(w1)[t], halves(w3)[t]])
                arrays[f"{own}experts.linear_fc1.weight{local}"] = fc1
                arrays[f"{own}experts.linear_fc2.weight{local}"] = halves(w2, 1)[t]
            ranks[t, e] = {**arrays, "embedding.word_embeddings.weight": some(6, WIDTH)}
    for e in range(2):
        for t in range(TP):
            ranks[t, e]["embedding.word_embeddings.weight"] = ranks[t, 0][
                "embedding.word_embeddings.weight"
            ]
    sizes = {"vocab": VOCAB, "heads": 4, "groups": 2}
    found = read("megatron_mixtral", {"tp": TP, "ep": 2}, ranks, **sizes)
    to = "model.model.layers.0.block_sparse_moe."
    same(found[f"{to}gate.weight"], experts[0][0][:4])
    for e, arrays_ in enumerate(experts):
        for name, array in zip(("w1", "w2", "w3"), arrays_, strict=True):
            same(found[f"{to}experts.{e}.{name}.weight"], array)
