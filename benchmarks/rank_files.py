"""Make checkpoints of many small tensors in the files of 64 ranks, in three formats."""

from __future__ import annotations

from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

RANKS = 64
TENSOR_PARALLEL = STAGES = 8
STATES = ("exp_avg", "exp_avg_sq")
HYPERPARAMETERS = torch.optim.AdamW([torch.zeros(1)]).defaults
PATTERN = "mp_rank_{tp}_{pp}.pt"
SPEC = """
ranks tp pp
model.layers.{i}.{w*} -> model.layers.{pp i}.{w*} [(tp f) h]
optimizer.layers.{i}.{w*}.{state} -> optimizer.layers.{pp i}.{w*}.{state} [(tp f) h]
"""


def shapes_of(parameters: int, *, first: int = 0) -> dict[str, torch.Size]:
    """Return the shapes of a model's parameters by name, six for each layer."""
    sizes = cycle([(64, 64), (64,), (128, 64), (64, 96), (96,), (32, 64)])
    numbers = range(first, first + parameters)
    return {
        f"layers.{i // 6}.block.w{i % 6}.weight": torch.Size(shape)
        for i, shape in zip(numbers, islice(sizes, parameters), strict=True)
    }


def by_dcp(place: Path, tensors: int) -> None:
    """Save a model and AdamW's state with DCP, flattened as by `get_optimizer_state_dict`."""
    shapes = shapes_of(tensors // 4)
    model = {name: torch.zeros(shape) for name, shape in shapes.items()}
    optimizer: dict[str, Any] = {}
    for name, shape in shapes.items():
        optimizer[f"state.{name}.step"] = torch.tensor(3.0)
        optimizer |= {f"state.{name}.{state}": torch.zeros(shape) for state in STATES}
        optimizer |= {f"param_groups.{name}.{key}": v for key, v in HYPERPARAMETERS.items()}
    writer = dcp.FileSystemWriter(place, thread_count=RANKS, sync_files=False)
    dcp.save({"model": model, "optimizer": optimizer}, storage_writer=writer, no_dist=True)


def by_deepspeed(place: Path, tensors: int) -> None:
    """Write a ZeRO-3 checkpoint like DeepSpeed 0.19.8, with one frozen parameter in ten."""
    frozen = shapes_of(tensors // 10)
    trained = shapes_of((tensors - len(frozen)) // 4, first=len(frozen))
    own = sum(-(-shape.numel() // RANKS) for shape in trained.values())
    folder = place / "global_step3"
    folder.mkdir(parents=True)
    (place / "latest").write_text(folder.name)
    group = {**HYPERPARAMETERS, "params": [0]}
    for rank in range(RANKS):
        model = {
            "module": {name: torch.zeros(0, dtype=torch.bfloat16) for name in trained | frozen},
            "buffer_names": [],
            "optimizer": None,
            "param_shapes": [trained],
            "frozen_param_shapes": frozen,
            "frozen_param_fragments": {
                name: torch.zeros(-(-shape.numel() // RANKS)) for name, shape in frozen.items()
            },
            "shared_params": {},
            "dp_world_size": RANKS,
            "mp_world_size": 1,
            "global_steps": 3,
            "ds_config": {"zero_optimization": {"stage": 3}},
            "ds_version": "0.19.8",
        }
        torch.save(model, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        state = {"step": torch.tensor(3.0), **{key: torch.zeros(own) for key in STATES}}
        optimizer = {
            "partition_count": RANKS,
            "optimizer_state_dict": {"state": {0: state}, "param_groups": [group]},
            "fp32_flat_groups": [torch.zeros(own)],
        }
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer, "ds_version": "0.19.8"}, folder / name)


def by_ranks(place: Path, tensors: int) -> None:
    """Save with torch.save: a file for each of 8 tensor-parallel ranks of 8 pipeline stages."""
    place.mkdir()
    names = list(shapes_of(tensors // STAGES // (1 + len(STATES))))
    for rank in range(RANKS):
        model = {name: torch.zeros(8, 64) for name in names}
        optimizer = {name: {key: torch.zeros(8, 64) for key in STATES} for name in names}
        tensor, stage = divmod(rank, STAGES)
        state = {"model": model, "optimizer": optimizer, "iteration": 3}
        torch.save(state, place / PATTERN.format(tp=tensor, pp=stage))
