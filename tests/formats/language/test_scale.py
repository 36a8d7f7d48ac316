"""Checking the specification of a very large checkpoint is arithmetic over columns."""

from __future__ import annotations

import time
from itertools import product
from pathlib import Path

from shardwise.parts.formats.reader import Builder, FileTree, StoredArray
from shardwise.parts.formats.specification import add_by_specification

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


Row = tuple[str, StoredArray, tuple[int, int, int]]


def simulated(layers: int) -> list[Row]:
    """The arrays of ranks of tp × pp × dp, with so many layers each, and their three states."""
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
    return [
        (
            name,
            StoredArray.contiguous(f"{tp}-{pp}-{dp}.pt", at * 2**20, "bfloat16", shape),
            (tp, pp, dp),
        )
        for tp, pp, dp in product(range(TP), range(PP), range(DP))
        for at, (name, shape, only) in enumerate(arrays)
        if only in (-1, pp)
    ]


def test_a_trillion_parameters_on_4096_ranks(tmp_path: Path) -> None:
    """A tenth of its arrays, in half of the time that all may take."""
    rows = simulated(layers=1)
    builder = Builder(FileTree(tmp_path))
    begin = time.process_time()
    add_by_specification(builder, "megatron_llama", {"tp": TP, "pp": PP, "dp": DP}, rows, SIZES)
    spent = time.process_time() - begin
    assert len(rows) > 120_000
    tensors = list(builder.tensor_names())
    assert len(tensors) == PP * (2 + len(LAYER) + 1) * (len(STATES) + 2) + 3
    assert spent < 5  # 1.5 s where nothing else runs
