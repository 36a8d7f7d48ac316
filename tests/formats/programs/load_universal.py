"""Load universal checkpoints into engines of DeepSpeed, and write the values of each engine.

    torchrun --nproc-per-node N load_universal.py DIRECTORY CHECKPOINT=CASE...

The cases are those of `train_deepspeed.py`. The values are in `DIRECTORY/CHECKPOINT.loaded.pt`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import deepspeed
import torch
from small_model import Model, optimizer_of
from train_deepspeed import CASES, config, gathered


def main(directory: Path, pairs: list[str]) -> None:
    # Otherwise the first start of DeepSpeed on a machine compiles an extension for a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    for checkpoint, name in (pair.split("=") for pair in pairs):
        torch.manual_seed(5)
        model = Model()
        optimizer = optimizer_of(model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=scheduler,
            config=config(CASES[name]) | {"checkpoint": {"load_universal": True}},
        )
        _, client = engine.load_checkpoint(str(directory / checkpoint))
        loaded = gathered(engine, CASES[name])
        loaded |= {"client": client, "steps": engine.global_steps, "epoch": scheduler.last_epoch}
        loaded["state"] = [
            float(state["step"]) for state in engine.optimizer.optimizer.state.values()
        ]
        if torch.distributed.get_rank() == 0:
            torch.save(loaded, directory / f"{checkpoint}.loaded.pt")
        engine.destroy()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
