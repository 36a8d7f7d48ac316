"""Make DeepSpeed checkpoints: `torchrun --nproc-per-node N zero.py DIRECTORY BLOCKS STAGE...`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

STAGES = (1, 2, 3)
STEPS = 2
TAG = f"global_step{STEPS}"
PARALLEL = ("RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_")
"""Prefixes of the environment variables that torchrun sets."""


class Model(nn.Module):
    """A model of blocks with two linear layers, 2.1 million parameters each."""

    def __init__(self, blocks: int, width: int = 512) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            )
            for _ in range(blocks)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def engine_of(stage: int, blocks: int, *, universal: bool = False) -> Any:
    """Return a DeepSpeed engine in bf16; `universal`: one that loads universal checkpoints."""
    # Otherwise DeepSpeed compiles an extension at its first start, which takes a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    model = Model(blocks)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        "checkpoint": {"load_universal": universal},
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def make(directory: Path, blocks: int, *stages: int, ranks: int = 2) -> None:
    """Train and save in other processes, under each of these ZeRO stages."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", __file__, str(directory), str(blocks)]
    run([*command, *map(str, stages)])


def to_universal(place: Path) -> tuple[float, int]:
    """Run the conversion that DeepSpeed needs before it can resume with other ranks.

    Returns:
        The seconds that it took and the bytes that it read, without the start of its process.
    """
    program = [sys.executable, str(Path(__file__).with_name("universal.py"))]
    folders = [f"--input_folder={place / TAG}", f"--output_folder={place / 'universal'}"]
    seconds, read = run([*program, *folders, "--inject_missing_state"]).split()[-2:]
    return float(seconds), int(read)


def run(command: list[str]) -> str:
    """Run a program without torchrun's environment variables and return its output."""
    kept = {name: v for name, v in os.environ.items() if not name.startswith(PARALLEL)}
    done = subprocess.run(command, env=kept, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command}: exit status {done.returncode}: {done.stderr[-4000:]}")
    return done.stdout


def main(directory: Path, blocks: int, stages: list[int]) -> None:
    torch.set_num_threads(1)
    for stage in stages:
        torch.manual_seed(0)
        engine = engine_of(stage, blocks)
        for _ in range(STEPS):
            x = torch.randn(1, 512, dtype=torch.bfloat16)
            engine.backward(engine(x).float().square().mean())
            engine.step()
        engine.save_checkpoint(str(directory / f"zero{stage}"), tag=TAG)
        engine.destroy()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), [int(stage) for stage in sys.argv[3:]])
