"""Resume a training run that torch.distributed.checkpoint saved as in PyTorch's tutorial.

The tutorial wraps model and optimizer in an `AppState` under the key "app". Here a dict under the
same key is enough. The number of ranks may differ.

torchrun --standalone --nproc-per-node 2 examples/from_dcp.py --dcp checkpoint --root runs/a
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwise as sw


class ToyModel(nn.Module):
    """The model of the tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(16, 16)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.net2(self.relu(self.net1(x)))


def build_model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model, sharded over all ranks by FSDP2, and its optimizer."""
    torch.manual_seed(0)
    model = ToyModel()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Train one step; the batch depends only on the step and is the same on all ranks."""
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    model(inputs).sum().backward()
    optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dcp", required=True, help="checkpoint written by the tutorial's script")
    parser.add_argument("--dcp-step", type=int, default=0, help="step of that checkpoint")
    parser.add_argument("--root", required=True, help="directory of this run's checkpoints")
    parser.add_argument("--steps", type=int, default=20, help="train until this step")
    options = parser.parse_args()
    dist.init_process_group("gloo")

    model, optimizer = build_model_and_optimizer()
    state = {"model": model, "optimizer": optimizer, "epoch": 0}  # "epoch" is new

    def start(_: object) -> sw.LoadReport:
        # step=: the tutorial does not save the step.
        app = {"model": model, "optim": optimizer}
        return sw.load(options.dcp, {"app": app}, step=options.dcp_step)

    # With memory=None each save waits for the disk. By default, saves run in the background.
    with sw.Checkpointer(options.root, save_every=5, memory=None, start_from=start) as checkpointer:
        step = checkpointer.restore(state) or 0
        while step < options.steps:
            train_step(model, optimizer, step)
            step += 1
            checkpointer.save(step, state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
