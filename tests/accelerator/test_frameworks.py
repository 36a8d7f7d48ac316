"""accelerate, transformers and Lightning train on the device, and resume bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shardwise as sw
from shardwise.data import ElasticBatchSampler

SAVED, END = 4, 9


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(80, 6, generator=generator))


@pytest.mark.parametrize("precision", ["no", "fp16", "bf16"])
def test_accelerate(precision: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from shardwise.integrations.accelerate import load_state, save_state

    def train(seed: int, last: int) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
        AcceleratorState._reset_state(True)
        accelerator = Accelerator(mixed_precision=precision)
        assert accelerator.device.type == "cuda"
        torch.manual_seed(seed)
        model: Any = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.3), nn.Linear(32, 6))
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        loader: Any = DataLoader(dataset(), 8)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        losses = {}
        with sw.Checkpointer(tmp_path / "run", save_every=SAVED, memory=None) as checkpointer:
            step = load_state(accelerator, checkpointer) or 0
            for (batch,) in accelerator.skip_first_batches(loader, step):
                loss = model(batch).float().square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                losses[step] = loss.item()
                save_state(accelerator, checkpointer, step)
                if step == last:
                    break
        return losses, {name: each.clone() for name, each in model.state_dict().items()}

    whole, _ = train(1, END)
    shutil.rmtree(tmp_path / "run")
    train(1, SAVED)
    resumed, _ = train(2, END)
    assert resumed == {step: loss for step, loss in whole.items() if step > SAVED}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_trainer_of_transformers(precision: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

    from shardwise.integrations.transformers import ShardwiseTrainer

    def train(output: str, last: int, resume: bool) -> dict[int, float]:
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=2, n_head=2,
                            bos_token_id=0, eos_token_id=0)  # fmt: skip
        model = GPT2LMHeadModel(config)
        rows = torch.randint(64, (80, 8), generator=torch.Generator().manual_seed(0))
        arguments = TrainingArguments(
            output_dir=str(tmp_path / output), max_steps=last, save_steps=SAVED, logging_steps=1,
            per_device_train_batch_size=8, report_to="none", disable_tqdm=True, learning_rate=0.01,
            lr_scheduler_type="constant", bf16=precision == "bf16", fp16=precision == "fp16",
        )  # fmt: skip
        data = [{"input_ids": row, "labels": row} for row in rows]
        trainer = ShardwiseTrainer(model, arguments, train_dataset=data)
        assert trainer.args.device.type == "cuda"
        trainer.train(resume_from_checkpoint=resume)
        history = trainer.state.log_history
        return {each["step"]: each["loss"] for each in history if "loss" in each}

    whole = train("whole", END, False)
    train("part", SAVED, False)
    resumed = train("part", END, True)
    assert len(resumed) == END
    assert resumed == whole


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
def test_lightning(precision: str, tmp_path: Path, shm: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from shardwise.integrations.lightning import ShardwiseCheckpoint
    from tests.integrations.lightning_program import Net

    class Recorder(lightning.Callback):
        def __init__(self) -> None:
            self.losses: dict[int, float] = {}

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            self.losses[trainer.global_step] = module.loss.item()

    def train(root: str, seed: int, last: int) -> dict[int, float]:
        lightning.seed_everything(seed)
        recorder = Recorder()
        memory = sw.Memory(dir=str(shm / root))
        data = dataset().tensors[0]
        sampler = ElasticBatchSampler(len(data), global_batch=8, rank=0, world_size=1)
        checkpoint = ShardwiseCheckpoint(
            tmp_path / root, every_n_train_steps=SAVED, memory=memory, data=sampler
        )
        trainer = lightning.Trainer(
            accelerator="gpu", devices=1, max_steps=last, precision=precision, logger=False,
            callbacks=[recorder, checkpoint], enable_progress_bar=False,
            enable_model_summary=False, use_distributed_sampler=False,
        )  # fmt: skip
        pairs = TensorDataset(data, data.sum(1, keepdim=True))
        trainer.fit(Net(0.3), DataLoader(pairs, batch_sampler=sampler))
        return recorder.losses

    whole = train("whole", 1, END)
    train("part", 1, SAVED)
    resumed = train("part", 2, END)
    assert resumed == {step: loss for step, loss in whole.items() if step > SAVED}
