"""Save and load through the interface of `torch.distributed.checkpoint` (DCP)."""

from __future__ import annotations

from shardwise.integrations.dcp.functions import async_save, load, save
from shardwise.integrations.dcp.reader import StorageReader
from shardwise.integrations.dcp.writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter", "async_save", "load", "save"]
