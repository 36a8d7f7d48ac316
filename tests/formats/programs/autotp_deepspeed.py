"""Train a small Llama with AutoTP of DeepSpeed on two ranks: DIRECTORY KEY_VALUE_HEADS STAGE...

It writes `DIRECTORY/zero<STAGE>` for each ZeRO stage. The learning rate is 0, so the weights do not
change. `DIRECTORY/expected.pt` has the weights, and the moments of the same step in one process.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,  # `main` sets it
    max_position_embeddings=64,
)


def build() -> tuple[Any, torch.optim.Optimizer, torch.Tensor]:
    """Return a model, its optimizer, and a batch, which are the same on all ranks."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    return model, torch.optim.AdamW(model.parameters(), lr=0.0), torch.randint(0, 32, (2, 16))


def expected() -> dict[str, dict[str, torch.Tensor]]:
    """Return the weights, and the moments after a step."""
    model, optimizer, batch = build()
    model(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()
    moments = {name: optimizer.state[p]["exp_avg"] for name, p in model.named_parameters()}
    return {"weights": model.state_dict(), "moments": moments}


def save(place: Path, stage: int) -> None:
    """Train a step under tensor parallelism, and save a checkpoint."""
    model, optimizer, batch = build()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "tensor_parallel": {"autotp_size": 2},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(engine(input_ids=batch, labels=batch).loss)
    engine.step()
    engine.save_checkpoint(str(place))
    engine.destroy()


def main(directory: Path, heads: int, stages: list[int]) -> None:
    CONFIG.num_key_value_heads = heads
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    for stage in stages:
        save(directory / f"zero{stage}", stage)
    if torch.distributed.get_rank() == 0:
        torch.save(expected(), directory / "expected.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), [int(stage) for stage in sys.argv[3:]])
