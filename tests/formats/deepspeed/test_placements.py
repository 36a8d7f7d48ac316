"""Tensor-parallel shards, joined as DeepSpeed's patterns say, against torch.cat and chunk."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.kernel.errors import FormatError
from shardwise.kernel.manifest.layout import Layout
from shardwise.kernel.manifest.validate import validate_layout
from shardwise.parts.formats.file_tree import FileTree
from shardwise.parts.formats.readers.deepspeed import reader
from shardwise.parts.formats.readers.deepspeed.tensor_parallel import (
    Placement,
    parse_placement_rule,
)
from tests.formats.deepspeed.test_native import same
from tests.formats.foreign_goldens import describe
from tests.formats.reference import read_tensors, read_terms

INFO: dict[str, Any] = {
    "universal_checkpoint_version": 0.4,
    "original_vocab_size": 11,
    "vocabulary_parameter_patterns": [r"embed\.weight"],
    "tp_replicated_parameter_patterns": [r".*norm\.weight", r"plain"],
    "parameter_to_average_patterns": [r"bias"],
    "parameter_with_row_parallelism_patterns": [r".*down\.weight"],
    "parameter_with_2_sub_params_cat_dim_0": [r".*gate_up\.weight"],
    "parameter_with_sub_params": [
        {"patterns": [r".*qkv\.weight"], "shape": ((8, 3, 3), -1), "partition_dim": 0}
    ],
    "sub_param_shard_widths": {r".*qkv\.weight": [[4, 4], [2, 1], [1, 2]]},
}
FULL = {
    "embed.weight": (11, 3),
    "0.norm.weight": (5,),
    "0.qkv.weight": (14, 5),
    "0.gate_up.weight": (12, 5),
    "0.down.weight": (5, 6),
    "0.up.weight": (6, 5),
    "bias": (5,),
}


def shards_of(name: str, full: torch.Tensor) -> list[torch.Tensor]:
    """The shards of two ranks, by DeepSpeed's rules."""
    if name == "embed.weight":
        padded = torch.cat([full, torch.full((1, 3), 9.0)])
        return list(padded.chunk(2))
    if name.endswith("norm.weight"):
        return [full, full.clone()]
    if name == "bias":
        return [full - 1, full + 1]
    if name.endswith("down.weight"):
        return list(full.chunk(2, dim=1))
    parts = [full]
    widths = [[len(full) // 2] * 2]
    if name.endswith("gate_up.weight"):
        parts, widths = list(full.chunk(2)), [[3, 3], [3, 3]]
    elif name.endswith("qkv.weight"):
        parts, widths = list(full.split([8, 3, 3])), [[4, 4], [2, 1], [1, 2]]
    cut = [part.split(row) for part, row in zip(parts, widths, strict=True)]
    return [torch.cat([each[rank] for each in cut]) for rank in range(2)]


def boxes(placement: Placement, shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """A parameter put together by its placement."""
    made = torch.full(placement.shape, math.nan)
    for rank in range(1 if placement.replicated else len(shards)):
        for box, there in placement.parts[rank]:
            to = tuple(slice(o, o + n) for o, n in zip(there, box.shape, strict=True))
            made[to] = shards[rank][box.slices()]
    return made


@pytest.mark.parametrize("name", [name for name in FULL if name != "bias"])
def test_shards_are_placed_where_they_come_from(name: str) -> None:
    full = torch.randn(FULL[name])
    shards = shards_of(name, full)
    placement = parse_placement_rule(INFO, "here")(name, [tuple(shard.shape) for shard in shards])
    assert torch.equal(boxes(placement, shards), full)
    assert placement.replicated == name.endswith("norm.weight")


def flat_state(groups: Sequence[torch.Tensor], rank: int, ranks: int) -> list[torch.Tensor]:
    """What a data-parallel rank has of the parameters of a group, as ZeRO 1 cuts them."""
    flat = torch.cat([each.reshape(-1) for each in groups])
    padded = torch.cat([flat, torch.zeros(-len(flat) % (2 * ranks))])
    return list(padded.chunk(ranks))[rank : rank + 1]


def write(place: Path, full: dict[str, torch.Tensor], edit: Callable[[Any], None]) -> None:
    """Files as DeepSpeed writes them: two tensor-parallel by two data-parallel ranks, ZeRO 1."""
    folder = place / "global_step1"
    folder.mkdir(parents=True)
    (place / "latest").write_text("global_step1")
    for tensor_rank in range(2):
        shards = {name: shards_of(name, each)[tensor_rank] for name, each in full.items()}
        state = {
            "module": {name: shard.bfloat16() for name, shard in shards.items()},
            "buffer_names": [],
            "optimizer": None,
            "param_shapes": [{name: shard.shape for name, shard in shards.items()}],
            "frozen_param_shapes": None,
            "frozen_param_fragments": None,
            "shared_params": {},
            "lr_scheduler": None,
            "global_steps": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 2},
            "universal_checkpoint_info": dict(INFO),
        }
        edit(state)
        torch.save(state, folder / f"mp_rank_{tensor_rank:02}_model_states.pt")
        for rank in range(2):
            weights = flat_state(list(shards.values()), rank, 2)
            moments = {"step": torch.tensor(1.0), "exp_avg": weights[0] * 2}
            held = {
                "base_optimizer_state": {
                    "state": {0: moments},
                    "param_groups": [{"lr": 0.1, "params": [0]}],
                },
                "single_partition_of_fp32_groups": weights,
                "partition_count": [2],
            }
            name = f"bf16_zero_pp_rank_{rank}_mp_rank_{tensor_rank:02}_optim_states.pt"
            torch.save({"optimizer_state_dict": held}, folder / name)


@pytest.fixture
def full() -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape) for name, shape in FULL.items()}


