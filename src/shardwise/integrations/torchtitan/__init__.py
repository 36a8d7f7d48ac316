"""A back end for the checkpoints of torchtitan 0.3 or later: `ShardwiseCheckpointManager`."""

from __future__ import annotations

try:
    import torchtitan.components.checkpointer  # noqa: F401
except ImportError as error:
    raise ImportError(
        "shardwise.integrations.torchtitan needs torchtitan 0.3 or later: pip install torchtitan"
    ) from error

from shardwise.integrations.torchtitan.manager import ShardwiseCheckpointManager

__all__ = ["ShardwiseCheckpointManager"]
