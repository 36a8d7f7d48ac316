"""Checking the specification of a very large checkpoint is arithmetic over columns."""

from __future__ import annotations

import time

import numpy as np

from shardwise.formats.foreign import Catalogue
from shardwise.formats.language import apply_spec
from shardwise.formats.specs import load_builtin

TP, PP, DP = 8, 64, 8
WIDTH, HEADS, GROUPS, DIM, INNER, VOCAB = 25600, 160, 8, 160, 65536, 128000
QKV = (HEADS // GROUPS + 2) * DIM * GROUPS // TP
LAYER = {
    "self_attention.linear_qkv.layer_norm_weight": (WIDTH,),
    "self_attention.linear_qkv.weight": (QKV, WIDTH),
    "self_attention.linear_proj.weight": (WIDTH, HEADS * DIM // TP),
    "mlp.linear_fc1.layer_norm_weight": (WIDTH,),
    "mlp.linear_fc1.weight": (2 * INNER // TP, WIDTH),
    "mlp.linear_fc2.weight": (WIDTH, INNER // TP),
}
STATES = ("exp_avg", "exp_avg_sq", "master")
SIZES = {"vocab": VOCAB, "heads": HEADS, "groups": GROUPS}


def simulated(layers: int) -> Catalogue:
    """Ranks of tp × pp × dp, each with so many layers, and three states for each parameter."""
    arrays: list[tuple[str, tuple[int, ...], int]] = []
    for i in range(layers):
        for suffix, shape in LAYER.items():
            name = f"decoder.layers.{i}.{suffix}"
            arrays.append((name, shape, -1))
            arrays += [(f"optimizer.{name}.{state}", shape, -1) for state in STATES]
            arrays.append((f"optimizer.{name}.step", (), -1))
    arrays += [
        ("embedding.word_embeddings.weight", (VOCAB // TP, WIDTH), 0),
        ("decoder.final_layernorm.weight", (WIDTH,), PP - 1),
        ("output_layer.weight", (VOCAB // TP, WIDTH), PP - 1),
    ]
    world = TP * PP * DP
    rank = np.arange(world)
    stage = rank // DP % PP
    held = [rank if only < 0 else rank[stage == only] for _, _, only in arrays]
    name = np.repeat(np.arange(len(arrays)), [len(ranks) for ranks in held])
    of = np.concatenate(held)
    shape = np.array([(*s, *(1,) * (2 - len(s))) for _, s, _ in arrays])
    stride = np.array([(s[1] if len(s) > 1 else len(s), len(s) // 2) for _, s, _ in arrays])
    return Catalogue(
        {"tp": TP, "pp": PP, "dp": DP},
        [own for own, _, _ in arrays],
        ["bfloat16"],
        name,
        np.zeros_like(name),
        of,
        np.arange(len(name)) * 2**20,
        np.array([len(s) for _, s, _ in arrays])[name],
        shape[name],
        stride[name],
        np.column_stack([of // DP // PP, stage[of], of % DP]),
    )


def test_a_trillion_parameters_on_4096_ranks() -> None:
    """A tenth of its arrays, in half of the time that all may take."""
    catalogue = simulated(layers=1)
    begin = time.process_time()
    foreign = apply_spec(load_builtin("megatron_llama"), catalogue, sizes=SIZES)
    spent = time.process_time() - begin
    assert len(catalogue) > 120_000
    assert len(foreign.tensors) == PP * (2 + len(LAYER) + 1) * (len(STATES) + 2) + 3
    assert spent < 5  # 0.3 s where nothing else runs
