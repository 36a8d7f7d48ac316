"""Train a small model with DeepSpeed in several ways, save each, and write the expected values.

    torchrun --nproc-per-node N train_deepspeed.py DIRECTORY CASE...

For each case, `DIRECTORY/CASE` is a checkpoint, and `DIRECTORY/CASE.expected.pt` has the
parameters, optimizer state and buffers that DeepSpeed itself gathers.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from small_model import Model, optimizer_of
from torch import nn

CASES: dict[str, dict[str, Any]] = {
    "zero0-float32": {"stage": 0},
    "zero0-bfloat16": {"stage": 0, "bf16": True},
    "zero1-float32": {"stage": 1},
    "zero1-bfloat16": {"stage": 1, "bf16": True},
    "zero1-bfloat16-optimizer": {"stage": 1, "bf16": True, "accumulated": "fp32"},
    "zero2-bfloat16": {"stage": 2, "bf16": True},
    "zero2-round-robin": {"stage": 2, "zero": {"round_robin_gradients": True}},
    "zero2-aligned": {"stage": 2, "bf16": True, "zero": {"parameter_alignment": True}},
    "zero2-elastic": {"stage": 2, "zero": {"elastic_checkpoint": True}},
    "zero2-offload": {"stage": 2, "bf16": True, "offload": True},
    "zero2-float16": {"stage": 2, "fp16": True},
    "zero3-float32": {"stage": 3},
    "zero3-bfloat16": {"stage": 3, "bf16": True},
    "zero3-sub-groups": {"stage": 3, "bf16": True, "zero": {"sub_group_size": 20}},
    "zero1-sgd": {"stage": 1, "sgd": True},
}


def config(case: dict[str, Any]) -> dict[str, Any]:
    zero = {"stage": case["stage"], "stage3_param_persistence_threshold": 0}
    zero.update(case.get("zero", {}))
    if case.get("offload"):
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        "bf16": {"enabled": case.get("bf16", False)},
        "fp16": {"enabled": case.get("fp16", False), "initial_scale_power": 4},
        "data_types": {"grad_accum_dtype": case.get("accumulated")},
        "steps_per_print": 10**9,
    }


def train(case: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = Model()
    optimizer = optimizer_of(model, sgd=case.get("sgd", False))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config(case)
    )
    torch.manual_seed(torch.distributed.get_rank())
    for _ in range(3):
        tokens = torch.randint(0, 13, (4,))
        loss = nn.functional.cross_entropy(engine(tokens).float(), tokens)
        engine.backward(loss)
        engine.step()
    return engine


def gathered(engine: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Return the engine's values, gathered with DeepSpeed's functions; on all ranks."""
    if case["stage"] in (1, 2):
        # DeepSpeed looks for state only once: after it has stepped the first group.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    keys = ["momentum_buffer"] if case.get("sgd") else ["exp_avg", "exp_avg_sq"]
    parameters: dict[str, torch.Tensor] = {}
    moments: dict[str, torch.Tensor] = {}
    frozen: dict[str, torch.Tensor] = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=case["stage"] == 3):
            held = parameter.detach().clone()
        if not parameter.requires_grad:
            frozen[name] = held
        elif case["stage"] == 0:
            master, state = without_zero(engine.optimizer, parameter)
            parameters[name] = master.detach().clone()
            moments.update({f"{name}.{key}": state[key].clone() for key in keys})
        elif case.get("zero", {}).get("round_robin_gradients"):
            # DeepSpeed 0.19.8 then gathers the state of other parameters: see `reordered`.
            parameters[name] = held
            moments.update({f"{name}.{k}": reordered(engine.optimizer, parameter, k) for k in keys})
        else:
            parameters[name] = safe_get_full_fp32_param(parameter).clone()
            for key in keys:
                moments[f"{name}.{key}"] = safe_get_full_optimizer_state(parameter, key).clone()
    return {
        "parameters": parameters,
        "moments": moments,
        "frozen": frozen,
        "buffers": {name: value.clone() for name, value in engine.module.named_buffers()},
        "groups": [
            {key: value for key, value in group.items() if key != "params"}
            for group in engine.optimizer.param_groups
        ],
    }


def reordered(optimizer: Any, parameter: torch.Tensor, key: str) -> torch.Tensor:
    """Return the state of a parameter under ZeRO 2 with round-robin gradients."""
    for number, group in enumerate(optimizer.round_robin_bit16_groups):
        own = optimizer.state[optimizer.single_partition_of_fp32_groups[number]][key]
        parts = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(parts, own)
        sizes = [each.numel() for each in group]
        for each, flat in zip(group, torch.cat(parts)[: sum(sizes)].split(sizes), strict=True):
            if each is parameter:
                return flat.view_as(parameter).clone()
    raise LookupError("a parameter that no group has")


def without_zero(optimizer: Any, parameter: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the master weight of a parameter and its state, of which each rank has all."""
    if not hasattr(optimizer, "fp32_groups"):
        return parameter, optimizer.state[parameter]
    for low, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        for weight, master in zip(low, masters, strict=True):
            if weight is parameter:
                return master, optimizer.optimizer.state[master]
    raise LookupError("a parameter that no group has")


def main(directory: Path, names: list[str]) -> None:
    # Otherwise the first start of DeepSpeed on a machine compiles an extension for a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # It also says, wrongly, that CPUs do not support float16.
    type(get_accelerator()).is_fp16_supported = lambda self: True
    deepspeed.init_distributed(dist_backend="gloo")
    for name in names:
        engine = train(CASES[name])
        engine.save_checkpoint(str(directory / name), client_state={"epoch": 7, "note": "hello"})
        expected = gathered(engine, CASES[name])
        if torch.distributed.get_rank() == 0:
            torch.save(expected, directory / f"{name}.expected.pt")
        engine.destroy()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
