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
from small_model import FrozenModel, Model, optimizer_of
from torch import nn

FUSED = deepspeed.runtime.engine.FusedAdam
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
MUON: dict[str, dict[str, Any]] = {
    "zero1-muon": {"stage": 1, "muon": True},
    "zero2-muon-bfloat16": {"stage": 2, "muon": True, "bf16": True},
    "zero2-muon-offload": {"stage": 2, "muon": True, "bf16": True, "offload": True},
    "zero2-muon-aligned": {"stage": 2, "muon": True, "zero": {"parameter_alignment": True}},
    "zero2-muon-elastic": {"stage": 2, "muon": True, "zero": {"elastic_checkpoint": True}},
}
"""DeepSpeed's own Muon, which keeps the momentum of whole matrices on several ranks. DeepSpeed
0.19.8 cannot load what it saves with elastic_checkpoint."""

FROZEN: dict[str, dict[str, Any]] = {
    "float32": {"stage": 0, "frozen": Model},
    "float32-alike": {"stage": 0, "frozen": FrozenModel},
    "bfloat16": {"stage": 0, "frozen": FrozenModel, "bf16": True},
    "bfloat16-flat": {"stage": 0, "frozen": FrozenModel, "bf16": True, "flat": True},
    "float16-flat": {"stage": 0, "frozen": FrozenModel, "fp16": True, "flat": True},
}
"""Frozen parameters without ZeRO, in both param groups. `flat`: master weights are flattened."""


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


def muon_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return DeepSpeed's own Muon, as its configuration `"type": "Muon"` makes it."""
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.use_muon = parameter.dim() > 1
    matrices, others = ([p for p in trained if p.use_muon is use] for use in (True, False))
    muon = {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}
    adam = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
    groups = [
        {"params": matrices, "use_muon": True, **muon},
        {"params": others, "use_muon": False, **adam},
    ]
    return MuonWithAuxAdam(groups)


def optimizer_over(model: nn.Module, case: dict[str, Any]) -> torch.optim.Optimizer:
    """Return an optimizer with two param groups, of matrices and of vectors."""
    # DeepSpeed flattens only master weights of its own fused Adam, which must be compiled first.
    deepspeed.runtime.engine.FusedAdam = torch.optim.AdamW if case.get("flat") else FUSED
    members = [*model.parameters()]
    groups = [
        {"params": [p for p in members if p.dim() > 1], "lr": 1e-2, "weight_decay": 0.1},
        {"params": [p for p in members if p.dim() <= 1], "lr": 3e-3, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups)


def start(case: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    if "frozen" in case:
        model = case["frozen"]()
        settings = {"optimizer": optimizer_over(model, case), "config": config(case)}
        return deepspeed.initialize(model=model, **settings)[0]
    model = Model()
    if case.get("muon"):
        settings = {"optimizer": muon_of(model), "config": config(case)}
        return deepspeed.initialize(model=model, **settings)[0]
    optimizer = optimizer_of(model, sgd=case.get("sgd", False))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    return deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config(case)
    )[0]


def train(case: dict[str, Any]) -> Any:
    engine = start(case)
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


def restored_by_muon(engine: Any) -> dict[str, Any]:
    """Return what DeepSpeed restored on all ranks. Equal copies of a momentum count once."""
    optimizer, world = engine.optimizer, torch.distributed.get_world_size()
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    held: dict[str, torch.Tensor] = {}
    for index, flat in enumerate(optimizer.single_partition_of_fp32_groups):
        momentum = optimizer.optimizer.state[flat].get("momentum_buffer")
        own = optimizer.params_in_partition[index]
        if momentum is not None and sum(each.numel() for each in own) == momentum.numel():
            for each, part in zip(own, momentum.split([p.numel() for p in own]), strict=True):
                held[names[id(each)]] = part.view_as(each).clone()
    of_ranks: list[Any] = [None] * world
    torch.distributed.all_gather_object(of_ranks, held)
    moments: dict[str, torch.Tensor] = {}
    for name, part in (item for each in of_ranks for item in each.items()):
        assert torch.equal(moments.setdefault(f"{name}.momentum_buffer", part), part), name
    return moments


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
    if hasattr(optimizer, "fp32_groups_flat"):
        for low, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
            start = 0
            for weight in low:
                if weight is parameter:
                    flat = {**optimizer.optimizer.state[masters], "master": masters}
                    part = slice(start, start + weight.numel())
                    own = {k: v[part].view_as(weight) for k, v in flat.items() if v.dim()}
                    return own.pop("master"), own
                start += weight.numel()
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
        case = {**CASES, **MUON, **FROZEN}[name]
        engine = train(case)
        engine.save_checkpoint(str(directory / name), client_state={"epoch": 7, "note": "hello"})
        if name in MUON:
            engine.destroy()
            engine = start(case)
            if not case.get("zero", {}).get("elastic_checkpoint"):
                assert engine.load_checkpoint(str(directory / name))[0], name
            expected = {"moments": restored_by_muon(engine)}
        else:
            expected = gathered(engine, case)
        if torch.distributed.get_rank() == 0:
            torch.save(expected, directory / f"{name}.expected.pt")
        engine.destroy()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
