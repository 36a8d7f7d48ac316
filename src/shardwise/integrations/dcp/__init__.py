"""Save and load through the interface of `torch.distributed.checkpoint` (DCP).

This module can be imported in place of torch's module, because it has all names of torch's module.
It defines the names in `_OWN` itself, and takes all others from torch's module.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch.distributed import checkpoint

from shardwise.integrations.dcp.functions import CheckpointError as CheckpointError
from shardwise.integrations.dcp.functions import async_save as async_save
from shardwise.integrations.dcp.functions import load as load
from shardwise.integrations.dcp.functions import save as save
from shardwise.integrations.dcp.reader import StorageReader as StorageReader
from shardwise.integrations.dcp.writer import StorageWriter as StorageWriter

_OWN = ("CheckpointError", "StorageReader", "StorageWriter", "async_save", "load", "save")
_PUBLIC = {name for name in dir(checkpoint) if not name.startswith("_")}

__all__ = sorted({*_OWN, *_PUBLIC})  # noqa: PLE0605 - a list, of names that depend on torch


def __getattr__(name: str) -> Any:
    if not hasattr(checkpoint, name) and not name.startswith("__"):
        try:  # as `from torch.distributed.checkpoint import state_dict` does
            importlib.import_module(f"{checkpoint.__name__}.{name}")
        except ModuleNotFoundError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return getattr(checkpoint, name)


def __dir__() -> list[str]:
    return __all__
