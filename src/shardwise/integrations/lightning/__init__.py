"""Checkpoints of PyTorch Lightning: a callback for whole runs, and a plugin for single files."""

from __future__ import annotations

try:
    import lightning  # noqa: F401
except ImportError as error:
    raise ImportError(
        "shardwise.integrations.lightning needs Lightning: pip install 'lightning>=2.5'"
    ) from error

from shardwise.integrations.lightning.callback import ShardwiseCheckpoint
from shardwise.integrations.lightning.plugin import ShardwiseCheckpointIO

__all__ = ["ShardwiseCheckpoint", "ShardwiseCheckpointIO"]
