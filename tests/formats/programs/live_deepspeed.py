"""Save live engines of DeepSpeed, and continue from checkpoints of others.

    torchrun --nproc-per-node N live_deepspeed.py DIRECTORY JOB...

A job `NAME:CASE` trains, and saves `DIRECTORY/NAME` and, with DeepSpeed, `DIRECTORY/NAME-native`. A
job `NAME:CASE:SOURCE` loads `DIRECTORY/SOURCE`, and saves `DIRECTORY/NAME` before the next step.
Each job also writes `NAME.expected.pt`: the values that DeepSpeed gathers from the engine, and the
next losses. For a pipeline, these are `NAME.expected-RANK.pt` with the values of each rank.
Pipelines must be the last jobs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from parallel_deepspeed import CASES as PARALLEL
from parallel_deepspeed import held as list_own_files
from parallel_deepspeed import train_pipeline
from small_model import Model, optimizer_of, scheduler_of, tokens_of
from torch import nn
from train_deepspeed import CASES, MUON, config, gathered, muon_of

import shardwise as sw

MORE = {
    "zero0-float16": {"stage": 0, "fp16": True},
    "zero0-fused": {"stage": 0, "bf16": True, "fused": True},
    "zero0-muon": {"stage": 0, "muon": True},
    "zero2-muon": {"stage": 2, "muon": True},
    "zero2-muon-float32-offload": {"stage": 2, "muon": True, "offload": True},
    "zero3-muon": {"stage": 3, "muon": True, "zero": {"reduce_scatter": False}},
    "zero3-muon-memory": {
        "stage": 3,
        "muon": True,
        "zero": {"reduce_scatter": False, "save_muon_momentum_buffer_in_memory": True},
    },
    "zero3-persistent": {
        "stage": 3,
        "bf16": True,
        "zero": {"stage3_param_persistence_threshold": 20},
    },
}
FUSED = deepspeed.runtime.engine.FusedAdam


def engine_of(case: dict[str, Any], seed: int) -> Any:
    torch.manual_seed(seed)
    model = Model()
    optimizer = (
        muon_of(model) if case.get("muon") else optimizer_of(model, sgd=case.get("sgd", False))
    )
    # DeepSpeed flattens only master weights of its own fused Adam, which must be compiled first.
    deepspeed.runtime.engine.FusedAdam = torch.optim.AdamW if case.get("fused") else FUSED
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=scheduler_of(optimizer),
        # Without this, DeepSpeed clips gradients, and the others do not.
        config={**config(case), "gradient_clipping": 0.0},
    )
    return engine


def step(engine: Any) -> float:
    """Train one step on data that is the same on all ranks, so that their number has no effect."""
    tokens = tokens_of(engine.lr_scheduler.last_epoch)
    loss = nn.functional.cross_entropy(engine(tokens).float(), tokens)
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def module_of(engine: Any, case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights that the module computes with."""
    held = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=case["stage"] == 3):
            held[name] = parameter.detach().clone()
    return held


def do(directory: Path, name: str, case: dict[str, Any], source: str) -> None:
    engine = engine_of(case, seed=1 if source else 0)
    state = {"model": engine, "optimizer": engine.optimizer, "scheduler": engine.lr_scheduler}
    if source:
        sw.load(directory / source, state, cast=True)
    else:
        for _ in range(3):
            step(engine)
        engine.save_checkpoint(str(directory / f"{name}-native"))
    sw.save(directory / name, state, check_replicas=True)
    # DeepSpeed gathers nothing from flat master weights without ZeRO.
    has_none = case.get("fused") or case.get("muon")
    held = {"parameters": {}} if has_none else gathered(engine, case)
    held |= {"module": module_of(engine, case)}
    held["counts"] = [engine.global_steps, engine.global_samples, engine.lr_scheduler.last_epoch]
    held["scale"] = engine.optimizer.loss_scale if case.get("fp16") else None
    held["losses"] = [step(engine) for _ in range(2)]
    if torch.distributed.get_rank() == 0:
        torch.save(held, directory / f"{name}.expected.pt")
    engine.destroy()


def do_pipeline(directory: Path, name: str, case: dict[str, Any], source: str) -> None:
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    engine = train_pipeline(case)
    state = {"model": engine, "optimizer": engine.optimizer}
    if source:
        sw.load(directory / source, state)
    sw.save(directory / name, state, check_replicas=True)
    torch.save(list_own_files(engine), directory / f"{name}.expected-{rank}.pt")


def main(directory: Path, jobs: list[str]) -> None:
    # As in train_deepspeed.py.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    type(get_accelerator()).is_fp16_supported = lambda self: True
    deepspeed.init_distributed(dist_backend="gloo")
    for job in jobs:
        name, case, source = [*job.split(":"), ""][:3]
        if case in PARALLEL:
            do_pipeline(directory, name, PARALLEL[case], source)
        else:
            do(directory, name, {**CASES, **MUON, **MORE}[case], source)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
