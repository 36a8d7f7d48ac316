"""Make the checkpoints of lightning.tar.xz, with Lightning 2.6.6.

python -m tests.compat.foreign.make_lightning FOLDER
tar cJf tests/compat/foreign/lightning.tar.xz -C FOLDER .
"""

from __future__ import annotations

import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from examples.from_lightning import Net, batch, compute_loss


class Module(lightning.LightningModule):
    """The net of the example as a LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, inputs: Tensor) -> Tensor:
        return compute_loss(self.net, inputs)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def main(folder: Path) -> None:
    lightning.seed_everything(0)
    every = ModelCheckpoint(dirpath=folder, save_top_k=-1, every_n_train_steps=10)
    trainer = lightning.Trainer(
        max_steps=20, accelerator="cpu", callbacks=[every], logger=False, enable_progress_bar=False
    )
    batches = [batch(step) for step in range(20)]
    trainer.fit(Module(), torch.utils.data.DataLoader(batches, batch_size=None))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
