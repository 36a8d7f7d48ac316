"""Train with pipelines and experts of DeepSpeed, save, and write the values of each rank.

    torchrun --nproc-per-node N parallel_deepspeed.py DIRECTORY CASE...

For each case, `DIRECTORY/CASE` is a checkpoint, and `DIRECTORY/CASE.expected-RANK.pt` has the
parameters and the optimizer state of a rank. DeepSpeed gathers them over the ranks that share them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

CASES = {
    "pipeline-zero1": {"stage": 1, "pipeline": True},
    "pipeline-bfloat16": {"stage": 1, "pipeline": True, "bf16": True, "accumulated": "fp32"},
    "pipeline-bfloat16-zero0": {"stage": 0, "pipeline": True, "bf16": True},
    "experts-zero1": {"stage": 1},
    "experts-zero2-bfloat16": {"stage": 2, "bf16": True},
}


class Embedding(nn.Embedding):
    """An embedding whose weight is also that of the last layer."""


def logits(embedding: nn.Embedding, x: torch.Tensor) -> torch.Tensor:
    return x @ embedding.weight.t()


class WithExperts(nn.Module):
    """A layer of four experts between two other layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        expert = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 6))
        self.experts = MoE(hidden_size=6, expert=expert, num_experts=4, ep_size=2, k=1)
        self.last = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _, _ = self.experts(self.first(x))
        return self.last(y)


def config(case: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": case["stage"]},
        "bf16": {"enabled": case.get("bf16", False)},
        "data_types": {"grad_accum_dtype": case.get("accumulated")},
        "steps_per_print": 10**9,
    }


def train_pipeline(case: dict[str, Any]) -> Any:
    layers = [
        TiedLayerSpec("embed", Embedding, 13, 5, tied_weight_attr="weight"),
        LayerSpec(nn.Linear, 5, 7),
        LayerSpec(nn.Linear, 7, 5),
        TiedLayerSpec("embed", Embedding, 13, 5, tied_weight_attr="weight", forward_fn=logits),
    ]
    model = PipelineModule(
        layers,
        num_stages=2,
        loss_fn=loss,
        partition_method="uniform",
        activation_checkpoint_interval=0,
    )
    groups = [{"params": [p for p in model.parameters() if p.requires_grad], "lr": 1e-2}]
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(groups), config=config(case)
    )
    tokens = [torch.randint(0, 13, (4,)) for _ in range(3)]
    batches = iter([(each, each) for each in tokens])
    for _ in tokens:
        engine.train_batch(batches)
    return engine


def loss(outputs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.float(), tokens)


def train_experts(case: dict[str, Any]) -> Any:
    model = WithExperts()
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "all"}
    )
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(groups, lr=1e-2), config=config(case)
    )
    for _ in range(3):
        x = torch.randn(4, 5).to(next(model.parameters()).dtype)
        engine.backward(engine(x).float().pow(2).mean())
        engine.step()
    return engine


def held(engine: Any) -> dict[str, torch.Tensor]:
    engine.optimizer._hp_optimizer_states_linked = False
    engine.optimizer._lazy_init_hp_params_optimizer_state()
    found = {}
    for name, parameter in engine.module.named_parameters():
        found[f"model.{name}"] = safe_get_full_fp32_param(parameter).clone()
        for key in ("exp_avg", "exp_avg_sq"):
            state = safe_get_full_optimizer_state(parameter, key)
            found[f"optimizer.{name}.{key}"] = state.clone()
    return found


def main(directory: Path, names: list[str]) -> None:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    rank = torch.distributed.get_rank()
    for name in names:
        case = CASES[name]
        torch.manual_seed(rank)
        engine = (train_pipeline if case.get("pipeline") else train_experts)(case)
        engine.save_checkpoint(str(directory / name))
        torch.save(held(engine), directory / f"{name}.expected-{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
