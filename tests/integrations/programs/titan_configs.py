"""A config registry for torchtitan, as a user writes one."""

from __future__ import annotations

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from shardwise.integrations.torchtitan import ShardwiseCheckpointManager


def debug_model() -> Trainer.Config:
    """The debug model with torchtitan's own checkpoints."""
    config = llama3_debugmodel()
    config.checkpoint = CheckpointManager.Config(
        enable=True, interval=2, last_save_model_only=False
    )
    config.training.seq_len = 32
    config.training.local_batch_size = 4
    config.optimizer.implementation = "foreach"
    config.parallelism.spmd_backend = "partial_dtensor"
    return config


def debug_model_with_shardwise() -> Trainer.Config:
    """The debug model with shardwise's checkpoints."""
    config = debug_model()
    config.checkpoint = ShardwiseCheckpointManager.Config(
        enable=True, interval=2, last_save_model_only=False
    )
    return config
