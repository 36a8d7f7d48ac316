"""Trains a small model with Lightning, in one process or on the ranks of a gang.

`run` appends a line for each optimizer step to the log of its rank: the step and the loss.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import shardwise as sw
from shardwise.data import ElasticBatchSampler
from shardwise.integrations.lightning import ShardwiseCheckpoint

SAMPLES, GLOBAL_BATCH = 40, 4


class Net(LightningModule):
    """A regression with dropout, a scheduler, and Adam."""

    def __init__(self, dropout: float = 0.1, fsdp: bool = False) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(6, 16),
            torch.nn.Tanh(),
            torch.nn.Dropout(dropout),
            torch.nn.Linear(16, 1),
        )
        self.fsdp = fsdp
        self.loss = torch.tensor(0.0)

    def configure_model(self) -> None:
        if self.fsdp:
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        x, y = batch
        self.loss = (self.layers(x) - y).square().mean()
        return self.loss

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        x, y = batch
        self.log("val_loss", (self.layers(x) - y).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


class Log(Callback):
    """Writes the losses, and kills the process after a step."""

    def __init__(self, path: Path, kill_at: int | None) -> None:
        self.path, self.kill_at = path, kill_at

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        loss = module.loss.detach().double()
        if trainer.world_size > 1:
            torch.distributed.all_reduce(loss)
        with self.path.open("a") as file:
            file.write(f"{trainer.global_step} {loss.item() / trainer.world_size!r}\n")

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.kill_at:
            if trainer.world_size > 1:
                torch.distributed.barrier()  # or one rank waits for the other, not yet killed
            os.kill(os.getpid(), signal.SIGKILL)


def make_dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 6, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def run(options: dict[str, Any]) -> None:
    seed_everything(7)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    dataset = make_dataset()
    sampler = ElasticBatchSampler(
        len(dataset), global_batch=GLOBAL_BATCH, rank=rank, world_size=world
    )
    fsdp = options.get("fsdp", False)
    checkpoint = ShardwiseCheckpoint(
        options["root"],
        every_n_train_steps=options.get("every", 3),
        monitor="val_loss",
        save_top_k=2,
        data=sampler,
        memory=sw.Memory(dir=options["shm"]),
        on_divergence="raise",
    )
    strategy: Any = "ddp" if world > 1 else "auto"
    if fsdp:
        strategy = ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1)
    trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy,
        max_epochs=options.get("epochs", 3),
        callbacks=[
            Log(Path(options["log"]), options.get("kill_at")),
            checkpoint,
        ],
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=True,
    )
    model = Net(options.get("dropout", 0.1), fsdp)
    train, validate = DataLoader(dataset, batch_sampler=sampler), DataLoader(dataset, batch_size=20)
    trainer.fit(model, train, validate)
    if rank == 0 and not fsdp:
        torch.save(model.state_dict(), options["log"] + ".weights")


def steps_in(root: str | Path) -> list[int | None]:
    """Return the committed steps of a root."""
    listed = sw.list_checkpoints(root).checkpoints
    return [each.step for each in listed if each.state == "committed"]