def read(place: Path) -> Layout:
    return validate_layout(describe(reader, FileTree(place)))


def test_divided_both_ways_it_is_put_together(
    tmp_path: Path, full: dict[str, torch.Tensor]
) -> None:
    write(tmp_path, full, lambda state: None)
    foreign = read(tmp_path)
    tensors = read_tensors(tmp_path, foreign)
    for name, tensor in full.items():
        if name != "bias":
            assert same(tensors[f"model.{name}"], tensor), name
            assert same(tensors[f"optimizer.{name}.exp_avg"], tensor * 2), name
            assert same(tensors[f"module.{name}"], tensor.bfloat16()), name
            assert same(tensors[f"optimizer.{name}.step"], torch.tensor(1.0))
    names = [entry.name for entry in foreign.tensors]
    first, second = read_terms(tmp_path, foreign, names.index("model.bias"))
    assert same(first, full["bias"] - 1)
    assert same(second, full["bias"] + 1)
    assert names.index("model.0.norm.weight") in foreign.replicas.tensor
    assert foreign.world_size == 4


def test_without_patterns_it_asks_how(tmp_path: Path, full: dict[str, torch.Tensor]) -> None:
    write(tmp_path, full, lambda state: state.pop("universal_checkpoint_info"))
    with pytest.raises(FormatError, match="`universal_checkpoint_info` in client_state"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tp_replicated_parameter_patterns": ["embed"]}, "should have the same shape"),
        ({"parameter_with_row_parallelism_patterns": [r"0\.up"]}, "do not join along dimension 1"),
        ({"original_vocab_size": None}, "original_vocab_size is missing"),
        ({"original_vocab_size": 13}, "fewer rows than the original vocabulary, 13"),
        ({"sub_param_shard_widths": {r".*qkv\.weight": [[8, 0], [2, 1], [1, 2]]}}, "widths"),
        (
            {"sub_param_shard_widths": {r".*qkv\.weight": [[8], [3], [3]]}},
            "should have 2 widths for each",
        ),
        (
            {"parameter_with_sub_params": [{"patterns": ["x"]}]},
            "not a valid value of partition_dim",
        ),
        (
            {"parameter_with_sub_params": [{"partition_dim": 1, "shape": [4]}]},
            "partition_dim is 1, but the shape has 1 dimensions",
        ),
        ({"vocabulary_parameter_patterns": ["("]}, "not a valid pattern"),
        ({"vocabulary_parameter_patterns": ["(a+)+b"]}, "too many repetitions"),
        ({"vocabulary_parameter_patterns": "embed"}, "not a valid value of vocabulary_param"),
        ({"autotp_unsupported_parameter_patterns": ["bias"]}, "cannot be joined"),
        ({"autotp_unsupported_parameter_patterns": {"bias": "uneven"}}, "cannot be joined"),
    ],
)
def test_what_does_not_fit_is_told(change: dict[str, Any], said: str) -> None:
    shapes = {
        name: [tuple(s.shape) for s in shards_of(name, torch.zeros(FULL[name]))] for name in FULL
    }
    if "tp_replicated_parameter_patterns" in change:
        shapes["embed.weight"] = [(6, 3), (5, 3)]
    if "parameter_with_row_parallelism_patterns" in change:
        shapes["0.up.weight"] = [(3, 5), (2, 5)]

    def place_all() -> None:
        place = parse_placement_rule({**INFO, **change}, "here")
        for name in FULL:
            place(name, shapes[name])

    with pytest.raises(FormatError, match=said):
        place_all()
