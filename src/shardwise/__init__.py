"""Checkpoints of large models: save any sharding, load it into any other.

See `shardwise.save`, `shardwise.load`, `shardwise.open` and `shardwise.Checkpointer`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from shardwise.engine.compile_and_gc import pause_gc
from shardwise.version import VERSION

if TYPE_CHECKING:
    from shardwise.api import load as load
    from shardwise.api import open as open  # noqa: A004
    from shardwise.api import save as save
    from shardwise.boxes import Box as Box
    from shardwise.checkpoint import Checkpoint as Checkpoint
    from shardwise.checkpointer.checkpointer import Checkpointer as Checkpointer
    from shardwise.checkpointer.handle import SaveHandle as SaveHandle
    from shardwise.checks.replica_check import Divergence as Divergence
    from shardwise.convert.export import export as export
    from shardwise.convert.write import ConversionReport as ConversionReport
    from shardwise.engine.group import SoloGroup as SoloGroup
    from shardwise.engine.load import LoadReport as LoadReport
    from shardwise.engine.root import Best as Best
    from shardwise.engine.save import SaveReport as SaveReport
    from shardwise.errors import CheckpointExistsError as CheckpointExistsError
    from shardwise.errors import CheckpointNotFoundError as CheckpointNotFoundError
    from shardwise.errors import CorruptionError as CorruptionError
    from shardwise.errors import FormatError as FormatError
    from shardwise.errors import LayoutError as LayoutError
    from shardwise.errors import LostRankError as LostRankError
    from shardwise.errors import MismatchError as MismatchError
    from shardwise.errors import RankError as RankError
    from shardwise.errors import ShardwiseError as ShardwiseError
    from shardwise.errors import SpecError as SpecError
    from shardwise.errors import StateError as StateError
    from shardwise.errors import StoreError as StoreError
    from shardwise.events import Event as Event
    from shardwise.formats.specification import spec as spec
    from shardwise.frameworks.trainable import trainable as trainable
    from shardwise.listing import ListedCheckpoint as ListedCheckpoint
    from shardwise.listing import Listing as Listing
    from shardwise.listing import list_checkpoints as list_checkpoints
    from shardwise.listing import remove as remove
    from shardwise.memory.agent.node_agent import NodeAgent as NodeAgent
    from shardwise.memory.agent.status import NodeStatus as NodeStatus
    from shardwise.memory.agent.status import RunStatus as RunStatus
    from shardwise.memory.agent.status import SnapshotStatus as SnapshotStatus
    from shardwise.memory.options import Memory as Memory
    from shardwise.memory.options import Tls as Tls
    from shardwise.memory.progress import RunProgress as RunProgress
    from shardwise.ports.checks import Comparison as Comparison
    from shardwise.ports.checks import Damage as Damage
    from shardwise.ports.checks import VerifyReport as VerifyReport
    from shardwise.ports.hooks import RestoreReport as RestoreReport
    from shardwise.ports.hooks import Run as Run
    from shardwise.ports.hooks import RunHook as RunHook
    from shardwise.ranks.tree import TreeGroup as TreeGroup
    from shardwise.reporting.report import Report as Report
    from shardwise.reporting.report import report as report
    from shardwise.retention import Keep as Keep
    from shardwise.saved_tensor import SavedTensor as SavedTensor
    from shardwise.state.local_state import Shards as Shards
    from shardwise.state.per_rank import PerRank as PerRank
    from shardwise.state.rng import RngState as RngState
    from shardwise.tiers.options import Mirror as Mirror

_MODULE_OF_NAME = {
    "Best": "engine.root",
    "Box": "boxes",
    "Checkpoint": "checkpoint",
    "CheckpointExistsError": "errors",
    "CheckpointNotFoundError": "errors",
    "Checkpointer": "checkpointer.checkpointer",
    "Comparison": "ports.checks",
    "ConversionReport": "convert.write",
    "CorruptionError": "errors",
    "Damage": "ports.checks",
    "Divergence": "checks.replica_check",
    "Event": "events",
    "FormatError": "errors",
    "Keep": "retention",
    "LayoutError": "errors",
    "ListedCheckpoint": "listing",
    "Listing": "listing",
    "LoadReport": "engine.load",
    "LostRankError": "errors",
    "MismatchError": "errors",
    "NodeAgent": "memory.agent.node_agent",
    "NodeStatus": "memory.agent.status",
    "PerRank": "state.per_rank",
    "RankError": "errors",
    "Report": "reporting.report",
    "RestoreReport": "ports.hooks",
    "RngState": "state.rng",
    "Run": "ports.hooks",
    "RunHook": "ports.hooks",
    "RunProgress": "memory.progress",
    "RunStatus": "memory.agent.status",
    "SaveHandle": "checkpointer.handle",
    "Memory": "memory.options",
    "Mirror": "tiers.options",
    "SaveReport": "engine.save",
    "SavedTensor": "saved_tensor",
    "Shards": "state.local_state",
    "ShardwiseError": "errors",
    "SnapshotStatus": "memory.agent.status",
    "SoloGroup": "engine.group",
    "TreeGroup": "ranks.tree",
    "SpecError": "errors",
    "StateError": "errors",
    "StoreError": "errors",
    "Tls": "memory.options",
    "VerifyReport": "ports.checks",
    "export": "convert.export",
    "list_checkpoints": "listing",
    "load": "api",
    "open": "api",
    "remove": "listing",
    "report": "reporting.report",
    "save": "api",
    "spec": "formats.specification",
    "trainable": "frameworks.trainable",
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
