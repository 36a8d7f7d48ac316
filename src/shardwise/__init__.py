"""Checkpoints of large models: save any sharding, load it into any other.

See `shardwise.save`, `shardwise.load`, `shardwise.open` and `shardwise.Checkpointer`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from shardwise.kernel.engine.compile_and_gc import pause_gc
from shardwise.kernel.version import VERSION

if TYPE_CHECKING:
    from shardwise.checkpointer.checkpointer import Checkpointer as Checkpointer
    from shardwise.checkpointer.handle import SaveHandle as SaveHandle
    from shardwise.kernel.api import load as load
    from shardwise.kernel.api import open as open  # noqa: A004
    from shardwise.kernel.api import save as save
    from shardwise.kernel.boxes import Box as Box
    from shardwise.kernel.checkpoint import Checkpoint as Checkpoint
    from shardwise.kernel.engine.group import SoloGroup as SoloGroup
    from shardwise.kernel.engine.load import LoadReport as LoadReport
    from shardwise.kernel.engine.root import Best as Best
    from shardwise.kernel.engine.save import SaveReport as SaveReport
    from shardwise.kernel.errors import CheckpointExistsError as CheckpointExistsError
    from shardwise.kernel.errors import CheckpointNotFoundError as CheckpointNotFoundError
    from shardwise.kernel.errors import CorruptionError as CorruptionError
    from shardwise.kernel.errors import FormatError as FormatError
    from shardwise.kernel.errors import LayoutError as LayoutError
    from shardwise.kernel.errors import LostRankError as LostRankError
    from shardwise.kernel.errors import MismatchError as MismatchError
    from shardwise.kernel.errors import RankError as RankError
    from shardwise.kernel.errors import ShardwiseError as ShardwiseError
    from shardwise.kernel.errors import SpecError as SpecError
    from shardwise.kernel.errors import StateError as StateError
    from shardwise.kernel.errors import StoreError as StoreError
    from shardwise.kernel.events import Event as Event
    from shardwise.kernel.saved_tensor import SavedTensor as SavedTensor
    from shardwise.kernel.state.local_state import Shards as Shards
    from shardwise.kernel.state.per_rank import PerRank as PerRank
    from shardwise.kernel.state.rng import RngState as RngState
    from shardwise.parts.checks.replica_check import Divergence as Divergence
    from shardwise.parts.convert.export import export as export
    from shardwise.parts.convert.write import ConversionReport as ConversionReport
    from shardwise.parts.formats.specification import spec as spec
    from shardwise.parts.frameworks.trainable import trainable as trainable
    from shardwise.parts.listing import ListedCheckpoint as ListedCheckpoint
    from shardwise.parts.listing import Listing as Listing
    from shardwise.parts.listing import list_checkpoints as list_checkpoints
    from shardwise.parts.listing import remove as remove
    from shardwise.parts.memory.agent.node_agent import NodeAgent as NodeAgent
    from shardwise.parts.memory.agent.status import NodeStatus as NodeStatus
    from shardwise.parts.memory.agent.status import RunStatus as RunStatus
    from shardwise.parts.memory.agent.status import SnapshotStatus as SnapshotStatus
    from shardwise.parts.memory.options import Memory as Memory
    from shardwise.parts.memory.options import Tls as Tls
    from shardwise.parts.memory.progress import RunProgress as RunProgress
    from shardwise.parts.ranks.tree import TreeGroup as TreeGroup
    from shardwise.parts.reporting.report import Report as Report
    from shardwise.parts.reporting.report import report as report
    from shardwise.parts.retention import Keep as Keep
    from shardwise.parts.tiers.options import Mirror as Mirror
    from shardwise.ports.checks import Comparison as Comparison
    from shardwise.ports.checks import Damage as Damage
    from shardwise.ports.checks import VerifyReport as VerifyReport
    from shardwise.ports.hooks import RestoreReport as RestoreReport
    from shardwise.ports.hooks import Run as Run
    from shardwise.ports.hooks import RunHook as RunHook

_MODULE_OF_NAME = {
    "Best": "kernel.engine.root",
    "Box": "kernel.boxes",
    "Checkpoint": "kernel.checkpoint",
    "CheckpointExistsError": "kernel.errors",
    "CheckpointNotFoundError": "kernel.errors",
    "Checkpointer": "checkpointer.checkpointer",
    "Comparison": "ports.checks",
    "ConversionReport": "parts.convert.write",
    "CorruptionError": "kernel.errors",
    "Damage": "ports.checks",
    "Divergence": "parts.checks.replica_check",
    "Event": "kernel.events",
    "FormatError": "kernel.errors",
    "Keep": "parts.retention",
    "LayoutError": "kernel.errors",
    "ListedCheckpoint": "parts.listing",
    "Listing": "parts.listing",
    "LoadReport": "kernel.engine.load",
    "LostRankError": "kernel.errors",
    "MismatchError": "kernel.errors",
    "NodeAgent": "parts.memory.agent.node_agent",
    "NodeStatus": "parts.memory.agent.status",
    "PerRank": "kernel.state.per_rank",
    "RankError": "kernel.errors",
    "Report": "parts.reporting.report",
    "RestoreReport": "ports.hooks",
    "RngState": "kernel.state.rng",
    "Run": "ports.hooks",
    "RunHook": "ports.hooks",
    "RunProgress": "parts.memory.progress",
    "RunStatus": "parts.memory.agent.status",
    "SaveHandle": "checkpointer.handle",
    "Memory": "parts.memory.options",
    "Mirror": "parts.tiers.options",
    "SaveReport": "kernel.engine.save",
    "SavedTensor": "kernel.saved_tensor",
    "Shards": "kernel.state.local_state",
    "ShardwiseError": "kernel.errors",
    "SnapshotStatus": "parts.memory.agent.status",
    "SoloGroup": "kernel.engine.group",
    "TreeGroup": "parts.ranks.tree",
    "SpecError": "kernel.errors",
    "StateError": "kernel.errors",
    "StoreError": "kernel.errors",
    "Tls": "parts.memory.options",
    "VerifyReport": "ports.checks",
    "export": "parts.convert.export",
    "list_checkpoints": "parts.listing",
    "load": "kernel.api",
    "open": "kernel.api",
    "remove": "parts.listing",
    "report": "parts.reporting.report",
    "save": "kernel.api",
    "spec": "parts.formats.specification",
    "trainable": "parts.frameworks.trainable",
}

__all__ = sorted(_MODULE_OF_NAME)  # noqa: PLE0605 - a list, sorted from the one place that names them
__version__ = VERSION


def __getattr__(name: str) -> object:
    module = _MODULE_OF_NAME.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with pause_gc():
        value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*_MODULE_OF_NAME, "__version__"])
