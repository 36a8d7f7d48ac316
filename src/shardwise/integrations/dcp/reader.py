"""`StorageReader`: `torch.distributed.checkpoint.load` reads checkpoints of any format with it."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from io import BytesIO
from typing import Any, Literal

import torch
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

import shardwise as sw
from shardwise.integrations.dcp.names import (
    DcpNames,
    names_in_checkpoint,
    names_in_dcp_files,
)
from shardwise.integrations.dcp.writer import check_part

DCP_FORMAT = "PyTorch DCP"


class StorageReader(storage.StorageReader):
    """Reads a checkpoint for `torch.distributed.checkpoint`, with any sharding.

    It reads the checkpoints that `StorageWriter` and `sw.save` write, and the formats of other
    frameworks that `sw.open` reads. Each rank reads only the blocks that it needs, and checks their
    checksums. If the dtype of a tensor differs from the saved dtype, its values are converted, as
    DCP does.

    Example:

        state = {"model": model.state_dict()}
        reader = StorageReader("checkpoints/3")
        torch.distributed.checkpoint.load(state, storage_reader=reader)
        model.load_state_dict(state["model"])

    Args:
        path: a directory or URL with a checkpoint, or the root of a run. `checkpoint_id=`
            replaces it.
        step, verify, spec, skip_unknown, format: as for `sw.open`.
        allow_pickle: unpickle values that were pickled. Use this only for files that you trust.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        step: int | sw.Best | Literal["newest"] = "newest",
        verify: bool = True,
        spec: Any = None,
        skip_unknown: bool = False,
        format: str | None = None,  # noqa: A002 - as in `sw.open`
        allow_pickle: bool = False,
    ) -> None:
        self.path = path
        self._open = partial(
            sw.open,
            step=step,
            verify=verify,
            allow_pickle=allow_pickle,
            spec=spec,
            skip_unknown=skip_unknown,
            format=format,
        )
        self._has_spec = spec is not None
        self._opened: tuple[sw.Checkpoint, DcpNames] | None = None
        self._refusal: Exception | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this is a path or URL. A load says whether there is a checkpoint."""
        return isinstance(checkpoint_id, (str, os.PathLike))

    @property
    def checkpoint_id(self) -> str:
        """The path or URL of the checkpoint."""
        return str(self.path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load, from `checkpoint_id` if this is given."""
        self._opened = None
        if checkpoint_id:
            self.path = checkpoint_id

    def read_metadata(self) -> Metadata:
        """Open the checkpoint, and return its tensors and values under the names of DCP.

        Each tensor has one chunk, whatever its sharding was when it was saved.

        Raises:
            CheckpointNotFoundError, FormatError: as for `sw.open`.
        """
        self._refusal = None
        try:
            return self._read_metadata()
        except Exception as error:
            self._refusal = error
            raise

    def take_refusal(self) -> Exception | None:
        """Return why `read_metadata` failed, once: DCP catches that, and asserts a result."""
        refusal, self._refusal = self._refusal, None
        return refusal

    def _read_metadata(self) -> Metadata:
        checkpoint = self._open(self.path)
        names = names_in_checkpoint(checkpoint)
        if checkpoint.layout.format == DCP_FORMAT and not self._has_spec:
            names = names_in_dcp_files(names, checkpoint.path, checkpoint)
        self._opened = checkpoint, names  # the checkpoint is locked while it is open
        tensors = checkpoint.tensors()
        described = {
            name: BytesStorageMetadata()
            if name in names.values
            else _describe(tensors[names.tensors[name]])
            for name in names.paths
        }
        return Metadata(
            described,
            planner_data=dict(names.paths),
            storage_meta=StorageMeta(self.checkpoint_id, save_id=checkpoint.layout.save_id),
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: `read_metadata` has opened the checkpoint."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan with the checkpoint that this rank has opened."""
        if self._opened is None:
            return plan
        checkpoint, _ = self._opened
        return replace(plan, storage_data=(checkpoint.layout.save_id, checkpoint.path))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged.

        Raises:
            MismatchError: ranks have opened different checkpoints.
        """
        opened = [plan.storage_data or ("", "") for plan in plans]
        if len({save_id for save_id, _ in opened}) > 1:
            raise sw.MismatchError(
                "ranks do not load the same checkpoint. Pass the same checkpoint_id on all ranks; "
                "if another process saves there, load the directory of one step:",
                [f"rank {rank}: {place}" for rank, (_, place) in enumerate(opened)],
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of a plan, and give its values to the planner.

        Raises:
            CorruptionError: bytes differ from the saved bytes. The state is partly written.
            MismatchError: a tensor of the plan does not fit the checkpoint.
            StateError: a value cannot be restored.
            StoreError, OSError: the storage failed.
        """
        if self._opened is None:
            raise sw.StateError(
                f"{self.checkpoint_id}: no load is running; DCP calls read_metadata first"
            )
        (checkpoint, names), self._opened = self._opened, None
        _read_tensors(checkpoint, names, plan, planner)
        _read_values(checkpoint, names, plan, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future


def _read_tensors(
    checkpoint: sw.Checkpoint, names: DcpNames, plan: LoadPlan, planner: LoadPlanner
) -> None:
    """Fill the tensors of a plan."""
    items = [item for item in plan.items if item.type == LoadItemType.TENSOR]
    targets = [planner.resolve_tensor(item).detach() for item in items]
    parts = []
    for item, target in zip(items, targets, strict=True):
        fqn = item.storage_index.fqn
        name = names.tensors.get(fqn, "")
        box = sw.Box(tuple(item.storage_offsets), tuple(item.lengths))
        saved = checkpoint.get(name)
        if saved is None or not sw.Box.whole(tuple(saved.shape)).contains(box):
            has = "no tensor" if saved is None else f"the saved tensor has shape {[*saved.shape]}"
            raise _lacking(checkpoint, f"{fqn}{box}", has)
        if tuple(target.shape) != box.shape:
            raise sw.MismatchError(
                f"{checkpoint.path}: the planner resolved an item to another shape:",
                [f"{fqn}{box}: a tensor of shape {list(target.shape)}"],
            )
        check_part(fqn, planner, tuple(saved.shape), box, within=True)
        parts.append((name, box, target))
    checkpoint.read_parts(parts, cast=True)
    for item, target in zip(items, targets, strict=True):
        planner.commit_tensor(item, target)


def _read_values(
    checkpoint: sw.Checkpoint, names: DcpNames, plan: LoadPlan, planner: LoadPlanner
) -> None:
    """Give the values of a plan to the planner."""
    objects: dict[str, Any] = {}
    for item in plan.items:
        if item.type != LoadItemType.BYTE_IO:
            continue
        place = names.values.get(item.storage_index.fqn)
        if place is None:
            raise _lacking(checkpoint, item.storage_index.fqn, "no plain value")
        if place.object_name not in objects:
            value = checkpoint[place.object_name]
            # A value that is itself a NumPy array is stored as a tensor.
            is_array = isinstance(value, sw.SavedTensor)
            objects[place.object_name] = value.tensor().numpy() if is_array else value
        data = BytesIO()
        torch.save(place.find(objects[place.object_name], checkpoint.path), data)
        data.seek(0)
        planner.load_bytes(item, data)


def _lacking(checkpoint: sw.Checkpoint, requested: str, has: str) -> sw.MismatchError:
    summary = (
        f"{checkpoint.path}: the planner requests what the checkpoint lacks; leave it out of the "
        "state_dict, or pass a planner with allow_partial_load=True:"
    )
    return sw.MismatchError(summary, [f"{requested}: {has}"])


def _describe(saved: sw.SavedTensor) -> TensorStorageMetadata:
    whole = ChunkStorageMetadata(torch.Size([0] * saved.ndim), saved.shape)
    return TensorStorageMetadata(TensorProperties(dtype=saved.dtype), saved.shape, [whole])
