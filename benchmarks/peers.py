"""Background saves of other libraries. Libraries that are not installed are skipped."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import DTensor

try:
    import torch_checkpointing
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
except ImportError:
    torch_checkpointing = None
try:
    import torchsnapshot
except ImportError:
    torchsnapshot = None

Tensors = dict[str, torch.Tensor]


def nothing() -> None:
    """Do nothing, where there is nothing to wait for."""


@dataclass(frozen=True)
class Begun:
    """A save in progress: `staged` waits until tensors may change, `result` until the end."""

    result: Callable[[], object]
    staged: Callable[[], object] = nothing


@dataclass(frozen=True)
class Peer:
    """One way to save: `begin` starts a save; `load` fills tensors of the same sharding."""

    begin: Callable[[Path], Begun]
    load: Callable[[Path, Tensors], object]


def peers(tensors: Tensors, cleanup: ExitStack) -> dict[str, Peer]:
    """Return all installed peers, each used as intended for these tensors."""
    found = by_dcp(tensors, cleanup)
    if torch_checkpointing is not None:
        found["torch_checkpointing"] = by_torch_checkpointing(tensors, cleanup)
    if torchsnapshot is not None:
        found["torchsnapshot, async_take"] = by_torchsnapshot(tensors)
    absent = {"torch_checkpointing": torch_checkpointing, "torchsnapshot": torchsnapshot}
    if dist.get_rank() == 0:
        for name in (name for name, module in absent.items() if module is None):
            print(f"{name} is not installed: skipped (`make peers` installs it)", flush=True)
    return found


def local(tensors: Tensors) -> Tensors:
    """Return this rank's part of each tensor."""
    return {n: t.to_local() if isinstance(t, DTensor) else t for n, t in tensors.items()}


def by_dcp(tensors: Tensors, cleanup: ExitStack) -> dict[str, Peer]:
    """Return DCP's ways: the default, with reused memory, with a background copy, with a process.

    DCP's threads communicate during the training, so they use a separate group.
    """
    group = dist.new_group(backend="gloo")

    def stager(*, in_background: bool) -> DefaultStager:
        made = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=True,
                use_async_staging=in_background,
                use_non_blocking_copy=False,
            )
        )
        cleanup.callback(made.close)
        return made

    def peer(kind: AsyncCheckpointerType, stager: DefaultStager | None = None) -> Peer:
        def begin(path: Path) -> Begun:
            options: dict[str, Any] = {} if stager is None else {"async_stager": stager}
            saved: Any = dcp.async_save(
                {"model": tensors},
                checkpoint_id=path,
                process_group=group,
                async_checkpointer_type=kind,
                **options,
            )
            if hasattr(saved, "staging_completion"):
                return Begun(saved.upload_completion.result, saved.staging_completion.result)
            return Begun(saved.result)

        def load(path: Path, target: Tensors) -> None:
            dcp.load({"model": target}, checkpoint_id=path)

        return Peer(begin, load)

    thread, process = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
    return {
        "dcp.async_save, thread": peer(thread),
        "dcp.async_save, thread, reused buffers": peer(thread, stager(in_background=False)),
        "dcp.async_save, thread, reused buffers, async staging": peer(
            thread, stager(in_background=True)
        ),
        "dcp.async_save, process": peer(process),
    }


def by_torch_checkpointing(tensors: Tensors, cleanup: ExitStack) -> Peer:
    """Return torch_checkpointing's background save, buffered: its direct writes fail on ext4."""
    config = torch_checkpointing.CheckpointManager.Config.with_async_save()
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    manager = config.build()
    cleanup.callback(manager.close)

    def staged() -> None:
        with manager.lock():
            pass

    def begin(path: Path) -> Begun:
        return Begun(manager.save(str(path), {"model": local(tensors)}).result, staged)

    return Peer(begin, lambda path, target: manager.load(path, into={"model": local(target)}))


def by_torchsnapshot(tensors: Tensors) -> Peer:
    """Return torchsnapshot's asynchronous take of this rank's part of each tensor."""

    def begin(path: Path) -> Begun:
        state = {"model": torchsnapshot.StateDict(**local(tensors))}
        return Begun(torchsnapshot.Snapshot.async_take(str(path), state).wait)

    def load(path: Path, target: Tensors) -> None:
        state = {"model": torchsnapshot.StateDict(**local(target))}
        torchsnapshot.Snapshot(str(path)).restore(state)

    return Peer(begin, load)
