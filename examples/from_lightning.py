"""Resume a Lightning run in plain PyTorch, from the file that Lightning saves by default.

python examples/from_lightning.py --root runs/a \
    --start "lightning_logs/version_0/checkpoints/epoch=0-step=10.ckpt"
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import shardwise as sw

WITHOUT_MODULE = """
model.net.*     -> model.*
optimizer.net.* -> optimizer.*
*               -> *
"""  # removes the name of the LightningModule's attribute


class Net(nn.Module):
    """The network that the LightningModule held as its attribute `net`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def batch(step: int) -> Tensor:
    """Return the inputs of a step."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def compute_loss(net: nn.Module, inputs: Tensor) -> Tensor:
    """Return the squared error against the mean of the inputs."""
    return (net(inputs) - inputs.mean(dim=1, keepdim=True)).square().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--start", required=True, help="Lightning's checkpoint")
    parser.add_argument("--root", required=True, help="directory of this run's checkpoints")
    parser.add_argument("--steps", type=int, default=20, help="train until this step")
    options = parser.parse_args()

    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
    state = {"model": net, "optimizer": optimizer, "scheduler": scheduler}

    def start(state: dict[str, object]) -> sw.LoadReport:
        return sw.load(options.start, state, spec=sw.spec(WITHOUT_MODULE))

    # With memory=None each save waits for the disk. By default, saves run in the background.
    with sw.Checkpointer(options.root, save_every=5, memory=None, start_from=start) as checkpointer:
        step = checkpointer.restore(state) or 0  # at first Lightning's own step, here 10
        while step < options.steps:
            compute_loss(net, batch(step)).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            checkpointer.save(step, state)


if __name__ == "__main__":
    main()
